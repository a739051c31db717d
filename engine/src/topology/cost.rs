//! How long a round takes in a shape: a fluid model of links and cores.
//!
//! Bytes flow like water. A lone transfer from i to j has the rate of the narrowest place it passes:
//!
//! ```text
//! rate(i, j)  = min(up(i), down(j), link(i, j), cores(i) / send_cpu(i), cores(j) / receive_cpu(j))
//! delay(i, j) = rtt * (2 + log2(1 + min(bytes, rate * rtt) / window))
//! alone(i, j) = bytes / rate(i, j) + delay(i, j)
//! ```
//!
//! A transfer is asked for and confirmed, which is two round trips; the logarithm are those in which TCP
//! doubles what is under way until the link is full (slow start, RFC 5681, as in N. Cardwell, S. Savage and
//! T. Anderson, "Modeling TCP Latency", INFOCOM 2000).
//!
//! Transfers that end at one host share its link and its cores, as TCP shares a bottleneck: equally, and what
//! one cannot use the others do (max-min fairness; D. Bertsekas and R. Gallager, "Data Networks", 6.5.2). For
//! n transfers of the same size that begin together, that takes exactly
//!
//! ```text
//! gather(j) = max(n * bytes / down(j), n * bytes * receive_cpu(j) / cores(j), max over i of alone(i, j))
//! ```
//!
//! and for transfers that begin at different times r, because a busy link has done all its work when it is
//! done (work conservation),
//!
//! ```text
//! gather(j) = max over i of (r(i) + (bytes of those that begin at r(i) or later) / down(j))
//! ```
//!
//! - **star, tree**: a sum is ready at a host when it has gathered from all its children, whose sums are ready
//!   at r(i); a client's is at 0. The mean is then sent from the root down, each host beginning when it has
//!   it. Sums have the accumulator's size, means the model's. A round is both, one after the other.
//! - **ring**: each host sends and receives (1 + s) (N - 1) / N of the model, all at once, where a sum is s
//!   times as large as the model (P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
//!   clusters of workstations", 2009). The slowest link or host sets the time; each chunk goes round
//!   twice, which adds the way round.
//! - **chain**: sums go from one end to the other and the mean comes back, chunk by chunk and both at once; the
//!   slowest link or host sets the time, and the way there and back is added.
//!
//! Training is not in it: it takes the same time in every shape.

use std::collections::{BTreeSet, HashMap};

use super::profile::Profile;
use crate::error::PlanError;
use crate::limits;

/// Bytes that TCP sends before the first acknowledgement: ten segments (RFC 6928) on each of four
/// connections.
const FIRST_WINDOW_BYTES: f64 = 4.0 * 14_600.0;

/// What a round moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSize {
    /// Bytes of the model.
    pub bytes: u64,
    /// Bytes of its sums: as many for F32, twice as many for BF16, eight times for I8.
    pub sum_bytes: u64,
}

impl ModelSize {
    /// A model whose sums are as large as itself.
    pub fn own_sums(bytes: u64) -> ModelSize {
        ModelSize { bytes, sum_bytes: bytes }
    }

    /// Memory that averaging takes: the sums take the model's place where they are as large, and otherwise
    /// stand beside it.
    pub fn averaging_bytes(&self) -> u64 {
        let beside = if self.sum_bytes == self.bytes { 0 } else { self.sum_bytes };
        self.bytes.saturating_add(beside).saturating_add(limits::MEMORY_RESERVE_BYTES)
    }

    /// Largest of its two sizes that there is: sums of one byte have eight.
    fn check(&self) -> Result<(), PlanError> {
        let limit = limits::MAX_MODEL_BYTES;
        let sizes = [self.bytes, self.sum_bytes.div_ceil(8)];
        match sizes.iter().find(|bytes| !(1..=limit).contains(*bytes)) {
            Some(&bytes) => Err(PlanError::Model { bytes, limit }),
            None => Ok(()),
        }
    }
}

/// What sets a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// What a host can send.
    Uplink(usize),
    /// What a host can receive.
    Downlink(usize),
    /// The cores of a host.
    Cpu(usize),
    /// One transfer on its own, from a host to another.
    Link(usize, usize),
    /// The way there and back.
    Delay,
}

/// A part of a round that nothing else could have shortened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stage {
    /// What it waits for.
    pub limit: Limit,
    /// How long, in seconds.
    pub seconds: f64,
}

/// One transfer of a round, as predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// The host that sends.
    pub from: usize,
    /// The host that receives.
    pub to: usize,
    /// Whether it carries sums or updates; otherwise the mean.
    pub gathers: bool,
    /// Bytes.
    pub bytes: f64,
    /// When it begins, in seconds after the beginning of the round.
    pub begins_s: f64,
    /// When it is over at the latest.
    pub ends_s: f64,
    /// How long it would take if nothing else moved.
    pub alone_s: f64,
}

/// How long a round takes, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    /// The whole round, in seconds.
    pub seconds: f64,
    /// All transfers.
    pub transfers: Vec<Transfer>,
    /// What the round waits for, in order. Their seconds add up to the whole.
    pub stages: Vec<Stage>,
}

impl Prediction {
    /// The stage that takes longest.
    pub fn bottleneck(&self) -> Option<&Stage> {
        self.stages.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

/// One host, in bytes and seconds.
#[derive(Clone, Copy, Debug)]
struct Node {
    up: f64,
    down: f64,
    /// Seconds that all cores together take for a byte.
    send_s: f64,
    receive_s: f64,
    rtt_s: f64,
}

/// One pair, where it is known.
#[derive(Clone, Copy, Debug)]
struct Pair {
    bytes_s: Option<f64>,
    rtt_s: Option<f64>,
}

/// A profile as the formulas need it, for one model.
#[derive(Clone, Debug)]
pub struct Network {
    nodes: Vec<Node>,
    pairs: HashMap<(usize, usize), Pair>,
    model: ModelSize,
}

impl Network {
    /// Of a profile that is checked here.
    ///
    /// # Errors
    /// As [`Profile::check`]; a model without bytes or above [`limits::MAX_MODEL_BYTES`].
    pub fn new(profile: &Profile, model: ModelSize) -> Result<Network, PlanError> {
        profile.check()?;
        model.check()?;
        let names = profile.names()?;
        let nodes = profile.hosts.iter().map(|host| Node {
            up: host.up_gbit_s * BYTES_OF_GBIT,
            down: host.down_gbit_s * BYTES_OF_GBIT,
            send_s: host.send_cpu_s_per_gb * 1e-9 / host.cores,
            receive_s: host.receive_cpu_s_per_gb * 1e-9 / host.cores,
            rtt_s: host.rtt_ms * 1e-3,
        });
        let mut pairs = HashMap::new();
        for link in &profile.links {
            let pair = Pair {
                bytes_s: link.gbit_s.map(|rate| rate * BYTES_OF_GBIT),
                rtt_s: link.rtt_ms.map(|rtt| rtt * 1e-3),
            };
            let (from, to) = (names[link.from.as_str()], names[link.to.as_str()]);
            pairs.insert((from, to), pair);
        }
        Ok(Network { nodes: nodes.collect(), pairs, model })
    }

    /// The model that is planned for.
    pub fn model(&self) -> ModelSize {
        self.model
    }

    /// The rate of a lone transfer in bytes a second; 0 where there is no way.
    pub fn rate(&self, from: usize, to: usize) -> f64 {
        let cpu = 1.0 / self.nodes[from].send_s.max(self.nodes[to].receive_s);
        if from == to {
            return cpu;
        }
        self.nodes[from].up.min(self.nodes[to].down).min(self.link(from, to)).min(cpu)
    }

    fn pair(&self, from: usize, to: usize) -> Option<&Pair> {
        self.pairs.get(&(from, to)).or_else(|| self.pairs.get(&(to, from)))
    }

    fn link(&self, from: usize, to: usize) -> f64 {
        self.pair(from, to).and_then(|pair| pair.bytes_s).unwrap_or(f64::INFINITY)
    }

    /// Seconds from one host to another and back.
    pub fn rtt_s(&self, from: usize, to: usize) -> f64 {
        if from == to {
            return 0.0;
        }
        let ends = || self.nodes[from].rtt_s.max(self.nodes[to].rtt_s);
        self.pair(from, to).and_then(|pair| pair.rtt_s).unwrap_or_else(ends)
    }

    /// Seconds that a transfer of so many bytes waits for answers.
    pub fn delay_s(&self, from: usize, to: usize, bytes: f64) -> f64 {
        let rtt = self.rtt_s(from, to);
        if rtt == 0.0 {
            return 0.0;
        }
        let under_way = bytes.min(self.rate(from, to) * rtt);
        rtt * (2.0 + (1.0 + under_way / FIRST_WINDOW_BYTES).log2())
    }

    /// Seconds that a transfer takes if nothing else moves; infinite where there is no way.
    pub fn alone_s(&self, from: usize, to: usize, bytes: f64) -> f64 {
        match self.rate(from, to) {
            rate if rate > 0.0 => bytes / rate + self.delay_s(from, to, bytes),
            _ => f64::INFINITY,
        }
    }

    /// Seconds in which a host receives so many bytes, of which `own` come from itself.
    pub(crate) fn receiving_s(&self, host: usize, bytes: f64, own: f64) -> f64 {
        let node = &self.nodes[host];
        ((bytes - own) / node.down).max(bytes * node.receive_s)
    }

    /// The same of sending.
    pub(crate) fn sending_s(&self, host: usize, bytes: f64, own: f64) -> f64 {
        let node = &self.nodes[host];
        ((bytes - own) / node.up).max(bytes * node.send_s)
    }

    /// Seconds of a host's cores for bytes that it sends and receives at the same time.
    pub(crate) fn working_s(&self, host: usize, sent: f64, received: f64) -> f64 {
        sent * self.nodes[host].send_s + received * self.nodes[host].receive_s
    }

    fn receiving_limit(&self, host: usize, bytes: f64, own: f64) -> Limit {
        let node = &self.nodes[host];
        let by_cpu = bytes * node.receive_s > (bytes - own) / node.down;
        if by_cpu { Limit::Cpu(host) } else { Limit::Downlink(host) }
    }

    fn sending_limit(&self, host: usize, bytes: f64, own: f64) -> Limit {
        let node = &self.nodes[host];
        let by_cpu = bytes * node.send_s > (bytes - own) / node.up;
        if by_cpu { Limit::Cpu(host) } else { Limit::Uplink(host) }
    }

    /// A tree, of any depth.
    pub fn tree(&self, tree: &Tree) -> Prediction {
        let mut transfers = Vec::new();
        let up = self.gather(tree, &tree.root, &mut transfers);
        let down = self.spread(tree, &tree.root, up.at, &mut transfers);
        let mut stages = up.stages;
        stages.extend(down.stages);
        stages.retain(|stage| stage.seconds > 0.0);
        Prediction { seconds: down.at, transfers, stages }
    }

    /// When the sum of all below is ready at a place.
    fn gather(&self, tree: &Tree, place: &Place, transfers: &mut Vec<Transfer>) -> Moment {
        let children = tree.children(place);
        let mut ready: Vec<(Moment, Place, f64)> = Vec::new();
        for child in children {
            let bytes = match child {
                Place::Client(_) => self.model.bytes as f64,
                Place::Aggregator(_) => self.model.sum_bytes as f64,
            };
            ready.push((self.gather(tree, &child, transfers), child, bytes));
        }
        // Those that begin late first: what is left of the work when each begins.
        ready.sort_by(|a, b| b.0.at.total_cmp(&a.0.at));
        let to = place.host();
        let (mut bytes, mut own) = (0.0, 0.0);
        let mut last = Moment::default();
        for (begun, child, sent) in &ready {
            let from = child.host();
            bytes += sent;
            own += if from == to { *sent } else { 0.0 };
            let shared = self.receiving_s(to, bytes, own);
            last.later(begun, self.receiving_limit(to, bytes, own), shared);
            last.later(begun, Limit::Link(from, to), self.alone_s(from, to, *sent));
        }
        for (begun, child, sent) in &ready {
            let (from, alone_s) = (child.host(), self.alone_s(child.host(), to, *sent));
            let (begins_s, ends_s) = (begun.at, last.at);
            let bytes = *sent;
            transfers.push(Transfer { from, to, gathers: true, bytes, begins_s, ends_s, alone_s });
        }
        last
    }

    /// When all below a place have the mean, which is there at `at`.
    fn spread(&self, tree: &Tree, place: &Place, at: f64, transfers: &mut Vec<Transfer>) -> Moment {
        let from = place.host();
        let children = tree.children(place);
        let each = self.model.bytes as f64;
        let bytes = each * children.len() as f64;
        let own = each * children.iter().filter(|child| child.host() == from).count() as f64;
        let shared = self.sending_s(from, bytes, own);
        let begun = Moment { at, stages: Vec::new() };
        let mut last = begun.clone();
        for child in &children {
            let to = child.host();
            let alone_s = self.alone_s(from, to, each);
            let mut has = begun.clone();
            has.later(&begun, self.sending_limit(from, bytes, own), shared);
            has.later(&begun, Limit::Link(from, to), alone_s);
            let (begins_s, ends_s) = (at, has.at);
            let sent =
                Transfer { from, to, gathers: false, bytes: each, begins_s, ends_s, alone_s };
            transfers.push(sent);
            let mut below = self.spread(tree, child, has.at, transfers);
            if below.at > last.at {
                has.stages.append(&mut below.stages);
                last = Moment { at: below.at, stages: has.stages };
            }
        }
        last
    }

    /// A ring, in this order.
    pub fn ring(&self, order: &[usize]) -> Prediction {
        let hosts = order.len();
        let bytes = self.ring_bytes(hosts);
        let pairs = (0..hosts).map(|i| (order[i], order[(i + 1) % hosts]));
        let busy = order.iter().map(|&host| (host, self.working_s(host, bytes, bytes)));
        let chunk = self.chunk_bytes(hosts);
        self.row(pairs.map(|(a, b)| (a, b, bytes, true)).collect(), busy.collect(), 2.0, chunk)
    }

    /// A chain, in this order; the last one has the mean first.
    pub fn chain(&self, order: &[usize]) -> Prediction {
        let (up, down) = (self.model.sum_bytes as f64, self.model.bytes as f64);
        let mut pairs = Vec::new();
        for pair in order.windows(2) {
            pairs.push((pair[0], pair[1], up, true));
            pairs.push((pair[1], pair[0], down, false));
        }
        let busy = order.iter().enumerate().map(|(place, &host)| {
            let (at_end, between) = self.chain_work_s(host);
            let is_end = place == 0 || place + 1 == order.len();
            (host, if is_end { at_end } else { between })
        });
        self.row(pairs, busy.collect(), 1.0, limits::CHUNK_BYTES as f64)
    }

    /// Bytes that each host of a ring sends.
    pub(crate) fn ring_bytes(&self, hosts: usize) -> f64 {
        let share = (hosts.max(1) - 1) as f64 / hosts.max(1) as f64;
        share * (self.model.bytes as f64 + self.model.sum_bytes as f64)
    }

    /// Seconds of a ring's step if it is the slowest, and seconds that it adds to the way.
    pub(crate) fn ring_step(&self, from: usize, to: usize, hosts: usize) -> (f64, f64) {
        let (bytes, chunk) = (self.ring_bytes(hosts), self.chunk_bytes(hosts));
        (self.alone_s(from, to, bytes), 2.0 * self.hop_s(from, to, bytes, chunk))
    }

    /// The same of a chain, there and back.
    pub(crate) fn chain_step(&self, from: usize, to: usize) -> (f64, f64) {
        let (up, down) = (self.model.sum_bytes as f64, self.model.bytes as f64);
        let chunk = limits::CHUNK_BYTES as f64;
        let alone = self.alone_s(from, to, up).max(self.alone_s(to, from, down));
        (alone, self.hop_s(from, to, up, chunk) + self.hop_s(to, from, down, chunk))
    }

    /// Seconds of a host's cores at an end of a chain, the busier one, and in between.
    pub(crate) fn chain_work_s(&self, host: usize) -> (f64, f64) {
        let (up, down) = (self.model.sum_bytes as f64, self.model.bytes as f64);
        let at_end = self.working_s(host, up, down).max(self.working_s(host, down, up));
        (at_end, self.working_s(host, up + down, up + down))
    }

    /// Bytes of a chunk in a ring, which goes around as sums and as their mean: half of both together.
    fn chunk_bytes(&self, hosts: usize) -> f64 {
        let most = limits::RING_CHUNK_BYTES;
        let widening = self.model.sum_bytes.div_ceil(self.model.bytes.max(1));
        let chunk = super::ring::chunk_bytes(self.model.bytes, hosts, 2, most, widening) as f64;
        chunk * (1.0 + self.model.sum_bytes as f64 / self.model.bytes.max(1) as f64) / 2.0
    }

    /// Transfers that all run at once, chunk by chunk: the slowest sets the time, and the way of a chunk, which
    /// passes each of them so many times, is added.
    fn row(
        &self,
        pairs: Vec<(usize, usize, f64, bool)>,
        busy: Vec<(usize, f64)>,
        passes: f64,
        chunk: f64,
    ) -> Prediction {
        let mut slowest = Moment::default();
        let start = Moment::default();
        let mut way = 0.0;
        for &(from, to, bytes, _) in &pairs {
            slowest.later(&start, Limit::Link(from, to), self.alone_s(from, to, bytes));
            way += passes * self.hop_s(from, to, bytes, chunk);
        }
        for (host, seconds) in busy {
            slowest.later(&start, Limit::Cpu(host), seconds);
        }
        let seconds = slowest.at + way;
        let transfers = pairs.iter().map(|&(from, to, bytes, gathers)| {
            let alone_s = self.alone_s(from, to, bytes);
            Transfer { from, to, gathers, bytes, begins_s: 0.0, ends_s: seconds, alone_s }
        });
        let transfers = transfers.collect();
        let mut stages = slowest.stages;
        stages.push(Stage { limit: Limit::Delay, seconds: way });
        stages.retain(|stage| stage.seconds > 0.0);
        Prediction { seconds, transfers, stages }
    }

    /// Seconds in which a chunk passes a link once.
    pub(crate) fn hop_s(&self, from: usize, to: usize, bytes: f64, chunk: f64) -> f64 {
        match self.rate(from, to) {
            rate if rate > 0.0 => self.rtt_s(from, to) / 2.0 + chunk.min(bytes) / rate,
            _ => f64::INFINITY,
        }
    }
}

/// Bytes of 10^9 bit.
const BYTES_OF_GBIT: f64 = 1.25e8;

/// A point in time, and what led to it.
#[derive(Clone, Debug, Default)]
struct Moment {
    at: f64,
    stages: Vec<Stage>,
}

impl Moment {
    /// Moves to `seconds` after `begun`, if that is later.
    fn later(&mut self, begun: &Moment, limit: Limit, seconds: f64) {
        if begun.at + seconds > self.at {
            let mut stages = begun.stages.clone();
            stages.push(Stage { limit, seconds });
            *self = Moment { at: begun.at + seconds, stages };
        }
    }
}

/// A host in one of its parts: one that averages may train too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It averages.
    Aggregator(usize),
    /// It trains.
    Client(usize),
}

impl Place {
    /// The host.
    pub fn host(&self) -> usize {
        match *self {
            Place::Aggregator(host) | Place::Client(host) => host,
        }
    }
}

/// Who sends to whom in a star or tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    root: Place,
    /// Who sends to each host that averages.
    above: HashMap<usize, Vec<Place>>,
}

impl Tree {
    /// A tree with this root. `clients` are pairs of a host that trains and the aggregator that it sends to;
    /// each of these but the root sends to the root.
    pub fn new(root: usize, clients: &[(usize, usize)]) -> Tree {
        let mut above: HashMap<usize, Vec<Place>> = HashMap::new();
        let edges: BTreeSet<usize> = clients.iter().map(|&(_, to)| to).collect();
        let edges = edges.into_iter().filter(|&edge| edge != root).map(Place::Aggregator);
        above.insert(root, edges.collect());
        for &(client, to) in clients {
            above.entry(to).or_default().push(Place::Client(client));
        }
        Tree { root: Place::Aggregator(root), above }
    }

    /// Those who send to a place.
    pub fn children(&self, place: &Place) -> Vec<Place> {
        match place {
            Place::Aggregator(host) => self.above.get(host).cloned().unwrap_or_default(),
            Place::Client(_) => Vec::new(),
        }
    }

    /// The host that has the mean first.
    pub fn root(&self) -> usize {
        self.root.host()
    }
}
