//! Checksums of one peer's chunks: written by the thread that reads its control channel, read by
//! the lanes, without a lock.

use std::ops::Range;
use std::sync::Arc;

use crate::error::ProtocolError;
use crate::signal::Signal;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use crate::wire::message::WireSum;

/// Nothing is known.
const UNKNOWN: u8 = 0;
/// The peer said it.
const ANNOUNCED: u8 = 1;
/// Bytes came that have it.
const VERIFIED: u8 = 2;
/// Bytes came that have it, over an earlier connection: the peer has to say it again.
const DOUBTED: u8 = 3;

/// The checksums of one peer.
pub struct SumTable {
    sums: Box<[AtomicU64]>,
    states: Box<[AtomicU8]>,
    lanes: Vec<LaneState>,
}

struct LaneState {
    range: Range<usize>,
    /// The lane waits for a checksum.
    parked: AtomicBool,
    /// How many chunks are doubted.
    doubted: AtomicUsize,
    signal: Arc<Signal>,
}

/// The checksums of one lane's chunks.
#[derive(Clone, Copy)]
pub struct LaneSums<'a> {
    table: &'a SumTable,
    lane: &'a LaneState,
}

impl SumTable {
    /// Room for the chunks of each lane; `signals` wake the lanes. Lanes follow each other.
    pub fn new(lanes: &[Range<usize>], signals: &[Arc<Signal>]) -> SumTable {
        let chunks = lanes.last().map_or(0, |lane| lane.end);
        let lanes = lanes.iter().zip(signals).map(|(lane, signal)| LaneState {
            range: lane.clone(),
            parked: AtomicBool::new(false),
            doubted: AtomicUsize::new(0),
            signal: signal.clone(),
        });
        SumTable {
            sums: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            states: (0..chunks).map(|_| AtomicU8::new(UNKNOWN)).collect(),
            lanes: lanes.collect(),
        }
    }

    /// The checksums of one lane.
    pub fn lane(&self, lane: usize) -> LaneSums<'_> {
        LaneSums { table: self, lane: &self.lanes[lane] }
    }

    /// What was announced, in the order of the chunks.
    pub fn all(&self) -> Vec<u64> {
        (0..self.sums.len()).map_while(|chunk| self.get(chunk)).collect()
    }

    /// Takes what a peer announced of the chunks from `first` on. One thread calls this.
    ///
    /// # Errors
    /// Chunks that do not exist; another checksum than was announced before: control channels are
    /// sealed, so the peer's update has changed.
    pub fn announce(&self, first: u32, sums: &[WireSum]) -> Result<(), ProtocolError> {
        let first = first as usize;
        let end = first.checked_add(sums.len()).filter(|&end| end <= self.sums.len());
        let end = end.ok_or(ProtocolError::TooManySums)?;
        for (chunk, sum) in (first..end).zip(sums) {
            self.announce_one(chunk, u64::from_le_bytes(*sum))?;
        }
        let touched = |lane: &&LaneState| lane.range.start < end && first < lane.range.end;
        for lane in self.lanes.iter().filter(touched) {
            if lane.parked.swap(false, Ordering::SeqCst) {
                lane.signal.wake();
            }
        }
        Ok(())
    }

    fn announce_one(&self, chunk: usize, sum: u64) -> Result<(), ProtocolError> {
        let state = self.states[chunk].load(Ordering::SeqCst);
        if state == UNKNOWN {
            self.sums[chunk].store(sum, Ordering::Relaxed);
            self.states[chunk].store(ANNOUNCED, Ordering::SeqCst);
            return Ok(());
        }
        if self.sums[chunk].load(Ordering::Relaxed) != sum {
            return Err(ProtocolError::Changed { chunk });
        }
        let trusts = self.states[chunk].compare_exchange(
            DOUBTED,
            VERIFIED,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        if trusts.is_ok()
            && let Some(lane) = self.lanes.iter().find(|lane| lane.range.contains(&chunk))
        {
            lane.doubted.fetch_sub(1, Ordering::SeqCst);
        }
        Ok(())
    }

    fn get(&self, chunk: usize) -> Option<u64> {
        let known =
            matches!(self.states[chunk].load(Ordering::SeqCst), ANNOUNCED | VERIFIED | DOUBTED);
        known.then(|| self.sums[chunk].load(Ordering::Relaxed))
    }

    /// Forgets everything, before the next model.
    pub fn clear(&self) {
        self.states.iter().for_each(|state| state.store(UNKNOWN, Ordering::SeqCst));
        self.lanes.iter().for_each(|lane| lane.doubted.store(0, Ordering::SeqCst));
    }
}

impl LaneSums<'_> {
    /// The checksum of a chunk, if it has been announced.
    pub fn get(&self, chunk: usize) -> Option<u64> {
        self.table.get(chunk)
    }

    /// Asks for the lane to be woken when more checksums come. True if that of `chunk` is there
    /// already, and there is nothing to wait for.
    pub fn park(&self, chunk: usize) -> bool {
        self.lane.parked.store(true, Ordering::SeqCst);
        self.get(chunk).is_some()
    }

    /// As [`LaneSums::park`], for the end of all doubts.
    pub fn park_for_proof(&self) -> bool {
        self.lane.parked.store(true, Ordering::SeqCst);
        self.is_proven()
    }

    /// Bytes came that match.
    pub fn verify(&self, chunk: usize) {
        self.table.states[chunk].store(VERIFIED, Ordering::SeqCst);
    }

    /// A chunk that was verified before is to be announced again.
    pub fn doubt(&self, chunk: usize) {
        self.lane.doubted.fetch_add(1, Ordering::SeqCst);
        let state = &self.table.states[chunk];
        if state.swap(DOUBTED, Ordering::SeqCst) == DOUBTED {
            self.lane.doubted.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A chunk came in an earlier life of this process, with this checksum.
    pub fn recall(&self, chunk: usize, sum: u64) {
        self.table.sums[chunk].store(sum, Ordering::Relaxed);
        self.table.states[chunk].store(VERIFIED, Ordering::SeqCst);
    }

    /// Whether there is no doubt.
    pub fn is_proven(&self) -> bool {
        self.lane.doubted.load(Ordering::SeqCst) == 0
    }
}
