//! Where sums wait that are on their way to the right neighbour.

use std::collections::VecDeque;

use crate::error::RegionError;
use crate::limits;
use crate::region::Region;

/// Slots for the sums of one chunk each. A slot is free again when the right neighbour has said that it
/// has the bytes: until then the kernel may only hold references to them.
pub(super) struct Stage {
    region: Region,
    slot_bytes: usize,
    slots: usize,
    free: Vec<usize>,
    /// Slots whose bytes have gone, in this order, and have not been confirmed.
    sent: VecDeque<usize>,
}

impl Stage {
    /// Slots for a ring of so many ranks: what a rank may send before it needs its left neighbour is the
    /// sums of one tick, so with more than these no ring of ranks waits for itself. Twice as many let it
    /// run ahead of a neighbour that is busy.
    fn slots_for(ranks: usize) -> usize {
        2 * (ranks - 1) + 2
    }

    /// Bytes of a region that has them.
    fn bytes(ranks: usize, sums_bytes: u64) -> u64 {
        Stage::slots_for(ranks) as u64 * Stage::slot_bytes(sums_bytes)
    }

    fn slot_bytes(sums_bytes: u64) -> u64 {
        sums_bytes.next_multiple_of(limits::ACCUMULATOR_ALIGN_BYTES)
    }

    /// Slots for at most `sums_bytes` bytes of sums each.
    ///
    /// # Errors
    /// No memory.
    pub fn new(ranks: usize, sums_bytes: u64) -> Result<Stage, RegionError> {
        let region = Region::new(Stage::bytes(ranks, sums_bytes))?;
        Ok(Stage {
            region,
            slots: Stage::slots_for(ranks),
            slot_bytes: Stage::slot_bytes(sums_bytes) as usize,
            free: (0..Stage::slots_for(ranks)).rev().collect(),
            sent: VecDeque::new(),
        })
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// A free slot, if there is one.
    pub fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// Whether there is a free slot.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// A slot whose bytes nobody needs.
    pub fn give_back(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// The bytes of a slot are on their way.
    pub fn sent(&mut self, slot: usize) {
        self.sent.push_back(slot);
    }

    /// Frees all slots, for another all-reduce: nobody waits for their bytes any more.
    pub fn reset(&mut self) {
        self.sent.clear();
        self.free = (0..self.slots).rev().collect();
    }

    /// The right neighbour has the bytes of the oldest `count` slots; false if there were not so many.
    pub fn confirm(&mut self, count: usize) -> bool {
        let known = count <= self.sent.len();
        // The one that was used last is the likeliest to be in a cache.
        self.free.extend(self.sent.drain(..count.min(self.sent.len())));
        known
    }

    /// The first bytes of a slot.
    pub fn bytes_of(&self, slot: usize, length: usize) -> &[u8] {
        let start = slot * self.slot_bytes;
        &self.region.bytes()[start..start + length]
    }

    /// The first bytes of a slot, for writing.
    pub fn bytes_of_mut(&mut self, slot: usize, length: usize) -> &mut [u8] {
        let start = slot * self.slot_bytes;
        &mut self.region.bytes_mut().0[start..start + length]
    }

    /// The memory file behind the first byte of a slot.
    pub fn file_of(&self, slot: usize) -> (std::os::fd::BorrowedFd<'_>, u64) {
        (self.region.file(), self.region.position() + (slot * self.slot_bytes) as u64)
    }
}
