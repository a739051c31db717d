//! The first bytes of every connection, of fixed size, and the ticket that admits a data channel.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::WireError;

/// First bytes of every connection, in both directions.
pub const MAGIC: [u8; 8] = *b"fedlane\0";

/// Version of everything in this module and in [`super::message`].
pub const VERSION: u16 = 3;

/// What a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// Framed messages.
    Control = 1,
    /// Bare payload.
    Data = 2,
}

/// What an aggregator answers to the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answer {
    /// The connection is taken.
    Admitted = 0,
    /// The ticket does not admit this session, client and stream.
    WrongTicket = 1,
    /// The stream is connected already.
    Taken = 2,
    /// The ticket was good and has not been used in time.
    Expired = 3,
    /// A control channel to a place that there is not.
    NoPlace = 4,
    /// Nobody is let in without TLS.
    TlsWanted = 5,
}

impl Answer {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Answer::Admitted => "admitted",
            Answer::WrongTicket => "wrong ticket",
            Answer::Taken => "stream connected already",
            Answer::Expired => "ticket expired",
            Answer::NoPlace => "no such place",
            Answer::TlsWanted => "TLS wanted",
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
        // A handshake record of TLS 1.0, as which every version begins.
        if self.magic.starts_with(&[0x16, 3]) {
            return Err(WireError::Tls);
        }
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

    /// The channel that somebody dials, as [`Preamble::channel`].
    pub fn dialled(&self) -> Result<Channel, WireError> {
        let channel = self.channel()?;
        match self.answer {
            0 => Ok(channel),
            other => Err(WireError::Answer { other }),
        }
    }

    /// The aggregator's answer on a channel of this kind.
    pub fn answer_on(&self, channel: Channel) -> Result<Answer, WireError> {
        match self.channel()? == channel {
            true => self.answer(),
            false => Err(WireError::Channel { other: self.channel }),
        }
    }

    /// The aggregator's answer.
    pub fn answer(&self) -> Result<Answer, WireError> {
        match self.answer {
            0 => Ok(Answer::Admitted),
            1 => Ok(Answer::WrongTicket),
            2 => Ok(Answer::Taken),
            3 => Ok(Answer::Expired),
            4 => Ok(Answer::NoPlace),
            5 => Ok(Answer::TlsWanted),
            other => Err(WireError::Answer { other }),
        }
    }
}

/// Names one session of an aggregator.
pub type SessionId = [u8; 16];

/// The secret that admits one client's data channels. It travels on the control channel.
pub type Ticket = [u8; 32];

/// Random bytes that make a control channel unlike all others.
pub type Nonce = [u8; 32];

/// Shows that whoever sends it has a key.
pub type Proof = [u8; 32];

/// What a client comes for, as it may be seen by everyone.
pub type Place = [u8; 16];

/// What two peers know of each other before they meet. It never travels: it names a [`Place`], and
/// the proofs and seals of a control channel need it.
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
    pub const fn new(bytes: [u8; 32]) -> Secret {
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

/// Follows the client's preamble on a control channel.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Opening {
    /// What the client comes for.
    pub place: Place,
    /// The client's part of the keys.
    pub nonce: Nonce,
}

/// Follows the aggregator's preamble on a control channel, if there is such a place. The client
/// answers with its own proof.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Reply {
    /// The aggregator's part of the keys.
    pub nonce: Nonce,
    /// [`super::keys::ControlKeys::aggregator_proof`].
    pub proof: Proof,
}

/// Follows the client's preamble on a data channel: which stream this is, and the proof that it may
/// be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DataHello {
    session: SessionId,
    client: U32,
    stream: U32,
    proof: Proof,
}

impl DataHello {
    /// The hello of `client`'s stream number `stream`, with [`super::keys::Binding::key`] of its
    /// ticket.
    pub fn new(session: SessionId, client: u32, stream: u32, key: &Ticket) -> DataHello {
        let mut hello = DataHello {
            session,
            client: U32::new(client),
            stream: U32::new(stream),
            proof: [0; 32],
        };
        hello.proof = hello.expected(key);
        hello
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

    /// Whether the key made this hello. Takes the same time whatever differs.
    pub fn is_admitted_by(&self, session: &SessionId, key: &Ticket) -> bool {
        self.session == *session && is_same(&self.expected(key), &self.proof)
    }

    /// What an aggregator that has the key answers.
    pub fn admission(&self, key: &Ticket) -> DataAnswer {
        let mut hasher = blake3::Hasher::new_keyed(key);
        let proof = *hasher.update(b"aggregator").update(self.as_bytes()).finalize().as_bytes();
        DataAnswer { preamble: Preamble::answering(Channel::Data, Answer::Admitted), proof }
    }

    /// BLAKE3, keyed, over who dials and all before the proof.
    fn expected(&self, key: &Ticket) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(key);
        hasher.update(b"client").update(&self.session);
        hasher.update(self.client.as_bytes()).update(self.stream.as_bytes());
        *hasher.finalize().as_bytes()
    }
}

/// The answer to a data hello that is admitted. To others the aggregator answers with its preamble
/// alone.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DataAnswer {
    /// Says that the stream is admitted.
    pub preamble: Preamble,
    proof: Proof,
}

impl DataAnswer {
    /// An admission with this proof, which came from somebody.
    pub fn admitted(proof: Proof) -> DataAnswer {
        DataAnswer { preamble: Preamble::answering(Channel::Data, Answer::Admitted), proof }
    }

    /// Whether somebody with the key admits this hello. Takes the same time whatever differs.
    pub fn is_of(&self, hello: &DataHello, key: &Ticket) -> bool {
        is_same(&hello.admission(key).proof, &self.proof)
    }
}

/// Compares in constant time, as [`blake3::Hash`] does.
pub(super) fn is_same(expected: &Proof, found: &Proof) -> bool {
    blake3::Hash::from(*expected) == blake3::Hash::from(*found)
}
