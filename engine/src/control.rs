//! Control channels: framed messages over a socket, signs of life, and what dialling and
//! accepting have in common.

use std::io;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, Socket, Type};

use crate::error::{ControlError, WireError};
use crate::limits;
use crate::link::{Link, remaining, silence};
use crate::wire::frame::{self, Seal};
use crate::wire::hello::{Answer, Channel, Opening, Place, Preamble, Proof, Reply, Secret};
use crate::wire::keys::{Binding, ControlKeys, Side};
use crate::wire::message::{ChunkRange, WireSum};

/// The sending half of a control channel, for any thread.
pub struct Writer {
    link: Arc<Link>,
    /// Held while a message is being sealed and written.
    seal: Mutex<Seal>,
}

impl Writer {
    /// Sends one message.
    pub fn send<T: Serialize>(&self, message: &T) -> Result<(), ControlError> {
        self.send_frame(&frame::encode(message)?)
    }

    /// Sends what [`frame::encode`] made.
    pub fn send_frame(&self, frame: &[u8]) -> Result<(), ControlError> {
        let mut seal = self.seal.lock().unwrap_or_else(PoisonError::into_inner);
        self.done(self.link.send(&seal.close(frame)))
    }

    /// Sends one message, unless another thread is sending one just now.
    pub(crate) fn send_if_idle<T: Serialize>(&self, message: &T) -> Result<(), ControlError> {
        let frame = frame::encode(message)?;
        match self.seal.try_lock() {
            Ok(mut seal) => self.done(self.link.send(&seal.close(&frame))),
            Err(_) => Ok(()),
        }
    }

    /// Sends one short message without waiting; a peer that has not read for long is an error.
    pub(crate) fn send_now<T: Serialize>(&self, message: &T) -> Result<(), ControlError> {
        let frame = frame::encode(message)?;
        let mut seal = self.seal.lock().unwrap_or_else(PoisonError::into_inner);
        self.done(self.link.send_now(&seal.close(&frame)))
    }

    /// Nothing can follow half a message, so a failure ends the channel.
    fn done(&self, written: io::Result<()>) -> Result<(), ControlError> {
        if written.is_err() {
            self.shut_down();
        }
        Ok(written?)
    }

    /// Sends the checksums of the chunks from `first` on, in messages made by `wrap`.
    pub fn send_sums<T: Serialize>(
        &self,
        first: usize,
        sums: &[u64],
        wrap: impl Fn(u32, Vec<WireSum>) -> T,
    ) -> Result<(), ControlError> {
        for (index, part) in sums.chunks(limits::SUMS_PER_MESSAGE).enumerate() {
            // A model has at most `MAX_CHUNKS`.
            let first = (first + index * limits::SUMS_PER_MESSAGE) as u32;
            self.send(&wrap(first, part.iter().map(|sum| sum.to_le_bytes()).collect()))?;
        }
        Ok(())
    }

    /// Sends ranges of chunks, in messages made by `wrap`.
    pub fn send_ranges<T: Serialize>(
        &self,
        chunks: &[Range<usize>],
        wrap: impl Fn(Vec<ChunkRange>) -> T,
    ) -> Result<(), ControlError> {
        for part in chunks.chunks(limits::RANGES_PER_MESSAGE) {
            self.send(&wrap(part.iter().map(ChunkRange::from).collect()))?;
        }
        Ok(())
    }

    /// Ends the channel in both directions; whoever reads it stops.
    pub fn shut_down(&self) {
        self.link.shut_down();
    }
}

/// Most that is read at once.
const READ_BYTES: usize = 64 << 10;

/// The receiving half of a control channel.
pub struct Reader {
    link: Arc<Link>,
    seal: Seal,
    /// What has come of the next message: of its head, or of what is behind that.
    came: Vec<u8>,
    /// Bytes of the next message, once its head is here.
    announced: Option<u64>,
    /// When all that is read must have come, however steadily it comes.
    until: Option<Instant>,
}

impl Reader {
    /// Silence for longer than `deadline` is an error from now on.
    pub fn set_deadline(&mut self, deadline: Duration) -> io::Result<()> {
        self.until = None;
        self.link.set_read_deadline(deadline)
    }

    /// What is not here at `until` is an error from now on.
    pub(crate) fn set_end(&mut self, until: Instant) {
        self.until = Some(until);
    }

    /// Reads one message of at most `limit` bytes.
    pub fn read<T: DeserializeOwned>(&mut self, limit: u64) -> Result<T, ControlError> {
        let bytes = self.read_length(limit)?;
        self.read_body(bytes)
    }

    /// Reads one message of at most `limit` bytes, if it is here already.
    pub(crate) fn try_read<T: DeserializeOwned>(
        &mut self,
        limit: u64,
    ) -> Result<Option<T>, ControlError> {
        let Some(bytes) = self.length(limit, false)? else { return Ok(None) };
        self.body(bytes, false)
    }

    /// Reads how many bytes the next message has, at most `limit`.
    pub fn read_length(&mut self, limit: u64) -> Result<u64, ControlError> {
        self.length(limit, true)?.ok_or(ControlError::Silent)
    }

    /// Reads a message of so many bytes.
    pub fn read_body<T: DeserializeOwned>(&mut self, bytes: u64) -> Result<T, ControlError> {
        self.body(bytes, true)?.ok_or(ControlError::Silent)
    }

    fn length(&mut self, limit: u64, wait: bool) -> Result<Option<u64>, ControlError> {
        if self.announced.is_none() && self.fill(frame::HEAD_BYTES, wait)? {
            let head = self.came.first_chunk().ok_or(ControlError::Closed)?;
            self.announced = Some(self.seal.open_head(head, limit)?);
            self.came.clear();
        }
        Ok(self.announced)
    }

    fn body<T: DeserializeOwned>(
        &mut self,
        bytes: u64,
        wait: bool,
    ) -> Result<Option<T>, ControlError> {
        if !self.fill(bytes as usize + frame::SEAL_BYTES, wait)? {
            return Ok(None);
        }
        self.announced = None;
        // A long message leaves no memory behind.
        let came = std::mem::take(&mut self.came);
        Ok(Some(frame::decode(self.seal.open_message(&came)?)?))
    }

    /// Whether `wanted` bytes have come. Memory grows with what really comes, not with what was
    /// announced.
    fn fill(&mut self, wanted: usize, wait: bool) -> Result<bool, ControlError> {
        while self.came.len() < wanted {
            if let Some(until) = self.until {
                self.link.set_read_deadline(remaining(until)?)?;
            }
            let before = self.came.len();
            self.came.resize(before + (wanted - before).min(READ_BYTES), 0);
            let received = self.link.receive(&mut self.came[before..], wait);
            self.came.truncate(before + *received.as_ref().unwrap_or(&0));
            match received {
                Ok(0) => return Err(ControlError::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !wait => {
                    return Ok(false);
                }
                Err(error) => return Err(silence(error)),
            }
        }
        Ok(true)
    }
}

/// Both halves of a control channel that has been opened.
pub struct ControlChannel {
    /// What comes.
    pub reader: Reader,
    /// What goes.
    pub writer: Arc<Writer>,
    /// What its data channels are tied to.
    pub binding: Binding,
}

impl ControlChannel {
    /// Opens a control channel to an aggregator that knows `secret`. A peer that is silent, or does
    /// not read, for `deadline` is an error, now and later.
    ///
    /// # Errors
    /// A peer that speaks another protocol, has no place for this secret or cannot prove that it knows
    /// it. Nothing has been said to it then.
    pub fn open(
        link: Link,
        secret: &Secret,
        deadline: Duration,
    ) -> Result<ControlChannel, ControlError> {
        let until = Instant::now() + deadline;
        link.set_write_deadline(deadline)?;
        let opening = Opening { place: secret.place(), nonce: random()? };
        link.write_fixed(&Preamble::new(Channel::Control))?;
        link.write_fixed(&opening)?;
        let answer: Preamble = link.read_fixed(until)?;
        match answer.answer_on(Channel::Control)? {
            Answer::Admitted => {}
            Answer::NoPlace => return Err(ControlError::NoPlace),
            Answer::TlsWanted => return Err(WireError::TlsWanted.into()),
            other => return Err(WireError::Answer { other: other as u8 }.into()),
        }
        let reply: Reply = link.read_fixed(until)?;
        let keys = ControlKeys::new(secret, &opening.nonce, &reply.nonce);
        if !keys.is_aggregator(&reply.proof) {
            return Err(ControlError::Stranger);
        }
        link.write_fixed(&keys.client_proof())?;
        let mut channel = ControlChannel::with_keys(link, &keys, Side::Client);
        channel.set_deadline(deadline)?;
        Ok(channel)
    }

    /// Lets a client in whose preamble has been read, if it proves by `until` that it knows the secret
    /// that `find` has for its place.
    ///
    /// # Errors
    /// A peer that is too slow, comes for a place that `find` does not know, or cannot prove it. Where
    /// `find` itself fails, the peer hears nothing.
    pub fn accept(
        link: Link,
        find: impl Fn(&Place) -> Result<Option<Secret>, ControlError>,
        until: Instant,
    ) -> Result<(ControlChannel, Place), ControlError> {
        let opening: Opening = link.read_fixed(until)?;
        let Some(secret) = find(&opening.place)? else {
            link.write_fixed(&Preamble::answering(Channel::Control, Answer::NoPlace))?;
            return Err(ControlError::NoPlace);
        };
        let nonce = random()?;
        let keys = ControlKeys::new(&secret, &opening.nonce, &nonce);
        link.write_fixed(&Preamble::new(Channel::Control))?;
        link.write_fixed(&Reply { nonce, proof: keys.aggregator_proof() })?;
        let proof: Proof = link.read_fixed(until)?;
        if !keys.is_client(&proof) {
            return Err(ControlError::Stranger);
        }
        let mut channel = ControlChannel::with_keys(link, &keys, Side::Aggregator);
        channel.reader.set_end(until);
        Ok((channel, opening.place))
    }

    fn with_keys(link: Link, keys: &ControlKeys, ours: Side) -> ControlChannel {
        let theirs = match ours {
            Side::Client => Side::Aggregator,
            Side::Aggregator => Side::Client,
        };
        let link = Arc::new(link);
        let writer = Arc::new(Writer { link: link.clone(), seal: Mutex::new(keys.seal(ours)) });
        let reader = Reader {
            link,
            seal: keys.seal(theirs),
            came: Vec::new(),
            announced: None,
            until: None,
        };
        ControlChannel { reader, writer, binding: keys.binding() }
    }

    /// Gives the peer another deadline, to say something and to take what is said.
    pub fn set_deadline(&mut self, deadline: Duration) -> io::Result<()> {
        self.reader.link.set_write_deadline(deadline)?;
        self.reader.set_deadline(deadline)
    }

    /// The connection itself.
    pub fn link(&self) -> &Link {
        &self.reader.link
    }
}

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = getrandom(bytes.as_mut_slice(), GetRandomFlags::empty())?;
    if filled < N { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

/// Silence after which a connection is dialled again, or given up where it is not: early enough that
/// there is time for it before the peer's deadline.
pub fn silence_limit(deadline: Duration, reconnect: Duration) -> Duration {
    if reconnect.is_zero() { deadline } else { deadline / 2 }
}

/// Sends a sign of life to every peer until it is dropped.
pub struct Heartbeat {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Those who get signs of life; they may come later than the heartbeat.
pub type Listeners = Arc<Mutex<Vec<Arc<Writer>>>>;

impl Heartbeat {
    /// Sends `message` to all of `listeners` four times per `deadline`.
    pub fn start<T: Serialize + Send + 'static>(
        listeners: Listeners,
        message: T,
        deadline: Duration,
    ) -> io::Result<Heartbeat> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            while stopped.recv_timeout(deadline / 4) == Err(RecvTimeoutError::Timeout) {
                let all = listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
                for listener in all {
                    // A dead peer is found by whoever reads from it.
                    if listener.send_if_idle(&message).is_err() {
                        let mut left = listeners.lock().unwrap_or_else(PoisonError::into_inner);
                        left.retain(|other| !Arc::ptr_eq(other, &listener));
                    }
                }
            }
        })?;
        Ok(Heartbeat { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

/// Which congestion control sockets use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// One without pacing to a peer on this host, where pacing (BBR) halves the throughput; the
    /// kernel's default to every other.
    #[default]
    Auto,
    /// The named one.
    Named(String),
}

/// Without pacing; the second may be used by everyone.
const UNPACED: [&str; 2] = ["cubic", "reno"];

/// Listens on `address`.
pub fn listen(address: impl ToSocketAddrs, congestion: &Congestion) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    start_congestion(listener.as_fd(), congestion)?;
    Ok(listener)
}

/// Connects to the first of the addresses that answers within `deadline`.
pub fn dial(
    address: impl ToSocketAddrs,
    congestion: &Congestion,
    deadline: Duration,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for candidate in address.to_socket_addrs()? {
        let domain = Domain::for_address(candidate);
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        start_congestion(socket.as_fd(), congestion)?;
        match socket.connect_timeout(&candidate.into(), deadline) {
            Ok(()) => {
                let socket = TcpStream::from(socket);
                settle(&socket, congestion)?;
                return Ok(socket);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Chooses before there is a connection: one that began with BBR stays paced for ever.
fn start_congestion(socket: BorrowedFd<'_>, congestion: &Congestion) -> io::Result<()> {
    match congestion {
        Congestion::Named(name) => sockopt::set_tcp_congestion(socket, name).map_err(|error| {
            let error = io::Error::from(error);
            io::Error::new(
                error.kind(),
                format!(
                    "congestion control \"{name}\" cannot be used here ({error}); see \
                     /proc/sys/net/ipv4/tcp_allowed_congestion_control"
                ),
            )
        }),
        Congestion::Auto => {
            // Where none can be had the default serves too, only slower.
            let _ = UNPACED.iter().any(|name| sockopt::set_tcp_congestion(socket, name).is_ok());
            Ok(())
        }
    }
}

/// Prepares a connected socket: no delay, and the kernel's congestion control to other hosts.
pub fn settle(socket: &TcpStream, congestion: &Congestion) -> io::Result<()> {
    socket.set_nodelay(true)?;
    if *congestion == Congestion::Auto && !is_same_host(socket) {
        let default = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        // Without it the connection keeps what it began with.
        let _ = sockopt::set_tcp_congestion(socket.as_fd(), default.unwrap_or_default().trim());
    }
    Ok(())
}

fn is_same_host(socket: &TcpStream) -> bool {
    match (socket.local_addr(), socket.peer_addr()) {
        (Ok(local), Ok(peer)) => peer.ip().is_loopback() || local.ip() == peer.ip(),
        _ => false,
    }
}

/// A peer's text as it may be shown: one line, nothing that moves the cursor or turns the direction of
/// writing, not endless.
pub fn printable(text: &str) -> String {
    let cut: String = text.chars().take(limits::MAX_SHOWN_CHARS).collect();
    let more = if cut.len() < text.len() { "..." } else { "" };
    cut.chars().map(|c| if is_plain(c) { c } else { ' ' }).collect::<String>() + more
}

fn is_plain(c: char) -> bool {
    // Line and paragraph separators, and the marks of right-to-left and left-to-right writing.
    let turns =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !c.is_control() && !turns
}
