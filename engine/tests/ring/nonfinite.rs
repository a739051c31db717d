//! Updates with elements that are NaN or infinite: their hosts find them before they are in a mean.

use std::thread::spawn;

use fedlane::error::SourceError;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::ring::{RingConfig, RoundReport};
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::verdict::OnNonfinite;
use fedlane::wire::hello::Secret;

use crate::common::{BOTH, Reduced, check, config, coordinate, join, member, reduce, update};
use crate::models::manifest;

const ELEMENTS: u64 = 300_000;
const BAD: u64 = 123_456;

/// An update with one element that is infinite.
struct Infinite(Generator);

impl Source for Infinite {
    fn manifest(&self) -> &Manifest {
        self.0.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        self.0.read(offset, out)?;
        let at = 4 * BAD;
        if (offset..offset + out.len() as u64).contains(&at) {
            let place = (at - offset) as usize;
            out[place..place + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        }
        Ok(())
    }
}

/// Three hosts, of whom these have an infinite element.
fn run(
    config: RingConfig,
    bad: &[usize],
) -> (Vec<Result<Reduced, String>>, Result<RoundReport, String>) {
    let model = manifest(&[("w", Dtype::F32, &[ELEMENTS])]);
    let (address, coordinator) = coordinate(config);
    let hosts: Vec<_> = (0..3)
        .map(|rank| {
            let (model, is_bad) = (model.clone(), bad.contains(&rank));
            spawn(move || {
                let name = format!("host-{rank}");
                let (mut member, _) = join(address, member(&name, Secret::OPEN), &model);
                let update = update(&model, rank);
                let source: Box<dyn Source> =
                    if is_bad { Box::new(Infinite(update)) } else { Box::new(update) };
                reduce(&mut member, source.as_ref(), (rank + 1) as f64).map_err(|e| e.to_string())
            })
        })
        .collect();
    let reduced = hosts.into_iter().map(|host| host.join().unwrap()).collect();
    let report = coordinator.join().unwrap().map(|mut reports| reports.remove(0));
    (reduced, report.map_err(|error| error.to_string()))
}

fn config_of(shape: fedlane::topology::Shape, on_nonfinite: OnNonfinite) -> RingConfig {
    RingConfig { shape, on_nonfinite, min_ranks: Some(1), chunk_bytes: 64 << 10, ..config(3) }
}

#[test]
fn a_rejected_update_is_not_in_the_mean() {
    let model = manifest(&[("w", Dtype::F32, &[ELEMENTS])]);
    for shape in BOTH {
        for (bad, left) in [(vec![1], vec![(0, 1.0), (2, 3.0)]), (vec![0, 2], vec![(1, 2.0)])] {
            let (reduced, report) = run(config_of(shape, OnNonfinite::Reject), &bad);
            let report = report.unwrap();
            let names: Vec<_> = bad.iter().map(|rank| format!("host-{rank}")).collect();
            let found: Vec<_> = report.nonfinite.iter().map(|(name, _)| name.clone()).collect();
            assert_eq!(found.len(), names.len());
            assert!(names.iter().all(|name| found.contains(name)), "{found:?}");
            assert!(report.nonfinite[0].1.contains(&format!("element {BAD} of tensor \"w\"")));
            for (rank, reduced) in reduced.into_iter().enumerate() {
                let reduced = reduced.unwrap();
                assert_eq!(reduced.outcome.nonfinite.is_some(), bad.contains(&rank));
                check(&model, &reduced.mean, &left);
            }
        }
    }
}

#[test]
fn infinite_elements_count_as_zero_or_as_they_are() {
    for shape in BOTH {
        let element = |policy| {
            let (mut reduced, report) = run(config_of(shape, policy), &[1]);
            let mean = reduced.remove(2).unwrap().mean;
            let at = 4 * BAD as usize;
            let number = f32::from_le_bytes(mean[at..at + 4].try_into().unwrap());
            (number, report.unwrap())
        };
        let (zeroed, report) = element(OnNonfinite::Zero);
        let model = manifest(&[("w", Dtype::F32, &[ELEMENTS])]);
        let others = [(0, 1.0_f32), (2, 3.0)].map(|(rank, weight)| {
            let mut bytes = [0; 4];
            update(&model, rank).read(4 * BAD, &mut bytes).unwrap();
            weight * f32::from_le_bytes(bytes)
        });
        let expected = (others[0] + others[1]) / 6.0;
        assert!((zeroed - expected).abs() < 1e-6, "{zeroed} is not {expected}");
        assert_eq!(report.nonfinite.len(), 1);
        let (kept, report) = element(OnNonfinite::Keep);
        assert!(kept.is_infinite());
        assert_eq!((report.attempts, report.nonfinite.len()), (1, 0));
    }
}

#[test]
fn too_few_good_updates_end_the_ring_for_all() {
    for shape in BOTH {
        let config = RingConfig { min_ranks: Some(3), ..config_of(shape, OnNonfinite::Reject) };
        let (reduced, report) = run(config, &[1]);
        assert!(report.unwrap_err().contains("host-1"));
        for reduced in reduced {
            let error = reduced.err().unwrap();
            assert!(error.contains("host-1") && error.contains("NaN or infinite"), "{error}");
        }
    }
}
