//! What a client that is lost in mid-upload costs, and which way of averaging is then the cheaper one.
//!
//! *Redo* averages while updates arrive. What was mixed with the lost client's part is sent again by the
//! others: for a client that is lost halfway, on average, half a model from each of them. *Spool* keeps
//! every update apart until it is whole, and averages after: nothing is sent again, but every round
//! takes memory for all updates, and the time to average them.

use std::time::Instant;

use crate::error::ReducerError;
use crate::manifest::Dtype;
use crate::named::Named;
use crate::reducer::{Weights, accumulate};

/// What is done about clients that are lost in mid-upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// The others send again what was mixed with it.
    Redo,
    /// Updates are kept apart until they are whole.
    Spool,
    /// For each round what has been the cheaper one so far.
    #[default]
    Auto,
}

impl Named for OnLoss {
    const VALUES: &'static [(OnLoss, &'static str, &'static str)] = &[
        (
            OnLoss::Redo,
            "redo",
            "Updates are averaged while they arrive; others send again what was mixed with the lost one's",
        ),
        (
            OnLoss::Spool,
            "spool",
            "Updates are kept apart until they are whole: in memory, or on the disk of --state",
        ),
        (OnLoss::Auto, "auto", "For each round what has been cheaper so far; the log says why"),
    ];
}

/// What the rounds so far have taught.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Experience {
    /// Updates that were expected.
    pub expected: u64,
    /// Those that were lost in mid-upload.
    pub lost: u64,
    /// How fast updates came, in bytes a second.
    pub upload_bytes_s: f64,
    /// How fast whole updates are averaged, in bytes a second.
    pub average_bytes_s: f64,
}

/// A round that is to be run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prospect {
    pub clients: u64,
    pub model_bytes: u64,
    /// What memory, or the disk, has room for.
    pub free_bytes: u64,
}

/// Which way a round goes, and why.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub spools: bool,
    pub why: String,
}

impl Experience {
    /// Chooses for one round.
    pub fn choose(&self, on_loss: OnLoss, round: Prospect) -> Choice {
        let Prospect { clients, model_bytes, free_bytes } = round;
        let updates_bytes = clients.saturating_mul(model_bytes);
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let room = format!("{:.2} GiB of {:.2} free", gib(updates_bytes), gib(free_bytes));
        let choice = |spools, why| Choice { spools, why };
        match on_loss {
            OnLoss::Redo => return choice(false, "as asked for".into()),
            OnLoss::Spool => return choice(true, "as asked for".into()),
            OnLoss::Auto if self.lost == 0 => {
                return choice(false, format!("none of {} updates was lost so far", self.expected));
            }
            OnLoss::Auto => {}
        }
        let lost_per_round = clients as f64 * self.lost as f64 / self.expected as f64;
        let again_bytes = clients.saturating_sub(1) as f64 * model_bytes as f64 / 2.0;
        let redo_s = lost_per_round * again_bytes / self.upload_bytes_s;
        let spool_s = updates_bytes as f64 / self.average_bytes_s;
        // The other half is for whatever else the host does.
        let fits = updates_bytes < free_bytes / 2;
        let why = format!(
            "{} of {} updates were lost so far, so redo costs {redo_s:.3} s a round, spool {spool_s:.3} s and {room}",
            self.lost, self.expected
        );
        choice(fits && spool_s < redo_s, why)
    }

    /// Finds out how fast this host averages, unless a round has shown it.
    pub fn measure(&mut self) -> Result<(), ReducerError> {
        if self.average_bytes_s > 0.0 {
            return Ok(());
        }
        let weights = Weights::new(&[1.0, 1.0])?;
        let weight = weights.get(0).ok_or(ReducerError::NoWeight)?;
        let (payload, mut sums) = (vec![0; SAMPLE_BYTES], vec![0.0_f32; SAMPLE_BYTES / 4]);
        let bytes = zerocopy::IntoBytes::as_mut_bytes(sums.as_mut_slice());
        // Once without a clock: memory that was never touched is slow.
        accumulate(Dtype::F32, true, weight, &payload, bytes)?;
        let began = Instant::now();
        accumulate(Dtype::F32, false, weight, &payload, bytes)?;
        self.average_bytes_s = SAMPLE_BYTES as f64 / began.elapsed().as_secs_f64().max(1e-9);
        Ok(())
    }
}

/// More than the caches of most hosts hold.
const SAMPLE_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: u64 = 1 << 30;

    fn round(free_bytes: u64) -> Prospect {
        Prospect { clients: 4, model_bytes: MODEL, free_bytes }
    }

    fn experience(lost: u64) -> Experience {
        Experience { expected: 100, lost, upload_bytes_s: 1e8, average_bytes_s: 1e10 }
    }

    #[test]
    fn without_losses_nothing_is_spooled() {
        let choice = experience(0).choose(OnLoss::Auto, round(u64::MAX));
        assert!(!choice.spools);
        assert_eq!(choice.why, "none of 100 updates was lost so far");
    }

    #[test]
    fn many_losses_on_a_slow_network_are_spooled_if_there_is_room() {
        // 0.4 lost clients a round, 1.5 GiB again each, at 0.1 GB/s: 6.4 s; 4 GiB at 10 GB/s: 0.43 s.
        let choice = experience(10).choose(OnLoss::Auto, round(9 * MODEL));
        assert!(choice.spools, "{choice:?}");
        assert!(choice.why.contains("redo costs 6.442 s") && choice.why.contains("spool 0.429 s"));
        assert!(!experience(10).choose(OnLoss::Auto, round(7 * MODEL)).spools);
    }

    #[test]
    fn rare_losses_on_a_fast_network_are_redone() {
        let fast = Experience { upload_bytes_s: 1e10, ..experience(1) };
        assert!(!fast.choose(OnLoss::Auto, round(u64::MAX)).spools);
    }

    #[test]
    fn what_was_asked_for_is_done() {
        assert!(experience(0).choose(OnLoss::Spool, round(0)).spools);
        assert!(!experience(99).choose(OnLoss::Redo, round(u64::MAX)).spools);
    }

    #[test]
    fn averaging_is_measured_once() {
        let mut experience = Experience::default();
        experience.measure().unwrap();
        assert!(experience.average_bytes_s > 1e6, "{experience:?}");
        let known = Experience { average_bytes_s: 7.0, ..experience };
        let mut again = known;
        again.measure().unwrap();
        assert_eq!(again.average_bytes_s, 7.0);
    }
}
