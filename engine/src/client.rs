//! The process that holds trained parameters: joins an aggregator, sends its update, takes the
//! model.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::channel::{self, DataChannel};
use crate::control::{self, Congestion, ControlChannel, Heartbeat, Reader, Writer, printable};
use crate::error::{ClientError, ControlError, LaneError, ProtocolError, TransferError};
use crate::lane::receive::{ChunkBuffers, Incoming, Order, Shared, receive};
use crate::lane::send::{Announce, Outgoing, send};
use crate::lane::start_lane;
use crate::limits;
use crate::link::Link;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::{Meter, Phase};
use crate::paths::{ReceiveKind, SendKind};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::Sink;
use crate::sink::discard::DiscardSink;
use crate::sink::file::{FileSink, ModelFile};
use crate::sink::region::{Part, RegionSink};
use crate::source::Source;
use crate::sums::SumTable;
use crate::tls::ClientTls;
use crate::wire::checksum::model_digest;
use crate::wire::hello::{DataHello, Secret, Ticket};
use crate::wire::message::{AggregatorMessage, ClientMessage, Plan};

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

/// Where a model goes.
pub enum Target<'a> {
    /// Into memory of the model's size.
    Region(&'a mut Region),
    /// Into a file.
    File(&'a ModelFile),
    /// Nowhere: it is checked and dropped.
    Check,
}

/// A client of a running session.
pub struct Client {
    address: SocketAddr,
    config: ClientConfig,
    plan: Plan,
    manifest: Manifest,
    chunks: ChunkTable,
    lanes: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
    /// Of each lane, which holds the lock while it receives.
    buffers: Vec<Mutex<ChunkBuffers>>,
    streams: Vec<DataChannel>,
    writer: Arc<Writer>,
    shared: Arc<ClientShared>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    reader: Option<JoinHandle<()>>,
    /// Messages that came while the last lane was still ending.
    early: VecDeque<AggregatorMessage>,
    phases: Vec<Phase>,
    _heartbeat: Heartbeat,
}

/// What the thread that reads the control channel shares with the lanes.
#[derive(Default)]
struct ClientShared {
    sums: OnceLock<SumTable>,
    sent: AtomicU64,
    came: AtomicU64,
}

enum Event {
    Message(AggregatorMessage),
    Lost(ControlError),
    Lane(Result<(), LaneError>),
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

    /// Whether an aggregator has answered since this was last asked.
    pub(crate) fn has_answered(&self) -> bool {
        std::mem::take(&mut self.state().answered)
    }

    fn state(&self) -> MutexGuard<'_, CancelState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch_socket(&self, socket: &TcpStream) -> Result<(), ClientError> {
        let mut state = self.state();
        if state.cancelled {
            return Err(ClientError::Cancelled);
        }
        state.socket = Some(socket.try_clone()?);
        Ok(())
    }

    fn watch(&self, writer: &Arc<Writer>) -> Result<(), ClientError> {
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
        let dialled = control::dial(&address, &config.congestion, config.deadline);
        let socket =
            dialled.map_err(|source| ClientError::Dial { address: address.to_string(), source })?;
        let mut config = config;
        config.tls = config.tls.map(|tls| tls.at(&address.to_string()));
        // Who ends the connection at once leaves it without an address.
        let address = socket
            .peer_addr()
            .map_err(|source| ClientError::Dial { address: address.to_string(), source })?;
        let at = |error: ControlError| ClientError::Control { address: address.to_string(), error };
        canceller.watch_socket(&socket)?;
        let until = Instant::now() + config.deadline;
        let opened = Link::dialled(socket, config.tls.as_ref(), until)
            .and_then(|link| ControlChannel::open(link, &config.secret, config.deadline));
        let ControlChannel { mut reader, writer, binding } =
            opened.map_err(|error| not_let_in(error, &config.secret, address))?;
        canceller.watch(&writer)?;
        let join = ClientMessage::Join {
            name: config.name.clone(),
            examples: config.examples,
            header: manifest.map(|manifest| manifest.header().to_vec()).unwrap_or_default(),
            place: config.secret.place(),
        };
        writer.send(&join).map_err(at)?;
        canceller.state().answered = true;

        let beat = |deadline| {
            let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
            Heartbeat::start(listeners, ClientMessage::Alive, deadline)
        };
        // The plan says the aggregator's deadline; until then it may be any.
        let early = beat(limits::MIN_DEADLINE)?;
        let plan = await_plan(&mut reader, address)?;
        let key = binding.key(&plan.ticket);
        let manifest = match manifest {
            Some(manifest) => manifest.clone(),
            None => Manifest::from_header(&plan.header).map_err(|error| ClientError::Plan {
                address: address.to_string(),
                why: error.to_string(),
            })?,
        };
        let prepared = Prepared::check(&plan, &manifest, address)?;
        let deadline = Duration::from_millis(plan.deadline_ms);
        let heartbeat = beat(deadline)?;
        drop(early);
        reader.set_deadline(deadline)?;
        let streams = open_streams(address, &plan, &key, &config)
            .map_err(|error| last_words(&mut reader, address, error))?;

        let shared = Arc::new(ClientShared::default());
        // Nothing else sets it.
        let _ = shared.sums.set(SumTable::new(&prepared.lanes, &prepared.signals));
        let (sender, events) = mpsc::channel();
        let (inside, out) = (shared.clone(), sender.clone());
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || read_aggregator(reader, &inside, &out))?;
        Ok(Client {
            address,
            config,
            plan,
            manifest,
            chunks: prepared.chunks,
            buffers: prepared.lanes.iter().map(|_| Mutex::default()).collect(),
            lanes: prepared.lanes,
            signals: prepared.signals,
            streams,
            writer,
            shared,
            events,
            sender,
            reader: Some(thread),
            early: VecDeque::new(),
            phases: Vec::new(),
            _heartbeat: heartbeat,
        })
    }

    /// Rounds that the session will have.
    pub fn rounds(&self) -> u32 {
        self.plan.rounds
    }

    /// The model's layout.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What was measured so far.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// How far this client is; can be read from another thread.
    pub fn progress(&self) -> Progress {
        Progress(self.shared.clone())
    }

    /// How the model is cut into chunks in this session, for sources that are made for it.
    pub fn chunks(&self) -> &ChunkTable {
        &self.chunks
    }

    /// An error once the session has ended, without waiting: for work between the transfers.
    ///
    /// # Errors
    /// As [`Client::next_task`].
    pub fn check(&mut self) -> Result<(), ClientError> {
        let mut early = std::mem::take(&mut self.early);
        while let Ok(event) = self.events.try_recv() {
            self.hear(event, &mut early)?;
        }
        self.early = early;
        Ok(())
    }

    /// Waits for what the aggregator wants next.
    pub fn next_task(&mut self) -> Result<Task, ClientError> {
        match self.next_message()? {
            AggregatorMessage::Download { round, digest } => Ok(Task::Download { round, digest }),
            AggregatorMessage::Upload { round } => {
                self.shared.sums.get().expect("set when joining").clear();
                Ok(Task::Upload { round })
            }
            AggregatorMessage::Done => Ok(Task::Done),
            _ => Err(self.unexpected("a message")),
        }
    }

    /// Sends the update of `round` and waits until it has been verified and averaged. Until
    /// then the source's bytes must not change.
    ///
    /// # Errors
    /// A source of another layout, one that cannot be read, or an aggregator that ends.
    pub fn upload(&mut self, round: u32, source: &dyn Source) -> Result<(), ClientError> {
        if let Some(difference) = self.manifest.first_difference(source.manifest()) {
            return Err(ClientError::Model { difference });
        }
        let kind = SendKind::choose(self.config.send_path, source)?;
        let meter = Meter::start("upload", round);
        self.shared.sent.store(0, Ordering::Relaxed);
        self.tell(&ClientMessage::Uploading { round })?;
        let known = source.checksums(self.chunks.chunk_bytes());
        if let Some(sums) = known {
            for (stream, lane) in self.lanes.iter().enumerate() {
                let sent = self.writer.send_sums(&sums[lane.clone()], sums_message(stream));
                sent.map_err(|error| self.control_error(error))?;
            }
        }
        let early = self.run_lanes(self.upload_lanes(source, kind, known.is_none())?)?;
        self.early.extend(early);
        match self.next_message()? {
            AggregatorMessage::Applied { round: applied } if applied == round => {}
            _ => return Err(self.unexpected("a message")),
        }
        self.phases.push(meter.stop(self.manifest.data_bytes()).sent_by(kind));
        Ok(())
    }

    fn upload_lanes<'s>(
        &'s self,
        source: &'s dyn Source,
        kind: SendKind,
        sums_unknown: bool,
    ) -> Result<Vec<impl FnOnce() -> Result<(), LaneError> + Send + 's>, LaneError> {
        let mut lanes = Vec::new();
        for (lane, channel) in self.streams.iter().enumerate() {
            // No deadline: an aggregator that lives may have reasons to read others first.
            let stream = Outgoing::new(0, channel, kind, &self.shared.sent, None)?;
            let (chunks, range, signal) =
                (&self.chunks, self.lanes[lane].clone(), &self.signals[lane]);
            let writer = &self.writer;
            lanes.push(move || {
                let announce = |sums: Vec<u64>| {
                    let sent = writer.send_sums(&sums, sums_message(lane));
                    sent.map_err(|error| std::io::Error::other(error.to_string()))
                };
                let announce: Option<&Announce<'_>> =
                    if sums_unknown { Some(&announce) } else { None };
                send(vec![stream], source, chunks, range, announce, signal)
            });
        }
        Ok(lanes)
    }

    /// Receives the model of `round` into `target` and checks every chunk and the digest of the
    /// whole. [`Client::confirm`] tells the aggregator when it is safe.
    ///
    /// # Errors
    /// Bytes that do not match, a target that fails or is a region of another size than the model,
    /// or an aggregator that ends.
    pub fn download(
        &mut self,
        round: u32,
        digest: [u8; 32],
        target: Target<'_>,
    ) -> Result<(), ClientError> {
        let meter = Meter::start("download", round);
        self.shared.came.store(0, Ordering::Relaxed);
        let began = AtomicBool::new(true);
        let early = match target {
            Target::Check => {
                let sinks = self.lanes.iter().map(|_| DiscardSink { checks: true }).collect();
                self.run_lanes(self.download_lanes(sinks, &began)?)?
            }
            Target::File(file) => {
                let sinks = self.lanes.iter().map(|_| FileSink::new(file)).collect();
                self.run_lanes(self.download_lanes(sinks, &began)?)?
            }
            Target::Region(region) => {
                let (bytes, model_bytes) =
                    (region.bytes().len() as u64, self.manifest.data_bytes());
                if bytes != model_bytes {
                    return Err(ClientError::Size { bytes, model_bytes });
                }
                let position = region.position();
                let (mut rest, file) = region.bytes_mut();
                let mut sinks = Vec::new();
                for lane in &self.lanes {
                    let range = self.chunks.bytes_of(lane);
                    let (bytes, after) = rest.split_at_mut((range.end - range.start) as usize);
                    rest = after;
                    let part = Part { bytes, file, position, start: range.start };
                    sinks.push(RegionSink::new(vec![part]));
                }
                self.run_lanes(self.download_lanes(sinks, &began)?)?
            }
        };
        self.early.extend(early);
        for channel in &self.streams {
            channel.refuse_more().map_err(|error| self.transfer_error(error))?;
        }
        if self.received_digest() != digest {
            return Err(ClientError::Digest { address: self.address.to_string() });
        }
        let phase = meter.stop(self.manifest.data_bytes());
        self.phases.push(phase.received_by(self.config.receive_path));
        Ok(())
    }

    /// Tells the aggregator that the model of `round` is safe.
    pub fn confirm(&mut self, round: u32) -> Result<(), ClientError> {
        self.tell(&ClientMessage::Received { round, digest: self.received_digest() })
    }

    /// The checksums of the chunks that came, each of which matched.
    pub(crate) fn received_sums(&self) -> Vec<u64> {
        self.shared.sums.get().expect("set when joining").all(&self.lanes)
    }

    fn received_digest(&self) -> [u8; 32] {
        let (layout, chunk_bytes) = (self.manifest.layout_digest(), self.chunks.chunk_bytes());
        model_digest(&layout, chunk_bytes, &self.received_sums())
    }

    fn download_lanes<'s, S: Sink + 's>(
        &'s self,
        sinks: Vec<S>,
        began: &'s AtomicBool,
    ) -> Result<Vec<impl FnOnce() -> Result<(), LaneError> + Send + 's>, LaneError> {
        let table = self.shared.sums.get().expect("set when joining");
        let deadline = Some(Duration::from_millis(self.plan.deadline_ms));
        let mut lanes = Vec::new();
        for (lane, mut sink) in sinks.into_iter().enumerate() {
            let shared = Shared { sums: table.stream(lane), began, moved: &self.shared.came };
            let channel = &self.streams[lane];
            let stream = Incoming::new(0, channel, self.config.receive_path, shared, deadline)?;
            let (chunks, range, signal) =
                (&self.chunks, self.lanes[lane].clone(), &self.signals[lane]);
            let buffers = &self.buffers[lane];
            lanes.push(move || {
                let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
                receive(vec![stream], chunks, range, Order::Client, &mut sink, &mut buffers, signal)
            });
        }
        Ok(lanes)
    }

    /// Runs lanes, and meanwhile hears what the aggregator says. Gives the messages that came for
    /// later: the aggregator may be done with the last byte, and go on, before the thread that
    /// sent it has said so.
    fn run_lanes<L>(&self, lanes: Vec<L>) -> Result<VecDeque<AggregatorMessage>, ClientError>
    where
        L: FnOnce() -> Result<(), LaneError> + Send,
    {
        let mut running = lanes.len();
        let (mut early, mut failure) = (VecDeque::new(), None::<ClientError>);
        let mut cancelled = false;
        std::thread::scope(|scope| {
            for lane in lanes {
                let sender = self.sender.clone();
                start_lane(scope, lane, move |result| {
                    // This client holds the other end while lanes run.
                    let _ = sender.send(Event::Lane(result));
                });
            }
            while running > 0 {
                let Ok(event) = self.events.recv() else { break };
                running -= usize::from(matches!(event, Event::Lane(_)));
                cancelled |= matches!(event, Event::Lane(Err(LaneError::Cancelled)));
                if let Err(error) = self.hear(event, &mut early) {
                    self.signals.iter().for_each(|signal| signal.cancel());
                    let ended = matches!(error, ClientError::Ended { .. });
                    if failure.as_ref().is_none_or(|first| ended && first.is_first_sign()) {
                        failure = Some(error);
                    }
                }
            }
        });
        match failure {
            Some(error) => Err(self.explain(error)),
            // Only a client that has failed before has lanes that end at once.
            None if cancelled => Err(LaneError::Cancelled.into()),
            None => Ok(early),
        }
    }

    fn hear(
        &self,
        event: Event,
        early: &mut VecDeque<AggregatorMessage>,
    ) -> Result<(), ClientError> {
        match event {
            Event::Lane(Ok(()) | Err(LaneError::Cancelled)) => Ok(()),
            Event::Lane(Err(error)) => Err(self.lane_error(error)),
            Event::Lost(error) => Err(self.control_error(error)),
            Event::Message(message) => match self.ended(&message) {
                Some(error) => Err(error),
                None if early.len() < limits::EARLY_MESSAGES => {
                    early.push_back(message);
                    Ok(())
                }
                None => Err(self.unexpected("a message")),
            },
        }
    }

    /// A data channel that breaks is often only the first sign: the aggregator's last words say
    /// more.
    fn explain(&self, error: ClientError) -> ClientError {
        let patience = Instant::now() + limits::LAST_WORDS;
        if !error.is_first_sign() {
            return error;
        }
        loop {
            match self.events.recv_timeout(patience.saturating_duration_since(Instant::now())) {
                Ok(Event::Message(message)) => {
                    if let Some(ended) = self.ended(&message) {
                        return ended;
                    }
                }
                Ok(_) => {}
                Err(_) => return error,
            }
        }
    }

    fn next_message(&mut self) -> Result<AggregatorMessage, ClientError> {
        if let Some(message) = self.early.pop_front() {
            return Ok(message);
        }
        match self.events.recv() {
            Ok(Event::Message(message)) => match self.ended(&message) {
                Some(error) => Err(error),
                None => Ok(message),
            },
            Ok(Event::Lost(error)) => Err(self.control_error(error)),
            Ok(Event::Lane(_)) | Err(_) => Err(self.control_error(ControlError::Closed)),
        }
    }

    fn ended(&self, message: &AggregatorMessage) -> Option<ClientError> {
        match message {
            AggregatorMessage::Failed { reason } => Some(ClientError::Ended {
                address: self.address.to_string(),
                reason: printable(reason),
            }),
            _ => None,
        }
    }

    /// Tells the aggregator that this client cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        // An aggregator that is gone need not hear it.
        let _ = self.writer.send(&ClientMessage::Failed { reason: printable(reason) });
    }

    fn tell(&self, message: &ClientMessage) -> Result<(), ClientError> {
        self.writer.send(message).map_err(|error| self.explain(self.control_error(error)))
    }

    fn control_error(&self, error: ControlError) -> ClientError {
        ClientError::Control { address: self.address.to_string(), error }
    }

    fn transfer_error(&self, error: TransferError) -> ClientError {
        ClientError::Transfer { address: self.address.to_string(), error }
    }

    pub(crate) fn unexpected(&self, what: &'static str) -> ClientError {
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

impl ClientError {
    /// Whether the aggregator's last words may say why.
    fn is_first_sign(&self) -> bool {
        matches!(
            self,
            ClientError::Transfer { error: TransferError::Closed | TransferError::Io(_), .. }
                | ClientError::Control { .. }
        )
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.writer.shut_down();
        if let Some(reader) = self.reader.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = reader.join();
        }
    }
}

/// Why an aggregator did not let a client in that has this secret.
fn not_let_in(error: ControlError, secret: &Secret, address: SocketAddr) -> ClientError {
    let address = address.to_string();
    match error {
        ControlError::NoPlace if *secret == Secret::OPEN => ClientError::SecretWanted { address },
        ControlError::NoPlace => ClientError::NotWanted { address },
        error => ClientError::Control { address, error },
    }
}

/// The plan comes when the last client has joined; until then only signs of life do.
fn await_plan(reader: &mut Reader, address: SocketAddr) -> Result<Plan, ClientError> {
    let address = address.to_string();
    loop {
        match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(AggregatorMessage::Alive) => {}
            Ok(AggregatorMessage::Plan(plan)) => return Ok(plan),
            Ok(AggregatorMessage::Failed { reason }) => {
                return Err(ClientError::Ended { address, reason: printable(&reason) });
            }
            Ok(AggregatorMessage::Done) => return Err(ClientError::NotWanted { address }),
            Ok(_) => {
                let error = ProtocolError::Unexpected { what: "a message" }.into();
                return Err(ClientError::Control { address, error });
            }
            Err(error) => return Err(ClientError::Control { address, error }),
        }
    }
}

/// A data channel that cannot be opened is often only the first sign that the session has ended:
/// the control channel says why.
fn last_words(reader: &mut Reader, address: SocketAddr, error: ClientError) -> ClientError {
    if reader.set_deadline(limits::LAST_WORDS).is_err() {
        return error;
    }
    let patience = Instant::now() + limits::LAST_WORDS;
    while Instant::now() < patience {
        match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(AggregatorMessage::Failed { reason }) => {
                let (address, reason) = (address.to_string(), printable(&reason));
                return ClientError::Ended { address, reason };
            }
            Ok(AggregatorMessage::Alive) => {}
            _ => break,
        }
    }
    error
}

/// What a plan comes to for this model.
struct Prepared {
    chunks: ChunkTable,
    lanes: Vec<Range<usize>>,
    signals: Vec<Arc<Signal>>,
}

impl Prepared {
    fn check(plan: &Plan, manifest: &Manifest, address: SocketAddr) -> Result<Self, ClientError> {
        let invalid = |why: String| ClientError::Plan { address: address.to_string(), why };
        let within = |what: &str, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(invalid(format!("{what} {value} is not between {least} and {most}")))
            }
        };
        within("streams", plan.streams.into(), 1, limits::MAX_STREAMS as u64)?;
        within("chunk bytes", plan.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
        within("deadline", plan.deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)?;
        let chunks =
            manifest.chunks(plan.chunk_bytes).map_err(|error| invalid(error.to_string()))?;
        let lanes = chunks.lanes(plan.streams as usize);
        let signals: std::io::Result<_> =
            lanes.iter().map(|_| Signal::new().map(Arc::new)).collect();
        Ok(Prepared { chunks, lanes, signals: signals? })
    }
}

fn open_streams(
    address: SocketAddr,
    plan: &Plan,
    key: &Ticket,
    config: &ClientConfig,
) -> Result<Vec<DataChannel>, ClientError> {
    (0..plan.streams).map(|stream| open_stream(address, plan, key, config, stream)).collect()
}

fn open_stream(
    address: SocketAddr,
    plan: &Plan,
    key: &Ticket,
    config: &ClientConfig,
    stream: u32,
) -> Result<DataChannel, ClientError> {
    let at = |error: ControlError| ClientError::Control { address: address.to_string(), error };
    let deadline = Duration::from_millis(plan.deadline_ms);
    let socket = control::dial(address, &config.congestion, deadline)
        .map_err(|source| ClientError::Dial { address: address.to_string(), source })?;
    let until = Instant::now() + deadline;
    socket.set_write_timeout(Some(deadline))?;
    let hello = DataHello::new(plan.session, plan.client, stream, key);
    let link = Link::dialled(socket, config.tls.as_ref(), until).map_err(at)?;
    channel::open(link, &hello, key, until).map_err(at)?.map_err(|answer| {
        let (address, answer) = (address.to_string(), answer.text());
        ClientError::Refused { address, stream, answer }
    })
}

fn sums_message(stream: usize) -> impl Fn(Vec<crate::wire::message::WireSum>) -> ClientMessage {
    move |sums| ClientMessage::Sums { stream: stream as u32, sums }
}

/// Reads the aggregator's control channel until it ends.
fn read_aggregator(mut reader: Reader, shared: &ClientShared, events: &Sender<Event>) {
    loop {
        let event = match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(AggregatorMessage::Alive) => continue,
            Ok(AggregatorMessage::Sums { stream, sums }) => {
                let table = shared.sums.get().expect("set when joining");
                match table.announce(stream, &sums) {
                    Ok(()) => continue,
                    Err(error) => Event::Lost(error.into()),
                }
            }
            Ok(message) => {
                if matches!(message, AggregatorMessage::Download { .. }) {
                    shared.sums.get().expect("set when joining").clear();
                }
                Event::Message(message)
            }
            Err(error) => Event::Lost(error),
        };
        let last = matches!(event, Event::Lost(_));
        if events.send(event).is_err() || last {
            return;
        }
    }
}
