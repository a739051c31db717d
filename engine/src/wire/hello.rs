//! The first bytes of every connection, of fixed size, and the ticket that admits a data channel.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::WireError;

/// First bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"fedlane\0";

/// Version of everything in this module and in [`super::message`].
pub const VERSION: u16 = 2;

/// What a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// Framed messages.
    Control = 1,
    /// Bare payload.
    Data = 2,
}

/// An aggregator's answer to a data hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// The connection is taken.
    Admitted = 0,
    /// The ticket does not admit this session, client and stream.
    WrongTicket = 1,
    /// The stream is connected already.
    Taken = 2,
}

impl Answer {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Answer::Admitted => "admitted",
            Answer::WrongTicket => "wrong ticket",
            Answer::Taken => "stream connected already",
        }
    }
}

/// Twelve bytes: who speaks, which version, which channel.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Preamble {
    magic: [u8; 8],
    version: U16,
    channel: u8,
    answer: u8,
}

impl Preamble {
    /// What the side that dials sends first.
    pub fn new(channel: Channel) -> Preamble {
        Self::answering(channel, Answer::Admitted)
    }

    /// What an aggregator answers.
    pub fn answering(channel: Channel, answer: Answer) -> Preamble {
        Preamble {
            magic: MAGIC,
            version: U16::new(VERSION),
            channel: channel as u8,
            answer: answer as u8,
        }
    }

    /// The channel, if the peer speaks this protocol in this version.
    pub fn channel(&self) -> Result<Channel, WireError> {
        if self.magic != MAGIC {
            return Err(WireError::NotFedlane { first: self.magic.escape_ascii().to_string() });
        }
        if self.version.get() != VERSION {
            return Err(WireError::Version { theirs: self.version.get(), ours: VERSION });
        }
        match self.channel {
            1 => Ok(Channel::Control),
            2 => Ok(Channel::Data),
            other => Err(WireError::Channel { other }),
        }
    }

    /// The answer to a data hello.
    pub fn answer(&self) -> Result<Answer, WireError> {
        match self.answer {
            0 => Ok(Answer::Admitted),
            1 => Ok(Answer::WrongTicket),
            2 => Ok(Answer::Taken),
            other => Err(WireError::Answer { other }),
        }
    }
}

/// Names one session of an aggregator.
pub type SessionId = [u8; 16];

/// The secret that admits one client's data channels. It travels on the control channel.
pub type Ticket = [u8; 32];

/// What a client comes for, as it may be seen by everyone.
pub type Place = [u8; 16];

/// What two peers know of each other before they meet, where one port serves many transfers. It
/// never travels: it names a [`Place`], and the proofs of data channels need it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    /// The place only: what is logged must not open it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secret for {:02x?}", self.place())
    }
}

impl Secret {
    /// No secret, for an aggregator with one session that is open to all.
    pub const OPEN: Secret = Secret([0; 32]);

    /// A secret that was agreed on elsewhere.
    pub fn new(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// The secret itself.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The place that it opens; zeros for [`Secret::OPEN`].
    pub fn place(&self) -> Place {
        let mut place = [0; 16];
        if *self != Secret::OPEN {
            let name = blake3::derive_key("fedlane 2026 place", &self.0);
            place.copy_from_slice(&name[..16]);
        }
        place
    }
}

/// The key of the proofs: the ticket, bound to the secret and to the `Join` that it answers, in its
/// frame. A weight or name that was changed on the way admits no data channel, nor does a ticket
/// that was overheard where there is a secret.
pub fn bind_ticket(ticket: &Ticket, secret: &Secret, join_frame: &[u8]) -> Ticket {
    *blake3::Hasher::new_keyed(ticket).update(&secret.0).update(join_frame).finalize().as_bytes()
}

/// Follows the preamble on a data channel: which stream this is, and the proof that it may be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DataHello {
    session: SessionId,
    client: U32,
    stream: U32,
    mac: [u8; 32],
}

impl DataHello {
    /// The hello of `client`'s stream number `stream`.
    pub fn new(session: SessionId, client: u32, stream: u32, ticket: &Ticket) -> DataHello {
        let mac = mac(&session, client, stream, ticket);
        DataHello { session, client: U32::new(client), stream: U32::new(stream), mac }
    }

    /// Which session it asks for.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Which client says it is calling; not proven before [`DataHello::is_admitted_by`].
    pub fn client(&self) -> u32 {
        self.client.get()
    }

    /// Which of its streams this is.
    pub fn stream(&self) -> u32 {
        self.stream.get()
    }

    /// Whether the ticket made this hello. Takes the same time whatever differs.
    pub fn is_admitted_by(&self, session: &SessionId, ticket: &Ticket) -> bool {
        let expected = mac(session, self.client(), self.stream(), ticket);
        // blake3::Hash compares in constant time.
        self.session == *session && blake3::Hash::from(expected) == blake3::Hash::from(self.mac)
    }
}

/// BLAKE3, keyed with the ticket, over session, client and stream.
fn mac(session: &SessionId, client: u32, stream: u32, ticket: &Ticket) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(ticket);
    hasher.update(session);
    hasher.update(&client.to_le_bytes());
    hasher.update(&stream.to_le_bytes());
    *hasher.finalize().as_bytes()
}
