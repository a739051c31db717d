//! One direction of one connection: reads, does what the plan says, writes.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::{Direction, Fault, Kind};
use crate::proxy::{Connection, Network, Pair, TICK, end_writing, is_early};

/// Bytes that are read at once.
const PIECE_BYTES: usize = 64 << 10;

/// How long a merging pump waits for more.
const MERGE_WAIT: Duration = Duration::from_millis(10);

/// Pieces a second of a throttled pump.
const PIECES_S: u64 = 100;

/// How bytes go, from some byte on.
#[derive(Default)]
struct Manner {
    delay: Duration,
    bytes_s: Option<u64>,
    /// Before this byte, each is a packet.
    splits_until: u64,
    merges: bool,
}

struct Pump<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    direction: Direction,
    connection: &'a Connection,
    network: &'a Network,
    faults: VecDeque<Fault>,
    position: u64,
    manner: Manner,
    flip: Option<u8>,
    is_truncated: bool,
}

/// Moves bytes until either side ends or the plan ends it. `faults` are in order.
pub(crate) fn run(
    pair: &Arc<Pair>,
    direction: Direction,
    faults: Vec<Fault>,
    connection: &Connection,
    network: &Network,
) {
    let (from, to) = match direction {
        Direction::Up => (&pair.client, &pair.aggregator),
        Direction::Down => (&pair.aggregator, &pair.client),
    };
    let mut pump = Pump {
        from,
        to,
        direction,
        connection,
        network,
        faults: faults.into(),
        position: 0,
        manner: Manner::default(),
        flip: None,
        is_truncated: false,
    };
    if let Err(error) = pump.move_all() {
        // One side's reset is the other side's too.
        connection.end(error.kind() == io::ErrorKind::ConnectionReset);
    }
    // The end goes on like the bytes before it, unless the connection is to be reset.
    if !connection.is_over() && network.await_turn(connection) {
        end_writing(to);
    }
}

impl Pump<'_> {
    fn move_all(&mut self) -> io::Result<()> {
        self.from.set_read_timeout(Some(TICK))?;
        self.to.set_write_timeout(Some(TICK))?;
        let mut bytes = vec![0; PIECE_BYTES];
        loop {
            self.break_what_is_due();
            if !self.network.await_turn(self.connection) {
                return Ok(());
            }
            let room = self.room();
            let length = match (&mut self.from).read(&mut bytes[..room]) {
                Ok(0) => return Ok(()),
                Ok(length) => self.read_more(&mut bytes[..room], length)?,
                Err(error) if is_early(&error) => continue,
                Err(error) => return Err(error),
            };
            self.connection.came(self.direction, length);
            self.position += length as u64;
            if let Some(bit) = self.flip.take() {
                bytes[0] ^= 1 << bit;
            }
            if !self.is_truncated {
                self.pace(length);
                self.write(&bytes[..length])?;
            }
        }
    }

    /// Does what the plan has for this byte.
    fn break_what_is_due(&mut self) {
        while self.faults.front().is_some_and(|fault| fault.at_byte <= self.position) {
            let Some(fault) = self.faults.pop_front() else { return };
            if !matches!(fault.kind, Kind::Hold(_)) {
                self.network.fire(&fault);
            }
            match fault.kind {
                Kind::Drop(scope) => self.network.end(self.connection, scope, false),
                Kind::Reset(scope) => self.network.end(self.connection, scope, true),
                Kind::Stall(scope, time) => self.network.stall(self.connection, scope, time),
                Kind::Delay(time) => self.manner.delay = time,
                Kind::Throttle { bytes_s } => self.manner.bytes_s = Some(bytes_s),
                Kind::Split(bytes) => self.manner.splits_until = self.position + bytes,
                Kind::Merge => self.manner.merges = true,
                // Done before the connection was passed on.
                Kind::Hold(_) => {}
                Kind::Flip(bit) => self.flip = Some(bit % 8),
                Kind::Truncate => {
                    self.is_truncated = true;
                    end_writing(self.to);
                }
                Kind::Call(act) => act(),
            }
        }
    }

    /// How much may be read before the plan has to be looked at again.
    fn room(&self) -> usize {
        let due = self.faults.front().map_or(u64::MAX, |fault| fault.at_byte - self.position);
        let paced = self.manner.bytes_s.map_or(u64::MAX, |rate| (rate / PIECES_S).max(1));
        let split = if self.position < self.manner.splits_until { 1 } else { u64::MAX };
        due.min(paced).min(split).min(PIECE_BYTES as u64) as usize
    }

    fn read_more(&self, bytes: &mut [u8], mut length: usize) -> io::Result<usize> {
        let until = Instant::now() + MERGE_WAIT;
        while self.manner.merges && length < bytes.len() && Instant::now() < until {
            let mut from = self.from;
            match from.read(&mut bytes[length..]) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(error) if is_early(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(length)
    }

    fn pace(&self, length: usize) {
        let rate = self.manner.bytes_s;
        let due = rate.map(|rate| Duration::from_secs_f64(length as f64 / rate.max(1) as f64));
        let until = Instant::now() + self.manner.delay + due.unwrap_or_default();
        while Instant::now() < until && !self.connection.is_over() {
            std::thread::sleep(TICK.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        let mut to = self.to;
        while !bytes.is_empty() && self.network.await_turn(self.connection) {
            match to.write(bytes) {
                Ok(written) => {
                    self.connection.went(self.direction, written);
                    bytes = &bytes[written..];
                }
                Err(error) if is_early(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
