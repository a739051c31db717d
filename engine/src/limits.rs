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
