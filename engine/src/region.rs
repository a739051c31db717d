//! The only large buffer there is: memory for one model's bytes, shared with the kernel as a
//! file, present from the start, and kept for the next round.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs;

use crate::error::RegionError;
use crate::limits;
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
    pub(crate) content: Content,
}

/// Whose bytes stand in a region of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
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

    /// Makes all of it zero, and what stands behind its end: the file can be mapped whole.
    pub(crate) fn make_zero(&mut self) {
        self.mapping.bytes_mut().0.fill(0);
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
pub(crate) fn check_room(wanted: u64, free: u64) -> Result<(), RegionError> {
    let (available, bound) = process::available_memory();
    let available = available.saturating_add(free);
    match wanted.saturating_add(limits::MEMORY_RESERVE_BYTES) > available {
        true => Err(RegionError::NoMemory { wanted, available, bound }),
        false => Ok(()),
    }
}
