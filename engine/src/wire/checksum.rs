//! Checksums of chunks, and the digest of a whole model that is made of them.

use crc_fast::{CrcAlgorithm, Digest, checksum};

/// CRC-64/NVME of one chunk.
pub fn chunk_sum(chunk: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, chunk)
}

/// The same, of a chunk that comes in pieces.
pub struct ChunkSum(Digest);

impl ChunkSum {
    /// The checksum of nothing yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> ChunkSum {
        ChunkSum(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The checksum of all pieces.
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
}

/// Names the content of a model: BLAKE3 over its layout digest, the chunk size, and the checksum
/// of every chunk in order. Costs nothing beyond the checksums that are made anyway.
pub fn model_digest(layout: &[u8; 32], chunk_bytes: u64, sums: &[u64]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("fedlane 2026 model digest");
    hasher.update(layout);
    hasher.update(&chunk_bytes.to_le_bytes());
    for sum in sums {
        hasher.update(&sum.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}
