//! A client's connection to its aggregator: how it is made, and made again when it breaks.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Canceller, ClientConfig, ClientShared, Event};
use rustix::io::Errno;

use crate::channel::{self, DataChannel};
use crate::control::{self, ControlChannel, Heartbeat, Reader, Writer, printable};
use crate::error::{ClientError, ControlError, ProtocolError, TransferError, WireError};
use crate::lane::ConnectionId;
use crate::limits;
use crate::quota::Quota;
use crate::wire::hello::{DataHello, Secret, Ticket};
use crate::wire::keys::Binding;
use crate::wire::message::{AggregatorMessage, ClientMessage, Plan, RingTerms};

/// A control channel and its data channels.
pub(super) struct Link {
    pub id: ConnectionId,
    pub address: SocketAddr,
    pub plan: Plan,
    pub writer: Arc<Writer>,
    pub streams: Vec<Arc<DataChannel>>,
    _heartbeat: Heartbeat,
}

impl Link {
    pub fn shut_down(&self) {
        self.writer.shut_down();
        self.streams.iter().for_each(|channel| channel.hang_up());
    }
}

/// What was found at the other end.
pub(super) enum Connected {
    /// An aggregator that averages: its plan, and the data channels to it.
    Star(Box<Link>, Reader),
    /// One that brings hosts together.
    Ring(Box<RingEntry>),
}

/// A control channel to whoever keeps a ring together.
pub(crate) struct RingEntry {
    pub address: SocketAddr,
    pub local: SocketAddr,
    pub reader: Reader,
    pub writer: Arc<Writer>,
    pub binding: Binding,
    pub terms: RingTerms,
}

/// What it takes to connect.
pub(super) struct Dialler {
    pub address: String,
    pub config: ClientConfig,
    /// The model's header, if the client knows it.
    pub header: Vec<u8>,
    /// Whether it will send sums.
    pub is_edge: bool,
    pub canceller: Canceller,
}

impl Dialler {
    /// Joins, waits for the plan, and opens the data channels.
    pub fn connect(
        &self,
        id: ConnectionId,
        resumes: Option<Ticket>,
    ) -> Result<Connected, ClientError> {
        let config = &self.config;
        let dial = |source| ClientError::Dial { address: self.address.clone(), source };
        let socket =
            control::dial(&self.address, &config.congestion, config.deadline).map_err(dial)?;
        // Who ends the connection at once leaves it without an address.
        let address = socket.peer_addr().map_err(dial)?;
        let local = socket.local_addr().map_err(dial)?;
        let at = |error: ControlError| ClientError::Control { address: address.to_string(), error };
        self.canceller.watch_socket(&socket)?;
        let until = Instant::now() + config.deadline;
        let early_silence = config.reconnect.unwrap_or(config.deadline);
        let early_silence = control::silence_limit(config.deadline, early_silence);
        let opened = crate::link::Link::dialled(socket, config.tls.as_ref(), until)
            .and_then(|link| ControlChannel::open(link, &config.secret, early_silence));
        let ControlChannel { mut reader, writer, binding } =
            opened.map_err(|error| not_let_in(error, &config.secret, address))?;
        self.canceller.watch(&writer)?;
        let (name, examples) = (config.name.clone(), config.examples);
        let (header, place) = (self.header.clone(), config.secret.place());
        let join = match self.is_edge {
            true => ClientMessage::JoinAsEdge { name, examples, header, place, resumes },
            false => ClientMessage::Join { name, examples, header, place, resumes },
        };
        writer.send(&join).map_err(at)?;
        self.canceller.state().answered = true;

        let beat = |deadline| {
            let listeners = Arc::new(Mutex::new(vec![writer.clone()]));
            Heartbeat::start(listeners, ClientMessage::Alive, deadline)
        };
        // The plan says the aggregator's deadline; until then it may be any.
        let early = beat(limits::MIN_DEADLINE)?;
        let plan = match await_plan(&mut reader, address)? {
            First::Plan(plan) => plan,
            First::Ring(terms) => {
                let entry = RingEntry { address, local, reader, writer, binding, terms };
                return Ok(Connected::Ring(Box::new(entry)));
            }
        };
        check_plan(&plan, address)?;
        let key = binding.key(&plan.ticket);
        let deadline = Duration::from_millis(plan.deadline_ms);
        let reconnect = config.reconnect.unwrap_or(deadline);
        let silence = control::silence_limit(deadline, reconnect);
        let heartbeat = beat(silence)?;
        drop(early);
        reader.set_deadline(silence)?;
        let streams = (0..plan.streams)
            .map(|stream| open_stream(address, &plan, &key, config, stream).map(Arc::new))
            .collect::<Result<_, _>>()
            .map_err(|error| last_words(&mut reader, address, error))?;
        // Its last words were given less time.
        reader.set_deadline(silence)?;
        let link = Link { id, address, plan, writer, streams, _heartbeat: heartbeat };
        Ok(Connected::Star(Box::new(link), reader))
    }

    /// Connects again, with pauses that grow, until an aggregator that lives answers, or the time
    /// `window` is over; then the error is `first`. An aggregator that has answered before may be started
    /// again; where none has, and nobody listens now, there is none.
    pub fn connect_again(
        &self,
        id: ConnectionId,
        resumes: Option<Ticket>,
        (first, window): (ClientError, Duration),
        stopped: &Receiver<()>,
    ) -> Result<Connected, ClientError> {
        let until = Instant::now() + window;
        let mut pause = limits::FIRST_PAUSE;
        while !self.canceller.is_cancelled() && Instant::now() < until {
            tracing::info!("{first}; dialling again");
            match self.connect(id, resumes) {
                Ok(connected) => return Ok(connected),
                Err(error) if is_final(&error) => return Err(error),
                Err(error) if is_refused(&error) && !self.was_answered(resumes) => {
                    tracing::warn!("nobody listens at {} any more", self.address);
                    break;
                }
                Err(_) => {}
            }
            if stopped.recv_timeout(jittered(pause)) != Err(RecvTimeoutError::Timeout) {
                break;
            }
            pause = (2 * pause).min(limits::LONGEST_PAUSE);
        }
        Err(first)
    }

    /// Whether an aggregator has let this client in, or in the session that it resumes.
    fn was_answered(&self, resumes: Option<Ticket>) -> bool {
        resumes.is_some() || self.canceller.state().answered
    }
}

/// Whether nobody listens there.
fn is_refused(error: &ClientError) -> bool {
    let refused = |source: &std::io::Error| source.kind() == ErrorKind::ConnectionRefused;
    matches!(error, ClientError::Dial { source, .. } if refused(source))
}

/// A time around `pause`: clients who lost their aggregator together come back one by one.
fn jittered(pause: Duration) -> Duration {
    let mut random = [0];
    // Without randomness they come together.
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    pause.mul_f64(0.5 + f64::from(random[0]) / 256.0)
}

/// Whether it would be the same again. First bytes that are wrong may have been changed on the way: the
/// session stood before.
fn is_final(error: &ClientError) -> bool {
    match error {
        ClientError::Control { error, .. } => matches!(error, ControlError::Tls(_)),
        error => !is_interruption(error),
    }
}

/// Whether a new connection may help.
pub(super) fn is_interruption(error: &ClientError) -> bool {
    match error {
        ClientError::Dial { source, .. } => !is_our_lack(source),
        ClientError::Refused { .. } => true,
        ClientError::Control { error, .. } => {
            matches!(
                error,
                ControlError::Closed
                    | ControlError::Silent
                    | ControlError::Io(_)
                    | ControlError::Wire(WireError::Seal)
            )
        }
        ClientError::Transfer { error, .. } => matches!(
            error,
            TransferError::Closed
                | TransferError::Io(_)
                | TransferError::Stalled { .. }
                | TransferError::NoChecksum
        ),
        _ => false,
    }
}

/// Whether this process lacks what a connection takes.
fn is_our_lack(error: &std::io::Error) -> bool {
    let lack = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::PERM, Errno::ACCESS];
    lack.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Reads the aggregator's control channel until it ends, and then connects again.
pub(super) struct Keeper {
    pub dialler: Dialler,
    pub shared: Arc<ClientShared>,
    pub events: Sender<Event>,
    pub stopped: Receiver<()>,
}

impl Keeper {
    /// Runs until the session is over or cannot be resumed.
    pub fn run(self, first: &Plan, mut reader: Reader, at: SocketAddr) {
        let (mut id, mut ticket) = (1, first.ticket);
        let deadline = Duration::from_millis(first.deadline_ms);
        let window = self.dialler.config.reconnect.unwrap_or(deadline);
        loop {
            // Who was told that the session is over does not come again.
            let Some(error) = self.read(&mut reader) else { return };
            let error = ClientError::Control { address: at.to_string(), error };
            let is_over = self.stopped.try_recv() == Err(TryRecvError::Disconnected);
            let resumes = is_interruption(&error) && !window.is_zero();
            if is_over || !resumes {
                return drop(self.events.send(Event::Lost(error)));
            }
            if self.events.send(Event::Down).is_err() {
                return;
            }
            id += 1;
            self.shared.dials.store(true, Ordering::SeqCst);
            let again = (error, window);
            let connected = self.dialler.connect_again(id, Some(ticket), again, &self.stopped);
            self.shared.dials.store(false, Ordering::SeqCst);
            match connected {
                Ok(Connected::Ring(entry)) => {
                    return drop(self.events.send(Event::Lost(not_a_star(entry.address))));
                }
                Ok(Connected::Star(link, _)) if !is_same_session(&link.plan, first) => {
                    let error = ClientError::OtherSession { address: at.to_string() };
                    return drop(self.events.send(Event::Lost(error)));
                }
                Ok(Connected::Star(link, next)) => {
                    (ticket, reader) = (link.plan.ticket, next);
                    if self.events.send(Event::Up(link)).is_err() {
                        return;
                    }
                }
                Err(error) => return drop(self.events.send(Event::Lost(error))),
            }
        }
    }

    /// Hands on what the aggregator says. Why that ended; nothing if it was the last word.
    fn read(&self, reader: &mut Reader) -> Option<ControlError> {
        let unheard = Quota::new(limits::MAX_UNHEARD_BYTES);
        loop {
            let (bytes, message) = match read_one(reader) {
                Ok(read) => read,
                Err(error) => return Some(error),
            };
            match message {
                AggregatorMessage::Alive => {}
                AggregatorMessage::Sums { first, sums } => {
                    if let Err(error) = self.shared.announce(first, &sums) {
                        return Some(error.into());
                    }
                }
                message => {
                    let Some(share) = unheard.take(bytes + limits::UNHEARD_BYTES) else {
                        return Some(ProtocolError::Flood.into());
                    };
                    match message {
                        AggregatorMessage::Download { round, digest } => {
                            self.shared.begin_download(round, digest);
                        }
                        AggregatorMessage::Fold { round, seed: Some(digest), .. } => {
                            self.shared.begin_seed(round, digest);
                        }
                        _ => {}
                    }
                    let is_last = matches!(message, AggregatorMessage::Failed { .. });
                    if self.events.send(Event::Message { message, _unheard: share }).is_err()
                        || is_last
                    {
                        return None;
                    }
                }
            }
        }
    }
}

/// An aggregator that began again may have begun another session.
fn is_same_session(plan: &Plan, first: &Plan) -> bool {
    let terms = |plan: &Plan| (plan.session, plan.client, plan.streams, plan.chunk_bytes);
    terms(plan) == terms(first)
}

/// A message, and how many bytes it has.
fn read_one(reader: &mut Reader) -> Result<(u64, AggregatorMessage), ControlError> {
    let bytes = reader.read_length(limits::MAX_SHORT_FRAME_BYTES)?;
    Ok((bytes, reader.read_body(bytes)?))
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

/// A ring was found where an aggregator that averages was expected.
pub(super) fn not_a_star(address: SocketAddr) -> ClientError {
    let why = "its clients form a ring".to_owned();
    ClientError::Plan { address: address.to_string(), why }
}

/// What an aggregator says first.
enum First {
    Plan(Plan),
    Ring(RingTerms),
}

/// The plan comes when the last client has joined; until then only signs of life do. The terms of a ring
/// come at once.
fn await_plan(reader: &mut Reader, address: SocketAddr) -> Result<First, ClientError> {
    let address = address.to_string();
    loop {
        match reader.read(limits::MAX_FRAME_BYTES) {
            Ok(AggregatorMessage::Alive) => {}
            Ok(AggregatorMessage::Plan(plan)) => return Ok(First::Plan(plan)),
            Ok(AggregatorMessage::Ring(terms)) => return Ok(First::Ring(terms)),
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

fn check_plan(plan: &Plan, address: SocketAddr) -> Result<(), ClientError> {
    let within = |what: &str, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        let why = format!("{what} {value} is not between {least} and {most}");
        Err(ClientError::Plan { address: address.to_string(), why })
    };
    within("streams", plan.streams.into(), 1, limits::MAX_STREAMS as u64)?;
    within("chunk bytes", plan.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
    within("deadline", plan.deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)
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
    let link = crate::link::Link::dialled(socket, config.tls.as_ref(), until).map_err(at)?;
    channel::open(link, &hello, key, until).map_err(at)?.map_err(|answer| {
        let (address, answer) = (address.to_string(), answer.text());
        ClientError::Refused { address, stream, answer }
    })
}
