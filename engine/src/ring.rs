//! Ring all-reduce: every host sends and receives at once, and at the end each has the same weighted mean,
//! to the last bit.
//!
//! [`Coordinator`] brings the hosts together and keeps count; no parameter passes through it. A [`Member`]
//! takes part: it listens for its left neighbour and dials its right one. [`crate::topology::ring`] says
//! who moves what when; the lanes do it. `docs/WIRE.md` has the messages.
//!
//! Sources are only read, and the mean goes to another region, so an attempt that breaks can be made
//! again with those who are left: one model for the source, one for the mean, and some slots for sums on
//! their way. Sums travel in the accumulator's type, the mean in the model's dtype: a model of F32 costs
//! 2 (N - 1) / N of its size on each link, one of BF16 half as much again in proportion.

mod coordinator;
mod lane;
mod member;
mod stage;

use std::net::ToSocketAddrs;

use crate::client::{Canceller, Client};
use crate::error::ClientError;
use crate::manifest::Manifest;

pub use coordinator::{Coordinator, RingConfig, RoundReport, Stopper};
pub use member::{Member, Outcome, RingMember};

/// What was joined.
pub enum Joined {
    /// An aggregator that averages.
    Star(Box<Client>),
    /// A ring.
    Ring(Box<Member>),
}

/// Joins whatever is at `address`: an aggregator that averages, or one that keeps a ring together.
///
/// # Errors
/// As for [`Client::join_cancellable`].
pub fn join_any(
    address: impl ToSocketAddrs + std::fmt::Display,
    config: RingMember,
    manifest: &Manifest,
    canceller: &Canceller,
) -> Result<Joined, ClientError> {
    let client = config.client.clone();
    match Client::join_either(address, client, Some(manifest), canceller)? {
        Ok(client) => Ok(Joined::Star(Box::new(client))),
        Err(entry) => Member::begin(entry, config, manifest, canceller)
            .map(|member| Joined::Ring(Box::new(member))),
    }
}
