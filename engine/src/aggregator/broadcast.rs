//! The model goes out: lanes send it, and here clients ask for it, come, go and confirm.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::event::{Event, PeerShared, unexpected};
use super::lanes::Lanes;
use super::members::{Members, Notice, Peer};
use crate::error::{AggregatorError, Fault, LaneError, ProtocolError};
use crate::lane::send::{Outgoing, SendOrder, Sending, send};
use crate::lane::{Inbox, start_lane};
use crate::limits;
use crate::paths::SendKind;
use crate::reducer::WeightScale;
use crate::source::region::RegionSource;
use crate::wire::message::{AggregatorMessage, ChunkRange, ClientMessage};

/// How the model is sent.
pub(super) struct Broadcast {
    /// Whose updates are in the model; nobody's in the initial one.
    pub counted: Vec<bool>,
    pub round: u32,
    pub digest: [u8; 32],
    pub kind: SendKind,
    pub min_clients: usize,
    /// Where it is no model, but the sums that one edge begins from.
    pub fold: Option<Fold>,
}

/// Sums that go to one edge.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    pub peer: usize,
    pub scale: WeightScale,
}

impl Broadcast {
    /// Sends `source` to all clients. Gives how many have it.
    pub fn run(
        &self,
        lanes: &Lanes,
        members: &mut Members,
        source: &RegionSource<'_>,
        sums: &[u64],
    ) -> Result<usize, AggregatorError> {
        let shared: Vec<Arc<PeerShared>> =
            members.peers.iter().map(|peer| peer.shared.clone()).collect();
        shared.iter().for_each(|shared| shared.sent.store(0, Ordering::Relaxed));
        let inboxes: Vec<Inbox<SendOrder>> =
            lanes.signals.iter().map(|signal| Inbox::new(signal.clone())).collect();
        std::thread::scope(|scope| {
            let stall = Some(members.terms.deadline / 2);
            for inbox in &inboxes {
                let (shared, kind) = (&shared, self.kind);
                let (sender, ended) = (members.sender.clone(), members.sender.clone());
                let work = move || {
                    let streams = shared.iter().map(|s| Outgoing::new(kind, &s.sent, stall));
                    // The session holds the other end while lanes run.
                    let report = |broken| drop(sender.send(Event::SendBroken(broken)));
                    let sending = Sending {
                        source,
                        chunks: &lanes.chunks,
                        announce: None,
                        inbox,
                        report: &report,
                    };
                    send(streams.collect(), sending)
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane { result })));
            }
            let mut broadcasting = Broadcasting {
                broadcast: self,
                lanes,
                inboxes: &inboxes,
                sums,
                moved: shared.iter().map(|_| Moved::default()).collect(),
                asked: vec![vec![0; inboxes.len()]; shared.len()],
                has_sums: false,
                running: inboxes.len(),
                members,
            };
            broadcasting.run()
        })
    }
}

/// How far a client's download is.
#[derive(Default)]
struct Moved {
    /// Bytes that its kernel has taken.
    bytes: u64,
    /// Since when.
    since: Option<Instant>,
}

/// A broadcast that is under way.
struct Broadcasting<'a> {
    broadcast: &'a Broadcast,
    lanes: &'a Lanes,
    inboxes: &'a [Inbox<SendOrder>],
    sums: &'a [u64],
    moved: Vec<Moved>,
    /// Chunks that each client has asked for over its connection, on each stream.
    asked: Vec<Vec<usize>>,
    /// Whether the edge has the sums.
    has_sums: bool,
    running: usize,
    members: &'a mut Members,
}

impl Broadcasting<'_> {
    fn run(&mut self) -> Result<usize, AggregatorError> {
        let result = self.await_all();
        match &result {
            Ok(()) => self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Finish)),
            Err(_) => self.inboxes.iter().for_each(Inbox::cancel),
        }
        let ended = self.members.end_lanes(self.running, self.inboxes);
        result.and(ended)?;
        if self.broadcast.fold.is_some() {
            return Ok(self.has_sums.into());
        }
        Ok((0..self.members.peers.len()).filter(|&peer| self.has_it(peer)).count())
    }

    /// Nothing is owed to those who are not meant.
    fn has_it(&self, peer: usize) -> bool {
        match self.broadcast.fold {
            Some(fold) => fold.peer != peer || self.has_sums,
            None => self.members.peers[peer].holds == Some(self.broadcast.round),
        }
    }

    fn await_all(&mut self) -> Result<(), AggregatorError> {
        for index in 0..self.members.peers.len() {
            if !self.has_it(index) {
                if self.broadcast.fold.is_none() {
                    self.members.peers[index].holds = None;
                }
                self.attach(index)?;
            }
        }
        while self.is_owed() {
            let notice = self.members.next(Some(Instant::now() + limits::MIN_DEADLINE))?;
            self.react(notice)?;
            self.check_progress();
        }
        Ok(())
    }

    /// Whether somebody has not got the model, or is lost and nobody has looked at that yet.
    fn is_owed(&self) -> bool {
        let owed = |(index, peer): (usize, &Peer)| !peer.is_gone() && !self.has_it(index);
        !self.members.noticed.is_empty() || self.members.peers.iter().enumerate().any(owed)
    }

    fn react(&mut self, notice: Notice) -> Result<(), AggregatorError> {
        match notice {
            Notice::Up(peer) if self.broadcast.fold.is_some_and(|fold| fold.peer != peer) => Ok(()),
            Notice::Up(peer) => {
                self.tell_of_round(peer);
                self.attach(peer)
            }
            Notice::Down(peer) => {
                self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Detach { peer }));
                Ok(())
            }
            Notice::Gone(peer, fault) => self.lose(peer, fault),
            Notice::Message(peer, message) => {
                let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
                if let Err(fault) = self.hear(peer, message) {
                    self.members.drop_connection(peer, connection, fault);
                }
                Ok(())
            }
            Notice::Send(broken) => {
                self.members.drop_connection(broken.peer, broken.connection, broken.error.into());
                Ok(())
            }
            Notice::Lane(result) => {
                self.running -= 1;
                Err(result.err().unwrap_or(LaneError::Cancelled).into())
            }
            // Of the upload before.
            Notice::Receive(..) | Notice::Warm(_) | Notice::Above | Notice::Timeout => Ok(()),
        }
    }

    /// A client that comes back may not have heard that the round is over.
    fn tell_of_round(&self, peer: usize) {
        // A process that began again has asked nothing.
        let asks = self.members.peers[peer].up().is_some_and(|up| !up.doubted);
        if let Some(&counted) = self.broadcast.counted.get(peer).filter(|_| asks) {
            self.members.tell_of_round(peer, self.broadcast.round, counted);
        }
    }

    /// A client that is connected hears of the model, and will ask for what it has not.
    fn attach(&mut self, peer: usize) -> Result<(), AggregatorError> {
        let Some(up) = self.members.peers[peer].up() else { return Ok(()) };
        let connection = up.id;
        let channels: Vec<_> = up.streams.iter().flatten().cloned().collect();
        for (inbox, channel) in self.inboxes.iter().zip(channels) {
            inbox.put(SendOrder::Attach { peer, connection, channel });
        }
        let (round, digest) = (self.broadcast.round, self.broadcast.digest);
        self.moved[peer] = Moved { bytes: 0, since: Some(Instant::now()) };
        self.asked[peer].fill(0);
        let message = match self.broadcast.fold {
            Some(Fold { scale, .. }) => {
                AggregatorMessage::Fold { round, scale, seed: Some(digest) }
            }
            None => AggregatorMessage::Download { round, digest },
        };
        self.members.tell(peer, &message);
        Ok(())
    }

    fn hear(&mut self, peer: usize, message: ClientMessage) -> Result<(), Fault> {
        match message {
            ClientMessage::Received { round, digest } if round == self.broadcast.round => {
                if digest != self.broadcast.digest {
                    return Err(Fault::Digest);
                }
                match self.broadcast.fold {
                    Some(fold) => self.has_sums |= fold.peer == peer,
                    None => self.members.peers[peer].holds = Some(round),
                }
                Ok(())
            }
            ClientMessage::Received { .. } => Err(unexpected("a confirmation")),
            ClientMessage::Want { stream, chunks } => self.send(peer, stream, &chunks, false),
            ClientMessage::Prove { stream, chunks } => self.send(peer, stream, &chunks, true),
            // The last bytes may be here before the word that they come.
            ClientMessage::Uploading { round } if round == self.broadcast.round => Ok(()),
            // Of an edge that comes back and says it again.
            ClientMessage::Leaves { round, .. } if round == self.broadcast.round => Ok(()),
            _ => Err(unexpected("a message")),
        }
    }

    fn send(
        &mut self,
        peer: usize,
        stream: u32,
        wanted: &[ChunkRange],
        sums_only: bool,
    ) -> Result<(), Fault> {
        let lane = self.lanes.ranges.get(stream as usize);
        let (Some(lane), Some(inbox)) = (lane, self.inboxes.get(stream as usize)) else {
            return Err(Fault::Control(ProtocolError::Stream { stream }.into()));
        };
        let ranges = wanted.iter().map(|range| range.within(lane));
        let Some(chunks) = ranges.collect::<Option<Vec<_>>>() else {
            return Err(Fault::Control(ProtocolError::Chunks { stream }.into()));
        };
        let asked = &mut self.asked[peer][stream as usize];
        *asked += chunks.iter().map(ExactSizeIterator::len).sum::<usize>();
        if chunks.is_empty() || *asked > limits::MAX_ASKED * lane.len() {
            return Err(Fault::Control(ProtocolError::TooOften { stream }.into()));
        }
        if let Some(up) = self.members.peers[peer].up() {
            for range in &chunks {
                let sums = &self.sums[range.clone()];
                let wrap = |first, sums| AggregatorMessage::Sums { first, sums };
                // Who cannot be reached is found by the thread that reads from it.
                let _ = up.writer.send_sums(range.start, sums, wrap);
            }
        }
        if !sums_only {
            inbox.put(SendOrder::Send { peer, chunks, sums_only });
        }
        Ok(())
    }

    fn lose(&mut self, peer: usize, fault: Fault) -> Result<(), AggregatorError> {
        self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Detach { peer }));
        let left = self.members.peers.iter().filter(|peer| !peer.is_gone()).count();
        if left < self.broadcast.min_clients {
            return Err(self.members.peers[peer].fault(fault));
        }
        let label = self.members.peers[peer].label();
        let what = if self.broadcast.fold.is_some() { "the sums" } else { "the model" };
        tracing::warn!("{label}: {fault}; it has not got {what}");
        Ok(())
    }

    /// Finds clients that neither take bytes nor confirm, as long as saving them may take on a slow
    /// disk.
    fn check_progress(&mut self) {
        let model_bytes = self.members.terms.manifest.data_bytes();
        let saving = Duration::from_secs(model_bytes / limits::SLOWEST_DISK_BYTES_S);
        let patience = self.members.terms.deadline + saving;
        for index in 0..self.members.peers.len() {
            let peer = &self.members.peers[index];
            let Some(up) = peer.up().filter(|_| !self.has_it(index)) else { continue };
            // The last bytes may be on their way for long after our socket has taken them.
            let held: u64 = up.streams.iter().flatten().map(|c| c.unacknowledged_bytes()).sum();
            let taken = peer.shared.sent.load(Ordering::Relaxed).saturating_sub(held);
            let moved = &mut self.moved[index];
            if taken != moved.bytes || moved.since.is_none() {
                *moved = Moved { bytes: taken, since: Some(Instant::now()) };
            } else if moved.since.is_some_and(|since| since.elapsed() > patience) {
                let (id, seconds) = (up.id, patience.as_secs_f64().ceil() as u64);
                self.members.drop_connection(index, id, Fault::Unconfirmed { seconds });
            }
        }
    }
}
