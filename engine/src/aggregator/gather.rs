//! Waits for the clients, checks what they bring, and agrees with them on how bytes will travel.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::config::AggregatorConfig;
use super::door::Tickets;
use super::entry::{self, Knocking, bad_weight, refuse};
use super::event::{Event, Joined, PeerShared, label, unexpected};
use super::keep::{Kept, new_record};
use super::lanes::{Lanes, Sizes, accumulator_layout};
use super::loss::Experience;
use super::members::{Connection, Link, Members, Notice, Peer, Terms, connect};
use super::tree::Tree;
use super::upload::Upload;
use super::{Admission, Aggregator, Session};
use crate::control::{self, Heartbeat, Listeners, printable, random};
use crate::error::{AggregatorError, Fault, ReducerError};
use crate::lane::ConnectionId;
use crate::limits;
use crate::manifest::Manifest;
use crate::meter::{Meter, Phase};
use crate::reducer::{AccumulatorLayout, Weights};
use crate::wire::hello::{SessionId, Ticket};
use crate::wire::message::{AggregatorMessage, ClientMessage};

impl Aggregator {
    /// Waits until all clients have joined with the same model, then opens their data channels.
    /// `manifest` is that of an initial model; without one the first client's counts.
    ///
    /// # Errors
    /// A client that leaves, brings another model or a weight or name that cannot be used ends
    /// the session for all; the error names it.
    pub fn gather(self, manifest: Option<Manifest>) -> Result<Session, AggregatorError> {
        self.gather_and(manifest, |_, _, rounds| Ok(rounds))
    }

    /// As [`Aggregator::gather`]. Before clients hear the plan, `agree` hears what they bring: the model,
    /// all of their examples, and the rounds that are configured; and says how many there will be.
    pub(crate) fn gather_and(
        mut self,
        manifest: Option<Manifest>,
        agree: impl FnOnce(&Manifest, f64, u32) -> Result<u32, AggregatorError>,
    ) -> Result<Session, AggregatorError> {
        let listeners = Listeners::default();
        let deadline = self.config.deadline;
        let beat =
            |deadline| Heartbeat::start(listeners.clone(), AggregatorMessage::Alive, deadline);
        let heartbeat = beat(control::silence_limit(deadline, self.config.reconnect))?;
        if let Some((directory, record)) = &mut self.state
            && let Some(record) = record.take()
        {
            let directory = directory.clone();
            return self.resume(directory, record, manifest.as_ref(), (listeners, heartbeat));
        }
        // Until a client knows the plan, its own deadline counts, and that is not known here.
        let _early = beat(limits::MIN_DEADLINE)?;
        let mut gathering = Gathering {
            aggregator: self,
            model: None,
            candidates: Vec::new(),
            next_connection: 1,
            listeners: listeners.clone(),
            began: None,
            departed: Vec::new(),
            knocking: Knocking::default(),
            warmed: None,
            has_initial: manifest.is_some(),
        };
        let directory = gathering.aggregator.state.as_ref().map(|(directory, _)| directory.clone());
        let prepared =
            gathering.prepare(manifest, agree).inspect_err(|error| gathering.tell_all(error));
        let session = prepared.and_then(|prepared| gathering.connect(prepared, heartbeat));
        // What never began is not gone on with.
        if let (Err(_), Some(directory)) = (&session, directory)
            && let Err(error) = directory.clear()
        {
            tracing::warn!("{error}");
        }
        session
    }
}

struct Gathering {
    aggregator: Aggregator,
    /// Known from the first client on; the layout is absent when updates are dropped.
    model: Option<(Manifest, Option<AccumulatorLayout>)>,
    candidates: Vec<Candidate>,
    next_connection: ConnectionId,
    listeners: Listeners,
    /// Since when somebody waits for the others.
    began: Option<Instant>,
    /// Who has left and may come back, until then.
    departed: Vec<Departed>,
    knocking: Knocking,
    /// How the memory of the rounds was prepared, once it is.
    warmed: Option<Phase>,
    /// Whether the model is the aggregator's.
    has_initial: bool,
}

/// A session that nobody has been told of.
struct Prepared {
    session: SessionId,
    manifest: Manifest,
    lanes: Lanes,
    tree: Option<Tree>,
    kept: Option<Kept>,
}

struct Departed {
    name: String,
    until: Instant,
    error: AggregatorError,
}

/// Somebody who has joined, while others are awaited.
struct Candidate {
    rank: usize,
    name: String,
    address: SocketAddr,
    examples: f64,
    shared: Arc<PeerShared>,
    connection: Connection,
    key: Ticket,
    /// Whether it asked to be told the model's header.
    wants_header: bool,
}

impl Candidate {
    fn label(&self) -> String {
        label(&self.name, self.address)
    }

    fn fault(&self, error: Fault) -> AggregatorError {
        AggregatorError::Client { client: self.label(), error }
    }
}

impl Gathering {
    /// Tells every client why the session ends, so that each can say it.
    fn tell_all(&self, error: &AggregatorError) {
        let reason = printable(&error.to_string());
        for candidate in &self.candidates {
            let failed = AggregatorMessage::Failed { reason: reason.clone() };
            // A client that is gone need not hear it.
            let _ = candidate.connection.writer.send(&failed);
        }
        // Nor need those who have come and were not looked at yet dial for long.
        for event in self.aggregator.events.try_iter() {
            if let Event::Joined(joined) = event {
                refuse(&joined.channel, &reason);
            }
        }
    }

    fn collect(&mut self) -> Result<(), AggregatorError> {
        while self.candidates.len() < self.aggregator.config.clients && !self.may_begin() {
            match self.next_event()? {
                Some(Event::Joined(joined)) => self.receive(*joined)?,
                Some(event) => self.hear(event)?,
                None => {}
            }
            self.look_at_clock()?;
        }
        self.candidates.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
        Ok(())
    }

    fn agree_on_rounds(
        &mut self,
        agree: impl FnOnce(&Manifest, f64, u32) -> Result<u32, AggregatorError>,
    ) -> Result<(), AggregatorError> {
        let (manifest, _) = self.model.as_ref().ok_or_else(|| io::Error::other("no client"))?;
        let examples = self.candidates.iter().map(|candidate| candidate.examples).sum();
        self.aggregator.config.rounds = agree(manifest, examples, self.aggregator.config.rounds)?;
        Ok(())
    }

    /// Whether those who are late are not waited for any more.
    fn may_begin(&self) -> bool {
        let config = &self.aggregator.config;
        let waited = self.began.map(|began| began.elapsed());
        let enough = self.candidates.len() >= config.min_clients.unwrap_or(config.clients);
        enough && config.round_deadline.is_some_and(|deadline| waited >= Some(deadline))
    }

    /// Nothing, now and then, while the time for clients to come may end.
    fn next_event(&self) -> Result<Option<Event>, AggregatorError> {
        match self.aggregator.events.recv_timeout(limits::MIN_DEADLINE) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            // The door keeps a sender as long as this lives.
            Err(RecvTimeoutError::Disconnected) => {
                Err(io::Error::other("the listener ended").into())
            }
        }
    }

    /// Fixes the session's model, and begins to take the memory of its rounds while other clients
    /// are awaited.
    fn set_model(&mut self, manifest: Manifest) -> Result<(), AggregatorError> {
        let config = &self.aggregator.config;
        let layout = accumulator_layout(config, &manifest)?;
        let sizes = Sizes::new(config, config.averaging, &manifest, layout.as_ref());
        let (pool, events) = (self.aggregator.pool.clone(), self.aggregator.sender.clone());
        std::thread::Builder::new().name("warm".into()).spawn(move || {
            let meter = Meter::start("prepare", 0);
            let result = pool.warm(sizes.all()).map(|()| meter.stop(0)).map_err(Into::into);
            // Nobody listens any more when the session has ended.
            let _ = events.send(Event::Warm { result });
        })?;
        self.model = Some((manifest, layout));
        Ok(())
    }

    /// Nothing a client can say before the first round is good news.
    fn hear(&mut self, event: Event) -> Result<(), AggregatorError> {
        let (connection, fault) = match event {
            Event::Warm { result } => {
                self.warmed = Some(result?);
                return Ok(());
            }
            Event::Lost { connection, error } => (connection, Fault::from(error)),
            Event::Message { connection, message: ClientMessage::Failed { reason }, .. } => {
                (connection, Fault::GaveUp { reason: printable(&reason) })
            }
            Event::Message { connection, .. } => (connection, unexpected("a message")),
            _ => return Ok(()),
        };
        let place = self.candidates.iter().position(|c| c.connection.id == connection);
        let Some(place) = place else { return Ok(()) };
        let candidate = self.candidates.remove(place);
        let reason = printable(&format!("{}: {fault}", candidate.label()));
        let _ = candidate.connection.writer.send_if_idle(&AggregatorMessage::Failed { reason });
        let AggregatorConfig { deadline, reconnect, .. } = self.aggregator.config;
        let Some(patience) = entry::patience(&fault, deadline, reconnect) else {
            return self.suffer(candidate.fault(fault));
        };
        tracing::warn!("{}: {fault}; it is expected back", candidate.label());
        let error = candidate.fault(fault);
        let until = Instant::now() + patience;
        self.departed.push(Departed { name: candidate.name, until, error });
        Ok(())
    }

    /// Somebody cannot take part. That ends the session for all, unless it may begin without some.
    fn suffer(&self, error: AggregatorError) -> Result<(), AggregatorError> {
        let config = &self.aggregator.config;
        if config.min_clients.is_none_or(|least| least >= config.clients) {
            return Err(error);
        }
        tracing::warn!("{error}; another one is awaited in its place");
        Ok(())
    }

    fn look_at_clock(&mut self) -> Result<(), AggregatorError> {
        let now = Instant::now();
        self.knocking.due().into_iter().try_for_each(|joined| self.join(joined))?;
        let gone: Vec<_> = self.departed.extract_if(.., |gone| gone.until <= now).collect();
        gone.into_iter().try_for_each(|gone| self.suffer(gone.error))
    }

    fn is_taken(&self, joined: &Joined) -> bool {
        let same = |c: &Candidate| (c.rank, &c.name) == (joined.rank, &joined.name);
        self.candidates.iter().any(same)
    }

    /// Somebody comes. Who has the name of another one may be that one, come back before it is known
    /// that its connection is broken.
    fn receive(&mut self, joined: Joined) -> Result<(), AggregatorError> {
        if joined.resumes.is_some() {
            tracing::warn!("{} was in another session and is not let in", joined.label());
            let why = "this aggregator has begun a new session; start the client again to join it";
            refuse(&joined.channel, why);
            return Ok(());
        }
        match self.is_taken(&joined) && !self.aggregator.config.reconnect.is_zero() {
            true => self.knocking.wait(joined),
            false => self.join(joined)?,
        }
        Ok(())
    }

    /// Lets a client join, or tells it why it cannot.
    fn join(&mut self, joined: Joined) -> Result<(), AggregatorError> {
        let label = joined.label();
        let manifest = match self.check(&joined) {
            Ok(manifest) => manifest,
            Err(error) => {
                refuse(&joined.channel, &format!("{label}: {error}"));
                return self.suffer(AggregatorError::Client { client: label, error });
            }
        };
        let id = self.next_connection;
        self.next_connection += 1;
        let wants_header = joined.header.is_empty() && self.model.is_some();
        let (rank, name) = (joined.rank, joined.name.clone());
        let (address, examples) = (joined.address, joined.examples);
        let edge = joined.is_edge.then(Mutex::default);
        let shared = Arc::new(PeerShared { edge, ..PeerShared::default() });
        let (config, events) = (&self.aggregator.config, &self.aggregator.sender);
        let times = (config.deadline, config.reconnect);
        let ways = (events, &self.listeners);
        let (connection, key) = connect(joined, id, times, 0, shared.clone(), ways, false)?;
        self.began.get_or_insert_with(Instant::now);
        self.departed.retain(|gone| gone.name != name);
        self.candidates.push(Candidate {
            rank,
            name,
            address,
            examples,
            shared,
            connection,
            key,
            wants_header,
        });
        let wanted = self.aggregator.config.clients;
        let here = self.candidates.len();
        tracing::info!("{label} joined with {examples} examples ({here} of {wanted})");
        if self.model.is_none() { self.set_model(manifest) } else { Ok(()) }
    }

    fn check(&mut self, joined: &Joined) -> Result<Manifest, Fault> {
        if joined.is_edge && !self.aggregator.config.tree {
            return Err(Fault::Edge);
        }
        let session = self.model.as_ref().map(|(manifest, _)| manifest);
        let manifest = entry::check(joined, self.is_taken(joined), None, session)?;
        if session.is_none() {
            self.check_size(&manifest)?;
        }
        Ok(manifest)
    }

    /// Whether there is room for the rounds of the model that the first client describes: who cannot be
    /// served shall not end the session as if memory were short here.
    fn check_size(&self, manifest: &Manifest) -> Result<(), Fault> {
        let config = &self.aggregator.config;
        let (bytes, most) = (manifest.data_bytes(), config.max_model_bytes);
        if bytes > most {
            return Err(Fault::TooBig { bytes, most });
        }
        // What cannot be averaged is found where the layout is made.
        let layout = accumulator_layout(config, manifest).ok().flatten();
        let sizes = Sizes::new(config, config.averaging, manifest, layout.as_ref());
        Ok(self.aggregator.pool.check_room(sizes.all())?)
    }

    /// Weights are numbered; people know clients by name.
    fn blame(&self, error: ReducerError) -> AggregatorError {
        let Some((client, why)) = bad_weight(&error) else { return error.into() };
        let candidate = &self.candidates[client];
        candidate.fault(Fault::Weight { examples: candidate.examples, why })
    }

    /// Waits for the clients, and makes the session that they will be in.
    fn prepare(
        &mut self,
        manifest: Option<Manifest>,
        agree: impl FnOnce(&Manifest, f64, u32) -> Result<u32, AggregatorError>,
    ) -> Result<Prepared, AggregatorError> {
        if let Some(manifest) = manifest {
            self.set_model(manifest)?;
        }
        self.collect()?;
        let (manifest, layout) = self.model.clone().ok_or_else(|| io::Error::other("no client"))?;
        let examples: Vec<f64> = self.candidates.iter().map(|c| c.examples).collect();
        // Each round makes its own; what is wrong with them shows now.
        Weights::new(&examples).map_err(|error| self.blame(error))?;
        let config = &self.aggregator.config;
        let lanes = Lanes::cut(config, &manifest, layout)?;
        let tree =
            config.tree.then(|| Tree::new(config, &manifest, lanes.ranges.len())).transpose()?;
        // What is wrong here shows before others hear of it.
        self.agree_on_rounds(agree)?;
        let session = random()?;
        // Before anybody knows of the session.
        let kept = self.begin_to_keep(session, &manifest, &lanes)?;
        Ok(Prepared { session, manifest, lanes, tree, kept })
    }

    /// Sends each client its plan, and waits for its data channels and for the memory.
    fn connect(
        mut self,
        prepared: Prepared,
        heartbeat: Heartbeat,
    ) -> Result<Session, AggregatorError> {
        let Prepared { session, manifest, lanes, tree, kept } = prepared;
        let warmed = self.warmed.take();
        let config = &self.aggregator.config;
        let min_clients = config.min_clients.unwrap_or(config.clients);
        let (mut members, admission) = self.agree(session, manifest, &lanes, tree.as_ref());
        let warmed = members.await_all(warmed, min_clients).inspect_err(|error| {
            members.tell_all(&AggregatorMessage::Failed { reason: printable(&error.to_string()) });
        })?;
        // Some may never have come.
        self.aggregator.config.clients = members.peers.len();
        let mut session =
            self.aggregator.begin(min_clients, lanes, members, warmed, heartbeat, admission);
        session.kept = kept;
        session.tree = tree;
        Ok(session)
    }

    fn begin_to_keep(
        &self,
        session: SessionId,
        manifest: &Manifest,
        lanes: &Lanes,
    ) -> Result<Option<Kept>, AggregatorError> {
        let Some((directory, _)) = &self.aggregator.state else { return Ok(None) };
        let clients = self.candidates.iter().map(|c| (c.name.clone(), c.address, c.examples));
        let config = &self.aggregator.config;
        let record = new_record(config, session, manifest, clients, self.has_initial);
        Kept::begin(directory.clone(), record, &lanes.chunks).map(Some)
    }

    /// Makes the candidates members, and sends each its plan.
    fn agree(
        &mut self,
        session: SessionId,
        manifest: Manifest,
        lanes: &Lanes,
        tree: Option<&Tree>,
    ) -> (Members, Admission) {
        let terms = self.aggregator.terms(session, lanes, manifest);
        let (listeners, next) = (self.listeners.clone(), self.next_connection);
        let (mut members, admission) = self.aggregator.members(terms, listeners, next);
        let until = Instant::now() + members.terms.deadline;
        let (mut passes, mut plans) = (Vec::new(), Vec::new());
        for (index, candidate) in std::mem::take(&mut self.candidates).into_iter().enumerate() {
            let Candidate { name, address, examples, shared, mut connection, .. } = candidate;
            shared.cut(tree.filter(|_| shared.is_edge()).map_or(lanes, Tree::lanes));
            connection.streams.resize_with(lanes.ranges.len(), || None);
            passes.push((index as u32, members.pass(candidate.key, connection.id)));
            let plan = members.plan(index, connection.ticket, candidate.wants_header);
            plans.push((connection.writer.clone(), plan));
            let link = Link::Opening { connection, until };
            let (holds, left_out) = (None, String::new());
            members.peers.push(Peer { name, address, examples, shared, link, holds, left_out });
        }
        for (client, pass) in passes {
            members.door.readmit(session, client, pass);
        }
        for (writer, plan) in plans {
            // Who does not read it opens no data channels either.
            let _ = writer.send(&AggregatorMessage::Plan(plan));
        }
        (members, admission)
    }
}

impl Aggregator {
    /// What all plans of a session have in common.
    pub(super) fn terms(&self, session: SessionId, lanes: &Lanes, manifest: Manifest) -> Terms {
        Terms {
            session,
            streams: lanes.ranges.len(),
            chunk_bytes: self.config.chunk_bytes,
            rounds: self.config.rounds,
            deadline: self.config.deadline,
            reconnect: self.config.reconnect,
            manifest,
        }
    }

    /// A session that nobody is a member of yet.
    pub(super) fn members(
        &mut self,
        terms: Terms,
        listeners: Listeners,
        next_connection: ConnectionId,
    ) -> (Members, Admission) {
        let (door, session) = (self.door.clone(), terms.session);
        let tickets = Tickets { clients: HashMap::new(), events: self.sender.clone() };
        door.admit(session, tickets);
        let members = Members {
            peers: Vec::new(),
            terms,
            // The sessions end of the channel; what comes here from now on comes there.
            events: std::mem::replace(&mut self.events, std::sync::mpsc::channel().1),
            sender: self.sender.clone(),
            door: door.clone(),
            listeners,
            next_connection,
            ending: false,
            noticed: VecDeque::new(),
            put_off: VecDeque::new(),
            looked: false,
            knocking: Knocking::default(),
        };
        (members, Admission { door, session })
    }

    /// A session before its first round.
    pub(super) fn begin(
        self,
        min_clients: usize,
        lanes: Lanes,
        members: Members,
        phase: Phase,
        heartbeat: Heartbeat,
        admission: Admission,
    ) -> Session {
        let Aggregator { config, pool, ready, .. } = self;
        Session {
            upload: Upload {
                receive_path: config.receive_path,
                order: config.order,
                min_clients,
                round_deadline: config.round_deadline,
                updates: config.updates,
                before: None,
            },
            averaging: config.averaging,
            config,
            lanes,
            members,
            counted: Vec::new(),
            wave: None,
            pool,
            ready,
            model: None,
            round: 0,
            sent: None,
            unsent: false,
            kept: None,
            experience: Experience::default(),
            phases: vec![phase],
            updates: Vec::new(),
            tree: None,
            _heartbeat: heartbeat,
            _admission: admission,
        }
    }
}

impl Members {
    /// Waits until everyone's data channels are open, and for the memory of the rounds.
    fn await_all(
        &mut self,
        mut warmed: Option<Phase>,
        min_clients: usize,
    ) -> Result<Phase, AggregatorError> {
        loop {
            let awaited = self.peers.iter().any(|peer| !peer.is_gone() && peer.up().is_none());
            if !awaited && let Some(warmed) = warmed.take() {
                return Ok(warmed);
            }
            match self.next(None)? {
                Notice::Warm(phase) => warmed = Some(phase),
                Notice::Message(peer, _) => {
                    let connection = self.peers[peer].up().map_or(0, |up| up.id);
                    let fault = unexpected("a message");
                    self.drop_connection(peer, connection, fault);
                }
                Notice::Gone(peer, fault) => self.check_quorum(min_clients, peer, fault)?,
                _ => {}
            }
        }
    }

    /// Whether enough clients are left now that one is gone.
    pub fn check_quorum(
        &self,
        min_clients: usize,
        peer: usize,
        fault: Fault,
    ) -> Result<(), AggregatorError> {
        let left = self.peers.iter().filter(|peer| !peer.is_gone()).count();
        if left < min_clients {
            return Err(self.peers[peer].fault(fault));
        }
        tracing::warn!("{}: {fault}; {left} clients are left", self.peers[peer].label());
        Ok(())
    }
}
