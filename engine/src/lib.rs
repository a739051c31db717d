//! fedlane moves the parameters of a model between an aggregator and its clients and averages
//! them while they arrive.
//!
//! The files follow the bytes: [`source`] -> [`sender`] -> [`wire`] -> [`receiver`] ->
//! [`reducer`] -> [`sink`]. [`lane`] joins them in its hot loops; [`aggregator`] and [`client`]
//! run lanes for a session, and an [`edge`] is both. [`manifest`] says what the bytes mean, [`limits`] bounds everything
//! a peer or a file can make us hold, [`paths`] is the one table of ways into and out of the
//! kernel.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod aggregator;
pub mod channel;
pub mod client;
pub mod control;
pub mod edge;
pub mod error;
pub mod exchange;
pub mod lane;
pub mod ledger;
pub mod limits;
pub mod link;
pub mod manifest;
pub mod meter;
pub mod named;
pub mod paths;
pub mod pool;
pub mod probe;
mod quota;
pub mod receiver;
pub mod reducer;
pub mod reference;
pub mod region;
pub mod ring;
pub mod sender;
pub mod signal;
pub mod sink;
pub mod source;
pub mod speed;
pub mod state;
pub mod sums;
mod sync;
pub mod sys;
pub mod tls;
pub mod topology;
pub mod verdict;
pub mod wire;
