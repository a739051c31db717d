//! The one table of paths: a new one is a file and a line here.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::str::FromStr;

use crate::error::PathError;
use crate::limits;
use crate::receiver::read::Read;
use crate::receiver::splice::{Splice, SpliceNull};
use crate::receiver::{Lands, ReceivePath};
use crate::sender::sendfile::Sendfile;
use crate::sender::vmsplice::Vmsplice;
use crate::sender::write::Write;
use crate::sender::{Needs, Piece, SendPath};
use crate::source::Source;

/// A send path of the table.
#[derive(Clone, Copy)]
pub struct SendKind(&'static SendEntry);

struct SendEntry {
    name: &'static str,
    summary: &'static str,
    needs: Needs,
    descriptors: u64,
    open: fn() -> io::Result<Box<dyn SendPath>>,
}

/// Best first: the default is the first one that the source can feed and the host can run.
static SEND: [SendEntry; 3] = [
    SendEntry {
        name: "vmsplice",
        summary: "page references from memory through a pipe, no copy",
        needs: Needs::StableBytes,
        descriptors: 2,
        open: || Ok(Box::new(Vmsplice::new()?)),
    },
    SendEntry {
        name: "sendfile",
        summary: "page references from a region or file, no copy",
        needs: Needs::File,
        descriptors: 0,
        open: || Ok(Box::new(Sendfile)),
    },
    SendEntry {
        name: "write",
        summary: "send(), the kernel copies",
        needs: Needs::Bytes,
        descriptors: 0,
        open: || Ok(Box::new(Write)),
    },
];

/// A receive path of the table.
#[derive(Clone, Copy)]
pub struct ReceiveKind(&'static ReceiveEntry);

struct ReceiveEntry {
    name: &'static str,
    summary: &'static str,
    lands: Lands,
    descriptors: u64,
    open: fn() -> io::Result<Box<dyn ReceivePath>>,
}

/// The first one is the default.
static RECEIVE: [ReceiveEntry; 3] = [
    ReceiveEntry {
        name: "read",
        summary: "recv() into a chunk buffer that stays in the cache",
        lands: Lands::Memory,
        descriptors: 0,
        open: || Ok(Box::new(Read)),
    },
    ReceiveEntry {
        name: "splice",
        summary: "socket to pipe to region or file; the second step copies",
        lands: Lands::File,
        descriptors: 2,
        open: || Ok(Box::new(Splice::new()?)),
    },
    ReceiveEntry {
        name: "splice-null",
        summary: "socket to pipe to /dev/null: drops the bytes, benchmarks only",
        lands: Lands::Nowhere,
        descriptors: 3,
        open: || Ok(Box::new(SpliceNull::new()?)),
    },
];

impl SendKind {
    /// Every send path.
    pub fn all() -> impl Iterator<Item = SendKind> {
        SEND.iter().map(SendKind)
    }

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// What it does, in one line.
    pub fn summary(self) -> &'static str {
        self.0.summary
    }

    /// What it needs of a source.
    pub fn needs(self) -> Needs {
        self.0.needs
    }

    /// Open files that it holds for each stream.
    pub fn descriptors(self) -> u64 {
        self.0.descriptors
    }

    /// The most that any send path holds.
    pub fn most_descriptors() -> u64 {
        SendKind::all().map(SendKind::descriptors).max().unwrap_or(0)
    }

    /// Opens it for one stream.
    pub fn open(self) -> io::Result<Box<dyn SendPath>> {
        (self.0.open)()
    }

    /// One that copies: bytes that it has sent may be changed at once.
    pub fn copying() -> SendKind {
        let copying = SendKind::all().find(|kind| kind.needs() == Needs::Bytes);
        copying.unwrap_or(SendKind(&SEND[0]))
    }

    /// The path asked for, if `source` can feed it; without a wish the best that it can feed.
    pub fn choose(wish: Option<SendKind>, source: &dyn Source) -> Result<SendKind, PathError> {
        match wish {
            Some(kind) if kind.is_fed_by(source) => Ok(kind),
            Some(kind) => Err(PathError::Source { path: kind.name() }),
            None => SendKind::all()
                .find(|kind| kind.is_fed_by(source) && kind.is_allowed(source))
                .ok_or(PathError::Source { path: "any" }),
        }
    }

    /// Sends the first bytes of `source` to a socket of our own. A sandbox may refuse a call, and
    /// a filesystem may not support it, without any other sign.
    fn is_allowed(self, source: &dyn Source) -> bool {
        let length = source.manifest().data_bytes().min(limits::TRIAL_BYTES);
        if length == 0 || self.needs() == Needs::Bytes {
            return true;
        }
        let piece =
            Piece { length: length as usize, bytes: source.lend(0..length), file: source.file() };
        let sent = UnixStream::pair().and_then(|(socket, _peer)| {
            socket.set_nonblocking(true)?;
            self.open()?.send(socket.as_fd(), piece)
        });
        if let Err(error) = &sent {
            tracing::info!(
                "send path {} does not work here ({error}); another one is taken",
                self.name()
            );
        }
        sent.is_ok()
    }

    fn is_fed_by(self, source: &dyn Source) -> bool {
        match self.needs() {
            Needs::Bytes => true,
            Needs::StableBytes => source.lend(0..0).is_some(),
            Needs::File => source.file().is_some(),
        }
    }
}

impl ReceiveKind {
    /// Every receive path.
    pub fn all() -> impl Iterator<Item = ReceiveKind> {
        RECEIVE.iter().map(ReceiveKind)
    }

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// What it does, in one line.
    pub fn summary(self) -> &'static str {
        self.0.summary
    }

    /// Where it puts the bytes.
    pub fn lands(self) -> Lands {
        self.0.lands
    }

    /// Open files that it holds for each stream.
    pub fn descriptors(self) -> u64 {
        self.0.descriptors
    }

    /// Opens it for one stream.
    pub fn open(self) -> io::Result<Box<dyn ReceivePath>> {
        (self.0.open)()
    }
}

impl Default for ReceiveKind {
    fn default() -> Self {
        ReceiveKind(&RECEIVE[0])
    }
}

impl FromStr for SendKind {
    type Err = PathError;
    fn from_str(name: &str) -> Result<Self, PathError> {
        let known = || SendKind::all().map(SendKind::name).collect::<Vec<_>>().join(", ");
        SendKind::all()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| PathError::Unknown { name: name.into(), known: known() })
    }
}

impl FromStr for ReceiveKind {
    type Err = PathError;
    fn from_str(name: &str) -> Result<Self, PathError> {
        let known = || ReceiveKind::all().map(ReceiveKind::name).collect::<Vec<_>>().join(", ");
        ReceiveKind::all()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| PathError::Unknown { name: name.into(), known: known() })
    }
}

impl fmt::Display for SendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for ReceiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for SendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for ReceiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
