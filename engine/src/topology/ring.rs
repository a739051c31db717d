//! The ring: in which order hosts stand, how a model is cut for them, and which part of it each sends
//! and receives when.
//!
//! A lane's chunks are dealt out in groups of one chunk for each rank. A group is all-reduced in S = 2 (N - 1)
//! steps, as in any ring: in the first N - 1 of them a rank adds what is its own and sends on, in the
//! others it sends on the mean. The groups follow each other at a distance of one tick, so in a tick a rank
//! does step 0 of the newest group, step 1 of the one before, and so on: a chunk moves on as soon as it
//! is there, and what was just summed is sent while it is in a cache.
//!
//! ```text
//!  tick   0       1           2              3                 4 ranks, S = 6
//!         g0 s0   g1 s0       g2 s0          g3 s0             step 0: a rank's own chunk
//!                 g0 s1       g1 s1          g2 s1             step 1: what the left one sent in tick 0
//!                             g0 s2          g1 s2
//! ```

use std::ops::Range;

use super::{Host, most_on_one_machine};
use crate::limits;

/// What is moved in one step, of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The chunk, by its number in the model.
    pub chunk: usize,
    /// The step of its group.
    pub step: usize,
}

/// What is moved between two ranks, on one lane.
#[derive(Clone, Debug)]
pub struct Schedule {
    ranks: usize,
    chunks: Range<usize>,
}

impl Schedule {
    /// Of a lane with these chunks in a ring of so many ranks.
    pub fn new(ranks: usize, chunks: Range<usize>) -> Schedule {
        Schedule { ranks: ranks.max(1), chunks }
    }

    /// Steps of a group: 2 (N - 1).
    pub fn steps(&self) -> usize {
        2 * (self.ranks - 1)
    }

    /// The first step in which what is sent is the mean.
    pub fn first_mean(&self) -> usize {
        self.ranks - 1
    }

    /// All that `rank` sends to its right neighbour, in this order. That one receives the same.
    pub fn sent_by(&self, rank: usize) -> impl Iterator<Item = Item> + use<> {
        let Schedule { ranks, chunks } = self.clone();
        let (steps, groups) = (self.steps(), chunks.len().div_ceil(ranks));
        let ticks = if groups == 0 || steps == 0 { 0 } else { groups + steps - 1 };
        (0..ticks).flat_map(move |tick| {
            let chunks = chunks.clone();
            // Steps whose group there is: tick - step is from 0 to groups - 1.
            let from = (tick + 1).saturating_sub(groups);
            (from..steps.min(tick + 1)).filter_map(move |step| {
                let segment = (rank + 2 * ranks - step % ranks) % ranks;
                let chunk = chunks.start + (tick - step) * ranks + segment;
                // The last group may be short of chunks.
                (chunk < chunks.end).then_some(Item { chunk, step })
            })
        })
    }

    /// All that `rank` receives from its left neighbour, in this order.
    pub fn received_by(&self, rank: usize) -> impl Iterator<Item = Item> + use<> {
        self.sent_by((rank + self.ranks - 1) % self.ranks)
    }
}

/// The order in which hosts stand in the ring: those of one machine side by side, so that each machine
/// sends and receives once; otherwise by name.
pub fn order(hosts: &[Host]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..hosts.len()).collect();
    order.sort_by(|&a, &b| (hosts[a].ip, &hosts[a].name).cmp(&(hosts[b].ip, &hosts[b].name)));
    order
}

/// Lanes, and so connections between two neighbours: one for each core that a host has for itself, and two
/// at least, so that one works while the other waits for a neighbour.
pub fn streams(hosts: &[Host], cores: usize) -> usize {
    (cores / most_on_one_machine(hosts).max(1)).clamp(2, limits::MAX_STREAMS)
}

/// Bytes of a chunk: at most `most`, less in a large ring, where each rank holds a few chunks for each
/// other one, and for small models, so that every rank has work. Groups come out whole, so that all ranks
/// send alike.
pub fn chunk_bytes(model_bytes: u64, ranks: usize, streams: usize, most: u64) -> u64 {
    let parts = (ranks.max(1) * streams.max(1)) as u64;
    let least = limits::MIN_CHUNK_BYTES;
    let room = limits::RING_STAGE_BYTES / (2 * ranks.max(1) as u64);
    let most = most.min(room).max(least);
    let groups = model_bytes.div_ceil(parts * most).max(1);
    // Whole cache lines, so that no dtype is cut.
    model_bytes
        .div_ceil(parts * groups)
        .next_multiple_of(limits::ACCUMULATOR_ALIGN_BYTES)
        .max(least)
}
