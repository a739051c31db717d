//! One error enum for each stage of the flow. Every text says what happened, to which file,
//! tensor or peer, and what to do.

use std::ops::Range;

use safetensors::Dtype;

use crate::limits::MIN_WEIGHT_SHARE;

/// Why parameters could not be averaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerError {
    /// The dtype has no mean that would make sense.
    #[error(
        "tensor {tensor}: {dtype:?} is not averaged; send it without averaging or leave it out"
    )]
    NotAveraged {
        /// Name of the tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A weight is negative, NaN or infinite.
    #[error("client {client}: weight {weight} must be finite and not negative")]
    Weight {
        /// Index of the client.
        client: usize,
        /// The weight it was given.
        weight: f64,
    },
    /// A positive weight would be lost beside the others.
    #[error(
        "client {client}: weight {weight} is below {MIN_WEIGHT_SHARE:e} of all weights; set it to zero"
    )]
    WeightTooSmall {
        /// Index of the client.
        client: usize,
        /// The weight it was given.
        weight: f64,
    },
    /// No weight is positive.
    #[error("the weights sum to zero; at least one client needs a positive weight")]
    NoWeight,
    /// The sum of the weights is not finite any more.
    #[error(
        "client {client}: its weight makes the sum of weights overflow; scale the weights down"
    )]
    WeightSum {
        /// Index of the client at which the sum overflowed.
        client: usize,
    },
    /// A chunk does not hold whole elements.
    #[error("{bytes} bytes are not whole elements of {dtype:?}")]
    PartialElement {
        /// The chunk's dtype.
        dtype: Dtype,
        /// The chunk's length in bytes.
        bytes: usize,
    },
    /// Chunk and accumulator hold different numbers of elements.
    #[error(
        "{elements} elements of {dtype:?} do not fit an accumulator of {accumulator_bytes} bytes"
    )]
    Length {
        /// The chunk's dtype.
        dtype: Dtype,
        /// Elements in the chunk.
        elements: usize,
        /// Length of the accumulator slice in bytes.
        accumulator_bytes: usize,
    },
    /// The accumulator slice does not start on a multiple of its element's size.
    #[error("the accumulator of a {dtype:?} chunk is not aligned to its elements")]
    Misaligned {
        /// The chunk's dtype.
        dtype: Dtype,
    },
    /// The runs do not follow each other without gap, or one holds no whole elements.
    #[error(
        "the {dtype:?} run at bytes {range:?} does not continue the run before it in whole elements"
    )]
    Run {
        /// The run's dtype.
        dtype: Dtype,
        /// The run's bytes in the data section.
        range: Range<u64>,
    },
    /// The accumulator's size does not fit in 64 bits.
    #[error("the accumulator would be larger than 2^64 bytes")]
    TooLarge,
    /// Bytes that are not whole elements of the model's runs.
    #[error("bytes {range:?} of the data section are not whole elements of its runs")]
    Chunk {
        /// The bytes in the data section.
        range: Range<u64>,
    },
}

/// Why a result could not be confirmed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// An element is not the weighted mean.
    #[error("byte {offset}: {dtype:?} should be {expected:e} within {tolerance:e}, but is {got:e}")]
    Differs {
        /// The element's first byte in the data section.
        offset: u64,
        /// Its dtype.
        dtype: Dtype,
        /// The weighted mean, in f64.
        expected: f64,
        /// The result's element.
        got: f64,
        /// The largest distance that rounding explains.
        tolerance: f64,
    },
    /// Bytes to compare could not be read.
    #[error("byte {offset}: cannot read {}: {source}", reader(.client))]
    Read {
        /// First byte of the block that was asked for.
        offset: u64,
        /// Index of the client, or none if it was the result.
        client: Option<usize>,
        /// Why.
        source: std::io::Error,
    },
    /// The weights have no positive finite sum, or one is negative or NaN.
    #[error("the weights need to be zero or more, with a positive finite sum")]
    Weights,
    /// The dtype has no mean to compare with.
    #[error("byte {offset}: {dtype:?} is not averaged, so there is no mean to compare with")]
    Dtype {
        /// First byte of the run.
        offset: u64,
        /// Its dtype.
        dtype: Dtype,
    },
    /// A run is not whole elements.
    #[error("bytes {range:?} are not whole elements of {dtype:?}")]
    Run {
        /// The run's dtype.
        dtype: Dtype,
        /// The run's bytes in the data section.
        range: Range<u64>,
    },
}

impl ReferenceError {
    /// The byte of the data section the error is about; 0 if it is about all of it.
    pub fn offset(&self) -> u64 {
        match self {
            ReferenceError::Differs { offset, .. }
            | ReferenceError::Read { offset, .. }
            | ReferenceError::Dtype { offset, .. } => *offset,
            ReferenceError::Run { range, .. } => range.start,
            ReferenceError::Weights => 0,
        }
    }
}

fn reader(client: &Option<usize>) -> String {
    client.map_or("the result".to_owned(), |client| format!("the contribution of client {client}"))
}
