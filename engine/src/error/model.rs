//! What can be wrong with models, files, memory and numbers.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use safetensors::Dtype;

use crate::limits;
use crate::limits::{MIN_CLIP_FACTOR, MIN_WEIGHT_SHARE};

/// Why a description of a model was refused. Tensor names are quoted and escaped, because they
/// come from a peer or a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The header is longer than [`limits::MAX_HEADER_BYTES`].
    #[error("the header has {bytes} bytes, above the limit of {}", limits::MAX_HEADER_BYTES)]
    HeaderTooLong {
        /// Its length in bytes.
        bytes: u64,
    },
    /// The header is not text.
    #[error("the header is not UTF-8: {0}")]
    NotUtf8(std::str::Utf8Error),
    /// The header is not JSON, or not the JSON that safetensors describes.
    #[error("the header is not a safetensors header: {0}")]
    NotAHeader(String),
    /// More tensors than [`limits::MAX_TENSORS`].
    #[error("the model has more than {} tensors", limits::MAX_TENSORS)]
    TooManyTensors,
    /// A tensor has more dimensions than [`limits::MAX_TENSOR_DIMS`].
    #[error("tensor {tensor:?} has more than {} dimensions", limits::MAX_TENSOR_DIMS)]
    TooManyDims {
        /// The tensor.
        tensor: String,
    },
    /// A name is longer than [`limits::MAX_TENSOR_NAME_BYTES`].
    #[error(
        "the name of a tensor has {bytes} bytes, above the limit of {}; it starts {start:?}",
        limits::MAX_TENSOR_NAME_BYTES
    )]
    NameTooLong {
        /// Its first characters.
        start: String,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A tensor has the name that safetensors keeps for metadata.
    #[error("no tensor can be named \"__metadata__\"; safetensors reserves that name")]
    ReservedName,
    /// One name stands for two tensors.
    #[error("tensor {tensor:?} is described twice")]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// A dtype that the safetensors format does not have.
    #[error("tensor {tensor:?} has the unknown dtype {dtype:?}")]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// What stands in the place of its dtype.
        dtype: String,
    },
    /// A byte range ends before it begins.
    #[error("tensor {tensor:?} ends at byte {end}, before it begins at byte {begin}")]
    Backwards {
        /// The tensor.
        tensor: String,
        /// Begin of its range.
        begin: u64,
        /// End of its range.
        end: u64,
    },
    /// A shape whose size does not fit in 64 bits.
    #[error("tensor {tensor:?} has a shape {shape:?} whose size overflows 64 bits")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// Its shape in elements.
        shape: Vec<u64>,
    },
    /// A tensor of a packed dtype that fills no whole number of bytes.
    #[error("tensor {tensor:?} has {bits} bits, which is no whole number of bytes")]
    PartOfAByte {
        /// The tensor.
        tensor: String,
        /// Its size in bits.
        bits: u64,
    },
    /// The byte range and the shape contradict each other.
    #[error(
        "tensor {tensor:?} has a range of {range} bytes, but its shape and dtype need {needed}"
    )]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Length of its range in bytes.
        range: u64,
        /// Size from shape and dtype in bytes.
        needed: u64,
    },
    /// Two tensors share bytes.
    #[error("tensor {tensor:?} overlaps tensor {other:?} at byte {at}")]
    Overlap {
        /// The tensor that begins too early.
        tensor: String,
        /// The tensor before it.
        other: String,
        /// First shared byte.
        at: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("bytes {begin} to {end}, before tensor {tensor:?}, belong to no tensor")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// First byte of the hole.
        begin: u64,
        /// First byte after the hole.
        end: u64,
    },
    /// The model is larger than [`limits::MAX_MODEL_BYTES`].
    #[error("the model has {bytes} bytes, above the limit of {}", limits::MAX_MODEL_BYTES)]
    TooLarge {
        /// Its size in bytes.
        bytes: u64,
    },
    /// A size that is no whole number of elements.
    #[error(
        "{bytes} bytes are no whole number of {dtype} elements; use a multiple of {unit} bytes"
    )]
    NotWholeElements {
        /// The size in bytes.
        bytes: u64,
        /// The dtype.
        dtype: safetensors::Dtype,
        /// Bytes of the smallest whole group of elements.
        unit: u64,
    },
    /// Chunks smaller than one element.
    #[error("chunks of {chunk_bytes} bytes cannot hold one {dtype} element; use larger chunks")]
    ChunkTooSmall {
        /// The size asked for.
        chunk_bytes: u64,
        /// A dtype of the model.
        dtype: safetensors::Dtype,
    },
    /// More chunks than [`limits::MAX_CHUNKS`].
    #[error(
        "chunks of {chunk_bytes} bytes would cut the model into {chunks} pieces, above the limit \
         of {}; use larger chunks",
        limits::MAX_CHUNKS
    )]
    TooManyChunks {
        /// The size asked for.
        chunk_bytes: u64,
        /// How many chunks that would make.
        chunks: u64,
    },
}

/// Why parameters could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The operating system refused.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A directory, FIFO, socket or device.
    #[error("{} is {kind}, not a model; name a .safetensors file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What stands there, with its article.
        kind: &'static str,
    },
    /// The file has no room for its header.
    #[error(
        "{} is not a safetensors file or was cut short: it has {file_bytes} bytes, too few for a \
         header", path.display()
    )]
    NoHeader {
        /// The file.
        path: PathBuf,
        /// Its length.
        file_bytes: u64,
    },
    /// The header runs past the end of the file or is beyond the limit.
    #[error(
        "{} is not a safetensors file or was cut short: it claims a header of {header_bytes} \
         bytes, the file has {file_bytes} bytes and headers may have {}",
        path.display(), limits::MAX_HEADER_BYTES
    )]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// Length of the header that the first eight bytes tell.
        header_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The header says something impossible.
    #[error("{} cannot be used: {cause}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: ManifestError,
    },
    /// The file ends before its tensors do.
    #[error(
        "{} was cut short: tensor {tensor:?} ends at byte {expected_bytes} of the file, which has \
         {file_bytes}; copy it again", path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The first tensor that is not all there.
        tensor: String,
        /// Where in the file that tensor ends.
        expected_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The file goes on after its last tensor.
    #[error(
        "{} has {file_bytes} bytes, but its tensors end at byte {expected_bytes}; it is damaged, \
         copy it again", path.display()
    )]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Where the last tensor ends.
        expected_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The file was truncated after it had been opened.
    #[error("{} became shorter while it was read; do not change a model in use", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
    },
    /// A read outside the data section.
    #[error("bytes {offset} to {offset}+{bytes} were asked of a model of {data_bytes} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Size of the data section.
        data_bytes: u64,
    },
    /// A scale beyond [`limits::MAX_SCALE_EXPONENT`].
    #[error(
        "parameters can be scaled by 2^-{0} to 2^{0}, not by 2^{exponent}",
        limits::MAX_SCALE_EXPONENT
    )]
    Exponent {
        /// The exponent asked for.
        exponent: i32,
    },
}

/// Why a model could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SinkError {
    /// The reducer refused a chunk.
    #[error(transparent)]
    Reducer(#[from] ReducerError),
    /// Memory for chunks cannot be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A path put bytes where the sink has no place for them.
    #[error("the receive path put bytes where this sink has no place; use another receive path")]
    NoLanding,
    /// A fault of this program.
    #[error("sums of a chunk have no place; please report this")]
    NoSums,
    /// A fault of this program.
    #[error("the mean of chunk {chunk} is not written; please report this")]
    NotWhole {
        /// The chunk.
        chunk: usize,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// No file can stand at that path.
    #[error("a model cannot be written to {}: {why}; name a file in a directory that exists",
        path.display())]
    BadTarget {
        /// The path.
        path: PathBuf,
        /// What stands in the way.
        why: &'static str,
    },
    /// The disk is too small.
    #[error(
        "no room for {}: the model needs {needed_bytes} bytes; free some space or choose another \
         disk", path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Size of the whole file.
        needed_bytes: u64,
    },
    /// A write outside the data section.
    #[error(
        "{bytes} bytes at {offset} do not fit in the {data_bytes} bytes of the model {}",
        path.display()
    )]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// How many.
        bytes: u64,
        /// Size of the data section.
        data_bytes: u64,
    },
}

/// Why parameters could not be averaged.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReducerError {
    /// The dtype has no mean that would make sense.
    #[error(
        "tensor {tensor:?}: {dtype:?} is not averaged; send it without averaging or leave it out"
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
    /// The sums of a model cannot be described as a model.
    #[error("the sums of this model cannot be sent: {why}")]
    Sums {
        /// What is wrong with its manifest.
        why: String,
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
    /// A chunk and the model's chunk it is compared with differ in length.
    #[error("a chunk of {bytes} bytes cannot be compared with {model_bytes} bytes of the model")]
    OtherModel {
        /// The chunk's length in bytes.
        bytes: usize,
        /// The length in bytes of the model's chunk.
        model_bytes: usize,
    },
    /// A client's clip factor is no part of its update, or too small.
    #[error(
        "client {client}: clip factor {factor:e} must be from {MIN_CLIP_FACTOR:e} to 1; leave the \
         update out"
    )]
    ClipFactor {
        /// Index of the client.
        client: usize,
        /// The factor it was given.
        factor: f64,
    },
    /// There are not as many clip factors as weights.
    #[error("there are {weights} weights, but {factors} clip factors")]
    ClipFactors {
        /// Number of weights.
        weights: usize,
        /// Number of factors.
        factors: usize,
    },
    /// A chunk was not inspected. A fault of this program.
    #[error("chunk {chunk} of an update was not inspected; please report this")]
    NotInspected {
        /// Its number in the model.
        chunk: usize,
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

/// Why memory for a model cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Host or cgroup lack the memory.
    #[error("a region of {} cannot be made: {bound} leaves {}; use a smaller model, or free or allow more memory", mib(*wanted), mib(*available))]
    NoMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that may still be allocated.
        available: u64,
        /// What sets that bound.
        bound: String,
    },
    /// The kernel refused.
    #[error("a region of {} cannot be mapped: {source}; see `ulimit -v` and the memory of the host", mib(*bytes))]
    Map {
        /// Bytes asked for.
        bytes: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file that should hold it cannot be made.
    #[error("a region of {} cannot be kept in {}: {source}; free some space or choose another directory", mib(*bytes), path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Bytes asked for.
        bytes: u64,
        /// The kernel's answer.
        source: io::Error,
    },
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}
