//! What an aggregator keeps on disk, so that one that was killed can be started again and goes on.
//!
//! The memory of its rounds are files in a directory: what a process has written there stays when it
//! ends, however it ends. Beside them stands a record of the session, which is replaced whole. A host
//! that fails may leave less than was written: chunks that do not match their checksums are asked for
//! again, and a record or a model that does not match is an error.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock, open, statvfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{RegionError, StateError};
use crate::limits;
use crate::region::Region;
use crate::wire::checksum::chunk_sum;
use crate::wire::hello::SessionId;

/// The first bytes of a record, with the version of its format.
const MAGIC: [u8; 8] = *b"fedlane\x01";

/// Bytes of a record's magic and checksum.
const HEAD_BYTES: usize = 16;

const RECORD: &str = "session";
const NEXT_RECORD: &str = "session.next";
const LOCK: &str = "lock";
const REGION: &str = "region-";

/// Where a session stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The session.
    pub session: SessionId,
    /// The safetensors header of its model.
    pub header: Vec<u8>,
    /// What has to be as it was: names of settings, and their values.
    pub settings: Vec<(String, String)>,
    /// Its clients, in client order.
    pub clients: Vec<ClientRecord>,
    /// The newest round that was begun; 0 before the first.
    pub round: u32,
    /// The round whose model was sent last; 0 is the initial one.
    pub sent: Option<u32>,
    /// The newest model that is whole.
    pub model: Option<ModelRecord>,
    /// What the session was doing.
    pub stage: Stage,
}

/// A client of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// Its name.
    pub name: String,
    /// Where it was, for logs and errors.
    pub address: SocketAddr,
    /// Its number of training examples.
    pub examples: f64,
    /// The round whose model it has.
    pub holds: Option<u32>,
}

/// A model in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// The region.
    pub region: String,
    /// [`crate::wire::checksum::model_digest`] of it.
    pub digest: [u8; 32],
}

/// What a session was doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Nothing, or sending a model: that is done again.
    Between,
    /// Receiving the updates of the round.
    Uploading {
        /// Of each client, whether it was not expected from the start.
        absent: Vec<bool>,
        /// Of each client, whether it is left out.
        lost: Vec<bool>,
        /// Regions of the round.
        regions: RegionNames,
    },
    /// The mean of the round is the model, and is not with all clients yet.
    Averaged {
        /// Of each client, whether its update is in the model.
        counted: Vec<bool>,
    },
}

/// Names of the regions of one round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionNames {
    /// What has come from whom.
    pub ledger: String,
    /// The sums, if they have a place of their own.
    pub accumulator: Option<String>,
    /// The new model, unless it takes the place of the sums.
    pub model: Option<String>,
    /// One for each client, where updates are received whole.
    pub spool: Vec<String>,
}

impl Record {
    /// As it stands in a file.
    ///
    /// # Errors
    /// Only an encoder that fails.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let mut bytes = postcard::to_extend(self, vec![0; HEAD_BYTES]).map_err(io::Error::other)?;
        let sum = chunk_sum(&bytes[HEAD_BYTES..]);
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..HEAD_BYTES].copy_from_slice(&sum.to_le_bytes());
        Ok(bytes)
    }

    /// Reads what [`Record::encode`] made.
    ///
    /// # Errors
    /// Why it is no whole record of this version.
    pub fn decode(bytes: &[u8]) -> Result<Record, String> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or("it is too short")?;
        if head[..7] != MAGIC[..7] {
            return Err("it is no record of a session".into());
        }
        if head[7] != MAGIC[7] {
            return Err(format!("it is of format {}, this fedlane writes {}", head[7], MAGIC[7]));
        }
        if head[8..] != chunk_sum(rest).to_le_bytes() {
            return Err("it does not match its checksum".into());
        }
        let record: Record = match postcard::take_from_bytes(rest) {
            Ok((record, [])) => record,
            Ok(_) => return Err("something stands behind it".into()),
            Err(error) => return Err(error.to_string()),
        };
        record.check().map(|()| record)
    }

    fn check(&self) -> Result<(), String> {
        let clients = self.clients.len();
        let fits = match &self.stage {
            Stage::Between => true,
            Stage::Averaged { counted } => counted.len() == clients && self.model.is_some(),
            Stage::Uploading { absent, lost, regions } => {
                let spool = regions.spool.len();
                let each = absent.len() == clients && lost.len() == clients;
                each && (spool == 0 || spool == clients) && self.round > 0
            }
        };
        match fits && (1..=limits::MAX_CLIENTS).contains(&clients) {
            true => Ok(()),
            false => Err("its parts do not fit together".into()),
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let of_round = match &self.stage {
            Stage::Uploading { regions, .. } => Some(regions),
            _ => None,
        };
        let of_round = of_round.into_iter().flat_map(|regions| {
            let some = [&regions.accumulator, &regions.model].into_iter().flatten();
            some.chain(&regions.spool).chain([&regions.ledger])
        });
        of_round.chain(self.model.iter().map(|model| &model.region)).map(String::as_str)
    }
}

/// The directory of one session, which no other process uses.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    next_region: AtomicU64,
    _lock: OwnedFd,
}

impl StateDir {
    /// Takes the directory, and makes it if there is none. Gives the record of the session that it
    /// holds, if there is one; what that does not name is removed.
    ///
    /// # Errors
    /// A directory that cannot be written or is used by another process; a record that is damaged.
    pub fn open(path: &Path) -> Result<(StateDir, Option<Record>), StateError> {
        std::fs::create_dir_all(path).map_err(|source| failed("make", path, source))?;
        refuse_foreign(path)?;
        let lock_path = path.join(LOCK);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        let lock = open(&lock_path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| failed("open", &lock_path, error.into()))?;
        // An aggregator that was just killed may not have quite ended.
        let until = Instant::now() + limits::LAST_WORDS;
        while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            match error {
                Errno::WOULDBLOCK if Instant::now() < until => {}
                Errno::WOULDBLOCK => return Err(StateError::Locked { path: path.to_owned() }),
                error => return Err(failed("lock", &lock_path, error.into())),
            }
            std::thread::sleep(limits::FIRST_PAUSE);
        }
        let directory =
            StateDir { path: path.to_owned(), next_region: AtomicU64::new(0), _lock: lock };
        let record = directory.read()?;
        directory.tidy(record.as_ref(), &[])?;
        Ok((directory, record))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that its disk has room for; 0 if that is not known.
    pub fn available_bytes(&self) -> u64 {
        statvfs(&self.path).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    fn read(&self) -> Result<Option<Record>, StateError> {
        let path = self.path.join(RECORD);
        match std::fs::symlink_metadata(&path) {
            // Reading a pipe would wait for ever.
            Ok(found) if !found.is_file() => {
                return Err(StateError::Damaged { path, why: "it is no file".into() });
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", &path, error)),
        }
        let bytes = std::fs::read(&path).map_err(|error| failed("read", &path, error))?;
        Record::decode(&bytes).map(Some).map_err(|why| StateError::Damaged { path, why })
    }

    /// Replaces the record: whoever reads it finds the new one or the old one, whole.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), StateError> {
        let (next, path) = (self.path.join(NEXT_RECORD), self.path.join(RECORD));
        if let Err(why) = record.check() {
            return Err(StateError::Damaged { path, why });
        }
        let write = || -> io::Result<()> {
            std::fs::write(&next, record.encode()?)?;
            std::fs::rename(&next, &path)
        };
        write().map_err(|source| {
            // What was there before stands.
            let _ = std::fs::remove_file(&next);
            failed("write", &path, source)
        })
    }

    /// Removes the regions that neither the record nor `others` names. Who has one mapped keeps it.
    pub(crate) fn tidy(
        &self,
        record: Option<&Record>,
        others: &[String],
    ) -> Result<(), StateError> {
        let list = std::fs::read_dir(&self.path).map_err(|e| failed("read", &self.path, e))?;
        for entry in list {
            let name = entry.map_err(|error| failed("read", &self.path, error))?.file_name();
            let Some(name) = name.to_str() else { continue };
            let number = name.strip_prefix(REGION).and_then(|number| number.parse::<u64>().ok());
            let is_needed = record.is_some_and(|record| record.names().any(|one| one == name))
                || others.iter().any(|one| one == name);
            if let (Some(number), true) = (number, is_needed) {
                self.next_region.fetch_max(number.saturating_add(1), Ordering::Relaxed);
            } else if number.is_some() || name == NEXT_RECORD {
                let path = self.path.join(name);
                std::fs::remove_file(&path).map_err(|error| failed("remove", &path, error))?;
            }
        }
        Ok(())
    }

    /// The session is over: nothing of it stays.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub fn clear(&self) -> Result<(), StateError> {
        let path = self.path.join(RECORD);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &path, error));
            }
            _ => {}
        }
        self.tidy(None, &[])
    }

    /// A new region of zeros, for which the disk has room.
    ///
    /// # Errors
    /// No room, or no right to make a file.
    pub fn make_region(&self, bytes: u64) -> Result<Region, RegionError> {
        let number = self.next_region.fetch_add(1, Ordering::Relaxed);
        let name = format!("{REGION}{number}");
        let path = self.path.join(&name);
        let make = || -> io::Result<OwnedFd> {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
            let file = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            // Touching a page that the disk has no room for would be SIGBUS.
            fallocate(&file, FallocateFlags::empty(), 0, bytes.max(1))?;
            Ok(file)
        };
        let made = make().map_err(|source| RegionError::File { path: path.clone(), bytes, source });
        let region = made.and_then(|file| Region::adopt(file, 0, bytes));
        match region {
            Ok(region) => Ok(region.named(name)),
            Err(error) => {
                // Half a region is of no use.
                let _ = std::fs::remove_file(&path);
                Err(error)
            }
        }
    }

    /// A region that an earlier process made.
    ///
    /// # Errors
    /// A file that is not there, or has another size.
    pub fn open_region(&self, name: &str, bytes: u64) -> Result<Region, StateError> {
        let path = self.path.join(name);
        if !name.starts_with(REGION) || name.contains('/') {
            let why = format!("\"{name}\" is no name of a region");
            return Err(StateError::Damaged { path, why });
        }
        let damaged = |why: String| StateError::Damaged { path: path.clone(), why };
        match std::fs::symlink_metadata(&path) {
            Ok(found) if found.is_file() && found.len() == bytes.max(1) => {}
            Ok(found) => {
                return Err(damaged(format!("it has {} bytes, not {}", found.len(), bytes.max(1))));
            }
            Err(error) => return Err(damaged(error.to_string())),
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = open(&path, flags, Mode::empty())
            .map_err(|error| failed("open", &path, error.into()))?;
        // A copy may have holes, and the disk no room for what they stand for: SIGBUS again.
        fallocate(&file, FallocateFlags::empty(), 0, bytes.max(1))
            .map_err(|error| failed("keep", &path, error.into()))?;
        let region = Region::adopt(file, 0, bytes)
            .map_err(|error| StateError::Damaged { path, why: error.to_string() })?;
        Ok(region.named(name.to_owned()))
    }

    /// Removes a region that was made here.
    pub fn remove_region(&self, region: Region) {
        if let Some(name) = region.name() {
            // What stays is removed with the session.
            let _ = std::fs::remove_file(self.path.join(name));
        }
    }
}

/// What is not ours is neither mixed with ours nor removed.
fn refuse_foreign(path: &Path) -> Result<(), StateError> {
    let mut list = std::fs::read_dir(path).map_err(|error| failed("read", path, error))?;
    let is_ours = path.join(LOCK).exists() || path.join(RECORD).exists();
    match list.next().is_some() && !is_ours {
        true => Err(StateError::Foreign { path: path.to_owned() }),
        false => Ok(()),
    }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> StateError {
    StateError::Io { action, path: path.to_owned(), source }
}
