//! Ring and chain: in which order hosts stand, how a model is cut for them, and which part of it each sends
//! and receives when.
//!
//! Both move a chunk in S = 2 (N - 1) steps: in the first N - 1 of them it is a sum, to which each host adds
//! what is its own, in the others it is the mean.
//!
//! **Chain.** Rank r sends step r of every chunk to the right, in the order of the chunks; the last rank has
//! the mean, and rank r sends it to the left in step S - r. Chunk follows chunk, so that all hosts work at
//! once, and both directions of every connection are used.
//!
//! **Ring.** A lane's chunks are dealt out in groups of one chunk for each rank. A group is all-reduced in S = 2 (N - 1)
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

use super::{Host, Shape, most_on_one_machine};
use crate::limits;

/// What is moved in one step, of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The chunk, by its number in the model.
    pub chunk: usize,
    /// The step of its group.
    pub step: usize,
}

/// What a rank moves to or from a neighbour, in order.
pub type Items = Box<dyn Iterator<Item = Item> + Send>;

/// Slots that a rank needs for what is on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// For what it adds up first.
    pub own: usize,
    /// For sums that come.
    pub sums: usize,
    /// For means that come, where they do not stay.
    pub means: usize,
}

impl Slots {
    /// All of them.
    pub fn all(self) -> usize {
        self.own + self.sums + self.means
    }
}

/// What is moved between neighbours, on one lane.
#[derive(Clone, Debug)]
pub struct Schedule {
    shape: Shape,
    ranks: usize,
    chunks: Range<usize>,
}

impl Schedule {
    /// Of a lane with these chunks among so many ranks.
    pub fn new(shape: Shape, ranks: usize, chunks: Range<usize>) -> Schedule {
        Schedule { shape, ranks: ranks.max(1), chunks }
    }

    /// Steps of a chunk: 2 (N - 1).
    pub fn steps(&self) -> usize {
        2 * (self.ranks - 1)
    }

    /// The first step in which what is sent is the mean.
    pub fn first_mean(&self) -> usize {
        self.ranks - 1
    }

    /// Whether what is sent in this step goes to the right.
    pub fn goes_right(&self, step: usize) -> bool {
        self.shape == Shape::Ring || step < self.first_mean()
    }

    /// Whether what comes is confirmed against its stream; in a chain the mean confirms the sum.
    pub fn confirms(&self) -> bool {
        self.shape == Shape::Ring
    }

    /// Whether a rank has a right neighbour.
    pub fn has_right(&self, rank: usize) -> bool {
        self.ranks > 1 && (self.shape == Shape::Ring || rank + 1 < self.ranks)
    }

    /// Whether a rank has a left neighbour.
    pub fn has_left(&self, rank: usize) -> bool {
        self.ranks > 1 && (self.shape == Shape::Ring || rank > 0)
    }

    /// All that `rank` sends to its right neighbour.
    pub fn to_right(&self, rank: usize) -> Items {
        match self.shape {
            _ if !self.has_right(rank) => Box::new(std::iter::empty()),
            Shape::Ring => Box::new(self.around(rank)),
            Shape::Chain => {
                Box::new(self.chunks.clone().map(move |chunk| Item { chunk, step: rank }))
            }
        }
    }

    /// All that `rank` sends to its left neighbour.
    pub fn to_left(&self, rank: usize) -> Items {
        match self.shape {
            Shape::Chain if self.has_left(rank) => {
                let step = self.steps() - rank;
                Box::new(self.chunks.clone().map(move |chunk| Item { chunk, step }))
            }
            _ => Box::new(std::iter::empty()),
        }
    }

    /// All that comes to `rank` from its left neighbour.
    pub fn from_left(&self, rank: usize) -> Items {
        match self.has_left(rank) {
            true => self.to_right((rank + self.ranks - 1) % self.ranks),
            false => Box::new(std::iter::empty()),
        }
    }

    /// All that comes to `rank` from its right neighbour.
    pub fn from_right(&self, rank: usize) -> Items {
        match self.has_right(rank) {
            true => self.to_left((rank + 1) % self.ranks),
            false => Box::new(std::iter::empty()),
        }
    }

    /// Slots for what `rank` holds until its neighbour has it. Twice as many for what comes as needed, so that
    /// a host may run ahead of a neighbour that is busy.
    pub fn slots(&self, rank: usize, keeps_mean: bool) -> Slots {
        // One to fill and two on their way.
        const FEW: usize = 3;
        let steps = self.steps();
        let slots = match self.shape {
            Shape::Ring => Slots { own: FEW, sums: steps, means: steps },
            // A sum is held until its mean is back.
            Shape::Chain if rank == 0 => Slots { own: FEW + steps, sums: 0, means: FEW },
            Shape::Chain => Slots { own: 0, sums: FEW + steps, means: FEW },
        };
        if keeps_mean { Slots { means: 0, ..slots } } else { slots }
    }

    /// What `rank` sends in a ring.
    fn around(&self, rank: usize) -> impl Iterator<Item = Item> + use<> {
        let Schedule { ranks, chunks, .. } = self.clone();
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
}

/// The order in which hosts stand: those of one machine side by side, so that each machine
/// sends and receives once; otherwise by name.
pub fn order(hosts: &[Host]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..hosts.len()).collect();
    order.sort_by(|&a, &b| (hosts[a].ip, &hosts[a].name).cmp(&(hosts[b].ip, &hosts[b].name)));
    order
}

/// The order in which hosts that have joined stand in a ring or chain: those that `names` has as it has them, the
/// others behind them as [`order`] says.
pub fn ranks(hosts: &[Host], names: &[String]) -> Vec<usize> {
    let mut order = order(hosts);
    let place = |host: &usize| names.iter().position(|name| *name == hosts[*host].name);
    // Stable, so that those who are not named keep their order.
    order.sort_by_key(|host| place(host).unwrap_or(names.len()));
    order
}

/// Lanes, and so connections between two neighbours: one for each core that a host has for itself, and two
/// at least, so that one works while the other waits for a neighbour.
pub fn streams(hosts: &[Host], cores: usize) -> usize {
    (cores / most_on_one_machine(hosts).max(1)).clamp(2, limits::MAX_STREAMS)
}

/// Bytes of a chunk, so that its sums have at most `most`: less in a large ring, where each rank holds a few
/// chunks for each other one, and with many lanes, and for small models, so that every rank has work. Groups
/// come out whole, so that all ranks send alike. `widening` is how many times as large sums may be as what
/// is summed.
pub fn chunk_bytes(
    model_bytes: u64,
    ranks: usize,
    streams: usize,
    most: u64,
    widening: u64,
) -> u64 {
    let parts = (ranks.max(1) * streams.max(1)) as u64;
    let least = limits::MIN_CHUNK_BYTES;
    // Four lanes may hold what they like.
    let lane = limits::RING_STAGE_BYTES * 4 / (streams as u64).max(4);
    let room = lane / (2 * ranks.max(1) as u64);
    let most = (most.min(room) / widening.max(1)).max(least);
    let groups = model_bytes.div_ceil(parts * most).max(1);
    // Whole cache lines, so that no dtype is cut.
    model_bytes
        .div_ceil(parts * groups)
        .next_multiple_of(limits::ACCUMULATOR_ALIGN_BYTES)
        .max(least)
}
