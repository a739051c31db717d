//! Averages chunks as they come: into the accumulator, and with the last client's chunk, while
//! the sums are in the cache, into the model.

use std::ops::Range;

use super::Sink;
use crate::error::{ReducerError, SinkError};
use crate::manifest::{Chunk, ChunkTable};
use crate::reducer::{self, AccumulatorLayout, Weights};
use crate::wire::checksum::chunk_sum;

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
    /// Holds the mean of a chunk on its way to that place.
    scratch: Vec<u8>,
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
            scratch: Vec::new(),
            sums: slices.sums,
            first_chunk: range.start,
            arrived: vec![0; range.len()],
        })
    }

    fn finish(&mut self, chunk: &Chunk, sums: Range<usize>) -> Result<(), SinkError> {
        let accumulator = &mut self.accumulator[sums];
        let out = match &mut self.model {
            Some(model) => {
                let start = (chunk.bytes.start - self.model_start) as usize;
                &mut model[start..start + chunk.length()]
            }
            None => {
                self.scratch.resize(chunk.length(), 0);
                &mut self.scratch[..]
            }
        };
        reducer::finish(chunk.dtype, self.weights, accumulator, out)?;
        self.sums[chunk.index - self.first_chunk] = chunk_sum(out);
        if self.model.is_none() {
            accumulator.copy_from_slice(&self.scratch);
        }
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
        let complete = *arrived == self.weights.clients();
        reducer::accumulate(
            chunk.dtype,
            first,
            weight,
            bytes,
            &mut self.accumulator[sums.clone()],
        )?;
        if complete {
            self.finish(chunk, sums)?;
        }
        Ok(())
    }
}
