//! Parameters that stand in a region, frozen while they are being sent.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

use super::Source;
use crate::error::SourceError;
use crate::manifest::{ChunkTable, Manifest};
use crate::region::Region;
use crate::wire::checksum::chunk_sum;

/// A model in a region. The borrow keeps every writer out until the peers have confirmed, and
/// the checksums, made beforehand, would find a change made by other means.
pub struct RegionSource<'a> {
    manifest: &'a Manifest,
    region: &'a Region,
    chunk_bytes: u64,
    sums: Vec<u64>,
}

impl<'a> RegionSource<'a> {
    /// A region whose checksums are known.
    pub fn new(
        manifest: &'a Manifest,
        region: &'a Region,
        chunk_bytes: u64,
        sums: Vec<u64>,
    ) -> RegionSource<'a> {
        RegionSource { manifest, region, chunk_bytes, sums }
    }

    /// Makes the checksums of a filled region, on `threads` threads.
    pub fn seal(
        manifest: &'a Manifest,
        region: &'a Region,
        chunks: &ChunkTable,
        threads: usize,
    ) -> RegionSource<'a> {
        let mut sums = vec![0; chunks.len()];
        let mut rest = sums.as_mut_slice();
        let mut parts = Vec::new();
        for lane in chunks.lanes(threads) {
            let (part, after) = rest.split_at_mut(lane.len());
            rest = after;
            parts.push((lane, part));
        }
        let parts = Mutex::new(parts);
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let work = || {
            while let Some((lane, part)) = next() {
                for (index, sum) in lane.zip(part) {
                    let bytes = chunks.get(index).bytes;
                    *sum = chunk_sum(&region.bytes()[bytes.start as usize..bytes.end as usize]);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // This thread does what a refused one would have done.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        Self::new(manifest, region, chunks.chunk_bytes(), sums)
    }

    /// The checksums of the chunks.
    pub fn into_sums(self) -> Vec<u64> {
        self.sums
    }
}

impl Source for RegionSource<'_> {
    fn manifest(&self) -> &Manifest {
        self.manifest
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        let start = offset as usize;
        out.copy_from_slice(&self.region.bytes()[start..start + out.len()]);
        Ok(())
    }

    fn lend(&self, range: Range<u64>) -> Option<&[u8]> {
        self.region.bytes().get(range.start as usize..range.end as usize)
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.region.file(), self.region.position()))
    }

    fn checksums(&self, chunk_bytes: u64) -> Option<&[u64]> {
        (chunk_bytes == self.chunk_bytes).then_some(&self.sums)
    }
}
