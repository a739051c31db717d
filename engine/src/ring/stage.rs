//! Where sums wait that are on their way to the right neighbour.

use std::collections::VecDeque;

use crate::error::RegionError;
use crate::limits;
use crate::region::Region;
use crate::topology::ring::Slots;

/// Slots for the sums of one chunk each. A slot is free again when the right neighbour has said that it
/// has the bytes: until then the kernel may only hold references to them.
///
/// In a chain any number of slots will do: the oldest chunk of all can always go on. In a ring,
/// what a host adds up first has slots of its own, because what comes may run ahead: it could take all
/// slots while the next chunk to go is the host's own, and the ring would wait for itself. With more slots
/// for what comes than sums that come in a tick, it never does: if every host waits, follow the ring
/// from one host to the next, and each has taken fewer sums from its left neighbour than the last, up to the
/// first, which would have taken fewer than itself.
pub(super) struct Stage {
    region: Region,
    slot_bytes: usize,
    slots: Slots,
    free: Vec<usize>,
    free_own: Vec<usize>,
    /// Slots whose bytes have gone, in this order, and have not been confirmed.
    sent: VecDeque<usize>,
}

impl Stage {
    fn slot_bytes(sums_bytes: u64) -> u64 {
        sums_bytes.next_multiple_of(limits::ACCUMULATOR_ALIGN_BYTES)
    }

    /// Slots for at most `sums_bytes` bytes of sums each. The own ones are the first ones.
    ///
    /// # Errors
    /// No memory.
    pub fn new(slots: Slots, sums_bytes: u64) -> Result<Stage, RegionError> {
        let slot_bytes = Stage::slot_bytes(sums_bytes);
        let region = Region::new((slots.own + slots.coming) as u64 * slot_bytes)?;
        let mut stage = Stage {
            region,
            slots,
            slot_bytes: slot_bytes as usize,
            free: Vec::new(),
            free_own: Vec::new(),
            sent: VecDeque::new(),
        };
        stage.reset();
        Ok(stage)
    }

    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.slots.own + self.slots.coming
    }

    /// A free slot for what comes, if there is one.
    pub fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// A free slot for the host's own chunk, if there is one.
    pub fn take_own(&mut self) -> Option<usize> {
        self.free_own.pop()
    }

    /// A slot whose bytes nobody needs.
    pub fn give_back(&mut self, slot: usize) {
        if slot < self.slots.own { self.free_own.push(slot) } else { self.free.push(slot) }
    }

    /// The bytes of a slot are on their way.
    pub fn sent(&mut self, slot: usize) {
        self.sent.push_back(slot);
    }

    /// Frees all slots, for another all-reduce: nobody waits for their bytes any more.
    pub fn reset(&mut self) {
        self.sent.clear();
        // The one that was used last is the likeliest to be in a cache.
        self.free_own = (0..self.slots.own).rev().collect();
        self.free = (self.slots.own..self.slots()).rev().collect();
    }

    /// The right neighbour has the bytes of the oldest `count` slots; false if there were not so many.
    pub fn confirm(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let Some(slot) = self.sent.pop_front() else { return false };
            self.give_back(slot);
        }
        true
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
