//! Where sums wait that are on their way to the next host, and means that do not stay.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::error::RegionError;
use crate::limits;
use crate::region::Region;
use crate::topology::ring::Slots;

/// Slots for the bytes of one chunk each. A slot is free again when the neighbour has said that it has
/// the bytes: until then the kernel may only hold references to them.
///
/// In a chain any number of slots will do: the oldest chunk of all can always go on. In a ring, what a host
/// adds up first has slots of its own, and so have means, because what comes may run ahead: it could take
/// all slots while the next chunk to go is the host's own, and the ring would wait for itself. With more slots
/// of a kind than items of that kind that come in a tick, it never does: if every host waits, follow the ring
/// from one host to the next, and each has taken fewer items from its left neighbour than the last, up to the
/// first, which would have taken fewer than itself.
pub(super) struct Stage {
    region: Region,
    slot_bytes: usize,
    slots: Slots,
    own: Vec<usize>,
    sums: Vec<usize>,
    means: Vec<usize>,
    /// What has gone to the right and is not confirmed, in this order: the slot, if it had one.
    sent: VecDeque<Option<usize>>,
}

impl Stage {
    fn slot_bytes(sums_bytes: u64) -> u64 {
        sums_bytes.next_multiple_of(limits::ACCUMULATOR_ALIGN_BYTES)
    }

    /// Slots for at most `sums_bytes` bytes each: the own ones first, then those for sums.
    ///
    /// # Errors
    /// No memory.
    pub fn new(slots: Slots, sums_bytes: u64) -> Result<Stage, RegionError> {
        let slot_bytes = Stage::slot_bytes(sums_bytes);
        let mut stage = Stage {
            region: Region::new(slots.all() as u64 * slot_bytes)?,
            slots,
            slot_bytes: slot_bytes as usize,
            own: Vec::new(),
            sums: Vec::new(),
            means: Vec::new(),
            sent: VecDeque::new(),
        };
        stage.reset();
        Ok(stage)
    }

    /// How many items may be on their way here.
    pub fn room(&self) -> usize {
        self.slots.own.max(self.slots.sums)
    }

    /// A free slot for a sum that comes, if there is one.
    pub fn take_sum(&mut self) -> Option<usize> {
        self.sums.pop()
    }

    /// A free slot for a mean that comes, if there is one.
    pub fn take_mean(&mut self) -> Option<usize> {
        self.means.pop()
    }

    /// A free slot for the host's own chunk, if there is one.
    pub fn take_own(&mut self) -> Option<usize> {
        self.own.pop()
    }

    /// A slot whose bytes nobody needs.
    pub fn give_back(&mut self, slot: usize) {
        if slot < self.slots.own {
            self.own.push(slot);
        } else if slot < self.slots.own + self.slots.sums {
            self.sums.push(slot);
        } else {
            self.means.push(slot);
        }
    }

    /// An item is on its way to the right: its slot, if it has one.
    pub fn sent(&mut self, slot: Option<usize>) {
        self.sent.push_back(slot);
    }

    /// Whether something has gone to the right and is not confirmed.
    pub fn is_owed(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Frees all slots, for another all-reduce: nobody waits for their bytes any more.
    pub fn reset(&mut self) {
        let Slots { own, sums, .. } = self.slots;
        // The one that was used last is the likeliest to be in a cache.
        let free = |range: Range<usize>| range.rev().collect();
        self.sent.clear();
        self.own = free(0..own);
        self.sums = free(own..own + sums);
        self.means = free(own + sums..self.slots.all());
    }

    /// The right neighbour has the oldest `count` items; false if there were not so many.
    pub fn confirm(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let Some(slot) = self.sent.pop_front() else { return false };
            slot.into_iter().for_each(|slot| self.give_back(slot));
        }
        true
    }

    /// The memory of all slots.
    pub fn region(&self) -> &Region {
        &self.region
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

    /// Where the first bytes of a slot come to stand, in memory and in a file.
    pub fn landing(&mut self, slot: usize, length: usize) -> (&mut [u8], (BorrowedFd<'_>, u64)) {
        let start = slot * self.slot_bytes;
        let position = self.region.position() + start as u64;
        let (bytes, file) = self.region.bytes_mut();
        (&mut bytes[start..start + length], (file, position))
    }

    /// The memory file behind the first byte of a slot.
    pub fn file_of(&self, slot: usize) -> (BorrowedFd<'_>, u64) {
        (self.region.file(), self.region.position() + (slot * self.slot_bytes) as u64)
    }
}
