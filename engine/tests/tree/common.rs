//! What tests of trees share: whole trees in one process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use fedlane::aggregator::{Aggregator, AggregatorConfig};
use fedlane::client::{Canceller, Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::edge::{Edge, EdgeConfig, EdgeStep};
use fedlane::error::{AggregatorError, ClientError, SourceError};
use fedlane::lane::receive::Order;
use fedlane::manifest::Manifest;
use fedlane::paths::ReceiveKind;
use fedlane::region::Region;
use fedlane::source::Source;
use fedlane::topology::tree::Leaf;
use fedlane::wire::hello::Secret;

/// A client's update.
#[derive(Clone, Debug)]
pub struct Update {
    pub manifest: Manifest,
    pub bytes: Arc<Vec<u8>>,
    pub weight: f64,
}

impl Source for Update {
    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        out.copy_from_slice(&self.bytes[offset as usize..][..out.len()]);
        Ok(())
    }
}

/// A tree of updates.
#[derive(Clone, Debug)]
pub enum Node {
    Client(Update),
    Edge(Vec<Node>),
}

/// All updates, from left to right.
pub fn leaves(nodes: &[Node]) -> Vec<Update> {
    let each = |node: &Node| match node {
        Node::Client(update) => vec![update.clone()],
        Node::Edge(nodes) => leaves(nodes),
    };
    nodes.iter().flat_map(each).collect()
}

/// Names whose order is that of the numbers.
pub fn name(index: usize) -> String {
    format!("n{index:03}")
}

/// What all aggregators of a tree have in common.
pub fn config(order: Order) -> AggregatorConfig {
    AggregatorConfig {
        order,
        streams: 2,
        chunk_bytes: 4 << 10,
        deadline: Duration::from_secs(30),
        reconnect: Duration::ZERO,
        tree: true,
        ..AggregatorConfig::default()
    }
}

pub fn client(name: &str, weight: f64) -> ClientConfig {
    ClientConfig {
        name: name.into(),
        examples: weight,
        secret: Secret::OPEN,
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: Duration::from_secs(30),
        reconnect: Some(Duration::ZERO),
    }
}

/// What the top of a tree came to: every mean, and whose updates are in it.
pub type Top = Result<Vec<(Vec<u8>, Vec<Leaf>)>, AggregatorError>;

/// Runs an aggregator.
pub fn serve(config: AggregatorConfig) -> (SocketAddr, JoinHandle<Top>) {
    let rounds = config.rounds;
    let aggregator = Aggregator::bind("127.0.0.1:0", config).unwrap();
    let address = aggregator.address();
    let run = move || {
        let mut session = aggregator.gather(None)?;
        let mut means = Vec::new();
        for _ in 0..rounds {
            session.round()?;
            means.push((session.model().unwrap().bytes().to_vec(), session.leaves()));
            session.broadcast()?;
        }
        session.finish()?;
        Ok(means)
    };
    (address, spawn(run))
}

/// Takes part until the session ends. Gives the means that came, and whether the update was in each.
pub fn take_part(
    address: SocketAddr,
    config: ClientConfig,
    update: &dyn Source,
    canceller: &Canceller,
) -> Result<Vec<(Vec<u8>, bool)>, ClientError> {
    let manifest = update.manifest().clone();
    let mut client = Client::join_cancellable(address, config, &manifest, canceller)?;
    let (mut means, mut counted) = (Vec::new(), false);
    loop {
        match client.next_task()? {
            Task::Upload { round } => counted = client.upload(round, update)?.is_none(),
            Task::Download { round, digest } => {
                let mut region = Region::new(manifest.data_bytes())?;
                client.download(round, digest, Target::Region(&mut region))?;
                client.confirm(round);
                means.push((region.bytes().to_vec(), counted));
            }
            Task::Done => return Ok(means),
        }
    }
}

pub type Part = JoinHandle<Result<Vec<(Vec<u8>, bool)>, ClientError>>;
pub type Middle = JoinHandle<Result<Vec<EdgeStep>, AggregatorError>>;

/// Starts an edge. Gives where its clients can dial.
pub fn start_edge(above: SocketAddr, config: EdgeConfig) -> (SocketAddr, Middle) {
    let edge = Edge::bind("127.0.0.1:0", config).unwrap();
    let address = edge.address();
    let run = move || {
        let mut edge = edge.join(&above.to_string())?;
        let mut steps = Vec::new();
        loop {
            match edge.step()? {
                EdgeStep::Done => return Ok(steps),
                step => steps.push(step),
            }
        }
    };
    (address, spawn(run))
}

/// Starts everything below an aggregator, named from a number on.
pub fn start(
    nodes: &[Node],
    first: usize,
    above: SocketAddr,
    below: &AggregatorConfig,
    local_rounds: u32,
    parts: &mut Vec<Part>,
    edges: &mut Vec<Middle>,
) {
    for (index, node) in nodes.iter().enumerate() {
        let name = name(first + index);
        match node {
            Node::Client(update) => {
                let (update, config) = (update.clone(), client(&name, update.weight));
                parts.push(spawn(move || take_part(above, config, &update, &Canceller::default())));
            }
            Node::Edge(nodes) => {
                let below_it = AggregatorConfig { clients: nodes.len(), ..below.clone() };
                let config =
                    EdgeConfig { above: client(&name, 0.0), below: below_it, local_rounds };
                let (address, edge) = start_edge(above, config);
                edges.push(edge);
                start(nodes, 0, address, below, local_rounds, parts, edges);
            }
        }
    }
}

/// The means of a whole tree, which every client has got.
pub fn run(
    nodes: &[Node],
    config: AggregatorConfig,
    local_rounds: u32,
) -> Vec<(Vec<u8>, Vec<Leaf>)> {
    let config = AggregatorConfig { clients: nodes.len(), ..config };
    let (address, top) = serve(config.clone());
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(nodes, 0, address, &config, local_rounds, &mut parts, &mut edges);
    let parts: Vec<_> = parts.into_iter().map(|part| part.join().unwrap().unwrap()).collect();
    for edge in edges {
        let steps = edge.join().unwrap().unwrap();
        let count = |is: fn(&EdgeStep) -> bool| steps.iter().filter(|step| is(step)).count() as u32;
        assert_eq!(
            count(|step| matches!(step, EdgeStep::Round { counted: true, .. })),
            config.rounds
        );
        assert_eq!(count(|step| matches!(step, EdgeStep::Model { .. })), config.rounds);
    }
    let means = top.join().unwrap().unwrap();
    for part in parts {
        let last = |round: usize| part[(round + 1) * (part.len() / means.len()) - 1].clone();
        for (round, (mean, _)) in means.iter().enumerate() {
            assert!(last(round) == (mean.clone(), true), "every client has the mean");
        }
    }
    means
}

/// The same clients under one aggregator.
pub fn star(updates: &[Update], order: Order) -> Vec<u8> {
    let nodes: Vec<Node> = updates.iter().cloned().map(Node::Client).collect();
    run(&nodes, AggregatorConfig { tree: false, ..config(order) }, 1).remove(0).0
}

/// Compares a mean with the reference average.
#[track_caller]
pub fn check(mean: &[u8], updates: &[Update]) {
    use fedlane::reference::{self, Contribution, ReadAt};
    let readers: Vec<_> = updates
        .iter()
        .map(|update| {
            |offset: u64, out: &mut [u8]| update.read(offset, out).map_err(std::io::Error::other)
        })
        .collect();
    let contributions: Vec<Contribution<'_>> = readers
        .iter()
        .zip(updates)
        .map(|(read, update)| Contribution { weight: update.weight, read: read as &ReadAt<'_> })
        .collect();
    let result = |offset: u64, out: &mut [u8]| {
        out.copy_from_slice(&mean[offset as usize..][..out.len()]);
        Ok(())
    };
    let runs = updates[0].manifest.runs();
    let runs: Vec<_> = runs.iter().map(|run| (run.dtype, run.range.clone())).collect();
    reference::check(&runs, &contributions, &result, 1).unwrap();
}
