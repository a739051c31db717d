//! A host of a ring: says when its update is ready, meets its neighbours, and moves chunks.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::Target;
use super::lane::{self, Fault, LanePart, Nonfinite, Out, Side, Task};
use super::stage::Stage;
use crate::aggregator::door::{Door, Expiry, Pass, Reception, Tickets, Visit};
use crate::aggregator::{Event, refuse};
use crate::channel::{self, DataChannel};
use crate::client::{Canceller, ClientConfig, RingEntry};
use crate::control::{self, Heartbeat, Reader, Writer, printable, random};
use crate::error::{ClientError, ControlError, LaneError, ProtocolError, TlsError, TransferError};
use crate::lane::start_lane;
use crate::limits;
use crate::link::Link;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::{Meter, Phase};
use crate::paths::SendKind;
use crate::reducer::{self, AccumulatorLayout, Weights};
use crate::region::Region;
use crate::signal::Signal;
use crate::source::Source;
use crate::source::region::RegionSource;
use crate::tls::{ClientTls, ServerTls};
use crate::topology::ring::{Schedule, Slots};
use crate::verdict::{self, OnNonfinite, Place};
use crate::wire::checksum::model_digest;
use crate::wire::hello::{DataHello, Ticket};
use crate::wire::keys::{self, Binding};
use crate::wire::message::{AggregatorMessage, ClientMessage, RingTerms, Turn};

/// How often a member that waits for a neighbour looks at its control channel.
const GLANCE: Duration = Duration::from_millis(10);

/// How a host takes part in a ring.
#[derive(Clone, Debug)]
pub struct RingMember {
    /// As for any client. `examples` is the weight, unless an all-reduce is given another one.
    pub client: ClientConfig,
    /// HOST:PORT where its left neighbour reaches this host, where that is not the address that its
    /// control connection comes from. The port is listened on.
    pub advertise: Option<String>,
}

/// A host of a ring.
pub struct Member {
    config: RingMember,
    manifest: Manifest,
    terms: RingTerms,
    line: Line,
    binding: Binding,
    door: Door,
    /// What the door shows, where all speak TLS; empty otherwise.
    certificate: Vec<u8>,
    /// Where the left neighbour is to dial.
    host: String,
    port: u16,
    /// The round that was asked for last, and whether it has been run.
    asked: Option<u32>,
    stages: Vec<Stage>,
    /// What the stages were made for: slots, and bytes of the sums of a chunk.
    staged_for: (Slots, u64),
    canceller: Canceller,
    _heartbeat: Heartbeat,
}

/// The control channel.
struct Line {
    address: String,
    writer: Arc<Writer>,
    events: Receiver<Happening>,
    sender: Sender<Happening>,
}

/// What a member has to react to.
enum Happening {
    Message(AggregatorMessage),
    Lost(ControlError),
    Lane(Result<(), Fault>),
}

/// What an all-reduce came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The round, counted from 1.
    pub round: u32,
    /// Attempts that it took.
    pub attempts: u32,
    /// Names and weights of those whose updates are in the mean, in the order of the ring.
    pub ranks: Vec<(String, f64)>,
    /// The place of this host among them.
    pub rank: usize,
    /// Bytes that this host sent to its neighbours in the attempt that counts, checksums included.
    pub sent_bytes: u64,
    /// Bytes that came from its neighbours.
    pub received_bytes: u64,
    /// What in the host's own update is NaN or infinite, where that may not count as it is.
    pub nonfinite: Option<String>,
    /// What the attempt that counts took, from the meeting of the neighbours to the last byte.
    pub phase: Phase,
}

/// How an attempt ended here.
enum Attempt {
    /// The mean is here, with this digest.
    Done { digest: [u8; 32], sent: u64, came: u64 },
    /// The coordinator ended it.
    Halted,
    /// It cannot go on here.
    Broken { from_left: bool, to_right: bool, error: String, stalled: bool },
    /// Our own update has numbers that are NaN or infinite.
    Nonfinite { what: String },
}

impl Member {
    /// Takes part in the ring that was found.
    pub(crate) fn begin(
        entry: RingEntry,
        config: RingMember,
        manifest: &Manifest,
        canceller: &Canceller,
    ) -> Result<Member, ClientError> {
        let RingEntry { address, local, mut reader, writer, binding, terms } = entry;
        let invalid = |why: String| ClientError::Plan { address: address.to_string(), why };
        if !(limits::MIN_DEADLINE_MS..=limits::MAX_DEADLINE_MS).contains(&terms.deadline_ms) {
            return Err(invalid(format!("deadline {} ms", terms.deadline_ms)));
        }
        AccumulatorLayout::of(manifest).map_err(|error| invalid(error.to_string()))?;
        let deadline = Duration::from_millis(terms.deadline_ms);
        let silence = control::silence_limit(deadline, deadline);
        reader.set_deadline(silence)?;
        let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
        let heartbeat = Heartbeat::start(listeners, ClientMessage::Alive, silence)?;
        let (tls, certificate) = match config.client.tls {
            None => (None, Vec::new()),
            Some(_) => {
                let at = |error| ClientError::Control { address: address.to_string(), error };
                let made = ServerTls::self_signed().map_err(|error| at(error.into()))?;
                (Some(made.0), made.1)
            }
        };
        let (listener, host) = listen(&config, local.ip())?;
        let port = listener.local_addr()?.port();
        let door = {
            let congestion = config.client.congestion.clone();
            Door::open(listener, congestion, tls, limits::MAX_VISITORS, nobody())?
        };
        let (sender, events) = mpsc::channel();
        let (reads, at) = (sender.clone(), address.to_string());
        std::thread::Builder::new().name("control".into()).spawn(move || read(reader, &reads))?;
        Ok(Member {
            config,
            manifest: manifest.clone(),
            terms,
            line: Line { address: at, writer, events, sender },
            binding,
            door,
            certificate,
            host,
            port,
            asked: None,
            stages: Vec::new(),
            staged_for: (Slots::default(), 0),
            canceller: canceller.clone(),
            _heartbeat: heartbeat,
        })
    }

    /// Rounds that the session will have.
    pub fn rounds(&self) -> u32 {
        self.terms.rounds
    }

    /// The model's layout.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Waits until the next all-reduce is due: its round, or nothing if all are done.
    ///
    /// # Errors
    /// A ring that has ended, and why.
    pub fn next_round(&mut self) -> Result<Option<u32>, ClientError> {
        if self.asked.is_some() {
            return Ok(self.asked);
        }
        match self.next()? {
            AggregatorMessage::Upload { round } => {
                self.asked = Some(round);
                Ok(self.asked)
            }
            AggregatorMessage::Done => Ok(None),
            _ => Err(self.line.unexpected()),
        }
    }

    /// An error once the ring has ended, without waiting: for work between two rounds.
    ///
    /// # Errors
    /// As [`Member::next_round`].
    pub fn check(&mut self) -> Result<(), ClientError> {
        match self.line.events.try_recv() {
            Err(TryRecvError::Empty) => Ok(()),
            Ok(Happening::Message(AggregatorMessage::Upload { round })) => {
                self.asked = Some(round);
                Ok(())
            }
            Ok(happening) => Err(self.ended(happening)),
            Err(TryRecvError::Disconnected) => {
                Err(self.ended(Happening::Lost(ControlError::Closed)))
            }
        }
    }

    /// [`Member::all_reduce_to`] into memory.
    ///
    /// # Errors
    /// As there; a region of another size.
    pub fn all_reduce(
        &mut self,
        source: &dyn Source,
        examples: f64,
        out: &mut Region,
    ) -> Result<Outcome, ClientError> {
        self.all_reduce_to(source, examples, Target::Region(out))
    }

    /// Averages `source` with those of all others, weighted by `examples`, into `out`. Returns when every
    /// host has the mean. A host that is lost meanwhile is left out, if the coordinator can do without,
    /// and those who are left begin again. What is in `out` after an error is of no use.
    ///
    /// # Errors
    /// A ring that has ended, and why; a region of another size; a source that cannot be read, or a sink
    /// that fails.
    pub fn all_reduce_to(
        &mut self,
        source: &dyn Source,
        examples: f64,
        mut out: Target<'_>,
    ) -> Result<Outcome, ClientError> {
        if let Target::Region(region) = &out {
            let (bytes, model_bytes) = (region.bytes().len() as u64, self.manifest.data_bytes());
            if bytes != model_bytes {
                return Err(ClientError::Size { bytes, model_bytes });
            }
        }
        if let Some(difference) = self.manifest.first_difference(source.manifest()) {
            return Err(ClientError::Model { difference });
        }
        let round = self.next_round()?.ok_or_else(|| self.over())?;
        self.asked = None;
        let (mut attempt, mut examples, mut nonfinite) = (0, examples, None);
        let mut update = Update { source, nonfinite: self.nonfinite() };
        loop {
            let streams = self.make_ready(round, attempt, examples)?;
            let turn = match self.next()? {
                AggregatorMessage::Turn(turn) => turn,
                AggregatorMessage::Halt { .. } => {
                    attempt += 1;
                    continue;
                }
                _ => return Err(self.line.unexpected()),
            };
            self.check_turn(&turn, round, attempt)?;
            let meter = Meter::start("all-reduce", round);
            // Neighbours keep their connections until all have ended: one that closes would look broken.
            let mut held = Vec::new();
            let done = match self.attempt(&turn, &streams, update, &mut out, &mut held)? {
                Attempt::Done { digest, sent, came } => {
                    self.tell(&ClientMessage::Reduced { round, attempt, digest })?;
                    Some((sent, came, meter.stop(sent)))
                }
                Attempt::Broken { from_left, to_right, error, stalled } => {
                    tracing::info!("round {round}: {error}");
                    let reason = printable(&error);
                    let broken = ClientMessage::Broken {
                        round,
                        attempt,
                        from_left,
                        to_right,
                        stalled,
                        reason,
                    };
                    self.tell(&broken)?;
                    None
                }
                Attempt::Nonfinite { what } => {
                    update.nonfinite = Nonfinite::Zeroed;
                    let rejects = self.terms.on_nonfinite == OnNonfinite::Reject;
                    examples = if rejects { 0.0 } else { examples };
                    tracing::warn!("round {round}: {what}");
                    let reason = printable(&what);
                    nonfinite = Some(what);
                    self.tell(&ClientMessage::Broken {
                        round,
                        attempt,
                        from_left: false,
                        to_right: false,
                        stalled: false,
                        reason,
                    })?;
                    None
                }
                Attempt::Halted => {
                    attempt += 1;
                    continue;
                }
            };
            match (self.next()?, done) {
                (AggregatorMessage::Halt { .. }, _) => attempt += 1,
                (AggregatorMessage::Applied { .. }, Some((sent, came, phase))) => {
                    return Ok(Outcome {
                        round,
                        attempts: attempt + 1,
                        rank: turn.rank as usize,
                        ranks: turn.ranks,
                        sent_bytes: sent,
                        received_bytes: came,
                        nonfinite,
                        phase,
                    });
                }
                _ => return Err(self.line.unexpected()),
            }
        }
    }

    /// Ends this member's part; the others hear why.
    pub fn give_up(&self, reason: &str) {
        let _ = self.line.writer.send(&ClientMessage::Failed { reason: printable(reason) });
    }

    /// Waits for what the coordinator says, signs of life aside.
    fn next(&mut self) -> Result<AggregatorMessage, ClientError> {
        match self.line.events.recv() {
            Ok(Happening::Message(AggregatorMessage::Failed { reason })) => {
                Err(self.line.ended(&reason))
            }
            Ok(Happening::Message(message)) => Ok(message),
            Ok(happening) => Err(self.ended(happening)),
            Err(_) => Err(self.ended(Happening::Lost(ControlError::Closed))),
        }
    }

    fn ended(&self, happening: Happening) -> ClientError {
        if self.canceller.is_cancelled() {
            return ClientError::Cancelled;
        }
        match happening {
            Happening::Message(AggregatorMessage::Failed { reason }) => self.line.ended(&reason),
            Happening::Lost(error) => self.line.control(error),
            _ => self.line.unexpected(),
        }
    }

    /// What is done at first with numbers that are NaN or infinite.
    fn nonfinite(&self) -> Nonfinite {
        match self.terms.on_nonfinite {
            OnNonfinite::Keep => Nonfinite::Kept,
            OnNonfinite::Reject | OnNonfinite::Zero => Nonfinite::Found,
        }
    }

    fn over(&self) -> ClientError {
        self.line.ended("all rounds are done")
    }

    fn tell(&self, message: &ClientMessage) -> Result<(), ClientError> {
        self.line.writer.send(message).map_err(|error| self.last_words(error))
    }

    /// Why nobody listens any more: the coordinator may have said so before it closed.
    fn last_words(&self, error: ControlError) -> ClientError {
        loop {
            match self.line.events.recv_timeout(limits::LAST_WORDS) {
                Ok(Happening::Message(AggregatorMessage::Failed { reason })) => {
                    return self.line.ended(&reason);
                }
                Ok(Happening::Lost(_)) | Err(_) => return self.ended(Happening::Lost(error)),
                Ok(_) => {}
            }
        }
    }

    /// Says that the update is ready, and lets the left neighbour in.
    fn make_ready(
        &mut self,
        round: u32,
        attempt: u32,
        examples: f64,
    ) -> Result<Receiver<Event>, ClientError> {
        let key: Ticket = random()?;
        let (events, streams) = mpsc::channel();
        let pass = Pass {
            key,
            connection: u64::from(attempt),
            taken: vec![false; limits::MAX_STREAMS],
            // Others may train for long.
            expiry: Expiry::after(Duration::from_millis(limits::MAX_DEADLINE_MS)),
        };
        let tickets = Tickets { clients: HashMap::from([(attempt, pass)]), events };
        self.door.admit(self.terms.session, tickets);
        let key = self.binding.veil(keys::Side::Client, round, attempt, &key);
        let (host, port, certificate) = (self.host.clone(), self.port, self.certificate.clone());
        let ready = ClientMessage::Ready { round, attempt, examples, host, port, key, certificate };
        self.tell(&ready)?;
        Ok(streams)
    }

    fn check_turn(&self, turn: &Turn, round: u32, attempt: u32) -> Result<(), ClientError> {
        let ranks = turn.ranks.len();
        let within = |value: u64, least: u64, most: u64| (least..=most).contains(&value);
        let valid = (turn.round, turn.attempt) == (round, attempt)
            && within(ranks as u64, 1, limits::MAX_RANKS as u64)
            && within(turn.streams.into(), 1, limits::MAX_STREAMS as u64)
            && within(turn.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)
            && (turn.rank as usize) < ranks
            && turn.right.is_empty() != self.schedule(turn, 0..0).has_right(turn.rank as usize);
        if valid {
            return Ok(());
        }
        let address = self.line.address.clone();
        Err(ClientError::Plan { address, why: "a turn that does not fit".into() })
    }

    /// Who moves which of these chunks when.
    fn schedule(&self, turn: &Turn, chunks: Range<usize>) -> Schedule {
        Schedule::new(self.terms.shape, turn.ranks.len(), chunks)
    }

    /// One attempt at an all-reduce.
    fn attempt(
        &mut self,
        turn: &Turn,
        streams: &Receiver<Event>,
        update: Update<'_>,
        out: &mut Target<'_>,
        held: &mut Vec<Arc<DataChannel>>,
    ) -> Result<Attempt, ClientError> {
        let plan = |why: String| ClientError::Plan { address: self.line.address.clone(), why };
        let chunks = self.manifest.chunks(turn.chunk_bytes).map_err(|e| plan(e.to_string()))?;
        let examples: Vec<f64> = turn.ranks.iter().map(|(_, examples)| *examples).collect();
        let weights = Weights::new(&examples).map_err(|error| plan(error.to_string()))?;
        if turn.ranks.len() > 1 {
            self.stage(turn, &chunks, matches!(out, Target::Region(_)))?;
        }
        let send_path = self.send_path(turn, out)?;
        let (sent, came) = (AtomicU64::new(0), AtomicU64::new(0));
        let task = Task {
            rank: turn.rank as usize,
            chunks: &chunks,
            source: update.source,
            nonfinite: update.nonfinite,
            weights: &weights,
            send_path,
            receive_path: self.config.client.receive_path,
            deadline: Duration::from_millis(self.terms.deadline_ms),
            sent: &sent,
            came: &came,
        };
        let mut sums = vec![0; chunks.len()];
        let ended = if turn.ranks.len() == 1 {
            let all = outs(out, &chunks.lanes(1), &chunks).pop();
            all.map_or(Ok(()), |out| lane::alone(&task, out, &mut sums)).map_err(End::Fault)
        } else {
            let met = self.meet(turn, streams, held);
            met.and_then(|channels| self.run_lanes(turn, &task, channels, out, &mut sums))
        };
        match ended {
            Ok(()) => Ok(Attempt::Done {
                digest: model_digest(&self.manifest.layout_digest(), turn.chunk_bytes, &sums),
                sent: sent.into_inner(),
                came: came.into_inner(),
            }),
            Err(End::Halted) => Ok(Attempt::Halted),
            Err(End::Session(error)) => Err(error),
            Err(End::Fault(Fault::Cancelled)) => Err(ClientError::Cancelled),
            Err(End::Fault(Fault::Ours(error))) => Err(ours(error)),
            Err(End::Fault(Fault::Nonfinite { chunk, index })) => {
                let place = verdict::place(&self.manifest, &chunks, chunk, index);
                let what = place.map_or_else(String::new, |place| {
                    let Place { tensor, index } = place;
                    format!("element {index} of tensor \"{tensor}\" is NaN or infinite")
                });
                Ok(Attempt::Nonfinite { what })
            }
            Err(End::Fault(Fault::Link { left, right, error })) => {
                let stalled = matches!(error, TransferError::Stalled { .. });
                let ranks = turn.ranks.len();
                let name = |step: usize| &turn.ranks[(turn.rank as usize + step) % ranks].0;
                let neighbour = if left { name(ranks - 1) } else { name(1) };
                let error = format!("neighbour \"{neighbour}\": {error}");
                Ok(Attempt::Broken { from_left: left, to_right: right, error, stalled })
            }
        }
    }

    /// Makes room for sums on their way, or takes that of the last round.
    fn stage(
        &mut self,
        turn: &Turn,
        chunks: &ChunkTable,
        keeps_mean: bool,
    ) -> Result<(), ClientError> {
        let mut most = 1;
        for chunk in 0..chunks.len() {
            // The layout was checked in the beginning.
            most = most.max(reducer::sums_bytes(&chunks.get(chunk)).unwrap_or(0) as u64);
        }
        let slots = self.schedule(turn, 0..0).slots(turn.rank as usize, keeps_mean);
        let wanted = (slots, most);
        if self.staged_for != wanted {
            self.stages.clear();
        }
        self.staged_for = wanted;
        while self.stages.len() < turn.streams as usize {
            self.stages.push(Stage::new(wanted.0, wanted.1)?);
        }
        self.stages.iter_mut().for_each(Stage::reset);
        Ok(())
    }

    /// How this host sends: what it holds is always memory of its own, and a file.
    fn send_path(&self, turn: &Turn, out: &Target<'_>) -> Result<SendKind, ClientError> {
        let region = match out {
            Target::Region(region) => region,
            Target::Sink(_) => match self.stages.first() {
                Some(stage) => stage.region(),
                None => return Ok(SendKind::copying()),
            },
        };
        let source = RegionSource::new(&self.manifest, region, turn.chunk_bytes, Vec::new());
        Ok(SendKind::choose(self.config.client.send_path, &source)?)
    }

    /// Dials the right neighbour, and waits for the left one; gives the connections of each lane.
    fn meet(
        &self,
        turn: &Turn,
        streams: &Receiver<Event>,
        held: &mut Vec<Arc<DataChannel>>,
    ) -> Result<Vec<Channels>, End> {
        let (schedule, rank) = (self.schedule(turn, 0..0), turn.rank as usize);
        let until = Instant::now() + Duration::from_millis(self.terms.deadline_ms);
        let mut lanes: Vec<Channels> = (0..turn.streams).map(|_| [None, None]).collect();
        if schedule.has_right(rank) {
            self.dial_right(turn, until, &mut lanes)?;
        }
        held.extend(lanes.iter().flatten().flatten().cloned());
        if schedule.has_left(rank) {
            self.await_left(turn, streams, until, &mut lanes)?;
        }
        held.extend(lanes.iter().filter_map(|[left, _]| left.clone()));
        Ok(lanes)
    }

    fn dial_right(&self, turn: &Turn, until: Instant, lanes: &mut [Channels]) -> Result<(), End> {
        let tls = self.pinned(turn).map_err(End::Session)?;
        let key = &turn.right_key;
        let key = self.binding.veil(keys::Side::Aggregator, turn.round, turn.attempt, key);
        for (stream, [_, right]) in (0..).zip(lanes) {
            let hello = DataHello::new(self.terms.session, turn.attempt, stream, &key);
            let opened = self.dial(turn, tls.as_ref(), &hello, &key, until);
            let opened = opened.map_err(|error| End::Fault(Fault::at(Side::Right, error)))?;
            *right = Some(Arc::new(opened));
        }
        Ok(())
    }

    /// The right neighbour is nobody else than the one with this certificate, which came over a channel that
    /// the coordinator has proven to own.
    fn pinned(&self, turn: &Turn) -> Result<Option<ClientTls>, ClientError> {
        let invalid = |error: TlsError| ClientError::Plan {
            address: self.line.address.clone(),
            why: format!("the certificate of the right neighbour: {error}"),
        };
        match self.config.client.tls {
            None => Ok(None),
            Some(_) => ClientTls::pinned(&turn.right_certificate).map(Some).map_err(invalid),
        }
    }

    fn dial(
        &self,
        turn: &Turn,
        tls: Option<&ClientTls>,
        hello: &DataHello,
        key: &Ticket,
        until: Instant,
    ) -> Result<DataChannel, TransferError> {
        let left = until.saturating_duration_since(Instant::now()).max(GLANCE);
        let mut addresses = turn.right.as_str().to_socket_addrs()?;
        let address =
            addresses.next().ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotFound))?;
        let socket = control::dial(address, &self.config.client.congestion, left)?;
        socket.set_write_timeout(Some(left))?;
        let link = Link::dialled(socket, tls, until);
        match link.and_then(|link| channel::open(link, hello, key, until)) {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(_)) => Err(TransferError::Closed),
            Err(ControlError::Io(error)) => Err(error.into()),
            Err(ControlError::Tls(error)) => Err(std::io::Error::other(error).into()),
            Err(ControlError::Silent) => {
                Err(TransferError::Stalled { seconds: left.as_secs_f64() })
            }
            Err(_) => Err(TransferError::Closed),
        }
    }

    fn await_left(
        &self,
        turn: &Turn,
        streams: &Receiver<Event>,
        until: Instant,
        lanes: &mut [Channels],
    ) -> Result<(), End> {
        let fault = |error| Err(End::Fault(Fault::at(Side::Left, error)));
        while lanes.iter().any(|[left, _]| left.is_none()) {
            match streams.recv_timeout(GLANCE) {
                Ok(Event::Stream { stream, channel, .. }) => match lanes.get_mut(stream as usize) {
                    Some([left, _]) => *left = Some(Arc::new(channel)),
                    None => return fault(TransferError::TooMuch),
                },
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(End::Halted),
            }
            if let Ok(happening) = self.line.events.try_recv() {
                return Err(self.end_of(turn, happening));
            }
            if Instant::now() > until {
                let seconds = self.terms.deadline_ms as f64 / 1000.0;
                return fault(TransferError::Stalled { seconds });
            }
        }
        Ok(())
    }

    /// Why an attempt ends when this happens.
    fn end_of(&self, turn: &Turn, happening: Happening) -> End {
        match happening {
            Happening::Message(AggregatorMessage::Halt { round, attempt, .. })
                if (round, attempt) == (turn.round, turn.attempt) =>
            {
                End::Halted
            }
            Happening::Lane(Err(fault)) => End::Fault(fault),
            happening => End::Session(self.ended(happening)),
        }
    }

    /// Runs all lanes to their end, or until something ends them.
    fn run_lanes(
        &mut self,
        turn: &Turn,
        task: &Task<'_>,
        channels: Vec<Channels>,
        out: &mut Target<'_>,
        sums: &mut [u64],
    ) -> Result<(), End> {
        let host = |error| End::Session(ClientError::Host(error));
        let ranges = task.chunks.lanes(turn.streams as usize);
        let signals: std::io::Result<Vec<Signal>> = ranges.iter().map(|_| Signal::new()).collect();
        let signals = signals.map_err(host)?;
        let shape = self.terms.shape;
        let outs = outs(out, &ranges, task.chunks);
        let mut stages = std::mem::take(&mut self.stages);
        let ended = std::thread::scope(|scope| {
            let mut sums = sums;
            let parts = ranges.iter().zip(&mut stages).zip(&signals).zip(channels).zip(outs);
            for ((((range, stage), signal), channels), out) in parts {
                let (own_sums, rest) = sums.split_at_mut(range.len());
                sums = rest;
                let part = LanePart {
                    schedule: Schedule::new(shape, turn.ranks.len(), range.clone()),
                    out,
                    sums: own_sums,
                    first_chunk: range.start,
                    stage,
                    signal,
                };
                let (says, reports) = (self.line.sender.clone(), self.line.sender.clone());
                let work = move || {
                    // Nobody listens any more when the member has ended.
                    let _ = says.send(Happening::Lane(lane::run(task, part, channels)));
                    Ok(())
                };
                start_lane(scope, work, move |result| {
                    if let Err(error) = result {
                        let _ = reports.send(Happening::Lane(Err(Fault::Ours(error))));
                    }
                });
            }
            self.attend(turn, &signals)
        });
        self.stages = stages;
        ended
    }

    /// Waits until all lanes have ended. What ends one ends all.
    fn attend(&self, turn: &Turn, signals: &[Signal]) -> Result<(), End> {
        let mut running = signals.len();
        let mut ended = Ok(());
        while running > 0 {
            let end = match self.line.events.recv() {
                Ok(Happening::Lane(result)) => {
                    running -= 1;
                    match result {
                        Ok(()) => continue,
                        Err(fault) => End::Fault(fault),
                    }
                }
                Ok(happening) => self.end_of(turn, happening),
                Err(_) => End::Halted,
            };
            signals.iter().for_each(Signal::cancel);
            // What the coordinator says is said once: a lane that broke just before must not hide it.
            let is_word = matches!(end, End::Halted | End::Session(_));
            if ended.is_ok() || is_word && matches!(ended, Err(End::Fault(_))) {
                ended = Err(end);
            }
        }
        ended
    }
}

/// What a host brings.
#[derive(Clone, Copy)]
struct Update<'a> {
    source: &'a dyn Source,
    nonfinite: Nonfinite,
}

/// The part of each lane in the output.
fn outs<'a>(out: &'a mut Target<'_>, lanes: &[Range<usize>], chunks: &ChunkTable) -> Vec<Out<'a>> {
    let region = match out {
        Target::Sink(sink) => return lanes.iter().map(|_| Out::Passed(*sink)).collect(),
        Target::Region(region) => region,
    };
    let position = region.position();
    let (mut rest, file) = region.bytes_mut();
    let mut outs = Vec::new();
    for lane in lanes {
        let Range { start, end } = chunks.bytes_of(lane);
        let (bytes, behind) = rest.split_at_mut((end - start) as usize);
        rest = behind;
        outs.push(Out::Kept { bytes, start, file: (file, position + start) });
    }
    outs
}

/// The data channels of a lane, to the left and to the right neighbour.
type Channels = [Option<Arc<DataChannel>>; 2];

/// Why an attempt ended.
enum End {
    Fault(Fault),
    Halted,
    Session(ClientError),
}

impl Line {
    fn ended(&self, reason: &str) -> ClientError {
        ClientError::Ended { address: self.address.clone(), reason: printable(reason) }
    }

    fn control(&self, error: ControlError) -> ClientError {
        ClientError::Control { address: self.address.clone(), error }
    }

    fn unexpected(&self) -> ClientError {
        self.control(ProtocolError::Unexpected { what: "a message" }.into())
    }
}

impl Drop for Member {
    /// Ends the thread that reads, and shows the coordinator that nobody is here.
    fn drop(&mut self) {
        self.line.writer.shut_down();
    }
}

/// Our own memory, model and host are no neighbour's fault.
fn ours(error: LaneError) -> ClientError {
    match error {
        LaneError::Peer { error: TransferError::Region(error), .. } => error.into(),
        LaneError::Peer { error: TransferError::Source(error), .. } => error.into(),
        LaneError::Peer { error: TransferError::Sink(error), .. } => error.into(),
        error => ClientError::Lane(error),
    }
}

/// Reads the control channel until it ends.
fn read(mut reader: Reader, events: &Sender<Happening>) {
    loop {
        let happening = match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(AggregatorMessage::Alive) => continue,
            Ok(message) => Happening::Message(message),
            Err(error) => Happening::Lost(error),
        };
        let last = matches!(happening, Happening::Lost(_));
        if events.send(happening).is_err() || last {
            return;
        }
    }
}

/// Where the left neighbour is let in, and what it is told to dial.
fn listen(config: &RingMember, local: IpAddr) -> Result<(TcpListener, String), ClientError> {
    let (address, host) = match &config.advertise {
        None => (SocketAddr::new(local, 0), String::new()),
        Some(advertised) => {
            let bad = || {
                let text = format!("cannot be reached at \"{advertised}\": it must be HOST:PORT");
                std::io::Error::new(std::io::ErrorKind::InvalidInput, text)
            };
            let (host, port) = advertised.rsplit_once(':').ok_or_else(bad)?;
            let port: u16 = port.parse().map_err(|_| bad())?;
            (SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port), host.to_owned())
        }
    };
    Ok((control::listen(address, &config.client.congestion)?, host))
}

/// Control channels are not for members.
fn nobody() -> Reception {
    Reception {
        secret: Box::new(|_| None),
        welcome: Box::new(|visit| match visit {
            Visit::Join(joined) => refuse(&joined.channel, "this is a member of a ring or chain"),
            Visit::Call { channel, .. } => refuse(&channel, "this is a member of a ring or chain"),
        }),
    }
}
