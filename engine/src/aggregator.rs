//! The process that averages: waits for its clients, runs rounds, sends the model back.

mod broadcast;
pub(crate) mod door;
mod gather;
mod keep;
mod loss;
mod members;
mod round;
mod tree;
mod upload;

use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::channel::DataChannel;
use crate::control::{self, Congestion, ControlChannel, Heartbeat, Reader, printable};
use crate::error::{AggregatorError, ControlError, LaneError, ProtocolError};
use crate::lane::ConnectionId;
use crate::lane::receive::{ChunkBuffers, Order, ReceiveReport};
use crate::lane::send::SendBroken;
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::Phase;
use crate::paths::{ReceiveKind, SendKind};
use crate::pool::RegionPool;
use crate::quota::{Quota, Share};
use crate::reducer::{AccumulatorLayout, Weights};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::mean::{TileMemory, Wave};
use crate::state::{Record, StateDir};
use crate::sums::SumTable;
use crate::sys::process;
use crate::tls::ServerTls;
use crate::topology::tree::Hearing;
use crate::verdict::{Findings, UpdatePolicy, UpdateReport};
use crate::wire::hello::{Place, Secret, SessionId, Ticket};
use crate::wire::message::{AggregatorMessage, ClientMessage};

use door::{Door, Reception, Visit};
pub(crate) use gather::{check_examples, check_model, check_name, refuse};
use keep::Kept;
use loss::Experience;
pub use loss::OnLoss;
use members::{Members, Notice};
use tree::Tree;

/// What happens to the updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averaging {
    /// Averaged while they arrive.
    Streaming,
    /// Added to the sums of clients who came in earlier sessions.
    Wave,
    /// Received whole, every client's into a region of its own, and averaged after: for norms, for
    /// [`OnLoss::Spool`], and as the baseline that streaming is measured against.
    Spool,
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
    /// Clients without whom there is no mean; all of them if this is not said.
    pub min_clients: Option<usize>,
    /// How long a round waits for updates, training included, before it goes on without those that
    /// are late.
    pub round_deadline: Option<Duration>,
    /// How long a client whose connection broke may take to come back; zero for never.
    pub reconnect: Duration,
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
    /// What clients must know to be let in; [`Secret::OPEN`] lets in everyone.
    pub secret: Secret,
    /// TLS on all connections; without it nothing is encrypted.
    pub tls: Option<ServerTls>,
    /// Whether everyone may join also from other hosts.
    pub insecure: bool,
    /// What is done with bad updates.
    pub updates: UpdatePolicy,
    /// What is done about clients that are lost in mid-upload, where updates are averaged.
    pub on_loss: OnLoss,
    /// A directory in which the session is kept: a process that is started with it again goes on with
    /// the session, as it was. The memory of the rounds are files there.
    pub state: Option<PathBuf>,
    /// Whether clients may be edges, which bring the sums of clients of their own: `docs/WIRE.md`
    /// says how. [`Session::leaves`] then names all whose updates are in the mean.
    pub tree: bool,
    /// Bytes of the largest model that the first client may bring, where there is no initial one. What
    /// the host has no memory for is refused in any case.
    pub max_model_bytes: u64,
}

impl Default for AggregatorConfig {
    fn default() -> Self {
        AggregatorConfig {
            clients: 1,
            min_clients: None,
            round_deadline: None,
            reconnect: limits::DEADLINE,
            rounds: 1,
            streams: default_streams(),
            chunk_bytes: limits::CHUNK_BYTES,
            deadline: limits::DEADLINE,
            order: Order::Arrival,
            averaging: Averaging::Streaming,
            receive_path: ReceiveKind::default(),
            send_path: None,
            congestion: Congestion::Auto,
            secret: Secret::OPEN,
            tls: None,
            insecure: false,
            updates: UpdatePolicy::default(),
            on_loss: OnLoss::default(),
            state: None,
            tree: false,
            max_model_bytes: limits::MAX_MODEL_BYTES,
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
        connection: ConnectionId,
        stream: u32,
        channel: DataChannel,
    },
    Message {
        connection: ConnectionId,
        message: ClientMessage,
        /// Given back when somebody has heard it.
        _unheard: Share,
    },
    Lost {
        connection: ConnectionId,
        error: ControlError,
    },
    /// From a lane that receives.
    Received {
        lane: usize,
        report: ReceiveReport,
    },
    /// From a lane that sends.
    SendBroken(SendBroken),
    /// The end of a lane.
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
    /// The ticket of its last plan, if it comes again.
    pub resumes: Option<Ticket>,
    /// Clients are ordered by rank, and those of one rank by name.
    pub rank: usize,
    /// Whether it brings the sums of clients of its own.
    pub is_edge: bool,
    /// Given back when somebody has looked at it: as long as it waits it holds its connection and the
    /// header of its model.
    pub seat: Option<(Share, Share)>,
}

/// Clients that may wait to be looked at.
pub(crate) struct WaitingRoom {
    seats: Arc<Quota>,
    header_bytes: Arc<Quota>,
}

impl WaitingRoom {
    pub(crate) fn new(clients: usize) -> WaitingRoom {
        let seats = Quota::new((clients + limits::MAX_LATE) as u64);
        WaitingRoom { seats, header_bytes: Quota::new(limits::MAX_JOINED_BYTES) }
    }

    pub(crate) fn seat(&self, client: &Joined) -> Option<(Share, Share)> {
        self.seats.take(1).zip(self.header_bytes.take(client.header.len() as u64))
    }
}

impl Joined {
    /// For logs and errors.
    pub fn label(&self) -> String {
        label(&self.name, self.address)
    }
}

pub(crate) fn label(name: &str, address: SocketAddr) -> String {
    format!("client \"{name}\" ({address})")
}

/// A listening aggregator that has no clients yet.
pub struct Aggregator {
    config: AggregatorConfig,
    address: SocketAddr,
    door: Arc<Door>,
    pool: Arc<RegionPool>,
    /// Where the session is kept, and one that is there already.
    state: Option<(Arc<StateDir>, Option<Record>)>,
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
        let config = config.settled();
        let visitors = allow_connections(&config)?;
        // First: an aggregator that was just killed may still have both the state and the port.
        let state = config.state.as_ref().map(|path| keep::open(path, &config)).transpose()?;
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &config.congestion).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let is_open = config.secret == Secret::OPEN && config.tls.is_none() && !config.insecure;
        refuse_open(is_open, bound)?;
        let (sender, events) = std::sync::mpsc::channel();
        let joined = sender.clone();
        let secret = config.secret;
        let waiting = WaitingRoom::new(config.clients);
        let reception = Reception {
            secret: Box::new(move |place| (*place == secret.place()).then_some(secret)),
            welcome: Box::new(move |visit| match visit {
                Visit::Join(mut client) => match waiting.seat(&client) {
                    // Nobody listens any more when the session has ended; the socket then closes.
                    Some(seat) => {
                        client.seat = Some(seat);
                        drop(joined.send(Event::Joined(client)));
                    }
                    None => refuse(&client.channel, "too many others want to join"),
                },
                Visit::Call { channel, .. } => refuse(&channel, "there is no such place here"),
            }),
        };
        let (congestion, tls) = (config.congestion.clone(), config.tls.clone());
        let door = Door::open(listener, congestion, tls, visitors, reception).map_err(listen)?;
        let door = Arc::new(door);
        let pool = Arc::new(match &state {
            Some((directory, _)) => RegionPool::in_directory(directory.clone()),
            None => RegionPool::default(),
        });
        Ok(Aggregator { config, address: bound, door, pool, state, ready: false, events, sender })
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
        let state = None;
        Ok(Aggregator { config, address, door, pool, state, ready: true, events, sender })
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
        self.end(AggregatorError::Cancelled);
    }

    /// Makes it fail with another error.
    pub(crate) fn end(&self, error: AggregatorError) {
        // Nobody listens any more when the session has ended.
        let _ = self.events.send(Event::Warm { result: Err(error) });
    }
}

impl AggregatorConfig {
    /// A norm is known when an update is whole, so updates that may be clipped are averaged after that.
    fn settled(mut self) -> AggregatorConfig {
        let why = match self.updates.clip_norm {
            Some(_) => Some("their norms are needed"),
            None if self.on_loss == OnLoss::Spool => Some("none of them is then sent again"),
            None => None,
        };
        if let (Some(why), Averaging::Streaming) = (why, self.averaging) {
            tracing::info!("updates are received whole before they are averaged: {why}");
            self.averaging = Averaging::Spool;
        }
        self
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
    if let Some(least) = config.min_clients {
        within("min clients", least as u64, 1, config.clients as u64)?;
    }
    within("rounds", config.rounds.into(), 1, limits::MAX_ROUNDS.into())?;
    within("streams", config.streams as u64, 1, limits::MAX_STREAMS as u64)?;
    within("chunk bytes", config.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
    let possible = |norm: &f64| norm.is_finite() && *norm > 0.0;
    if let Some(clip_norm) = config.updates.clip_norm.filter(|norm| !possible(norm)) {
        return Err(AggregatorError::ClipNorm { clip_norm });
    }
    let averages = matches!(config.averaging, Averaging::Streaming | Averaging::Spool);
    for (is_given, what) in [
        (config.updates.clip_norm.is_some(), "--clip-norm"),
        (config.state.is_some(), "--state"),
        (!averages, "--averaging"),
    ] {
        if config.tree && is_given {
            return Err(AggregatorError::Tree { what });
        }
    }
    let deadline_ms = config.deadline.as_millis().min(u64::MAX.into()) as u64;
    within("deadline in ms", deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)
}

/// Lets nobody in by oversight: behind a door that is open to all there must be nothing but this host,
/// unless somebody says so.
pub(crate) fn refuse_open(is_open: bool, bound: SocketAddr) -> Result<(), AggregatorError> {
    match is_open && !bound.ip().to_canonical().is_loopback() {
        true => Err(AggregatorError::Open { address: bound }),
        false => Ok(()),
    }
}

/// Makes room for the connections of all clients, or says now that there is none: later, clients
/// would wait before a door that cannot open. Gives how many visitors there is room for besides.
fn allow_connections(config: &AggregatorConfig) -> Result<usize, AggregatorError> {
    let wanted = descriptors_of(config);
    let limit = process::allow_open_files(wanted + VISITORS_DESCRIPTORS);
    match limit < wanted {
        true => Err(AggregatorError::OpenFiles { clients: config.clients, wanted, limit }),
        false => Ok(visitors_within(limit - wanted)),
    }
}

/// Open files that a session takes.
pub(crate) fn descriptors_of(config: &AggregatorConfig) -> u64 {
    let (clients, streams) = (config.clients as u64, config.streams as u64);
    let sending = config.send_path.map_or_else(SendKind::most_descriptors, SendKind::descriptors);
    let path = sending.max(config.receive_path.descriptors());
    // A control channel is held by its reader and its writer, a data channel by its socket, its
    // chunk buffer and its path; a lane has its signal, its poller and its tiles.
    // An update that is received whole has a region.
    let each_client = 3 + streams * (2 + path);
    let each_lane = 2 + limits::MEAN_TILES as u64 + 1;
    limits::OWN_DESCRIPTORS + streams * each_lane + clients * each_client
}

/// A visitor's socket is held twice, and that of another one by a thread that was made to leave.
const EACH_VISITOR: u64 = 3;

/// Those who are late hold one each.
const VISITORS_DESCRIPTORS: u64 =
    EACH_VISITOR * limits::MAX_VISITORS as u64 + limits::MAX_LATE as u64;

/// How many visitors there may be, so that they do not take the descriptors of clients.
fn visitors_within(descriptors: u64) -> usize {
    let visitors = descriptors.saturating_sub(limits::MAX_LATE as u64) / EACH_VISITOR;
    // At most `MAX_VISITORS`.
    visitors.min(limits::MAX_VISITORS as u64).max(limits::MIN_VISITORS as u64) as usize
}

/// What the thread that reads a client's control channel shares with the lanes.
#[derive(Default)]
struct PeerShared {
    sums: OnceLock<SumTable>,
    /// What was found in its update.
    findings: OnceLock<Findings>,
    round: AtomicU32,
    began: AtomicBool,
    /// It is an edge, and this is what it said of its sums.
    edge: Option<Mutex<Hearing>>,
    /// Bytes of the update that came, and of the model that went, in this round.
    came: AtomicU64,
    sent: AtomicU64,
}

impl PeerShared {
    /// Of a client of a session whose model is cut like that.
    fn of(lanes: &Lanes) -> PeerShared {
        let shared = PeerShared::default();
        shared.cut(lanes);
        shared
    }

    /// The model is known.
    fn cut(&self, lanes: &Lanes) {
        // Nothing else sets them.
        let _ = self.sums.set(SumTable::new(&lanes.ranges, &lanes.signals));
        let _ = self.findings.set(Findings::new(lanes.chunks.len()));
    }
}

/// An aggregator with all its clients.
pub struct Session {
    config: AggregatorConfig,
    lanes: Lanes,
    upload: upload::Upload,
    members: Members,
    /// Whose updates are in the newest mean.
    counted: Vec<bool>,
    /// Of [`Averaging::Wave`]: the weights, and the sums so far.
    wave: Option<(Weights, Wave, Region)>,
    pool: Arc<RegionPool>,
    ready: bool,
    model: Option<Model>,
    round: u32,
    /// The round whose model was sent last.
    sent: Option<u32>,
    /// The model was averaged by an earlier process, and is to be sent.
    unsent: bool,
    /// Where the session is kept on disk.
    kept: Option<Kept>,
    /// How the newest round averages.
    averaging: Averaging,
    experience: Experience,
    phases: Vec<Phase>,
    /// What was found in the updates of the newest round.
    updates: Vec<UpdateReport>,
    /// Where clients may be edges.
    tree: Option<Tree>,
    // Dropped last: they end threads.
    _heartbeat: Heartbeat,
    _admission: Admission,
}

/// How the model is cut up, and what is kept warm for each lane.
struct Lanes {
    chunks: ChunkTable,
    ranges: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
    /// Of each lane, which holds the lock while it receives.
    buffers: Vec<Mutex<ChunkBuffers>>,
    tiles: Vec<TileMemory>,
    /// Absent when updates are dropped.
    layout: Option<AccumulatorLayout>,
    /// What is cut up, where that is the sums of the model and not the model.
    sums: Option<Manifest>,
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
    spool: Vec<u64>,
}

impl Sizes {
    fn new(
        config: &AggregatorConfig,
        averaging: Averaging,
        manifest: &Manifest,
        layout: Option<&AccumulatorLayout>,
    ) -> Sizes {
        let model_bytes = manifest.data_bytes();
        let copies = match averaging {
            Averaging::Spool | Averaging::Keep => config.clients,
            _ => 0,
        };
        // Chunk after chunk from every client, sums never leave their tile, unless they are kept.
        let in_turn = averaging == Averaging::Streaming
            && config.order == Order::Client
            && config.state.is_none();
        let wave = averaging == Averaging::Wave;
        let holds_sums = |layout: &&AccumulatorLayout| !wave && (layout.is_in_place() || !in_turn);
        Sizes {
            // Sums of a tree go on as they are.
            accumulator: layout
                .filter(|layout| config.tree || holds_sums(layout))
                .map(AccumulatorLayout::bytes),
            model: layout
                .filter(|layout| !wave && !config.tree && !layout.is_in_place())
                .map(|_| model_bytes),
            spool: vec![model_bytes; copies],
        }
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        self.accumulator.into_iter().chain(self.model).chain(self.spool.iter().copied())
    }
}

/// Reads one client's control channel until it ends. `note` takes what it can, and gives back what the
/// session must decide on.
pub(crate) fn read_client(
    mut reader: Reader,
    connection: ConnectionId,
    events: &Sender<Event>,
    note: impl Fn(ClientMessage) -> Result<Option<ClientMessage>, ProtocolError>,
) {
    let unheard = Quota::new(limits::MAX_UNHEARD_BYTES);
    loop {
        let event = match hear(&mut reader, &note, &unheard) {
            Ok(None) => continue,
            Ok(Some((message, share))) => Event::Message { connection, message, _unheard: share },
            Err(error) => Event::Lost { connection, error },
        };
        let last = matches!(event, Event::Lost { .. });
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Reads one message, and gives it with its share of what may wait to be heard, if the session must
/// decide on it.
fn hear(
    reader: &mut Reader,
    note: &impl Fn(ClientMessage) -> Result<Option<ClientMessage>, ProtocolError>,
    unheard: &Arc<Quota>,
) -> Result<Option<(ClientMessage, Share)>, ControlError> {
    let bytes = reader.read_length(limits::MAX_SHORT_FRAME_BYTES)?;
    let Some(message) = note(reader.read_body(bytes)?)? else { return Ok(None) };
    let share = unheard.take(bytes + limits::UNHEARD_BYTES).ok_or(ProtocolError::Flood)?;
    Ok(Some((message, share)))
}

/// Takes what concerns the lanes; gives back what the session must decide on.
fn note(
    message: ClientMessage,
    shared: &PeerShared,
) -> Result<Option<ClientMessage>, ProtocolError> {
    match message {
        ClientMessage::Alive => Ok(None),
        ClientMessage::Sums { first, sums } => {
            let table = shared.sums.get().ok_or(ProtocolError::Unexpected { what: "checksums" })?;
            table.announce(first, &sums)?;
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
        ClientMessage::Leaves { .. } => tree::note(message, shared),
        other => Ok(Some(other)),
    }
}

impl Drop for Session {
    /// Clients that hear nothing would dial again for long. Those of an exchange shall.
    fn drop(&mut self) {
        if !self.ready && !self.members.ending {
            self.give_up("it was given up before all rounds were done");
        }
    }
}

impl Session {
    /// Clients of the session: name, address and weight, in client order.
    pub fn clients(&self) -> impl Iterator<Item = (&str, SocketAddr, f64)> {
        let peers = self.members.peers.iter();
        peers.map(|peer| (peer.name.as_str(), peer.address, peer.examples))
    }

    /// The model's manifest: that of the initial model, else of the first client.
    pub fn manifest(&self) -> &Manifest {
        &self.members.terms.manifest
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

    /// What was found in the updates of the newest round, and what was done with each; in client
    /// order.
    pub fn updates(&self) -> &[UpdateReport] {
        &self.updates
    }

    /// How far each client is; can be read from another thread.
    pub fn progress(&self) -> Progress {
        let peers = self.members.peers.iter();
        Progress {
            clients: peers.map(|peer| (peer.name.clone(), peer.shared.clone())).collect(),
            model_bytes: self.manifest().data_bytes(),
        }
    }

    /// The round whose model was sent last; 0 is the initial one.
    pub fn sent(&self) -> Option<u32> {
        self.sent
    }

    /// Whether the model of the newest round has yet to be sent, because the process that averaged it
    /// ended: [`Session::broadcast`] comes next, and not a round.
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// Tells every client that this aggregator cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        self.members.tell_all(&AggregatorMessage::Failed { reason: printable(reason) });
    }

    /// Tells every client that all rounds are done. One whose connection is broken may come back
    /// to hear it.
    pub fn finish(mut self) -> Result<Vec<Phase>, AggregatorError> {
        self.end()?;
        Ok(std::mem::take(&mut self.phases))
    }

    pub(crate) fn end(&mut self) -> Result<(), AggregatorError> {
        self.members.ending = true;
        self.members.tell_all(&AggregatorMessage::Done);
        // A client closes when it has read that; only then is it sure to have.
        let until = Instant::now() + self.config.deadline;
        while self.members.peers.iter().any(|peer| !peer.is_gone()) {
            match self.members.next(Some(until))? {
                Notice::Up(peer) => {
                    // Its process began again, and may have lost the model.
                    if self.members.peers[peer].holds != self.sent {
                        self.send_model(0)?;
                    }
                    self.members.tell(peer, &AggregatorMessage::Done);
                }
                Notice::Timeout => break,
                _ => {}
            }
        }
        self.kept.as_ref().map_or(Ok(()), Kept::end)
    }
}
