//! Sends the range of one lane to every peer.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use super::{Poller, Progress, TICK};
use crate::channel::DataChannel;
use crate::error::{LaneError, TransferError};
use crate::limits;
use crate::manifest::ChunkTable;
use crate::paths::SendKind;
use crate::sender::{Needs, Piece, SendPath};
use crate::signal::Signal;
use crate::source::Source;
use crate::wire::checksum::chunk_sum;

/// One peer's stream of this lane.
pub struct Outgoing<'a> {
    peer: usize,
    channel: &'a DataChannel,
    path: Box<dyn SendPath>,
    needs: Needs,
    moved: &'a AtomicU64,
    /// Chunks that have been prepared, and the bytes of them still to send.
    prepared: usize,
    left: Range<u64>,
    /// The prepared chunks, where the source could not lend them.
    scratch: Vec<u8>,
    scratch_bytes: Range<u64>,
    progress: Progress,
    /// Bytes in the socket's buffer when its progress was last asked for.
    unacknowledged: u64,
}

impl<'a> Outgoing<'a> {
    /// Prepares to send to `peer` on `channel`.
    pub fn new(
        peer: usize,
        channel: &'a DataChannel,
        kind: SendKind,
        moved: &'a AtomicU64,
        deadline: Option<Duration>,
    ) -> Result<Outgoing<'a>, LaneError> {
        let path = channel.send_path(kind).map_err(|error| LaneError::peer(peer, error))?;
        Ok(Outgoing {
            peer,
            channel,
            path,
            needs: channel.needs(kind),
            moved,
            prepared: 0,
            left: 0..0,
            scratch: Vec::new(),
            scratch_bytes: 0..0,
            progress: Progress::new(deadline),
            unacknowledged: 0,
        })
    }
}

impl Outgoing<'_> {
    /// Whether the peer has taken bytes since this was last asked: a socket becomes writable only
    /// when much of its buffer is free, which takes long on a slow link.
    fn drains(&mut self) -> bool {
        let unacknowledged = self.channel.unacknowledged_bytes();
        let drains = unacknowledged < self.unacknowledged;
        self.unacknowledged = unacknowledged;
        if drains {
            self.progress.made();
        }
        drains
    }
}

/// Where the checksums of freshly read chunks go, before their bytes do.
pub type Announce<'a> = dyn Fn(Vec<u64>) -> io::Result<()> + Sync + 'a;

/// Sends the chunks numbered `range` of `source` to every stream.
///
/// `announce` is for a source that does not know its checksums: each chunk is then read, summed
/// and announced just before it is sent.
pub fn send(
    mut streams: Vec<Outgoing<'_>>,
    source: &dyn Source,
    chunks: &ChunkTable,
    range: Range<usize>,
    announce: Option<&Announce<'_>>,
    signal: &Signal,
) -> Result<(), LaneError> {
    for stream in &mut streams {
        stream.prepared = range.start;
    }
    let mut lane = Lane { source, chunks, range, announce };
    let mut poller = Poller::new(signal)?;
    let mut running: BTreeSet<usize> = (0..streams.len()).collect();
    let mut waiting: BTreeSet<usize> = BTreeSet::new();
    while running.len() + waiting.len() > 0 {
        signal.check()?;
        for index in running.clone() {
            let stream = &mut streams[index];
            match lane.step(stream).map_err(|error| LaneError::peer(stream.peer, error))? {
                Step::Sent => {}
                Step::Finished => {
                    running.remove(&index);
                }
                Step::Full => {
                    stream.unacknowledged = stream.channel.unacknowledged_bytes();
                    running.remove(&index);
                    waiting.insert(index);
                    poller.add(stream.channel, index, EventFlags::OUT)?;
                }
            }
        }
        if waiting.is_empty() {
            continue;
        }
        let mut ready = BTreeSet::new();
        let timeout = if running.is_empty() { TICK } else { Duration::ZERO };
        poller.wait(&mut ready, timeout)?;
        for &index in &ready {
            poller.remove(streams[index].channel)?;
            waiting.remove(&index);
            running.insert(index);
        }
        for &index in &waiting {
            let stream = &mut streams[index];
            if stream.progress.is_overdue() && !stream.drains() {
                return Err(LaneError::peer(stream.peer, stream.progress.stalled()));
            }
        }
    }
    Ok(())
}

enum Step {
    /// Some bytes went out.
    Sent,
    /// The socket takes no more for now.
    Full,
    /// The whole range is out.
    Finished,
}

struct Lane<'a> {
    source: &'a dyn Source,
    chunks: &'a ChunkTable,
    range: Range<usize>,
    announce: Option<&'a Announce<'a>>,
}

impl Lane<'_> {
    fn step(&mut self, stream: &mut Outgoing<'_>) -> Result<Step, TransferError> {
        if stream.left.is_empty() {
            if stream.prepared == self.range.end {
                return Ok(Step::Finished);
            }
            self.prepare(stream)?;
        }
        let left = &stream.left;
        let bytes = match &stream.scratch_bytes {
            scratch if scratch.is_empty() => self.source.lend(left.clone()),
            scratch => Some(&stream.scratch[(left.start - scratch.start) as usize..]),
        };
        let file = self.source.file().map(|(file, start)| (file, start + left.start));
        let piece = Piece { length: (left.end - left.start) as usize, bytes, file };
        match stream.path.send(stream.channel.as_fd(), piece) {
            Ok(sent) => {
                stream.left.start += sent as u64;
                stream.moved.fetch_add(sent as u64, Ordering::Relaxed);
                stream.progress.made();
                Ok(Step::Sent)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Full),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Sent),
            // The source knows the name of the file that ended.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.source.read(stream.left.start, &mut [0])?;
                Err(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Chooses the next chunks to send, and reads and sums them if nobody has.
    fn prepare(&self, stream: &mut Outgoing<'_>) -> Result<(), TransferError> {
        let first = self.chunks.get(stream.prepared).bytes;
        let mut end = first.end;
        let mut next = stream.prepared + 1;
        while next < self.range.end {
            let chunk_end = self.chunks.get(next).bytes.end;
            if chunk_end - first.start > limits::SEND_STEP_BYTES {
                break;
            }
            end = chunk_end;
            next += 1;
        }
        let bytes = first.start..end;
        let lent = self.source.lend(bytes.clone());
        if lent.is_none() && stream.needs == Needs::StableBytes {
            // Bytes read into a buffer would be gone before the peer has them.
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let must_read = lent.is_none() && (stream.needs != Needs::File || self.announce.is_some());
        stream.scratch_bytes = 0..0;
        if must_read {
            stream.scratch.resize((bytes.end - bytes.start) as usize, 0);
            self.source.read(bytes.start, &mut stream.scratch)?;
            stream.scratch_bytes = bytes.clone();
        }
        if let Some(announce) = self.announce {
            let content = lent.unwrap_or(&stream.scratch);
            let sums = (stream.prepared..next).map(|index| {
                let chunk = self.chunks.get(index).bytes;
                let start = (chunk.start - bytes.start) as usize;
                chunk_sum(&content[start..start + (chunk.end - chunk.start) as usize])
            });
            announce(sums.collect())?;
        }
        stream.prepared = next;
        stream.left = bytes;
        Ok(())
    }
}
