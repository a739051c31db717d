//! What an aggregator keeps on disk: its record, its regions, its ledger.

use std::net::SocketAddr;
use std::slice::from_ref;
use std::sync::Arc;

use fedlane::error::StateError;
use fedlane::ledger::{self, Kind, LaneLedger, Stream};
use fedlane::manifest::{ChunkTable, Dtype, Manifest};
use fedlane::signal::Signal;
use fedlane::state::{ClientRecord, ModelRecord, Record, RegionNames, Stage, StateDir};
use fedlane::sums::SumTable;
use fedlane::verdict::Findings;
use proptest::prelude::*;

const CLIENTS: usize = 3;

fn record(stage: Stage) -> Record {
    let client = |name: &str| ClientRecord {
        name: name.into(),
        address: SocketAddr::from(([10, 0, 0, 1], 7)),
        examples: 2.5,
        holds: Some(1),
    };
    Record {
        session: [7; 16],
        header: b"{}".to_vec(),
        settings: vec![("--rounds".into(), "3".into())],
        clients: ["a", "b", "c"].map(client).into(),
        round: 2,
        sent: Some(1),
        model: Some(ModelRecord { region: "region-4".into(), digest: [9; 32] }),
        stage,
    }
}

fn stages() -> [Stage; 3] {
    let regions = RegionNames {
        ledger: "region-0".into(),
        accumulator: Some("region-1".into()),
        model: None,
        spool: vec![],
    };
    [
        Stage::Between,
        Stage::Uploading { absent: vec![false; 3], lost: vec![false, true, false], regions },
        Stage::Averaged { counted: vec![true, false, true] },
    ]
}

#[test]
fn a_record_is_read_as_it_was_written() {
    for stage in stages() {
        let record = record(stage);
        assert_eq!(Record::decode(&record.encode().unwrap()).unwrap(), record);
    }
}

#[test]
fn a_record_that_was_cut_or_changed_is_refused() {
    for stage in stages() {
        let bytes = record(stage).encode().unwrap();
        for length in 0..bytes.len() {
            assert!(Record::decode(&bytes[..length]).is_err(), "cut to {length}");
        }
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert!(Record::decode(&changed).is_err(), "byte {index}");
        }
    }
}

#[test]
fn a_record_whose_parts_do_not_fit_is_refused() {
    let mut few = record(Stage::Averaged { counted: vec![true] });
    assert!(Record::decode(&few.encode().unwrap()).unwrap_err().contains("do not fit"));
    few.stage = Stage::Between;
    few.clients.clear();
    assert!(Record::decode(&few.encode().unwrap()).unwrap_err().contains("do not fit"));
}

#[test]
fn a_directory_is_used_by_one() {
    let path = tempfile::tempdir().unwrap();
    let (_directory, record) = StateDir::open(path.path()).unwrap();
    assert!(record.is_none());
    assert!(matches!(StateDir::open(path.path()), Err(StateError::Locked { .. })));
}

#[test]
fn regions_that_the_record_names_stay() {
    let path = tempfile::tempdir().unwrap();
    let (directory, _) = StateDir::open(path.path()).unwrap();
    let mut regions: Vec<_> = (0..6).map(|_| directory.make_region(100).unwrap()).collect();
    regions[4].bytes_mut().0.fill(3);
    let [.., stage, _] = stages();
    directory.write(&record(stage)).unwrap();
    drop((regions, directory));
    let (directory, found) = StateDir::open(path.path()).unwrap();
    assert_eq!(found.unwrap().round, 2);
    let kept = directory.open_region("region-4", 100).unwrap();
    assert_eq!(kept.bytes(), [3; 100]);
    for name in ["region-0", "region-1", "region-2", "region-3", "region-5"] {
        let named = ["region-0", "region-1"].contains(&name);
        assert_eq!(directory.open_region(name, 100).is_ok(), named, "{name}");
    }
    // Nothing new takes the place of what is kept.
    assert_eq!(directory.make_region(1).unwrap().name(), Some("region-5"));
    assert!(directory.open_region("region-4", 101).is_err());
    for name in ["../region-4", "region-/../session", "lock"] {
        assert!(directory.open_region(name, 1).is_err(), "{name}");
    }
    directory.clear().unwrap();
    assert!(directory.open_region("region-4", 100).is_err());
}

struct Lane {
    chunks: ChunkTable,
    sums: Vec<SumTable>,
    findings: Findings,
}

impl Lane {
    fn new() -> Lane {
        let tensor = ("t".to_owned(), Dtype::F32, vec![4 << 10]);
        let manifest = Manifest::from_tensors([tensor], &Default::default()).unwrap();
        let chunks = manifest.chunks(4096).unwrap();
        let table = |_| {
            let table = SumTable::new(from_ref(&(0..4)), &[Arc::new(Signal::new().unwrap())]);
            table.announce(0, &[[1; 8], [2; 8], [3; 8], [4; 8]]).unwrap();
            table
        };
        Lane { chunks, sums: (0..CLIENTS).map(table).collect(), findings: Findings::new(4) }
    }

    fn ledger<'a>(&'a self, bytes: &'a mut [u8], round: u32, lost: &[usize]) -> LaneLedger<'a> {
        let findings = Some(&self.findings);
        let stream = |peer: usize| {
            let sums = self.sums[peer].lane(0);
            Stream { sums, findings, lost: lost.contains(&peer) }
        };
        let lane = 0..self.chunks.len();
        let streams = |_| (0..CLIENTS).map(stream).collect();
        ledger::cut(bytes, &self.chunks, from_ref(&lane), round, streams).remove(0)
    }
}

fn bytes() -> Vec<u8> {
    vec![0; ledger::bytes(4, CLIENTS) as usize]
}

#[test]
fn an_entry_counts_when_it_is_sealed_and_in_its_round() {
    let (lane, mut bytes) = (Lane::new(), bytes());
    let mut ledger = lane.ledger(&mut bytes, 2, &[]);
    assert!(ledger.entry(1).is_none());
    ledger.add(1, 0);
    ledger.add(1, 2);
    assert!(ledger.entry(1).is_none(), "not sealed yet");
    ledger.seal(1, Kind::Sums, 11, 12);
    let entry = ledger.entry(1).unwrap();
    assert_eq!((entry.kind, entry.content, entry.weights), (Kind::Sums, 11, 12));
    let sum = u64::from_le_bytes([2; 8]);
    assert_eq!(entry.came, [(0, sum), (2, sum)]);
    assert!(ledger.entry(0).is_none() && ledger.entry(2).is_none());
    // Of those who are lost, of another round, cleared.
    assert!(lane.ledger(&mut bytes, 2, &[2]).entry(1).is_none());
    assert!(lane.ledger(&mut bytes, 2, &[1]).entry(1).is_some());
    assert!(lane.ledger(&mut bytes, 3, &[]).entry(1).is_none());
    let mut next = lane.ledger(&mut bytes, 3, &[]);
    next.add(1, 1);
    next.seal(1, Kind::Mean, 0, 0);
    assert_eq!(next.entry(1).unwrap().came, [(1, sum)], "of this round alone");
    next.clear(1);
    assert!(next.entry(1).is_none());
}

#[test]
fn streams_know_again_what_came() {
    let (lane, mut bytes) = (Lane::new(), bytes());
    let mut ledger = lane.ledger(&mut bytes, 1, &[]);
    ledger.add(3, 1);
    ledger.seal(3, Kind::Updates, 0, 0);
    let later = Lane::new();
    later.sums.iter().for_each(SumTable::clear);
    let ledger = later.ledger(&mut bytes, 1, &[]);
    ledger.recall(3, &ledger.entry(3).unwrap());
    assert_eq!(later.sums[1].lane(0).get(3), Some(u64::from_le_bytes([4; 8])));
    assert_eq!(later.sums[0].lane(0).get(3), None);
}

proptest! {
    /// Whatever bit changes: the entry does not count, or it is not the one that was changed.
    #[test]
    fn a_changed_entry_does_not_count(byte in 0..ledger::bytes(4, CLIENTS) as usize, bit in 0_u8..8) {
        let (lane, mut bytes) = (Lane::new(), bytes());
        let mut ledger = lane.ledger(&mut bytes, 2, &[]);
        for chunk in 0..4 {
            ledger.add(chunk, 1);
            ledger.seal(chunk, Kind::Mean, 1, 2);
        }
        bytes[byte] ^= 1_u8 << bit;
        let changed = byte / ledger::bytes(1, CLIENTS) as usize;
        let ledger = lane.ledger(&mut bytes, 2, &[]);
        for chunk in 0..4 {
            prop_assert_eq!(ledger.entry(chunk).is_some(), chunk != changed);
        }
    }
}
