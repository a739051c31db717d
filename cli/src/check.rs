//! Compares a result with a reference average that shares no code with the engine's reducer.

use std::io;
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::reference::{self, Checked, Contribution, ReadAt};
use serde::{Deserialize, Serialize};

use crate::update::Update;

/// What every client sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Expected(pub Vec<Sender>);

/// What one client sends.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sender {
    /// Its parameters.
    pub update: Update,
    /// Its weight.
    pub examples: f64,
}

impl FromStr for Expected {
    type Err = serde_json::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}

/// Parts of a mean that is not held as a whole: of every tensor the first bytes, the last ones, and some in
/// between.
pub struct Samples {
    /// Parts of the data section, in order.
    parts: Vec<(Dtype, Range<u64>)>,
    bytes: Mutex<Vec<Vec<u8>>>,
}

/// Bytes of a sample.
const SAMPLE_BYTES: u64 = 16 << 10;

/// From one sample of a tensor to the next.
const SAMPLE_DISTANCE_BYTES: u64 = 4 << 20;

impl Samples {
    /// Samples of every tensor.
    pub fn new(manifest: &Manifest) -> Samples {
        let mut parts: Vec<(Dtype, Range<u64>)> = Vec::new();
        let mut end = 0;
        for tensor in manifest.tensors() {
            let range = &tensor.range;
            let last = range.end.saturating_sub(SAMPLE_BYTES).max(range.start);
            let starts = range.clone().step_by(SAMPLE_DISTANCE_BYTES as usize).chain([last]);
            for start in starts {
                // Both are whole elements from the begin of the tensor.
                let part = start.max(end)..(start + SAMPLE_BYTES).min(range.end);
                if part.start < part.end {
                    end = part.end;
                    parts.push((tensor.dtype, part));
                }
            }
        }
        let length = |part: &Range<u64>| (part.end - part.start) as usize;
        let bytes = parts.iter().map(|(_, part)| vec![0; length(part)]).collect();
        Samples { parts, bytes: Mutex::new(bytes) }
    }

    /// Keeps what is sampled of these bytes of the data section.
    pub fn take(&self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        let first = self.parts.partition_point(|(_, part)| part.end <= offset);
        let parts = self.parts[first..].iter().take_while(|(_, part)| part.start < end);
        let mut kept = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        for ((_, part), kept) in parts.zip(&mut kept[first..]) {
            let both = part.start.max(offset)..part.end.min(end);
            let within = |start: u64| (both.start - start) as usize..(both.end - start) as usize;
            kept[within(part.start)].copy_from_slice(&bytes[within(offset)]);
        }
    }
}

impl Expected {
    /// Compares every element of `model` with the weighted mean.
    pub fn check(&self, manifest: &Manifest, model: &[u8]) -> anyhow::Result<Checked> {
        let runs: Vec<_> =
            manifest.runs().iter().map(|run| (run.dtype, run.range.clone())).collect();
        self.check_parts(&runs, &|offset, out| {
            let start = offset as usize;
            out.copy_from_slice(&model[start..start + out.len()]);
            Ok(())
        })
    }

    /// Compares samples of a model with the weighted mean.
    pub fn check_samples(&self, samples: &Samples) -> anyhow::Result<Checked> {
        let bytes = samples.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_parts(&samples.parts, &|offset, out| {
            let place = samples.parts.partition_point(|(_, part)| part.end <= offset);
            let start = (offset - samples.parts[place].1.start) as usize;
            out.copy_from_slice(&bytes[place][start..start + out.len()]);
            Ok(())
        })
    }

    fn check_parts(
        &self,
        parts: &[(Dtype, Range<u64>)],
        result: &ReadAt<'_>,
    ) -> anyhow::Result<Checked> {
        let sources: Vec<_> =
            self.0.iter().map(|sender| sender.update.open()).collect::<Result<_, _>>()?;
        let readers: Vec<_> = sources
            .iter()
            .map(|source| {
                move |offset: u64, out: &mut [u8]| {
                    source.read(offset, out).map_err(|error| io::Error::other(error.to_string()))
                }
            })
            .collect();
        let contributions: Vec<_> = self
            .0
            .iter()
            .zip(&readers)
            .map(|(sender, read)| Contribution { weight: sender.examples, read })
            .collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        reference::check(parts, &contributions, result, threads)
            .context("the result is not the mean of what the clients sent")
    }
}
