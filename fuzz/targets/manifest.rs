//! A header of arbitrary bytes: it is refused, or everything that is computed from it holds.
#![no_main]

use fedlane::limits;
use fedlane::manifest::{ChunkTable, Manifest};
use libfuzzer_sys::fuzz_target;

/// So much work is done for one input at most.
const CHUNKS_LOOKED_AT: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    let Ok(manifest) = Manifest::from_header(bytes) else { return };
    assert_eq!(manifest.header(), bytes);
    check_cover(&manifest);
    // Too small, odd, in use.
    for chunk_bytes in [0, 1, 3, limits::MIN_CHUNK_BYTES + 1, limits::MAX_CHUNK_BYTES] {
        if let Ok(chunks) = manifest.chunks(chunk_bytes) {
            check_chunks(&manifest, &chunks);
        }
    }
    check_copy(&manifest);
});

/// Tensors and runs cover the data without hole or overlap.
fn check_cover(manifest: &Manifest) {
    let mut end = 0;
    for tensor in manifest.tensors() {
        assert_eq!(tensor.range.start, end);
        end = tensor.range.end;
        if !tensor.range.is_empty() {
            assert_eq!(manifest.tensor_at(tensor.range.start), Some(tensor));
        }
    }
    assert_eq!(manifest.data_bytes(), end);
    assert!(end <= limits::MAX_MODEL_BYTES);
    assert_eq!(manifest.tensor_at(end), None);
    let mut run_end = 0;
    for run in manifest.runs() {
        assert_eq!(run.range.start, run_end);
        assert!(!run.range.is_empty());
        run_end = run.range.end;
    }
    assert_eq!(run_end, end);
}

/// Chunks follow each other, and lanes cover them in order.
fn check_chunks(manifest: &Manifest, chunks: &ChunkTable) {
    assert!(chunks.len() <= limits::MAX_CHUNKS);
    assert_eq!(chunks.bytes_of(&(0..chunks.len())), 0..manifest.data_bytes());
    let mut end = 0;
    for index in 0..chunks.len().min(CHUNKS_LOOKED_AT) {
        let chunk = chunks.get(index);
        assert_eq!((chunk.index, chunk.bytes.start), (index, end));
        assert!(!chunk.bytes.is_empty() && chunk.length() as u64 <= chunks.chunk_bytes());
        end = chunk.bytes.end;
    }
    for lanes in [0, 1, 2, 7, limits::MAX_STREAMS] {
        let ranges = chunks.lanes(lanes);
        assert_eq!(ranges.len(), lanes.max(1));
        let mut first = 0;
        for range in ranges {
            assert_eq!(range.start, first);
            assert!(range.start <= range.end);
            first = range.end;
        }
        assert_eq!(first, chunks.len());
    }
}

/// What is read from a header is the same when it is spelled by us.
fn check_copy(manifest: &Manifest) {
    let tensors = manifest.tensors().iter().map(|t| (t.name.clone(), t.dtype, t.shape.clone()));
    // A longer spelling may go beyond the limit of a header.
    if let Ok(copy) = Manifest::from_tensors(tensors, &Default::default()) {
        assert_eq!(copy.tensors(), manifest.tensors());
        assert_eq!(copy.layout_digest(), manifest.layout_digest());
        assert_eq!(manifest.first_difference(&copy), None);
    }
}
