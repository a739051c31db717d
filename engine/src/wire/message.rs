//! What the control channel says. The order of variants and fields is the wire format:
//! new ones go to the end, and [`super::hello::VERSION`] rises.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::hello::{Place, SessionId, Ticket};
use crate::topology::Shape;
use crate::verdict::OnNonfinite;

/// A checksum as it travels: eight bytes, little-endian.
pub type WireSum = [u8; 8];

/// From a client to the aggregator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ClientMessage {
    /// First message: who joins, with which model.
    Join {
        /// Name for logs and for `order = client`; unique in a session.
        name: String,
        /// Number of training examples: the weight in the mean.
        examples: f64,
        /// The safetensors header of the client's model; empty to be told it.
        header: Vec<u8>,
        /// What it comes for; zeros for the only session of an aggregator.
        place: Place,
        /// The ticket of its last plan, if its connection broke and it comes again.
        resumes: Option<Ticket>,
    },
    /// The upload of this round begins: from now on bytes are expected.
    Uploading {
        /// The round.
        round: u32,
    },
    /// Checksums of chunks whose bytes, or whose proof, were asked for.
    Sums {
        /// Number of the first chunk in the model.
        first: u32,
        /// One for each chunk, in order.
        sums: Vec<WireSum>,
    },
    /// The model came whole, and this is the digest of what came.
    Received {
        /// The round whose model it is; 0 is the initial model.
        round: u32,
        /// [`super::checksum::model_digest`] of the bytes received.
        digest: [u8; 32],
    },
    /// Says nothing but that the client lives.
    Alive,
    /// The client gives up, and why.
    Failed {
        /// One line for people.
        reason: String,
    },
    /// First message of a client that only asks whether it could join: answered by `Done`.
    Call {
        /// Name for logs.
        name: String,
        /// What it would come for.
        place: Place,
    },
    /// Asks for chunks of the model that is on offer, on one stream and in this order, behind
    /// those that were asked for before.
    Want {
        /// The stream.
        stream: u32,
        /// The chunks.
        chunks: Vec<ChunkRange>,
    },
    /// Asks for the checksums of chunks that came over an earlier connection, without their bytes.
    Prove {
        /// The stream.
        stream: u32,
        /// The chunks.
        chunks: Vec<ChunkRange>,
    },
    /// In a ring: the update of this round is ready, and the left neighbour may send here.
    Ready {
        /// The round.
        round: u32,
        /// The attempt, counted from 0 in each round.
        attempt: u32,
        /// The weight of the update.
        examples: f64,
        /// Host where it listens; empty for where its control channel comes from.
        host: String,
        /// Port where it listens.
        port: u16,
        /// What the left neighbour's data channels must prove to know, veiled.
        key: Ticket,
        /// With TLS: its certificate (DER) for this session; empty without.
        certificate: Vec<u8>,
    },
    /// In a ring: the whole mean is here, and this is its digest.
    Reduced {
        /// The round.
        round: u32,
        /// The attempt.
        attempt: u32,
        /// [`super::checksum::model_digest`] of the mean.
        digest: [u8; 32],
    },
    /// In a ring: this attempt cannot go on here.
    Broken {
        /// The round.
        round: u32,
        /// The attempt.
        attempt: u32,
        /// Nothing usable comes from the left neighbour, or nothing goes back to it.
        from_left: bool,
        /// Nothing goes to the right neighbour, or nothing usable comes back from it.
        to_right: bool,
        /// Only silence was the sign.
        stalled: bool,
        /// One line for people.
        reason: String,
    },
    /// First message of an edge, which will send the sums of its own clients' updates. As `Join`.
    JoinAsEdge {
        /// Name for logs and for `order = client`; unique in a session.
        name: String,
        /// Number of training examples of all its clients.
        examples: f64,
        /// The safetensors header of the model.
        header: Vec<u8>,
        /// What it comes for.
        place: Place,
        /// The ticket of its last plan, if its connection broke and it comes again.
        resumes: Option<Ticket>,
    },
    /// Of an edge: whose updates its sums of this round hold. Long lists come in several messages.
    Leaves {
        /// The round.
        round: u32,
        /// The power of two that the weights of these sums are scaled with; none for one client that
        /// is alone, and for sums that wait for a `Fold`.
        scale: Option<i32>,
        /// Whether it waits for a `Fold`.
        in_order: bool,
        /// How many leaves were in earlier messages; 0 begins anew.
        first: u32,
        /// The leaves, in the order of their names.
        leaves: Vec<Leaf>,
        /// Whether these are the last ones.
        last: bool,
    },
}

/// A client somewhere below an edge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leaf {
    /// Its name, after those of the edges between, each with a slash.
    pub name: String,
    /// Its weight.
    pub examples: f64,
    /// Why its update is not in the sums, if it is not.
    pub left_out: Option<String>,
}

/// From the aggregator to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AggregatorMessage {
    /// Everyone has joined; this is how bytes will travel.
    Plan(Plan),
    /// A model is about to be sent to the client.
    Download {
        /// The round whose result it is; 0 is the initial model.
        round: u32,
        /// [`super::checksum::model_digest`] of the model.
        digest: [u8; 32],
    },
    /// Checksums of chunks whose bytes, or whose proof, were asked for.
    Sums {
        /// Number of the first chunk in the model.
        first: u32,
        /// One for each chunk, in order.
        sums: Vec<WireSum>,
    },
    /// Send the update of this round.
    Upload {
        /// The round, counted from 1.
        round: u32,
    },
    /// The round is over.
    Applied {
        /// The round.
        round: u32,
        /// Why the client's update is not in the mean, if it is not: one line for people.
        left_out: Option<String>,
    },
    /// All rounds are done.
    Done,
    /// Says nothing but that the aggregator lives.
    Alive,
    /// The aggregator gives up, and why.
    Failed {
        /// One line for people.
        reason: String,
    },
    /// Asks for chunks of the update, on one stream and in this order, behind those that were asked
    /// for before.
    Want {
        /// The stream.
        stream: u32,
        /// The chunks.
        chunks: Vec<ChunkRange>,
    },
    /// Asks for the checksums of chunks that came over an earlier connection, without their bytes.
    Prove {
        /// The stream.
        stream: u32,
        /// The chunks.
        chunks: Vec<ChunkRange>,
    },
    /// Everyone here is in a ring.
    Ring(RingTerms),
    /// Everyone is ready: who is next to whom in this attempt.
    Turn(Turn),
    /// This attempt is over for all, and there will be another one.
    Halt {
        /// The round.
        round: u32,
        /// The attempt.
        attempt: u32,
        /// One line for people.
        reason: String,
    },
    /// To an edge, where clients are averaged in turn: it is its turn to add its clients' updates.
    Fold {
        /// The round.
        round: u32,
        /// The power of two that all weights are scaled with; none for one client that is alone.
        scale: Option<i32>,
        /// Digest of the sums that it begins from, which are sent to it now; none if it is the first.
        seed: Option<[u8; 32]>,
    },
}

/// What all rounds of a ring or chain have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingTerms {
    /// The session.
    pub session: SessionId,
    /// Rounds that will be run.
    pub rounds: u32,
    /// Silence, in milliseconds, after which either side gives the other up.
    pub deadline_ms: u64,
    /// The safetensors header of the model, for a client that has joined without one.
    pub header: Vec<u8>,
    /// In which way the hosts average.
    pub shape: Shape,
    /// What each does with its own update if elements of it are NaN or infinite.
    pub on_nonfinite: OnNonfinite,
}

/// One attempt at an all-reduce, as one rank has to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The round.
    pub round: u32,
    /// The attempt.
    pub attempt: u32,
    /// The place of this client in the ring.
    pub rank: u32,
    /// Name and weight of every client, by rank.
    pub ranks: Vec<(String, f64)>,
    /// Data channels between two neighbours.
    pub streams: u32,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Where the right neighbour listens; empty for who has none.
    pub right: String,
    /// What must be proven there, veiled.
    pub right_key: Ticket,
    /// With TLS: the certificate that it must have; empty without.
    pub right_certificate: Vec<u8>,
}

/// Consecutive chunks, by their numbers in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRange {
    /// The first one.
    pub first: u32,
    /// The one behind the last one.
    pub end: u32,
}

impl From<&Range<usize>> for ChunkRange {
    /// A model has at most [`crate::limits::MAX_CHUNKS`].
    fn from(range: &Range<usize>) -> ChunkRange {
        ChunkRange { first: range.start as u32, end: range.end as u32 }
    }
}

impl ChunkRange {
    /// The range, if it is not empty and inside `lane`.
    pub fn within(self, lane: &Range<usize>) -> Option<Range<usize>> {
        let range = self.first as usize..self.end as usize;
        let fits = range.start < range.end && lane.start <= range.start && range.end <= lane.end;
        fits.then_some(range)
    }
}

/// How the bytes of a session travel. Both sides derive the same chunks and the same range for
/// each stream from it and the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The session.
    pub session: SessionId,
    /// This client's number.
    pub client: u32,
    /// What its data channels must prove to know.
    pub ticket: Ticket,
    /// Data channels to open.
    pub streams: u32,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Rounds that will be run.
    pub rounds: u32,
    /// Silence, in milliseconds, after which either side gives the other up.
    pub deadline_ms: u64,
    /// The safetensors header of the model, for a client that has joined without one.
    pub header: Vec<u8>,
}
