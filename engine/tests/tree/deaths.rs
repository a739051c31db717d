//! Edges and clients that die: the mean is that of the others, to the bit, or all end and say why.

use std::net::SocketAddr;
use std::sync::Once;
use std::thread::{sleep, spawn};
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
    Middle, Node, Part, Update, check, client, config, name, serve, star, start, start_edge,
    take_part,
};
use crate::means::generated;
use crate::models::{Mortal, manifest};

/// How long broken connections are dialled again, where they are.
const RECONNECT: Duration = Duration::from_secs(10);

const ORDERS: [Order; 2] = [Order::Arrival, Order::Client];

fn model() -> Manifest {
    manifest(&[("w", Dtype::F32, &[30_000]), ("h", Dtype::BF16, &[10_001])])
}

/// Names of the edge in danger: it is the first one of all, or the last.
const VICTIMS: [&str; 2] = ["a-victim", "z-victim"];

/// Updates of five clients: one without an edge, two below the edge that is in no danger, and two below the
/// victim. In the order of a star.
fn updates(victim: &str) -> Vec<(String, Update)> {
    let [a, b] = [name(0), name(1)];
    let mut names = vec![a.clone(), format!("{b}/{a}"), format!("{b}/{b}")];
    names.extend([&a, &b].map(|leaf| format!("{victim}/{leaf}")));
    let update = |seed: u64| generated(&model(), seed as f64, seed);
    let mut updates: Vec<_> =
        names.into_iter().zip(1..).map(|(name, seed)| (name, update(seed))).collect();
    updates.sort_by(|(a, _), (b, _)| a.cmp(b));
    updates
}

/// The update of that name.
fn update_of(victim: &str, name: &str) -> Update {
    updates(victim).into_iter().find(|(of, _)| of == name).unwrap().1
}

/// Those of the victim's clients.
fn doomed(victim: &str) -> [Update; 2] {
    [0, 1].map(|leaf| update_of(victim, &format!("{victim}/{}", name(leaf))))
}

/// The mean must be that of the leaves that are said to be in it. Gives their names.
fn counted(victim: &str, mean: &[u8], named: &[Leaf], order: Order) -> Vec<String> {
    let in_mean = |name: &String| named.iter().any(|l| l.name == *name && l.left_out.is_none());
    let (names, updates): (Vec<String>, Vec<Update>) =
        updates(victim).into_iter().filter(|(name, _)| in_mean(name)).unzip();
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
    let [a, b] = [name(0), name(1)];
    let update = |name: &str| Node::Client(update_of(VICTIMS[0], name));
    let safe = [format!("{b}/{a}"), format!("{b}/{b}")].map(|name| update(&name));
    let others = [update(&a), Node::Edge(safe.to_vec())];
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&others, 0, address, &below, 1, &mut parts, &mut edges);
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
fn edge_behind(
    victim: &str,
    address: SocketAddr,
    config: &AggregatorConfig,
    reconnect: Duration,
) -> Victim {
    let above = ClientConfig { reconnect: Some(reconnect), ..client(victim, 0.0) };
    let above = EdgeConfig { above, below: config.clone(), local_rounds: 1 };
    let (at, edge) = start_edge(address, above);
    let nodes = doomed(victim).map(Node::Client);
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&nodes, 0, at, config, 1, &mut parts, &mut edges);
    (edge, parts)
}

fn behind(victim: &str, plan: Plan, order: Order, reconnect: Duration) -> (Outcome, Vec<Traffic>) {
    let mut proxy = None;
    let outcome = tree(order, reconnect, |address, below| {
        let started = proxy.insert(Proxy::start(address, plan));
        edge_behind(victim, started.address(), &below, reconnect)
    });
    (outcome, proxy.unwrap().traffic())
}

/// Bytes of the greeting on a control channel, up and down: before it is over there is no session to be
/// lost from. And on a data channel.
const GREETING_BYTES: [u64; 2] = [1_000, 300];
const HELLO_BYTES: [u64; 2] = [68, 44];

/// Points on each channel and in each direction.
const POINTS: u64 = 4;

/// One fault of the victim's connection at many bytes. Gives for each whose updates are in the mean.
fn sweep(
    victim: &str,
    order: Order,
    kind: &Kind,
    then: Then,
    reconnect: Duration,
) -> Vec<(String, Vec<String>)> {
    let (whole, traffic) = behind(victim, Plan::honest(), order, reconnect);
    assert_eq!(counted(victim, &whole.mean, &whole.leaves, order).len(), 5);
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
            for part in 0..POINTS {
                let at_byte = first + bytes.saturating_sub(first) * part / POINTS;
                let faults = vec![Fault { which, direction, at_byte, kind: kind.clone() }];
                let (outcome, _) = behind(victim, Plan { faults, then }, order, reconnect);
                let point = format!("{which:?} {direction:?} {at_byte} {order:?}");
                points.push((point, counted(victim, &outcome.mean, &outcome.leaves, order)));
            }
        }
    }
    points
}

#[test]
fn an_edge_that_is_gone_takes_its_clients_with_it_and_nothing_else() {
    for (order, victim) in
        ORDERS.into_iter().flat_map(|order| VICTIMS.map(|victim| (order, victim)))
    {
        let (mut lost, mut kept) = (0, 0);
        let gone = Kind::Drop(Scope::All);
        for (point, names) in sweep(victim, order, &gone, Then::Refuse, Duration::ZERO) {
            match names.len() {
                3 => lost += 1,
                5 => kept += 1,
                _ => panic!("{point}: {names:?}"),
            }
        }
        assert!(lost > 1 && kept > 1, "{order:?}: lost {lost} times, kept {kept} times");
    }
}

/// A top with one edge below it, which has two more: the first of these is behind this network. Each has one
/// client.
fn two_levels(plan: Plan, order: Order) -> (Vec<u8>, Vec<Leaf>, Vec<Traffic>) {
    let config = config(order);
    let (address, top) = serve(AggregatorConfig { clients: 1, ..config.clone() });
    let round_deadline = Some(Duration::from_secs(30));
    let below =
        AggregatorConfig { clients: 2, min_clients: Some(1), round_deadline, ..config.clone() };
    let above = EdgeConfig { above: client("mid", 0.0), below, local_rounds: 1 };
    let (middle, mid) = start_edge(address, above);
    let proxy = Proxy::start(middle, plan);
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    for (index, above) in [proxy.address(), middle].into_iter().enumerate() {
        let node = Node::Edge(vec![Node::Client(doomed(VICTIMS[0])[index].clone())]);
        start(&[node], index, above, &config, 1, &mut parts, &mut edges);
    }
    let (mean, leaves) = top.join().unwrap().unwrap().remove(0);
    mid.join().unwrap().unwrap();
    // The first ones may have been lost.
    assert!(parts.pop().unwrap().join().unwrap().unwrap()[0].0 == mean);
    edges.pop().unwrap().join().unwrap().unwrap();
    parts.into_iter().for_each(|part| drop(part.join().unwrap()));
    edges.into_iter().for_each(|edge| drop(edge.join().unwrap()));
    (mean, leaves, proxy.traffic())
}

#[test]
fn who_is_alone_when_another_edge_is_lost_has_its_own_update() {
    for order in ORDERS {
        let (_, leaves, traffic) = two_levels(Plan::honest(), order);
        assert!(leaves.iter().all(|leaf| leaf.left_out.is_none()), "{leaves:?}");
        let bytes = traffic.iter().find(|one| one.channel == Channel::Data).unwrap().left_client;
        let mut alone = 0;
        for part in 0..8 {
            let (which, direction) = (Which::Data(0), Direction::Up);
            let at_byte = HELLO_BYTES[0] + (bytes - HELLO_BYTES[0]) * part / 8;
            let faults = vec![Fault { which, direction, at_byte, kind: Kind::Drop(Scope::All) }];
            let (mean, leaves, _) = two_levels(Plan { faults, then: Then::Refuse }, order);
            let in_mean: Vec<&Leaf> =
                leaves.iter().filter(|leaf| leaf.left_out.is_none()).collect();
            let names: Vec<&str> = in_mean.iter().map(|leaf| leaf.name.as_str()).collect();
            let [first, second] = doomed(VICTIMS[0]);
            match names[..] {
                ["mid/n001/n000"] => {
                    alone += 1;
                    check(&mean, &[second]);
                }
                ["mid/n000/n000", "mid/n001/n000"] => check(&mean, &[first, second]),
                _ => panic!("{at_byte}: {leaves:?}"),
            }
        }
        assert!(alone > 4, "{order:?}: {alone} times");
    }
}

#[test]
fn an_edge_whose_connection_breaks_goes_on_where_it_was() {
    for order in ORDERS {
        for kind in [Kind::Reset(Scope::All), Kind::Drop(Scope::Connection)] {
            for victim in VICTIMS {
                for (point, names) in sweep(victim, order, &kind, Then::Open, RECONNECT) {
                    assert_eq!(names.len(), 5, "{point}: {names:?}");
                }
            }
        }
    }
}

/// A first edge whose second client brings this update and dies at this byte of it.
fn with_mortal(
    (address, config): (SocketAddr, AggregatorConfig),
    update: Update,
    dies_at: u64,
) -> Victim {
    let above =
        EdgeConfig { above: client(VICTIMS[0], 0.0), below: config.clone(), local_rounds: 1 };
    let (at, edge) = start_edge(address, above);
    let healthy = [Node::Client(doomed(VICTIMS[0])[0].clone())];
    let (mut parts, mut edges) = (Vec::new(), Vec::new());
    start(&healthy, 0, at, &config, 1, &mut parts, &mut edges);
    parts.push(spawn(move || {
        let canceller = Canceller::default();
        let config = client(&name(1), update.weight);
        let mortal = Mortal::new(update, dies_at, canceller.clone());
        take_part(at, config, &mortal, &canceller)
    }));
    (edge, parts)
}

#[test]
fn a_client_of_an_edge_that_dies_is_named_at_the_top() {
    let victim = VICTIMS[0];
    let update = &doomed(victim)[1];
    for order in ORDERS {
        for part in 0..4 {
            let dies_at = update.bytes.len() as u64 * part / 3;
            let outcome = tree(order, Duration::ZERO, |address, below| {
                let below = AggregatorConfig { min_clients: Some(1), ..below };
                with_mortal((address, below), update.clone(), dies_at)
            });
            let names = counted(victim, &outcome.mean, &outcome.leaves, order);
            assert!(names.len() >= 4, "{names:?}");
            if names.len() == 4 {
                let lost = outcome.leaves.iter().find(|leaf| leaf.left_out.is_some()).unwrap();
                assert_eq!(lost.name, format!("{victim}/{}", name(1)));
            }
        }
    }
}

#[test]
fn an_edge_that_needs_all_of_its_clients_ends_without_one() {
    let victim = VICTIMS[0];
    let update = &doomed(victim)[1];
    for order in ORDERS {
        let outcome = tree(order, Duration::ZERO, |address, below| {
            with_mortal((address, below), update.clone(), update.bytes.len() as u64 / 2)
        });
        assert_eq!(counted(victim, &outcome.mean, &outcome.leaves, order).len(), 3);
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
        let victim = VICTIMS[0];
        let update = doomed(victim)[1].clone();
        let middle = update.bytes.len() as u64 / 2;
        let (edge, victims) = with_mortal((address, below.clone()), update, middle);
        let (mut parts, mut edges) = (Vec::new(), Vec::new());
        let star = [Node::Client(update_of(victim, &name(0)))];
        start(&star, 0, address, &below, 1, &mut parts, &mut edges);
        for (mean, leaves) in top.join().unwrap().unwrap() {
            assert_eq!(counted(victim, &mean, &leaves, order), [name(0)]);
        }
        assert_eq!(parts.remove(0).join().unwrap().unwrap().len(), 3);
        edge.join().unwrap().unwrap_err();
        victims.into_iter().for_each(|victim| drop(victim.join().unwrap().unwrap_err()));
    }
}

#[test]
fn an_update_that_is_not_finite_is_named_at_the_top() {
    let victim = VICTIMS[0];
    let mut update = doomed(victim)[1].clone();
    let mut bytes = update.bytes.to_vec();
    bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    update.bytes = bytes.into();
    for order in ORDERS {
        let outcome = tree(order, Duration::ZERO, |address, below| {
            let below = AggregatorConfig { min_clients: Some(1), ..below };
            with_mortal((address, below), update.clone(), u64::MAX)
        });
        assert_eq!(counted(victim, &outcome.mean, &outcome.leaves, order).len(), 4);
        let why = outcome.leaves[1].left_out.clone().unwrap();
        assert!(why.contains("element 1 of tensor \"w\" is NaN"), "{why}");
    }
}

#[test]
fn the_whole_tree_has_one_order() {
    let outcome = tree(Order::Client, Duration::ZERO, |address, below| {
        let below = AggregatorConfig { order: Order::Arrival, ..below };
        edge_behind(VICTIMS[0], address, &below, Duration::ZERO)
    });
    assert_eq!(counted(VICTIMS[0], &outcome.mean, &outcome.leaves, Order::Client).len(), 3);
    let why = outcome.leaves[0].left_out.clone().unwrap();
    assert!(why.contains("another order"), "{why}");
    assert!(outcome.victims[0].clone().unwrap_err().contains("another order"));
}

#[test]
fn a_star_takes_no_edges() {
    let below = AggregatorConfig { tree: false, ..config(Order::Arrival) };
    let (address, top) = serve(AggregatorConfig { clients: 1, ..below });
    let (edge, parts) = edge_behind(
        VICTIMS[0],
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
        let (edge, parts) = edge_behind(VICTIMS[0], proxy.address(), &below, Duration::ZERO);
        assert!(edge.join().unwrap().unwrap_err().to_string().starts_with("above this edge: "));
        for part in parts {
            let why = part.join().unwrap().unwrap_err().to_string();
            assert!(why.contains("above this edge: "), "{why}");
        }
    }
}

/// An update whose client trains for a while.
struct Late(Update, Once);

impl Source for Late {
    fn manifest(&self) -> &Manifest {
        self.0.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        self.1.call_once(|| sleep(2 * WINDOW));
        self.0.read(offset, out)
    }
}

/// How long a client below may take to come back.
const WINDOW: Duration = Duration::from_secs(2);

#[test]
fn a_client_comes_back_while_its_edge_waits_for_others() {
    for order in ORDERS {
        let config = config(order);
        let (address, top) = serve(AggregatorConfig { clients: 2, ..config.clone() });
        let below = AggregatorConfig { clients: 1, reconnect: WINDOW, ..config };
        let edges = ["a", "b"].map(|name| {
            let (above, below) = (client(name, 0.0), below.clone());
            start_edge(address, EdgeConfig { above, below, local_rounds: 1 })
        });
        let proxy = Proxy::start(edges[0].0, Plan::honest());
        let updates = doomed(VICTIMS[0]);
        let early = updates[0].clone();
        let late = Late(updates[1].clone(), Once::new());
        let (near, far) = (proxy.address(), edges[1].0);
        let again = ClientConfig { reconnect: Some(WINDOW), ..client("x", early.weight) };
        let parts: [Part; 2] = [
            spawn(move || take_part(near, again, &early, &Canceller::default())),
            spawn(move || take_part(far, client("y", late.0.weight), &late, &Canceller::default())),
        ];
        while proxy.passed(Channel::Data, Direction::Up) < model().data_bytes() {
            sleep(Duration::from_millis(10));
        }
        // The edge has all, and sends it up.
        sleep(Duration::from_millis(300));
        proxy.cut();
        let (mean, leaves) = top.join().unwrap().unwrap().remove(0);
        assert!(leaves.iter().all(|leaf| leaf.left_out.is_none()), "{leaves:?}");
        check(&mean, &updates);
        for part in parts {
            assert!(part.join().unwrap().unwrap() == [(mean.clone(), true)]);
        }
        edges.into_iter().for_each(|(_, edge)| drop(edge.join().unwrap().unwrap()));
    }
}
