//! Compares a result with a reference average that shares no code with the engine's reducer.

use std::io;
use std::str::FromStr;

use anyhow::Context;
use fedlane::manifest::Manifest;
use fedlane::reference::{self, Checked, Contribution};
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

impl Expected {
    /// Compares every element of `model` with the weighted mean.
    pub fn check(&self, manifest: &Manifest, model: &[u8]) -> anyhow::Result<Checked> {
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
        let runs: Vec<_> =
            manifest.runs().iter().map(|run| (run.dtype, run.range.clone())).collect();
        let result = |offset: u64, out: &mut [u8]| {
            let start = offset as usize;
            out.copy_from_slice(&model[start..start + out.len()]);
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        reference::check(&runs, &contributions, &result, threads)
            .context("the result is not the mean of what the clients sent")
    }
}
