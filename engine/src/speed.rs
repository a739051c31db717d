//! How fast a link is, and what moving bytes over it costs: transfers of rising size between two processes.
//!
//! One listens ([`SpeedListener`]), the other asks ([`measure`]). The door is that of an aggregator: secret, TLS,
//! and nothing without both where other machines come in. Questions travel as sealed messages of a control
//! channel, the bytes that are measured bare on the same connection. All is bounded: bytes of a transfer, number
//! of questions, and time.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::aggregator::refuse_open;
use crate::control::{self, Congestion, ControlChannel, printable};
use crate::error::{AggregatorError, ControlError, ProtocolError};
use crate::limits;
use crate::link::{Link, remaining};
use crate::sys::process;
use crate::tls::{ClientTls, ServerTls};
use crate::topology::measured::{PeerHost, Speed};
use crate::wire::hello::{Channel, Preamble, Secret};

/// Where the other side begins: enough for one round trip.
const FIRST_BYTES: u64 = 64 << 10;

/// A transfer that took so long shows what a link can do.
const LONG_ENOUGH: Duration = Duration::from_millis(500);

/// Bytes that are given to the kernel at once.
const STEP_BYTES: usize = 256 << 10;

/// Questions whose quickest answer is the round trip.
const PINGS: usize = 10;

/// What the asking side says.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Who it is.
    Hello { name: String },
    /// Answer at once.
    Ping,
    /// So many bytes come now.
    Take { bytes: u64 },
    /// Send so many bytes.
    Give { bytes: u64 },
    /// What was found; nothing follows.
    Found { speed: Speed },
}

/// What the listening side answers.
#[derive(Debug, Serialize, Deserialize)]
enum Told {
    /// Who it is.
    Host(PeerHost),
    /// To a ping.
    Pong,
    /// The transfer is over; seconds of its own cores.
    Took { cpu_s: f64 },
}

/// This host, as it describes itself.
fn here(name: &str) -> PeerHost {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    PeerHost { name: name.into(), cores, memory_bytes: process::available_memory().0 }
}

/// Answers whoever measures.
pub struct SpeedListener {
    listener: TcpListener,
    host: PeerHost,
    secret: Secret,
    tls: Option<ServerTls>,
}

impl SpeedListener {
    /// Listens on `address` as the host `name`.
    ///
    /// # Errors
    /// An address that cannot be had; one that others reach, with neither secret nor TLS nor `insecure`.
    pub fn bind(
        address: impl ToSocketAddrs + std::fmt::Display,
        name: &str,
        (secret, tls, insecure): (Secret, Option<ServerTls>, bool),
    ) -> Result<SpeedListener, AggregatorError> {
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &Congestion::Auto).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        refuse_open(secret == Secret::OPEN && tls.is_none() && !insecure, bound)?;
        Ok(SpeedListener { listener, host: here(name), secret, tls })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// A socket that is gone.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers for ever, one visitor after the other; `found` hears what each has found.
    ///
    /// # Errors
    /// A listener that fails. What a visitor does wrong is logged and ends nothing.
    pub fn run(self, found: impl Fn(Speed) + Send + Sync + 'static) -> io::Result<()> {
        let this = Arc::new((self, found, Mutex::new(())));
        let visitors = Arc::new(AtomicUsize::new(0));
        loop {
            let (socket, address) = match this.0.listener.accept() {
                Ok(visitor) => visitor,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            if visitors.fetch_add(1, Ordering::SeqCst) >= limits::MAX_SPEED_VISITORS {
                visitors.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (this, here) = (this.clone(), visitors.clone());
            let visit = move || {
                let (listener, found, turn) = &*this;
                match listener.answer(socket, turn) {
                    Ok(speed) => found(speed),
                    Err(error) => tracing::warn!("{address} was not measured: {error}"),
                }
                here.fetch_sub(1, Ordering::SeqCst);
            };
            if std::thread::Builder::new().spawn(visit).is_err() {
                visitors.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn answer(&self, socket: TcpStream, turn: &Mutex<()>) -> Result<Speed, ControlError> {
        control::settle(&socket, &Congestion::Auto)?;
        let until = Instant::now() + limits::HANDSHAKE;
        let link = Link::accepted(socket, self.tls.as_ref(), until)?;
        let preamble: Preamble = link.read_fixed(until)?;
        if preamble.dialled()? != Channel::Control {
            return Err(ProtocolError::Unexpected { what: "a data channel" }.into());
        }
        let find = |place: &_| Ok((*place == self.secret.place()).then_some(self.secret));
        let (mut channel, _) = ControlChannel::accept(link, find, until)?;
        let Ask::Hello { name } = channel.reader.read(limits::MAX_SPEED_MESSAGE_BYTES)? else {
            return Err(ProtocolError::Unexpected { what: "a question" }.into());
        };
        // Two at once would measure each other.
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + limits::SPEED_SESSION;
        channel.reader.set_end(until);
        channel.writer.send(&Told::Host(self.host.clone()))?;
        for _ in 0..limits::MAX_SPEED_QUESTIONS {
            match channel.reader.read(limits::MAX_SPEED_MESSAGE_BYTES)? {
                Ask::Ping => channel.writer.send(&Told::Pong)?,
                Ask::Take { bytes } => {
                    let cpu_s = cpu_of(|| take(channel.link(), bytes, until))?;
                    channel.writer.send(&Told::Took { cpu_s })?;
                }
                Ask::Give { bytes } => {
                    let cpu_s = cpu_of(|| give(channel.link(), bytes, until))?;
                    channel.writer.send(&Told::Took { cpu_s })?;
                }
                Ask::Found { speed } => return believed(speed, &printable(&name), &self.host),
                Ask::Hello { .. } => break,
            }
        }
        Err(ProtocolError::Flood.into())
    }
}

/// What a visitor says, if it can be.
fn believed(speed: Speed, name: &str, there: &PeerHost) -> Result<Speed, ControlError> {
    let mut numbers = vec![speed.rtt_s, speed.up_bytes_s, speed.down_bytes_s];
    numbers.extend(speed.cpu_s);
    let fits = numbers.iter().all(|number| (0.0..1e18).contains(number));
    if !fits || speed.here.name != name {
        return Err(ProtocolError::Unexpected { what: "a measurement that is none" }.into());
    }
    Ok(Speed { there: there.clone(), ..speed })
}

/// Measures the link to a [`SpeedListener`] as the host `name`; at most [`limits::SPEED_SESSION`] and
/// some [`limits::MAX_SPEED_BYTES`].
///
/// # Errors
/// Nobody there, or somebody who does not know the secret, speaks no TLS or is something else.
pub fn measure(
    address: &str,
    name: &str,
    secret: &Secret,
    tls: Option<&ClientTls>,
) -> Result<Speed, ControlError> {
    let until = Instant::now() + limits::SPEED_SESSION;
    let socket = control::dial(address, &Congestion::Auto, limits::HANDSHAKE)?;
    let link = Link::dialled(socket, tls, Instant::now() + limits::HANDSHAKE)?;
    let mut channel = ControlChannel::open(link, secret, limits::HANDSHAKE)?;
    channel.reader.set_end(until);
    channel.writer.send(&Ask::Hello { name: name.into() })?;
    let Told::Host(there) = channel.reader.read(limits::MAX_SPEED_MESSAGE_BYTES)? else {
        return Err(ProtocolError::Unexpected { what: "an answer" }.into());
    };
    let there = PeerHost { name: printable(&there.name), ..there };
    let mut asking = Asking { channel, until, rtt: Duration::MAX };
    asking.ping()?;
    let up = asking.rising(true)?;
    let down = asking.rising(false)?;
    let speed = Speed {
        here: here(name),
        there,
        rtt_s: asking.rtt.as_secs_f64(),
        up_bytes_s: up.bytes_s,
        down_bytes_s: down.bytes_s,
        cpu_s: [up.here_s, down.here_s, down.there_s, up.there_s],
    };
    asking.channel.writer.send(&Ask::Found { speed: speed.clone() })?;
    asking.channel.link().hang_up();
    Ok(speed)
}

struct Asking {
    channel: ControlChannel,
    until: Instant,
    rtt: Duration,
}

/// What a transfer showed; CPU seconds for a byte.
struct Shown {
    bytes_s: f64,
    here_s: f64,
    there_s: f64,
}

impl Asking {
    fn ping(&mut self) -> Result<(), ControlError> {
        for _ in 0..PINGS {
            let asked = Instant::now();
            self.channel.writer.send(&Ask::Ping)?;
            match self.channel.reader.read(limits::MAX_SPEED_MESSAGE_BYTES)? {
                Told::Pong => self.rtt = self.rtt.min(asked.elapsed()),
                _ => return Err(ProtocolError::Unexpected { what: "an answer" }.into()),
            }
        }
        Ok(())
    }

    /// Transfers of rising size, until one takes long enough.
    fn rising(&mut self, up: bool) -> Result<Shown, ControlError> {
        let mut bytes = FIRST_BYTES;
        loop {
            let (took, shown) = self.transfer(up, bytes)?;
            if took >= LONG_ENOUGH || bytes == limits::MAX_SPEED_BYTES {
                return Ok(shown);
            }
            // So many that the next one is long enough, but no more than eight times as many.
            let wanted = LONG_ENOUGH.as_secs_f64() * 1.2 / took.as_secs_f64().max(1e-6);
            bytes = (bytes as f64 * wanted.clamp(1.5, 8.0)) as u64;
            bytes = bytes.min(limits::MAX_SPEED_BYTES);
        }
    }

    fn transfer(&mut self, up: bool, bytes: u64) -> Result<(Duration, Shown), ControlError> {
        let Asking { channel, until, rtt } = self;
        let asked = Instant::now();
        let ask = if up { Ask::Take { bytes } } else { Ask::Give { bytes } };
        channel.writer.send(&ask)?;
        let here_s = cpu_of(|| match up {
            true => give(channel.link(), bytes, *until),
            false => take(channel.link(), bytes, *until),
        })?;
        let mut took = asked.elapsed();
        let Told::Took { cpu_s } = channel.reader.read(limits::MAX_SPEED_MESSAGE_BYTES)? else {
            return Err(ProtocolError::Unexpected { what: "an answer" }.into());
        };
        if up {
            // What was sent may be on its way still.
            took = asked.elapsed();
        }
        let took = took.saturating_sub(*rtt).max(Duration::from_micros(1));
        let (each, cpu_s) = (bytes as f64, if cpu_s.is_finite() { cpu_s.max(0.0) } else { 0.0 });
        let bytes_s = each / took.as_secs_f64();
        Ok((took, Shown { bytes_s, here_s: here_s / each, there_s: cpu_s / each }))
    }
}

/// CPU seconds of this process while it does something.
fn cpu_of(act: impl FnOnce() -> Result<(), ControlError>) -> Result<f64, ControlError> {
    let before = process::usage();
    act()?;
    let after = process::usage();
    Ok(after.cpu_user_s - before.cpu_user_s + after.cpu_kernel_s - before.cpu_kernel_s)
}

fn checked(bytes: u64) -> Result<u64, ControlError> {
    match bytes <= limits::MAX_SPEED_BYTES {
        true => Ok(bytes),
        false => Err(ProtocolError::Unexpected { what: "a transfer that is too long" }.into()),
    }
}

fn give(link: &Link, bytes: u64, until: Instant) -> Result<(), ControlError> {
    let mut left = checked(bytes)?;
    let buffer = vec![0x5a; STEP_BYTES];
    while left > 0 {
        let step = left.min(STEP_BYTES as u64) as usize;
        link.set_write_deadline(remaining(until)?)?;
        link.send(&buffer[..step])?;
        left -= step as u64;
    }
    Ok(())
}

fn take(link: &Link, bytes: u64, until: Instant) -> Result<(), ControlError> {
    let mut left = checked(bytes)?;
    let mut buffer = vec![0; STEP_BYTES];
    while left > 0 {
        let most = left.min(STEP_BYTES as u64) as usize;
        link.set_read_deadline(remaining(until)?)?;
        match link.receive(&mut buffer[..most], true) {
            Ok(0) => return Err(ControlError::Closed),
            Ok(came) => left -= came as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(crate::link::silence(error)),
        }
    }
    Ok(())
}
