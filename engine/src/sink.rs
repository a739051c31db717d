//! Stage 6: where checked chunks go.

pub mod discard;
pub mod file;
pub mod mean;
pub mod region;

use crate::error::SinkError;
use crate::manifest::Chunk;
use crate::receiver::{Landing, Lands};
use crate::region::Region;

/// Takes the chunks of one lane. `peer` counts the streams of the lane.
pub trait Sink: Send {
    /// Where the bytes of `chunk` from `filled` on may land, for a path that needs `lands`.
    /// Without a place they land in a buffer and come through [`Sink::accept`].
    fn landing(
        &mut self,
        _peer: usize,
        _chunk: &Chunk,
        _filled: usize,
        _lands: Lands,
    ) -> Option<Landing<'_>> {
        None
    }

    /// The bytes of a chunk that landed in the sink.
    fn landed(&mut self, _peer: usize, _chunk: &Chunk) -> Result<&[u8], SinkError> {
        Err(SinkError::NoLanding)
    }

    /// Takes the bytes of a chunk, which are the first ones of `buffer`. It may keep the buffer and
    /// leave another one, at least as large.
    fn accept(&mut self, peer: usize, chunk: &Chunk, buffer: &mut Region) -> Result<(), SinkError>;

    /// Before the first chunk: takes over what came in an earlier life of this process. Gives for each
    /// peer and each chunk of the lane whether it is here; nothing at all where nothing is kept.
    fn restore(&mut self) -> Result<Vec<Vec<bool>>, SinkError> {
        Ok(Vec::new())
    }

    /// A chunk of a peer is in its place, and counts: a sink that keeps account of that notes it now.
    fn note(&mut self, _peer: usize, _chunk: &Chunk) -> Result<(), SinkError> {
        Ok(())
    }

    /// Whether the peers' chunks are mixed: none can then be taken out again.
    fn mixes(&self) -> bool {
        false
    }

    /// A peer is lost: from now on a chunk is complete without it. True if what has come of the
    /// others has to come again, all of it.
    fn lose(&mut self, _peer: usize) -> Result<bool, SinkError> {
        Ok(false)
    }

    /// Drops what has come of a chunk: it will come again, from every peer.
    fn forget(&mut self, _chunk: &Chunk) {}

    /// Completes a chunk if it has come from every peer that is not lost.
    fn complete(&mut self, _chunk: &Chunk) -> Result<(), SinkError> {
        Ok(())
    }

    /// All chunks of the lane have come.
    fn end(&mut self) -> Result<(), SinkError> {
        Ok(())
    }

    /// Whether chunks must pass their checksum first. Only a sink that drops them says no.
    fn checks(&self) -> bool {
        true
    }
}
