//! The process that averages: waits for its clients, runs rounds, sends the model back.

pub(crate) mod door;
mod gather;
mod round;

use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::channel::DataChannel;
use crate::control::{self, Congestion, ControlChannel, Heartbeat, Reader, Writer};
use crate::error::{AggregatorError, ControlError, Fault, LaneError, ProtocolError};
use crate::lane::receive::{ChunkBuffers, Order};
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::Phase;
use crate::paths::{ReceiveKind, SendKind};
use crate::reducer::{AccumulatorLayout, Weights};
use crate::region::{Region, RegionPool};
use crate::signal::Signal;
use crate::sink::mean::{TileMemory, Wave};
use crate::sums::SumTable;
use crate::sys::process;
use crate::verdict::{UpdatePolicy, UpdateReport};
use crate::wire::hello::{Place, Secret, SessionId, Ticket};
use crate::wire::message::{AggregatorMessage, ClientMessage};

use door::{Door, Visit};
pub(crate) use gather::refuse;

/// What happens to the updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averaging {
    /// Averaged while they arrive.
    Streaming,
    /// Added to the sums of clients who came in earlier sessions.
    Wave,
    /// Received whole, every client's into a region of its own, and averaged after. The baseline
    /// that streaming is measured against.
    Staged,
    /// Received whole, every client's into a region of its own, and handed over; there is no mean.
    Keep,
    /// Checked and dropped; there is no mean. For benchmarks.
    Checksum,
    /// Dropped unseen; there is no mean. For benchmarks.
    Discard,
}

/// How an aggregator works. [`Default`] gives every field but `clients` a value for daily use.
#[derive(Clone, Debug)]
pub struct AggregatorConfig {
    /// Clients to wait for.
    pub clients: usize,
    /// Rounds that will be run; told to the clients.
    pub rounds: u32,
    /// Lanes, and so data channels of each client.
    pub streams: usize,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Silence after which a peer is given up.
    pub deadline: Duration,
    /// In which order chunks are averaged.
    pub order: Order,
    /// What happens to the updates.
    pub averaging: Averaging,
    /// How updates are received.
    pub receive_path: ReceiveKind,
    /// How the model is sent; without a wish the best that the host offers.
    pub send_path: Option<SendKind>,
    /// Congestion control of the data channels.
    pub congestion: Congestion,
    /// What is done with bad updates.
    pub updates: UpdatePolicy,
}

impl Default for AggregatorConfig {
    fn default() -> Self {
        AggregatorConfig {
            clients: 1,
            rounds: 1,
            streams: default_streams(),
            chunk_bytes: limits::CHUNK_BYTES,
            deadline: limits::DEADLINE,
            order: Order::Arrival,
            averaging: Averaging::Streaming,
            receive_path: ReceiveKind::default(),
            send_path: None,
            congestion: Congestion::Auto,
            updates: UpdatePolicy::default(),
        }
    }
}

/// One lane for each core this process may use: more gain nothing.
pub fn default_streams() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(limits::MAX_STREAMS)
}

/// Something that the session has to react to.
pub(crate) enum Event {
    Joined(Box<Joined>),
    Stream {
        client: u32,
        stream: u32,
        channel: DataChannel,
    },
    Message {
        client: usize,
        message: ClientMessage,
    },
    Lost {
        client: usize,
        error: ControlError,
    },
    Lane {
        result: Result<(), LaneError>,
    },
    /// The memory of the rounds is there, or cannot be had; or the session shall end.
    Warm {
        result: Result<Phase, AggregatorError>,
    },
}

/// A client that wants to join.
pub(crate) struct Joined {
    pub channel: ControlChannel,
    pub address: SocketAddr,
    pub name: String,
    pub examples: f64,
    pub header: Vec<u8>,
    pub place: Place,
    /// What the place is reached with.
    pub secret: Secret,
    /// What it sent, in its frame.
    pub frame: Vec<u8>,
    /// Clients are ordered by rank, and those of one rank by name.
    pub rank: usize,
}

impl Joined {
    /// For logs and errors.
    pub fn label(&self) -> String {
        label(&self.name, self.address)
    }
}

fn label(name: &str, address: SocketAddr) -> String {
    format!("client \"{name}\" ({address})")
}

/// A listening aggregator that has no clients yet.
pub struct Aggregator {
    config: AggregatorConfig,
    address: SocketAddr,
    door: Arc<Door>,
    pool: Arc<RegionPool>,
    /// Whether clients have their updates ready, and need no time to train: bytes are due as soon as
    /// they are asked for.
    ready: bool,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl Aggregator {
    /// Checks `config` and listens on `address`.
    pub fn bind(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: AggregatorConfig,
    ) -> Result<Aggregator, AggregatorError> {
        check(&config)?;
        allow_connections(&config)?;
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &config.congestion).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let (sender, events) = std::sync::mpsc::channel();
        let joined = sender.clone();
        let welcome = Box::new(move |visit| match visit {
            // Nobody listens any more when the session has ended; the socket then closes.
            Visit::Join(client) if client.place == Secret::OPEN.place() => {
                drop(joined.send(Event::Joined(client)));
            }
            Visit::Join(client) => refuse(&client.channel, "there is no such place here"),
            Visit::Call { channel, .. } => refuse(&channel, "there is no such place here"),
        });
        let door = Door::open(listener, config.congestion.clone(), welcome).map_err(listen)?;
        let (door, pool) = (Arc::new(door), Arc::default());
        Ok(Aggregator { config, address: bound, door, pool, ready: false, events, sender })
    }

    /// An aggregator for clients who have come through `door` already, ready to send, with memory
    /// from `pool`.
    pub(crate) fn of(
        door: Arc<Door>,
        address: SocketAddr,
        pool: Arc<RegionPool>,
        mut config: AggregatorConfig,
        clients: Vec<Joined>,
    ) -> Result<Aggregator, AggregatorError> {
        config.clients = clients.len();
        check(&config)?;
        allow_connections(&config)?;
        let (sender, events) = std::sync::mpsc::channel();
        for client in clients {
            // The other end is held here.
            let _ = sender.send(Event::Joined(Box::new(client)));
        }
        Ok(Aggregator { config, address, door, pool, ready: true, events, sender })
    }

    /// Where clients can dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends this aggregator, or the session that it becomes, from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller { events: self.sender.clone() }
    }
}

/// Ends an aggregator from another thread, whatever it waits for.
#[derive(Clone)]
pub struct Canceller {
    events: Sender<Event>,
}

impl Canceller {
    /// Makes the call that runs, or else the next one, fail with [`AggregatorError::Cancelled`],
    /// and the clients hear of it.
    pub fn cancel(&self) {
        // Nobody listens any more when the session has ended.
        let _ = self.events.send(Event::Warm { result: Err(AggregatorError::Cancelled) });
    }
}

fn check(config: &AggregatorConfig) -> Result<(), AggregatorError> {
    let within = |what, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            Ok(())
        } else {
            Err(AggregatorError::Config { what, value, least, most })
        }
    };
    within("clients", config.clients as u64, 1, limits::MAX_CLIENTS as u64)?;
    within("rounds", config.rounds.into(), 1, limits::MAX_ROUNDS.into())?;
    within("streams", config.streams as u64, 1, limits::MAX_STREAMS as u64)?;
    within("chunk bytes", config.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
    let possible = |norm: &f64| norm.is_finite() && *norm > 0.0;
    if let Some(clip_norm) = config.updates.clip_norm.filter(|norm| !possible(norm)) {
        return Err(AggregatorError::ClipNorm { clip_norm });
    }
    let deadline_ms = config.deadline.as_millis().min(u64::MAX.into()) as u64;
    within("deadline in ms", deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)
}

/// Makes room for the connections of all clients, or says now that there is none: later, clients
/// would wait before a door that cannot open.
fn allow_connections(config: &AggregatorConfig) -> Result<(), AggregatorError> {
    let (clients, streams) = (config.clients as u64, config.streams as u64);
    let sending = config.send_path.map_or_else(SendKind::most_descriptors, SendKind::descriptors);
    let path = sending.max(config.receive_path.descriptors());
    // A control channel is held by its reader and its writer, a data channel by its socket, its
    // chunk buffer and its path; a lane has its signal, its poller and its tiles.
    let each_client = 2 + streams * (2 + path);
    let each_lane = 2 + limits::MEAN_TILES as u64 + 1;
    let wanted = limits::OWN_DESCRIPTORS + streams * each_lane + clients * each_client;
    let limit = process::allow_open_files(wanted);
    match limit < wanted {
        true => Err(AggregatorError::OpenFiles { clients: config.clients, wanted, limit }),
        false => Ok(()),
    }
}

/// A client of the session.
struct Peer {
    /// Its number in events, by time of arrival. Its place in the session is by rank and name.
    token: usize,
    rank: usize,
    name: String,
    address: SocketAddr,
    examples: f64,
    writer: Arc<Writer>,
    shared: Arc<PeerShared>,
    reader: Option<JoinHandle<()>>,
    streams: Vec<DataChannel>,
    ticket: Ticket,
    /// The ticket, bound to what the client joined with.
    key: Ticket,
    /// Whether it asked to be told the model's header.
    wants_header: bool,
}

/// What the thread that reads a client's control channel shares with the lanes.
#[derive(Default)]
struct PeerShared {
    sums: OnceLock<SumTable>,
    round: AtomicU32,
    began: AtomicBool,
    /// Bytes of the update that came, and of the model that went, in this round.
    came: AtomicU64,
    sent: AtomicU64,
}

impl Peer {
    fn label(&self) -> String {
        label(&self.name, self.address)
    }

    fn fault(&self, error: impl Into<Fault>) -> AggregatorError {
        AggregatorError::Client { client: self.label(), error: error.into() }
    }
}

impl Drop for Peer {
    /// However a session ends, also before it began, no thread and no connection outlive it.
    fn drop(&mut self) {
        self.writer.shut_down();
        if let Some(reader) = self.reader.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = reader.join();
        }
    }
}

/// An aggregator with all its clients.
pub struct Session {
    config: AggregatorConfig,
    manifest: Manifest,
    chunks: ChunkTable,
    lanes: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
    /// Of each lane, which holds the lock while it receives.
    buffers: Vec<Mutex<ChunkBuffers>>,
    tiles: Vec<TileMemory>,
    /// Absent when updates are dropped.
    layout: Option<AccumulatorLayout>,
    weights: Weights,
    /// Of [`Averaging::Wave`]: the sums so far.
    wave: Option<(Wave, Region)>,
    peers: Vec<Peer>,
    pool: Arc<RegionPool>,
    ready: bool,
    model: Option<Model>,
    round: u32,
    phases: Vec<Phase>,
    /// What came in each round, for all rounds.
    updates: Vec<UpdateReport>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    // Dropped last: they end threads.
    _heartbeat: Heartbeat,
    _admission: Admission,
}

/// Lets the data channels of a session in as long as it lives.
struct Admission {
    door: Arc<Door>,
    session: SessionId,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.door.dismiss(&self.session);
    }
}

/// The model of the last round, or the initial one, and the checksums of its chunks.
struct Model {
    region: Arc<Region>,
    sums: Vec<u64>,
}

/// How far each client is, for progress displays.
#[derive(Clone)]
pub struct Progress {
    clients: Vec<(String, Arc<PeerShared>)>,
    model_bytes: u64,
}

/// One client's progress.
pub struct ClientProgress<'a> {
    /// Its name.
    pub name: &'a str,
    /// Bytes of its update that have come in this round.
    pub uploaded_bytes: u64,
    /// Bytes of the model that have been sent to it in this round.
    pub downloaded_bytes: u64,
}

impl Progress {
    /// Bytes of the model: what each client uploads and downloads in a round.
    pub fn model_bytes(&self) -> u64 {
        self.model_bytes
    }

    /// Every client's progress, in client order.
    pub fn clients(&self) -> impl Iterator<Item = ClientProgress<'_>> {
        self.clients.iter().map(|(name, shared)| ClientProgress {
            name,
            uploaded_bytes: shared.came.load(Ordering::Relaxed),
            downloaded_bytes: shared.sent.load(Ordering::Relaxed),
        })
    }
}

/// Sizes of the regions that rounds need.
struct Sizes {
    /// Absent when updates are dropped.
    accumulator: Option<u64>,
    /// Absent where the mean takes the place of the sums.
    model: Option<u64>,
    /// One for each client, where updates are received whole before they are averaged.
    staged: Vec<u64>,
}

impl Sizes {
    fn new(
        config: &AggregatorConfig,
        manifest: &Manifest,
        layout: Option<&AccumulatorLayout>,
    ) -> Sizes {
        let model_bytes = manifest.data_bytes();
        let copies = match config.averaging {
            Averaging::Staged | Averaging::Keep => config.clients,
            _ => 0,
        };
        // Chunk after chunk from every client, sums never leave their tile.
        let in_turn = config.averaging == Averaging::Streaming && config.order == Order::Client;
        let wave = config.averaging == Averaging::Wave;
        let holds_sums = |layout: &&AccumulatorLayout| !wave && (layout.is_in_place() || !in_turn);
        Sizes {
            accumulator: layout.filter(holds_sums).map(AccumulatorLayout::bytes),
            model: layout.filter(|layout| !wave && !layout.is_in_place()).map(|_| model_bytes),
            staged: vec![model_bytes; copies],
        }
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        self.accumulator.into_iter().chain(self.model).chain(self.staged.iter().copied())
    }
}

/// Reads one client's control channel until it ends.
fn read_client(mut reader: Reader, client: usize, shared: &PeerShared, events: &Sender<Event>) {
    loop {
        let event = match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(message) => match note(message, shared) {
                Ok(None) => continue,
                Ok(Some(message)) => Event::Message { client, message },
                Err(error) => Event::Lost { client, error: error.into() },
            },
            Err(error) => Event::Lost { client, error },
        };
        let last = matches!(event, Event::Lost { .. });
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Takes what concerns the lanes; gives back what the session must decide on.
fn note(
    message: ClientMessage,
    shared: &PeerShared,
) -> Result<Option<ClientMessage>, ProtocolError> {
    match message {
        ClientMessage::Alive => Ok(None),
        ClientMessage::Sums { stream, sums } => {
            let table = shared.sums.get().ok_or(ProtocolError::Unexpected { what: "checksums" })?;
            table.announce(stream, &sums)?;
            Ok(None)
        }
        ClientMessage::Uploading { round } => {
            let current = shared.round.load(Ordering::SeqCst);
            // The lanes may have all bytes of a round before this thread reads that they come.
            if (1..current).contains(&round) {
                return Ok(None);
            }
            if round != current || round == 0 {
                return Err(ProtocolError::Unexpected { what: "an upload" });
            }
            shared.began.store(true, Ordering::Release);
            Ok(Some(message))
        }
        other => Ok(Some(other)),
    }
}

impl Session {
    /// Clients of the session: name, address and weight, in client order.
    pub fn clients(&self) -> impl Iterator<Item = (&str, SocketAddr, f64)> {
        self.peers.iter().map(|peer| (peer.name.as_str(), peer.address, peer.examples))
    }

    /// The model's manifest: that of the initial model, else of the first client.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The newest model, if there is one. It can be read, from any thread, while it is sent; the
    /// next round takes fresh memory if somebody still holds it.
    pub fn model(&self) -> Option<Arc<Region>> {
        self.model.as_ref().map(|model| model.region.clone())
    }

    /// What was measured so far.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// What was found in the updates so far, and what was done with each; round by round, in client
    /// order.
    pub fn updates(&self) -> &[UpdateReport] {
        &self.updates
    }

    /// How far each client is; can be read from another thread.
    pub fn progress(&self) -> Progress {
        Progress {
            clients: self.peers.iter().map(|p| (p.name.clone(), p.shared.clone())).collect(),
            model_bytes: self.manifest.data_bytes(),
        }
    }

    /// Tells every client that this aggregator cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        gather::tell_all(&self.peers, reason);
    }

    /// Tells every client that all rounds are done.
    pub fn finish(mut self) -> Result<Vec<Phase>, AggregatorError> {
        for peer in &self.peers {
            let sent = peer.writer.send(&AggregatorMessage::Done);
            sent.map_err(|error| peer.fault(error))?;
        }
        // A client closes when it has read that; only then is it sure to have.
        let patience = Instant::now() + self.config.deadline;
        let mut open = self.peers.len();
        while open > 0 {
            match self.events.recv_timeout(patience.saturating_duration_since(Instant::now())) {
                Ok(Event::Lost { .. }) => open -= 1,
                Ok(Event::Warm { result: Err(error) }) => return Err(error),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        Ok(std::mem::take(&mut self.phases))
    }
}
