//! Which chunks of a round have come from whom, in memory that is a file: what was verified before
//! this process was killed need not come again.
//!
//! One entry for each chunk, with a place for each client. A lane writes its own entries, each after
//! what it is about; whatever was cut off in between does not match a checksum, and counts as not come.

use std::ops::Range;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::manifest::{Chunk, ChunkTable};
use crate::sums::LaneSums;
use crate::verdict::Findings;
use crate::wire::checksum::chunk_sum;

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The sums of those clients from whom the chunk came.
    Sums,
    /// Their mean.
    Mean,
    /// Their updates, each for itself.
    Updates,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Sums, Kind::Mean, Kind::Updates];

    fn number(self) -> u32 {
        1 + self as u32
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    /// CRC-64/NVME of the rest of the entry.
    check: u64,
    /// Of what stands in the region.
    content: u64,
    /// Of the weights that it was made with.
    weights: u64,
    round: u32,
    kind: u32,
}

/// What came from one client.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Came {
    /// 1 if the chunk came.
    came: u64,
    /// The checksum that it had.
    sum: u64,
    /// See [`Findings::raw`].
    found: [u64; 2],
}

const HEAD_BYTES: usize = size_of::<Head>();
const CAME_BYTES: usize = size_of::<Came>();
const CHECK_BYTES: usize = 8;

/// Bytes of a ledger. The bounds of both numbers keep that far below what a u64 holds.
pub fn bytes(chunks: usize, clients: usize) -> u64 {
    chunks as u64 * entry_bytes(clients) as u64
}

fn entry_bytes(clients: usize) -> usize {
    HEAD_BYTES + CAME_BYTES * clients
}

/// The entries of one lane, and what the lane's streams know.
pub struct LaneLedger<'a> {
    chunks: &'a ChunkTable,
    range: Range<usize>,
    round: u32,
    entries: &'a mut [u8],
    peers: Vec<Stream<'a>>,
}

/// What a lane knows of one client.
#[derive(Clone, Copy)]
pub struct Stream<'a> {
    /// The checksums.
    pub sums: LaneSums<'a>,
    /// What was found in it.
    pub findings: Option<&'a Findings>,
    /// Whether nothing of it counts.
    pub lost: bool,
}

/// A whole entry of this round.
pub struct Entry {
    /// What it is about.
    pub kind: Kind,
    /// Checksum of what stands in the region; 0 of [`Kind::Updates`].
    pub content: u64,
    /// Of the weights that it was made with.
    pub weights: u64,
    /// From whom the chunk came, and the checksums that it had.
    pub came: Vec<(usize, u64)>,
}

/// Cuts the bytes of a ledger into those of the lanes.
///
/// # Panics
/// If there are not as many as [`bytes`] says.
pub fn cut<'a>(
    mut bytes: &'a mut [u8],
    chunks: &'a ChunkTable,
    lanes: &[Range<usize>],
    round: u32,
    peers: impl Fn(usize) -> Vec<Stream<'a>>,
) -> Vec<LaneLedger<'a>> {
    let mut ledgers = Vec::new();
    for (lane, range) in lanes.iter().enumerate() {
        let peers = peers(lane);
        let (entries, rest) = bytes.split_at_mut(entry_bytes(peers.len()) * range.len());
        bytes = rest;
        ledgers.push(LaneLedger { chunks, range: range.clone(), round, entries, peers });
    }
    ledgers
}

impl LaneLedger<'_> {
    /// The chunks of the lane.
    pub fn lane(&self) -> impl Iterator<Item = Chunk> + use<'_> {
        self.range.clone().map(|index| self.chunks.get(index))
    }

    /// How many clients have a place in it.
    pub fn clients(&self) -> usize {
        self.peers.len()
    }

    /// The entry of a chunk, if it is whole, of this round, and about clients that still count.
    pub fn entry(&self, chunk: usize) -> Option<Entry> {
        let bytes = &self.entries[self.place(chunk)];
        let (head, rest) = Head::read_from_prefix(bytes).ok()?;
        if head.round != self.round || head.check != chunk_sum(&bytes[CHECK_BYTES..]) {
            return None;
        }
        let kind = Kind::ALL.into_iter().find(|kind| kind.number() == head.kind)?;
        let all = <[Came]>::ref_from_bytes(rest).ok()?;
        let came = all.iter().enumerate().filter(|(_, came)| came.came == 1);
        let mut came: Vec<_> = came.map(|(peer, came)| (peer, came.sum)).collect();
        if kind == Kind::Updates {
            came.retain(|&(peer, _)| !self.peers[peer].lost);
        }
        let counts = !came.is_empty() && came.iter().all(|&(peer, _)| !self.peers[peer].lost);
        counts.then_some(Entry { kind, content: head.content, weights: head.weights, came })
    }

    /// A chunk counts as come from these clients: their streams know it again.
    pub fn recall(&self, chunk: usize, entry: &Entry) {
        let bytes = &self.entries[self.place(chunk)];
        let Ok(all) = <[Came]>::ref_from_bytes(&bytes[HEAD_BYTES..]) else { return };
        for &(peer, sum) in &entry.came {
            self.peers[peer].sums.recall(chunk, sum);
            if let Some(findings) = self.peers[peer].findings {
                findings.restore(chunk, all[peer].found);
            }
        }
    }

    /// From whom a chunk came, as far as it is noted.
    pub fn came(&self, chunk: usize) -> impl Iterator<Item = usize> + use<'_> {
        let bytes = &self.entries[self.place(chunk)];
        let all = <[Came]>::ref_from_bytes(&bytes[HEAD_BYTES..]).unwrap_or_default();
        all.iter().enumerate().filter(|(_, came)| came.came == 1).map(|(peer, _)| peer)
    }

    /// Notes that a chunk came from `peer`. What stands in its place of the region is noted with
    /// [`LaneLedger::seal`]; until then the entry counts for nothing.
    pub fn add(&mut self, chunk: usize, peer: usize) {
        let Stream { sums, findings, .. } = self.peers[peer];
        let (place, round) = (self.place(chunk), self.round);
        let bytes = &mut self.entries[place];
        if Head::read_from_prefix(bytes).is_ok_and(|(head, _)| head.round != round) {
            bytes.fill(0);
        }
        if let Ok((head, _)) = Head::mut_from_prefix(bytes) {
            head.round = round;
        }
        if let Ok(all) = <[Came]>::mut_from_bytes(&mut bytes[HEAD_BYTES..]) {
            let found = findings.map_or([0; 2], |findings| findings.raw(chunk));
            all[peer] = Came { came: 1, sum: sums.get(chunk).unwrap_or(0), found };
        }
    }

    /// Makes the entry of a chunk whole.
    pub fn seal(&mut self, chunk: usize, kind: Kind, content: u64, weights: u64) {
        let (place, round) = (self.place(chunk), self.round);
        let bytes = &mut self.entries[place];
        let kind = kind.number();
        if let Ok((head, _)) = Head::mut_from_prefix(bytes) {
            *head = Head { check: 0, content, weights, round, kind };
        }
        let check = chunk_sum(&bytes[CHECK_BYTES..]);
        bytes[..CHECK_BYTES].copy_from_slice(&check.to_ne_bytes());
    }

    /// Nothing of a chunk counts.
    pub fn clear(&mut self, chunk: usize) {
        let place = self.place(chunk);
        self.entries[place].fill(0);
    }

    fn place(&self, chunk: usize) -> Range<usize> {
        let entry_bytes = entry_bytes(self.peers.len());
        let start = (chunk - self.range.start) * entry_bytes;
        start..start + entry_bytes
    }
}
