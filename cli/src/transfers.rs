//! How long each client's transfer takes, watched from outside: what `fedlane plan --measured` learns from.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fedlane::aggregator::Progress;
use serde_json::json;

use crate::output::Output;

/// How often is looked: often enough for transfers of a second.
const LOOK: Duration = Duration::from_millis(20);

/// Watches the transfers of one direction of a round.
pub struct Watch {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Transfer>>,
    upload: bool,
}

/// What passed between the aggregator and one client.
#[derive(Clone, Default)]
struct Transfer {
    client: String,
    bytes: u64,
    /// From the last look before the first byte to the first look after the last one.
    span: Option<(Instant, Instant)>,
}

impl Watch {
    /// Begins to watch uploads, or downloads. A host that refuses a thread goes without.
    pub fn start(progress: Progress, upload: bool) -> Option<Watch> {
        let (stop, stopped) = mpsc::channel();
        let look = move |transfers: &mut Vec<Transfer>, before: Instant, now: Instant| {
            for (index, client) in progress.clients().enumerate() {
                let bytes = if upload { client.uploaded_bytes } else { client.downloaded_bytes };
                if index == transfers.len() {
                    // What stands there before the first look may be of the last round.
                    transfers.push(Transfer { client: client.name.into(), bytes, span: None });
                }
                transfers[index].note(bytes, before, now);
            }
        };
        let (mut transfers, mut before) = (Vec::new(), Instant::now());
        look(&mut transfers, before, before);
        let thread = std::thread::Builder::new().name("transfers".into()).spawn(move || {
            loop {
                let ended = stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout);
                let now = Instant::now();
                look(&mut transfers, before, now);
                before = now;
                if ended {
                    return transfers;
                }
            }
        });
        Some(Watch { stop, thread: thread.ok()?, upload })
    }

    /// Ends it and prints a line for each client.
    pub fn report(self, round: u32, output: Output) {
        drop(self.stop);
        let direction = if self.upload { "upload" } else { "download" };
        for transfer in self.thread.join().unwrap_or_default() {
            let Some((from, to)) = transfer.span else { continue };
            let seconds = to.duration_since(from).as_secs_f64();
            let fields = json!({ "round": round, "client": transfer.client, "direction": direction,
                "bytes": transfer.bytes, "seconds": seconds });
            output.event("transfer", fields, "");
        }
    }
}

impl Transfer {
    fn note(&mut self, bytes: u64, before: Instant, now: Instant) {
        if bytes < self.bytes {
            // Counted anew, for a new round.
            self.span = None;
            self.bytes = 0;
        }
        if bytes > self.bytes {
            let from = self.span.map_or(before, |(from, _)| from);
            self.span = Some((from, now));
        }
        self.bytes = bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_lasts_from_its_first_byte_to_its_last() {
        let start = Instant::now();
        let at = |look: u32| start + look * LOOK;
        let mut transfer = Transfer { bytes: 100, ..Transfer::default() };
        for (look, bytes) in [100, 0, 0, 30, 60, 100, 100].into_iter().enumerate() {
            transfer.note(bytes, at(look as u32), at(look as u32 + 1));
        }
        assert_eq!(transfer.span, Some((at(3), at(6))));
        assert_eq!(transfer.bytes, 100);
    }
}
