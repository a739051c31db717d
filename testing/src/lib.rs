//! What tests of fedlane break: a network that fails on purpose, at a chosen byte.
//!
//! A [`Proxy`] stands between clients and their aggregator. Its [`Plan`] says what goes wrong on which
//! connection, in which direction and before which byte. The same plan does the same again; [`Dice`]
//! makes plans from a seed.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod dice;
mod plan;
mod proxy;
mod pump;

pub use dice::Dice;
pub use plan::{Channel, Direction, Fault, Kind, Plan, Scope, Then, Which};
pub use proxy::{Proxy, Traffic};
