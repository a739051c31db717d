//! One lane of an all-reduce: a thread, a connection from the left neighbour and one to the right.
//!
//! On the wire each item is its checksum, 8 bytes, and then its bytes: sums in the accumulator's type on
//! the way to the mean, the mean in the model's dtype after that. In a ring the receiver confirms items
//! against the stream: each byte says how many more it has taken. In a chain the mean comes against the
//! stream of sums, and confirms the sum that it was made of.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MeanSink;
use super::stage::Stage;
use crate::channel::DataChannel;
use crate::error::{LaneError, ReducerError, SinkError, SourceError, TransferError};
use crate::limits;
use crate::manifest::{Chunk, ChunkTable};
use crate::paths::{ReceiveKind, SendKind};
use crate::receiver::{Landing, ReceivePath};
use crate::reducer::{self, Norm, Weight, Weights};
use crate::region::Region;
use crate::sender::{Piece, SendPath};
use crate::signal::Signal;
use crate::source::Source;
use crate::topology::ring::{Item, Items, Schedule};
use crate::wire::checksum::chunk_sum;

/// How often a waiting lane looks at its deadline.
const TICK: Duration = Duration::from_millis(50);

/// Bytes of a checksum, in front of every item.
pub(super) const HEAD_BYTES: usize = 8;

/// Why a lane ended early.
#[derive(Debug)]
pub(super) enum Fault {
    /// The connection to the left neighbour, or the right one.
    Link { left: bool, right: bool, error: TransferError },
    /// Ended by its signal.
    Cancelled,
    /// This element of our own update is NaN or infinite, counted in its chunk.
    Nonfinite { chunk: usize, index: u64 },
    /// What is no neighbour's fault.
    Ours(LaneError),
}

impl Fault {
    pub fn at(side: Side, error: impl Into<TransferError>) -> Fault {
        let (left, right) = (side == Side::Left, side == Side::Right);
        Fault::Link { left, right, error: error.into() }
    }
}

/// Which neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

const SIDES: [Side; 2] = [Side::Left, Side::Right];

impl From<LaneError> for Fault {
    fn from(error: LaneError) -> Fault {
        match error {
            LaneError::Cancelled => Fault::Cancelled,
            error => Fault::Ours(error),
        }
    }
}

impl From<SourceError> for Fault {
    fn from(error: SourceError) -> Fault {
        Fault::Ours(LaneError::peer(0, error))
    }
}

impl From<SinkError> for Fault {
    fn from(error: SinkError) -> Fault {
        Fault::Ours(LaneError::peer(0, error))
    }
}

impl From<ReducerError> for Fault {
    fn from(error: ReducerError) -> Fault {
        // The layout was checked when the model was: this cannot be.
        Fault::Ours(LaneError::Poll(io::Error::other(error)))
    }
}

/// What is done with numbers of our own update that are NaN or infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nonfinite {
    /// Nothing: they count as they are.
    Kept,
    /// The first one ends the lane.
    Found,
    /// They count as zero.
    Zeroed,
}

/// What all lanes of an all-reduce work on.
pub(super) struct Task<'a> {
    pub rank: usize,
    pub chunks: &'a ChunkTable,
    pub source: &'a dyn Source,
    pub nonfinite: Nonfinite,
    pub weights: &'a Weights,
    pub send_path: SendKind,
    pub receive_path: ReceiveKind,
    pub deadline: Duration,
    /// Bytes that went to neighbours and came from them, on all lanes.
    pub sent: &'a AtomicU64,
    pub came: &'a AtomicU64,
}

/// What one lane works on.
pub(super) struct LanePart<'a> {
    pub schedule: Schedule,
    pub out: Out<'a>,
    /// Of the lane's chunks: the checksums of their means.
    pub sums: &'a mut [u64],
    pub first_chunk: usize,
    pub stage: &'a mut Stage,
    pub signal: &'a Signal,
}

/// Where the mean goes.
pub(super) enum Out<'a> {
    /// To memory, where it stays: the lane's part of the model, which begins at byte `start` and is also a
    /// file, from this position on.
    Kept { bytes: &'a mut [u8], start: u64, file: (BorrowedFd<'a>, u64) },
    /// To who takes it. It is in a slot until it has been sent on.
    Passed(&'a dyn MeanSink),
}

/// What is to be sent next, or is being sent.
struct Outgoing {
    item: Item,
    /// Absent for a mean that stands in the output.
    slot: Option<usize>,
    length: usize,
    sum: u64,
    head_sent: usize,
    sent: usize,
}

/// What is being received.
struct Incoming {
    item: Item,
    /// Absent for a mean that goes to the output at once.
    slot: Option<usize>,
    length: usize,
    head: [u8; HEAD_BYTES],
    head_came: usize,
    came: usize,
}

impl Incoming {
    fn left(&self) -> usize {
        HEAD_BYTES - self.head_came + self.length - self.came
    }
}

/// The connection to a neighbour, and what moves on it.
struct Neighbour {
    channel: Arc<DataChannel>,
    receiver: Box<dyn ReceivePath>,
    sender: Box<dyn SendPath>,
    to_come: Peekable<Items>,
    to_go: Peekable<Items>,
    /// Nothing but confirmations comes from it.
    confirms: bool,
    incoming: Option<Incoming>,
    outgoing: Option<Outgoing>,
    /// What came from elsewhere and is to be sent here, in the order in which it is.
    ready: VecDeque<Outgoing>,
    low_water: usize,
    last_came: Instant,
    last_went: Instant,
}

impl Neighbour {
    fn new(
        channel: Arc<DataChannel>,
        (receive_path, send_path): (ReceiveKind, SendKind),
        to_come: Items,
        to_go: Items,
    ) -> Result<Neighbour, TransferError> {
        let (mut to_come, mut to_go) = (to_come.peekable(), to_go.peekable());
        // What is not used need not hold a pipe.
        let send_path = if to_go.peek().is_some() { send_path } else { SendKind::copying() };
        let (receiver, sender) =
            (channel.receive_path(receive_path)?, channel.send_path(send_path)?);
        let confirms = to_come.peek().is_none() && to_go.peek().is_some();
        let now = Instant::now();
        Ok(Neighbour {
            channel,
            receiver,
            sender,
            to_come,
            to_go,
            confirms,
            incoming: None,
            outgoing: None,
            ready: VecDeque::new(),
            low_water: 1,
            last_came: now,
            last_went: now,
        })
    }

    fn is_done(&mut self) -> bool {
        self.incoming.is_none()
            && self.outgoing.is_none()
            && self.to_come.peek().is_none()
            && self.to_go.peek().is_none()
    }

    /// Wakes us when a good part of what is missing is there, and never for more than that: nothing
    /// else need come before.
    fn set_low_water(&mut self) -> io::Result<()> {
        let left = self.incoming.as_ref().map_or(1, Incoming::left);
        let wanted = left.min(limits::RECEIVE_LOW_WATER_BYTES as usize).max(1);
        if wanted != self.low_water {
            self.channel.set_receive_low_water(wanted)?;
            self.low_water = wanted;
        }
        Ok(())
    }
}

struct Lane<'a, 'b> {
    task: &'a Task<'a>,
    part: LanePart<'b>,
    weight: Weight,
    /// Left and right; an end of a chain has only one.
    neighbours: [Option<Neighbour>; 2],
    /// Items that were taken and not confirmed yet.
    unconfirmed: u8,
    /// The confirmation that is being sent: what encrypts it wants the same byte again.
    confirming: Option<u8>,
    scratch: Vec<u8>,
    mean: Vec<u8>,
}

/// What a step came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Moved,
    /// The socket is not ready.
    Blocked,
    /// A slot must be free first.
    NoRoom,
    /// Nothing is to be done now.
    Idle,
}

/// What sending to a neighbour and receiving from it came to.
#[derive(Clone, Copy)]
struct Steps {
    sending: Step,
    receiving: Step,
}

impl Steps {
    fn any(self, step: Step) -> bool {
        self.sending == step || self.receiving == step
    }
}

/// Runs one lane to its end, with the connections to the left and to the right neighbour.
pub(super) fn run(
    task: &Task<'_>,
    part: LanePart<'_>,
    channels: [Option<Arc<DataChannel>>; 2],
) -> Result<(), Fault> {
    let weight = task.weights.get(task.rank).ok_or(ReducerError::NoWeight)?;
    let (schedule, rank) = (&part.schedule, task.rank);
    let [left, right] = channels;
    let open = |side, channel: Option<_>, to_come, to_go| {
        // Nobody confirms means that go back: they are copied, so that their slots are free at once.
        let copies = side == Side::Left && matches!(part.out, Out::Passed(_));
        let send_path = if copies { SendKind::copying() } else { task.send_path };
        let paths = (task.receive_path, send_path);
        let open = |channel| Neighbour::new(channel, paths, to_come, to_go);
        channel.map(open).transpose().map_err(|error| Fault::at(side, error))
    };
    let left = open(Side::Left, left, schedule.from_left(rank), schedule.to_left(rank))?;
    let right = open(Side::Right, right, schedule.from_right(rank), schedule.to_right(rank))?;
    let neighbours = [left, right];
    let (scratch, mean) = (Vec::new(), Vec::new());
    let mut lane =
        Lane { task, part, weight, neighbours, unconfirmed: 0, confirming: None, scratch, mean };
    lane.run()
}

impl Lane<'_, '_> {
    fn run(&mut self) -> Result<(), Fault> {
        loop {
            self.part.signal.check()?;
            let mut steps = [Steps { sending: Step::Idle, receiving: Step::Idle }; 2];
            for side in SIDES {
                steps[side as usize].sending = self.push(side)?;
            }
            for side in SIDES {
                steps[side as usize].receiving = self.pull(side)?;
            }
            if self.neighbours.iter_mut().flatten().all(Neighbour::is_done) {
                return self.end();
            }
            if !steps.iter().any(|steps| steps.any(Step::Moved)) {
                self.wait(steps)?;
            }
        }
    }

    fn end(&mut self) -> Result<(), Fault> {
        self.confirm()?;
        for side in SIDES {
            let neighbour = self.neighbours[side as usize].as_ref();
            if let Some(neighbour) = neighbour.filter(|neighbour| !neighbour.confirms) {
                neighbour.channel.refuse_more().map_err(|error| Fault::at(side, error))?;
            }
        }
        Ok(())
    }

    /// Whether the step is one of adding up, whose bytes are sums.
    fn is_sum(&self, step: usize) -> bool {
        step < self.part.schedule.first_mean()
    }

    /// Bytes of an item.
    fn length(&self, item: Item) -> Result<usize, Fault> {
        let chunk = self.task.chunks.get(item.chunk);
        if self.is_sum(item.step) { Ok(reducer::sums_bytes(&chunk)?) } else { Ok(chunk.length()) }
    }

    // Sending.

    fn push(&mut self, to: Side) -> Result<Step, Fault> {
        let Some(neighbour) = &mut self.neighbours[to as usize] else { return Ok(Step::Idle) };
        if neighbour.outgoing.is_none() {
            let Some(&item) = neighbour.to_go.peek() else { return Ok(Step::Idle) };
            // A chunk of our own, or what came.
            let next = match item.step {
                0 => self.own_chunk(item)?,
                _ => neighbour.ready.pop_front().ok_or(Step::Idle),
            };
            let next = match next {
                Ok(next) => next,
                Err(step) => return Ok(step),
            };
            debug_assert_eq!(next.item, item);
            if let Some(neighbour) = &mut self.neighbours[to as usize] {
                neighbour.to_go.next();
                neighbour.outgoing = Some(next);
            }
        }
        self.send_some(to).map_err(|error| Fault::at(to, error))
    }

    fn own_chunk(&mut self, item: Item) -> Result<Result<Outgoing, Step>, Fault> {
        let slot = self.free_slot(Stage::take_own)?;
        let Some(slot) = slot else { return Ok(Err(Step::NoRoom)) };
        let length = self.length(item)?;
        let chunk = self.task.chunks.get(item.chunk);
        let payload = self.task.read(item.chunk, &mut self.scratch)?;
        let sums = self.part.stage.bytes_of_mut(slot, length);
        reducer::accumulate(chunk.dtype, true, self.weight, payload, sums)?;
        let sum = chunk_sum(sums);
        Ok(Ok(Outgoing { item, slot: Some(slot), length, sum, head_sent: 0, sent: 0 }))
    }

    fn send_some(&mut self, to: Side) -> Result<Step, TransferError> {
        let Some(neighbour) = &mut self.neighbours[to as usize] else { return Ok(Step::Idle) };
        let Some(out) = &mut neighbour.outgoing else { return Ok(Step::Idle) };
        let sent = if out.head_sent < HEAD_BYTES {
            let head = out.sum.to_le_bytes();
            let sent = neighbour.channel.send_head(&head[out.head_sent..]);
            sent.inspect(|sent| out.head_sent += sent)
        } else {
            let chunk = self.task.chunks.get(out.item.chunk);
            let (bytes, (file, position)) = match out.slot {
                Some(slot) => {
                    (self.part.stage.bytes_of(slot, out.length), self.part.stage.file_of(slot))
                }
                None => self.part.out.of(&chunk)?,
            };
            let bytes = &bytes[out.sent..];
            let file = Some((file, position + out.sent as u64));
            let piece = Piece { length: bytes.len(), bytes: Some(bytes), file };
            let sent = neighbour.sender.send(neighbour.channel.as_fd(), piece);
            sent.inspect(|sent| out.sent += sent)
        };
        match sent {
            Ok(sent) => {
                self.task.sent.fetch_add(sent as u64, Ordering::Relaxed);
                neighbour.last_went = Instant::now();
                if let Some(done) = neighbour.outgoing.take_if(|out| out.sent == out.length) {
                    match to {
                        Side::Right => {
                            if !self.part.stage.is_owed() {
                                // Only now is there something for it to answer.
                                neighbour.last_came = Instant::now();
                            }
                            self.part.stage.sent(done.slot);
                        }
                        Side::Left => {
                            done.slot.into_iter().for_each(|slot| self.part.stage.give_back(slot));
                        }
                    }
                }
                Ok(Step::Moved)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Blocked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// A free slot, also one that was confirmed just now.
    fn free_slot(&mut self, take: fn(&mut Stage) -> Option<usize>) -> Result<Option<usize>, Fault> {
        if let Some(slot) = take(self.part.stage) {
            return Ok(Some(slot));
        }
        self.take_confirmations().map_err(|error| Fault::at(Side::Right, error))?;
        Ok(take(self.part.stage))
    }

    fn take_confirmations(&mut self) -> Result<(), TransferError> {
        let right = self.neighbours[Side::Right as usize].as_mut();
        let Some(right) = right.filter(|right| right.confirms) else { return Ok(()) };
        let mut counts = [0; 64];
        match right.channel.receive(&mut counts) {
            Ok(0) => Err(TransferError::Closed),
            Ok(came) => {
                right.last_went = Instant::now();
                let known = counts[..came].iter().all(|&n| self.part.stage.confirm(n.into()));
                if known { Ok(()) } else { Err(TransferError::TooMuch) }
            }
            Err(error) if is_later(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    // Receiving.

    fn pull(&mut self, from: Side) -> Result<Step, Fault> {
        let Some(neighbour) = &mut self.neighbours[from as usize] else { return Ok(Step::Idle) };
        if neighbour.incoming.is_none() {
            let Some(&item) = neighbour.to_come.peek() else { return Ok(Step::Idle) };
            let take = match (self.is_sum(item.step), &self.part.out) {
                (true, _) => Some(Stage::take_sum as fn(&mut Stage) -> Option<usize>),
                (false, Out::Passed(_)) => Some(Stage::take_mean as _),
                (false, Out::Kept { .. }) => None,
            };
            let slot = take.map(|take| self.free_slot(take)).transpose()?;
            if slot == Some(None) {
                return Ok(Step::NoRoom);
            }
            let slot = slot.flatten();
            let length = self.length(item)?;
            let head = [0; HEAD_BYTES];
            if let Some(neighbour) = &mut self.neighbours[from as usize] {
                neighbour.to_come.next();
                neighbour.incoming =
                    Some(Incoming { item, slot, length, head, head_came: 0, came: 0 });
            }
        }
        let mut moved = false;
        loop {
            match self.receive_some(from).map_err(|error| Fault::at(from, error))? {
                Step::Moved => moved = true,
                // All of it is here.
                Step::Idle => break,
                _ if moved => return Ok(Step::Moved),
                step => return Ok(step),
            }
        }
        let whole = self.neighbours[from as usize].as_mut().and_then(|from| from.incoming.take());
        if let Some(incoming) = whole {
            self.take_in(from, incoming)?;
        }
        Ok(Step::Moved)
    }

    fn receive_some(&mut self, from: Side) -> Result<Step, TransferError> {
        let Some(neighbour) = &mut self.neighbours[from as usize] else { return Ok(Step::Idle) };
        let incoming = neighbour.incoming.as_mut().filter(|incoming| incoming.left() > 0);
        let Some(incoming) = incoming else { return Ok(Step::Idle) };
        let came = if incoming.head_came < HEAD_BYTES {
            let came = neighbour.channel.receive(&mut incoming.head[incoming.head_came..]);
            came.inspect(|came| incoming.head_came += came)
        } else {
            let (room, (file, position)) = match incoming.slot {
                Some(slot) => self.part.stage.landing(slot, incoming.length),
                None => self.part.out.landing(&self.task.chunks.get(incoming.item.chunk))?,
            };
            let room = &mut room[incoming.came..];
            let file = Some((file, position + incoming.came as u64));
            let landing = Landing { length: room.len(), bytes: Some(room), file };
            let came = neighbour.receiver.receive(neighbour.channel.as_fd(), landing);
            came.inspect(|came| incoming.came += came)
        };
        match came {
            Ok(0) => Err(TransferError::Closed),
            Ok(came) => {
                self.task.came.fetch_add(came as u64, Ordering::Relaxed);
                neighbour.last_came = Instant::now();
                Ok(Step::Moved)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Blocked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// An item is whole: adds what is ours, or keeps the mean, and has it sent on.
    fn take_in(&mut self, from: Side, incoming: Incoming) -> Result<(), Fault> {
        let Incoming { item, slot, length, head, .. } = incoming;
        let announced = u64::from_le_bytes(head);
        let (slot, length, sum) = match slot {
            Some(slot) if self.is_sum(item.step) => {
                self.add(from, item, (slot, length), announced)?
            }
            slot => {
                self.keep(from, item, (slot, length), announced)?;
                (slot, length, announced)
            }
        };
        self.unconfirmed += 1;
        let next = Item { chunk: item.chunk, step: item.step + 1 };
        if !self.is_sum(next.step) {
            self.part.sums[item.chunk - self.part.first_chunk] = sum;
        }
        if next.step < self.part.schedule.steps() {
            let out = Outgoing { item: next, slot, length, sum, head_sent: 0, sent: 0 };
            let to =
                if self.part.schedule.goes_right(next.step) { Side::Right } else { Side::Left };
            if let Some(neighbour) = &mut self.neighbours[to as usize] {
                neighbour.ready.push_back(out);
            }
        } else {
            slot.into_iter().for_each(|slot| self.part.stage.give_back(slot));
        }
        if usize::from(self.unconfirmed) >= self.part.stage.room() / 3 {
            self.confirm()?;
        }
        Ok(())
    }

    /// Adds what is ours to sums in a slot. What is to be sent on: its slot, bytes, checksum.
    fn add(
        &mut self,
        from: Side,
        item: Item,
        (slot, length): (usize, usize),
        announced: u64,
    ) -> Result<(Option<usize>, usize, u64), Fault> {
        let chunk = self.task.chunks.get(item.chunk);
        let (dtype, weight, weights) = (chunk.dtype, self.weight, self.task.weights);
        let payload = self.task.read(item.chunk, &mut self.scratch)?;
        let sums = self.part.stage.bytes_of_mut(slot, length);
        if chunk_sum(sums) != announced {
            return Err(Fault::at(from, TransferError::Checksum { bytes: chunk.bytes.clone() }));
        }
        if item.step + 1 < self.part.schedule.first_mean() {
            reducer::accumulate(dtype, false, weight, payload, sums)?;
            return Ok((Some(slot), length, chunk_sum(sums)));
        }
        match &mut self.part.out {
            Out::Kept { .. } => {
                let (out, _) = self.part.out.landing(&chunk)?;
                reducer::complete(dtype, false, weight, weights, payload, sums, out)?;
                self.part.stage.give_back(slot);
                Ok((None, out.len(), chunk_sum(out)))
            }
            Out::Passed(sink) => {
                self.mean.resize(chunk.length(), 0);
                reducer::complete(dtype, false, weight, weights, payload, sums, &mut self.mean)?;
                // Of the same slot: a mean takes no more room than its sums.
                sums[..self.mean.len()].copy_from_slice(&self.mean);
                sink.take(chunk.bytes.start, &self.mean)?;
                Ok((Some(slot), self.mean.len(), chunk_sum(&self.mean)))
            }
        }
    }

    /// The mean of a chunk has come.
    fn keep(
        &mut self,
        from: Side,
        item: Item,
        (slot, length): (Option<usize>, usize),
        announced: u64,
    ) -> Result<(), Fault> {
        let chunk = self.task.chunks.get(item.chunk);
        let bytes = match slot {
            Some(slot) => self.part.stage.bytes_of(slot, length),
            None => self.part.out.of(&chunk)?.0,
        };
        if chunk_sum(bytes) != announced {
            return Err(Fault::at(from, TransferError::Checksum { bytes: chunk.bytes.clone() }));
        }
        if let Out::Passed(sink) = &self.part.out {
            sink.take(chunk.bytes.start, bytes)?;
        }
        // In a chain: who made it of our sum has read that.
        if from == Side::Right {
            if !self.part.stage.confirm(1) {
                return Err(Fault::at(from, TransferError::TooMuch));
            }
            if let Some(left) = &mut self.neighbours[Side::Left as usize] {
                // It may have waited for this.
                left.last_came = Instant::now();
            }
        }
        Ok(())
    }

    /// Tells the left neighbour of a ring how many items have been taken.
    fn confirm(&mut self) -> Result<(), Fault> {
        let left = self.neighbours[Side::Left as usize].as_mut();
        let Some(left) = left.filter(|_| self.part.schedule.confirms()) else {
            self.unconfirmed = 0;
            return Ok(());
        };
        if self.unconfirmed == 0 {
            return Ok(());
        }
        let count = *self.confirming.get_or_insert(self.unconfirmed);
        match left.channel.send_small(&[count]) {
            Ok(_) => {
                self.unconfirmed -= count;
                self.confirming = None;
            }
            // A socket that is full of confirmations is an unread one: the deadline ends that.
            Err(error) if is_later(&error) && self.unconfirmed < u8::MAX => {}
            Err(error) => return Err(Fault::at(Side::Left, error)),
        }
        Ok(())
    }

    // Waiting.

    fn wait(&mut self, steps: [Steps; 2]) -> Result<(), Fault> {
        self.confirm()?;
        let needs_room = steps.iter().any(|steps| steps.any(Step::NoRoom));
        for side in SIDES {
            if let Some(neighbour) = &mut self.neighbours[side as usize]
                && steps[side as usize].receiving == Step::Blocked
            {
                neighbour.set_low_water().map_err(|error| Fault::at(side, error))?;
            }
        }
        let mut fds = Vec::with_capacity(3);
        let mut uses = Vec::with_capacity(2);
        for side in SIDES {
            let Steps { sending, receiving } = steps[side as usize];
            let Some(neighbour) = &self.neighbours[side as usize] else { continue };
            let comes = receiving == Step::Blocked || needs_room && neighbour.confirms;
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, sending == Step::Blocked);
            flags.set(PollFlags::IN, comes);
            uses.push((side, !flags.is_empty()));
            fds.push(PollFd::from_borrowed_fd(neighbour.channel.as_fd(), flags));
        }
        let signal = self.part.signal;
        fds.push(PollFd::new(signal, PollFlags::IN));
        let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Fault::Ours(LaneError::Poll(error.into()))),
        }
        let broken = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        for ((side, is_used), fd) in uses.into_iter().zip(&fds) {
            // One that is used says by itself how it ended: there may be bytes for us.
            if fd.revents().intersects(broken) && !is_used {
                return Err(Fault::at(side, TransferError::Closed));
            }
        }
        if fds.last().is_some_and(|fd| !fd.revents().is_empty()) {
            signal.clear();
        }
        self.check_deadline(steps, needs_room)
    }

    fn check_deadline(&self, steps: [Steps; 2], needs_room: bool) -> Result<(), Fault> {
        let (deadline, now) = (self.task.deadline, Instant::now());
        let right = self.neighbours[Side::Right as usize].as_ref();
        let is_owed =
            self.part.stage.is_owed() || right.is_some_and(|right| right.outgoing.is_some());
        let stalled = SIDES.map(|side| {
            let neighbour = self.neighbours[side as usize].as_ref()?;
            let Steps { sending, receiving } = steps[side as usize];
            let (came, went) = (now - neighbour.last_came, now - neighbour.last_went);
            let waits_out = sending == Step::Blocked || needs_room && neighbour.confirms;
            // In a chain means come if there are sums at the right, and sums if there is room for them.
            let may_come = self.part.schedule.confirms() || is_owed == (side == Side::Right);
            let starved = receiving == Step::Blocked && may_come && came > deadline;
            let starved = starved.then_some(came);
            let blocked = (waits_out && went > deadline).then_some(went);
            starved.or(blocked)
        });
        let Some(longest) = stalled.iter().flatten().max() else { return Ok(()) };
        let error = TransferError::Stalled { seconds: longest.as_secs_f64() };
        let [left, right] = stalled.map(|stalled| stalled.is_some());
        Err(Fault::Link { left, right, error })
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Task<'_> {
    /// A chunk of our update: where it is, or read into `scratch`.
    fn read<'a>(&'a self, chunk: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8], Fault> {
        let Chunk { bytes, dtype, .. } = self.chunks.get(chunk);
        let lent = self.source.lend(bytes.clone());
        let payload = match lent.filter(|_| self.nonfinite != Nonfinite::Zeroed) {
            Some(lent) => lent,
            None => {
                scratch.resize((bytes.end - bytes.start) as usize, 0);
                self.source.read(bytes.start, scratch)?;
                if self.nonfinite == Nonfinite::Zeroed {
                    reducer::clean(dtype, scratch)?;
                }
                scratch
            }
        };
        if self.nonfinite == Nonfinite::Found {
            let found = reducer::inspect(dtype, payload, Norm::Skip)?;
            if let Some(index) = found.first_nonfinite {
                return Err(Fault::Nonfinite { chunk, index });
            }
        }
        Ok(payload)
    }
}

impl Out<'_> {
    /// Where a chunk stands, and its place in a file.
    ///
    /// # Errors
    /// It is not kept here.
    fn of(&self, chunk: &Chunk) -> Result<(&[u8], (BorrowedFd<'_>, u64)), SinkError> {
        match self {
            Out::Kept { bytes, start, file: (file, position) } => {
                let at = (chunk.bytes.start - start) as usize;
                Ok((&bytes[at..at + chunk.length()], (*file, position + at as u64)))
            }
            Out::Passed(_) => Err(SinkError::NoLanding),
        }
    }

    /// Where a chunk goes, in memory and in a file.
    ///
    /// # Errors
    /// It is not kept here.
    fn landing(&mut self, chunk: &Chunk) -> Result<(&mut [u8], (BorrowedFd<'_>, u64)), SinkError> {
        match self {
            Out::Kept { bytes, start, file: (file, position) } => {
                let at = (chunk.bytes.start - *start) as usize;
                let room = &mut bytes[at..at + chunk.length()];
                Ok((room, (*file, *position + at as u64)))
            }
            Out::Passed(_) => Err(SinkError::NoLanding),
        }
    }
}

/// One host alone: the mean is what there is.
pub(super) fn alone(task: &Task<'_>, mut out: Out<'_>, sums: &mut [u64]) -> Result<(), Fault> {
    let weight = task.weights.get(task.rank).ok_or(ReducerError::NoWeight)?;
    let (mut scratch, mut mean) = (Vec::new(), Vec::new());
    let mut most = (0..task.chunks.len()).map(|chunk| reducer::sums_bytes(&task.chunks.get(chunk)));
    let most = most.try_fold(0, |most, bytes| bytes.map(|bytes| bytes.max(most)))?;
    let mut region = Region::new(most as u64).map_err(|error| LaneError::peer(0, error))?;
    for (index, sum) in sums.iter_mut().enumerate() {
        let chunk = task.chunks.get(index);
        let payload = task.read(index, &mut scratch)?;
        let acc = &mut region.bytes_mut().0[..reducer::sums_bytes(&chunk)?];
        mean.resize(chunk.length(), 0);
        reducer::complete(chunk.dtype, true, weight, task.weights, payload, acc, &mut mean)?;
        match &mut out {
            Out::Kept { bytes, .. } => {
                bytes[chunk.bytes.start as usize..][..mean.len()].copy_from_slice(&mean);
            }
            Out::Passed(sink) => sink.take(chunk.bytes.start, &mean)?,
        }
        *sum = chunk_sum(&mean);
    }
    Ok(())
}
