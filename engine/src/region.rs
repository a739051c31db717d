//! The only large buffer there is: memory for one model's bytes, shared with the kernel as a
//! file, present from the start, and kept for the next round.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs;

use crate::error::RegionError;
use crate::limits;
use crate::state::StateDir;
use crate::sys::memory::{HUGE_PAGE_BYTES, Mapping, Pages};
use crate::sys::process;

/// Pre-faulted memory for `bytes` bytes, on huge pages where the host allows them.
pub struct Region {
    mapping: Mapping,
    /// Where its first byte is in the mapping, and in the file.
    start: usize,
    position: u64,
    bytes: usize,
    name: Option<String>,
    content: Content,
}

/// Whose bytes stand in a region of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// Nobody's: it is as the kernel made it.
    Zeros,
    /// Only those of whom it was lent to.
    Of(String),
    /// Anybody's.
    Any,
}

impl Region {
    /// Makes a zeroed region. Fails, before anything is taken, when host or cgroup lack the memory.
    pub fn new(bytes: u64) -> Result<Region, RegionError> {
        check_room(bytes, 0)?;
        let mapping = Self::map(bytes).map_err(|source| RegionError::Map { bytes, source })?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| RegionError::Map { bytes, source: io::ErrorKind::OutOfMemory.into() })?;
        Ok(Region { mapping, start: 0, position: 0, bytes, name: None, content: Content::Zeros })
    }

    /// `bytes` bytes of a memory file that another process made, from `position` on.
    ///
    /// Nobody may make the file shorter as long as this lives: a process that then touches what is
    /// gone is ended by SIGBUS. Regions on base pages are sealed against that when they are made. Those
    /// on huge pages cannot be, because the kernel seals memfds only; so take files from no process
    /// that this one must not depend on.
    ///
    /// # Errors
    /// A file that is shorter than that, or that cannot be mapped.
    pub fn adopt(file: OwnedFd, position: u64, bytes: u64) -> Result<Region, RegionError> {
        let map = |source| RegionError::Map { bytes, source };
        let too_short =
            || map(io::Error::new(io::ErrorKind::InvalidInput, "the file is too short"));
        let end = position.checked_add(bytes).ok_or_else(too_short)?;
        let size = fs::fstat(&file).map_err(|error| map(error.into()))?.st_size;
        if size.cast_unsigned() < end {
            return Err(too_short());
        }
        let first_page = position - position % Mapping::ALIGN_BYTES;
        let mapping = Mapping::adopt(file, first_page, end - first_page).map_err(map)?;
        // Both are within the mapping, which exists.
        let (start, bytes) = ((position - first_page) as usize, bytes as usize);
        Ok(Region { mapping, start, position, bytes, name: None, content: Content::Any })
    }

    /// Says which file of a directory it is.
    pub(crate) fn named(mut self, name: String) -> Region {
        self.name = Some(name);
        self
    }

    /// Which file of a directory it is, if it is one.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// A huge page for a region that would not fill one wastes memory.
    fn map(bytes: u64) -> io::Result<Mapping> {
        if bytes >= HUGE_PAGE_BYTES {
            match Mapping::new(bytes, Pages::Huge) {
                Ok(mapping) => return Ok(mapping),
                Err(error) => tracing::debug!("huge pages are off for this region: {error}"),
            }
        }
        Mapping::new(bytes, Pages::Base)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.mapping.bytes()[self.start..self.start + self.bytes]
    }

    /// The bytes for writing, and the memory file behind them (byte 0 is at [`Region::position`]).
    pub fn bytes_mut(&mut self) -> (&mut [u8], BorrowedFd<'_>) {
        let (bytes, file) = self.mapping.bytes_mut();
        (&mut bytes[self.start..self.start + self.bytes], file)
    }

    /// Where the bytes start, for those who share them beyond what a borrow can say: whoever writes
    /// there while the region is sent makes the transfer fail.
    pub fn start(&self) -> NonNull<u8> {
        let start = self.mapping.start().as_ptr().wrapping_add(self.start);
        NonNull::new(start).expect("within the mapping")
    }

    /// The memory file; byte 0 of the region is at [`Region::position`].
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// Says that this process will not touch the bytes for some time, while another one may: they
    /// stay where they are, and count no more as memory of this process.
    pub fn rest(&self) {
        if let Err(error) = self.mapping.rest() {
            tracing::debug!("a region stays mapped: {error}");
        }
    }

    /// Where the region begins in its file.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// What kind of pages hold it.
    pub fn pages(&self) -> Pages {
        self.mapping.pages()
    }
}

/// Whether the host, and `free` bytes that this process could give back, have room for so much.
fn check_room(wanted: u64, free: u64) -> Result<(), RegionError> {
    let (available, bound) = process::available_memory();
    let available = available.saturating_add(free);
    match wanted.saturating_add(limits::MEMORY_RESERVE_BYTES) > available {
        true => Err(RegionError::NoMemory { wanted, available, bound }),
        false => Ok(()),
    }
}

/// Warm regions that outlive a round. First touch of memory costs more than the network, so a
/// region is made once and taken again.
#[derive(Default)]
pub struct RegionPool {
    free: Mutex<Vec<Free>>,
    /// Where regions are files that outlive the process.
    directory: Option<Arc<StateDir>>,
}

struct Free {
    region: Region,
    /// How often new memory had to be made since it was given back, because it did not fit.
    passed_over: u32,
}

impl RegionPool {
    /// A pool of regions in a directory.
    pub fn in_directory(directory: Arc<StateDir>) -> RegionPool {
        RegionPool { free: Mutex::default(), directory: Some(directory) }
    }

    /// A region of exactly `bytes` bytes: a warm one where there is one, a new one otherwise.
    /// What stood in a warm region is still there, so it is for those who write every byte before they let
    /// anybody read: others get it by [`RegionPool::lend`]. A region that fitted none of many that had
    /// to be made new goes back to the host: the model has changed.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn take(&self, bytes: u64) -> Result<Region, RegionError> {
        let mut region = self.find(bytes, &Content::Any)?;
        region.content = Content::Any;
        Ok(region)
    }

    /// As [`RegionPool::take`], for bytes of one `owner` alone, with which all of it is written.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn take_for(&self, bytes: u64, owner: &str) -> Result<Region, RegionError> {
        let content = Content::Of(owner.to_owned());
        let mut region = self.find(bytes, &content)?;
        // Until all of it is written, others' bytes may stand in it.
        region.content = match region.content == content || region.content == Content::Zeros {
            true => content,
            false => Content::Any,
        };
        Ok(region)
    }

    /// The same for `owner`, who could read what was never written by it: zeroed, unless nobody else's bytes
    /// have stood in it.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn lend(&self, bytes: u64, owner: &str) -> Result<Region, RegionError> {
        let content = Content::Of(owner.to_owned());
        let mut region = self.find(bytes, &content)?;
        if region.content != content && region.content != Content::Zeros {
            // Also what is behind the region's end: the file can be mapped whole.
            region.mapping.bytes_mut().0.fill(0);
        }
        region.content = content;
        Ok(region)
    }

    /// A region as it was given back, one with this content first; or a new one.
    fn find(&self, bytes: u64, content: &Content) -> Result<Region, RegionError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |free: &Free| free.region.bytes as u64 == bytes;
        let best = free.iter().position(|free| fits(free) && free.region.content == *content);
        if let Some(index) = best.or_else(|| free.iter().position(fits)) {
            return Ok(free.swap_remove(index).region);
        }
        free.iter_mut().for_each(|free| free.passed_over += 1);
        let of_no_use = |free: &mut Free| free.passed_over > limits::PASSED_OVER;
        let old: Vec<Free> = free.extract_if(.., of_no_use).collect();
        drop(free);
        if let Some(directory) = &self.directory {
            old.into_iter().for_each(|free| directory.remove_region(free.region));
            return directory.make_region(bytes);
        }
        drop(old);
        match Region::new(bytes) {
            Err(RegionError::NoMemory { .. }) => {
                self.trim();
                Region::new(bytes)
            }
            made => made,
        }
    }

    /// Sees to it that there are regions of these sizes, so that nobody who takes them waits for
    /// memory. Those that are there already are enough: with more in each session they would pile up.
    ///
    /// # Errors
    /// As [`Region::new`].
    pub fn warm(&self, sizes: impl Iterator<Item = u64>) -> Result<(), RegionError> {
        let untouched = |bytes| self.find(bytes, &Content::Zeros);
        let regions = sizes.map(untouched).collect::<Result<Vec<_>, _>>()?;
        // Nobody has written to those that were made new.
        regions.into_iter().for_each(|region| self.keep(region));
        Ok(())
    }

    /// Whether there is room for regions of these sizes, as far as that is known now.
    ///
    /// # Errors
    /// [`RegionError::NoMemory`].
    pub fn check_room(&self, sizes: impl Iterator<Item = u64>) -> Result<(), RegionError> {
        let wanted = sizes.fold(0, u64::saturating_add);
        let Some(directory) = &self.directory else { return check_room(wanted, self.free_bytes()) };
        let available = directory.available_bytes();
        let bound = format!("the disk of {}", directory.path().display());
        match wanted > available {
            true => Err(RegionError::NoMemory { wanted, available, bound }),
            false => Ok(()),
        }
    }

    /// Gives all free regions back to the host.
    pub fn trim(&self) {
        let free = std::mem::take(&mut *self.free.lock().unwrap_or_else(PoisonError::into_inner));
        // Without the lock: giving back takes time.
        drop(free);
    }

    /// Bytes of all free regions.
    pub fn free_bytes(&self) -> u64 {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().map(|free| free.region.bytes as u64).sum()
    }

    /// Names of the free regions, where they are files.
    pub(crate) fn free_names(&self) -> Vec<String> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().filter_map(|free| free.region.name.clone()).collect()
    }

    /// Bytes of new regions that there is room for.
    pub fn available_bytes(&self) -> u64 {
        match &self.directory {
            Some(directory) => directory.available_bytes(),
            None => process::available_memory().0.saturating_sub(limits::MEMORY_RESERVE_BYTES),
        }
    }

    /// Keeps `region` for the next [`RegionPool::take`].
    pub fn give_back(&self, mut region: Region) {
        if region.content == Content::Zeros {
            // Whoever made it may have written to it.
            region.content = Content::Any;
        }
        self.keep(region);
    }

    fn keep(&self, region: Region) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(Free { region, passed_over: 0 });
    }
}
