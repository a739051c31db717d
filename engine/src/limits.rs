//! Every bound and default, with its reason.

/// Bytes of parameters that are checked, averaged and acknowledged as one unit. 256 KiB payload
/// and its accumulator stay in a 1 MiB L2 cache; 64 KiB to 4 MiB measured alike.
pub const CHUNK_BYTES: u64 = 256 << 10;

/// Smallest chunk that may be asked for: below this, per-chunk costs outweigh the payload.
pub const MIN_CHUNK_BYTES: u64 = 4 << 10;

/// Largest chunk that may be asked for: a receiver buffers one chunk of each stream.
pub const MAX_CHUNK_BYTES: u64 = 16 << 20;

/// Longest safetensors header that is read. The official library refuses headers above 100 MB;
/// ours also travels as one control message.
pub const MAX_HEADER_BYTES: u64 = 32 << 20;

/// Most tensors in one model. The largest public checkpoints hold some tens of thousands.
pub const MAX_TENSORS: usize = 1 << 18;

/// Longest tensor name in bytes.
pub const MAX_TENSOR_NAME_BYTES: usize = 4096;

/// Most dimensions of one tensor. NumPy stops at 64.
pub const MAX_TENSOR_DIMS: usize = 64;

/// Most chunks of one model: a checksum of 8 bytes is kept for each, 32 MiB in all. At the
/// default chunk size this is a model of 1 TiB.
pub const MAX_CHUNKS: usize = 1 << 22;

/// Largest data section, 64 TiB: no more can be cut into [`MAX_CHUNKS`] of [`MAX_CHUNK_BYTES`].
/// It also keeps every file position far inside the signed 64 bits of the kernel.
pub const MAX_MODEL_BYTES: u64 = 1 << 46;

/// Largest power of two, up or down, by which a source scales. Demonstrations need a handful;
/// up to here the factor is a normal number in every dtype that is computed in f32.
pub const MAX_SCALE_EXPONENT: i32 = 64;
