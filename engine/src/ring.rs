//! All-reduce in a ring or a chain: every host sends and receives at once, and at the end each has the same
//! weighted mean, to the last bit.
//!
//! [`Coordinator`] brings the hosts together and keeps count; no parameter passes through it. A [`Member`]
//! takes part: it listens for its left neighbour and dials its right one. [`crate::topology::ring`] says
//! who moves what when; the lanes do it. `docs/WIRE.md` has the messages.
//!
//! Sources are only read, and the mean goes elsewhere, so an attempt that breaks can be made again with those
//! who are left. Neither need fit into memory: a source is read chunk by chunk, once in each attempt, and the
//! mean may go to a [`MeanSink`] as it comes. A host then holds some slots for what is on its way. Sums travel in the accumulator's type, the mean in the model's dtype: a model of F32 costs
//! 2 (N - 1) / N of its size on each link, one of BF16 half as much again in proportion.

mod coordinator;
mod lane;
mod member;
mod stage;

use std::net::ToSocketAddrs;

use crate::client::{Canceller, Client};
use crate::error::{ClientError, SinkError};
use crate::manifest::Manifest;
use crate::region::Region;
use crate::sink::file::ModelFile;

pub use coordinator::{Coordinator, RingConfig, RoundReport, Stopper};
pub use member::{Member, Outcome, RingMember};

/// Takes a mean that is not kept in memory.
pub trait MeanSink: Sync {
    /// Takes bytes of the data section from `offset` on: whole elements of one dtype. Several threads do so
    /// at once, in no order. After an attempt that broke, all comes again, and is another mean: only when the
    /// all-reduce has returned is it the right one.
    ///
    /// # Errors
    /// It cannot take them: that ends the host's part in the ring.
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError>;
}

impl MeanSink for ModelFile {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        self.write_at(offset, bytes)
    }
}

/// Where a host wants the mean.
pub enum Target<'a> {
    /// In memory of the model's size.
    Region(&'a mut Region),
    /// Taken as it comes.
    Sink(&'a dyn MeanSink),
}

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
