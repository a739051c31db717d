//! The mean of a tree is that of a star.

use std::sync::Arc;

use fedlane::aggregator::{AggregatorConfig, OnLoss};
use fedlane::lane::receive::Order;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::common::{Node, Update, check, config, leaves, name, run, star};
use crate::models::{manifest, models};

fn weights() -> impl Strategy<Value = f64> {
    prop_oneof![
        1 => Just(0.0),
        4 => 1.0..10.0,
        4 => (1_u32..1_000_000).prop_map(f64::from),
        1 => prop::sample::select(&[1e-6, 3e9, 0.1, 16_777_217.0][..]),
    ]
}

/// Trees of weights, uneven, up to four deep.
fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let leaf = weights().prop_map(Shape::Client);
    let node = leaf
        .prop_recursive(3, 12, 4, |below| prop::collection::vec(below, 1..4).prop_map(Shape::Edge));
    prop::collection::vec(node, 1..5)
        .prop_filter("every edge counts", |nodes| nodes.iter().all(counts) && weight(nodes) > 0.0)
}

#[derive(Clone, Debug)]
enum Shape {
    Client(f64),
    Edge(Vec<Shape>),
}

fn weight(nodes: &[Shape]) -> f64 {
    let each = |node: &Shape| match node {
        Shape::Client(weight) => *weight,
        Shape::Edge(nodes) => weight(nodes),
    };
    nodes.iter().map(each).sum()
}

/// A mean of clients without weight is none, at an edge as in a star.
fn counts(node: &Shape) -> bool {
    match node {
        Shape::Client(_) => true,
        Shape::Edge(nodes) => weight(nodes) > 0.0 && nodes.iter().all(counts),
    }
}

fn fill(shapes: &[Shape], make: &mut impl FnMut(f64) -> Update) -> Vec<Node> {
    let each = |shape: &Shape| match shape {
        Shape::Client(weight) => Node::Client(make(*weight)),
        Shape::Edge(shapes) => Node::Edge(fill(shapes, make)),
    };
    shapes.iter().map(each).collect()
}

/// The kind of numbers in which sums go wrong: anything finite, of any size, that cancel each other.
fn hostile(manifest: &Manifest, weight: f64, rng: &mut TestRng) -> Update {
    let mut bytes = vec![0_u8; manifest.data_bytes() as usize];
    rng.fill_bytes(&mut bytes);
    let kind = rng.next_u32() % 4;
    for run in manifest.runs() {
        let range = run.range.start as usize..run.range.end as usize;
        let (size, exponent) = match run.dtype {
            Dtype::F32 => (4, [0x7f, 0x80]),
            Dtype::F64 => (8, [0x7f, 0xf0]),
            Dtype::F16 => (2, [0x7c, 0x00]),
            Dtype::BF16 => (2, [0x7f, 0x80]),
            _ => continue,
        };
        for element in bytes[range].chunks_exact_mut(size) {
            let (low, high) = (size - 2, size - 1);
            match kind {
                // Close to each other but for the sign.
                0 => {
                    element[high] = element[high] & 0x80 | exponent[0] & 0x3f;
                    element[low] |= exponent[1];
                }
                // Subnormal.
                1 => {
                    element[high] &= !exponent[0];
                    element[low] &= !exponent[1];
                }
                _ => {}
            }
            let is_finite = element[high] & exponent[0] != exponent[0]
                || element[low] & exponent[1] != exponent[1];
            if !is_finite {
                element[high] &= 0xbf;
            }
        }
    }
    Update { manifest: manifest.clone(), bytes: Arc::new(bytes), weight }
}

pub fn generated(manifest: &Manifest, weight: f64, seed: u64) -> Update {
    let mut bytes = vec![0; manifest.data_bytes() as usize];
    Generator::new(manifest.clone(), seed).read(0, &mut bytes).unwrap();
    Update { manifest: manifest.clone(), bytes: Arc::new(bytes), weight }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn in_order_a_tree_has_the_bits_of_a_star(
        model in models(4_000),
        shapes in shapes(),
        seed in any::<[u8; 32]>(),
        rounds in 1_u32..3,
    ) {
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let nodes = fill(&shapes, &mut |weight| hostile(&model, weight, &mut rng));
        let flat = star(&leaves(&nodes), Order::Client);
        let config = AggregatorConfig { rounds, ..config(Order::Client) };
        for (mean, _) in run(&nodes, config, 1) {
            prop_assert!(mean == flat);
        }
    }

    #[test]
    fn as_they_arrive_a_tree_is_within_the_bound_of_a_star(
        model in models(4_000),
        shapes in shapes(),
        seed in any::<[u8; 32]>(),
        spools in any::<bool>(),
    ) {
        let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let nodes = fill(&shapes, &mut |weight| hostile(&model, weight, &mut rng));
        let on_loss = if spools { OnLoss::Spool } else { OnLoss::Auto };
        let means = run(&nodes, AggregatorConfig { on_loss, ..config(Order::Arrival) }, 1);
        check(&means[0].0, &leaves(&nodes));
    }
}

fn of(weights: &[f64]) -> Vec<Shape> {
    weights.iter().copied().map(Shape::Client).collect()
}

fn model() -> Manifest {
    manifest(&[
        ("w", Dtype::F32, &[3_001]),
        ("h", Dtype::BF16, &[1_003]),
        ("n", Dtype::I64, &[1]),
        ("g", Dtype::F32, &[17]),
        ("m", Dtype::BOOL, &[5]),
    ])
}

#[test]
fn every_leaf_is_named() {
    let mut seed = 0;
    let mut make = |weight| {
        seed += 1;
        generated(&model(), weight, seed)
    };
    let shapes = [
        Shape::Edge(of(&[1.0, 2.0])),
        Shape::Client(3.0),
        Shape::Edge(vec![Shape::Edge(of(&[4.0])), Shape::Client(5.0)]),
    ];
    let nodes = fill(&shapes, &mut make);
    for order in [Order::Arrival, Order::Client] {
        let (mean, named) = run(&nodes, config(order), 1).remove(0);
        check(&mean, &leaves(&nodes));
        let [a, b, c] = [name(0), name(1), name(2)];
        let expected = [
            format!("{a}/{a}"),
            format!("{a}/{b}"),
            b.clone(),
            format!("{c}/{a}/{a}"),
            format!("{c}/{b}"),
        ];
        let weights = [1.0, 2.0, 3.0, 4.0, 5.0];
        let named: Vec<_> = named.into_iter().map(|l| (l.name, l.examples, l.left_out)).collect();
        let expected: Vec<_> =
            expected.into_iter().zip(weights).map(|(name, weight)| (name, weight, None)).collect();
        assert_eq!(named, expected);
    }
}

#[test]
fn edges_may_run_rounds_of_their_own() {
    let mut seed = 0;
    let mut make = |weight| {
        seed += 1;
        generated(&model(), weight, seed)
    };
    let nodes = fill(&[Shape::Edge(of(&[1.0, 2.0])), Shape::Edge(of(&[3.0]))], &mut make);
    for order in [Order::Arrival, Order::Client] {
        let means = run(&nodes, AggregatorConfig { rounds: 2, ..config(order) }, 3);
        // What is sent does not depend on what was received here.
        means.iter().for_each(|(mean, _)| check(mean, &leaves(&nodes)));
    }
}

#[test]
fn one_client_under_one_edge_gets_its_own_update() {
    let update = generated(&model(), 0.1, 7);
    for order in [Order::Arrival, Order::Client] {
        let nodes = [Node::Edge(vec![Node::Edge(vec![Node::Client(update.clone())])])];
        assert!(run(&nodes, config(order), 1)[0].0 == *update.bytes);
    }
}
