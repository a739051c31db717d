//! Who sends what to whom, as pure arithmetic: hosts and a model go in, a plan comes out. Nothing here
//! has a socket or a clock.

mod assign;
pub mod cost;
pub mod measured;
mod order;
pub mod plan;
pub mod profile;
pub mod ring;
pub mod tree;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// In which way hosts average among themselves, each with its neighbours only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shape {
    /// Each sends to the next one, the last to the first.
    #[default]
    Ring,
    /// Each adds what is its own and sends the sums to the next one; the mean comes back the same way.
    Chain,
}

/// A process that takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, unique among all.
    pub name: String,
    /// Where it is.
    pub ip: IpAddr,
}

/// How many of the hosts share the machine that has the most of them.
pub fn most_on_one_machine(hosts: &[Host]) -> usize {
    let on = |ip: &IpAddr| hosts.iter().filter(|host| host.ip == *ip).count();
    hosts.iter().map(|host| on(&host.ip)).max().unwrap_or(0)
}
