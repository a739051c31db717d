//! Brings the hosts of a ring together, tells each who its neighbours are, and keeps count. No parameter
//! passes through it.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::aggregator::door::{Door, Reception, Visit};
use crate::aggregator::{
    Event, Joined, WaitingRoom, bad_weight, check_examples, check_model, check_name,
    default_streams, label, read_client, refuse, refuse_open,
};
use crate::control::{self, Congestion, Heartbeat, Listeners, Writer, printable, random};
use crate::error::{AggregatorError, Fault, ProtocolError};
use crate::lane::ConnectionId;
use crate::limits;
use crate::manifest::Manifest;
use crate::reducer::{AccumulatorLayout, Weights};
use crate::tls::ServerTls;
use crate::topology::ring::Schedule;
use crate::topology::{self, Host, Shape};
use crate::verdict::OnNonfinite;
use crate::wire::hello::{Secret, SessionId, Ticket};
use crate::wire::keys::{Binding, Side};
use crate::wire::message::{AggregatorMessage, ClientMessage, RingTerms, Turn};

/// How a ring works. [`Default`] gives every field but `ranks` a value for daily use.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// In which way they average.
    pub shape: Shape,
    /// Hosts to wait for.
    pub ranks: usize,
    /// Hosts without whom there is no mean; all of them if this is not said.
    pub min_ranks: Option<usize>,
    /// How long a round waits for those who are not ready, training included, before it goes on without
    /// them.
    pub round_deadline: Option<Duration>,
    /// Rounds that will be run; told to the hosts.
    pub rounds: u32,
    /// Lanes, and so connections between neighbours; if it is not said, as
    /// [`topology::ring::streams`] says.
    pub streams: Option<usize>,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Silence after which a host is given up.
    pub deadline: Duration,
    /// Congestion control of the listener.
    pub congestion: Congestion,
    /// What a host does with its own update if elements of it are NaN or infinite.
    pub on_nonfinite: OnNonfinite,
    /// What hosts must know to be let in; [`Secret::OPEN`] lets in everyone.
    pub secret: Secret,
    /// Encrypts all connections, those between hosts too; what the hosts are shown.
    pub tls: Option<ServerTls>,
    /// Whether everyone may join also from other machines.
    pub insecure: bool,
    /// Names of hosts in the order in which they stand, as [`topology::ring::ranks`] says.
    pub order: Vec<String>,
}

impl Default for RingConfig {
    fn default() -> Self {
        RingConfig {
            shape: Shape::Ring,
            ranks: 2,
            min_ranks: None,
            round_deadline: None,
            rounds: 1,
            streams: None,
            chunk_bytes: limits::RING_CHUNK_BYTES,
            deadline: limits::DEADLINE,
            congestion: Congestion::Auto,
            on_nonfinite: OnNonfinite::Reject,
            secret: Secret::OPEN,
            tls: None,
            insecure: false,
            order: Vec::new(),
        }
    }
}

/// What a round came to.
#[derive(Clone, Debug)]
pub struct RoundReport {
    /// The round, counted from 1.
    pub round: u32,
    /// Attempts that it took.
    pub attempts: u32,
    /// Names and weights of those whose updates are in the mean, by rank.
    pub ranks: Vec<(String, f64)>,
    /// Names of those whose updates had elements that are NaN or infinite, and which. They are left out, or
    /// those elements counted as zero, as [`RingConfig::on_nonfinite`] says.
    pub nonfinite: Vec<(String, String)>,
    /// Digest of the mean, as every one of them has it.
    pub digest: [u8; 32],
    /// Seconds from the moment when all were ready to the last word that the mean is there.
    pub seconds: f64,
}

/// Keeps a ring together.
pub struct Coordinator {
    config: RingConfig,
    address: SocketAddr,
    session: SessionId,
    events: Receiver<Event>,
    sender: Sender<Event>,
    model: Option<Manifest>,
    peers: Vec<Peer>,
    next_connection: ConnectionId,
    listeners: Listeners,
    round: u32,
    // Dropped last: they end threads.
    _heartbeat: Heartbeat,
    _door: Door,
}

/// A host that has joined.
struct Peer {
    name: String,
    address: SocketAddr,
    connection: ConnectionId,
    writer: Arc<Writer>,
    binding: Binding,
    reader: Option<JoinHandle<()>>,
    /// The round that it was asked for last.
    asked: u32,
    ready: Option<Ready>,
    reduced: Option<[u8; 32]>,
    broken: Option<Broken>,
    /// What in its update of this round is NaN or infinite.
    nonfinite: Option<String>,
}

/// Where a host waits for its left neighbour.
struct Ready {
    examples: f64,
    at: String,
    key: Ticket,
    certificate: Vec<u8>,
}

/// Why an attempt cannot go on at a host.
struct Broken {
    from_left: bool,
    to_right: bool,
    stalled: bool,
    reason: String,
}

impl Broken {
    /// Neither neighbour is to blame: the host has found numbers in its update that may not count.
    fn is_own(&self) -> bool {
        !self.from_left && !self.to_right
    }
}

impl Peer {
    fn label(&self) -> String {
        label(&self.name, self.address)
    }

    fn host(&self) -> Host {
        Host { name: self.name.clone(), ip: self.address.ip().to_canonical() }
    }
}

impl Drop for Peer {
    /// No thread and no connection outlives a host that is lost.
    fn drop(&mut self) {
        self.writer.shut_down();
        if let Some(reader) = self.reader.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = reader.join();
        }
    }
}

/// Ends a ring from another thread.
#[derive(Clone)]
pub struct Stopper(Sender<Event>);

impl Stopper {
    /// Makes the call that runs, or else the next one, fail with [`AggregatorError::Cancelled`].
    pub fn stop(&self) {
        // Nobody listens any more when the ring has ended.
        let _ = self.0.send(Event::Warm { result: Err(AggregatorError::Cancelled) });
    }
}

/// What happened.
enum Notice {
    /// A host said something.
    Said(usize, ClientMessage),
    /// A host is gone.
    Lost(usize, Fault),
    /// Nothing until the time that was given.
    Timeout,
}

impl Coordinator {
    /// Checks `config` and listens on `address`.
    ///
    /// # Errors
    /// A number out of its bounds; an address that cannot be listened on, or that is open to all.
    pub fn bind(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: RingConfig,
    ) -> Result<Coordinator, AggregatorError> {
        check(&config)?;
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &config.congestion).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let is_open = config.secret == Secret::OPEN && config.tls.is_none() && !config.insecure;
        refuse_open(is_open, bound)?;
        let (sender, events) = std::sync::mpsc::channel();
        let reception = reception(&config, sender.clone());
        let (congestion, tls) = (config.congestion.clone(), config.tls.clone());
        let door = Door::open(listener, congestion, tls, limits::MAX_VISITORS, reception)
            .map_err(listen)?;
        let listeners = Listeners::default();
        let silence = control::silence_limit(config.deadline, config.deadline);
        let heartbeat = Heartbeat::start(listeners.clone(), AggregatorMessage::Alive, silence)?;
        Ok(Coordinator {
            config,
            address: bound,
            session: random()?,
            events,
            sender,
            model: None,
            peers: Vec::new(),
            next_connection: 1,
            listeners,
            round: 0,
            _heartbeat: heartbeat,
            _door: door,
        })
    }

    /// Where hosts can dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends the ring from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.sender.clone())
    }

    /// Names, addresses of those who are here.
    pub fn members(&self) -> impl Iterator<Item = (&str, SocketAddr)> {
        self.peers.iter().map(|peer| (peer.name.as_str(), peer.address))
    }

    /// The model's layout, once somebody has joined.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.model.as_ref()
    }

    /// Waits until all hosts have joined with the same model. One that leaves meanwhile may be replaced.
    ///
    /// # Errors
    /// As [`Coordinator::run_round`].
    pub fn gather(&mut self) -> Result<(), AggregatorError> {
        let mut began = None;
        while self.peers.len() < self.config.ranks {
            let waited = began.map(|began: Instant| began.elapsed());
            let enough = self.peers.len() >= self.least();
            if enough && self.config.round_deadline.is_some_and(|most| waited >= Some(most)) {
                break;
            }
            match self.next(Some(Instant::now() + limits::MIN_DEADLINE))? {
                Notice::Lost(peer, fault) => {
                    let peer = self.peers.remove(peer);
                    tracing::warn!("{}: {fault}; another one is awaited", peer.label());
                }
                Notice::Said(peer, _) => {
                    let fault = unexpected();
                    let peer = self.peers.remove(peer);
                    tell(&peer, &AggregatorMessage::Failed { reason: fault.to_string() });
                }
                Notice::Timeout => {}
            }
            if began.is_none() && !self.peers.is_empty() {
                began = Some(Instant::now());
            }
        }
        Ok(())
    }

    /// Runs one all-reduce: waits until every host is ready, and until every one has the mean. Hosts that
    /// are lost meanwhile are left out, as long as enough are left.
    ///
    /// # Errors
    /// Too few hosts are left: the error names the one that was lost last. All hosts have heard it.
    pub fn run_round(&mut self) -> Result<RoundReport, AggregatorError> {
        let ended = self.try_round();
        if let Err(error) = &ended {
            self.give_up(&error.to_string());
            self.await_ends(Instant::now() + limits::LAST_WORDS);
        }
        ended
    }

    /// Tells every host that this ring cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        self.tell_all(&AggregatorMessage::Failed { reason: printable(reason) });
    }

    /// Tells every host that all rounds are done.
    pub fn finish(mut self) {
        self.tell_all(&AggregatorMessage::Done);
        self.await_ends(Instant::now() + self.config.deadline);
    }

    /// A host closes when it has read the last word; only then is it sure to have.
    fn await_ends(&mut self, until: Instant) {
        while !self.peers.is_empty() {
            match self.next(Some(until)) {
                Ok(Notice::Lost(peer, _)) => drop(self.peers.remove(peer)),
                Ok(Notice::Said(..)) => {}
                Ok(Notice::Timeout) | Err(_) => break,
            }
        }
    }

    fn least(&self) -> usize {
        self.config.min_ranks.unwrap_or(self.config.ranks)
    }

    fn tell_all(&self, message: &AggregatorMessage) {
        self.peers.iter().for_each(|peer| tell(peer, message));
    }

    fn try_round(&mut self) -> Result<RoundReport, AggregatorError> {
        self.round += 1;
        let round = self.round;
        let waits_until = self.config.round_deadline.map(|most| Instant::now() + most);
        for peer in &mut self.peers {
            peer.asked = round;
            (peer.ready, peer.reduced, peer.broken) = (None, None, None);
            peer.nonfinite = None;
            tell(peer, &AggregatorMessage::Upload { round });
        }
        let (mut attempt, mut repeats) = (0, 0);
        loop {
            self.await_ready(attempt, waits_until)?;
            let began = Instant::now();
            let ranks = self.begin(attempt)?;
            let fault = match self.watch(attempt, &ranks)? {
                Ok(digest) => {
                    self.tell_all(&AggregatorMessage::Applied { round, left_out: None });
                    let seconds = began.elapsed().as_secs_f64();
                    let ranks = ranks.into_iter().map(|rank| (rank.name, rank.examples)).collect();
                    return Ok(RoundReport {
                        round,
                        attempts: attempt + 1,
                        ranks,
                        nonfinite: self.nonfinite(),
                        digest,
                        seconds,
                    });
                }
                Err(fault) => fault,
            };
            let reason = match fault {
                Trouble::Lost(connection, fault) => {
                    repeats = 0;
                    self.lose(connection, fault)?
                }
                // Both ends live: the connection between them had an accident.
                Trouble::Link(connection, fault) if repeats >= limits::MAX_REPEATS => {
                    repeats = 0;
                    self.lose(connection, fault)?
                }
                Trouble::Link(_, fault) => {
                    repeats += 1;
                    fault.to_string()
                }
                Trouble::Nonfinite(connection, what) => self.note_nonfinite(connection, what)?,
            };
            tracing::warn!("round {round}: {reason}; it is begun again");
            let reason = printable(&reason);
            for peer in &mut self.peers {
                (peer.ready, peer.reduced, peer.broken) = (None, None, None);
                if peer.asked == round {
                    let reason = reason.clone();
                    tell(peer, &AggregatorMessage::Halt { round, attempt, reason });
                }
            }
            attempt += 1;
        }
    }

    /// Who had to look at its update again, and why.
    fn nonfinite(&self) -> Vec<(String, String)> {
        let found = |peer: &Peer| peer.nonfinite.clone().map(|what| (peer.name.clone(), what));
        self.peers.iter().filter_map(found).collect()
    }

    /// A host has found that its update may not count as it is; gives that in one line.
    ///
    /// # Errors
    /// Too few are left.
    fn note_nonfinite(
        &mut self,
        connection: ConnectionId,
        what: String,
    ) -> Result<String, AggregatorError> {
        let gave_up = Fault::GaveUp { reason: what.clone() };
        let peer = self.peers.iter_mut().find(|peer| peer.connection == connection);
        let Some(peer) = peer.filter(|peer| peer.nonfinite.is_none()) else {
            // It says so once in a round: after that its update is clean.
            return self.lose(connection, gave_up);
        };
        let client = peer.label();
        peer.nonfinite = Some(what.clone());
        let counts = |peer: &&Peer| peer.asked == self.round && peer.nonfinite.is_none();
        let rejects = self.config.on_nonfinite == OnNonfinite::Reject;
        match rejects && self.peers.iter().filter(counts).count() < self.least() {
            true => Err(AggregatorError::Client { client, error: gave_up }),
            false => Ok(format!("{client}: {what}")),
        }
    }

    /// Takes a host out, and gives the reason in one line.
    ///
    /// # Errors
    /// Too few are left.
    fn lose(&mut self, connection: ConnectionId, fault: Fault) -> Result<String, AggregatorError> {
        let Some(place) = self.peers.iter().position(|peer| peer.connection == connection) else {
            return Ok(fault.to_string());
        };
        let peer = self.peers.remove(place);
        let error = AggregatorError::Client { client: peer.label(), error: fault };
        let reason = error.to_string();
        tell(&peer, &AggregatorMessage::Failed { reason: printable(&reason) });
        let left = self.peers.iter().filter(|peer| peer.asked == self.round).count();
        if left < self.least() {
            return Err(error);
        }
        tracing::warn!("{reason}; {left} hosts are left");
        Ok(reason)
    }

    /// Waits until everyone who was asked has its update ready.
    fn await_ready(&mut self, attempt: u32, until: Option<Instant>) -> Result<(), AggregatorError> {
        loop {
            let round = self.round;
            let late = |peer: &&Peer| peer.asked == round && peer.ready.is_none();
            let Some(late) = self.peers.iter().find(late).map(|peer| peer.connection) else {
                return Ok(());
            };
            match self.next(until)? {
                Notice::Lost(peer, fault) => {
                    let connection = self.peers[peer].connection;
                    self.lose(connection, fault)?;
                }
                Notice::Said(peer, message) => match take_ready(message, round, attempt) {
                    Ok(Some((mut ready, host, port))) => {
                        let peer = &mut self.peers[peer];
                        let ip = peer.address.ip().to_canonical();
                        ready.at = match host.as_str() {
                            "" => SocketAddr::new(ip, port).to_string(),
                            host => format!("{host}:{port}"),
                        };
                        ready.key = peer.binding.veil(Side::Client, round, attempt, &ready.key);
                        peer.ready = Some(ready);
                    }
                    Ok(None) => {}
                    Err(fault) => {
                        let connection = self.peers[peer].connection;
                        self.lose(connection, fault)?;
                    }
                },
                Notice::Timeout => {
                    let most = self.config.round_deadline.unwrap_or_default();
                    let fault = Fault::TooLate { seconds: most.as_secs_f64() };
                    self.lose(late, fault)?;
                }
            }
        }
    }

    /// Leaves out whose weight cannot be used beside those of the others.
    fn lose_bad_weights(&mut self) -> Result<(), AggregatorError> {
        loop {
            let ready = self.peers.iter().filter_map(|peer| Some((peer, peer.ready.as_ref()?)));
            let (peers, weights): (Vec<&Peer>, Vec<f64>) =
                ready.map(|(peer, ready)| (peer, ready.examples)).unzip();
            let Err(error) = Weights::new(&weights) else { return Ok(()) };
            let Some((index, why)) = bad_weight(&error) else { return Err(error.into()) };
            let (connection, examples) = (peers[index].connection, weights[index]);
            self.lose(connection, Fault::Weight { examples, why })?;
        }
    }

    /// Tells everyone who is ready its place, and gives the ring in its order.
    fn begin(&mut self, attempt: u32) -> Result<Vec<Rank>, AggregatorError> {
        self.lose_bad_weights()?;
        let ready: Vec<&Peer> = self.peers.iter().filter(|peer| peer.ready.is_some()).collect();
        let hosts: Vec<Host> = ready.iter().map(|peer| peer.host()).collect();
        let order = topology::ring::ranks(&hosts, &self.config.order);
        let ring: Vec<&Peer> = order.into_iter().map(|index| ready[index]).collect();
        let weight = |peer: &&Peer| peer.ready.as_ref().map_or(0.0, |ready| ready.examples);
        let ranks: Vec<(String, f64)> =
            ring.iter().map(|peer| (peer.name.clone(), weight(peer))).collect();
        let (streams, chunk_bytes) = self.cut(&hosts)?;
        let schedule = Schedule::new(self.config.shape, ring.len(), 0..0);
        for (rank, peer) in ring.iter().enumerate() {
            let right = ring[(rank + 1) % ring.len()];
            let right = right.ready.as_ref().filter(|_| schedule.has_right(rank));
            let veil = |key| peer.binding.veil(Side::Aggregator, self.round, attempt, key);
            let turn = Turn {
                round: self.round,
                attempt,
                rank: rank as u32,
                ranks: ranks.clone(),
                streams: streams as u32,
                chunk_bytes,
                right: right.map(|right| right.at.clone()).unwrap_or_default(),
                right_key: right.map_or([0; 32], |right| veil(&right.key)),
                right_certificate: right.map(|r| r.certificate.clone()).unwrap_or_default(),
            };
            tell(peer, &AggregatorMessage::Turn(turn));
        }
        Ok(ring
            .iter()
            .zip(ranks)
            .map(|(peer, (name, examples))| Rank { connection: peer.connection, name, examples })
            .collect())
    }

    /// Lanes, and bytes of a chunk, for these hosts.
    fn cut(&self, hosts: &[Host]) -> Result<(usize, u64), AggregatorError> {
        let Some(manifest) = &self.model else { return Ok((1, self.config.chunk_bytes)) };
        let streams = self
            .config
            .streams
            .unwrap_or_else(|| topology::ring::streams(hosts, default_streams()));
        let model_bytes = manifest.data_bytes();
        // Sums may take more room than what is summed.
        let sums = AccumulatorLayout::of(manifest)?.bytes().div_ceil(model_bytes.max(1)).max(1);
        let most = self.config.chunk_bytes;
        let chunk_bytes =
            topology::ring::chunk_bytes(model_bytes, hosts.len(), streams, most, sums);
        let chunks = manifest.chunks(chunk_bytes)?.len();
        // Lanes without a group of chunks would have no work.
        Ok((streams.min(chunks.div_ceil(hosts.len())).max(1), chunk_bytes))
    }

    /// Waits until everyone in the ring has the mean, and gives its digest; or what went wrong.
    fn watch(
        &mut self,
        attempt: u32,
        ranks: &[Rank],
    ) -> Result<Result<[u8; 32], Trouble>, AggregatorError> {
        let mut trouble_until: Option<Instant> = None;
        loop {
            let in_ring: Vec<&Peer> = ranks
                .iter()
                .filter_map(|rank| self.peers.iter().find(|p| p.connection == rank.connection))
                .collect();
            let digests: Vec<[u8; 32]> = in_ring.iter().filter_map(|peer| peer.reduced).collect();
            if digests.len() == ranks.len() {
                return Ok(match digests.iter().position(|digest| *digest != digests[0]) {
                    None => Ok(digests[0]),
                    Some(other) => Err(Trouble::Link(ranks[other].connection, Fault::Digest)),
                });
            }
            if trouble_until.is_some_and(|until| until <= Instant::now()) {
                return Ok(Err(blame(&in_ring)));
            }
            match self.next(trouble_until)? {
                Notice::Timeout => {}
                Notice::Lost(peer, fault) => {
                    let connection = self.peers[peer].connection;
                    if ranks.iter().any(|rank| rank.connection == connection) {
                        return Ok(Err(Trouble::Lost(connection, fault)));
                    }
                    self.peers.remove(peer);
                }
                Notice::Said(place, message) => {
                    let peer = &mut self.peers[place];
                    match message {
                        ClientMessage::Reduced { round, attempt: of, digest }
                            if (round, of) == (self.round, attempt) =>
                        {
                            peer.reduced = Some(digest);
                        }
                        ClientMessage::Broken { round, attempt: of, .. }
                            if (round, of) == (self.round, attempt) =>
                        {
                            peer.broken = take_broken(message);
                            if let Some(broken) = peer.broken.take_if(|broken| broken.is_own()) {
                                let connection = peer.connection;
                                let what = broken.reason;
                                return Ok(Err(Trouble::Nonfinite(connection, what)));
                            }
                            // Whoever is to blame is often silent for good, which takes a moment to see.
                            trouble_until.get_or_insert(Instant::now() + limits::LAST_WORDS);
                        }
                        // Of an attempt that is over.
                        ClientMessage::Reduced { .. } | ClientMessage::Broken { .. } => {}
                        _ => {
                            let connection = peer.connection;
                            return Ok(Err(Trouble::Lost(connection, unexpected())));
                        }
                    }
                }
            }
        }
    }

    /// What happens next, or [`Notice::Timeout`] at `until`.
    ///
    /// # Errors
    /// Only what ends the whole ring.
    fn next(&mut self, until: Option<Instant>) -> Result<Notice, AggregatorError> {
        loop {
            let wait = until
                .map_or(limits::DEADLINE, |until| until.saturating_duration_since(Instant::now()));
            let event = match self.events.recv_timeout(wait) {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) if until.is_none() => continue,
                Err(_) => return Ok(Notice::Timeout),
            };
            let place = |connection| self.peers.iter().position(|p| p.connection == connection);
            match event {
                Event::Joined(joined) => self.receive(*joined)?,
                Event::Lost { connection, error } => {
                    if let Some(peer) = place(connection) {
                        return Ok(Notice::Lost(peer, error.into()));
                    }
                }
                Event::Message { connection, message, _unheard } => {
                    let Some(peer) = place(connection) else { continue };
                    return Ok(match message {
                        ClientMessage::Failed { reason } => {
                            Notice::Lost(peer, Fault::GaveUp { reason: printable(&reason) })
                        }
                        message => Notice::Said(peer, message),
                    });
                }
                Event::Warm { result } => {
                    result?;
                }
                _ => {}
            }
        }
    }

    /// Lets a host join, or tells it why it cannot.
    fn receive(&mut self, joined: Joined) -> Result<(), AggregatorError> {
        let label = joined.label();
        if self.peers.len() >= self.config.ranks {
            refuse(&joined.channel, "all hosts of the ring have joined already");
            return Ok(());
        }
        let manifest = match self.check(&joined) {
            Ok(manifest) => manifest,
            Err(error) => {
                tracing::warn!("{label}: {error}");
                refuse(&joined.channel, &format!("{label}: {error}"));
                return Ok(());
            }
        };
        // What cannot be averaged is found before anybody waits for it.
        if let Err(error) = AccumulatorLayout::of(&manifest) {
            refuse(&joined.channel, &error.to_string());
            return Err(error.into());
        }
        let Joined { mut channel, address, name, header, .. } = joined;
        channel.set_deadline(control::silence_limit(self.config.deadline, self.config.deadline))?;
        let terms = RingTerms {
            session: self.session,
            rounds: self.config.rounds,
            deadline_ms: self.config.deadline.as_millis() as u64,
            header: if header.is_empty() { manifest.header().to_vec() } else { Vec::new() },
            shape: self.config.shape,
            on_nonfinite: self.config.on_nonfinite,
        };
        let connection = self.next_connection;
        self.next_connection += 1;
        let (writer, reader, events) = (channel.writer, channel.reader, self.sender.clone());
        if writer.send(&AggregatorMessage::Ring(terms)).is_err() {
            return Ok(());
        }
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(writer.clone());
        let reader = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || read_client(reader, connection, &events, note))?;
        self.model.get_or_insert(manifest);
        self.peers.push(Peer {
            name,
            address,
            connection,
            writer,
            binding: channel.binding,
            reader: Some(reader),
            asked: 0,
            ready: None,
            reduced: None,
            broken: None,
            nonfinite: None,
        });
        tracing::info!("{label} joined ({} of {})", self.peers.len(), self.config.ranks);
        Ok(())
    }

    fn check(&self, joined: &Joined) -> Result<Manifest, Fault> {
        let taken = self.peers.iter().any(|peer| peer.name == joined.name);
        check_name(&joined.name, taken)?;
        check_examples(joined.examples)?;
        if joined.is_edge {
            return Err(Fault::Edge);
        }
        check_model(self.model.as_ref(), &joined.header)
    }
}

/// A place in the ring.
struct Rank {
    connection: ConnectionId,
    name: String,
    examples: f64,
}

/// Why an attempt is over.
enum Trouble {
    /// A host is gone.
    Lost(ConnectionId, Fault),
    /// A connection between two hosts broke, and the one that is given is likelier to be to blame.
    Link(ConnectionId, Fault),
    /// The update of this host has numbers that are NaN or infinite.
    Nonfinite(ConnectionId, String),
}

/// Who is to blame when hosts say that they cannot go on, and all of them give signs of life.
fn blame(ring: &[&Peer]) -> Trouble {
    let count = ring.len();
    let at = |index: usize| ring[index % count].broken.as_ref();
    let left = |index: usize| at(index).is_some_and(|broken| broken.from_left);
    let right = |index: usize| at(index).is_some_and(|broken| broken.to_right);
    // The one that a neighbour waits for: silent itself, or else one that cannot send to the right.
    let waited_for = |index: usize| left(index + 1) || right(index + count - 1);
    let silent = (0..count).find(|&index| at(index).is_none() && waited_for(index));
    let cut = (0..count).find(|&index| right(index) && left(index + 1));
    let first = (0..count).find(|&index| at(index).is_some()).unwrap_or(0);
    let neighbour = if left(first) { first + count - 1 } else { first + 1 };
    let culprit = silent.or(cut).unwrap_or(neighbour) % count;
    let says = if left(culprit + 1) || !right(culprit + count - 1) {
        culprit + 1
    } else {
        culprit + count - 1
    };
    let says = if at(says).is_some() { says % count } else { first };
    let broken = at(says);
    let reason = broken.map(|broken| broken.reason.clone()).unwrap_or_default();
    let fault = Fault::Neighbour { neighbour: ring[says].label(), reason };
    match broken.is_some_and(|broken| broken.stalled) {
        true => Trouble::Lost(ring[culprit].connection, fault),
        false => Trouble::Link(ring[culprit].connection, fault),
    }
}

fn tell(peer: &Peer, message: &AggregatorMessage) {
    // A host that is gone need not hear it, and its reader says so.
    let _ = peer.writer.send(message);
}

fn unexpected() -> Fault {
    let error = ProtocolError::Unexpected { what: "a message" };
    Fault::Control(error.into())
}

/// A host that is ready for this attempt; nothing for one that was ready for an earlier one.
#[allow(clippy::type_complexity)] // The address is not known here.
fn take_ready(
    message: ClientMessage,
    round: u32,
    attempt: u32,
) -> Result<Option<(Ready, String, u16)>, Fault> {
    match message {
        ClientMessage::Ready { round: of, attempt: at, examples, host, port, key, certificate }
            if (of, at) == (round, attempt) =>
        {
            check_examples(examples)?;
            if certificate.len() > limits::MAX_CERTIFICATE_BYTES {
                return Err(unexpected());
            }
            let ready = Ready { examples, at: String::new(), key, certificate };
            Ok(Some((ready, printable(&host), port)))
        }
        // Said before it heard that the attempt is over.
        ClientMessage::Ready { round: of, attempt: at, .. } if (of, at) < (round, attempt) => {
            Ok(None)
        }
        ClientMessage::Broken { .. } | ClientMessage::Reduced { .. } => Ok(None),
        _ => Err(unexpected()),
    }
}

fn take_broken(message: ClientMessage) -> Option<Broken> {
    match message {
        ClientMessage::Broken { from_left, to_right, stalled, reason, .. } => {
            Some(Broken { from_left, to_right, stalled, reason: printable(&reason) })
        }
        _ => None,
    }
}

/// Signs of life are nobody's business.
fn note(message: ClientMessage) -> Result<Option<ClientMessage>, ProtocolError> {
    Ok(Some(message).filter(|message| *message != ClientMessage::Alive))
}

fn reception(config: &RingConfig, joined: Sender<Event>) -> Reception {
    let secret = config.secret;
    let waiting = WaitingRoom::new(config.ranks);
    Reception {
        secret: Box::new(move |place| (*place == secret.place()).then_some(secret)),
        welcome: Box::new(move |visit| match visit {
            Visit::Join(mut client) => match waiting.seat(&client) {
                // Nobody listens any more when the ring has ended; the socket then closes.
                Some(seat) => {
                    client.seat = Some(seat);
                    drop(joined.send(Event::Joined(client)));
                }
                None => refuse(&client.channel, "too many others want to join"),
            },
            Visit::Call { channel, .. } => refuse(&channel, "there is no such place here"),
        }),
    }
}

fn check(config: &RingConfig) -> Result<(), AggregatorError> {
    let within = |what, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            Ok(())
        } else {
            Err(AggregatorError::Config { what, value, least, most })
        }
    };
    within("hosts of a ring", config.ranks as u64, 2, limits::MAX_RANKS as u64)?;
    if let Some(least) = config.min_ranks {
        within("least hosts of a ring", least as u64, 1, config.ranks as u64)?;
    }
    within("rounds", config.rounds.into(), 1, u32::MAX.into())?;
    if let Some(streams) = config.streams {
        within("streams", streams as u64, 1, limits::MAX_STREAMS as u64)?;
    }
    within("chunk bytes", config.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
    let deadline_ms = config.deadline.as_millis().min(u64::MAX.into()) as u64;
    within("deadline in ms", deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)
}
