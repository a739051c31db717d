//! Keeps chunks where they belong in a region: paths can put them there without a detour.

use std::os::fd::BorrowedFd;

use super::Sink;
use crate::error::SinkError;
use crate::ledger::{Kind, LaneLedger};
use crate::manifest::Chunk;
use crate::receiver::{Landing, Lands};
use crate::region::Region;
use crate::wire::checksum::chunk_sum;

/// One lane's part of a region for each peer.
pub struct RegionSink<'a> {
    parts: Vec<Part<'a>>,
    /// Where the regions outlive the process: what is in them.
    ledger: Option<LaneLedger<'a>>,
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
        RegionSink { parts, ledger: None }
    }

    /// Notes what has come.
    pub fn noting(mut self, ledger: Option<LaneLedger<'a>>) -> RegionSink<'a> {
        self.ledger = ledger;
        self
    }
}

impl Part<'_> {
    fn chunk(&self, chunk: &Chunk) -> &[u8] {
        let start = (chunk.bytes.start - self.start) as usize;
        &self.bytes[start..start + chunk.length()]
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
        Ok(self.parts[peer].chunk(chunk))
    }

    fn restore(&mut self) -> Result<Vec<Vec<bool>>, SinkError> {
        let Some(ledger) = &mut self.ledger else { return Ok(Vec::new()) };
        let lane: Vec<Chunk> = ledger.lane().collect();
        let mut here = vec![vec![false; lane.len()]; self.parts.len()];
        for (place, chunk) in lane.iter().enumerate() {
            let entry = ledger.entry(chunk.index).filter(|entry| entry.kind == Kind::Updates);
            let Some(mut entry) = entry else {
                ledger.clear(chunk.index);
                continue;
            };
            let matches = |peer: usize, sum| chunk_sum(self.parts[peer].chunk(chunk)) == sum;
            entry.came.retain(|&(peer, sum)| matches(peer, sum));
            ledger.recall(chunk.index, &entry);
            for (peer, _) in entry.came {
                here[peer][place] = true;
            }
        }
        Ok(here)
    }

    fn note(&mut self, peer: usize, chunk: &Chunk) -> Result<(), SinkError> {
        if let Some(ledger) = &mut self.ledger {
            ledger.add(chunk.index, peer);
            ledger.seal(chunk.index, Kind::Updates, 0, 0);
        }
        Ok(())
    }

    fn accept(&mut self, peer: usize, chunk: &Chunk, buffer: &mut Region) -> Result<(), SinkError> {
        let bytes = &buffer.bytes()[..chunk.length()];
        let part = &mut self.parts[peer];
        let start = (chunk.bytes.start - part.start) as usize;
        part.bytes[start..start + chunk.length()].copy_from_slice(bytes);
        Ok(())
    }
}
