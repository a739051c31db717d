//! Keeps chunks where they belong in a region: paths can put them there without a detour.

use std::os::fd::BorrowedFd;

use super::Sink;
use crate::error::SinkError;
use crate::manifest::Chunk;
use crate::receiver::{Landing, Lands};
use crate::region::Region;

/// One lane's part of a region for each peer.
pub struct RegionSink<'a> {
    parts: Vec<Part<'a>>,
}

/// One lane's part of a region.
pub struct Part<'a> {
    /// The bytes.
    pub bytes: &'a mut [u8],
    /// The file of the whole region.
    pub file: BorrowedFd<'a>,
    /// Where the model's byte 0 is in that file.
    pub position: u64,
    /// The model byte at which `bytes` starts.
    pub start: u64,
}

impl<'a> RegionSink<'a> {
    /// Takes one part for each peer.
    pub fn new(parts: Vec<Part<'a>>) -> RegionSink<'a> {
        RegionSink { parts }
    }
}

impl Sink for RegionSink<'_> {
    fn landing(
        &mut self,
        peer: usize,
        chunk: &Chunk,
        filled: usize,
        _lands: Lands,
    ) -> Option<Landing<'_>> {
        let part = &mut self.parts[peer];
        let start = (chunk.bytes.start - part.start) as usize;
        Some(Landing {
            length: chunk.length() - filled,
            bytes: Some(&mut part.bytes[start + filled..start + chunk.length()]),
            file: Some((part.file, part.position + chunk.bytes.start + filled as u64)),
        })
    }

    fn landed(&mut self, peer: usize, chunk: &Chunk) -> Result<&[u8], SinkError> {
        let part = &self.parts[peer];
        let start = (chunk.bytes.start - part.start) as usize;
        Ok(&part.bytes[start..start + chunk.length()])
    }

    fn accept(&mut self, peer: usize, chunk: &Chunk, buffer: &mut Region) -> Result<(), SinkError> {
        let bytes = &buffer.bytes()[..chunk.length()];
        let part = &mut self.parts[peer];
        let start = (chunk.bytes.start - part.start) as usize;
        part.bytes[start..start + chunk.length()].copy_from_slice(bytes);
        Ok(())
    }
}
