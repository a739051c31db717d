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
