//! What goes wrong, where and when.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a connection carries, as its preamble says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Framed messages.
    Control,
    /// Bytes of the model.
    Data,
    /// It said something else first, or nothing.
    Other,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the aggregator.
    Up,
    /// From the aggregator to the client.
    Down,
}

/// A connection of the proxy; all count from 0, in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Of all connections. The only one that works where the first bytes are encrypted.
    Nth(usize),
    /// Of the control channels.
    Control(usize),
    /// Of the data channels.
    Data(usize),
}

/// What a drop, reset or stall hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The connection alone, both directions.
    Connection,
    /// All connections that there are; a stall holds new ones too, like a cable that is pulled.
    All,
}

/// What goes wrong.
#[derive(Clone)]
pub enum Kind {
    /// Both ends see the connection closed.
    Drop(Scope),
    /// Both ends see it reset.
    Reset(Scope),
    /// Nothing moves for so long, or never again; nothing is lost.
    Stall(Scope, Option<Duration>),
    /// Every piece comes so much later, from here on.
    Delay(Duration),
    /// So many bytes a second, from here on.
    Throttle {
        /// The rate.
        bytes_s: u64,
    },
    /// Each of so many bytes is a packet.
    Split(u64),
    /// What comes within 10 ms goes at once, from here on.
    Merge,
    /// The connection reaches the aggregator when another one has, or after so long. Only at byte 0.
    Hold(Duration),
    /// One bit of the next byte is another, 0 to 7.
    Flip(u8),
    /// What follows in this direction is lost, and its end comes at once. The other direction goes on.
    Truncate,
    /// Nothing goes wrong here; the test does something, and the byte waits for it.
    Call(Arc<dyn Fn() + Send + Sync>),
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Drop(scope) => write!(f, "Drop({scope:?})"),
            Kind::Reset(scope) => write!(f, "Reset({scope:?})"),
            Kind::Stall(scope, time) => write!(f, "Stall({scope:?}, {time:?})"),
            Kind::Delay(time) => write!(f, "Delay({time:?})"),
            Kind::Throttle { bytes_s } => write!(f, "Throttle({bytes_s})"),
            Kind::Split(bytes) => write!(f, "Split({bytes})"),
            Kind::Merge => write!(f, "Merge"),
            Kind::Hold(time) => write!(f, "Hold({time:?})"),
            Kind::Flip(bit) => write!(f, "Flip({bit})"),
            Kind::Truncate => write!(f, "Truncate"),
            Kind::Call(_) => write!(f, "Call"),
        }
    }
}

/// One thing that goes wrong.
#[derive(Clone, Debug)]
pub struct Fault {
    /// On which connection.
    pub which: Which,
    /// In which direction.
    pub direction: Direction,
    /// When so many bytes have gone that way, and before the next.
    pub at_byte: u64,
    /// What.
    pub kind: Kind,
}

/// What becomes of connections that come after a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Then {
    /// They go through.
    #[default]
    Open,
    /// They are refused: nobody listens any more.
    Refuse,
    /// They are accepted, and nothing moves on them.
    Silent,
}

/// Everything that goes wrong.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// In any order.
    pub faults: Vec<Fault>,
    /// Once one of them has happened. Calls do not count.
    pub then: Then,
}

impl Plan {
    /// Nothing goes wrong.
    pub fn honest() -> Plan {
        Plan::default()
    }

    /// One thing goes wrong, and new connections go through.
    pub fn one(which: Which, direction: Direction, at_byte: u64, kind: Kind) -> Plan {
        let faults = vec![Fault { which, direction, at_byte, kind }];
        Plan { faults, then: Then::Open }
    }
}
