//! The process that holds trained parameters: joins an aggregator, sends its update, takes the
//! model.

mod link;
mod transfer;

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::control::{Congestion, Reader, Writer, printable};
use crate::error::{ClientError, ControlError, LaneError, ProtocolError, TransferError};
use crate::lane::receive::{ChunkBuffers, ReceiveReport};
use crate::lane::send::SendBroken;
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::Phase;
use crate::paths::{ReceiveKind, SendKind};
use crate::quota::Share;
use crate::reducer::{AccumulatorLayout, WeightScale};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::file::ModelFile;
use crate::sums::SumTable;
use crate::tls::ClientTls;
use crate::wire::hello::Secret;
use crate::wire::message::{AggregatorMessage, ClientMessage, Plan, WireSum};

pub(crate) use link::RingEntry;
use link::{Connected, Dialler, Keeper, Link, is_interruption, not_a_star};
pub(crate) use transfer::Reported;

/// How a client works.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Name for logs and for `order = client`; unique in the session.
    pub name: String,
    /// Number of training examples: its weight in the mean.
    pub examples: f64,
    /// What the aggregator gave out for this transfer, where its port serves many.
    pub secret: Secret,
    /// TLS on all connections, where the aggregator has it.
    pub tls: Option<ClientTls>,
    /// How updates are sent; without a wish the best that source and host offer.
    pub send_path: Option<SendKind>,
    /// How the model is received.
    pub receive_path: ReceiveKind,
    /// Congestion control of the data channels.
    pub congestion: Congestion,
    /// How long dialling may take, and how long the aggregator may be silent before its plan says.
    pub deadline: Duration,
    /// For how long a connection that broke is dialled again; zero for never. If it is not said, the
    /// session's deadline.
    pub reconnect: Option<Duration>,
}

/// What the aggregator wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Take the model of this round; 0 is the initial one.
    Download {
        /// The round.
        round: u32,
        /// Digest of the model.
        digest: [u8; 32],
    },
    /// Send the update of this round.
    Upload {
        /// The round, counted from 1.
        round: u32,
    },
    /// All rounds are done.
    Done,
}

/// What an aggregator of a tree wants next of an edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EdgeTask {
    /// As of every client.
    Task(Task),
    /// Add the clients below to these sums, if there are any.
    Fold { round: u32, scale: WeightScale, seed: Option<[u8; 32]> },
}

/// What an upload of sums came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Uploaded {
    /// The round is over, and the sums are in the mean, or it says why not.
    Applied { left_out: Option<String> },
    /// Others are wanted: the next task says which.
    Again,
}

/// Where a model goes.
pub enum Target<'a> {
    /// Into memory of the model's size.
    Region(&'a mut Region),
    /// Into a file.
    File(&'a ModelFile),
    /// Nowhere: it is checked and dropped.
    Check,
}

/// A client of a running session. Connections that break are made anew, on a thread of its own.
pub struct Client {
    config: ClientConfig,
    lanes: Lanes,
    /// Of an edge: how the sums are cut up that it sends.
    sums: Option<Lanes>,
    line: Line,
    /// The model that it has, once it said so.
    holds: Option<(u32, [u8; 32])>,
    /// The newest round for which it sent an update.
    uploaded: u32,
    phases: Vec<Phase>,
    canceller: Canceller,
    keeper: Option<JoinHandle<()>>,
    stop: Option<Sender<()>>,
}

/// How the model is cut up.
struct Lanes {
    manifest: Manifest,
    chunks: ChunkTable,
    ranges: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
    /// Of each lane, which holds the lock while it receives.
    buffers: Vec<Mutex<ChunkBuffers>>,
}

impl Lanes {
    fn cut(plan: &Plan, manifest: Manifest) -> Result<Lanes, String> {
        let chunks = manifest.chunks(plan.chunk_bytes).map_err(|error| error.to_string())?;
        let ranges = chunks.lanes(plan.streams as usize);
        let signals = ranges.iter().map(|_| Signal::new().map(Arc::new));
        let signals = signals.collect::<std::io::Result<_>>().map_err(|error| error.to_string())?;
        let buffers = ranges.iter().map(|_| Mutex::default()).collect();
        Ok(Lanes { manifest, chunks, ranges, signals, buffers })
    }
}

/// What the thread that keeps the connection shares with the lanes.
struct ClientShared {
    /// Of the model that comes, or came last.
    sums: SumTable,
    /// Of an edge: of the sums that it is to begin from.
    seed: Option<SumTable>,
    /// Which sums, and whether checksums that come are theirs.
    seeded: Mutex<Option<(u32, [u8; 32])>>,
    takes_seed: AtomicBool,
    download: Mutex<Option<(u32, [u8; 32])>>,
    sent: AtomicU64,
    came: AtomicU64,
    /// The transfer of the round has begun.
    began: AtomicBool,
    /// Whether the connection is being made anew.
    dials: AtomicBool,
}

impl ClientShared {
    fn announce(&self, first: u32, sums: &[WireSum]) -> Result<(), ProtocolError> {
        match &self.seed {
            Some(seed) if self.takes_seed.load(Ordering::SeqCst) => seed.announce(first, sums),
            _ => self.sums.announce(first, sums),
        }
    }

    /// Sums are announced. If they are those that are coming already, their checksums stay.
    fn begin_seed(&self, round: u32, digest: [u8; 32]) {
        let mut seeded = self.seeded.lock().unwrap_or_else(PoisonError::into_inner);
        if seeded.replace((round, digest)) != Some((round, digest)) {
            self.seed.iter().for_each(SumTable::clear);
        }
        self.takes_seed.store(true, Ordering::SeqCst);
    }

    /// A model is announced. If it is the one that is coming already, its checksums stay.
    fn begin_download(&self, round: u32, digest: [u8; 32]) {
        self.takes_seed.store(false, Ordering::SeqCst);
        let mut download = self.download.lock().unwrap_or_else(PoisonError::into_inner);
        if download.replace((round, digest)) != Some((round, digest)) {
            self.sums.clear();
        }
    }
}

enum Event {
    Message {
        message: AggregatorMessage,
        /// Given back when somebody has heard it.
        _unheard: Share,
    },
    /// The connection broke; it is dialled again.
    Down,
    /// There is a new connection.
    Up(Box<Link>),
    /// The connection broke for good.
    Lost(ClientError),
    /// A lane ended.
    Lane(Result<(), LaneError>),
    /// From a lane that sends.
    SendBroken(SendBroken),
    /// From a lane that receives.
    Received { lane: usize, report: ReceiveReport },
}

/// How far a client is, for progress displays.
#[derive(Clone)]
pub struct Progress(Arc<ClientShared>);

impl Progress {
    /// Bytes of the update sent, and of the model received, in this round.
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.sent.load(Ordering::Relaxed), self.0.came.load(Ordering::Relaxed))
    }
}

/// Ends a client from another thread, whatever it waits for.
#[derive(Clone, Default)]
pub struct Canceller(Arc<Mutex<CancelState>>);

#[derive(Default)]
struct CancelState {
    cancelled: bool,
    answered: bool,
    /// Of a connection that has no writer yet.
    socket: Option<TcpStream>,
    /// Weak, so that it ends with its client.
    writer: Weak<Writer>,
}

impl Canceller {
    /// Ends the session: the call that runs, or else the next one, fails, and the aggregator hears
    /// `reason`. A connection that is still being made ends as soon as it stands.
    pub fn cancel(&self, reason: &str) {
        let mut state = self.state();
        state.cancelled = true;
        if let Some(socket) = state.socket.take() {
            // Fails only on a socket that the peer has ended already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(writer) = state.writer.upgrade() {
            // An aggregator that is gone need not hear it.
            let _ = writer.send_if_idle(&ClientMessage::Failed { reason: printable(reason) });
            writer.shut_down();
        }
    }

    /// Ends the connection that is used now.
    fn hang_up(&self) {
        let writer = self.state().writer.upgrade();
        writer.iter().for_each(|writer| writer.shut_down());
    }

    /// Whether an aggregator has answered since this was last asked.
    pub(crate) fn has_answered(&self) -> bool {
        std::mem::take(&mut self.state().answered)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    fn state(&self) -> MutexGuard<'_, CancelState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn watch_socket(&self, socket: &TcpStream) -> Result<(), ClientError> {
        let mut state = self.state();
        if state.cancelled {
            return Err(ClientError::Cancelled);
        }
        state.socket = Some(socket.try_clone()?);
        Ok(())
    }

    pub(crate) fn watch(&self, writer: &Arc<Writer>) -> Result<(), ClientError> {
        let mut state = self.state();
        state.socket = None;
        if state.cancelled {
            return Err(ClientError::Cancelled);
        }
        state.writer = Arc::downgrade(writer);
        Ok(())
    }
}

impl Client {
    /// Joins the session of the aggregator at `address` with a model of this layout, and waits
    /// until all clients have joined.
    ///
    /// # Errors
    /// No aggregator there, one that speaks another protocol, or one that refuses us.
    pub fn join(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
        manifest: &Manifest,
    ) -> Result<Client, ClientError> {
        Self::join_with(address, config, Some(manifest), &Canceller::default())
    }

    /// As [`Client::join`]; `canceller` ends it, and the client that it makes, from another thread.
    ///
    /// # Errors
    /// As [`Client::join`], and [`ClientError::Cancelled`].
    pub fn join_cancellable(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
        manifest: &Manifest,
        canceller: &Canceller,
    ) -> Result<Client, ClientError> {
        Self::join_with(address, config, Some(manifest), canceller)
    }

    /// Joins without a model, to be told its layout: for a session that has an initial one.
    ///
    /// # Errors
    /// As for [`Client::join`].
    pub fn join_unknowing(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
    ) -> Result<Client, ClientError> {
        Self::join_with(address, config, None, &Canceller::default())
    }

    /// As [`Client::join`] with a manifest, and [`Client::join_unknowing`] without.
    pub(crate) fn join_with(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
        manifest: Option<&Manifest>,
        canceller: &Canceller,
    ) -> Result<Client, ClientError> {
        let joined = Self::join_either(address, config, manifest, canceller)?;
        joined.map_err(|ring| not_a_star(ring.address))
    }

    /// Joins an aggregator that averages, or gives what is needed to take part in a ring.
    pub(crate) fn join_either(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
        manifest: Option<&Manifest>,
        canceller: &Canceller,
    ) -> Result<Result<Client, RingEntry>, ClientError> {
        match Self::connect(address, config, manifest, false, canceller)? {
            (Connected::Star(link, reader), rest) => {
                Self::begin(*link, reader, rest, manifest, canceller).map(Ok)
            }
            (Connected::Ring(entry), _) => Ok(Err(*entry)),
        }
    }

    /// Joins as an edge, which sends sums.
    pub(crate) fn join_as_edge(
        address: &str,
        config: ClientConfig,
        manifest: &Manifest,
        canceller: &Canceller,
    ) -> Result<Client, ClientError> {
        match Self::connect(address, config, Some(manifest), true, canceller)? {
            (Connected::Star(link, reader), rest) => {
                Self::begin(*link, reader, rest, Some(manifest), canceller)
            }
            (Connected::Ring(entry), _) => Err(not_a_star(entry.address)),
        }
    }

    #[allow(clippy::type_complexity)] // What is left of dialling, for those who dial again.
    fn connect(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ClientConfig,
        manifest: Option<&Manifest>,
        is_edge: bool,
        canceller: &Canceller,
    ) -> Result<(Connected, (Dialler, Sender<()>, Receiver<()>)), ClientError> {
        let header = manifest.map(|manifest| manifest.header().to_vec()).unwrap_or_default();
        let address = address.to_string();
        let mut config = config;
        config.tls = config.tls.map(|tls| tls.at(&address));
        let canceller_ = canceller.clone();
        let dialler =
            Dialler { address, config: config.clone(), header, is_edge, canceller: canceller_ };
        let (stop, stopped) = mpsc::channel();
        let connected = dialler.connect(1, None).or_else(|error| {
            // Where nobody listens there is no aggregator; another one may have been interrupted.
            let no_answer = matches!(error, ClientError::Dial { .. });
            let was_there = !no_answer || canceller.state().answered;
            let window = config.reconnect.unwrap_or(config.deadline);
            match is_interruption(&error) && was_there && !window.is_zero() {
                true => dialler.connect_again(1, None, (error, window), &stopped),
                false => Err(error),
            }
        });
        Ok((connected?, (dialler, stop, stopped)))
    }

    /// A client of an aggregator that averages.
    fn begin(
        link: Link,
        reader: Reader,
        (mut dialler, stop, stopped): (Dialler, Sender<()>, Receiver<()>),
        manifest: Option<&Manifest>,
        canceller: &Canceller,
    ) -> Result<Client, ClientError> {
        let config = dialler.config.clone();
        let at = link.address;
        let invalid = |why: String| ClientError::Plan { address: at.to_string(), why };
        let manifest = match manifest {
            Some(manifest) => manifest.clone(),
            None => Manifest::from_header(&link.plan.header)
                .map_err(|error| invalid(error.to_string()))?,
        };
        dialler.header = manifest.header().to_vec();
        let sums = match dialler.is_edge {
            true => {
                let sums = AccumulatorLayout::sums_manifest(&manifest);
                let sums = sums.map_err(|error| invalid(error.to_string()))?;
                Some(Lanes::cut(&link.plan, sums).map_err(invalid)?)
            }
            false => None,
        };
        let lanes = Lanes::cut(&link.plan, manifest).map_err(invalid)?;
        let shared = Arc::new(ClientShared {
            sums: SumTable::new(&lanes.ranges, &lanes.signals),
            seed: sums.as_ref().map(|sums| SumTable::new(&sums.ranges, &sums.signals)),
            seeded: Mutex::default(),
            takes_seed: AtomicBool::new(false),
            download: Mutex::default(),
            sent: AtomicU64::new(0),
            came: AtomicU64::new(0),
            began: AtomicBool::new(true),
            dials: AtomicBool::new(false),
        });
        let (sender, events) = mpsc::channel();
        let plan = link.plan.clone();
        let keeper = Keeper { dialler, shared: shared.clone(), events: sender.clone(), stopped };
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || keeper.run(&plan, reader, at))?;
        Ok(Client {
            config,
            lanes,
            sums,
            line: Line {
                address: at.to_string(),
                plan: link.plan.clone(),
                link: Some(link),
                shared,
                events,
                sender,
                early: VecDeque::new(),
                wanted: VecDeque::new(),
                came_back: false,
                put_off: VecDeque::new(),
                broken: None,
                linger: None,
            },
            holds: None,
            uploaded: 0,
            phases: Vec::new(),
            canceller: canceller.clone(),
            keeper: Some(thread),
            stop: Some(stop),
        })
    }

    /// Rounds that the session will have.
    pub fn rounds(&self) -> u32 {
        self.line.plan.rounds
    }

    /// The model's layout.
    pub fn manifest(&self) -> &Manifest {
        &self.lanes.manifest
    }

    /// What was measured so far.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// How far this client is; can be read from another thread.
    pub fn progress(&self) -> Progress {
        Progress(self.line.shared.clone())
    }

    /// How the model is cut into chunks in this session, for sources that are made for it.
    pub fn chunks(&self) -> &ChunkTable {
        &self.lanes.chunks
    }

    /// An error once the session has ended, without waiting: for work between the transfers.
    ///
    /// # Errors
    /// As [`Client::next_task`].
    pub fn check(&mut self) -> Result<(), ClientError> {
        self.line.check()
    }

    /// Waits for what the aggregator wants next.
    ///
    /// # Errors
    /// An aggregator that ends the session, or cannot be reached any more.
    pub fn next_task(&mut self) -> Result<Task, ClientError> {
        match self.next_edge_task()? {
            EdgeTask::Task(task) => Ok(task),
            EdgeTask::Fold { .. } => Err(self.unexpected("a message")),
        }
    }

    pub(crate) fn next_edge_task(&mut self) -> Result<EdgeTask, ClientError> {
        loop {
            let notice = match self.line.next() {
                // With the last model here there is one thing left to hear. An aggregator that has said it
                // is gone when it is asked again.
                Err(error) if is_interruption(&error) && self.is_complete() => {
                    tracing::warn!("{error}; the model of the last round is here");
                    return Ok(EdgeTask::Task(Task::Done));
                }
                notice => notice?,
            };
            match notice {
                Notice::Message(AggregatorMessage::Download { round, digest }) => {
                    // Our word was lost with the connection.
                    if self.holds == Some((round, digest)) {
                        self.line.tell(&ClientMessage::Received { round, digest });
                        continue;
                    }
                    return Ok(EdgeTask::Task(Task::Download { round, digest }));
                }
                Notice::Message(AggregatorMessage::Upload { round }) => {
                    return Ok(EdgeTask::Task(Task::Upload { round }));
                }
                Notice::Message(AggregatorMessage::Fold { round, scale, seed })
                    if self.sums.is_some() =>
                {
                    return Ok(EdgeTask::Fold { round, scale, seed });
                }
                Notice::Message(AggregatorMessage::Done) => return Ok(EdgeTask::Task(Task::Done)),
                // Said again after an interruption; or of what an earlier process has sent.
                Notice::Message(AggregatorMessage::Applied { round, .. })
                    if round == self.uploaded || self.uploaded == 0 || self.line.came_back => {}
                // What is wanted of the update that was asked for last.
                Notice::Message(
                    wanted @ (AggregatorMessage::Want { .. } | AggregatorMessage::Prove { .. }),
                ) if self.line.wanted.len() < limits::EARLY_MESSAGES => {
                    self.line.wanted.push_back(wanted);
                }
                Notice::Message(_) => return Err(self.unexpected("a message")),
                // Of lanes that nobody runs any more.
                _ => {}
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.holds.is_some_and(|(round, _)| round == self.rounds())
    }

    /// Tells the aggregator that the model of `round` is safe. If the connection is broken it hears
    /// it later.
    pub fn confirm(&mut self, round: u32) {
        let digest = self.received_digest();
        self.holds = Some((round, digest));
        self.line.tell(&ClientMessage::Received { round, digest });
    }

    /// Tells the aggregator that this client cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        self.line.tell(&ClientMessage::Failed { reason: printable(reason) });
    }

    pub(crate) fn unexpected(&self, what: &'static str) -> ClientError {
        self.line.unexpected(what)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.take();
        self.line.hang_up();
        // There may be a newer connection that nobody has used yet.
        self.canceller.hang_up();
        let dials = self.line.shared.dials.load(Ordering::SeqCst);
        if let Some(keeper) = self.keeper.take().filter(|_| !dials) {
            // The thread cannot panic, and there is nobody to tell. One that dials ends by itself.
            let _ = keeper.join();
        }
    }
}

/// What a client has to react to.
enum Notice {
    Message(AggregatorMessage),
    Down,
    Up,
    Lane(Result<(), LaneError>),
    SendBroken(SendBroken),
    Received { lane: usize, report: ReceiveReport },
}

/// The connection as the client's own thread sees it.
struct Line {
    address: String,
    plan: Plan,
    /// Absent while it is dialled again.
    link: Option<Link>,
    shared: Arc<ClientShared>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Messages that came while nobody waited for them.
    early: VecDeque<AggregatorMessage>,
    /// Those of them that an upload is waiting for.
    wanted: VecDeque<AggregatorMessage>,
    /// Whether the connection is not the first one.
    came_back: bool,
    /// Events that came when nobody could react to them.
    put_off: VecDeque<Event>,
    /// The first sign that the connection is broken.
    broken: Option<ClientError>,
    /// Until when the aggregator's last words are awaited on a connection that is broken.
    linger: Option<Instant>,
}

impl Line {
    fn next(&mut self) -> Result<Notice, ClientError> {
        if let Some(message) = self.early.pop_front() {
            return Ok(Notice::Message(message));
        }
        loop {
            let event = match self.linger {
                _ if !self.put_off.is_empty() => self.put_off.pop_front(),
                None => self.events.recv().ok(),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    match self.events.recv_timeout(left) {
                        Err(RecvTimeoutError::Timeout) => {
                            self.hang_up();
                            continue;
                        }
                        event => event.ok(),
                    }
                }
            };
            // This holds the other end.
            let event = event.ok_or_else(|| self.control_error(ControlError::Closed))?;
            if let Some(notice) = self.understand(event)? {
                return Ok(notice);
            }
        }
    }

    fn check(&mut self) -> Result<(), ClientError> {
        loop {
            let put_off = self.put_off.pop_front().ok_or(TryRecvError::Empty);
            match put_off.or_else(|_| self.events.try_recv()) {
                Ok(event) => match self.understand(event)? {
                    Some(Notice::Message(_)) if self.early.len() >= limits::EARLY_MESSAGES => {
                        return Err(self.unexpected("a message"));
                    }
                    Some(Notice::Message(message)) => self.early.push_back(message),
                    _ => {}
                },
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    fn understand(&mut self, event: Event) -> Result<Option<Notice>, ClientError> {
        Ok(Some(match event {
            Event::Message { message: AggregatorMessage::Failed { reason }, .. } => {
                let (address, reason) = (self.address.clone(), printable(&reason));
                return Err(ClientError::Ended { address, reason });
            }
            Event::Message { message, .. } => Notice::Message(message),
            Event::Down => {
                self.hang_up();
                self.early.clear();
                self.wanted.clear();
                Notice::Down
            }
            Event::Up(link) => {
                self.plan = link.plan.clone();
                self.link = Some(*link);
                self.broken = None;
                self.came_back = true;
                tracing::info!("aggregator {} is back", self.address);
                Notice::Up
            }
            Event::Lost(error) => {
                self.link = None;
                return Err(match (self.broken.take(), error) {
                    (Some(first), error) if is_interruption(&error) => first,
                    (_, error) => error,
                });
            }
            Event::Lane(result) => Notice::Lane(result),
            Event::SendBroken(broken) => Notice::SendBroken(broken),
            Event::Received { lane, report } => Notice::Received { lane, report },
        }))
    }

    /// A data channel of a connection is broken. The aggregator may still say why; if another
    /// connection would not help, the error is the client's.
    fn break_off(&mut self, connection: u64, error: TransferError) -> Result<(), ClientError> {
        if self.link.as_ref().is_none_or(|link| link.id != connection) {
            return Ok(());
        }
        let error = self.transfer_error(error);
        if !is_interruption(&error) {
            return Err(error);
        }
        if self.broken.is_none() {
            // Who was silent has no last words.
            let was_silent = matches!(
                error,
                ClientError::Transfer {
                    error: TransferError::Stalled { .. } | TransferError::NoChecksum,
                    ..
                }
            );
            let patience = if was_silent { Duration::ZERO } else { limits::LAST_WORDS };
            self.broken = Some(error);
            self.linger = Some(Instant::now() + patience);
        }
        Ok(())
    }

    /// Ends the connection. Its keeper then makes another one.
    fn hang_up(&mut self) {
        self.linger = None;
        self.link.take().iter().for_each(Link::shut_down);
    }

    /// Says something, if there is a connection. One that breaks is noticed by its reader.
    fn tell(&self, message: &ClientMessage) {
        if let Some(link) = &self.link {
            let _ = link.writer.send(message);
        }
    }

    fn control_error(&self, error: ControlError) -> ClientError {
        ClientError::Control { address: self.address.clone(), error }
    }

    fn transfer_error(&self, error: TransferError) -> ClientError {
        ClientError::Transfer { address: self.address.clone(), error }
    }

    fn unexpected(&self, what: &'static str) -> ClientError {
        self.control_error(ProtocolError::Unexpected { what }.into())
    }

    fn lane_error(&self, error: LaneError) -> ClientError {
        match error {
            // Our own memory, model and disk are not the aggregator's fault.
            LaneError::Peer { error: TransferError::Region(error), .. } => error.into(),
            LaneError::Peer { error: TransferError::Source(error), .. } => error.into(),
            LaneError::Peer { error: TransferError::Sink(error), .. } => error.into(),
            LaneError::Peer { error, .. } => self.transfer_error(error),
            error => ClientError::Lane(error),
        }
    }
}
