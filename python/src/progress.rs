//! Progress callbacks.

use fedlane::aggregator;
use fedlane::client;
use pyo3::prelude::*;

/// Bytes of one peer in this round: uploaded, downloaded.
type Moved = (u64, u64);

/// Where the engine counts.
pub enum Counters {
    Aggregator(aggregator::Progress),
    /// The client's name, its model's bytes.
    Client(client::Progress, String, u64),
}

impl Counters {
    fn total_bytes(&self) -> u64 {
        match self {
            Counters::Aggregator(progress) => progress.model_bytes(),
            Counters::Client(_, _, model_bytes) => *model_bytes,
        }
    }

    fn read(&self) -> Vec<(String, Moved)> {
        match self {
            Counters::Aggregator(progress) => progress
                .clients()
                .map(|c| (c.name.to_owned(), (c.uploaded_bytes, c.downloaded_bytes)))
                .collect(),
            Counters::Client(progress, name, _) => vec![(name.clone(), progress.bytes())],
        }
    }
}

/// Calls a callback with what has changed since it was called last.
pub struct Reporter {
    callback: Option<Py<PyAny>>,
    counters: Option<Counters>,
    seen: Vec<Moved>,
}

impl Reporter {
    /// Reports only if there are both a callback and something that counts.
    pub fn new(callback: Option<Py<PyAny>>, counters: Option<Counters>) -> Reporter {
        let read = counters.as_ref().filter(|_| callback.is_some()).map(Counters::read);
        let seen = read.unwrap_or_default().into_iter().map(|(_, moved)| moved).collect();
        Reporter { callback, counters, seen }
    }

    /// Reports what has changed.
    pub fn report(&mut self, py: Python<'_>) -> PyResult<()> {
        let (Some(callback), Some(counters)) = (&self.callback, &self.counters) else {
            return Ok(());
        };
        let total = counters.total_bytes();
        for ((name, moved), seen) in counters.read().into_iter().zip(&mut self.seen) {
            let before = std::mem::replace(seen, moved);
            for (phase, now, before) in
                [("upload", moved.0, before.0), ("download", moved.1, before.1)]
            {
                if now != before && now > 0 {
                    callback.call1(py, (phase, name.as_str(), now, total))?;
                }
            }
        }
        Ok(())
    }

    /// Reports the end of a phase, in which everything has moved, for every peer.
    pub fn finish(&self, py: Python<'_>, phase: &str) -> PyResult<()> {
        let (Some(callback), Some(counters)) = (&self.callback, &self.counters) else {
            return Ok(());
        };
        let total = counters.total_bytes();
        for (name, _) in counters.read() {
            callback.call1(py, (phase, name, total, total))?;
        }
        Ok(())
    }
}
