//! Means that no host holds: they go to a sink as they come.

use std::sync::Mutex;
use std::thread::spawn;

use fedlane::error::{ClientError, SinkError};
use fedlane::manifest::{Dtype, Manifest};
use fedlane::ring::{MeanSink, Member, RingConfig, Target};
use fedlane::source::Source;
use fedlane::wire::hello::Secret;
use proptest::prelude::*;

use crate::common::{BOTH, check, config, coordinate, join, member, reduce, update, weights};
use crate::models::{Mortal, manifest, models};

/// Puts together what comes, and counts it.
pub struct Gathered(Mutex<(Vec<u8>, u64)>);

impl MeanSink for Gathered {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let mut gathered = self.0.lock().unwrap();
        gathered.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        gathered.1 += bytes.len() as u64;
        Ok(())
    }
}

/// An all-reduce into a sink: the mean, and how many bytes the sink took.
fn pass(
    member: &mut Member,
    source: &dyn Source,
    weight: f64,
) -> Result<(Vec<u8>, u64), ClientError> {
    let model_bytes = source.manifest().data_bytes();
    let sink = Gathered(Mutex::new((vec![0; model_bytes as usize], 0)));
    member.all_reduce_to(source, weight, Target::Sink(&sink))?;
    Ok(sink.0.into_inner().unwrap())
}

/// The mean of each host; those whose bit is set in `keep` hold it in memory.
fn run(config: RingConfig, model: &Manifest, weights: &[f64], keep: u64) -> Vec<Vec<u8>> {
    let (address, coordinator) = coordinate(config);
    let hosts: Vec<_> = weights
        .iter()
        .enumerate()
        .map(|(rank, &weight)| {
            let model = model.clone();
            spawn(move || {
                let name = format!("host-{rank:02}");
                let (mut member, _) = join(address, member(&name, Secret::OPEN), &model);
                let update = update(&model, rank);
                if keep >> rank & 1 == 1 {
                    return reduce(&mut member, &update, weight).unwrap().mean;
                }
                let (mean, taken) = pass(&mut member, &update, weight).unwrap();
                assert_eq!(taken, model.data_bytes(), "every byte comes once");
                mean
            })
        })
        .collect();
    let means = hosts.into_iter().map(|host| host.join().unwrap()).collect();
    // It compares digests.
    coordinator.join().unwrap().unwrap();
    means
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_model_any_weights_whoever_holds_the_mean(
        model in models(40_000),
        weights in weights(),
        keep in any::<u64>(),
        streams in 1_usize..4,
        chunk_bytes in prop::sample::select(&[4 << 10, 64 << 10, 512 << 10][..]),
        shape in prop::sample::select(&BOTH[..]),
    ) {
        let config =
            RingConfig { shape, streams: Some(streams), chunk_bytes, ..config(weights.len()) };
        let means = run(config, &model, &weights, keep);
        prop_assert!(means.iter().all(|mean| *mean == means[0]));
        let ranks: Vec<(usize, f64)> = weights.iter().copied().enumerate().collect();
        check(&model, &means[0], &ranks);
    }
}

#[test]
fn many_hosts_that_hold_nothing() {
    let model = manifest(&[("w", Dtype::F32, &[300_001]), ("b", Dtype::BF16, &[7])]);
    let weights: Vec<f64> = (1..=24).map(f64::from).collect();
    for shape in BOTH {
        let means = run(RingConfig { shape, ..config(24) }, &model, &weights, 0);
        assert!(means.iter().all(|mean| *mean == means[0]));
        let ranks: Vec<(usize, f64)> = weights.iter().copied().enumerate().collect();
        check(&model, &means[0], &ranks);
    }
}

#[test]
fn sources_are_read_again_when_a_host_dies() {
    let model = manifest(&[("w", Dtype::F32, &[1_000_000]), ("h", Dtype::BF16, &[100_001])]);
    for shape in BOTH {
        let min_ranks = Some(2);
        let config = RingConfig { shape, min_ranks, chunk_bytes: 16 << 10, ..config(3) };
        let (address, coordinator) = coordinate(config);
        let hosts: Vec<_> = (0..3)
            .map(|rank| {
                let model = model.clone();
                spawn(move || {
                    let name = format!("host-{rank}");
                    let (mut member, canceller) =
                        join(address, member(&name, Secret::OPEN), &model);
                    let update = update(&model, rank);
                    if rank != 1 {
                        return Some(pass(&mut member, &update, 1.0).unwrap().0);
                    }
                    let dies_at = model.data_bytes() / 2;
                    pass(&mut member, &Mortal::new(update, dies_at, canceller), 1.0).unwrap_err();
                    None
                })
            })
            .collect();
        let means: Vec<_> = hosts.into_iter().filter_map(|host| host.join().unwrap()).collect();
        assert!(means[0] == means[1]);
        check(&model, &means[0], &[(0, 1.0), (2, 1.0)]);
        assert!(coordinator.join().unwrap().unwrap()[0].attempts > 1);
    }
}

/// A sink that fails, as a full disk would.
struct Full;

impl MeanSink for Full {
    fn take(&self, _offset: u64, _bytes: &[u8]) -> Result<(), SinkError> {
        Err(SinkError::NoLanding)
    }
}

#[test]
fn a_sink_that_fails_ends_its_host() {
    let model = manifest(&[("w", Dtype::F32, &[100_000])]);
    let (address, coordinator) = coordinate(RingConfig { min_ranks: Some(1), ..config(2) });
    let other = {
        let model = model.clone();
        spawn(move || {
            let (mut member, _) = join(address, member("a", Secret::OPEN), &model);
            reduce(&mut member, &update(&model, 0), 1.0).unwrap().mean
        })
    };
    let (mut failing, _) = join(address, member("b", Secret::OPEN), &model);
    let error = failing.all_reduce_to(&update(&model, 1), 1.0, Target::Sink(&Full)).unwrap_err();
    assert!(matches!(error, ClientError::Sink(_)), "{error}");
    failing.give_up(&error.to_string());
    drop(failing);
    check(&model, &other.join().unwrap(), &[(0, 1.0)]);
    coordinator.join().unwrap().unwrap();
}
