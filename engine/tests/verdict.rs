//! What is found in whole updates, whatever the order of their chunks, and what follows from it.

use std::collections::BTreeMap;
use std::thread;

use fedlane::error::ReducerError;
use fedlane::limits::{MIN_CHUNK_BYTES, MIN_CLIP_FACTOR};
use fedlane::manifest::{ChunkTable, Dtype, Manifest};
use fedlane::reducer::{Norm, inspect};
use fedlane::verdict::{Findings, OnNonfinite, Place, Rejection, Summary, UpdatePolicy, Verdict};
use proptest::prelude::*;
use proptest::sample::Index;

/// Tensors of several dtypes, some of them without elements, across several chunks.
fn manifest() -> Manifest {
    let tensors = [
        ("nothing", Dtype::F32, vec![0, 3]),
        ("weight", Dtype::F32, vec![40, 50]),
        ("bias", Dtype::F32, vec![50]),
        ("none", Dtype::BF16, vec![0]),
        ("half", Dtype::BF16, vec![3000]),
        ("steps", Dtype::I64, vec![]),
        ("double", Dtype::F64, vec![1025]),
    ];
    let tensors = tensors.map(|(name, dtype, shape)| (name.to_owned(), dtype, shape));
    Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap()
}

/// A model of ones; [`NAN`] below is one in every float dtype.
fn model(manifest: &Manifest) -> Vec<u8> {
    let mut bytes = vec![0; manifest.data_bytes() as usize];
    for tensor in manifest.tensors() {
        let one: &[u8] = match tensor.dtype {
            Dtype::F32 => &1f32.to_le_bytes(),
            Dtype::BF16 => &half::bf16::ONE.to_le_bytes(),
            Dtype::F64 => &1f64.to_le_bytes(),
            _ => &1i64.to_le_bytes(),
        };
        let range = tensor.range.start as usize..tensor.range.end as usize;
        bytes[range].chunks_mut(one.len()).for_each(|element| element.copy_from_slice(one));
    }
    bytes
}

fn set_nan(manifest: &Manifest, bytes: &mut [u8], tensor: &str, index: usize) {
    let tensor = manifest.tensors().iter().find(|t| t.name == tensor).unwrap();
    let size = tensor.dtype.bitsize() / 8;
    let start = tensor.range.start as usize + index * size;
    assert!(start < tensor.range.end as usize);
    bytes[start..start + size].fill(0xff);
}

/// Notes the chunks in that order.
fn note(findings: &Findings, chunks: &ChunkTable, bytes: &[u8], order: &[usize], norm: bool) {
    for &index in order {
        let chunk = chunks.get(index);
        let payload = &bytes[chunk.bytes.start as usize..chunk.bytes.end as usize];
        let norm = if norm { Norm::OfUpdate } else { Norm::Skip };
        findings.note(index, &inspect(chunk.dtype, payload, norm).unwrap());
    }
}

fn summary(manifest: &Manifest, bytes: &[u8], norm: bool) -> Summary {
    let chunks = manifest.chunks(MIN_CHUNK_BYTES).unwrap();
    let findings = Findings::new(chunks.len());
    let order: Vec<usize> = (0..chunks.len()).collect();
    note(&findings, &chunks, bytes, &order, norm);
    findings.summary(manifest, &chunks).unwrap()
}

#[test]
fn an_update_of_ones_is_summed_up() {
    let manifest = manifest();
    let elements = 2000 + 50 + 3000 + 1 + 1025;
    // The integer is no part of the norm.
    let norm = ((elements - 1) as f64).sqrt();
    let expected = Summary {
        bytes: manifest.data_bytes(),
        elements,
        nonfinite: 0,
        first_nonfinite: None,
        norm: Some(norm),
    };
    let bytes = model(&manifest);
    assert_eq!(summary(&manifest, &bytes, true), expected);
    assert_eq!(summary(&manifest, &bytes, false), Summary { norm: None, ..expected });
}

#[test]
fn the_first_bad_element_is_named_by_its_tensor() {
    let manifest = manifest();
    let elements = MIN_CHUNK_BYTES as usize;
    let places = [
        ("weight", 0),
        // The last of a chunk, the first of the next, and the last of the tensor.
        ("weight", elements / 4 - 1),
        ("weight", elements / 4),
        ("weight", 1999),
        // Begins in the middle of a chunk.
        ("bias", 0),
        ("bias", 49),
        ("half", 0),
        ("half", elements / 2),
        ("half", 2999),
        ("double", 0),
        ("double", 511),
        ("double", 512),
        ("double", 1024),
    ];
    let mut bytes = model(&manifest);
    // From the last to the first: each is the first one, and those after it are counted.
    for (known, (tensor, index)) in places.into_iter().rev().enumerate() {
        set_nan(&manifest, &mut bytes, tensor, index);
        let summary = summary(&manifest, &bytes, true);
        let place = Place { tensor: tensor.to_owned(), index: index as u64 };
        assert_eq!(summary.first_nonfinite, Some(place));
        assert_eq!(summary.nonfinite, known as u64 + 1);
        assert_eq!(summary.norm, Some((summary.elements as f64 - 2.0 - known as f64).sqrt()));
    }
    // All bits set are a number there.
    set_nan(&manifest, &mut bytes, "steps", 0);
    assert_eq!(summary(&manifest, &bytes, true).nonfinite, places.len() as u64);
}

proptest! {
    #[test]
    fn the_order_of_chunks_changes_no_bit(
        numbers in prop::collection::vec(-1e3..1e3f32, 5000),
        swaps in prop::collection::vec(any::<(Index, Index)>(), 0..20),
        again in any::<Index>(),
    ) {
        let tensors = [("a".to_owned(), Dtype::F32, vec![5000])];
        let manifest = Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap();
        let chunks = manifest.chunks(MIN_CHUNK_BYTES).unwrap();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut order: Vec<usize> = (0..chunks.len()).collect();
        for (a, b) in swaps {
            order.swap(a.index(chunks.len()), b.index(chunks.len()));
        }
        // What is sent again is not counted twice.
        order.push(again.index(chunks.len()));
        let findings = Findings::new(chunks.len());
        note(&findings, &chunks, &bytes, &order, true);
        let got = findings.summary(&manifest, &chunks).unwrap();
        let expected = summary(&manifest, &bytes, true);
        prop_assert_eq!(got.norm.map(f64::to_bits), expected.norm.map(f64::to_bits));
        prop_assert_eq!(got, expected);
    }
}

#[test]
fn lanes_note_their_chunks_at_once() {
    let manifest = manifest();
    let chunks = manifest.chunks(MIN_CHUNK_BYTES).unwrap();
    let mut bytes = model(&manifest);
    set_nan(&manifest, &mut bytes, "half", 7);
    let findings = Findings::new(chunks.len());
    thread::scope(|scope| {
        for lane in chunks.lanes(3) {
            let (findings, chunks, bytes) = (&findings, &chunks, &bytes);
            let order: Vec<usize> = lane.collect();
            scope.spawn(move || note(findings, chunks, bytes, &order, true));
        }
    });
    assert_eq!(findings.summary(&manifest, &chunks).unwrap(), summary(&manifest, &bytes, true));
}

#[test]
fn a_chunk_that_was_not_inspected_is_an_error() {
    let manifest = manifest();
    let chunks = manifest.chunks(MIN_CHUNK_BYTES).unwrap();
    let bytes = model(&manifest);
    let all: Vec<usize> = (0..chunks.len()).collect();
    let findings = Findings::new(chunks.len());
    let missing = |findings: &Findings| findings.summary(&manifest, &chunks).unwrap_err();
    assert_eq!(missing(&findings), ReducerError::NotInspected { chunk: 0 });
    note(&findings, &chunks, &bytes, &all[..chunks.len() - 1], true);
    assert_eq!(missing(&findings), ReducerError::NotInspected { chunk: chunks.len() - 1 });
    note(&findings, &chunks, &bytes, &all, true);
    assert!(findings.summary(&manifest, &chunks).is_ok());
    findings.clear();
    assert_eq!(missing(&findings), ReducerError::NotInspected { chunk: 0 });
    let short = Findings::new(0);
    assert_eq!(missing(&short), ReducerError::NotInspected { chunk: 0 });
}

#[test]
fn a_model_without_elements_has_nothing_bad() {
    let tensors = [("nothing".to_owned(), Dtype::F64, vec![0])];
    let manifest = Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap();
    let summary = summary(&manifest, &[], true);
    assert_eq!((summary.bytes, summary.elements, summary.nonfinite), (0, 0, 0));
    assert_eq!((summary.first_nonfinite, summary.norm), (None, Some(0.0)));
}

fn found(nonfinite: u64, norm: Option<f64>) -> Summary {
    Summary { bytes: 8, elements: 2, nonfinite, first_nonfinite: None, norm }
}

#[test]
fn what_is_not_finite_is_rejected_zeroed_or_kept() {
    let judge = |on_nonfinite, nonfinite| {
        UpdatePolicy { on_nonfinite, clip_norm: None }.judge(&found(nonfinite, None))
    };
    let counted = |zeroed| Verdict::Counted { clip_factor: 1.0, zeroed };
    assert_eq!(UpdatePolicy::default().on_nonfinite, OnNonfinite::Reject);
    assert_eq!(judge(OnNonfinite::Reject, 1), Verdict::Rejected(Rejection::Nonfinite));
    assert_eq!(judge(OnNonfinite::Zero, 1), counted(true));
    assert_eq!(judge(OnNonfinite::Keep, 1), counted(false));
    for policy in [OnNonfinite::Reject, OnNonfinite::Zero, OnNonfinite::Keep] {
        assert_eq!(judge(policy, 0), counted(false));
    }
}

#[test]
fn large_updates_are_clipped_and_those_beyond_that_rejected() {
    let policy = UpdatePolicy { on_nonfinite: OnNonfinite::Zero, clip_norm: Some(2.0) };
    let judge = |nonfinite, norm| policy.judge(&found(nonfinite, Some(norm)));
    let counted = |clip_factor, zeroed| Verdict::Counted { clip_factor, zeroed };
    assert_eq!(judge(0, 0.0), counted(1.0, false));
    assert_eq!(judge(0, 2.0), counted(1.0, false));
    assert_eq!(judge(0, 8.0), counted(0.25, false));
    assert_eq!(judge(3, 8.0), counted(0.25, true));
    assert_eq!(judge(0, 2.0 / MIN_CLIP_FACTOR), counted(MIN_CLIP_FACTOR, false));
    for norm in [4.1 / MIN_CLIP_FACTOR, f64::MAX, f64::INFINITY] {
        assert_eq!(judge(0, norm), Verdict::Rejected(Rejection::TooLarge));
    }
    let unclipped = UpdatePolicy { clip_norm: None, ..policy };
    assert_eq!(unclipped.judge(&found(0, Some(f64::INFINITY))), counted(1.0, false));
}

#[test]
fn reports_say_the_weight_in_the_mean() {
    let policy = UpdatePolicy { on_nonfinite: OnNonfinite::Reject, clip_norm: Some(1.0) };
    let weight = |nonfinite, norm| {
        policy.report("a".to_owned(), 3, 20.0, found(nonfinite, Some(norm))).weight
    };
    assert_eq!(weight(0, 0.5), 20.0);
    assert_eq!(weight(0, 4.0), 5.0);
    assert_eq!(weight(0, f64::INFINITY), 0.0);
    assert_eq!(weight(1, 0.5), 0.0);
}

/// Of an update that is rejected while it comes.
#[test]
fn what_came_of_an_update_is_summed_up() {
    let manifest = manifest();
    let chunks = manifest.chunks(MIN_CHUNK_BYTES).unwrap();
    let mut bytes = model(&manifest);
    set_nan(&manifest, &mut bytes, "half", 7);
    set_nan(&manifest, &mut bytes, "half", 9);
    set_nan(&manifest, &mut bytes, "double", 0);
    let findings = Findings::new(chunks.len());
    assert_eq!(findings.so_far(&manifest, &chunks).elements, 0);
    // Up to the chunk with the second tensor's.
    let half = manifest.tensors().iter().find(|tensor| tensor.name == "half").unwrap();
    let last =
        (0..chunks.len()).find(|&i| chunks.get(i).bytes.contains(&half.range.start)).unwrap();
    let order: Vec<usize> = (0..=last).collect();
    note(&findings, &chunks, &bytes, &order, false);
    let found = findings.so_far(&manifest, &chunks);
    assert_eq!(found.bytes, chunks.get(last).bytes.end);
    assert!(findings.summary(&manifest, &chunks).is_err(), "not all of it came");
    assert_eq!(found.nonfinite, 2);
    assert_eq!(found.first_nonfinite, Some(Place { tensor: "half".into(), index: 7 }));
    let policy = UpdatePolicy::default();
    let report = policy.report("c".into(), 1, 40.0, found);
    assert_eq!(report.verdict, Verdict::Rejected(Rejection::Nonfinite));
    assert_eq!(report.weight, 0.0);
}
