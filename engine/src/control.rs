//! Control channels: framed messages over a socket, signs of life, and what dialling and
//! accepting have in common.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, Socket, Type};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::ControlError;
use crate::limits;
use crate::wire::frame;
use crate::wire::message::{ChunkRange, WireSum};

/// The sending half of a control channel, for any thread.
pub struct Writer {
    socket: TcpStream,
    /// Held while a message is being written.
    turn: Mutex<()>,
}

impl Writer {
    /// Takes the socket's sending half; a peer that does not read for `deadline` is an error.
    pub fn new(socket: &TcpStream, deadline: Duration) -> io::Result<Writer> {
        let socket = socket.try_clone()?;
        socket.set_write_timeout(Some(deadline))?;
        Ok(Writer { socket, turn: Mutex::new(()) })
    }

    /// Sends one message.
    pub fn send<T: Serialize>(&self, message: &T) -> Result<(), ControlError> {
        let frame = frame::encode(message)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(&frame)
    }

    /// Sends one message, unless another thread is sending one just now.
    pub(crate) fn send_if_idle<T: Serialize>(&self, message: &T) -> Result<(), ControlError> {
        let frame = frame::encode(message)?;
        match self.turn.try_lock() {
            Ok(_turn) => self.write(&frame),
            Err(_) => Ok(()),
        }
    }

    /// Nothing can follow half a message, so a failure ends the channel.
    fn write(&self, frame: &[u8]) -> Result<(), ControlError> {
        let written = (&self.socket).write_all(frame);
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
        // Fails only on a socket that the peer has ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// The receiving half of a control channel.
pub struct Reader {
    socket: TcpStream,
}

impl Reader {
    /// Takes the receiving half of a socket behind its preambles.
    pub fn new(socket: TcpStream) -> Reader {
        Reader { socket }
    }

    /// Silence for longer than `deadline` is an error from now on.
    pub fn set_deadline(&self, deadline: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(deadline))
    }

    /// Reads a preamble.
    pub fn read_fixed<T: FromBytes + IntoBytes>(&mut self) -> Result<T, ControlError> {
        read_fixed(&mut self.socket)
    }

    /// Reads one message of at most `limit` bytes.
    pub fn read<T: DeserializeOwned>(&mut self, limit: u64) -> Result<T, ControlError> {
        let bytes = self.read_length(limit)?;
        self.read_body(bytes)
    }

    /// Reads how many bytes the next message has, at most `limit`.
    pub fn read_length(&mut self, limit: u64) -> Result<u64, ControlError> {
        let mut prefix = [0; frame::LENGTH_BYTES];
        read_exact(&mut self.socket, &mut prefix)?;
        Ok(frame::length(prefix, limit)?)
    }

    /// Reads a message of so many bytes.
    pub fn read_body<T: DeserializeOwned>(&mut self, bytes: u64) -> Result<T, ControlError> {
        // Grows with what really comes, not with what was announced.
        let mut message = Vec::new();
        (&mut self.socket).take(bytes).read_to_end(&mut message).map_err(silence)?;
        if (message.len() as u64) < bytes {
            return Err(ControlError::Closed);
        }
        Ok(frame::decode(&message)?)
    }
}

/// Both halves of a control channel that has been opened.
pub struct ControlChannel {
    /// What comes.
    pub reader: Reader,
    /// What goes.
    pub writer: Arc<Writer>,
}

impl ControlChannel {
    /// Takes over a socket behind its preambles. A peer that is silent, or does not read, for
    /// `deadline` is an error.
    pub fn new(socket: TcpStream, deadline: Duration) -> io::Result<ControlChannel> {
        let writer = Arc::new(Writer::new(&socket, deadline)?);
        let reader = Reader::new(socket);
        reader.set_deadline(deadline)?;
        Ok(ControlChannel { reader, writer })
    }

    /// Gives the peer another deadline, to say something and to take what is said.
    pub fn set_deadline(&self, deadline: Duration) -> io::Result<()> {
        self.socket().set_write_timeout(Some(deadline))?;
        self.reader.set_deadline(deadline)
    }

    /// The connection itself.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.reader.socket
    }
}

/// Sends a preamble or hello.
pub fn write_fixed(
    socket: &mut TcpStream,
    value: &(impl IntoBytes + zerocopy::Immutable),
) -> io::Result<()> {
    socket.write_all(value.as_bytes())
}

/// Reads a preamble or hello.
pub fn read_fixed<T: FromBytes + IntoBytes>(socket: &mut TcpStream) -> Result<T, ControlError> {
    let mut value = T::new_zeroed();
    read_exact(socket, value.as_mut_bytes())?;
    Ok(value)
}

fn read_exact(socket: &mut TcpStream, out: &mut [u8]) -> Result<(), ControlError> {
    socket.read_exact(out).map_err(silence)
}

fn silence(error: io::Error) -> ControlError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::Silent,
        io::ErrorKind::UnexpectedEof => ControlError::Closed,
        _ => ControlError::Io(error),
    }
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
