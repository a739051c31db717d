//! Every host has the right mean, and the same one.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{sleep, spawn};
use std::time::Duration;

use fedlane::error::SourceError;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::ring::RingConfig;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::topology::Shape;
use fedlane::wire::hello::Secret;
use proptest::prelude::*;

use crate::common::{
    BOTH, Reduced, check, config, coordinate, join, member, reduce, run, update, weights,
};
use crate::models::{manifest, models};

fn all_same(manifest: &Manifest, reduced: &[Reduced], weights: &[f64]) {
    for other in reduced {
        assert!(other.mean == reduced[0].mean, "all have the same bits");
        assert_eq!(other.outcome.attempts, 1);
        assert_eq!(other.outcome.ranks.len(), weights.len());
    }
    let ranks: Vec<(usize, f64)> = weights.iter().copied().enumerate().collect();
    check(manifest, &reduced[0].mean, &ranks);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_model_any_weights_any_ring(
        model in models(40_000),
        weights in weights(),
        streams in 1_usize..4,
        chunk_bytes in prop::sample::select(&[4 << 10, 64 << 10, 512 << 10][..]),
        shape in prop::sample::select(&BOTH[..]),
    ) {
        let config = RingConfig { shape, streams: Some(streams), chunk_bytes, ..config(weights.len()) };
        all_same(&model, &run(config, &model, &weights), &weights);
    }
}

#[test]
fn sixty_four_hosts() {
    let model = manifest(&[("w", Dtype::F32, &[300_001]), ("b", Dtype::BF16, &[7])]);
    let weights: Vec<f64> = (1..=64).map(f64::from).collect();
    for shape in BOTH {
        all_same(&model, &run(RingConfig { shape, ..config(64) }, &model, &weights), &weights);
    }
}

/// A host that is slow with its first chunks, so that all others run ahead as far as they can.
struct Slow {
    update: Generator,
    left: AtomicU32,
}

impl Source for Slow {
    fn manifest(&self) -> &Manifest {
        self.update.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        if self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            sleep(Duration::from_millis(10));
        }
        self.update.read(offset, out)
    }
}

#[test]
fn no_host_waits_for_itself() {
    let model = manifest(&[("w", Dtype::F32, &[500_000])]);
    for (ranks, shape) in [2, 3, 4, 7].into_iter().flat_map(|n| BOTH.map(|shape| (n, shape))) {
        let config = RingConfig { shape, streams: Some(1), chunk_bytes: 4 << 10, ..config(ranks) };
        let (address, coordinator) = coordinate(config);
        let hosts: Vec<_> = (0..ranks)
            .map(|rank| {
                let model = model.clone();
                spawn(move || {
                    let name = format!("host-{rank}");
                    let mut host = join(address, member(&name, Secret::OPEN), &model).0;
                    let left = AtomicU32::new(if rank % 3 == 0 { 20 } else { 0 });
                    let source = Slow { update: update(&model, rank), left };
                    reduce(&mut host, &source, 1.0).unwrap()
                })
            })
            .collect();
        let reduced: Vec<Reduced> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
        coordinator.join().unwrap().unwrap();
        all_same(&model, &reduced, &vec![1.0; ranks]);
    }
}

#[test]
fn a_secret_is_enough_to_join_and_needed() {
    let model = manifest(&[("w", Dtype::F32, &[50_000])]);
    let config = RingConfig { secret: Secret::new([7; 32]), ..config(3) };
    all_same(&model, &run(config, &model, &[1.0, 2.0, 3.0]), &[1.0, 2.0, 3.0]);
}

#[test]
fn a_host_sends_its_share_of_the_model_and_no_more() {
    for ranks in [2, 3, 5] {
        let model = manifest(&[("w", Dtype::F32, &[8 << 20])]);
        let weights = vec![1.0; ranks];
        let bytes = model.data_bytes() as f64;
        let share = bytes * 2.0 * (ranks - 1) as f64 / ranks as f64;
        for reduced in run(config(ranks), &model, &weights) {
            let sent = reduced.outcome.sent_bytes as f64;
            assert!((sent / share - 1.0).abs() < 0.001, "{ranks} ranks: {sent} of {share}");
            let came = reduced.outcome.received_bytes as f64;
            assert!((came / share - 1.0).abs() < 0.001, "{ranks} ranks: {came} of {share}");
        }
    }
}

#[test]
fn a_host_of_a_chain_sends_sums_to_the_right_and_the_mean_to_the_left() {
    let model = manifest(&[("w", Dtype::F32, &[8 << 20])]);
    let config = RingConfig { shape: Shape::Chain, ..config(4) };
    let reduced = run(config, &model, &[1.0; 4]);
    for (rank, reduced) in reduced.iter().enumerate() {
        let share = model.data_bytes() as f64 * if rank % 3 == 0 { 1.0 } else { 2.0 };
        for moved in [reduced.outcome.sent_bytes, reduced.outcome.received_bytes] {
            assert!((moved as f64 / share - 1.0).abs() < 0.001, "rank {rank}: {moved} of {share}");
        }
    }
}
