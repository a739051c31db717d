//! The only large buffer there is: memory for one model's bytes, shared with the kernel as a
//! file, present from the start, and kept for the next round.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::error::RegionError;
use crate::limits;
use crate::sys::memory::{HUGE_PAGE_BYTES, Mapping, Pages};
use crate::sys::process;

/// Pre-faulted memory for `bytes` bytes, on huge pages where the host allows them.
pub struct Region {
    mapping: Mapping,
    bytes: usize,
}

impl Region {
    /// Makes a zeroed region. Fails, before anything is taken, when host or cgroup lack the memory.
    pub fn new(bytes: u64) -> Result<Region, RegionError> {
        let (available, bound) = process::available_memory();
        if bytes.saturating_add(limits::MEMORY_RESERVE_BYTES) > available {
            return Err(RegionError::NoMemory { wanted: bytes, available, bound });
        }
        let mapping = Self::map(bytes).map_err(|source| RegionError::Map { bytes, source })?;
        let bytes = usize::try_from(bytes).map_err(|_| RegionError::Map {
            bytes,
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        Ok(Region { mapping, bytes })
    }

    /// A huge page for a region that would not fill one wastes memory.
    fn map(bytes: u64) -> std::io::Result<Mapping> {
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
        &self.mapping.bytes()[..self.bytes]
    }

    /// The bytes for writing, and the memory file behind them (byte 0 is position 0).
    pub fn bytes_mut(&mut self) -> (&mut [u8], BorrowedFd<'_>) {
        let (bytes, file) = self.mapping.bytes_mut();
        (&mut bytes[..self.bytes], file)
    }

    /// Where the bytes start, for those who share them beyond what a borrow can say: whoever writes
    /// there while the region is sent makes the transfer fail.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// The memory file; byte 0 of the region is at position 0.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// What kind of pages hold it.
    pub fn pages(&self) -> Pages {
        self.mapping.pages()
    }
}

/// Warm regions that outlive a round. First touch of memory costs more than the network, so a
/// region is made once and taken again.
#[derive(Default)]
pub struct RegionPool {
    free: Mutex<Vec<Region>>,
}

impl RegionPool {
    /// A region of exactly `bytes` bytes: a warm one where there is one, a new one otherwise.
    /// What stood in a warm region is still there.
    pub fn take(&self, bytes: u64) -> Result<Region, RegionError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.iter().position(|region| region.bytes as u64 == bytes) {
            Some(index) => Ok(free.swap_remove(index)),
            None => Region::new(bytes),
        }
    }

    /// Makes regions of these sizes, so that nobody who takes them waits for memory.
    pub fn warm(&self, sizes: impl Iterator<Item = u64>) -> Result<(), RegionError> {
        let regions = sizes.map(Region::new).collect::<Result<Vec<_>, _>>()?;
        regions.into_iter().for_each(|region| self.give_back(region));
        Ok(())
    }

    /// Keeps `region` for the next [`RegionPool::take`].
    pub fn give_back(&self, region: Region) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(region);
    }
}
