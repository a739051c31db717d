//! Really moves bytes over every path of the table, between two sockets on loopback.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use safetensors::Dtype;
use serde::Serialize;

use super::Fact;
use super::memory;
use super::obstacle::Obstacle;
use crate::limits;
use crate::manifest::synthetic;
use crate::paths::{ReceiveKind, SendKind};
use crate::receiver::{Landing, Lands, ReceivePath};
use crate::region::Region;
use crate::sender::{Needs, Piece, SendPath};
use crate::source::region::RegionSource;
use crate::sys::memory::HUGE_PAGE_BYTES;

/// Which way a path moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From memory or a file to a socket.
    Send,
    /// From a socket to memory or a file.
    Receive,
}

/// How the trial of one path went.
#[derive(Clone, Debug, Serialize)]
pub struct PathReport {
    /// Which way it moves bytes.
    pub direction: Direction,
    /// Its name in the table.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Whether it moved what it was to move.
    pub works: bool,
    /// What was seen: if it does not work, why.
    pub detail: String,
    /// What would make it work, where that is known.
    pub remedy: Option<String>,
    /// Whether it throws the bytes away by design: for benchmarks only.
    pub drops_bytes: bool,
    /// Bytes that came out at the other end.
    pub moved_bytes: u64,
    /// Whether they were compared with those that went in, and equal.
    pub verified: bool,
}

/// The paths that fedlane takes on this host unless told otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct Defaults {
    /// To send a model that stands in a region.
    pub send_path: Fact<&'static str>,
    /// To receive.
    pub receive_path: &'static str,
}

/// Tries every send and receive path of the table, one after the other.
///
/// Each gets a thread and [`limits::PROBE_TIMEOUT`], so a path that hangs is a path that does
/// not work, and no more.
pub fn paths() -> Vec<PathReport> {
    let send = SendKind::all().map(|kind| {
        let outcome =
            in_time(limits::PROBE_TIMEOUT, move |pair| carry(pair, kind, ReceiveKind::default()));
        PathReport::new(Direction::Send, kind.name(), kind.summary(), false, outcome)
    });
    let receive = ReceiveKind::all().map(|kind| {
        let outcome =
            in_time(limits::PROBE_TIMEOUT, move |pair| carry(pair, plain_sender()?, kind));
        let drops = kind.lands() == Lands::Nowhere;
        PathReport::new(Direction::Receive, kind.name(), kind.summary(), drops, outcome)
    });
    send.chain(receive).collect()
}

/// The send path that needs least of the host.
fn plain_sender() -> Result<SendKind, Obstacle> {
    SendKind::all().find(|kind| kind.needs() == Needs::Bytes).ok_or_else(|| Obstacle {
        why: "no send path works for every source".to_string(),
        remedy: None,
    })
}

/// Asks the table what it would choose.
pub fn defaults() -> Defaults {
    Defaults { send_path: default_send_path().into(), receive_path: ReceiveKind::default().name() }
}

fn default_send_path() -> Result<&'static str, String> {
    let region = Region::new(HUGE_PAGE_BYTES).map_err(|error| error.to_string())?;
    let manifest = synthetic(HUGE_PAGE_BYTES, Dtype::F32).map_err(|error| error.to_string())?;
    let source = RegionSource::new(&manifest, &region, limits::CHUNK_BYTES, Vec::new());
    let kind = SendKind::choose(None, &source).map_err(|error| error.to_string())?;
    Ok(kind.name())
}

impl PathReport {
    fn new(
        direction: Direction,
        name: &'static str,
        summary: &'static str,
        drops_bytes: bool,
        outcome: Result<u64, Obstacle>,
    ) -> PathReport {
        let works = outcome.is_ok();
        let (moved_bytes, detail, remedy) = match outcome {
            Ok(bytes) if drops_bytes => (bytes, "moved and dropped, only counted".into(), None),
            Ok(bytes) => (bytes, "moved and compared".into(), None),
            Err(Obstacle { why, remedy }) => (0, why, remedy),
        };
        let verified = works && !drops_bytes;
        PathReport {
            direction,
            name,
            summary,
            works,
            detail,
            remedy,
            drops_bytes,
            moved_bytes,
            verified,
        }
    }
}

/// Runs `trial` on a thread of its own and waits for it, but not for ever.
fn in_time(
    timeout: Duration,
    trial: impl FnOnce(&Pair) -> Result<u64, Obstacle> + Send + 'static,
) -> Result<u64, Obstacle> {
    let pair = Arc::new(Pair::new()?);
    let (tell, told) = mpsc::channel();
    let of_trial = pair.clone();
    let thread = std::thread::Builder::new().name("probe".into()).spawn(move || {
        let outcome = trial(&of_trial);
        // The pair is closed before anyone hears of the end, so nothing outlives a probe.
        drop(of_trial);
        // Nobody listens any more when it came too late.
        let _ = tell.send(outcome);
    });
    let thread = thread.map_err(|error| Obstacle::io("no thread for the trial", &error))?;
    match told.recv_timeout(timeout) {
        Ok(outcome) => {
            // It has said its last word and ends by itself.
            let _ = thread.join();
            outcome
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            pair.end();
            Err(Obstacle {
                why: format!("no end in {} s", timeout.as_secs_f32()),
                remedy: Some("try again when the host is less busy".to_string()),
            })
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            Err(Obstacle { why: "the trial broke off".to_string(), remedy: None })
        }
    }
}

/// Moves known bytes from `send` to `receive`, standing in what fedlane would have them in.
fn carry(pair: &Pair, send: SendKind, receive: ReceiveKind) -> Result<u64, Obstacle> {
    let opening = |error: io::Error| Obstacle::io("opening", &error);
    let (mut sender, mut receiver) =
        (send.open().map_err(opening)?, receive.open().map_err(opening)?);
    let mut from = Memory::new(send.needs() != Needs::Bytes)?;
    Xoshiro256PlusPlus::seed_from_u64(SEED).fill_bytes(from.bytes_mut());
    let mut into = Memory::new(receive.lands() == Lands::File)?;
    exchange(pair, sender.as_mut(), &from, receiver.as_mut(), &mut into)?;
    if receive.lands() != Lands::Nowhere {
        compare(&from, &into)?;
    }
    Ok(limits::PROBE_BYTES as u64)
}

/// Any number does; a fixed one makes a failure come again.
const SEED: u64 = 1;

fn compare(from: &Memory, into: &Memory) -> Result<(), Obstacle> {
    if from.bytes() == into.bytes() {
        return Ok(());
    }
    Err(Obstacle { why: "other bytes came out than went in".to_string(), remedy: None })
}

/// Moves all of `from` to `into`. Paths do not wait, so one thread serves both ends.
fn exchange(
    pair: &Pair,
    sender: &mut dyn SendPath,
    from: &Memory,
    receiver: &mut dyn ReceivePath,
    into: &mut Memory,
) -> Result<(), Obstacle> {
    let (mut sent, mut received) = (0, 0);
    while received < limits::PROBE_BYTES {
        let before = (sent, received);
        if sent < limits::PROBE_BYTES {
            let step = sender.send(pair.sender.as_fd(), from.piece(sent));
            sent += moved(step).map_err(|error| Obstacle::io("sending", &error))?;
        }
        let step = receiver.receive(pair.receiver.as_fd(), into.landing(received));
        let step = step.and_then(|bytes| match bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => Ok(bytes),
        });
        received += moved(step).map_err(|error| Obstacle::io("receiving", &error))?;
        if (sent, received) == before {
            await_readable(&pair.receiver, TICK)
                .map_err(|error| Obstacle::io("waiting", &error))?;
        }
    }
    Ok(())
}

/// How long to wait for a socket before looking again.
const TICK: Duration = Duration::from_millis(50);

/// Bytes of a step; a step that would have had to wait moved none.
fn moved(step: io::Result<usize>) -> io::Result<usize> {
    match step {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            Ok(0)
        }
        other => other,
    }
}

/// Whether `socket` has something before `timeout` is over.
fn await_readable(socket: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut waiting = [PollFd::new(&socket, PollFlags::IN)];
    Ok(poll(&mut waiting, Some(&timeout))? > 0)
}

/// Where the bytes of a trial stand: as fedlane has them, in plain memory or in a region.
enum Memory {
    Plain(Vec<u8>),
    Region(Region),
}

impl Memory {
    fn new(in_region: bool) -> Result<Memory, Obstacle> {
        if in_region {
            // Large enough to be on a huge page, as a model's region is.
            let region = Region::new(HUGE_PAGE_BYTES);
            return region.map(Memory::Region).map_err(|error| memory::obstacle(&error));
        }
        let mut bytes = Vec::new();
        let room = bytes.try_reserve_exact(limits::PROBE_BYTES);
        room.map_err(|_| Obstacle::io("no memory", &io::Error::from_raw_os_error(libc::ENOMEM)))?;
        bytes.resize(limits::PROBE_BYTES, 0);
        Ok(Memory::Plain(bytes))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Plain(bytes) => bytes,
            Memory::Region(region) => &region.bytes()[..limits::PROBE_BYTES],
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Plain(bytes) => bytes,
            Memory::Region(region) => &mut region.bytes_mut().0[..limits::PROBE_BYTES],
        }
    }

    fn piece(&self, position: usize) -> Piece<'_> {
        let bytes = &self.bytes()[position..];
        let file = match self {
            Memory::Plain(_) => None,
            Memory::Region(region) => Some((region.file(), position as u64)),
        };
        Piece { length: bytes.len(), bytes: Some(bytes), file }
    }

    fn landing(&mut self, position: usize) -> Landing<'_> {
        let length = limits::PROBE_BYTES - position;
        let (bytes, file) = match self {
            Memory::Plain(bytes) => (bytes.as_mut_slice(), None),
            Memory::Region(region) => {
                let (bytes, file) = region.bytes_mut();
                (bytes, Some((file, position as u64)))
            }
        };
        Landing { length, bytes: Some(&mut bytes[position..position + length]), file }
    }
}

/// The two ends of a TCP connection on loopback; neither blocks.
pub struct Pair {
    pub sender: TcpStream,
    pub receiver: TcpStream,
}

impl Pair {
    pub fn new() -> Result<Pair, Obstacle> {
        connect().map_err(|error| Obstacle::io("no connection on loopback", &error))
    }

    /// Ends the connection, and with it whatever waits for it.
    fn end(&self) {
        // Fails only on a socket that has ended already.
        let _ = self.sender.shutdown(Shutdown::Both);
        let _ = self.receiver.shutdown(Shutdown::Both);
    }
}

fn connect() -> io::Result<Pair> {
    let anywhere = [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), (Ipv6Addr::LOCALHOST, 0).into()];
    let listener = TcpListener::bind(&anywhere[..])?;
    let sender = TcpStream::connect_timeout(&listener.local_addr()?, limits::PROBE_TIMEOUT)?;
    let receiver = accept(&listener, sender.local_addr()?)?;
    for socket in [&sender, &receiver] {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
    }
    Ok(Pair { sender, receiver })
}

/// Takes in the visitor that is ours; any process of this host may have come first.
fn accept(listener: &TcpListener, ours: SocketAddr) -> io::Result<TcpStream> {
    while await_readable(listener, limits::PROBE_TIMEOUT)? {
        let (socket, visitor) = listener.accept()?;
        if visitor == ours {
            return Ok(socket);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver that never gets anything.
    struct Deaf;

    impl ReceivePath for Deaf {
        fn receive(&mut self, _: std::os::fd::BorrowedFd<'_>, _: Landing<'_>) -> io::Result<usize> {
            Ok(0)
        }
    }

    #[test]
    fn an_end_of_the_stream_is_an_obstacle() {
        let pair = Pair::new().unwrap();
        let mut sender = "write".parse::<SendKind>().unwrap().open().unwrap();
        let (from, mut into) = (Memory::new(false).unwrap(), Memory::new(false).unwrap());
        let outcome = exchange(&pair, sender.as_mut(), &from, &mut Deaf, &mut into);
        assert!(outcome.unwrap_err().why.starts_with("receiving: "));
    }

    #[test]
    fn other_bytes_are_found() {
        let (from, mut into) = (Memory::new(false).unwrap(), Memory::new(false).unwrap());
        assert!(compare(&from, &into).is_ok());
        into.bytes_mut()[limits::PROBE_BYTES - 1] = 1;
        assert!(compare(&from, &into).is_err());
    }

    #[test]
    fn a_trial_that_breaks_off_is_reported() {
        let outcome = in_time(limits::PROBE_TIMEOUT, |_| panic!("on purpose"));
        assert_eq!(outcome.unwrap_err().why, "the trial broke off");
    }

    #[test]
    fn a_trial_that_hangs_is_given_up_and_its_sockets_end() {
        let (tell, told) = mpsc::channel();
        let outcome = in_time(Duration::from_millis(10), move |pair| {
            while !matches!(std::io::Read::read(&mut &pair.receiver, &mut [0]), Ok(0)) {
                std::thread::yield_now();
            }
            tell.send(()).unwrap();
            Ok(0)
        });
        assert_eq!(outcome.unwrap_err().why, "no end in 0.01 s");
        told.recv_timeout(limits::PROBE_TIMEOUT).unwrap();
    }
}
