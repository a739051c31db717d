//! Peers that break the rules, written by hand on the engine's wire module, and the real command
//! run as a process of its own.

mod aggregator;
mod client;
mod process;

pub use aggregator::FakeAggregator;
pub use client::{HostileClient, hello_answer};
pub use process::{Process, command};

use fedlane::manifest::{Dtype, Manifest, synthetic};

/// Bytes of the model that most tests move: more than one chunk for each stream.
pub const MODEL_BYTES: u64 = 1 << 20;

/// Chunks that the tests ask for, in bytes.
pub const CHUNK_BYTES: u64 = 64 << 10;

/// The layout that `--generate` gives a model of [`MODEL_BYTES`].
pub fn model() -> Manifest {
    synthetic(MODEL_BYTES, Dtype::F32).unwrap()
}
