//! Neighbours that speak TLS with each other, as all do with the coordinator.

use std::thread::spawn;

use fedlane::client::Canceller;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::ring::{RingConfig, join_any};
use fedlane::tls::{ClientTls, ServerTls};
use fedlane::wire::hello::Secret;

use crate::common::{BOTH, check, config, coordinate, join, member, reduce, update};
use crate::models::manifest;

fn model() -> Manifest {
    manifest(&[("w", Dtype::F32, &[500_000]), ("h", Dtype::BF16, &[100_001])])
}

#[test]
fn all_have_the_mean_over_tls() {
    let model = model();
    for shape in BOTH {
        let (server, certificate) = ServerTls::self_signed().unwrap();
        let config = RingConfig { shape, tls: Some(server), ..config(3) };
        let (address, coordinator) = coordinate(config);
        let hosts: Vec<_> = (0..3)
            .map(|rank| {
                let (model, certificate) = (model.clone(), certificate.clone());
                spawn(move || {
                    let mut config = member(&format!("host-{rank}"), Secret::OPEN);
                    config.client.tls = Some(ClientTls::pinned(&certificate).unwrap());
                    let (mut member, _) = join(address, config, &model);
                    reduce(&mut member, &update(&model, rank), 1.0).unwrap().mean
                })
            })
            .collect();
        let means: Vec<_> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
        coordinator.join().unwrap().unwrap();
        assert!(means.iter().all(|mean| *mean == means[0]));
        check(&model, &means[0], &[(0, 1.0), (1, 1.0), (2, 1.0)]);
    }
}

#[test]
fn who_speaks_no_tls_does_not_join() {
    let (server, _) = ServerTls::self_signed().unwrap();
    let config = RingConfig { tls: Some(server), ..config(2) };
    let ring = fedlane::ring::Coordinator::bind("127.0.0.1:0", config).unwrap();
    let joined =
        join_any(ring.address(), member("a", Secret::OPEN), &model(), &Canceller::default());
    let error = joined.err().unwrap().to_string();
    assert!(error.contains("TLS"), "{error}");
}
