//! Waits for the clients, checks what they bring, and agrees with them on how bytes will travel.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::rand::{GetRandomFlags, getrandom};

use super::door::Tickets;
use super::{
    Admission, Aggregator, AggregatorConfig, Averaging, Event, Joined, Peer, PeerShared, Session,
    Sizes, read_client,
};
use crate::channel::DataChannel;
use crate::control::{ControlChannel, Heartbeat, Listeners, printable};
use crate::error::{AggregatorError, Fault, ReducerError};
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::{Meter, Phase};
use crate::reducer::{AccumulatorLayout, Weights};
use crate::signal::Signal;
use crate::sink::mean::TileMemory;
use crate::sums::SumTable;
use crate::wire::hello::bind_ticket;
use crate::wire::message::{AggregatorMessage, ClientMessage, Plan};

impl Aggregator {
    /// Waits until all clients have joined with the same model, then opens their data channels.
    /// `manifest` is that of an initial model; without one the first client's counts.
    ///
    /// # Errors
    /// A client that leaves, brings another model or a weight or name that cannot be used ends
    /// the session for all; the error names it.
    pub fn gather(self, manifest: Option<Manifest>) -> Result<Session, AggregatorError> {
        let listeners = Listeners::default();
        let deadline = self.config.deadline;
        let beat =
            |deadline| Heartbeat::start(listeners.clone(), AggregatorMessage::Alive, deadline);
        let heartbeat = beat(deadline)?;
        // Until a client knows the plan, its own deadline counts, and that is not known here.
        let _early = beat(limits::MIN_DEADLINE)?;
        let mut gathering = Gathering {
            aggregator: self,
            model: None,
            peers: Vec::new(),
            listeners: listeners.clone(),
            warmed: None,
        };
        if let Some(manifest) = manifest {
            gathering.set_model(manifest)?;
        }
        match gathering.collect().and_then(|()| gathering.connect()) {
            Ok(agreed) => Ok(gathering.into_session(agreed, heartbeat)),
            Err(error) => {
                tell_all(&gathering.peers, &error.to_string());
                Err(error)
            }
        }
    }
}

/// Tells every client why the session ends, so that each can say it.
pub(super) fn tell_all(peers: &[Peer], reason: &str) {
    let reason = printable(reason);
    for peer in peers {
        // A client that is gone need not hear it.
        let _ = peer.writer.send(&AggregatorMessage::Failed { reason: reason.clone() });
    }
}

/// Where the sums of this model go, if there is a mean.
fn accumulator_layout(
    config: &AggregatorConfig,
    manifest: &Manifest,
) -> Result<Option<AccumulatorLayout>, AggregatorError> {
    if matches!(config.averaging, Averaging::Keep | Averaging::Checksum | Averaging::Discard) {
        return Ok(None);
    }
    Ok(Some(AccumulatorLayout::of(manifest)?))
}

struct Gathering {
    aggregator: Aggregator,
    /// Known from the first client on; the layout is absent when updates are dropped.
    model: Option<(Manifest, Option<AccumulatorLayout>)>,
    peers: Vec<Peer>,
    listeners: Listeners,
    /// How the memory of the rounds was prepared, once it is.
    warmed: Option<Phase>,
}

/// What has been agreed on.
struct Agreed {
    manifest: Manifest,
    layout: Option<AccumulatorLayout>,
    chunks: ChunkTable,
    lanes: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
    weights: Weights,
    warmed: Phase,
    admission: Admission,
}

impl Gathering {
    fn collect(&mut self) -> Result<(), AggregatorError> {
        while self.peers.len() < self.aggregator.config.clients {
            match self.next_event()? {
                Event::Joined(joined) => self.join(*joined)?,
                event => self.hear(event)?,
            }
        }
        self.peers.sort_by(|a, b| (a.rank, &a.name).cmp(&(b.rank, &b.name)));
        Ok(())
    }

    fn next_event(&self) -> Result<Event, AggregatorError> {
        // The door keeps a sender as long as this lives.
        self.aggregator.events.recv().map_err(|_| io::Error::other("the listener ended").into())
    }

    /// Fixes the session's model, and begins to take the memory of its rounds while other clients
    /// are awaited.
    fn set_model(&mut self, manifest: Manifest) -> Result<(), AggregatorError> {
        let config = &self.aggregator.config;
        let layout = accumulator_layout(config, &manifest)?;
        let sizes = Sizes::new(config, &manifest, layout.as_ref());
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
        let (token, error) = match event {
            Event::Warm { result } => {
                self.warmed = Some(result?);
                return Ok(());
            }
            Event::Lost { client, error } => (client, Fault::from(error)),
            Event::Message { client, message: ClientMessage::Failed { reason } } => {
                (client, Fault::GaveUp { reason: printable(&reason) })
            }
            Event::Message { client, .. } => (client, unexpected("a message")),
            Event::Joined(joined) => {
                refuse_late(&joined.channel, joined.address, self.aggregator.config.clients);
                return Ok(());
            }
            Event::Stream { .. } | Event::Lane { .. } => return Ok(()),
        };
        match self.peers.iter().find(|peer| peer.token == token) {
            Some(peer) => Err(peer.fault(error)),
            None => Ok(()),
        }
    }

    fn join(&mut self, joined: Joined) -> Result<(), AggregatorError> {
        let Joined { channel, address, name, examples, header, secret, frame, rank, .. } = joined;
        let ticket = random()?;
        let key = bind_ticket(&ticket, &secret, &frame);
        let wants_header = header.is_empty() && self.model.is_some();
        let deadline = self.aggregator.config.deadline;
        let token = self.peers.len();
        channel.set_deadline(deadline)?;
        let ControlChannel { reader: incoming, writer } = channel;
        let taken = self.peers.iter().any(|peer| (peer.rank, &peer.name) == (rank, &name));
        let streams = Vec::new();
        let shared = Arc::new(PeerShared::default());
        let (reader, events) = (None, self.aggregator.sender.clone());
        self.peers.push(Peer {
            token,
            rank,
            name,
            address,
            examples,
            writer,
            shared,
            reader,
            streams,
            ticket,
            key,
            wants_header,
        });
        let peer = self.peers.last_mut().expect("pushed above");
        let checked = check_name(&peer.name, taken)
            .and_then(|()| check_examples(examples))
            .and_then(|()| check_model(self.model.as_ref().map(|(m, _)| m), &header));
        let manifest = checked.map_err(|error| peer.fault(error))?;
        let shared = peer.shared.clone();
        let reader = std::thread::Builder::new().name("control".into());
        peer.reader = Some(reader.spawn(move || read_client(incoming, token, &shared, &events))?);
        let writer = peer.writer.clone();
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(writer);
        let wanted = self.aggregator.config.clients;
        tracing::info!(
            "{} joined with {examples} examples ({} of {wanted})",
            peer.label(),
            token + 1
        );
        if self.model.is_none() { self.set_model(manifest) } else { Ok(()) }
    }

    /// Weights are numbered; people know clients by name.
    fn blame(&self, error: ReducerError) -> AggregatorError {
        let (client, why) = match error {
            ReducerError::WeightTooSmall { client, .. } => {
                (client, "is too small beside the others; set it to zero")
            }
            ReducerError::WeightSum { client, .. } => {
                (client, "makes their sum overflow; scale all of them down")
            }
            error => return error.into(),
        };
        let peer = &self.peers[client];
        peer.fault(Fault::Weight { examples: peer.examples, why })
    }

    /// Sends each client its plan, and waits for its data channels and for the memory.
    fn connect(&mut self) -> Result<Agreed, AggregatorError> {
        let config = &self.aggregator.config;
        let (manifest, layout) = self.model.clone().ok_or_else(|| io::Error::other("no client"))?;
        let examples: Vec<f64> = self.peers.iter().map(|peer| peer.examples).collect();
        let weights = Weights::new(&examples).map_err(|error| self.blame(error))?;
        let chunks = manifest.chunks(config.chunk_bytes)?;
        // More lanes than chunks would leave some without work.
        let lanes = chunks.lanes(config.streams.min(chunks.len().max(1)));
        let mut signals = Vec::new();
        for _ in &lanes {
            signals.push(Arc::new(Signal::new()?));
        }
        for peer in &self.peers {
            // Nothing else sets it.
            let _ = peer.shared.sums.set(SumTable::new(&lanes, &signals));
        }
        let admission = self.send_plans(&manifest, lanes.len())?;
        self.await_streams(lanes.len())?;
        let warmed = loop {
            match self.warmed.take() {
                Some(phase) => break phase,
                None => {
                    let event = self.next_event()?;
                    self.hear(event)?;
                }
            }
        };
        Ok(Agreed { manifest, layout, chunks, lanes, signals, weights, warmed, admission })
    }

    fn send_plans(
        &self,
        manifest: &Manifest,
        streams: usize,
    ) -> Result<Admission, AggregatorError> {
        let config = &self.aggregator.config;
        let session = random()?;
        let clients: HashMap<_, _> = (self.peers.iter().enumerate())
            .map(|(index, peer)| (index as u32, (peer.key, vec![false; streams])))
            .collect();
        let (door, events) = (self.aggregator.door.clone(), self.aggregator.sender.clone());
        door.admit(session, Tickets { streams: streams as u32, clients, events });
        let admission = Admission { door, session };
        for (index, peer) in self.peers.iter().enumerate() {
            let plan = Plan {
                session,
                client: index as u32,
                ticket: peer.ticket,
                streams: streams as u32,
                chunk_bytes: config.chunk_bytes,
                rounds: config.rounds,
                deadline_ms: config.deadline.as_millis() as u64,
                header: if peer.wants_header { manifest.header().to_vec() } else { Vec::new() },
            };
            let sent = peer.writer.send(&AggregatorMessage::Plan(plan));
            sent.map_err(|error| peer.fault(error))?;
        }
        Ok(admission)
    }

    fn await_streams(&mut self, streams: usize) -> Result<(), AggregatorError> {
        let deadline = self.aggregator.config.deadline;
        // Each connection that comes is progress.
        let mut patience = Instant::now() + deadline;
        let mut places: Vec<Vec<Option<DataChannel>>> =
            self.peers.iter().map(|_| (0..streams).map(|_| None).collect()).collect();
        let mut missing = self.peers.len() * streams;
        while missing > 0 {
            let left = patience.saturating_duration_since(Instant::now());
            match self.aggregator.events.recv_timeout(left) {
                Ok(Event::Stream { client, stream, channel }) => {
                    places[client as usize][stream as usize] = Some(channel);
                    missing -= 1;
                    patience = Instant::now() + deadline;
                }
                Ok(event) => self.hear(event)?,
                Err(_) => return Err(self.streams_missing(&places)),
            }
        }
        for (peer, streams) in self.peers.iter_mut().zip(places) {
            peer.streams = streams.into_iter().flatten().collect();
        }
        Ok(())
    }

    fn streams_missing(&self, places: &[Vec<Option<DataChannel>>]) -> AggregatorError {
        let incomplete = self.peers.iter().zip(places).find(|(_, p)| p.iter().any(Option::is_none));
        match incomplete {
            Some((peer, places)) => AggregatorError::Client {
                client: peer.label(),
                error: Fault::Streams {
                    opened: places.iter().flatten().count(),
                    wanted: places.len(),
                },
            },
            None => io::Error::other("the listener ended").into(),
        }
    }

    fn into_session(self, agreed: Agreed, heartbeat: Heartbeat) -> Session {
        let Aggregator { config, pool, ready, events, sender, .. } = self.aggregator;
        Session {
            config,
            manifest: agreed.manifest,
            chunks: agreed.chunks,
            buffers: agreed.lanes.iter().map(|_| Mutex::default()).collect(),
            tiles: agreed.lanes.iter().map(|_| TileMemory::default()).collect(),
            lanes: agreed.lanes,
            signals: agreed.signals,
            layout: agreed.layout,
            weights: agreed.weights,
            wave: None,
            peers: self.peers,
            pool,
            ready,
            model: None,
            round: 0,
            phases: vec![agreed.warmed],
            updates: Vec::new(),
            events,
            sender,
            _heartbeat: heartbeat,
            _admission: agreed.admission,
        }
    }
}

/// Somebody came when the session was complete already.
pub(super) fn refuse_late(channel: &ControlChannel, address: SocketAddr, clients: usize) {
    tracing::warn!(
        "a client at {address} came too late: all {clients} clients have joined already"
    );
    refuse(channel, &format!("all {clients} clients have joined already"));
}

/// Tells a visitor why he cannot stay.
pub(crate) fn refuse(channel: &ControlChannel, reason: &str) {
    // A visitor that is gone need not hear it.
    let _ = channel.writer.send(&AggregatorMessage::Failed { reason: reason.to_owned() });
}

pub(super) fn unexpected(what: &'static str) -> Fault {
    let error = crate::error::ProtocolError::Unexpected { what };
    Fault::Control(error.into())
}

fn check_name(name: &str, taken: bool) -> Result<(), Fault> {
    match name {
        _ if taken => {
            Err(Fault::Name { why: "is taken by another client; give each its own --name" })
        }
        "" => Err(Fault::Name { why: "is empty" }),
        _ => Ok(()),
    }
}

fn check_examples(examples: f64) -> Result<(), Fault> {
    if examples.is_finite() && examples >= 0.0 { Ok(()) } else { Err(Fault::Examples { examples }) }
}

/// The manifest behind a client's header, if it is the session's; an empty header asks for that.
fn check_model(session: Option<&Manifest>, header: &[u8]) -> Result<Manifest, Fault> {
    if let (Some(session), true) = (session, header.is_empty()) {
        return Ok(session.clone());
    }
    let client = Manifest::from_header(header)?;
    match session.and_then(|session| session.first_difference(&client)) {
        Some(difference) => Err(Fault::Model { difference }),
        None => Ok(client),
    }
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom(bytes.as_mut_slice(), GetRandomFlags::empty())?;
    if filled < N { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}
