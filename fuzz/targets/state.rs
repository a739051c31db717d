//! A session's record and ledger as they may stand on a disk: they are refused, or mean just what they
//! say. Their checksums are made right first, which no mutation would find.
#![no_main]

use std::slice::from_ref;
use std::sync::{Arc, OnceLock};

use fedlane::ledger::{self, Stream};
use fedlane::manifest::{ChunkTable, Dtype, Manifest};
use fedlane::signal::Signal;
use fedlane::state::Record;
use fedlane::sums::SumTable;
use fedlane::wire::checksum::chunk_sum;
use libfuzzer_sys::fuzz_target;

const CLIENTS: usize = 2;

fuzz_target!(|bytes: &[u8]| {
    check_record(bytes);
    check_ledger(bytes);
});

fn check_record(bytes: &[u8]) {
    let _ = Record::decode(bytes);
    let sum = chunk_sum(bytes).to_le_bytes();
    let file = [b"fedlane\x01".as_slice(), &sum, bytes].concat();
    let Ok(record) = Record::decode(&file) else { return };
    let again = Record::decode(&record.encode().expect("it was decoded")).expect("as it was");
    assert_eq!(format!("{again:?}"), format!("{record:?}"));
}

/// Three chunks, on one lane.
fn model() -> &'static (ChunkTable, SumTable) {
    static MODEL: OnceLock<(ChunkTable, SumTable)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let tensor = ("t".to_owned(), Dtype::F32, vec![3 << 10]);
        let manifest = Manifest::from_tensors([tensor], &Default::default()).unwrap();
        let chunks = manifest.chunks(4096).unwrap();
        let signal = Arc::new(Signal::new().unwrap());
        let sums = SumTable::new(from_ref(&(0..chunks.len())), &[signal]);
        (chunks, sums)
    })
}

fn check_ledger(bytes: &[u8]) {
    let (chunks, sums) = model();
    let mut region = vec![0; ledger::bytes(chunks.len(), CLIENTS) as usize];
    let length = bytes.len().min(region.len());
    region[..length].copy_from_slice(&bytes[..length]);
    for entry in region.chunks_mut(ledger::bytes(1, CLIENTS) as usize) {
        let check = chunk_sum(&entry[8..]);
        entry[..8].copy_from_slice(&check.to_ne_bytes());
    }
    let stream = Stream { sums: sums.lane(0), findings: None, lost: false };
    let lane = 0..chunks.len();
    let mut lanes = ledger::cut(&mut region, chunks, from_ref(&lane), 7, |_| vec![stream; CLIENTS]);
    let ledger = &mut lanes[0];
    for chunk in 0..chunks.len() {
        if let Some(entry) = ledger.entry(chunk) {
            assert!(entry.came.iter().all(|(peer, _)| *peer < CLIENTS) && !entry.came.is_empty());
            ledger.recall(chunk, &entry);
        }
        ledger.add(chunk, 1);
        ledger.seal(chunk, ledger::Kind::Sums, 5, 6);
        let entry = ledger.entry(chunk).expect("just sealed");
        assert_eq!((entry.kind, entry.content, entry.weights), (ledger::Kind::Sums, 5, 6));
        assert!(ledger.came(chunk).any(|peer| peer == 1));
        ledger.clear(chunk);
        assert!(ledger.entry(chunk).is_none());
    }
}
