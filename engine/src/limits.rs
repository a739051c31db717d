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

/// Smallest part of the sum of weights that a positive weight may be: 2^-64. Weights count
/// examples, and one example is more than this part of any 64-bit count. From here up, a scaled
/// weight is a normal f32, so it keeps all its bits.
pub const MIN_WEIGHT_SHARE: f64 = 1.0 / (1u128 << 64) as f64;

/// Alignment in bytes of each run's start in the accumulator: one cache line, one AVX-512 register.
pub const ACCUMULATOR_ALIGN_BYTES: u64 = 64;

/// Elements the reference average works on at once: its three f64 numbers for each of them, 384
/// KiB, stay in L2.
pub const REFERENCE_BLOCK_ELEMENTS: usize = 16 << 10;
