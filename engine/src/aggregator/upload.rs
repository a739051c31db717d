//! Updates come in: lanes receive them, and here clients come, go, are late and are lost.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::event::{Event, PeerShared, unexpected};
use super::keep::Kept;
use super::lanes::Lanes;
use super::members::{Link, Members, Notice};
use crate::error::{AggregatorError, Fault, LaneError};
use crate::lane::receive::{
    Incoming, Inspection, Order, ReceiveOrder, ReceiveReport, Receiving, Shared, receive,
};
use crate::lane::{ConnectionId, Inbox, start_lane};
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::{Meter, Phase};
use crate::paths::ReceiveKind;
use crate::sink::Sink;
use crate::verdict::UpdatePolicy;
use crate::wire::message::{AggregatorMessage, ChunkRange, ClientMessage};

/// Tells apart the time until the first client begins, which is for training, and the upload.
pub(super) struct UploadClock {
    round: u32,
    waiting: Meter,
    upload: OnceCell<(Phase, Meter)>,
}

impl UploadClock {
    pub fn start(round: u32) -> UploadClock {
        UploadClock { round, waiting: Meter::start("wait", round), upload: OnceCell::new() }
    }

    /// A client has begun.
    fn begin(&self) {
        self.upload.get_or_init(|| (self.waiting.stop(0), Meter::start("upload", self.round)));
    }

    /// The wait and the upload.
    pub fn stop(self, bytes: u64) -> (Phase, Phase) {
        self.begin();
        let (wait, upload) = self.upload.into_inner().expect("begun above");
        (wait, upload.stop(bytes))
    }
}

/// What updates are looked at for.
#[derive(Clone, Copy)]
pub(super) enum Base<'a> {
    /// Nothing.
    Unseen,
    /// What is bad in them. With the model that they were trained from, if there is one.
    Model(Option<&'a [u8]>),
}

/// How updates are received.
pub(super) struct Upload {
    pub receive_path: ReceiveKind,
    pub order: Order,
    /// Fewer updates make no mean.
    pub min_clients: usize,
    /// How long a round waits for the last updates.
    pub round_deadline: Option<Duration>,
    /// What is done with bad updates.
    pub updates: UpdatePolicy,
    /// What a client has to hear before it is asked for its update.
    pub before: Option<AggregatorMessage>,
}

impl Upload {
    /// Receives the updates of all clients that are not lost into one sink for each lane. Gives
    /// whose have come whole.
    pub fn run<S: Sink>(
        &self,
        lanes: &Lanes,
        (members, kept): (&mut Members, &mut Option<Kept>),
        sinks: Vec<S>,
        lost: Vec<bool>,
        base: Base<'_>,
        clock: &UploadClock,
    ) -> Result<Vec<bool>, AggregatorError> {
        let shared: Vec<Arc<PeerShared>> =
            members.peers.iter().map(|peer| peer.shared.clone()).collect();
        let inboxes: Vec<Inbox<ReceiveOrder>> =
            lanes.signals.iter().map(|signal| Inbox::new(signal.clone())).collect();
        let running = sinks.len();
        std::thread::scope(|scope| {
            let stall = Some(members.terms.deadline / 2);
            for (lane, mut sink) in sinks.into_iter().enumerate() {
                let range = lanes.ranges[lane].clone();
                let shared = &shared;
                let (inbox, buffers) = (&inboxes[lane], &lanes.buffers[lane]);
                let (lost, kind, order) = (lost.clone(), self.receive_path, self.order);
                let updates = self.updates;
                let (sender, ended) = (members.sender.clone(), members.sender.clone());
                let work = move || {
                    let here = sink.restore().map_err(|error| LaneError::peer(0, error))?;
                    let streams = shared.iter().zip(&lost).enumerate();
                    let streams = streams.map(|(peer, (shared, &lost))| {
                        let stream =
                            Incoming::new(kind, shared.lane(lane, updates, base), stall, &range);
                        match here.get(peer) {
                            _ if lost => stream.lost(),
                            Some(here) => stream.having(here.clone()),
                            None => stream,
                        }
                    });
                    let streams = streams.collect();
                    // The session holds the other end while lanes run.
                    let report = |report| drop(sender.send(Event::Received { lane, report }));
                    let receiving = Receiving {
                        chunks: &lanes.chunks,
                        range: range.clone(),
                        order,
                        inbox,
                        report: &report,
                    };
                    let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
                    receive(streams, receiving, &mut sink, &mut buffers)?;
                    sink.end().map_err(|error| LaneError::peer(0, error))
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane { result })));
            }
            let mut uploading = Uploading {
                upload: self,
                members,
                kept,
                inboxes: &inboxes,
                chunks: &lanes.chunks,
                sums: lanes.sums.as_ref(),
                clock,
                whole: vec![vec![false; shared.len()]; running],
                losses: vec![lost.iter().filter(|&&lost| lost).count(); running],
                rejected: vec![false; shared.len()],
                lost,
                running,
            };
            uploading.run()
        })
    }
}

/// An upload that is under way.
struct Uploading<'a> {
    upload: &'a Upload,
    members: &'a mut Members,
    kept: &'a mut Option<Kept>,
    inboxes: &'a [Inbox<ReceiveOrder>],
    chunks: &'a ChunkTable,
    /// What is cut up, if it is not the model.
    sums: Option<&'a Manifest>,
    clock: &'a UploadClock,
    /// Of each lane: whose chunks have all come.
    whole: Vec<Vec<bool>>,
    /// Of each lane: how many clients it was told are lost.
    losses: Vec<usize>,
    lost: Vec<bool>,
    /// Of those who are lost: who stays, so that what was asked of it is still to come.
    rejected: Vec<bool>,
    /// Lanes.
    running: usize,
}

impl Uploading<'_> {
    fn run(&mut self) -> Result<Vec<bool>, AggregatorError> {
        let result = self.check_quorum(None).and_then(|()| self.await_all());
        match &result {
            Ok(()) => self.inboxes.iter().for_each(|inbox| inbox.put(ReceiveOrder::Finish)),
            Err(_) => self.inboxes.iter().for_each(Inbox::cancel),
        }
        let ended = self.members.end_lanes(self.running, self.inboxes);
        result.and(ended)?;
        Ok(self.lost.iter().map(|lost| !lost).collect())
    }

    fn await_all(&mut self) -> Result<(), AggregatorError> {
        for peer in 0..self.lost.len() {
            self.attach(peer)?;
        }
        let began = Instant::now();
        let mut until = self.upload.round_deadline.map(|deadline| began + deadline);
        let mut came = 0;
        while !self.is_over() {
            let notice = self.members.next(until)?;
            if matches!(notice, Notice::Timeout) {
                let last = std::mem::replace(&mut came, self.bytes_that_came());
                until = self.leave_stragglers(began, last < came)?;
                continue;
            }
            self.react(notice)?;
        }
        Ok(())
    }

    /// Whether nothing more is to come.
    fn is_over(&self) -> bool {
        (0..self.lost.len()).all(|peer| !self.owes(peer))
    }

    fn owes(&self, peer: usize) -> bool {
        (!self.lost[peer] || self.rejected[peer]) && !self.is_whole(peer)
    }

    fn is_whole(&self, peer: usize) -> bool {
        // Of a model without bytes only the client's word tells that it uploads.
        let began = self.members.peers[peer].shared.began.load(Ordering::Acquire);
        began && self.whole.iter().all(|whole| whole[peer])
    }

    fn react(&mut self, notice: Notice) -> Result<(), AggregatorError> {
        match notice {
            Notice::Up(peer) => self.attach(peer),
            // What has come of its bytes is still taken.
            Notice::Down(_) => Ok(()),
            Notice::Gone(peer, fault) => self.lose(peer, fault),
            Notice::Message(peer, message) => self.hear(peer, message),
            Notice::Receive(lane, report) => self.note(lane, report),
            Notice::Lane(result) => {
                self.running -= 1;
                Err(result.err().unwrap_or(LaneError::Cancelled).into())
            }
            // Of the broadcast before.
            Notice::Send(_) | Notice::Warm(_) | Notice::Above | Notice::Timeout => Ok(()),
        }
    }

    fn order(&self, order: impl Fn() -> ReceiveOrder) {
        self.inboxes.iter().for_each(|inbox| inbox.put(order()));
    }

    /// A client that is connected shall send what is missing.
    fn attach(&mut self, peer: usize) -> Result<(), AggregatorError> {
        let Some(up) = self.members.peers[peer].up() else { return Ok(()) };
        if self.lost[peer] {
            return Ok(());
        }
        let (connection, doubted) = (up.id, up.doubted);
        let channels: Vec<_> = up.streams.iter().flatten().cloned().collect();
        if let Some(error) = channels.iter().find_map(|channel| channel.refuse_more().err()) {
            self.members.drop_connection(peer, connection, error.into());
            return Ok(());
        }
        let round = self.clock.round;
        self.upload.before.iter().for_each(|message| self.members.tell(peer, message));
        self.members.tell(peer, &AggregatorMessage::Upload { round });
        for (inbox, channel) in self.inboxes.iter().zip(channels) {
            inbox.put(ReceiveOrder::Attach { peer, connection, channel, doubted });
        }
        Ok(())
    }

    fn hear(&mut self, peer: usize, message: ClientMessage) -> Result<(), AggregatorError> {
        match message {
            // Whether it was due has been checked where it was read.
            ClientMessage::Uploading { .. } => {
                self.clock.begin();
                Ok(())
            }
            // An edge is ready, while others upload.
            ClientMessage::Leaves { .. } => Ok(()),
            message => {
                let what = match message {
                    ClientMessage::Received { .. } => "a confirmation",
                    _ => "a message",
                };
                let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
                self.members.drop_connection(peer, connection, unexpected(what));
                Ok(())
            }
        }
    }

    fn note(&mut self, lane: usize, report: ReceiveReport) -> Result<(), AggregatorError> {
        match report {
            ReceiveReport::Whole { peer, lost } => {
                // Said before the lane knew that others are lost, it may be true no more.
                self.whole[lane][peer] |= lost == self.losses[lane];
                Ok(())
            }
            ReceiveReport::Broken { peer, connection, error } => {
                self.members.drop_connection(peer, connection, error.into());
                Ok(())
            }
            // Another lane may have said so before.
            ReceiveReport::Nonfinite { peer, .. } if self.lost[peer] => Ok(()),
            ReceiveReport::Nonfinite { peer, chunk, index } => {
                self.rejected[peer] = true;
                self.take_out(peer, self.name_element(chunk, index))
            }
            ReceiveReport::Want { peer, connection, chunks } => {
                self.whole[lane][peer] = false;
                let stream = lane as u32;
                self.ask(peer, connection, &chunks, |chunks| AggregatorMessage::Want {
                    stream,
                    chunks,
                });
                match &self.members.peers[peer].link {
                    Link::Gone { why } if !self.lost[peer] => {
                        let reason = why.clone();
                        self.lose(peer, Fault::GaveUp { reason })
                    }
                    _ => Ok(()),
                }
            }
            ReceiveReport::Prove { peer, connection, chunks } => {
                self.whole[lane][peer] = false;
                let stream = lane as u32;
                self.ask(peer, connection, &chunks, |chunks| AggregatorMessage::Prove {
                    stream,
                    chunks,
                });
                Ok(())
            }
        }
    }

    /// Lanes know chunks; people know tensors.
    fn name_element(&self, chunk: usize, index: u64) -> Fault {
        let chunk = self.chunks.get(chunk);
        let element_bytes = chunk.dtype.bitsize() as u64 / 8;
        let byte = chunk.bytes.start + index * element_bytes;
        let tensor = self.sums.unwrap_or(&self.members.terms.manifest).tensor_at(byte);
        let name = tensor.map_or_else(String::new, |tensor| tensor.name.clone());
        let start = tensor.map_or(byte, |tensor| tensor.range.start);
        Fault::Nonfinite { tensor: name, index: (byte - start) / element_bytes }
    }

    fn ask(
        &self,
        peer: usize,
        connection: ConnectionId,
        chunks: &[Range<usize>],
        wrap: impl Fn(Vec<ChunkRange>) -> AggregatorMessage,
    ) {
        if let Some(up) = self.members.peers[peer].up()
            && up.id == connection
        {
            // Who cannot be reached is found by the thread that reads from it.
            let _ = up.writer.send_ranges(chunks, wrap);
        }
    }

    /// A client is gone. What it has sent whole counts, as long as nobody needs it again.
    fn lose(&mut self, peer: usize, fault: Fault) -> Result<(), AggregatorError> {
        if self.lost[peer] {
            return Ok(());
        }
        if self.is_whole(peer) {
            tracing::warn!(
                "{}: {fault}; its update had come whole and counts",
                self.members.peers[peer].label()
            );
            return Ok(());
        }
        self.take_out(peer, fault)
    }

    /// Leaves a client out of the round.
    fn take_out(&mut self, peer: usize, fault: Fault) -> Result<(), AggregatorError> {
        let mut lost = vec![(peer, fault.to_string())];
        // What others are asked for again, those who are gone cannot send.
        for (other, member) in self.members.peers.iter().enumerate() {
            if let (false, Link::Gone { why }) = (self.lost[other] || other == peer, &member.link) {
                lost.push((other, why.clone()));
            }
        }
        self.leave_out(lost, fault)
    }

    /// Takes clients out of the round, if enough others are left; `fault` is the first one's.
    fn leave_out(
        &mut self,
        lost: Vec<(usize, String)>,
        fault: Fault,
    ) -> Result<(), AggregatorError> {
        let Some(&(first, _)) = lost.first() else { return Ok(()) };
        for (peer, why) in &lost {
            self.members.peers[*peer].left_out.clone_from(why);
            self.lost[*peer] = true;
        }
        // A session that ends here takes nobody out: begun again, it may have all.
        self.check_quorum(Some((first, fault)))?;
        for (peer, _) in lost {
            // Before anything of it is taken out: it must not come in again.
            self.kept.as_mut().map_or(Ok(()), |kept| kept.leave_out(peer))?;
            self.losses.iter_mut().for_each(|losses| *losses += 1);
            self.order(|| match self.rejected[peer] {
                true => ReceiveOrder::Reject { peer },
                false => ReceiveOrder::Lose { peer },
            });
        }
        self.whole.iter_mut().for_each(|whole| whole.fill(false));
        Ok(())
    }

    fn bytes_that_came(&self) -> u64 {
        let peers = self.members.peers.iter();
        peers.map(|peer| peer.shared.came.load(Ordering::Relaxed)).sum()
    }

    /// Goes on without those who are late, if enough others are there. Where clients take turns, those
    /// who wait for a late one are not late themselves: they get time as long as their bytes come,
    /// but not longer than they had. Gives when to look again.
    fn leave_stragglers(
        &mut self,
        began: Instant,
        moves: bool,
    ) -> Result<Option<Instant>, AggregatorError> {
        let deadline = self.upload.round_deadline.unwrap_or_default();
        let seconds = deadline.as_secs_f64();
        let mut late: Vec<usize> = (0..self.lost.len()).filter(|&peer| self.owes(peer)).collect();
        let takes_turns = self.upload.order == Order::Client;
        if takes_turns && began.elapsed() < 2 * deadline + limits::LAST_WORDS {
            let again = Some(Instant::now() + limits::LAST_WORDS);
            if moves && began.elapsed() > deadline + limits::LAST_WORDS {
                return Ok(again);
            }
            late.retain(|&peer| self.is_awaited(peer));
            self.leave_late(late, seconds)?;
            return Ok(again);
        }
        self.leave_late(late, seconds)?;
        Ok(None)
    }

    /// Whether some lane has nothing of a client's to take.
    fn is_awaited(&self, peer: usize) -> bool {
        let Some(up) = self.members.peers[peer].up() else { return true };
        let lanes = self.whole.iter().zip(up.streams.iter().flatten());
        lanes.filter(|(whole, _)| !whole[peer]).any(|(_, channel)| channel.unread_bytes() == 0)
    }

    fn leave_late(&mut self, late: Vec<usize>, seconds: f64) -> Result<(), AggregatorError> {
        for peer in late {
            let fault = || Fault::TooLate { seconds };
            if !self.lost[peer] {
                self.leave_out(vec![(peer, fault().to_string())], fault())?;
            }
            // It may come back for the next round.
            let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
            self.members.drop_connection(peer, connection, fault());
        }
        Ok(())
    }

    fn check_quorum(&self, last: Option<(usize, Fault)>) -> Result<(), AggregatorError> {
        let left = self.lost.iter().filter(|&&lost| !lost).count();
        if left >= self.upload.min_clients {
            if let Some((peer, fault)) = last {
                let label = self.members.peers[peer].label();
                tracing::warn!("{label}: {fault}; the round goes on with {left} clients");
            }
            return Ok(());
        }
        match last {
            Some((peer, fault)) => Err(self.members.peers[peer].fault(fault)),
            None => Err(AggregatorError::Quorum { left, wanted: self.upload.min_clients }),
        }
    }
}

impl PeerShared {
    fn lane<'s>(&'s self, lane: usize, updates: UpdatePolicy, base: Base<'s>) -> Shared<'s> {
        let sums = self.sums.get().expect("set before the session begins").lane(lane);
        let inspection = match base {
            Base::Unseen => None,
            Base::Model(model) => Some(model),
        };
        let inspection = inspection.zip(self.findings.get()).map(|(model, findings)| Inspection {
            on_nonfinite: updates.on_nonfinite,
            wants_norm: updates.clip_norm.is_some(),
            model,
            findings,
        });
        Shared { sums, began: &self.began, moved: &self.came, inspection }
    }
}
