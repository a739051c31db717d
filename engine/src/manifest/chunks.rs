//! The cut of a model into chunks, by arithmetic over its runs.

use std::ops::Range;
use std::sync::Arc;

use super::{Dtype, Run, unit_bytes};
use crate::error::ManifestError;
use crate::limits;

/// One piece of a model: bytes of one dtype, in whole elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its number in the model, from 0.
    pub index: usize,
    /// Its bytes, counted from the begin of the data section.
    pub bytes: Range<u64>,
    /// The dtype of its elements.
    pub dtype: Dtype,
}

impl Chunk {
    /// How many bytes it has.
    pub fn length(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }
}

/// All chunks of a model. They are computed when asked for; the table grows with the number of
/// runs, not of chunks. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct ChunkTable {
    runs: Arc<[Run]>,
    /// Number of the first chunk of each run.
    first_chunks: Arc<[usize]>,
    chunk_bytes: u64,
    len: usize,
}

impl ChunkTable {
    pub(super) fn new(runs: Arc<[Run]>, chunk_bytes: u64) -> Result<Self, ManifestError> {
        let mut first_chunks = Vec::with_capacity(runs.len());
        let mut chunks = 0_u64;
        for Run { dtype, range } in runs.iter() {
            // Within the limit, as this was checked for the run before.
            first_chunks.push(chunks as usize);
            let step = step_bytes(*dtype, chunk_bytes);
            if step == 0 {
                return Err(ManifestError::ChunkTooSmall { chunk_bytes, dtype: *dtype });
            }
            chunks += (range.end - range.start).div_ceil(step);
            if chunks > limits::MAX_CHUNKS as u64 {
                return Err(ManifestError::TooManyChunks { chunk_bytes, chunks });
            }
        }
        Ok(Self { runs, first_chunks: first_chunks.into(), chunk_bytes, len: chunks as usize })
    }

    /// The largest size of a chunk that was asked for.
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The number of chunks.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the model has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The chunk of that number.
    ///
    /// # Panics
    /// If `index` is not below [`ChunkTable::len`]; check numbers that come from a peer.
    pub fn get(&self, index: usize) -> Chunk {
        assert!(index < self.len, "chunk {index} of {}", self.len);
        let run_index = self.first_chunks.partition_point(|first| *first <= index) - 1;
        let Run { dtype, range } = &self.runs[run_index];
        let step = step_bytes(*dtype, self.chunk_bytes);
        let start = range.start + (index - self.first_chunks[run_index]) as u64 * step;
        Chunk { index, bytes: start..(start + step).min(range.end), dtype: *dtype }
    }

    /// The bytes of a contiguous range of chunks.
    pub fn bytes_of(&self, range: &Range<usize>) -> Range<u64> {
        match range.is_empty() {
            // Where the next chunk starts, so that empty ranges meet their neighbours.
            true if range.start < self.len() => {
                let start = self.get(range.start).bytes.start;
                start..start
            }
            true => {
                let end = self.len().checked_sub(1).map_or(0, |last| self.get(last).bytes.end);
                end..end
            }
            false => self.get(range.start).bytes.start..self.get(range.end - 1).bytes.end,
        }
    }

    /// Cuts the chunks into `lanes` contiguous ranges of about the same number of bytes. They
    /// cover all chunks in order; a small model leaves some of them empty. 0 counts as 1.
    pub fn lanes(&self, lanes: usize) -> Vec<Range<usize>> {
        let lanes = lanes.max(1);
        let bytes = self.runs.last().map_or(0, |run| run.range.end);
        let cut = |lane: usize| {
            // Below `bytes`, though the product needs more than 64 bits.
            let target = u128::from(bytes) * lane as u128 / lanes as u128;
            self.nearest_cut(target as u64)
        };
        (0..lanes).map(|lane| cut(lane)..cut(lane + 1)).collect()
    }

    /// The number of the chunk that begins nearest to `offset`.
    fn nearest_cut(&self, offset: u64) -> usize {
        let run_index = self.runs.partition_point(|run| run.range.end <= offset);
        let Some(Run { dtype, range }) = self.runs.get(run_index) else {
            return self.len;
        };
        let step = step_bytes(*dtype, self.chunk_bytes);
        let before = self.first_chunks[run_index] + ((offset - range.start) / step) as usize;
        let bytes = self.get(before).bytes;
        before + usize::from(offset - bytes.start > bytes.end - offset)
    }
}

/// `chunk_bytes` rounded down to whole elements.
fn step_bytes(dtype: Dtype, chunk_bytes: u64) -> u64 {
    // No model is larger, and the bound keeps sums of offset and step inside 64 bits.
    let chunk_bytes = chunk_bytes.min(limits::MAX_MODEL_BYTES);
    chunk_bytes - chunk_bytes % unit_bytes(dtype)
}
