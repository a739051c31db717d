//! Checksums of one peer's chunks: written by the thread that reads its control channel, read by
//! the lanes, without a lock.

use std::ops::Range;
use std::sync::Arc;

use crate::error::ProtocolError;
use crate::signal::Signal;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::wire::message::WireSum;

/// The checksums of one peer, stream by stream.
pub struct SumTable {
    streams: Vec<StreamSums>,
}

/// The checksums of one stream, announced in order.
pub struct StreamSums {
    sums: Box<[AtomicU64]>,
    known: AtomicUsize,
    parked: AtomicBool,
    signal: Arc<Signal>,
}

impl SumTable {
    /// Room for the chunks of each lane; `signals` wake the lanes.
    pub fn new(lanes: &[Range<usize>], signals: &[Arc<Signal>]) -> SumTable {
        let streams = lanes.iter().zip(signals).map(|(lane, signal)| StreamSums {
            sums: (0..lane.len()).map(|_| AtomicU64::new(0)).collect(),
            known: AtomicUsize::new(0),
            parked: AtomicBool::new(false),
            signal: signal.clone(),
        });
        SumTable { streams: streams.collect() }
    }

    /// The checksums of one stream.
    pub fn stream(&self, stream: usize) -> &StreamSums {
        &self.streams[stream]
    }

    /// What was announced of all `lanes`, in the order of the chunks.
    pub fn all(&self, lanes: &[Range<usize>]) -> Vec<u64> {
        let known = |(stream, lane): (&StreamSums, &Range<usize>)| {
            (0..lane.len()).map_while(|index| stream.get(index)).collect::<Vec<_>>()
        };
        self.streams.iter().zip(lanes).flat_map(known).collect()
    }

    /// Takes what a peer announced. One thread calls this.
    pub fn announce(&self, stream: u32, sums: &[WireSum]) -> Result<(), ProtocolError> {
        let known = self.streams.get(stream as usize);
        known.ok_or(ProtocolError::Stream { stream })?.announce(sums)
    }

    /// Forgets everything, before the next model.
    pub fn clear(&self) {
        for stream in &self.streams {
            stream.known.store(0, Ordering::SeqCst);
        }
    }
}

impl StreamSums {
    /// The checksum of the stream's chunk number `index`, if it has been announced.
    pub fn get(&self, index: usize) -> Option<u64> {
        (index < self.known.load(Ordering::SeqCst))
            .then(|| self.sums[index].load(Ordering::Relaxed))
    }

    /// Asks for the lane to be woken when more checksums come. True if chunk `index` is there
    /// already, and there is nothing to wait for.
    pub fn park(&self, index: usize) -> bool {
        self.parked.store(true, Ordering::SeqCst);
        self.get(index).is_some()
    }

    fn announce(&self, sums: &[WireSum]) -> Result<(), ProtocolError> {
        let known = self.known.load(Ordering::SeqCst);
        let places = self.sums.get(known..known + sums.len()).ok_or(ProtocolError::TooManySums)?;
        for (place, sum) in places.iter().zip(sums) {
            place.store(u64::from_le_bytes(*sum), Ordering::Relaxed);
        }
        self.known.store(known + sums.len(), Ordering::SeqCst);
        if self.parked.swap(false, Ordering::SeqCst) {
            self.signal.wake();
        }
        Ok(())
    }
}
