//! Receives the chunks of one lane from every peer, checks each while it is hot in the cache,
//! and hands it to the sink.
//!
//! A stream keeps account of which chunks have come. When its connection breaks, the next one
//! brings what is missing; when a peer is lost, the others send again what had been mixed with
//! that peer's chunks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;

use super::{ConnectionId, Inbox, Poller, Progress, TICK, ranges};
use crate::channel::DataChannel;
use crate::error::{LaneError, SinkError, TransferError};
use crate::limits;
use crate::manifest::{Chunk, ChunkTable};
use crate::named::Named;
use crate::paths::ReceiveKind;
use crate::receiver::{Landing, Lands, ReceivePath};
use crate::reducer::{Norm, clean, inspect};
use crate::region::Region;
use crate::sink::Sink;
use crate::sums::LaneSums;
use crate::verdict::{Findings, OnNonfinite};
use crate::wire::checksum::chunk_sum;

/// In which order the peers' chunks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they come. Fastest; the last bits of a mean depend on who came first.
    Arrival,
    /// For every chunk, peer after peer: the same bits whatever came first.
    Client,
}

impl Named for Order {
    const VALUES: &'static [(Order, &'static str, &'static str)] = &[
        (
            Order::Arrival,
            "arrival",
            "As updates arrive: fastest; the last bits may depend on who came first",
        ),
        (Order::Client, "client", "By client name: the same bits whoever came first"),
    ];
}

/// What a receiving lane is told.
pub enum ReceiveOrder {
    /// A peer's data channel of this lane is connected, for the first time or again. What still comes
    /// on the last one is taken first.
    Attach {
        /// The peer, counted among the lane's streams.
        peer: usize,
        /// Its connection.
        connection: ConnectionId,
        /// The channel.
        channel: Arc<DataChannel>,
        /// Whether it may bring another update than the one that it has sent part of: it then has
        /// to say the checksums of that part again.
        doubted: bool,
    },
    /// A peer does not come back: nothing of what it sent may count.
    Lose {
        /// The peer.
        peer: usize,
    },
    /// As [`ReceiveOrder::Lose`], of a peer that stays: what it was asked for comes still, and is dropped.
    Reject {
        /// The peer.
        peer: usize,
    },
    /// Everything has come.
    Finish,
}

/// What a receiving lane says.
pub enum ReceiveReport {
    /// A peer shall send these chunks, behind those that were wanted before.
    Want {
        /// The peer.
        peer: usize,
        /// The connection that they are wanted on.
        connection: ConnectionId,
        /// The chunks, in this order.
        chunks: Vec<Range<usize>>,
    },
    /// A peer shall announce the checksums of these chunks (again).
    Prove {
        /// The peer.
        peer: usize,
        /// The connection that is doubted.
        connection: ConnectionId,
        /// The chunks.
        chunks: Vec<Range<usize>>,
    },
    /// A peer's stream is broken. It waits for the next connection.
    Broken {
        /// The peer.
        peer: usize,
        /// The connection that broke.
        connection: ConnectionId,
        /// Why.
        error: TransferError,
    },
    /// A peer's update has an element that it may not have. What comes of it from now on is dropped.
    Nonfinite {
        /// The peer.
        peer: usize,
        /// Number of the chunk.
        chunk: usize,
        /// The element's number in the chunk.
        index: u64,
    },
    /// All chunks of a peer have come; of one that is rejected, nothing more comes.
    Whole {
        /// The peer.
        peer: usize,
        /// How many peers the lane knows to be lost.
        lost: usize,
    },
}

/// Where a lane's reports go.
pub type Report<'a> = &'a (dyn Fn(ReceiveReport) + Sync);

/// What the other threads know of a peer's transfer.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// Checksums, as the peer announces them.
    pub sums: LaneSums<'a>,
    /// Whether the peer has begun to send: its deadline runs from then on.
    pub began: &'a AtomicBool,
    /// Bytes that came, for progress displays.
    pub moved: &'a AtomicU64,
    /// What is looked for in the update.
    pub inspection: Option<Inspection<'a>>,
}

/// How chunks of an update are looked at, while they are hot in the cache.
#[derive(Clone, Copy)]
pub struct Inspection<'a> {
    /// What is done with elements that are not finite.
    pub on_nonfinite: OnNonfinite,
    /// Whether the norm is wanted.
    pub wants_norm: bool,
    /// The model that the update was trained from, if there is one.
    pub model: Option<&'a [u8]>,
    /// What was found.
    pub findings: &'a Findings,
}

impl Inspection<'_> {
    fn norm(&self, chunk: &Chunk) -> Norm<'_> {
        let bytes = chunk.bytes.start as usize..chunk.bytes.end as usize;
        match self.model {
            _ if !self.wants_norm => Norm::Skip,
            Some(model) => Norm::OfChange(&model[bytes]),
            None => Norm::OfUpdate,
        }
    }
}

/// One peer's stream of this lane.
pub struct Incoming<'a> {
    kind: ReceiveKind,
    shared: Shared<'a>,
    /// How long it may stand still.
    stall: Option<Duration>,
    line: Option<Line>,
    /// Takes the line's place when nothing more comes on that.
    successor: Option<Successor>,
    /// Chunks that are to come on this line, in this order.
    queue: VecDeque<Run>,
    filled: usize,
    scratch: Option<Region>,
    /// Of each chunk of the lane: whether it has come.
    done: Vec<bool>,
    missing: usize,
    lost: bool,
    /// Nothing that comes counts; it is received all the same, so that the connection can be used again.
    rejected: bool,
    reported_whole: bool,
    /// How often a chunk did not match.
    refuted: BTreeMap<usize, u32>,
}

/// Chunks that come after each other.
struct Run {
    chunks: Range<usize>,
    /// Their turn has passed: they are dropped, and have been wanted again.
    void: bool,
}

/// A connected stream.
struct Line {
    connection: ConnectionId,
    channel: Arc<DataChannel>,
    path: Box<dyn ReceivePath>,
    lands: Lands,
    low_water: usize,
    progress: Progress,
    state: State,
}

/// A connection that was made when another one had broken.
struct Successor {
    connection: ConnectionId,
    channel: Arc<DataChannel>,
    doubted: bool,
    since: Instant,
    /// Chunks before that one need not be asked for their checksums.
    asked: usize,
}

/// What a stream waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing: it may have bytes.
    Ready,
    /// Its socket.
    Socket,
    /// A checksum.
    Sum,
}

impl<'a> Incoming<'a> {
    /// A stream that has no connection yet. Without `stall` it may stand still for ever.
    pub fn new(
        kind: ReceiveKind,
        shared: Shared<'a>,
        stall: Option<Duration>,
        range: &Range<usize>,
    ) -> Incoming<'a> {
        Incoming {
            kind,
            shared,
            stall,
            line: None,
            successor: None,
            queue: VecDeque::new(),
            filled: 0,
            scratch: None,
            done: vec![false; range.len()],
            missing: range.len(),
            lost: false,
            rejected: false,
            reported_whole: false,
            refuted: BTreeMap::new(),
        }
    }

    /// A stream of which nothing is expected.
    pub fn lost(mut self) -> Incoming<'a> {
        self.lost = true;
        self
    }

    /// A stream some of whose chunks came earlier.
    pub fn having(mut self, done: Vec<bool>) -> Incoming<'a> {
        self.missing = done.iter().filter(|&&done| !done).count();
        self.done = done;
        self
    }

    fn is_ready(&self) -> bool {
        let ready = self.line.as_ref().is_some_and(|line| line.state == State::Ready);
        ready && !self.queue.is_empty()
    }

    fn state(&self) -> Option<State> {
        self.line.as_ref().map(|line| line.state)
    }

    fn front(&self) -> Option<usize> {
        self.queue.front().map(|run| run.chunks.start)
    }

    fn pop_front(&mut self) {
        if let Some(run) = self.queue.front_mut() {
            run.chunks.start += 1;
            if run.chunks.is_empty() {
                self.queue.pop_front();
            }
        }
        self.filled = 0;
    }

    fn push_back(&mut self, chunks: &[Range<usize>]) {
        let void = self.rejected;
        self.queue.extend(chunks.iter().map(|chunks| Run { chunks: chunks.clone(), void }));
    }

    /// From now on what comes is dropped.
    fn reject(&mut self) {
        self.rejected = true;
        self.queue.iter_mut().for_each(|run| run.void = true);
        if let Some(line) = self.line.as_mut().filter(|line| line.state == State::Sum) {
            line.state = State::Ready;
        }
    }

    /// Whether nothing more is to come.
    fn is_over(&self) -> bool {
        match self.lost {
            true => self.rejected && self.queue.is_empty(),
            false => self.missing == 0,
        }
    }

    /// Chunks that are on their way have lost their turn. Gives their numbers.
    fn void(&mut self, chunks: &BTreeSet<usize>) -> Vec<usize> {
        let mut passed = Vec::new();
        let mut queue = VecDeque::new();
        for Run { chunks: run, void } in self.queue.drain(..) {
            if void || !run.clone().any(|chunk| chunks.contains(&chunk)) {
                queue.push_back(Run { chunks: run, void });
                continue;
            }
            for chunk in run {
                let void = chunks.contains(&chunk);
                if void {
                    passed.push(chunk);
                }
                queue.push_back(Run { chunks: chunk..chunk + 1, void });
            }
        }
        self.queue = queue;
        passed
    }
}

/// What one attempt to move a stream on came to.
#[derive(PartialEq, Eq)]
enum Step {
    /// A whole chunk came.
    Chunk,
    /// The socket has nothing more.
    Empty,
    /// The chunk is whole; its checksum has not been announced yet.
    NeedsSum,
    /// The chunk has an element that it may not have.
    Nonfinite { chunk: usize, index: u64 },
}

/// Warm memory for chunks that are being received, kept for the next round.
#[derive(Default)]
pub struct ChunkBuffers(Vec<Region>);

/// What a lane receives, and how.
pub struct Receiving<'a> {
    /// All chunks of the model.
    pub chunks: &'a ChunkTable,
    /// Those of this lane.
    pub range: Range<usize>,
    /// In which order they are taken.
    pub order: Order,
    /// Orders to the lane.
    pub inbox: &'a Inbox<ReceiveOrder>,
    /// What the lane says.
    pub report: Report<'a>,
}

/// Receives chunks from every stream into `sink` until it is told to finish.
///
/// # Errors
/// What is no peer's fault: the sink, memory, polling; and the end of the lane by its signal.
pub fn receive(
    streams: Vec<Incoming<'_>>,
    receiving: Receiving<'_>,
    sink: &mut dyn Sink,
    buffers: &mut ChunkBuffers,
) -> Result<(), LaneError> {
    let Receiving { chunks, range, order, inbox, report } = receiving;
    // With one stream, or where updates do not mix, there is nothing to order.
    let in_turn = order == Order::Client && streams.len() > 1 && sink.mixes();
    let low_water_bytes = match streams.len() {
        1 => limits::RECEIVE_LOW_WATER_BYTES,
        _ => limits::SHARED_LOW_WATER_BYTES,
    };
    let turns = in_turn.then(|| VecDeque::from_iter((!range.is_empty()).then(|| range.clone())));
    let poller = Poller::new(&inbox.signal)?;
    let lost = streams.iter().filter(|stream| stream.lost).count();
    let mut lane = Lane {
        chunks,
        range,
        sink,
        buffers,
        low_water_bytes,
        streams,
        turns,
        inbox,
        report,
        poller,
        lost,
    };
    lane.run()
}

struct Lane<'a, 'b> {
    chunks: &'a ChunkTable,
    range: Range<usize>,
    sink: &'a mut dyn Sink,
    /// Those that no stream is filling; the one used last is still in the cache.
    buffers: &'a mut ChunkBuffers,
    /// How much should wait before a stream is looked at.
    low_water_bytes: u64,
    streams: Vec<Incoming<'b>>,
    /// The chunks whose turn is to come, where peers take turns.
    turns: Option<VecDeque<Range<usize>>>,
    inbox: &'a Inbox<ReceiveOrder>,
    report: Report<'a>,
    poller: Poller<'a>,
    /// Peers that are lost.
    lost: usize,
}

impl Lane<'_, '_> {
    fn run(&mut self) -> Result<(), LaneError> {
        let mut checked = Instant::now();
        // What came in an earlier life of this process may be all.
        for (index, stream) in self.streams.iter_mut().enumerate() {
            Self::report_if_whole(stream, index, self.lost, self.report);
        }
        loop {
            while let Some(order) = self.inbox.take() {
                if self.obey(order)? {
                    return Ok(());
                }
            }
            self.inbox.signal.check()?;
            let next = self.next_stream();
            if let Some(index) = next {
                self.advance(index)?;
            }
            if next.is_none() || self.must_poll() {
                self.poll(if next.is_some() { Duration::ZERO } else { TICK })?;
            }
            if checked.elapsed() >= TICK {
                checked = Instant::now();
                self.check_progress();
            }
        }
    }

    /// Whose bytes to take next: in turn, or else those that are behind first. Then all peers work
    /// on neighbouring chunks and the accumulator stays in the cache.
    fn next_stream(&mut self) -> Option<usize> {
        match self.turn() {
            Some((_, Some(index))) if self.streams[index].is_ready() => Some(index),
            Some(_) => self.streams.iter().position(|s| s.lost && s.is_ready()),
            None => {
                let ready = self.streams.iter().enumerate().filter(|(_, s)| s.is_ready());
                ready.min_by_key(|(_, stream)| stream.front()).map(|(index, _)| index)
            }
        }
    }

    /// Where peers take turns: the chunk, and whose turn it is.
    fn turn(&mut self) -> Option<(Option<usize>, Option<usize>)> {
        let start = self.range.start;
        let turns = self.turns.as_mut()?;
        while let Some(front) = turns.front_mut() {
            let chunk = front.start;
            let owes = |stream: &Incoming<'_>| !stream.lost && !stream.done[chunk - start];
            if let Some(index) = self.streams.iter().position(owes) {
                return Some((Some(chunk), Some(index)));
            }
            front.start += 1;
            if front.start >= front.end {
                turns.pop_front();
            }
        }
        Some((None, None))
    }

    /// With all streams at work there is nothing to wait for.
    fn must_poll(&self) -> bool {
        let in_turn = self.turns.is_some();
        self.streams.iter().any(|stream| {
            matches!(stream.state(), Some(State::Socket | State::Sum))
                && (!in_turn || stream.rejected)
        })
    }

    fn poll(&mut self, timeout: Duration) -> Result<(), LaneError> {
        let mut ready = BTreeSet::new();
        let signalled = self.poller.wait(&mut ready, timeout)?;
        for (index, stream) in self.streams.iter_mut().enumerate() {
            let Some(line) = &mut stream.line else { continue };
            match line.state {
                State::Socket if ready.contains(&index) => {
                    self.poller.remove(&*line.channel)?;
                    line.state = State::Ready;
                }
                State::Sum if signalled => line.state = State::Ready,
                _ => {}
            }
            if signalled {
                if stream.queue.is_empty() {
                    // A proof of much comes in parts.
                    line.progress.made();
                }
                Self::report_if_whole(stream, index, self.lost, self.report);
            }
        }
        Ok(())
    }

    /// Does what it is told; true at the end.
    fn obey(&mut self, order: ReceiveOrder) -> Result<bool, LaneError> {
        match order {
            ReceiveOrder::Finish => return Ok(true),
            ReceiveOrder::Lose { peer } => {
                self.detach(peer)?;
                self.lose(peer)?;
            }
            ReceiveOrder::Reject { peer } => {
                self.streams[peer].reject();
                self.lose(peer)?;
            }
            ReceiveOrder::Attach { peer, connection, channel, doubted } => {
                let next =
                    Successor { connection, channel, doubted, since: Instant::now(), asked: 0 };
                self.streams[peer].successor = Some(next);
                match &mut self.streams[peer].line {
                    None => self.attach(peer)?,
                    // The checksum that it waits for may be lost.
                    Some(line) if line.state == State::Sum => line.state = State::Ready,
                    Some(_) => {}
                }
            }
        }
        Ok(false)
    }

    /// Goes over to the next connection, if there is one.
    fn attach(&mut self, peer: usize) -> Result<(), LaneError> {
        let Some(Successor { connection, channel, doubted, .. }) =
            self.streams[peer].successor.take()
        else {
            return Ok(());
        };
        self.detach(peer)?;
        let wanted = self.missing_of(peer);
        let stream = &mut self.streams[peer];
        if stream.lost {
            return Ok(());
        }
        let opened = channel.receive_path(stream.kind);
        let path = opened.map_err(|error| LaneError::peer(peer, error))?;
        stream.line = Some(Line {
            connection,
            path,
            lands: channel.lands(stream.kind),
            channel,
            low_water: 0,
            progress: Progress::new(stream.stall),
            state: State::Ready,
        });
        stream.push_back(&wanted);
        if doubted {
            let done = stream.done.iter().zip(self.range.clone()).filter(|(done, _)| **done);
            let proofs = ranges(done.map(|(_, chunk)| chunk));
            for chunk in proofs.iter().cloned().flatten() {
                stream.shared.sums.doubt(chunk);
            }
            if !proofs.is_empty() {
                stream.reported_whole = false;
                (self.report)(ReceiveReport::Prove { peer, connection, chunks: proofs });
            }
        }
        if !wanted.is_empty() {
            (self.report)(ReceiveReport::Want { peer, connection, chunks: wanted });
        }
        Self::report_if_whole(stream, peer, self.lost, self.report);
        Ok(())
    }

    /// What has not come from a peer, in the order in which it is taken.
    fn missing_of(&self, peer: usize) -> Vec<Range<usize>> {
        let (done, start) = (&self.streams[peer].done, self.range.start);
        let is_missing = |chunk: &usize| !done[chunk - start];
        match &self.turns {
            Some(turns) => ranges(turns.iter().cloned().flatten().filter(is_missing)),
            None => ranges(self.range.clone().filter(is_missing)),
        }
    }

    fn detach(&mut self, peer: usize) -> Result<(), LaneError> {
        let stream = &mut self.streams[peer];
        if let Some(line) = stream.line.take()
            && line.state == State::Socket
        {
            self.poller.remove(&*line.channel)?;
        }
        stream.queue.clear();
        stream.filled = 0;
        self.buffers.0.extend(stream.scratch.take());
        Ok(())
    }

    /// Leaves a peer out.
    fn lose(&mut self, peer: usize) -> Result<(), LaneError> {
        if self.streams[peer].lost {
            return Ok(());
        }
        self.streams[peer].successor = None;
        self.streams[peer].lost = true;
        self.lost += 1;
        if self.sink.mixes() {
            let failed = |error| LaneError::peer(peer, error);
            let begin_anew = self.sink.lose(peer).map_err(failed)?;
            let start = self.range.start;
            let mixed: BTreeSet<usize> = match begin_anew {
                true => self.range.clone().collect(),
                false => {
                    let done = &self.streams[peer].done;
                    self.range.clone().filter(|chunk| done[chunk - start]).collect()
                }
            };
            self.redo(&mixed);
            // Some may have lacked this peer's chunk only.
            for chunk in self.range.clone().filter(|chunk| !mixed.contains(chunk)) {
                let chunk = self.chunks.get(chunk);
                self.sink.complete(&chunk).map_err(failed)?;
            }
        }
        for (index, stream) in self.streams.iter_mut().enumerate() {
            stream.reported_whole = false;
            Self::report_if_whole(stream, index, self.lost, self.report);
        }
        Ok(())
    }

    /// Begins these chunks anew: whoever has sent them sends them again.
    fn redo(&mut self, chunks: &BTreeSet<usize>) {
        if chunks.is_empty() {
            return;
        }
        chunks.iter().for_each(|&chunk| self.sink.forget(&self.chunks.get(chunk)));
        for (peer, stream) in self.streams.iter_mut().enumerate().filter(|(_, s)| !s.lost) {
            let mut again: BTreeSet<usize> = BTreeSet::new();
            for &chunk in chunks {
                if std::mem::replace(&mut stream.done[chunk - self.range.start], false) {
                    stream.missing += 1;
                    again.insert(chunk);
                }
            }
            if self.turns.is_some() {
                again.extend(stream.void(chunks));
            }
            stream.reported_whole = false;
            // Without a connection the next one brings them.
            if let (Some(line), false) = (&stream.line, again.is_empty()) {
                let (connection, wanted) = (line.connection, ranges(again));
                stream.push_back(&wanted);
                (self.report)(ReceiveReport::Want { peer, connection, chunks: wanted });
            }
        }
        if let Some(turns) = &mut self.turns {
            let left = turns.drain(..).flatten().filter(|chunk| !chunks.contains(chunk));
            *turns = ranges(left.chain(chunks.iter().copied()).collect::<Vec<_>>()).into();
        }
    }

    fn report_if_whole(stream: &mut Incoming<'_>, peer: usize, lost: usize, report: Report<'_>) {
        if stream.reported_whole || !stream.is_over() {
            return;
        }
        if stream.lost || stream.shared.sums.park_for_proof() {
            stream.reported_whole = true;
            report(ReceiveReport::Whole { peer, lost });
        }
    }

    /// Finds streams that should be moving and are not.
    fn check_progress(&mut self) {
        let (turn, start) = (self.turn().map(|(_, index)| index), self.range.start);
        for index in 0..self.streams.len() {
            let stream = &mut self.streams[index];
            let has_waited = |next: &Successor| next.since.elapsed() > limits::LAST_WORDS;
            if stream.successor.as_ref().is_some_and(has_waited) {
                // The end of the last connection does not come.
                self.break_off(index, TransferError::Closed);
                continue;
            }
            let Some(line) = &mut stream.line else { continue };
            // The time before a peer begins is its own: it trains. And so is the time of others.
            let in_doubt = !stream.lost && !stream.shared.sums.is_proven();
            let waits = stream.queue.is_empty() && !in_doubt
                || !stream.shared.began.load(Ordering::Acquire)
                // Nobody has looked at it.
                || stream.lost && line.state == State::Ready
                || turn.is_some_and(|turn| turn != Some(index) && !stream.lost);
            if waits {
                line.progress.made();
            }
            if line.progress.is_overdue() {
                let refuted = stream.refuted.keys().find(|&&chunk| !stream.done[chunk - start]);
                let error = match (refuted, line.state) {
                    // It was asked for again, and did not come.
                    (Some(&chunk), _) => {
                        TransferError::Checksum { bytes: self.chunks.get(chunk).bytes }
                    }
                    (None, State::Sum) => TransferError::NoChecksum,
                    (None, _) => line.progress.stalled(),
                };
                if line.state == State::Sum {
                    // The bytes are here; the next connection brings the checksum.
                    line.progress.made();
                    let (peer, connection) = (index, line.connection);
                    (self.report)(ReceiveReport::Broken { peer, connection, error });
                } else {
                    self.break_off(index, error);
                }
            } else if line.progress.last.elapsed() > TICK && line.low_water > 1 {
                // On a slow link every byte counts as progress, so wake for every byte.
                line.low_water = 1;
                if let Err(error) = line.channel.set_receive_low_water(1) {
                    self.break_off(index, error.into());
                }
            }
        }
    }

    /// The stream's connection is of no use any more.
    fn break_off(&mut self, peer: usize, error: TransferError) {
        let Some(connection) = self.streams[peer].line.as_ref().map(|line| line.connection) else {
            return;
        };
        // A socket that epoll does not know (any more) is no reason to end the others.
        let _ = self.detach(peer);
        (self.report)(ReceiveReport::Broken { peer, connection, error });
        if let Err(error) = self.attach(peer) {
            tracing::warn!("{error}");
        }
        Self::report_if_whole(&mut self.streams[peer], peer, self.lost, self.report);
    }

    /// Moves one stream on by at most one chunk, without waiting.
    fn advance(&mut self, index: usize) -> Result<(), LaneError> {
        match self.step(index) {
            Ok(Step::Chunk) => {
                let stream = &mut self.streams[index];
                if stream.is_over()
                    && let Some(line) = &stream.line
                    && let Err(error) = line.channel.refuse_more()
                {
                    self.break_off(index, error);
                    return Ok(());
                }
                Self::report_if_whole(&mut self.streams[index], index, self.lost, self.report);
            }
            Ok(Step::Empty) => {
                if let Some(line) = &mut self.streams[index].line {
                    self.poller.add(&*line.channel, index, EventFlags::IN)?;
                    line.state = State::Socket;
                }
            }
            Ok(Step::NeedsSum) => {
                self.ask_for_sums(index);
                let stream = &mut self.streams[index];
                if let (Some(chunk), Some(line)) = (stream.front(), &mut stream.line)
                    && !stream.shared.sums.park(chunk)
                {
                    line.state = State::Sum;
                }
            }
            Ok(Step::Nonfinite { chunk, index: element }) => {
                let stream = &mut self.streams[index];
                self.buffers.0.extend(stream.scratch.take());
                stream.pop_front();
                stream.reject();
                (self.report)(ReceiveReport::Nonfinite { peer: index, chunk, index: element });
            }
            // Our memory and our disk are no peer's fault.
            Err(error @ (TransferError::Region(_) | TransferError::Sink(_))) => {
                return Err(LaneError::peer(index, error));
            }
            Err(error) => self.break_off(index, error),
        }
        Ok(())
    }

    /// The checksums of what came on a connection that broke may be lost with it.
    fn ask_for_sums(&mut self, peer: usize) {
        let stream = &mut self.streams[peer];
        let Some(run) = stream.queue.front().map(|run| run.chunks.clone()) else { return };
        let Some(next) = stream.successor.as_mut().filter(|next| next.asked <= run.start) else {
            return;
        };
        next.asked = run.end.min(run.start + limits::SUMS_ASKED);
        next.since = Instant::now();
        let (connection, chunks) = (next.connection, ranges(run.start..next.asked));
        (self.report)(ReceiveReport::Prove { peer, connection, chunks });
    }

    fn step(&mut self, index: usize) -> Result<Step, TransferError> {
        let Some(front) = self.streams[index].front() else { return Ok(Step::Empty) };
        let chunk = self.chunks.get(front);
        let length = chunk.length();
        while self.streams[index].filled < length {
            match self.receive_some(index, &chunk) {
                Ok(0) => return Err(TransferError::Closed),
                Ok(received) => {
                    let stream = &mut self.streams[index];
                    stream.filled += received;
                    stream.shared.moved.fetch_add(received as u64, Ordering::Relaxed);
                    // A first byte says as much as the word that the upload begins.
                    stream.shared.began.store(true, Ordering::Release);
                    stream.line.iter_mut().for_each(|line| line.progress.made());
                }
                Err(TransferError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Step::Empty);
                }
                Err(TransferError::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.deliver(index, &chunk)
    }

    /// Into the sink where it offers a place, into a chunk buffer otherwise.
    fn receive_some(&mut self, peer: usize, chunk: &Chunk) -> Result<usize, TransferError> {
        let stream = &mut self.streams[peer];
        let (filled, length) = (stream.filled, chunk.length());
        let run = stream.queue.front().ok_or(TransferError::Closed)?;
        // Fewer wake-ups while much is to come, and none missed at the end of the run.
        let run_end = self.chunks.get(run.chunks.end - 1).bytes.end;
        let left = run_end - chunk.bytes.start - filled as u64;
        let wanted = self.low_water_bytes.min((length - filled) as u64);
        let low_water = left.min(wanted.max(limits::RECEIVE_LOW_WATER_BYTES)) as usize;
        let void = run.void;
        let line = stream.line.as_mut().ok_or(TransferError::Closed)?;
        if low_water != line.low_water {
            line.channel.set_receive_low_water(low_water)?;
            line.low_water = low_water;
        }
        let socket = line.channel.as_fd();
        if line.lands == Lands::Nowhere {
            let nowhere = Landing { length: length - filled, bytes: None, file: None };
            return Ok(line.path.receive(socket, nowhere)?);
        }
        if !void && let Some(landing) = self.sink.landing(peer, chunk, filled, line.lands) {
            return Ok(line.path.receive(socket, landing)?);
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
        let received = line.path.receive(socket, landing);
        stream.scratch = Some(scratch);
        Ok(received?)
    }

    fn deliver(&mut self, peer: usize, chunk: &Chunk) -> Result<Step, TransferError> {
        let (length, start) = (chunk.length(), self.range.start);
        let stream = &mut self.streams[peer];
        let lands = stream.line.as_ref().map_or(Lands::Memory, |line| line.lands);
        if stream.queue.front().is_some_and(|run| run.void) {
            self.buffers.0.extend(stream.scratch.take());
            stream.pop_front();
            return Ok(Step::Chunk);
        }
        if lands != Lands::Nowhere {
            // Also a sink that does not check waits, so that no checksum is left for the next round.
            let Some(announced) = stream.shared.sums.get(chunk.index) else {
                return Ok(Step::NeedsSum);
            };
            if self.sink.checks() {
                let bytes = match &stream.scratch {
                    Some(scratch) => &scratch.bytes()[..length],
                    None => self.sink.landed(peer, chunk)?,
                };
                if chunk_sum(bytes) != announced {
                    return self.refute(peer, chunk);
                }
            }
            stream.shared.sums.verify(chunk.index);
            if let Some(inspection) = stream.shared.inspection
                && let Some(index) = self.inspect(peer, chunk, inspection)?
            {
                return Ok(Step::Nonfinite { chunk: chunk.index, index });
            }
        }
        let stream = &mut self.streams[peer];
        if let Some(mut scratch) = stream.scratch.take() {
            self.sink.accept(peer, chunk, &mut scratch)?;
            self.buffers.0.push(scratch);
        }
        self.sink.note(peer, chunk)?;
        let stream = &mut self.streams[peer];
        stream.pop_front();
        stream.done[chunk.index - start] = true;
        stream.missing -= 1;
        Ok(Step::Chunk)
    }

    /// Looks for elements that are not finite. Where updates mix, one that may not have any ends here:
    /// gives the first one.
    fn inspect(
        &mut self,
        peer: usize,
        chunk: &Chunk,
        inspection: Inspection<'_>,
    ) -> Result<Option<u64>, TransferError> {
        let stream = &mut self.streams[peer];
        let length = chunk.length();
        let payload = match &stream.scratch {
            Some(scratch) => &scratch.bytes()[..length],
            None => self.sink.landed(peer, chunk)?,
        };
        let inspected = inspect(chunk.dtype, payload, inspection.norm(chunk));
        let found = inspected.map_err(SinkError::from)?;
        inspection.findings.note(chunk.index, &found);
        let Some(first) = found.first_nonfinite else { return Ok(None) };
        match (inspection.on_nonfinite, &mut stream.scratch) {
            (OnNonfinite::Reject, _) if self.sink.mixes() => Ok(Some(first)),
            (OnNonfinite::Zero, Some(scratch)) => {
                let payload = &mut scratch.bytes_mut().0[..length];
                clean(chunk.dtype, payload).map_err(SinkError::from)?;
                Ok(None)
            }
            // What is received whole is judged as a whole.
            _ => Ok(None),
        }
    }

    /// A chunk does not match its checksum: it is asked for again, a few times.
    fn refute(&mut self, peer: usize, chunk: &Chunk) -> Result<Step, TransferError> {
        let stream = &mut self.streams[peer];
        self.buffers.0.extend(stream.scratch.take());
        let times = stream.refuted.entry(chunk.index).or_default();
        *times += 1;
        if *times > limits::MAX_REPEATS {
            return Err(TransferError::Checksum { bytes: chunk.bytes.clone() });
        }
        tracing::warn!(
            "bytes {} to {} from peer {peer} do not match their checksum; they are asked for again",
            chunk.bytes.start,
            chunk.bytes.end
        );
        stream.pop_front();
        if self.turns.is_some() {
            // Its turn has passed: it begins anew, for all.
            self.redo(&BTreeSet::from([chunk.index]));
        }
        let stream = &mut self.streams[peer];
        let connection = stream.line.as_ref().map_or(0, |line| line.connection);
        let wanted = ranges([chunk.index]);
        stream.push_back(&wanted);
        (self.report)(ReceiveReport::Want { peer, connection, chunks: wanted });
        Ok(Step::Chunk)
    }
}
