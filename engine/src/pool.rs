//! Regions that are kept warm between rounds and sessions.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::RegionError;
use crate::limits;
use crate::region::{Content, Region, check_room};
use crate::state::StateDir;
use crate::sys::process;

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
            region.make_zero();
        }
        region.content = content;
        Ok(region)
    }

    /// A region as it was given back, one with this content first; or a new one.
    fn find(&self, bytes: u64, content: &Content) -> Result<Region, RegionError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |free: &Free| free.region.bytes().len() as u64 == bytes;
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
        free.iter().map(|free| free.region.bytes().len() as u64).sum()
    }

    /// Names of the free regions, where they are files.
    pub(crate) fn free_names(&self) -> Vec<String> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.iter().filter_map(|free| free.region.name().map(str::to_owned)).collect()
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
