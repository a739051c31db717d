//! What tests of rings share.

use std::net::SocketAddr;
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use fedlane::client::{Canceller, ClientConfig};
use fedlane::control::Congestion;
use fedlane::error::{AggregatorError, ClientError};
use fedlane::manifest::Manifest;
use fedlane::paths::ReceiveKind;
use fedlane::region::Region;
use fedlane::ring::{
    Coordinator, Joined, Member, Outcome, RingConfig, RingMember, RoundReport, join_any,
};
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::topology::Shape;
use fedlane::wire::hello::Secret;
use proptest::prelude::*;

pub fn config(ranks: usize) -> RingConfig {
    RingConfig { ranks, deadline: Duration::from_secs(20), ..RingConfig::default() }
}

pub fn member(name: &str, secret: Secret) -> RingMember {
    let client = ClientConfig {
        name: name.into(),
        examples: 1.0,
        secret,
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: Duration::from_secs(20),
        reconnect: Some(Duration::ZERO),
    };
    RingMember { client, advertise: None }
}

/// Joins a ring; gives also what ends the member as a killed process would end.
pub fn join(address: SocketAddr, config: RingMember, manifest: &Manifest) -> (Member, Canceller) {
    let canceller = Canceller::default();
    match join_any(address, config, manifest, &canceller).unwrap() {
        Joined::Ring(member) => (*member, canceller),
        Joined::Star(_) => panic!("this is a ring"),
    }
}

/// Runs a coordinator for so many rounds.
pub fn coordinate(
    config: RingConfig,
) -> (SocketAddr, JoinHandle<Result<Vec<RoundReport>, AggregatorError>>) {
    let rounds = config.rounds;
    let mut ring = Coordinator::bind("127.0.0.1:0", config).unwrap();
    let address = ring.address();
    let run = move || {
        ring.gather()?;
        let reports = (0..rounds).map(|_| ring.run_round()).collect::<Result<Vec<_>, _>>()?;
        ring.finish();
        Ok(reports)
    };
    (address, spawn(run))
}

/// What a member of a test has at the end.
pub struct Reduced {
    pub mean: Vec<u8>,
    pub outcome: Outcome,
}

/// One all-reduce of a generated update.
pub fn reduce(
    member: &mut Member,
    source: &dyn Source,
    weight: f64,
) -> Result<Reduced, ClientError> {
    let mut out = Region::new(source.manifest().data_bytes()).unwrap();
    let outcome = member.all_reduce(source, weight, &mut out)?;
    Ok(Reduced { mean: out.bytes().to_vec(), outcome })
}

pub fn weights() -> impl Strategy<Value = Vec<f64>> {
    let weight = prop_oneof![Just(0.0), 1.0..10.0, (1_u32..1_000_000).prop_map(f64::from)];
    prop::collection::vec(weight, 2..=8)
        .prop_filter("somebody counts", |weights| weights.iter().any(|w| *w > 0.0))
}

/// Ring and chain.
pub const BOTH: [Shape; 2] = [Shape::Ring, Shape::Chain];

/// The update of a rank.
pub fn update(manifest: &Manifest, rank: usize) -> Generator {
    Generator::new(manifest.clone(), 100 + rank as u64)
}

/// All members of a ring, one all-reduce; what each has.
pub fn run(config: RingConfig, manifest: &Manifest, weights: &[f64]) -> Vec<Reduced> {
    let secret = config.secret;
    let (address, coordinator) = coordinate(config);
    let members: Vec<_> = weights
        .iter()
        .enumerate()
        .map(|(rank, &weight)| {
            let manifest = manifest.clone();
            spawn(move || {
                let (mut member, _) =
                    join(address, member(&format!("host-{rank:02}"), secret), &manifest);
                let reduced = reduce(&mut member, &update(&manifest, rank), weight).unwrap();
                assert_eq!(member.next_round().unwrap(), None);
                reduced
            })
        })
        .collect();
    let reduced = members.into_iter().map(|member| member.join().unwrap()).collect();
    let reports = coordinator.join().unwrap().unwrap();
    assert_eq!(reports.len(), 1);
    reduced
}

/// Compares a mean with a reference average of these ranks and weights.
#[track_caller]
pub fn check(manifest: &Manifest, mean: &[u8], ranks: &[(usize, f64)]) {
    use fedlane::reference::{self, Contribution, ReadAt};
    let sources: Vec<_> = ranks.iter().map(|(rank, _)| update(manifest, *rank)).collect();
    let readers: Vec<_> = sources
        .iter()
        .map(|source| {
            move |offset: u64, out: &mut [u8]| {
                source.read(offset, out).map_err(std::io::Error::other)
            }
        })
        .collect();
    let contributions: Vec<Contribution<'_>> = readers
        .iter()
        .zip(ranks)
        .map(|(read, (_, weight))| Contribution { weight: *weight, read: read as &ReadAt<'_> })
        .collect();
    let result = |offset: u64, out: &mut [u8]| {
        out.copy_from_slice(&mean[offset as usize..][..out.len()]);
        Ok(())
    };
    let runs: Vec<_> = manifest.runs().iter().map(|run| (run.dtype, run.range.clone())).collect();
    let checked = reference::check(&runs, &contributions, &result, 1).unwrap();
    assert_eq!(
        checked.elements,
        manifest.tensors().iter().map(|t| t.shape.iter().product::<u64>()).sum::<u64>()
    );
}
