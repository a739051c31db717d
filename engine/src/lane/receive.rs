//! Receives the chunks of one lane from every peer, checks each while it is hot in the cache,
//! and hands it to the sink.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::{Poller, Progress, TICK};
use crate::channel::DataChannel;
use crate::error::{LaneError, TransferError};
use crate::limits;
use crate::manifest::{Chunk, ChunkTable};
use crate::paths::ReceiveKind;
use crate::receiver::{Landing, Lands, ReceivePath};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::Sink;
use crate::sums::StreamSums;
use crate::wire::checksum::chunk_sum;

/// In which order the peers' chunks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they come. Fastest; the last bits of a mean depend on who came first.
    Arrival,
    /// For every chunk, peer after peer: the same bits whatever came first.
    Client,
}

/// What the other threads know of a peer's transfer.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// Checksums, as the peer announces them.
    pub sums: &'a StreamSums,
    /// Whether the peer has begun to send: its deadline runs from then on.
    pub began: &'a AtomicBool,
    /// Bytes that came, for progress displays.
    pub moved: &'a AtomicU64,
}

/// One peer's stream of this lane.
pub struct Incoming<'a> {
    peer: usize,
    channel: &'a DataChannel,
    path: Box<dyn ReceivePath>,
    lands: Lands,
    shared: Shared<'a>,
    next: usize,
    filled: usize,
    low_water: usize,
    scratch: Option<Region>,
    progress: Progress,
}

impl<'a> Incoming<'a> {
    /// Prepares to receive from `peer` on `channel`.
    pub fn new(
        peer: usize,
        channel: &'a DataChannel,
        kind: ReceiveKind,
        shared: Shared<'a>,
        deadline: Option<Duration>,
    ) -> Result<Incoming<'a>, LaneError> {
        let path = channel.receive_path(kind).map_err(|error| LaneError::peer(peer, error))?;
        Ok(Incoming {
            peer,
            channel,
            path,
            lands: channel.lands(kind),
            shared,
            next: 0,
            filled: 0,
            low_water: 0,
            scratch: None,
            progress: Progress::new(deadline),
        })
    }

    fn set_low_water(&mut self, bytes: usize) -> io::Result<()> {
        if bytes != self.low_water {
            self.channel.set_receive_low_water(bytes)?;
            self.low_water = bytes;
        }
        Ok(())
    }

    /// Ends the lane when the peer should be sending and is not.
    fn check_progress(&mut self, needs_sum: bool) -> Result<(), LaneError> {
        // The time before a peer begins is its own: it trains.
        if !self.shared.began.load(Ordering::Acquire) {
            self.progress.made();
        }
        if self.progress.is_overdue() {
            let error = match needs_sum {
                true => TransferError::NoChecksum,
                false => self.progress.stalled(),
            };
            return Err(LaneError::peer(self.peer, error));
        }
        // On a slow link every byte counts as progress, so wake for every byte.
        if self.progress.last.elapsed() > TICK {
            self.set_low_water(1).map_err(|error| LaneError::peer(self.peer, error))?;
        }
        Ok(())
    }
}

/// What one attempt to move a stream on came to.
#[derive(PartialEq, Eq)]
enum Step {
    /// A whole chunk went to the sink.
    Chunk,
    /// The socket has nothing more.
    Empty,
    /// The chunk is whole; its checksum has not been announced yet.
    NeedsSum,
}

/// Warm memory for chunks that are being received, kept for the next round.
#[derive(Default)]
pub struct ChunkBuffers(Vec<Region>);

/// Receives the chunks numbered `range` from every stream into `sink`.
pub fn receive(
    mut streams: Vec<Incoming<'_>>,
    chunks: &ChunkTable,
    range: Range<usize>,
    order: Order,
    sink: &mut dyn Sink,
    buffers: &mut ChunkBuffers,
    signal: &Signal,
) -> Result<(), LaneError> {
    for stream in &mut streams {
        stream.next = range.start;
    }
    if range.is_empty() {
        return Ok(());
    }
    let end_byte = chunks.get(range.end - 1).bytes.end;
    let low_water_bytes = match streams.len() {
        1 => limits::RECEIVE_LOW_WATER_BYTES,
        _ => limits::SHARED_LOW_WATER_BYTES,
    };
    let mut lane = Lane { chunks, range, end_byte, sink, buffers, low_water_bytes };
    // With one stream there is nothing to choose between.
    match order {
        Order::Arrival if streams.len() > 1 => lane.by_arrival(&mut streams, signal),
        _ => lane.in_turn(&mut streams, signal),
    }
}

struct Lane<'a> {
    chunks: &'a ChunkTable,
    range: Range<usize>,
    end_byte: u64,
    sink: &'a mut dyn Sink,
    /// Those that no stream is filling; the one used last is still in the cache.
    buffers: &'a mut ChunkBuffers,
    /// How much should wait before a stream is looked at.
    low_water_bytes: u64,
}

impl Lane<'_> {
    fn in_turn(&mut self, streams: &mut [Incoming<'_>], signal: &Signal) -> Result<(), LaneError> {
        let mut poller = Poller::new(signal)?;
        for _ in self.range.clone() {
            for stream in streams.iter_mut() {
                stream.progress.made();
                self.finish_chunk(stream, &mut poller)?;
            }
            signal.check()?;
        }
        Ok(())
    }

    /// Waits until the next chunk of one stream has gone to the sink.
    fn finish_chunk(
        &mut self,
        stream: &mut Incoming<'_>,
        poller: &mut Poller<'_>,
    ) -> Result<(), LaneError> {
        loop {
            let step = self.step(stream)?;
            if step == Step::Chunk {
                return Ok(());
            }
            stream.check_progress(step == Step::NeedsSum)?;
            if step == Step::Empty {
                poller.add(stream.channel, 0, EventFlags::IN)?;
                poller.wait(&mut BTreeSet::new(), TICK)?;
                poller.remove(stream.channel)?;
            } else if !stream.shared.sums.park(stream.next - self.range.start) {
                poller.wait(&mut BTreeSet::new(), TICK)?;
            }
        }
    }

    /// Takes a chunk from whoever has one, those that are behind first: then all peers work on
    /// neighbouring chunks and the accumulator stays in the cache.
    fn by_arrival(
        &mut self,
        streams: &mut [Incoming<'_>],
        signal: &Signal,
    ) -> Result<(), LaneError> {
        let mut poller = Poller::new(signal)?;
        // Streams that may have something; the others are in the poller, or wait for a checksum.
        let mut hot: BTreeSet<usize> = (0..streams.len()).collect();
        let mut parked: BTreeSet<usize> = BTreeSet::new();
        let mut open = streams.len();
        let mut checked = Instant::now();
        while open > 0 {
            signal.check()?;
            if let Some(&index) = hot.iter().min_by_key(|&&index| streams[index].next) {
                let stream = &mut streams[index];
                match self.step(stream)? {
                    Step::Chunk if stream.next < self.range.end => {}
                    Step::Chunk => {
                        hot.remove(&index);
                        open -= 1;
                    }
                    Step::Empty => {
                        hot.remove(&index);
                        poller.add(stream.channel, index, EventFlags::IN)?;
                    }
                    Step::NeedsSum if stream.shared.sums.park(stream.next - self.range.start) => {}
                    Step::NeedsSum => {
                        hot.remove(&index);
                        parked.insert(index);
                    }
                }
            }
            if hot.len() == open {
                continue;
            }
            let mut ready = BTreeSet::new();
            let timeout = if hot.is_empty() { TICK } else { Duration::ZERO };
            if poller.wait(&mut ready, timeout)? {
                hot.append(&mut parked);
            }
            for &index in &ready {
                poller.remove(streams[index].channel)?;
            }
            hot.append(&mut ready);
            if checked.elapsed() >= TICK {
                checked = Instant::now();
                for (index, stream) in streams.iter_mut().enumerate() {
                    if stream.next < self.range.end && !hot.contains(&index) {
                        stream.check_progress(parked.contains(&index))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves one stream on by at most one chunk, without waiting.
    fn step(&mut self, stream: &mut Incoming<'_>) -> Result<Step, LaneError> {
        self.try_step(stream).map_err(|error| LaneError::peer(stream.peer, error))
    }

    fn try_step(&mut self, stream: &mut Incoming<'_>) -> Result<Step, TransferError> {
        let chunk = self.chunks.get(stream.next);
        let length = chunk.length();
        while stream.filled < length {
            // Fewer wake-ups while much is to come, and none missed at the end of the range.
            let left = self.end_byte - chunk.bytes.start - stream.filled as u64;
            let wanted = self.low_water_bytes.min((length - stream.filled) as u64);
            stream.set_low_water(left.min(wanted.max(limits::RECEIVE_LOW_WATER_BYTES)) as usize)?;
            match self.receive_into_place(stream, &chunk) {
                Ok(0) => return Err(TransferError::Closed),
                Ok(received) => {
                    stream.filled += received;
                    stream.shared.moved.fetch_add(received as u64, Ordering::Relaxed);
                    // A first byte says as much as the word that the upload begins.
                    stream.shared.began.store(true, Ordering::Release);
                    stream.progress.made();
                }
                Err(TransferError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Step::Empty);
                }
                Err(TransferError::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.deliver(stream, &chunk)
    }

    /// Into the sink where it offers a place, into a chunk buffer otherwise.
    fn receive_into_place(
        &mut self,
        stream: &mut Incoming<'_>,
        chunk: &Chunk,
    ) -> Result<usize, TransferError> {
        let (filled, length) = (stream.filled, chunk.length());
        let socket = stream.channel.as_fd();
        if stream.lands == Lands::Nowhere {
            let nowhere = Landing { length: length - filled, bytes: None, file: None };
            return Ok(stream.path.receive(socket, nowhere)?);
        }
        if let Some(landing) = self.sink.landing(stream.peer, chunk, filled, stream.lands) {
            return Ok(stream.path.receive(socket, landing)?);
        }
        let mut scratch = match stream.scratch.take().or_else(|| self.buffers.0.pop()) {
            Some(region) => region,
            None => Region::new(self.chunks.chunk_bytes())?,
        };
        let (bytes, file) = scratch.bytes_mut();
        let landing = Landing {
            length: length - filled,
            bytes: Some(&mut bytes[filled..length]),
            file: Some((file, filled as u64)),
        };
        let received = stream.path.receive(socket, landing);
        stream.scratch = Some(scratch);
        Ok(received?)
    }

    fn deliver(&mut self, stream: &mut Incoming<'_>, chunk: &Chunk) -> Result<Step, TransferError> {
        let length = chunk.length();
        if stream.lands != Lands::Nowhere {
            // Also a sink that does not check waits, so that no checksum is left for the next round.
            let Some(announced) = stream.shared.sums.get(stream.next - self.range.start) else {
                return Ok(Step::NeedsSum);
            };
            if self.sink.checks() {
                let bytes = match &stream.scratch {
                    Some(scratch) => &scratch.bytes()[..length],
                    None => self.sink.landed(stream.peer, chunk)?,
                };
                if chunk_sum(bytes) != announced {
                    return Err(TransferError::Checksum { bytes: chunk.bytes.clone() });
                }
            }
        }
        if let Some(mut scratch) = stream.scratch.take() {
            self.sink.accept(stream.peer, chunk, &mut scratch)?;
            self.buffers.0.push(scratch);
        }
        stream.next += 1;
        stream.filled = 0;
        Ok(Step::Chunk)
    }
}
