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

use crate::named::Named;

/// Who sends to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// All clients to one aggregator.
    Star,
    /// Clients to edges, and these to a root; clients may also send to the root.
    Tree,
    /// From one client to the next, and the mean back.
    Chain,
    /// From each client to the next, around.
    Ring,
}

impl Topology {
    /// All of them, the simplest first.
    pub const ALL: [Topology; 4] =
        [Topology::Star, Topology::Tree, Topology::Chain, Topology::Ring];

    /// The shape in which clients average among themselves, if they do.
    pub fn shape(self) -> Option<Shape> {
        match self {
            Topology::Star | Topology::Tree => None,
            Topology::Ring => Some(Shape::Ring),
            Topology::Chain => Some(Shape::Chain),
        }
    }
}

impl Named for Topology {
    const VALUES: &'static [(Topology, &'static str, &'static str)] = &[
        (Topology::Star, "star", "One aggregator averages the models of all clients"),
        (
            Topology::Tree,
            "tree",
            "Edges (`fedlane edge`) average the models of their clients and send one sum up",
        ),
        (
            Topology::Chain,
            "chain",
            "The clients stand in a line: each adds its model and sends the sums on, and the mean comes back",
        ),
        (
            Topology::Ring,
            "ring",
            "The clients average among themselves, each sending to the next one; all end with the same mean",
        ),
    ];
}

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
