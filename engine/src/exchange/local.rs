//! Work on bytes that are on this host already: the mean of updates, and of sums.

use std::ops::Range;
use std::sync::Arc;

use super::Parcel;
use crate::aggregator::default_streams;
use crate::error::{ExchangeError, LaneError, ReducerError, SinkError};
use crate::lane::start_lane;
use crate::limits;
use crate::manifest::{ChunkTable, Dtype, Manifest};
use crate::pool::RegionPool;
use crate::reducer::{self, AccumulatorLayout, Weights};
use crate::region::Region;
use crate::sink::Sink;
use crate::sink::mean::{MeanSink, MeanSlices, TileMemory};
use crate::wire::checksum::chunk_sum;

/// The weighted mean of updates, in the order given; the same bits as of updates that are sent.
/// The result stands in memory of `pool`.
///
/// # Errors
/// No updates, updates of different layouts, weights or dtypes that cannot be averaged, no memory.
pub fn average(
    updates: &[(Arc<Parcel>, f64)],
    pool: &Arc<RegionPool>,
) -> Result<Parcel, ExchangeError> {
    let manifest = common_manifest(updates)?;
    let weights: Vec<f64> = updates.iter().map(|(_, weight)| *weight).collect();
    let weights = Weights::new(&weights)?;
    let layout = AccumulatorLayout::of(&manifest)?;
    let chunks = manifest.chunks(limits::CHUNK_BYTES)?;
    let mut region = pool.take(manifest.data_bytes())?;
    let mut sums = vec![0; chunks.len()];
    run_lanes(&chunks, region.bytes_mut().0, &mut sums, |range, model, sums| {
        let tiles = TileMemory::default();
        let (accumulator, model) = (None, Some(model));
        let slices = MeanSlices { accumulator, model, sums, tiles: &tiles, wave: None };
        let mut sink = MeanSink::new(&weights, &layout, &chunks, &range, slices)
            .map_err(|error| LaneError::peer(0, error))?;
        add_all(&mut sink, updates, &chunks, range)
    })?;
    Ok(Parcel::sealed(manifest, Arc::new(region), sums, pool))
}

/// The mean of sums, in their own place or in memory of `pool`.
pub(super) fn finish(
    manifest: Manifest,
    mut sums: Region,
    weights: &Weights,
    pool: &Arc<RegionPool>,
) -> Result<Parcel, ExchangeError> {
    let layout = AccumulatorLayout::of(&manifest)?;
    let chunks = manifest.chunks(limits::CHUNK_BYTES)?;
    let mut checks = vec![0; chunks.len()];
    if layout.is_in_place() {
        run_lanes(&chunks, sums.bytes_mut().0, &mut checks, |range, model, checks| {
            let start = chunks.bytes_of(&range).start;
            let mut mean = vec![0; chunks.chunk_bytes() as usize];
            for (chunk, check) in range.map(|index| chunks.get(index)).zip(checks) {
                let first = (chunk.bytes.start - start) as usize;
                let place = &mut model[first..first + chunk.length()];
                let mean = &mut mean[..chunk.length()];
                finish_chunk(chunk.dtype, weights, place, mean, check)?;
                place.copy_from_slice(mean);
            }
            Ok(())
        })?;
        return Ok(Parcel::sealed(manifest, Arc::new(sums), checks, pool));
    }
    let mut region = pool.take(manifest.data_bytes())?;
    run_lanes(&chunks, region.bytes_mut().0, &mut checks, |range, model, checks| {
        let start = chunks.bytes_of(&range).start;
        for (chunk, check) in range.map(|index| chunks.get(index)).zip(checks) {
            let place = layout.range(chunk.bytes.clone(), chunk.dtype);
            let place = place.map_err(|error| LaneError::peer(0, SinkError::from(error)))?;
            let acc = &sums.bytes()[place.start as usize..place.end as usize];
            let first = (chunk.bytes.start - start) as usize;
            let mean = &mut model[first..first + chunk.length()];
            finish_chunk(chunk.dtype, weights, acc, mean, check)?;
        }
        Ok(())
    })?;
    pool.give_back(sums);
    Ok(Parcel::sealed(manifest, Arc::new(region), checks, pool))
}

fn finish_chunk(
    dtype: Dtype,
    weights: &Weights,
    sums: &[u8],
    mean: &mut [u8],
    check: &mut u64,
) -> Result<(), LaneError> {
    let finished = reducer::finish(dtype, weights, sums, mean);
    finished.map_err(|error| LaneError::peer(0, SinkError::from(error)))?;
    *check = chunk_sum(mean);
    Ok(())
}

/// Cuts a model and the checksums of its chunks into lanes, and works on each on its own thread.
fn run_lanes(
    chunks: &ChunkTable,
    model: &mut [u8],
    checks: &mut [u64],
    work: impl Fn(Range<usize>, &mut [u8], &mut [u64]) -> Result<(), LaneError> + Sync,
) -> Result<(), LaneError> {
    let work = &work;
    let results: Vec<Result<(), LaneError>> = std::thread::scope(|scope| {
        let (sender, results) = std::sync::mpsc::channel();
        let (mut model, mut checks) = (model, checks);
        for range in chunks.lanes(default_streams()) {
            let bytes = chunks.bytes_of(&range);
            let (lane_model, rest) = model.split_at_mut((bytes.end - bytes.start) as usize);
            model = rest;
            let (lane_checks, rest) = checks.split_at_mut(range.len());
            checks = rest;
            let sender = sender.clone();
            start_lane(
                scope,
                move || work(range, lane_model, lane_checks),
                move |result| {
                    // The other end is read below.
                    let _ = sender.send(result);
                },
            );
        }
        drop(sender);
        results.iter().collect()
    });
    results.into_iter().collect()
}

fn add_all(
    sink: &mut MeanSink<'_>,
    updates: &[(Arc<Parcel>, f64)],
    chunks: &ChunkTable,
    range: Range<usize>,
) -> Result<(), LaneError> {
    for chunk in range.map(|index| chunks.get(index)) {
        for (peer, (update, _)) in updates.iter().enumerate() {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            let added: Result<(), SinkError> =
                sink.add(peer, &chunk, &update.region().bytes()[place]);
            added.map_err(|error| LaneError::peer(peer, error))?;
        }
    }
    sink.end().map_err(|error| LaneError::peer(0, error))
}

fn common_manifest(updates: &[(Arc<Parcel>, f64)]) -> Result<Manifest, ExchangeError> {
    let (first, _) = updates.first().ok_or(ExchangeError::Nobody)?;
    for (update, _) in updates {
        if let Some(difference) = first.manifest().first_difference(update.manifest()) {
            return Err(ExchangeError::Differs { difference });
        }
    }
    Ok(first.manifest().clone())
}

impl From<ReducerError> for ExchangeError {
    fn from(error: ReducerError) -> ExchangeError {
        crate::error::AggregatorError::from(error).into()
    }
}

impl From<LaneError> for ExchangeError {
    fn from(error: LaneError) -> ExchangeError {
        crate::error::AggregatorError::from(error).into()
    }
}
