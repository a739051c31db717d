//! Averages chunks as they come: into the accumulator, and with the last client's chunk, while
//! the sums are in the cache, into the model.

use std::ops::Range;

use super::Sink;
use crate::error::{ReducerError, SinkError};
use crate::manifest::{Chunk, ChunkTable};
use crate::reducer::{self, AccumulatorLayout, Weight, Weights};
use crate::wire::checksum::ChunkSum;

/// Bytes of payload that are completed at once: with their sums and their mean they stay in the L1
/// cache. A multiple of every element's size.
const BLOCK_BYTES: usize = 8 << 10;

/// The weighted mean of one lane.
pub struct MeanSink<'a> {
    weights: &'a Weights,
    layout: &'a AccumulatorLayout,
    /// The lane's slice of the accumulator, and the accumulator byte at which it starts.
    accumulator: &'a mut [u8],
    accumulator_start: u64,
    /// The lane's slice of the new model, and the model byte at which it starts. Without one the
    /// mean takes the place of the sums.
    model: Option<&'a mut [u8]>,
    model_start: u64,
    /// Checksums of the new model's chunks in this lane.
    sums: &'a mut [u64],
    first_chunk: usize,
    /// For each chunk: from how many clients it came.
    arrived: Vec<usize>,
}

/// Slices of one lane, cut from the accumulator, the model and its checksums.
pub struct MeanSlices<'a> {
    /// Bytes of the accumulator.
    pub accumulator: &'a mut [u8],
    /// Bytes of the model, unless it takes the accumulator's place.
    pub model: Option<&'a mut [u8]>,
    /// One for each chunk.
    pub sums: &'a mut [u64],
}

impl<'a> MeanSink<'a> {
    /// The sink of the lane that owns the chunks `range`.
    pub fn new(
        weights: &'a Weights,
        layout: &'a AccumulatorLayout,
        chunks: &ChunkTable,
        range: &Range<usize>,
        slices: MeanSlices<'a>,
    ) -> Result<MeanSink<'a>, SinkError> {
        let bytes = chunks.bytes_of(range);
        let span = layout.span(bytes.clone())?;
        Ok(MeanSink {
            weights,
            layout,
            accumulator: slices.accumulator,
            accumulator_start: span.start,
            model: slices.model,
            model_start: bytes.start,
            sums: slices.sums,
            first_chunk: range.start,
            arrived: vec![0; range.len()],
        })
    }

    /// Folds in the last client's chunk and writes the mean, block by block, so that the checksum
    /// and a mean that takes the place of the sums find it in the innermost cache.
    fn complete(
        &mut self,
        chunk: &Chunk,
        first: bool,
        weight: Weight,
        payload: &[u8],
        sums: Range<usize>,
    ) -> Result<(), SinkError> {
        let accumulator = &mut self.accumulator[sums];
        // Whole blocks of the payload have whole blocks of sums.
        let sums_bytes = BLOCK_BYTES * accumulator.len() / payload.len().max(1);
        let start = (chunk.bytes.start - self.model_start) as usize;
        let mut model = self.model.as_mut().map(|model| &mut model[start..start + payload.len()]);
        let mut sum = ChunkSum::new();
        let mut scratch = [0; BLOCK_BYTES];
        let blocks = payload.chunks(BLOCK_BYTES).zip(accumulator.chunks_mut(sums_bytes.max(1)));
        for (number, (payload, sums)) in blocks.enumerate() {
            let (dtype, weights) = (chunk.dtype, self.weights);
            let in_place = model.is_none();
            let out = match &mut model {
                Some(model) => &mut model[number * BLOCK_BYTES..][..payload.len()],
                None => &mut scratch[..payload.len()],
            };
            reducer::complete(dtype, first, weight, weights, payload, sums, out)?;
            sum.update(out);
            if in_place {
                sums.copy_from_slice(out);
            }
        }
        self.sums[chunk.index - self.first_chunk] = sum.finish();
        Ok(())
    }
}

impl Sink for MeanSink<'_> {
    fn accept(&mut self, peer: usize, chunk: &Chunk, bytes: &[u8]) -> Result<(), SinkError> {
        let range = self.layout.range(chunk.bytes.clone(), chunk.dtype)?;
        let sums = (range.start - self.accumulator_start) as usize
            ..(range.end - self.accumulator_start) as usize;
        let weight = self.weights.get(peer).ok_or(ReducerError::NoWeight)?;
        let arrived = &mut self.arrived[chunk.index - self.first_chunk];
        let first = *arrived == 0;
        *arrived += 1;
        if *arrived == self.weights.clients() {
            return self.complete(chunk, first, weight, bytes, sums);
        }
        let accumulator = &mut self.accumulator[sums];
        reducer::accumulate(chunk.dtype, first, weight, bytes, accumulator)?;
        Ok(())
    }
}
