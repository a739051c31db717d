//! The clients of a session: who is connected, who is expected back, who is gone. Turns what
//! comes in from connections and lanes into what a round has to react to.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::door::{Door, Expiry, Pass};
use super::entry::{self, Knocking, is_first_sign, refuse, was_silent};
use super::event::{Event, Joined, PeerShared, label, note, read_client, unexpected};
use crate::channel::DataChannel;
use crate::control::{self, ControlChannel, Listeners, Writer, printable, random};
use crate::error::{AggregatorError, ControlError, Fault, LaneError};
use crate::lane::receive::ReceiveReport;
use crate::lane::send::SendBroken;
use crate::lane::{ConnectionId, Inbox};
use crate::limits;
use crate::manifest::Manifest;
use crate::meter::Phase;
use crate::wire::hello::{SessionId, Ticket};
use crate::wire::message::{AggregatorMessage, ClientMessage, Plan};

/// A client of the session.
pub(super) struct Peer {
    pub name: String,
    pub address: SocketAddr,
    pub examples: f64,
    pub shared: Arc<PeerShared>,
    pub link: Link,
    /// The round whose model it has; it then need not get it again.
    pub holds: Option<u32>,
    /// Why its update is not in the mean of the newest round, if it is not.
    pub left_out: String,
}

/// How a client is connected.
pub(super) enum Link {
    /// With all its data channels.
    Up(Connection),
    /// Its data channels are being opened.
    Opening { connection: Connection, until: Instant },
    /// It may come back until then. Its old connection, if it had one to this process, may still say why it
    /// broke.
    Down { old: Option<Connection>, fault: Fault, linger: Instant, until: Instant },
    /// It is not expected back.
    Gone { why: String },
}

/// A client's control channel and its data channels.
pub(super) struct Connection {
    pub id: ConnectionId,
    pub ticket: Ticket,
    pub writer: Arc<Writer>,
    pub reader: Option<JoinHandle<()>>,
    pub streams: Vec<Option<Arc<DataChannel>>>,
    /// Who gets signs of life: this one too, as long as it lives.
    listeners: Listeners,
    /// Whether it cannot be sure that the client has the same update as before.
    pub doubted: bool,
}

impl Connection {
    fn shut_down(&self) {
        self.writer.shut_down();
        self.streams.iter().flatten().for_each(|channel| channel.hang_up());
    }

    fn opened(&self) -> usize {
        self.streams.iter().flatten().count()
    }
}

impl Drop for Connection {
    /// However a session ends, also before it began, no thread and no connection outlive it.
    fn drop(&mut self) {
        self.shut_down();
        let is_other = |writer: &Arc<Writer>| !Arc::ptr_eq(writer, &self.writer);
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).retain(is_other);
        if let Some(reader) = self.reader.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = reader.join();
        }
    }
}

impl Peer {
    pub fn label(&self) -> String {
        label(&self.name, self.address)
    }

    pub fn fault(&self, error: impl Into<Fault>) -> AggregatorError {
        AggregatorError::Client { client: self.label(), error: error.into() }
    }

    /// Its connection, if it can be used.
    pub fn up(&self) -> Option<&Connection> {
        match &self.link {
            Link::Up(connection) => Some(connection),
            _ => None,
        }
    }

    fn connection(&self) -> Option<&Connection> {
        match &self.link {
            Link::Up(connection) | Link::Opening { connection, .. } => Some(connection),
            Link::Down { old, .. } => old.as_ref(),
            Link::Gone { .. } => None,
        }
    }

    pub fn is_gone(&self) -> bool {
        matches!(self.link, Link::Gone { .. })
    }

    /// Before a round: who is left out from its start is so for this reason.
    pub fn begin_round(&mut self) {
        self.left_out = match &self.link {
            Link::Gone { why } => why.clone(),
            _ => "it has not got the last model".into(),
        };
    }
}

/// What a round has to react to.
pub(super) enum Notice {
    /// A client's connection stands, with all its data channels.
    Up(usize),
    /// A client's connection is broken; it may come back.
    Down(usize),
    /// A client is not expected back, for this reason.
    Gone(usize, Fault),
    /// A client said something.
    Message(usize, ClientMessage),
    /// A receiving lane said something.
    Receive(usize, ReceiveReport),
    /// A sending lane said something.
    Send(SendBroken),
    /// A lane ended.
    Lane(Result<(), LaneError>),
    /// The memory of the rounds is there.
    Warm(Phase),
    /// A call to the aggregator above is over.
    Above,
    /// Nothing happened until the time that was given.
    Timeout,
}

/// What all plans of a session have in common.
pub(super) struct Terms {
    pub session: SessionId,
    pub streams: usize,
    pub chunk_bytes: u64,
    pub rounds: u32,
    /// Silence after which a peer is given up.
    pub deadline: Duration,
    /// How long a client whose connection broke may take to come back.
    pub reconnect: Duration,
    pub manifest: Manifest,
}

pub(super) struct Members {
    pub peers: Vec<Peer>,
    pub terms: Terms,
    pub events: Receiver<Event>,
    pub sender: Sender<Event>,
    pub door: Arc<Door>,
    pub listeners: Listeners,
    pub next_connection: ConnectionId,
    /// The last word is said: who closes now has heard it.
    pub ending: bool,
    /// What follows from what was done here.
    pub noticed: VecDeque<Notice>,
    /// Events that came when nobody could react to them.
    pub put_off: VecDeque<Event>,
    /// What had come was taken, and what is due may now happen.
    pub looked: bool,
    /// Who wants to come back while his last connection still seems to stand.
    pub knocking: Knocking,
}

impl Members {
    /// Everybody's weight; zero for those who are lost.
    pub fn examples(&self, lost: &[bool]) -> Vec<f64> {
        let peers = self.peers.iter().zip(lost);
        peers.map(|(peer, &lost)| if lost { 0.0 } else { peer.examples }).collect()
    }

    /// Sends a message to all clients that are connected.
    pub fn tell_all(&self, message: &AggregatorMessage) {
        for connection in self.peers.iter().filter_map(Peer::connection) {
            // A client that is gone need not hear it.
            let _ = connection.writer.send(message);
        }
    }

    /// Waits until all lanes have ended; the first error that one ended with.
    pub fn end_lanes<T>(
        &mut self,
        mut running: usize,
        inboxes: &[Inbox<T>],
    ) -> Result<(), AggregatorError> {
        let mut failure = Ok(());
        while running > 0 {
            // Nobody is dismissed here: what happens to connections is for whoever uses them next.
            match self.events.recv() {
                Ok(Event::Lane { result }) => {
                    running -= 1;
                    if let Err(error) = result
                        && failure.is_ok()
                    {
                        inboxes.iter().for_each(Inbox::cancel);
                        failure = Err(AggregatorError::from(error));
                    }
                }
                // Of lanes that nobody runs any more.
                Ok(Event::Received { .. } | Event::SendBroken(_)) => {}
                Ok(event) => self.put_off.push_back(event),
                Err(_) => break,
            }
        }
        failure
    }

    /// What happens next, or [`Notice::Timeout`] at `until`.
    ///
    /// # Errors
    /// Only what ends the whole session.
    pub fn next(&mut self, until: Option<Instant>) -> Result<Notice, AggregatorError> {
        loop {
            if let Some(notice) = self.noticed.pop_front() {
                return Ok(notice);
            }
            if let Some(event) = self.put_off.pop_front() {
                if let Some(notice) = self.understand(event)? {
                    return Ok(notice);
                }
                continue;
            }
            let now = Instant::now();
            let wake = self.next_due();
            // Who came before his time was over came in time, also if nobody looked.
            if wake.is_some_and(|wake| wake <= now) && !std::mem::replace(&mut self.looked, true) {
                self.put_off.extend(self.events.try_iter());
                continue;
            }
            self.looked = false;
            if let Some(notice) = self.due() {
                return Ok(notice);
            }
            if until.is_some_and(|until| until <= now) {
                return Ok(Notice::Timeout);
            }
            let wake = self.next_due().into_iter().chain(until).min();
            let wait = wake.map_or(limits::DEADLINE, |wake| wake.saturating_duration_since(now));
            match self.events.recv_timeout(wait) {
                Ok(event) => {
                    if let Some(notice) = self.understand(event)? {
                        return Ok(notice);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // This holds the other end.
                Err(RecvTimeoutError::Disconnected) => return Ok(Notice::Timeout),
            }
        }
    }

    /// Sends a message to a client. One that cannot be reached is found by its reader.
    pub fn tell(&self, peer: usize, message: &AggregatorMessage) {
        if let Some(connection) = self.peers[peer].up() {
            let _ = connection.writer.send(message);
        }
    }

    /// Tells a client that the round is over, and why its update is not in the mean, if it is not.
    pub fn tell_of_round(&self, peer: usize, round: u32, counted: bool) {
        let left_out = (!counted).then(|| printable(&self.peers[peer].left_out));
        self.tell(peer, &AggregatorMessage::Applied { round, left_out });
    }

    /// The connection of a client breaks now, for this reason, if it is `connection`. What that comes
    /// to is the next notice.
    pub fn drop_connection(&mut self, peer: usize, connection: ConnectionId, fault: Fault) {
        let is_up = self.peers[peer].up().is_some_and(|up| up.id == connection);
        if is_up {
            let notice = self.break_off(peer, fault);
            self.noticed.push_back(notice);
        }
    }

    /// When something is due without anybody saying anything.
    fn next_due(&self) -> Option<Instant> {
        let due = |peer: &Peer| match &peer.link {
            Link::Opening { until, .. } => Some(*until),
            Link::Down { linger, until, .. } => Some((*linger).min(*until)),
            _ => None,
        };
        self.peers.iter().filter_map(due).chain(self.knocking.next_due()).min()
    }

    fn due(&mut self) -> Option<Notice> {
        let now = Instant::now();
        self.knocking.due().into_iter().for_each(|joined| self.take_back(joined));
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            match &mut peer.link {
                Link::Opening { connection, until } if *until <= now => {
                    let (opened, wanted) = (connection.opened(), connection.streams.len());
                    return Some(self.break_off(index, Fault::Streams { opened, wanted }));
                }
                Link::Down { until, .. } if *until <= now => {
                    let Link::Down { fault, .. } = self.replace_link(index) else { continue };
                    return Some(Notice::Gone(index, fault));
                }
                Link::Down { old, linger, until, .. } if *linger <= now => {
                    old.iter().for_each(Connection::shut_down);
                    *linger = *until;
                }
                _ => {}
            }
        }
        None
    }

    /// Makes a client gone, and gives what it was.
    fn replace_link(&mut self, index: usize) -> Link {
        let peer = &mut self.peers[index];
        let why = match &peer.link {
            Link::Down { fault, .. } => fault.to_string(),
            _ => String::new(),
        };
        std::mem::replace(&mut peer.link, Link::Gone { why })
    }

    fn understand(&mut self, event: Event) -> Result<Option<Notice>, AggregatorError> {
        match event {
            Event::Lane { result } => Ok(Some(Notice::Lane(result))),
            Event::Received { lane, report } => Ok(Some(Notice::Receive(lane, report))),
            Event::SendBroken(broken) => Ok(Some(Notice::Send(broken))),
            Event::Warm { result } => Ok(Some(Notice::Warm(result?))),
            Event::Above => Ok(Some(Notice::Above)),
            Event::Joined(joined) => {
                self.receive(*joined);
                Ok(None)
            }
            Event::Stream { connection, stream, channel } => {
                Ok(self.add_stream(connection, stream, channel))
            }
            Event::Message { connection, message, .. } => Ok(self.hear(connection, message)),
            Event::Lost { connection, error } => {
                // Who knocks may be the one whose connection this was.
                self.knocking.hurry();
                let Some(peer) = self.find(connection) else { return Ok(None) };
                let fault = Fault::from(error);
                match &mut self.peers[peer].link {
                    // The first sign said less.
                    Link::Down { fault: known, linger, until, .. } => {
                        // After we have hung up it says nothing.
                        if *linger < *until && is_first_sign(known) && !is_first_sign(&fault) {
                            *known = fault;
                        }
                        *linger = *until;
                        Ok(None)
                    }
                    Link::Gone { .. } => Ok(None),
                    _ => Ok(Some(self.break_off(peer, fault))),
                }
            }
        }
    }

    fn find(&self, connection: ConnectionId) -> Option<usize> {
        let is_his = |peer: &Peer| peer.connection().is_some_and(|c| c.id == connection);
        self.peers.iter().position(is_his)
    }

    fn hear(&mut self, connection: ConnectionId, message: ClientMessage) -> Option<Notice> {
        let peer = self.find(connection)?;
        match message {
            ClientMessage::Failed { reason } => {
                let fault = Fault::GaveUp { reason: printable(&reason) };
                self.peers[peer].link = Link::Gone { why: fault.to_string() };
                Some(Notice::Gone(peer, fault))
            }
            message => match &self.peers[peer].link {
                Link::Up(_) => Some(Notice::Message(peer, message)),
                Link::Opening { .. } => Some(self.break_off(peer, unexpected("a message"))),
                _ => None,
            },
        }
    }

    /// A client's connection is of no use any more. Whether the client may come back depends on why.
    fn break_off(&mut self, index: usize, fault: Fault) -> Notice {
        if self.ending && matches!(fault, Fault::Control(ControlError::Closed)) {
            self.peers[index].link = Link::Gone { why: fault.to_string() };
            return Notice::Gone(index, fault);
        }
        let patience = entry::patience(&fault, self.terms.deadline, self.terms.reconnect);
        let now = Instant::now();
        let peer = &mut self.peers[index];
        let gone = Link::Gone { why: fault.to_string() };
        let old = match std::mem::replace(&mut peer.link, gone) {
            Link::Up(connection) | Link::Opening { connection, .. } => Some(connection),
            Link::Down { old, .. } => old,
            gone @ Link::Gone { .. } => {
                peer.link = gone;
                return Notice::Gone(index, fault);
            }
        };
        if patience.is_none() && !is_first_sign(&fault) {
            let reason = printable(&format!("{}: {fault}", peer.label()));
            if let Some(old) = old {
                let _ = old.writer.send_if_idle(&AggregatorMessage::Failed { reason });
            }
            return Notice::Gone(index, fault);
        }
        if patience.is_some() {
            tracing::warn!("{}: {fault}; it is expected back", peer.label());
        }
        let linger = now + if was_silent(&fault) { Duration::ZERO } else { limits::LAST_WORDS };
        // Who may not come back can still have the last word.
        let until = now + patience.unwrap_or(limits::LAST_WORDS);
        peer.link = Link::Down { old, fault, linger, until };
        Notice::Down(index)
    }

    /// Somebody comes. Who has the name of one who is connected waits a moment.
    fn receive(&mut self, joined: Joined) {
        match self.place_of(&joined).is_some_and(|index| self.seems_connected(index, &joined)) {
            true => self.knocking.wait(joined),
            false => self.take_back(joined),
        }
    }

    fn place_of(&self, joined: &Joined) -> Option<usize> {
        self.peers.iter().position(|peer| peer.name == joined.name)
    }

    /// Lets a client come back, or says why not.
    fn take_back(&mut self, joined: Joined) {
        let Some(index) = self.place_of(&joined) else {
            tracing::warn!("{} came too late: all clients have joined already", joined.label());
            let clients = self.peers.len();
            return refuse(&joined.channel, &format!("all {clients} clients have joined already"));
        };
        let (is_taken, before) = (self.seems_connected(index, &joined), self.peers[index].examples);
        let is_edge = self.peers[index].shared.is_edge();
        let checked = match joined.is_edge == is_edge {
            true => entry::check(&joined, is_taken, Some(before), Some(&self.terms.manifest)),
            false => Err(Fault::Name { why: "belongs to another client" }),
        };
        if let Err(why) = checked {
            tracing::warn!("{} was not let in again: {why}", joined.label());
            return refuse(&joined.channel, &format!("{}: {why}", joined.label()));
        }
        if let Err(error) = self.welcome_back(index, joined) {
            tracing::warn!("{}: {error}", self.peers[index].label());
        }
    }

    /// Whether somebody of that name is connected who may be another one.
    fn seems_connected(&self, index: usize, joined: &Joined) -> bool {
        match &self.peers[index].link {
            Link::Up(connection) | Link::Opening { connection, .. } => {
                joined.resumes != Some(connection.ticket)
            }
            _ => false,
        }
    }

    fn welcome_back(&mut self, index: usize, joined: Joined) -> Result<(), AggregatorError> {
        let was = self.peers[index].connection();
        let doubted = was.is_none_or(|c| joined.resumes != Some(c.ticket) || c.doubted);
        let address = joined.address;
        let id = self.next_connection;
        self.next_connection += 1;
        let wants_header = joined.header.is_empty();
        let shared = self.peers[index].shared.clone();
        let terms = &self.terms;
        let (connection, key) = connect(
            joined,
            id,
            (terms.deadline, terms.reconnect),
            terms.streams,
            shared,
            (&self.sender, &self.listeners),
            doubted,
        )?;
        self.door.readmit(self.terms.session, index as u32, self.pass(key, id));
        let plan = self.plan(index, connection.ticket, wants_header);
        let writer = connection.writer.clone();
        let until = Instant::now() + self.terms.deadline;
        let peer = &mut self.peers[index];
        peer.address = address;
        // A process that began again may have lost it.
        peer.holds = peer.holds.filter(|_| !doubted);
        peer.link = Link::Opening { connection, until };
        tracing::info!("{} is back", peer.label());
        // Who does not read it opens no data channels either.
        let _ = writer.send(&AggregatorMessage::Plan(plan));
        Ok(())
    }

    pub fn pass(&self, key: Ticket, connection: ConnectionId) -> Pass {
        let expiry = Expiry::after(self.terms.deadline);
        Pass { key, connection, taken: vec![false; self.terms.streams], expiry }
    }

    pub fn plan(&self, client: usize, ticket: Ticket, wants_header: bool) -> Plan {
        let terms = &self.terms;
        let header = if wants_header { terms.manifest.header().to_vec() } else { Vec::new() };
        Plan {
            session: terms.session,
            client: client as u32,
            ticket,
            streams: terms.streams as u32,
            chunk_bytes: terms.chunk_bytes,
            rounds: terms.rounds,
            deadline_ms: terms.deadline.as_millis() as u64,
            header,
        }
    }

    fn add_stream(
        &mut self,
        connection: ConnectionId,
        stream: u32,
        channel: DataChannel,
    ) -> Option<Notice> {
        let index = self.find(connection)?;
        let deadline = self.terms.deadline;
        let peer = &mut self.peers[index];
        let Link::Opening { connection, until } = &mut peer.link else { return None };
        *connection.streams.get_mut(stream as usize)? = Some(Arc::new(channel));
        // Each connection that comes is progress.
        *until = Instant::now() + deadline;
        if connection.opened() < connection.streams.len() {
            return None;
        }
        let gone = Link::Gone { why: String::new() };
        if let Link::Opening { connection, .. } = std::mem::replace(&mut peer.link, gone) {
            peer.link = Link::Up(connection);
        }
        Some(Notice::Up(index))
    }
}

/// Starts to read a client's control channel, and to give it signs of life. Gives the connection, and what its data channels must
/// prove to know.
pub(super) fn connect(
    joined: Joined,
    id: ConnectionId,
    (deadline, reconnect): (Duration, Duration),
    streams: usize,
    shared: Arc<PeerShared>,
    (events, listeners): (&Sender<Event>, &Listeners),
    doubted: bool,
) -> Result<(Connection, Ticket), AggregatorError> {
    let Joined { mut channel, .. } = joined;
    let ticket = random()?;
    let key = channel.binding.key(&ticket);
    channel.set_deadline(control::silence_limit(deadline, reconnect))?;
    let ControlChannel { reader, writer, .. } = channel;
    let events = events.clone();
    let thread = std::thread::Builder::new().name("control".into());
    let thread =
        thread.spawn(move || read_client(reader, id, &events, |message| note(message, &shared)))?;
    let streams = (0..streams).map(|_| None).collect();
    let reader = Some(thread);
    let listeners = listeners.clone();
    listeners.lock().unwrap_or_else(PoisonError::into_inner).push(writer.clone());
    Ok((Connection { id, ticket, writer, reader, streams, listeners, doubted }, key))
}
