//! Counters and clocks of the phases of a session.

use std::time::Instant;

use crate::paths::{ReceiveKind, SendKind};
use crate::sys::process::{self, Usage};

/// What one phase moved and cost in this process.
#[derive(Clone, Debug)]
pub struct Phase {
    /// Its name: `prepare`, `upload`, `broadcast`, ...
    pub name: &'static str,
    /// The round it belongs to; 0 is before the first.
    pub round: u32,
    /// Payload bytes that this process received or sent.
    pub bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// CPU seconds and page faults of this process.
    pub usage: Usage,
    /// The send path, in a phase that sends.
    pub send_path: Option<SendKind>,
    /// The receive path, in a phase that receives.
    pub receive_path: Option<ReceiveKind>,
}

impl Phase {
    /// Notes how the bytes were sent.
    pub fn sent_by(self, path: SendKind) -> Phase {
        Phase { send_path: Some(path), ..self }
    }

    /// Notes how the bytes were received.
    pub fn received_by(self, path: ReceiveKind) -> Phase {
        Phase { receive_path: Some(path), ..self }
    }

    /// Payload in units of 10^9 bit each second; 0 for a phase that moved nothing.
    pub fn goodput_gbit_s(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 * 8e-9 / self.seconds } else { 0.0 }
    }

    /// CPU seconds per 10^9 bytes of payload, in user mode and in the kernel.
    pub fn cpu_s_per_gb(&self) -> (f64, f64) {
        let gb = (self.bytes as f64 * 1e-9).max(f64::MIN_POSITIVE);
        match self.bytes {
            0 => (0.0, 0.0),
            _ => (self.usage.cpu_user_s / gb, self.usage.cpu_kernel_s / gb),
        }
    }
}

/// A running phase.
pub struct Meter {
    name: &'static str,
    round: u32,
    started: Instant,
    before: Usage,
}

impl Meter {
    /// Starts the clock.
    pub fn start(name: &'static str, round: u32) -> Meter {
        Meter { name, round, started: Instant::now(), before: process::usage() }
    }

    /// What happened since it started.
    pub fn stop(&self, bytes: u64) -> Phase {
        let seconds = self.started.elapsed().as_secs_f64();
        let after = process::usage();
        let usage = Usage {
            cpu_user_s: after.cpu_user_s - self.before.cpu_user_s,
            cpu_kernel_s: after.cpu_kernel_s - self.before.cpu_kernel_s,
            page_faults: after.page_faults - self.before.page_faults,
        };
        let (name, round) = (self.name, self.round);
        Phase { name, round, bytes, seconds, usage, send_path: None, receive_path: None }
    }
}
