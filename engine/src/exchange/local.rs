//! The mean of updates that are on this host already.

use std::sync::Arc;

use super::Parcel;
use crate::aggregator::default_streams;
use crate::error::{ExchangeError, LaneError, ReducerError, SinkError};
use crate::lane::start_lane;
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::reducer::{self, AccumulatorLayout, Weights};
use crate::region::RegionPool;
use crate::sink::mean::{MeanSink, MeanSlices, TileMemory};

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
    for tensor in manifest.tensors() {
        reducer::accumulator(&tensor.name, tensor.dtype)?;
    }
    let runs = manifest.runs().iter().map(|run| (run.dtype, run.range.clone()));
    let layout = AccumulatorLayout::new(runs)?;
    let chunks = manifest.chunks(limits::CHUNK_BYTES)?;
    let mut region = pool.take(manifest.data_bytes())?;
    let mut sums = vec![0; chunks.len()];
    let tiles: Vec<TileMemory> = (0..default_streams()).map(|_| TileMemory::default()).collect();
    let (mut model, mut checks) = (region.bytes_mut().0, sums.as_mut_slice());
    let results: Vec<Result<(), LaneError>> = std::thread::scope(|scope| {
        let (sender, results) = std::sync::mpsc::channel();
        for (range, tiles) in chunks.lanes(tiles.len()).into_iter().zip(&tiles) {
            let bytes = chunks.bytes_of(&range);
            let (lane_model, rest) = model.split_at_mut((bytes.end - bytes.start) as usize);
            model = rest;
            let (lane_sums, rest) = checks.split_at_mut(range.len());
            checks = rest;
            let (sender, weights, layout, chunks) = (sender.clone(), &weights, &layout, &chunks);
            let slices =
                MeanSlices { accumulator: None, model: Some(lane_model), sums: lane_sums, tiles };
            let lane = move || {
                let mut sink = MeanSink::new(weights, layout, chunks, &range, slices)
                    .map_err(|error| LaneError::peer(0, error))?;
                add_all(&mut sink, updates, chunks, range)
            };
            start_lane(scope, lane, move |result| {
                // The other end is read below.
                let _ = sender.send(result);
            });
        }
        drop(sender);
        results.iter().collect()
    });
    results.into_iter().collect::<Result<(), LaneError>>()?;
    Ok(Parcel::sealed(manifest, Arc::new(region), sums, pool))
}

fn add_all(
    sink: &mut MeanSink<'_>,
    updates: &[(Arc<Parcel>, f64)],
    chunks: &ChunkTable,
    range: std::ops::Range<usize>,
) -> Result<(), LaneError> {
    for chunk in range.map(|index| chunks.get(index)) {
        for (peer, (update, _)) in updates.iter().enumerate() {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            let added: Result<(), SinkError> =
                sink.add(peer, &chunk, &update.region().bytes()[place]);
            added.map_err(|error| LaneError::peer(peer, error))?;
        }
    }
    Ok(())
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
