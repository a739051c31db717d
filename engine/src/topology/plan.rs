//! Which shape a session should have, and who is where in it, so that a round takes the least time.
//!
//! ```
//! use fedlane::topology::cost::ModelSize;
//! use fedlane::topology::plan::{Layout, Method, best};
//! use fedlane::topology::profile::{HostProfile, Profile};
//!
//! let client = |name: &str| HostProfile { client: true, ..HostProfile::new(name, 1.0, 1.0) };
//! let hub = |name: &str| HostProfile { aggregator: true, ..HostProfile::new(name, 10.0, 10.0) };
//! let hosts = vec![hub("slow hub"), hub("hub"), client("a"), client("b")];
//! let mut profile = Profile { hosts, links: Vec::new() };
//! profile.hosts[0].up_gbit_s = 0.1;
//! let model = ModelSize::own_sums(1 << 30);
//! let plan = best(&profile, model, Method::Best).unwrap();
//! assert!(plan.seconds() <= plan.lower_bound_s * 1.1);
//! ```

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

use super::assign::{self, Parties, Placement, Table};
use super::cost::{ModelSize, Network, Prediction, Tree};
use super::order;
use super::profile::Profile;
use super::{Shape, Topology};
use crate::error::PlanError;
use crate::limits;
use crate::named::Named;

/// How a plan is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Exact where that takes milliseconds, otherwise the heuristic.
    Best,
    /// The heuristic also for small sessions.
    Heuristic,
}

/// Who is where. Hosts are places in the profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Of a star or tree.
    Tree {
        /// The aggregator that has the mean first.
        root: usize,
        /// Each client, and the aggregator that it sends to.
        clients: Vec<(usize, usize)>,
    },
    /// Of a chain or ring, in this order.
    Row(Vec<usize>),
}

/// A shape, who is where in it, and how good that is.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Who sends to whom.
    pub topology: Topology,
    /// Who is where.
    pub layout: Layout,
    /// What is predicted.
    pub prediction: Prediction,
    /// No layout of this shape is faster than this, in seconds.
    pub lower_bound_s: f64,
    /// Seconds of a layout in the order of the profile; infinite where that is none.
    pub round_robin_s: f64,
    /// The median of random layouts, in seconds; infinite where most are none.
    pub random_s: f64,
    /// Whether all layouts of this shape were weighed.
    pub is_proven: bool,
}

impl Plan {
    /// The predicted time of a round.
    pub fn seconds(&self) -> f64 {
        self.prediction.seconds
    }

    /// Edges of a tree: aggregators between clients and the root.
    pub fn edges(&self) -> Vec<usize> {
        let Layout::Tree { root, clients } = &self.layout else { return Vec::new() };
        let mut edges: Vec<usize> =
            clients.iter().map(|&(_, to)| to).filter(|to| to != root).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }
}

/// The fastest plan of all shapes.
///
/// # Errors
/// A profile that is wrong; and, where no shape can be, why a star cannot.
pub fn best(profile: &Profile, model: ModelSize, method: Method) -> Result<Plan, PlanError> {
    let (star, others) = Topology::ALL.split_first().expect("there are shapes");
    let star = plan(profile, model, *star, method);
    // What is wrong with the profile is wrong for all.
    Network::new(profile, model)?;
    let others = others.iter().filter_map(|&other| plan(profile, model, other, method).ok());
    // A simpler shape is taken if it is as fast.
    let faster = |a: Plan, b: Plan| if b.seconds() < a.seconds() * (1.0 - 1e-9) { b } else { a };
    match star {
        Ok(star) => Ok(others.fold(star, faster)),
        Err(error) => others.reduce(faster).ok_or(error),
    }
}

/// The fastest plan of one shape.
///
/// # Errors
/// A profile that is wrong, or that this shape cannot be made of.
pub fn plan(
    profile: &Profile,
    model: ModelSize,
    topology: Topology,
    method: Method,
) -> Result<Plan, PlanError> {
    let network = Network::new(profile, model)?;
    match topology.shape() {
        None => of_tree(profile, &network, topology, method),
        Some(shape) => of_row(profile, &network, (topology, shape), method),
    }
}

fn clients_of(profile: &Profile) -> Result<Vec<usize>, PlanError> {
    let hosts = profile.hosts.iter().enumerate();
    let clients: Vec<usize> = hosts.filter(|(_, host)| host.client).map(|(at, _)| at).collect();
    match clients.len() {
        0 => Err(PlanError::NoClients),
        count if count > limits::MAX_CLIENTS => {
            Err(PlanError::TooMany { what: "clients", count, limit: limits::MAX_CLIENTS })
        }
        _ => Ok(clients),
    }
}

fn parties(profile: &Profile, model: ModelSize) -> Result<Parties, PlanError> {
    let clients = clients_of(profile)?;
    let may: Vec<usize> =
        (0..profile.hosts.len()).filter(|&host| profile.hosts[host].aggregator).collect();
    let limit = limits::MAX_PLAN_AGGREGATORS;
    if may.len() > limit {
        return Err(PlanError::TooMany { what: "aggregators", count: may.len(), limit });
    }
    let wanted = model.averaging_bytes();
    let memory = |host: usize| profile.hosts[host].memory_bytes.unwrap_or(u64::MAX);
    let Some(&most) = may.iter().max_by_key(|&&host| memory(host)) else {
        return Err(PlanError::NoAggregators);
    };
    if memory(most) < wanted {
        let name = profile.hosts[most].name.clone();
        return Err(PlanError::Memory { wanted, most: memory(most), name });
    }
    let aggregators: Vec<usize> = may.into_iter().filter(|&host| memory(host) >= wanted).collect();
    let room = aggregators.iter().map(|&host| {
        let most = profile.hosts[host].max_clients.unwrap_or(u64::MAX);
        most.min(limits::MAX_CLIENTS as u64) as usize
    });
    let room = room.collect();
    Ok(Parties { clients, aggregators, room })
}

fn of_tree(
    profile: &Profile,
    network: &Network,
    topology: Topology,
    method: Method,
) -> Result<Plan, PlanError> {
    let parties = parties(profile, network.model())?;
    let table = Table::new(network, &parties);
    if let Some(client) = table.cut_off() {
        let name = profile.hosts[parties.clients[client]].name.clone();
        return Err(PlanError::CutOff { name });
    }
    let clients = parties.clients.len();
    let star = |root| Placement { root, of: vec![root; clients] };
    let stars = (0..parties.aggregators.len()).map(star);
    let (found, lower_bound_s, round_robin) = match topology {
        Topology::Star => {
            let best = stars.min_by(|a, b| table.seconds(a).total_cmp(&table.seconds(b)));
            let best = best.filter(|best| table.seconds(best).is_finite());
            let bound = best.as_ref().map_or(f64::INFINITY, |best| table.seconds(best));
            (best, bound, star(0))
        }
        _ => {
            let best = assign::best(&table, method == Method::Best);
            (best, assign::lower_bound(&table), assign::round_robin(&parties))
        }
    };
    let placement = found.ok_or(PlanError::NoPlace { topology: topology.name(), clients })?;
    let mut random = Random::new();
    let random_s = random.median(|random| {
        let root = random.below(parties.aggregators.len());
        let of = |_| match topology {
            Topology::Star => root,
            _ => random.below(parties.aggregators.len()),
        };
        table.seconds(&Placement { root, of: (0..clients).map(of).collect() })
    });
    let root = parties.aggregators[placement.root];
    let pairs = parties.clients.iter().zip(&placement.of);
    let pairs: Vec<_> = pairs.map(|(&client, &to)| (client, parties.aggregators[to])).collect();
    let is_star = pairs.iter().all(|&(_, to)| to == root);
    let small = clients <= limits::EXACT_CLIENTS
        && parties.aggregators.len() <= limits::EXACT_AGGREGATORS
        && method == Method::Best;
    Ok(Plan {
        // A tree without edges is a star.
        topology: if is_star { Topology::Star } else { topology },
        prediction: network.tree(&Tree::new(root, &pairs)),
        layout: Layout::Tree { root, clients: pairs },
        lower_bound_s,
        round_robin_s: table.seconds(&round_robin),
        random_s,
        is_proven: topology == Topology::Star || small,
    })
}

fn of_row(
    profile: &Profile,
    network: &Network,
    (topology, shape): (Topology, Shape),
    method: Method,
) -> Result<Plan, PlanError> {
    let hosts = clients_of(profile)?;
    let (name, limit) = (topology.name(), limits::MAX_RANKS);
    if !(2..=limit).contains(&hosts.len()) {
        return Err(PlanError::Size { topology: name, limit, clients: hosts.len() });
    }
    // Its own update, and the mean.
    let wanted = network.model().averaging_bytes().saturating_add(network.model().bytes);
    let memory = |host: usize| profile.hosts[host].memory_bytes.unwrap_or(u64::MAX);
    if let Some(&least) = hosts.iter().find(|&&host| memory(host) < wanted) {
        let host = profile.hosts[least].name.clone();
        return Err(PlanError::RowMemory {
            topology: name,
            wanted,
            most: memory(least),
            name: host,
        });
    }
    let predict = |order: &[usize]| match shape {
        Shape::Ring => network.ring(order),
        Shape::Chain => network.chain(order),
    };
    let exact = method == Method::Best;
    let order = order::best(network, shape, &hosts, exact);
    let prediction = predict(&order);
    if !prediction.seconds.is_finite() {
        return Err(PlanError::NoOrder { topology: name });
    }
    let mut random = Random::new();
    let random_s = random.median(|random| {
        let mut order = hosts.clone();
        random.shuffle(&mut order);
        predict(&order).seconds
    });
    Ok(Plan {
        topology,
        prediction,
        layout: Layout::Row(order),
        lower_bound_s: order::lower_bound(network, shape, &hosts),
        round_robin_s: predict(&hosts).seconds,
        random_s,
        is_proven: exact && hosts.len() <= limits::EXACT_ORDER,
    })
}

/// Random layouts to compare with; the same in every run.
struct Random(Xoshiro256PlusPlus);

/// Random layouts that are weighed.
const RANDOM_LAYOUTS: usize = 31;

impl Random {
    fn new() -> Random {
        Random(Xoshiro256PlusPlus::seed_from_u64(1))
    }

    fn below(&mut self, end: usize) -> usize {
        // A bias of 2^-50 is nothing here.
        (self.0.next_u64() % end.max(1) as u64) as usize
    }

    fn shuffle(&mut self, items: &mut [usize]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    fn median(&mut self, mut draw: impl FnMut(&mut Random) -> f64) -> f64 {
        let mut all: Vec<f64> = (0..RANDOM_LAYOUTS).map(|_| draw(self)).collect();
        all.sort_by(f64::total_cmp);
        all[RANDOM_LAYOUTS / 2]
    }
}
