//! The mean of a lane does not depend on how far apart its clients are: sums that stay in a tile,
//! leave it and come back, and payloads that are held for their sums, give the same bits as one
//! plain loop over the chunks in the order in which they came.

use std::collections::BTreeMap;

use fedlane::manifest::{ChunkTable, Dtype, Manifest};
use fedlane::reducer::{AccumulatorLayout, Weights, accumulate, finish};
use fedlane::region::Region;
use fedlane::sink::Sink;
use fedlane::sink::mean::{MeanSink, MeanSlices, TileMemory};
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::wire::checksum::chunk_sum;
use proptest::prelude::*;

const CHUNK_BYTES: u64 = 4096;

/// Chunks of several sizes and dtypes, so that no tile fits all.
fn model(dtypes: &[Dtype]) -> Manifest {
    let tensors = dtypes.iter().enumerate();
    let tensors = tensors.map(|(i, &dtype)| (format!("t{i}"), dtype, vec![1500 + 700 * i as u64]));
    Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap()
}

fn payload(clients: &[Generator], client: usize, chunks: &ChunkTable, chunk: usize) -> Vec<u8> {
    let bytes = chunks.get(chunk).bytes;
    let mut payload = vec![0; (bytes.end - bytes.start) as usize];
    clients[client].read(bytes.start, &mut payload).unwrap();
    payload
}

/// One plain loop.
fn expected(
    manifest: &Manifest,
    clients: &[Generator],
    weights: &Weights,
    arrivals: &[(usize, usize)],
) -> Vec<u8> {
    let chunks = manifest.chunks(CHUNK_BYTES).unwrap();
    let mut mean = vec![0; manifest.data_bytes() as usize];
    for index in 0..chunks.len() {
        let chunk = chunks.get(index);
        let mut sums = vec![0f64; CHUNK_BYTES as usize];
        let runs = [(chunk.dtype, 0..chunk.length() as u64)];
        let bytes = AccumulatorLayout::new(runs).unwrap().bytes() as usize;
        let sums = &mut zerocopy::IntoBytes::as_mut_bytes(sums.as_mut_slice())[..bytes];
        let of_chunk = arrivals.iter().filter(|(_, chunk)| *chunk == index);
        for (number, (client, _)) in of_chunk.enumerate() {
            let payload = payload(clients, *client, &chunks, index);
            let weight = weights.get(*client).unwrap();
            accumulate(chunk.dtype, number == 0, weight, &payload, sums).unwrap();
        }
        let out = &mut mean[chunk.bytes.start as usize..chunk.bytes.end as usize];
        finish(chunk.dtype, weights, sums, out).unwrap();
    }
    mean
}

fn averaged(
    manifest: &Manifest,
    clients: &[Generator],
    weights: &Weights,
    arrivals: &[(usize, usize)],
) -> (Vec<u8>, Vec<u64>) {
    let chunks = manifest.chunks(CHUNK_BYTES).unwrap();
    let runs = manifest.runs().iter().map(|run| (run.dtype, run.range.clone()));
    let layout = AccumulatorLayout::new(runs).unwrap();
    let mut accumulator = Region::new(layout.bytes()).unwrap();
    // What another session left in warm memory is not seen.
    accumulator.bytes_mut().0.fill(0xaa);
    let mut model = vec![0xaa; manifest.data_bytes() as usize];
    let mut sums = vec![0; chunks.len()];
    let tiles = TileMemory::default();
    let in_place = layout.is_in_place();
    let slices = MeanSlices {
        accumulator: Some(accumulator.bytes_mut().0),
        model: (!in_place).then_some(model.as_mut_slice()),
        sums: &mut sums,
        tiles: &tiles,
        wave: None,
    };
    let range = 0..chunks.len();
    let mut sink = MeanSink::new(weights, &layout, &chunks, &range, slices).unwrap();
    let mut buffer = Region::new(CHUNK_BYTES).unwrap();
    for &(client, index) in arrivals {
        let payload = payload(clients, client, &chunks, index);
        buffer.bytes_mut().0[..payload.len()].copy_from_slice(&payload);
        sink.accept(client, &chunks.get(index), &mut buffer).unwrap();
        assert!(buffer.bytes().len() as u64 >= CHUNK_BYTES);
    }
    sink.end().unwrap();
    drop(sink);
    if in_place {
        model.copy_from_slice(accumulator.bytes());
    }
    (model, sums)
}

/// Every client's chunks in order, the clients interleaved at random.
fn interleaved(
    clients: usize,
    chunks: usize,
    picks: &[prop::sample::Index],
) -> Vec<(usize, usize)> {
    let mut next = vec![0; clients];
    let mut arrivals = Vec::new();
    for pick in picks.iter().cycle().take(1000 * clients * chunks) {
        let open: Vec<usize> = (0..clients).filter(|&c| next[c] < chunks).collect();
        if open.is_empty() {
            break;
        }
        // Long runs of one client, so that others fall far behind.
        let client = open[pick.index(open.len() * 7) % open.len()];
        arrivals.push((client, next[client]));
        next[client] += 1;
    }
    arrivals
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn the_mean_is_the_same_however_far_apart_the_clients_are(
        dtypes in prop::sample::select(vec![
            vec![Dtype::F32, Dtype::F32, Dtype::F32],
            vec![Dtype::F64, Dtype::F32],
            vec![Dtype::F64, Dtype::F64],
            vec![Dtype::F32, Dtype::BF16, Dtype::U8, Dtype::F32, Dtype::I64],
            vec![Dtype::F16, Dtype::BOOL],
        ]),
        examples in prop::collection::vec(prop::sample::select(vec![0.0, 1.0, 2.5, 1000.0]), 1..6),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        prop_assume!(examples.iter().sum::<f64>() > 0.0);
        let manifest = model(&dtypes);
        let clients: Vec<Generator> =
            (0..examples.len()).map(|seed| Generator::new(manifest.clone(), seed as u64)).collect();
        let weights = Weights::new(&examples).unwrap();
        let chunks = manifest.chunks(CHUNK_BYTES).unwrap();
        let arrivals = interleaved(clients.len(), chunks.len(), &picks);
        prop_assert_eq!(arrivals.len(), clients.len() * chunks.len());
        let (mean, sums) = averaged(&manifest, &clients, &weights, &arrivals);
        prop_assert!(mean == expected(&manifest, &clients, &weights, &arrivals));
        for (index, sum) in sums.iter().enumerate() {
            let bytes = chunks.get(index).bytes;
            prop_assert_eq!(*sum, chunk_sum(&mean[bytes.start as usize..bytes.end as usize]));
        }
    }
}

/// What stood in warm memory before would be taken for a part of the mean.
#[test]
fn a_mean_that_is_not_written_whole_is_an_error() {
    let manifest = model(&[Dtype::F32, Dtype::F32]);
    let chunks = manifest.chunks(CHUNK_BYTES).unwrap();
    let layout = AccumulatorLayout::of(&manifest).unwrap();
    let weights = Weights::new(&[1.0, 1.0]).unwrap();
    let (tiles, range) = (TileMemory::default(), 0..chunks.len());
    let mut accumulator = Region::new(layout.bytes()).unwrap();
    let mut sums = vec![0; chunks.len()];
    let slices = MeanSlices {
        accumulator: Some(accumulator.bytes_mut().0),
        model: None,
        sums: &mut sums,
        tiles: &tiles,
        wave: None,
    };
    let mut sink = MeanSink::new(&weights, &layout, &chunks, &range, slices).unwrap();
    for (client, index) in (0..2).flat_map(|client| range.clone().map(move |index| (client, index)))
    {
        if (client, index) != (1, 2) {
            let chunk = chunks.get(index);
            sink.add(client, &chunk, &vec![0; chunk.length()]).unwrap();
        }
    }
    let error = sink.end().unwrap_err().to_string();
    assert!(error.contains("the mean of chunk 2 is not written"), "{error}");
}
