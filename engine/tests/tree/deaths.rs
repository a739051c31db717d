//! Edges and clients that die: the mean is that of the others, to the bit, or all end and say why.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::spawn;
use std::time::Duration;

use fedlane::aggregator::AggregatorConfig;
use fedlane::client::{Canceller, ClientConfig};
use fedlane::edge::EdgeConfig;
use fedlane::error::SourceError;
use fedlane::lane::receive::Order;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::source::Source;
use fedlane::topology::tree::Leaf;
use fedlane_testing::{Channel, Direction, Fault, Kind, Plan, Proxy, Scope, Then, Traffic, Which};

use crate::common::{
    Middle, Node, Part, Update, check, client, config, manifest, name, serve, star, start,
    start_edge, take_part,
};
use crate::means::generated;

/// How long broken connections are dialled again, where they are.
const RECONNECT: Duration = Duration::from_secs(10);

const ORDERS: [Order; 2] = [Order::Arrival, Order::Client];

fn model() -> Manifest {
    manifest(&[("w", Dtype::F32, &[30_000]), ("h", Dtype::BF16, &[10_001])])
}

/// Updates of five clients: two below the first edge, two below the second, one without an edge.
fn updates() -> Vec<(String, Update)> {
    let [a, b, c] = [name(0), name(1), name(2)];
    let names = [format!("{a}/{a}"), format!("{a}/{b}"), format!("{b}/{a}"), format!("{b}/{b}"), c];
    let update = |seed: u64| generated(&model(), seed as f64, seed);
    names.into_iter().zip(1..).map(|(name, seed)| (name, update(seed))).collect()
}

/// The mean must be that of the leaves that are said to be in it. Gives their names.
fn counted(mean: &[u8], named: &[Leaf], order: Order) -> Vec<String> {
    let in_mean = |name: &String| named.iter().any(|l| l.name == *name && l.left_out.is_none());
    let (names, updates): (Vec<String>, Vec<Update>) =
        updates().into_iter().filter(|(name, _)| in_mean(name)).unzip();
    let said = named.iter().filter(|leaf| leaf.left_out.is_none()).count();
    assert_eq!(names.len(), said, "{named:?}");
    check(mean, &updates);
    if order == Order::Client {
        assert!(*mean == star(&updates, order), "in order the bits are those of a star");
    }
    names
}

/// What is known when a tree has ended whose first edge was in danger.
struct Outcome {
    mean: Vec<u8>,
    leaves: Vec<Leaf>,
    /// What the edge, and each of its clients, ended with.
    victims: Vec<Result<(), String>>,
}

/// Where an edge in danger listens, and the edge; and those of its clients.
type Victim = (Middle, Vec<Part>);

/// Runs a tree of two edges with two clients each and a client. The first edge is made by `victim`.
fn tree(
    order: Order,
    reconnect: Duration,
    victim: impl FnOnce(SocketAddr, AggregatorConfig) -> Victim,
) -> Outcome {
    let config = AggregatorConfig { min_clients: Some(1), clients: 3, ..config(order) };
    // Who is lost before there is a session is not waited for without end.
    let round_deadline = Some(Duration::from_secs(30));
    let top = AggregatorConfig { round_deadline, reconnect, ..config.clone() };
    let (address, top) = serve(top);
    let below = AggregatorConfig { min_clients: None, clients: 2, ..config };
    let (edge, clients) = victim(address, below.clone());
    let updates: Vec<Node> = updates().into_iter().map(|(_, u)| Node::Client(u)).collect();
    let others = [Node::Edge(updates[2..4].to_vec()), updates[4].clone()];
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&others, 1, address, &below, 1, &mut parts, &mut edges);
    let (mean, leaves) = top.join().unwrap().unwrap().remove(0);
    for part in parts {
        assert!(part.join().unwrap().unwrap()[0].0 == mean, "the others have the mean");
    }
    edges.into_iter().for_each(|edge| drop(edge.join().unwrap().unwrap()));
    let mut victims = vec![edge.join().unwrap().map(drop).map_err(|error| error.to_string())];
    for client in clients {
        victims.push(client.join().unwrap().map(drop).map_err(|error| error.to_string()));
    }
    Outcome { mean, leaves, victims }
}

/// An edge behind a proxy, with two honest clients. It dials again for so long.
fn edge_behind(address: SocketAddr, below: &AggregatorConfig, reconnect: Duration) -> Victim {
    let above = ClientConfig { reconnect: Some(reconnect), ..client(&name(0), 0.0) };
    let above = EdgeConfig { above, below: below.clone(), local_rounds: 1 };
    let (at, edge) = start_edge(address, above);
    let nodes: Vec<Node> =
        updates().into_iter().take(2).map(|(_, update)| Node::Client(update)).collect();
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&nodes, 0, at, below, 1, &mut parts, &mut edges);
    (edge, parts)
}

fn behind(plan: Plan, order: Order, reconnect: Duration) -> (Outcome, Vec<Traffic>) {
    let mut proxy = None;
    let outcome = tree(order, reconnect, |address, below| {
        let started = proxy.insert(Proxy::start(address, plan));
        edge_behind(started.address(), &below, reconnect)
    });
    (outcome, proxy.unwrap().traffic())
}

/// Bytes of the greeting on a control channel, up and down: before it is over there is no session to be
/// lost from. And on a data channel.
const GREETING_BYTES: [u64; 2] = [1_000, 300];
const HELLO_BYTES: [u64; 2] = [68, 44];

/// One fault of the first edge's connection at many bytes. Gives for each whose updates are in the mean.
fn sweep(order: Order, kind: &Kind, then: Then, reconnect: Duration) -> Vec<(String, Vec<String>)> {
    let (whole, traffic) = behind(Plan::honest(), order, reconnect);
    assert_eq!(counted(&whole.mean, &whole.leaves, order).len(), 5);
    assert!(whole.victims.iter().all(Result::is_ok), "{:?}", whole.victims);
    let mut points = Vec::new();
    for (channel, which, greeting) in [
        (Channel::Control, Which::Control(0), GREETING_BYTES),
        (Channel::Data, Which::Data(0), HELLO_BYTES),
    ] {
        let usual = traffic.iter().find(|one| one.channel == channel).unwrap();
        for (direction, bytes, first) in [
            (Direction::Up, usual.left_client, greeting[0]),
            (Direction::Down, usual.left_aggregator, greeting[1]),
        ] {
            for part in 0..6 {
                let at_byte = first + bytes.saturating_sub(first) * part / 6;
                let faults = vec![Fault { which, direction, at_byte, kind: kind.clone() }];
                let (outcome, _) = behind(Plan { faults, then }, order, reconnect);
                let point = format!("{which:?} {direction:?} {at_byte} {order:?}");
                points.push((point, counted(&outcome.mean, &outcome.leaves, order)));
            }
        }
    }
    points
}

#[test]
fn an_edge_that_is_gone_takes_its_clients_with_it_and_nothing_else() {
    for order in ORDERS {
        let (mut lost, mut kept) = (0, 0);
        let gone = Kind::Drop(Scope::All);
        for (point, names) in sweep(order, &gone, Then::Refuse, Duration::ZERO) {
            assert!(names.contains(&name(2)), "{point}: {names:?}");
            match names.len() {
                3 => lost += 1,
                5 => kept += 1,
                _ => panic!("{point}: {names:?}"),
            }
        }
        assert!(lost > 4 && kept > 4, "{order:?}: lost {lost} times, kept {kept} times");
    }
}

#[test]
fn an_edge_whose_connection_breaks_goes_on_where_it_was() {
    for order in ORDERS {
        for kind in [Kind::Reset(Scope::All), Kind::Drop(Scope::Connection)] {
            for (point, names) in sweep(order, &kind, Then::Open, RECONNECT) {
                assert_eq!(names.len(), 5, "{point}: {names:?}");
            }
        }
    }
}

/// An update whose client dies when so many bytes of it have been read.
struct Mortal {
    update: Update,
    read: AtomicU64,
    dies_at: u64,
    canceller: Mutex<Option<Canceller>>,
}

impl Source for Mortal {
    fn manifest(&self) -> &Manifest {
        self.update.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        let read = self.read.fetch_add(out.len() as u64, Ordering::SeqCst) + out.len() as u64;
        if read >= self.dies_at
            && let Some(canceller) = self.canceller.lock().unwrap().take()
        {
            canceller.cancel("");
        }
        self.update.read(offset, out)
    }
}

/// A first edge whose second client brings this update and dies at this byte of it.
fn with_mortal(
    (address, below): (SocketAddr, AggregatorConfig),
    update: Update,
    dies_at: u64,
) -> Victim {
    let above = EdgeConfig { above: client(&name(0), 0.0), below: below.clone(), local_rounds: 1 };
    let (at, edge) = start_edge(address, above);
    let healthy = [Node::Client(updates().remove(0).1)];
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&healthy, 0, at, &below, 1, &mut parts, &mut edges);
    parts.push(spawn(move || {
        let canceller = Canceller::default();
        let config = client(&name(1), update.weight);
        let (read, canceller_) = (AtomicU64::new(0), Mutex::new(Some(canceller.clone())));
        let mortal = Mortal { update, read, dies_at, canceller: canceller_ };
        take_part(at, config, &mortal, &canceller)
    }));
    (edge, parts)
}

#[test]
fn a_client_of_an_edge_that_dies_is_named_at_the_top() {
    let update = &updates()[1].1;
    for order in ORDERS {
        for part in 0..4 {
            let dies_at = update.bytes.len() as u64 * part / 3;
            let outcome = tree(order, Duration::ZERO, |address, below| {
                let below = AggregatorConfig { min_clients: Some(1), ..below };
                with_mortal((address, below), update.clone(), dies_at)
            });
            let names = counted(&outcome.mean, &outcome.leaves, order);
            assert!(names.len() >= 4, "{names:?}");
            if names.len() == 4 {
                let lost = outcome.leaves.iter().find(|leaf| leaf.left_out.is_some()).unwrap();
                assert_eq!(lost.name, format!("{}/{}", name(0), name(1)));
                assert!(lost.left_out.as_ref().unwrap().contains("gave up"), "{lost:?}");
            }
        }
    }
}

#[test]
fn an_edge_that_needs_all_of_its_clients_ends_without_one() {
    let update = &updates()[1].1;
    for order in ORDERS {
        let outcome = tree(order, Duration::ZERO, |address, below| {
            with_mortal((address, below), update.clone(), update.bytes.len() as u64 / 2)
        });
        assert_eq!(counted(&outcome.mean, &outcome.leaves, order).len(), 3);
        let why = outcome.leaves[0].left_out.clone().unwrap();
        assert!(why.contains("gave up") && why.contains(&name(1)), "{why}");
        assert!(outcome.victims.iter().all(Result::is_err), "{:?}", outcome.victims);
    }
}

#[test]
fn a_tree_that_has_lost_all_of_its_edges_goes_on_as_a_star() {
    for order in ORDERS {
        let config =
            AggregatorConfig { min_clients: Some(1), clients: 2, rounds: 3, ..config(order) };
        let (address, top) = serve(config.clone());
        let below = AggregatorConfig { min_clients: None, ..config };
        let updates = updates();
        let middle = updates[1].1.bytes.len() as u64 / 2;
        let (edge, victims) = with_mortal((address, below.clone()), updates[1].1.clone(), middle);
        let (mut parts, mut edges) = (Vec::new(), Vec::new());
        start(&[Node::Client(updates[4].1.clone())], 2, address, &below, 1, &mut parts, &mut edges);
        for (mean, leaves) in top.join().unwrap().unwrap() {
            assert_eq!(counted(&mean, &leaves, order), [name(2)]);
        }
        assert_eq!(parts.remove(0).join().unwrap().unwrap().len(), 3);
        edge.join().unwrap().unwrap_err();
        victims.into_iter().for_each(|victim| drop(victim.join().unwrap().unwrap_err()));
    }
}

#[test]
fn an_update_that_is_not_finite_is_named_at_the_top() {
    let mut update = updates().remove(1).1;
    let mut bytes = update.bytes.to_vec();
    bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    update.bytes = bytes.into();
    for order in ORDERS {
        let outcome = tree(order, Duration::ZERO, |address, below| {
            let below = AggregatorConfig { min_clients: Some(1), ..below };
            with_mortal((address, below), update.clone(), u64::MAX)
        });
        assert_eq!(counted(&outcome.mean, &outcome.leaves, order).len(), 4);
        let why = outcome.leaves[1].left_out.clone().unwrap();
        assert!(why.contains("element 1 of tensor \"w\" is NaN"), "{why}");
    }
}

#[test]
fn the_whole_tree_has_one_order() {
    let outcome = tree(Order::Client, Duration::ZERO, |address, below| {
        let below = AggregatorConfig { order: Order::Arrival, ..below };
        edge_behind(address, &below, Duration::ZERO)
    });
    assert_eq!(counted(&outcome.mean, &outcome.leaves, Order::Client).len(), 3);
    let why = outcome.leaves[0].left_out.clone().unwrap();
    assert!(why.contains("another order"), "{why}");
    assert!(outcome.victims[0].clone().unwrap_err().contains("another order"));
}

#[test]
fn a_star_takes_no_edges() {
    let below = AggregatorConfig { tree: false, ..config(Order::Arrival) };
    let (address, top) = serve(AggregatorConfig { clients: 1, ..below });
    let (edge, parts) = edge_behind(
        address,
        &AggregatorConfig { clients: 2, ..config(Order::Arrival) },
        Duration::ZERO,
    );
    let why = edge.join().unwrap().unwrap_err().to_string();
    assert!(why.contains("takes none: start it with --topology tree"), "{why}");
    assert!(top.join().unwrap().unwrap_err().to_string().contains("takes none"));
    parts.into_iter().for_each(|part| drop(part.join().unwrap().unwrap_err()));
}

#[test]
fn an_edge_without_an_aggregator_above_ends_its_clients_too() {
    for order in ORDERS {
        let proxy = Proxy::start(([127, 0, 0, 1], 9).into(), Plan::honest());
        let below = AggregatorConfig { clients: 2, ..config(order) };
        let (edge, parts) = edge_behind(proxy.address(), &below, Duration::ZERO);
        assert!(edge.join().unwrap().unwrap_err().to_string().starts_with("above this edge: "));
        for part in parts {
            let why = part.join().unwrap().unwrap_err().to_string();
            assert!(why.contains("above this edge: "), "{why}");
        }
    }
}
