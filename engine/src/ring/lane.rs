//! One lane of an all-reduce: a thread, a connection from the left neighbour and one to the right.
//!
//! On the wire each item is its checksum, 8 bytes, and then its bytes: sums in the accumulator's type on
//! the way to the mean, the mean in the model's dtype after that. Against the stream, the receiver
//! confirms sums: each byte says how many more it has taken.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::stage::Stage;
use crate::channel::DataChannel;
use crate::error::{LaneError, ReducerError, SourceError, TransferError};
use crate::limits;
use crate::manifest::ChunkTable;
use crate::paths::{ReceiveKind, SendKind};
use crate::receiver::{Landing, ReceivePath};
use crate::reducer::{self, Weight, Weights};
use crate::region::Region;
use crate::sender::{Piece, SendPath};
use crate::signal::Signal;
use crate::source::Source;
use crate::topology::ring::{Item, Schedule};
use crate::wire::checksum::chunk_sum;

/// How often a waiting lane looks at its deadline.
const TICK: Duration = Duration::from_millis(50);

/// Bytes of a checksum, in front of every item.
pub(super) const HEAD_BYTES: usize = 8;

/// Why a lane ended early.
#[derive(Debug)]
pub(super) enum Fault {
    /// The connection to a neighbour.
    Link {
        /// Nothing usable comes from the left neighbour.
        from_left: bool,
        /// Nothing goes to the right neighbour.
        to_right: bool,
        error: TransferError,
    },
    /// Ended by its signal.
    Cancelled,
    /// What is no neighbour's fault.
    Ours(LaneError),
}

impl Fault {
    pub fn left(error: impl Into<TransferError>) -> Fault {
        Fault::Link { from_left: true, to_right: false, error: error.into() }
    }

    pub fn right(error: impl Into<TransferError>) -> Fault {
        Fault::Link { from_left: false, to_right: true, error: error.into() }
    }
}

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

impl From<ReducerError> for Fault {
    fn from(error: ReducerError) -> Fault {
        // The layout was checked when the model was: this cannot be.
        Fault::Ours(LaneError::Poll(io::Error::other(error)))
    }
}

/// What all lanes of an all-reduce work on.
pub(super) struct Task<'a> {
    pub rank: usize,
    pub chunks: &'a ChunkTable,
    pub source: &'a dyn Source,
    pub weights: &'a Weights,
    pub send_path: SendKind,
    pub receive_path: ReceiveKind,
    pub deadline: Duration,
    /// Bytes that went to the right and came from the left, on all lanes.
    pub sent: &'a AtomicU64,
    pub came: &'a AtomicU64,
}

/// What one lane works on.
pub(super) struct LanePart<'a> {
    pub schedule: Schedule,
    /// The lane's part of the output, and its place in the model.
    pub out: &'a mut [u8],
    pub out_start: u64,
    /// The output is also a file, from this position on.
    pub out_file: Option<(std::os::fd::BorrowedFd<'a>, u64)>,
    /// Of the lane's chunks: the checksums of their means.
    pub sums: &'a mut [u64],
    pub first_chunk: usize,
    pub stage: &'a mut Stage,
    pub signal: &'a Signal,
}

/// What is to be sent next, or is being sent.
struct Outgoing {
    item: Item,
    /// Absent for a mean, which stands in the output.
    slot: Option<usize>,
    length: usize,
    sum: u64,
    head_sent: usize,
    sent: usize,
}

/// What is being received.
struct Incoming {
    item: Item,
    /// Absent for a mean, which goes to the output.
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

pub(super) struct Lane<'a, 'b, I: Iterator<Item = Item>, O: Iterator<Item = Item>> {
    task: &'a Task<'a>,
    part: LanePart<'b>,
    weight: Weight,
    left: Arc<DataChannel>,
    right: Arc<DataChannel>,
    receiver: Box<dyn ReceivePath>,
    sender: Box<dyn SendPath>,
    to_come: Peekable<I>,
    to_go: Peekable<O>,
    incoming: Option<Incoming>,
    outgoing: Option<Outgoing>,
    /// What came and is to be sent on, in the order in which it is.
    ready: VecDeque<Outgoing>,
    /// Sums that were taken and not confirmed yet.
    unconfirmed: u8,
    low_water: usize,
    last_came: Instant,
    last_went: Instant,
    scratch: Vec<u8>,
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

/// Runs one lane to its end.
pub(super) fn run(
    task: &Task<'_>,
    part: LanePart<'_>,
    left: Arc<DataChannel>,
    right: Arc<DataChannel>,
) -> Result<(), Fault> {
    let receiver = left.receive_path(task.receive_path).map_err(Fault::left)?;
    let sender = right.send_path(task.send_path).map_err(Fault::right)?;
    let (to_come, to_go) = (part.schedule.received_by(task.rank), part.schedule.sent_by(task.rank));
    let weight = task.weights.get(task.rank).ok_or(ReducerError::NoWeight)?;
    let now = Instant::now();
    let mut lane = Lane {
        task,
        part,
        weight,
        left,
        right,
        receiver,
        sender,
        to_come: to_come.peekable(),
        to_go: to_go.peekable(),
        incoming: None,
        outgoing: None,
        ready: VecDeque::new(),
        unconfirmed: 0,
        low_water: 1,
        last_came: now,
        last_went: now,
        scratch: Vec::new(),
    };
    lane.run()
}

impl<I: Iterator<Item = Item>, O: Iterator<Item = Item>> Lane<'_, '_, I, O> {
    fn run(&mut self) -> Result<(), Fault> {
        loop {
            self.part.signal.check()?;
            let sending = self.push()?;
            let receiving = self.pull()?;
            if self.is_done() {
                self.confirm()?;
                return self.left.refuse_more().map_err(Fault::left);
            }
            if sending != Step::Moved && receiving != Step::Moved {
                self.wait(sending, receiving)?;
            }
        }
    }

    fn is_done(&mut self) -> bool {
        self.incoming.is_none()
            && self.outgoing.is_none()
            && self.to_come.peek().is_none()
            && self.to_go.peek().is_none()
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

    fn push(&mut self) -> Result<Step, Fault> {
        if self.outgoing.is_none() {
            match self.next_outgoing()? {
                Ok(next) => self.outgoing = Some(next),
                Err(step) => return Ok(step),
            }
        }
        let step = self.send_some().map_err(Fault::right)?;
        if let Some(done) = self.outgoing.take_if(|out| out.sent == out.length) {
            done.slot.into_iter().for_each(|slot| self.part.stage.sent(slot));
        }
        Ok(step)
    }

    /// What goes next, if it is here: a chunk of our own, or what came.
    fn next_outgoing(&mut self) -> Result<Result<Outgoing, Step>, Fault> {
        let Some(&item) = self.to_go.peek() else { return Ok(Err(Step::Idle)) };
        let next = match item.step {
            0 => self.own_chunk(item)?,
            _ => self.ready.pop_front().ok_or(Step::Idle),
        };
        if let Ok(next) = &next {
            debug_assert_eq!(next.item, item);
            self.to_go.next();
        }
        Ok(next)
    }

    fn own_chunk(&mut self, item: Item) -> Result<Result<Outgoing, Step>, Fault> {
        let slot = self.free_slot(Stage::take_own).map_err(Fault::right)?;
        let Some(slot) = slot else { return Ok(Err(Step::NoRoom)) };
        let length = self.length(item)?;
        let chunk = self.task.chunks.get(item.chunk);
        let payload = read(self.task.source, &chunk.bytes, &mut self.scratch)?;
        let sums = self.part.stage.bytes_of_mut(slot, length);
        reducer::accumulate(chunk.dtype, true, self.weight, payload, sums)?;
        let sum = chunk_sum(sums);
        Ok(Ok(Outgoing { item, slot: Some(slot), length, sum, head_sent: 0, sent: 0 }))
    }

    fn send_some(&mut self) -> Result<Step, TransferError> {
        let Some(out) = self.outgoing.as_mut() else { return Ok(Step::Idle) };
        let sent = if out.head_sent < HEAD_BYTES {
            let head = out.sum.to_le_bytes();
            let sent = self.right.send_head(&head[out.head_sent..]);
            sent.inspect(|sent| out.head_sent += sent)
        } else {
            let piece = match out.slot {
                Some(slot) => {
                    let bytes = &self.part.stage.bytes_of(slot, out.length)[out.sent..];
                    let (file, position) = self.part.stage.file_of(slot);
                    let file = Some((file, position + out.sent as u64));
                    Piece { length: bytes.len(), bytes: Some(bytes), file }
                }
                None => {
                    let chunk = self.task.chunks.get(out.item.chunk).bytes;
                    let start = (chunk.start - self.part.out_start) as usize;
                    let bytes = &self.part.out[start + out.sent..start + out.length];
                    let at = (start + out.sent) as u64;
                    let file = self.part.out_file.map(|(file, position)| (file, position + at));
                    Piece { length: bytes.len(), bytes: Some(bytes), file }
                }
            };
            let sent = self.sender.send(self.right.as_fd(), piece);
            sent.inspect(|sent| out.sent += sent)
        };
        match sent {
            Ok(sent) => {
                self.task.sent.fetch_add(sent as u64, Ordering::Relaxed);
                self.last_went = Instant::now();
                Ok(Step::Moved)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Blocked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// A free slot, also one that was confirmed just now.
    fn free_slot(
        &mut self,
        take: fn(&mut Stage) -> Option<usize>,
    ) -> Result<Option<usize>, TransferError> {
        if let Some(slot) = take(self.part.stage) {
            return Ok(Some(slot));
        }
        self.take_confirmations()?;
        Ok(take(self.part.stage))
    }

    fn take_confirmations(&mut self) -> Result<(), TransferError> {
        let mut counts = [0; 64];
        match self.right.receive(&mut counts) {
            Ok(0) => Err(TransferError::Closed),
            Ok(came) => {
                self.last_went = Instant::now();
                let known = counts[..came].iter().all(|&n| self.part.stage.confirm(n.into()));
                if known { Ok(()) } else { Err(TransferError::TooMuch) }
            }
            Err(error) if is_later(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    // Receiving.

    fn pull(&mut self) -> Result<Step, Fault> {
        if self.incoming.is_none() {
            let Some(&item) = self.to_come.peek() else { return Ok(Step::Idle) };
            let slot = match self.is_sum(item.step) {
                true => match self.free_slot(Stage::take).map_err(Fault::right)? {
                    None => return Ok(Step::NoRoom),
                    slot => slot,
                },
                false => None,
            };
            let length = self.length(item)?;
            let head = [0; HEAD_BYTES];
            self.to_come.next();
            self.incoming = Some(Incoming { item, slot, length, head, head_came: 0, came: 0 });
        }
        let mut moved = false;
        while self.incoming.as_ref().is_some_and(|incoming| incoming.left() > 0) {
            match self.receive_some().map_err(Fault::left)? {
                Step::Moved => moved = true,
                _ if moved => return Ok(Step::Moved),
                step => return Ok(step),
            }
        }
        if let Some(incoming) = self.incoming.take() {
            self.take_in(incoming)?;
        }
        Ok(Step::Moved)
    }

    fn receive_some(&mut self) -> Result<Step, TransferError> {
        let Some(incoming) = self.incoming.as_mut() else { return Ok(Step::Idle) };
        let came = if incoming.head_came < HEAD_BYTES {
            let came = self.left.receive(&mut incoming.head[incoming.head_came..]);
            came.inspect(|came| incoming.head_came += came)
        } else {
            let room = match incoming.slot {
                Some(slot) => self.part.stage.bytes_of_mut(slot, incoming.length),
                None => {
                    let chunk = self.task.chunks.get(incoming.item.chunk).bytes;
                    let start = (chunk.start - self.part.out_start) as usize;
                    &mut self.part.out[start..start + incoming.length]
                }
            };
            let room = &mut room[incoming.came..];
            let landing = Landing { length: room.len(), bytes: Some(room), file: None };
            let came = self.receiver.receive(self.left.as_fd(), landing);
            came.inspect(|came| incoming.came += came)
        };
        match came {
            Ok(0) => Err(TransferError::Closed),
            Ok(came) => {
                self.task.came.fetch_add(came as u64, Ordering::Relaxed);
                self.last_came = Instant::now();
                Ok(Step::Moved)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Step::Blocked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// An item is whole: adds what is ours, and has it sent on.
    fn take_in(&mut self, incoming: Incoming) -> Result<(), Fault> {
        let Incoming { item, slot, length, head, .. } = incoming;
        let chunk = self.task.chunks.get(item.chunk);
        let announced = u64::from_le_bytes(head);
        let wrong = || Fault::left(TransferError::Checksum { bytes: chunk.bytes.clone() });
        let start = (chunk.bytes.start - self.part.out_start) as usize;
        let out = &mut self.part.out[start..start + chunk.length()];
        let next = Item { chunk: item.chunk, step: item.step + 1 };
        let (slot, length, sum) = match slot {
            // The mean.
            None => {
                if chunk_sum(out) != announced {
                    return Err(wrong());
                }
                (None, length, announced)
            }
            Some(slot) => {
                let payload = read(self.task.source, &chunk.bytes, &mut self.scratch)?;
                let sums = self.part.stage.bytes_of_mut(slot, length);
                if chunk_sum(sums) != announced {
                    return Err(wrong());
                }
                self.unconfirmed += 1;
                if next.step < self.part.schedule.first_mean() {
                    reducer::accumulate(chunk.dtype, false, self.weight, payload, sums)?;
                    (Some(slot), length, chunk_sum(sums))
                } else {
                    let (dtype, weights) = (chunk.dtype, self.task.weights);
                    reducer::complete(dtype, false, self.weight, weights, payload, sums, out)?;
                    self.part.stage.give_back(slot);
                    (None, out.len(), chunk_sum(out))
                }
            }
        };
        if slot.is_none() {
            self.part.sums[item.chunk - self.part.first_chunk] = sum;
        }
        if next.step < self.part.schedule.steps() {
            let out = Outgoing { item: next, slot, length, sum, head_sent: 0, sent: 0 };
            self.ready.push_back(out);
        }
        if usize::from(self.unconfirmed) >= self.part.stage.slots() / 3 {
            self.confirm()?;
        }
        Ok(())
    }

    /// Tells the left neighbour which sums have been taken.
    fn confirm(&mut self) -> Result<(), Fault> {
        if self.unconfirmed == 0 {
            return Ok(());
        }
        match self.left.send_small(&[self.unconfirmed]) {
            Ok(_) => self.unconfirmed = 0,
            // A socket that is full of confirmations is an unread one: the deadline ends that.
            Err(error) if is_later(&error) && self.unconfirmed < u8::MAX => {}
            Err(error) => return Err(Fault::left(error)),
        }
        Ok(())
    }

    // Waiting.

    fn wait(&mut self, sending: Step, receiving: Step) -> Result<(), Fault> {
        self.confirm()?;
        let needs_room = sending == Step::NoRoom || receiving == Step::NoRoom;
        let mut right = PollFlags::empty();
        right.set(PollFlags::OUT, sending == Step::Blocked);
        right.set(PollFlags::IN, needs_room);
        let mut left = PollFlags::empty();
        left.set(PollFlags::IN, receiving == Step::Blocked);
        if receiving == Step::Blocked {
            self.set_low_water().map_err(Fault::left)?;
        }
        let signal = self.part.signal;
        let mut fds = [
            PollFd::from_borrowed_fd(self.left.as_fd(), left),
            PollFd::from_borrowed_fd(self.right.as_fd(), right),
            PollFd::new(signal, PollFlags::IN),
        ];
        let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Fault::Ours(LaneError::Poll(error.into()))),
        }
        let broken = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        // One that still has bytes for us says by itself how it ended.
        let ended = |fd: &PollFd<'_>, is_read: bool| fd.revents().intersects(broken) && !is_read;
        if ended(&fds[0], receiving == Step::Blocked) {
            return Err(Fault::left(TransferError::Closed));
        }
        if ended(&fds[1], sending == Step::Blocked || needs_room) {
            return Err(Fault::right(TransferError::Closed));
        }
        if !fds[2].revents().is_empty() {
            signal.clear();
        }
        self.check_deadline(sending, receiving)
    }

    fn check_deadline(&self, sending: Step, receiving: Step) -> Result<(), Fault> {
        let (deadline, now) = (self.task.deadline, Instant::now());
        let (came, went) = (now - self.last_came, now - self.last_went);
        let from_left = receiving == Step::Blocked && came > deadline;
        let waits_right =
            sending == Step::Blocked || sending == Step::NoRoom || receiving == Step::NoRoom;
        let to_right = waits_right && went > deadline;
        if from_left || to_right {
            let seconds = if from_left { came } else { went }.as_secs_f64();
            let error = TransferError::Stalled { seconds };
            return Err(Fault::Link { from_left, to_right, error });
        }
        Ok(())
    }

    /// Wakes us when a good part of what is missing is there, and never for more than that: nothing
    /// else need come before.
    fn set_low_water(&mut self) -> io::Result<()> {
        let left = self.incoming.as_ref().map_or(1, Incoming::left);
        let wanted = left.min(limits::RECEIVE_LOW_WATER_BYTES as usize).max(1);
        if wanted != self.low_water {
            self.left.set_receive_low_water(wanted)?;
            self.low_water = wanted;
        }
        Ok(())
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Bytes of the source: where they are, or read into `scratch`.
fn read<'a>(
    source: &'a dyn Source,
    bytes: &std::ops::Range<u64>,
    scratch: &'a mut Vec<u8>,
) -> Result<&'a [u8], SourceError> {
    if let Some(lent) = source.lend(bytes.clone()) {
        return Ok(lent);
    }
    scratch.resize((bytes.end - bytes.start) as usize, 0);
    source.read(bytes.start, scratch)?;
    Ok(scratch)
}

/// A ring of one: the mean is what there is.
pub(super) fn alone(task: &Task<'_>, out: &mut [u8], sums: &mut [u64]) -> Result<(), Fault> {
    let weight = task.weights.get(task.rank).ok_or(ReducerError::NoWeight)?;
    let mut scratch = Vec::new();
    let mut most = (0..task.chunks.len()).map(|chunk| reducer::sums_bytes(&task.chunks.get(chunk)));
    let most = most.try_fold(0, |most, bytes| bytes.map(|bytes| bytes.max(most)))?;
    let mut region = Region::new(most as u64).map_err(|error| LaneError::peer(0, error))?;
    for (index, sum) in sums.iter_mut().enumerate() {
        let chunk = task.chunks.get(index);
        let payload = read(task.source, &chunk.bytes, &mut scratch)?;
        let acc = &mut region.bytes_mut().0[..reducer::sums_bytes(&chunk)?];
        let out = &mut out[chunk.bytes.start as usize..chunk.bytes.end as usize];
        reducer::complete(chunk.dtype, true, weight, task.weights, payload, acc, out)?;
        *sum = chunk_sum(out);
    }
    Ok(())
}
