//! Drops chunks: after checking them, where only the check is wanted, or unseen, in benchmarks.

use super::Sink;
use crate::error::SinkError;
use crate::manifest::Chunk;
use crate::region::Region;

/// Keeps nothing.
pub struct DiscardSink {
    /// Whether each chunk must pass its checksum before it is dropped.
    pub checks: bool,
}

impl Sink for DiscardSink {
    fn accept(
        &mut self,
        _peer: usize,
        _chunk: &Chunk,
        _buffer: &mut Region,
    ) -> Result<(), SinkError> {
        Ok(())
    }

    fn checks(&self) -> bool {
        self.checks
    }
}
