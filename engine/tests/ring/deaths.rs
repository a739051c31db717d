//! Hosts that die, at every phase: the others go on without them, exactly, or end with the same error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{sleep, spawn};
use std::time::Duration;

use fedlane::error::SourceError;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::ring::RingConfig;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::topology::Shape;
use fedlane::wire::hello::Secret;

use crate::common::{check, config, coordinate, join, member, reduce, update};
use crate::models::{Mortal, manifest};

fn model() -> Manifest {
    manifest(&[("w", Dtype::F32, &[1_000_000]), ("h", Dtype::BF16, &[100_001])])
}

/// Four of whom one dies at this byte of its update; what the others have, or their errors.
fn four(
    shape: Shape,
    mortal: usize,
    dies_at: u64,
    min_ranks: usize,
) -> Vec<Result<Vec<u8>, String>> {
    let model = model();
    let min_ranks = Some(min_ranks);
    let config = RingConfig { shape, min_ranks, chunk_bytes: 16 << 10, ..config(4) };
    let (address, coordinator) = coordinate(config);
    let hosts: Vec<_> = (0..4)
        .map(|rank| {
            let model = model.clone();
            spawn(move || {
                let name = format!("host-{rank}");
                let (mut member, canceller) = join(address, member(&name, Secret::OPEN), &model);
                let update = update(&model, rank);
                if rank != mortal {
                    let reduced = reduce(&mut member, &update, (rank + 1) as f64);
                    return reduced.map(|reduced| reduced.mean).map_err(|e| e.to_string());
                }
                let source = Mortal::new(update, dies_at, canceller);
                let reduced = reduce(&mut member, &source, (rank + 1) as f64);
                reduced.map(|reduced| reduced.mean).map_err(|e| e.to_string())
            })
        })
        .collect();
    let mut ended: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
    ended.remove(mortal).unwrap_err();
    // How it ends here is how it ended there.
    assert_eq!(coordinator.join().unwrap().is_ok(), ended[0].is_ok());
    ended
}

/// Who dies: in a ring all are alike, in a chain an end is not like the middle.
const MORTALS: [(Shape, usize); 4] =
    [(Shape::Ring, 2), (Shape::Chain, 0), (Shape::Chain, 2), (Shape::Chain, 3)];

#[test]
fn the_others_go_on_without_a_host_that_dies() {
    let bytes = model().data_bytes();
    for (shape, mortal) in MORTALS {
        for dies_at in [1, bytes / 3, bytes / 2, bytes - 1] {
            let ended = four(shape, mortal, dies_at, 3);
            let means: Vec<Vec<u8>> = ended.into_iter().map(Result::unwrap).collect();
            assert!(means.iter().all(|mean| *mean == means[0]));
            let left = (0..4).filter(|rank| *rank != mortal);
            let left: Vec<_> = left.map(|rank| (rank, (rank + 1) as f64)).collect();
            check(&model(), &means[0], &left);
        }
    }
}

#[test]
fn all_hear_the_same_when_too_few_are_left() {
    for (shape, mortal) in MORTALS {
        for dies_at in [1, model().data_bytes() / 2] {
            let ended = four(shape, mortal, dies_at, 4);
            let errors: Vec<String> = ended.into_iter().map(Result::unwrap_err).collect();
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            assert!(errors[0].contains(&format!("host-{mortal}")), "{errors:?}");
        }
    }
}

/// An update that cannot be read further for a while, as on a disk that hangs.
struct Stuck {
    update: Generator,
    left: AtomicU64,
}

impl Source for Stuck {
    fn manifest(&self) -> &Manifest {
        self.update.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            sleep(Duration::from_secs(4));
        }
        self.update.read(offset, out)
    }
}

#[test]
fn the_others_go_on_without_a_host_that_stands_still() {
    let model = model();
    for (shape, stuck) in MORTALS {
        let config = RingConfig {
            shape,
            min_ranks: Some(3),
            chunk_bytes: 16 << 10,
            streams: Some(1),
            deadline: Duration::from_secs(1),
            ..config(4)
        };
        let (address, coordinator) = coordinate(config);
        let hosts: Vec<_> = (0..4)
            .map(|rank| {
                let model = model.clone();
                spawn(move || {
                    let name = format!("host-{rank}");
                    let (mut member, _canceller) =
                        join(address, member(&name, Secret::OPEN), &model);
                    let update = update(&model, rank);
                    let source: Box<dyn Source> = if rank == stuck {
                        Box::new(Stuck { update, left: AtomicU64::new(100) })
                    } else {
                        Box::new(update)
                    };
                    let reduced = reduce(&mut member, source.as_ref(), (rank + 1) as f64);
                    reduced.map(|reduced| reduced.mean).map_err(|error| error.to_string())
                })
            })
            .collect();
        let mut ended: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
        let lost = ended.remove(stuck).unwrap_err();
        assert!(lost.contains(&format!("host-{stuck}")), "{lost}");
        let means: Vec<Vec<u8>> = ended.into_iter().map(Result::unwrap).collect();
        assert!(means.iter().all(|mean| *mean == means[0]));
        let left = (0..4).filter(|rank| *rank != stuck);
        let left: Vec<_> = left.map(|rank| (rank, (rank + 1) as f64)).collect();
        check(&model, &means[0], &left);
        coordinator.join().unwrap().unwrap();
    }
}

#[test]
fn a_host_that_leaves_before_it_is_ready_is_left_out() {
    let model = model();
    let (address, coordinator) = coordinate(RingConfig { min_ranks: Some(2), ..config(3) });
    let hosts: Vec<_> = (0..3)
        .map(|rank| {
            let model = model.clone();
            spawn(move || {
                let name = format!("host-{rank}");
                let (mut member, _canceller) = join(address, member(&name, Secret::OPEN), &model);
                assert_eq!(member.next_round().unwrap(), Some(1));
                if rank == 1 {
                    return None;
                }
                Some(reduce(&mut member, &update(&model, rank), 1.0).unwrap())
            })
        })
        .collect();
    let reduced: Vec<_> = hosts.into_iter().filter_map(|host| host.join().unwrap()).collect();
    assert_eq!(reduced.len(), 2);
    assert!(reduced[0].mean == reduced[1].mean);
    check(&model, &reduced[0].mean, &[(0, 1.0), (2, 1.0)]);
    coordinator.join().unwrap().unwrap();
}

#[test]
fn a_host_that_is_late_is_left_out() {
    let model = model();
    let config = RingConfig {
        min_ranks: Some(2),
        round_deadline: Some(Duration::from_millis(600)),
        ..config(3)
    };
    let (address, coordinator) = coordinate(config);
    let hosts: Vec<_> = (0..3)
        .map(|rank| {
            let model = model.clone();
            spawn(move || {
                let name = format!("host-{rank}");
                let (mut member, _canceller) = join(address, member(&name, Secret::OPEN), &model);
                assert_eq!(member.next_round().unwrap(), Some(1));
                if rank == 1 {
                    sleep(Duration::from_secs(2));
                }
                reduce(&mut member, &update(&model, rank), 1.0).map_err(|e| e.to_string())
            })
        })
        .collect();
    let mut reduced: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
    let late = reduced.remove(1).err().unwrap();
    assert!(late.contains("was not whole"), "{late}");
    let means: Vec<_> = reduced.into_iter().map(|reduced| reduced.unwrap().mean).collect();
    assert!(means[0] == means[1]);
    check(&model, &means[0], &[(0, 1.0), (2, 1.0)]);
    coordinator.join().unwrap().unwrap();
}

#[test]
fn a_ring_of_one_that_is_left_ends() {
    let model = model();
    let (address, coordinator) = coordinate(RingConfig { rounds: 1, ..config(2) });
    let first = join(address, member("a", Secret::OPEN), &model).0;
    let mut second = join(address, member("b", Secret::OPEN), &model).0;
    assert_eq!(second.next_round().unwrap(), Some(1));
    drop(first);
    let error = second.all_reduce(
        &update(&model, 1),
        1.0,
        &mut fedlane::region::Region::new(model.data_bytes()).unwrap(),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("\"a\""), "{error}");
    coordinator.join().unwrap().unwrap_err();
}

#[test]
fn a_host_whose_weight_cannot_be_used_beside_the_others_is_left_out() {
    let model = model();
    let (address, coordinator) = coordinate(RingConfig { min_ranks: Some(2), ..config(3) });
    let hosts: Vec<_> = [1.0, 1e-300, 3.0]
        .into_iter()
        .enumerate()
        .map(|(rank, weight)| {
            let model = model.clone();
            spawn(move || {
                let name = format!("host-{rank}");
                let (mut member, _canceller) = join(address, member(&name, Secret::OPEN), &model);
                let reduced = reduce(&mut member, &update(&model, rank), weight);
                reduced.map(|reduced| reduced.mean).map_err(|error| error.to_string())
            })
        })
        .collect();
    let ended: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
    let why = ended[1].as_ref().unwrap_err();
    assert!(why.contains("host-1") && why.contains("too small beside the others"), "{why}");
    assert_eq!(ended[0].as_ref().unwrap(), ended[2].as_ref().unwrap());
    let report = &coordinator.join().unwrap().unwrap()[0];
    assert_eq!(report.ranks.len(), 2);
}
