//! Sends the chunks of one lane that peers ask for.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use super::{ConnectionId, Inbox, Poller, Progress, TICK};
use crate::channel::DataChannel;
use crate::error::{LaneError, TransferError};
use crate::limits;
use crate::manifest::ChunkTable;
use crate::paths::SendKind;
use crate::sender::{Needs, Piece, SendPath};
use crate::source::Source;
use crate::wire::checksum::chunk_sum;

/// What a sending lane is told.
pub enum SendOrder {
    /// A peer's data channel of this lane is connected, for the first time or again.
    Attach {
        /// The peer, counted among the lane's streams.
        peer: usize,
        /// Its connection.
        connection: ConnectionId,
        /// The channel.
        channel: Arc<DataChannel>,
    },
    /// A peer's connection is broken.
    Detach {
        /// The peer.
        peer: usize,
    },
    /// A peer wants chunks, behind those that it wanted before.
    Send {
        /// The peer.
        peer: usize,
        /// The chunks, in this order.
        chunks: Vec<Range<usize>>,
        /// Whether it wants their checksums only.
        sums_only: bool,
    },
    /// Nothing more is wanted.
    Finish,
}

/// A peer's stream is broken. It waits for the next connection.
pub struct SendBroken {
    /// The peer.
    pub peer: usize,
    /// The connection that broke.
    pub connection: ConnectionId,
    /// Why.
    pub error: TransferError,
}

/// One peer's stream of this lane.
pub struct Outgoing<'a> {
    kind: SendKind,
    moved: &'a AtomicU64,
    /// How long it may stand still.
    stall: Option<Duration>,
    line: Option<Line>,
    /// What is still to be sent on this line.
    queue: VecDeque<Run>,
    /// What is being sent: chunks that have been prepared.
    left: Range<u64>,
    /// The prepared chunks, where the source could not lend them.
    scratch: Vec<u8>,
    scratch_bytes: Range<u64>,
}

/// Chunks that are wanted.
struct Run {
    chunks: Range<usize>,
    sums_only: bool,
}

/// A connected stream.
struct Line {
    connection: ConnectionId,
    channel: Arc<DataChannel>,
    path: Box<dyn SendPath>,
    needs: Needs,
    progress: Progress,
    /// Bytes in the socket's buffer when its progress was last asked for.
    unacknowledged: u64,
    /// Whether it waits for its socket.
    full: bool,
}

impl<'a> Outgoing<'a> {
    /// A stream that has no connection yet. Without `stall` it may stand still for ever.
    pub fn new(kind: SendKind, moved: &'a AtomicU64, stall: Option<Duration>) -> Outgoing<'a> {
        Outgoing {
            kind,
            moved,
            stall,
            line: None,
            queue: VecDeque::new(),
            left: 0..0,
            scratch: Vec::new(),
            scratch_bytes: 0..0,
        }
    }

    fn is_ready(&self) -> bool {
        let ready = self.line.as_ref().is_some_and(|line| !line.full);
        ready && !(self.queue.is_empty() && self.left.is_empty())
    }
}

impl Line {
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

/// Where the checksums of freshly read chunks go, from the first chunk on, before their bytes do.
pub type Announce<'a> = &'a (dyn Fn(usize, Vec<u64>) -> io::Result<()> + Sync);

/// What a lane sends, and how.
pub struct Sending<'a> {
    /// Where the bytes are.
    pub source: &'a dyn Source,
    /// All chunks of the model.
    pub chunks: &'a ChunkTable,
    /// For a source that does not know its checksums: each chunk is then read, summed and announced
    /// just before it is sent.
    pub announce: Option<Announce<'a>>,
    /// Orders to the lane.
    pub inbox: &'a Inbox<SendOrder>,
    /// What the lane says.
    pub report: &'a (dyn Fn(SendBroken) + Sync),
}

/// Sends chunks to every stream, as they are ordered, until it is told to finish.
///
/// # Errors
/// What is no peer's fault: the source, polling; and the end of the lane by its signal.
pub fn send(streams: Vec<Outgoing<'_>>, sending: Sending<'_>) -> Result<(), LaneError> {
    let poller = Poller::new(&sending.inbox.signal)?;
    Lane { sending, streams, poller }.run()
}

enum Step {
    /// Some bytes went out, or some chunks were prepared.
    Moved,
    /// The socket takes no more for now.
    Full,
}

struct Lane<'a, 'b> {
    sending: Sending<'a>,
    streams: Vec<Outgoing<'b>>,
    poller: Poller<'a>,
}

impl Lane<'_, '_> {
    fn run(&mut self) -> Result<(), LaneError> {
        loop {
            while let Some(order) = self.sending.inbox.take() {
                if self.obey(order)? {
                    return Ok(());
                }
            }
            self.sending.inbox.signal.check()?;
            let mut idle = true;
            for index in 0..self.streams.len() {
                if self.streams[index].is_ready() {
                    idle = false;
                    self.advance(index)?;
                }
            }
            let waits = self.streams.iter().any(|s| s.line.as_ref().is_some_and(|line| line.full));
            if idle || waits {
                self.poll(if idle { TICK } else { Duration::ZERO })?;
            }
        }
    }

    fn poll(&mut self, timeout: Duration) -> Result<(), LaneError> {
        let mut ready = BTreeSet::new();
        self.poller.wait(&mut ready, timeout)?;
        for index in 0..self.streams.len() {
            let Some(line) = self.streams[index].line.as_mut().filter(|line| line.full) else {
                continue;
            };
            if ready.contains(&index) {
                self.poller.remove(&*line.channel)?;
                line.full = false;
            } else if line.progress.is_overdue() && !line.drains() {
                let error = line.progress.stalled();
                self.break_off(index, error);
            }
        }
        Ok(())
    }

    /// Does what it is told; true at the end.
    fn obey(&mut self, order: SendOrder) -> Result<bool, LaneError> {
        match order {
            SendOrder::Finish => return Ok(true),
            SendOrder::Detach { peer } => self.detach(peer)?,
            SendOrder::Attach { peer, connection, channel } => {
                self.detach(peer)?;
                let stream = &mut self.streams[peer];
                let opened = channel.send_path(stream.kind);
                stream.line = Some(Line {
                    connection,
                    path: opened.map_err(|error| LaneError::peer(peer, error))?,
                    needs: channel.needs(stream.kind),
                    channel,
                    progress: Progress::new(stream.stall),
                    unacknowledged: 0,
                    full: false,
                });
            }
            SendOrder::Send { peer, chunks, sums_only } => {
                let stream = &mut self.streams[peer];
                stream.queue.extend(chunks.into_iter().map(|chunks| Run { chunks, sums_only }));
                stream.line.iter_mut().for_each(|line| line.progress.made());
            }
        }
        Ok(false)
    }

    fn detach(&mut self, peer: usize) -> Result<(), LaneError> {
        let stream = &mut self.streams[peer];
        if let Some(line) = stream.line.take()
            && line.full
        {
            self.poller.remove(&*line.channel)?;
        }
        stream.queue.clear();
        stream.left = 0..0;
        Ok(())
    }

    fn break_off(&mut self, peer: usize, error: TransferError) {
        let Some(connection) = self.streams[peer].line.as_ref().map(|line| line.connection) else {
            return;
        };
        // A socket that epoll does not know (any more) is no reason to end the others.
        let _ = self.detach(peer);
        (self.sending.report)(SendBroken { peer, connection, error });
    }

    fn advance(&mut self, index: usize) -> Result<(), LaneError> {
        match self.sending.step(&mut self.streams[index]) {
            Ok(Step::Moved) => {}
            Ok(Step::Full) => {
                if let Some(line) = &mut self.streams[index].line {
                    line.unacknowledged = line.channel.unacknowledged_bytes();
                    line.full = true;
                    self.poller.add(&*line.channel, index, EventFlags::OUT)?;
                }
            }
            Err(error) if is_our_fault(&error) => return Err(LaneError::peer(index, error)),
            Err(error) => self.break_off(index, error),
        }
        Ok(())
    }
}

/// Whether another connection would not help.
fn is_our_fault(error: &TransferError) -> bool {
    use io::ErrorKind::{InvalidInput, UnexpectedEof, Unsupported};
    match error {
        TransferError::Source(_) => true,
        TransferError::Io(error) => {
            matches!(error.kind(), InvalidInput | UnexpectedEof | Unsupported)
        }
        _ => false,
    }
}

impl Sending<'_> {
    fn step(&self, stream: &mut Outgoing<'_>) -> Result<Step, TransferError> {
        if stream.left.is_empty() {
            self.prepare(stream)?;
            if stream.left.is_empty() {
                return Ok(Step::Moved);
            }
        }
        let left = &stream.left;
        let bytes = match &stream.scratch_bytes {
            scratch if scratch.is_empty() => self.source.lend(left.clone()),
            scratch => Some(&stream.scratch[(left.start - scratch.start) as usize..]),
        };
        let file = self.source.file().map(|(file, start)| (file, start + left.start));
        let piece = Piece { length: (left.end - left.start) as usize, bytes, file };
        let line = stream.line.as_mut().ok_or(TransferError::Closed)?;
        match line.path.send(line.channel.as_fd(), piece) {
            Ok(sent) => {
                stream.left.start += sent as u64;
                stream.moved.fetch_add(sent as u64, Ordering::Relaxed);
                line.progress.made();
                Ok(Step::Moved)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Full),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Moved),
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
        let Some(run) = stream.queue.front_mut() else { return Ok(()) };
        let sums_only = run.sums_only;
        let begin = run.chunks.start;
        let first = self.chunks.get(begin).bytes;
        let mut end = first.end;
        let mut next = begin + 1;
        while next < run.chunks.end {
            let chunk_end = self.chunks.get(next).bytes.end;
            if chunk_end - first.start > limits::SEND_STEP_BYTES {
                break;
            }
            end = chunk_end;
            next += 1;
        }
        run.chunks.start = next;
        if run.chunks.is_empty() {
            stream.queue.pop_front();
        }
        let bytes = first.start..end;
        let lent = self.source.lend(bytes.clone());
        let needs = stream.line.as_ref().map_or(Needs::Bytes, |line| line.needs);
        if lent.is_none() && needs == Needs::StableBytes {
            // Bytes read into a buffer would be gone before the peer has them.
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let must_read = lent.is_none() && (needs != Needs::File || self.announce.is_some());
        stream.scratch_bytes = 0..0;
        if must_read {
            stream.scratch.resize((bytes.end - bytes.start) as usize, 0);
            self.source.read(bytes.start, &mut stream.scratch)?;
            stream.scratch_bytes = bytes.clone();
        }
        if let Some(announce) = self.announce {
            let content = lent.unwrap_or(&stream.scratch);
            let sums = (begin..next).map(|index| {
                let chunk = self.chunks.get(index).bytes;
                let start = (chunk.start - bytes.start) as usize;
                chunk_sum(&content[start..start + (chunk.end - chunk.start) as usize])
            });
            announce(begin, sums.collect())?;
        }
        if !sums_only {
            stream.left = bytes;
        }
        Ok(())
    }
}
