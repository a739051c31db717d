//! Ring all-reduce: every host sends and receives at once, and every one has the same mean at the end.

mod lane;
mod stage;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::channel::DataChannel;
use crate::manifest::Manifest;
use crate::paths::{ReceiveKind, SendKind};
use crate::reducer::Weights;
use crate::region::Region;
use crate::signal::Signal;
use crate::source::Source;
use crate::topology::ring::Schedule;
use lane::{LanePart, Task};
use stage::Stage;

#[doc(hidden)]
pub fn bench_lane(
    rank: usize,
    manifest: &Manifest,
    source: &dyn Source,
    weights: &[f64],
    out: &mut Region,
    chunk_bytes: u64,
    send: SendKind,
    left: Arc<DataChannel>,
    right: Arc<DataChannel>,
) {
    let chunks = manifest.chunks(chunk_bytes).unwrap();
    let weights = Weights::new(weights).unwrap();
    let (sent, came) = (AtomicU64::new(0), AtomicU64::new(0));
    let task = Task { rank, chunks: &chunks, source, weights: &weights, send_path: send,
        receive_path: ReceiveKind::default(), deadline: Duration::from_secs(10), sent: &sent, came: &came };
    let mut stage = Stage::new(weights.clients(), chunk_bytes).unwrap();
    let mut sums = vec![0; chunks.len()];
    let signal = Signal::new().unwrap();
    let part = LanePart { schedule: Schedule::new(weights.clients(), 0..chunks.len()), out: out.bytes_mut().0, out_start: 0, out_file: None,
        sums: &mut sums, first_chunk: 0, stage: &mut stage, signal: &signal };
    lane::run(&task, part, left, right).unwrap();
}
