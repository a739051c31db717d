//! What can be wrong with peers, connections and transfers.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use super::{
    ManifestError, ReducerError, RegionError, SinkError, SourceError, StateError, TlsError,
};
use crate::wire::hello::Secret;

/// Bytes that are not this protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not ours.
    #[error("the peer does not speak fedlane: it began with \"{first}\"")]
    NotFedlane {
        /// The first bytes, escaped.
        first: String,
    },
    /// The first bytes are those of TLS.
    #[error("the peer speaks TLS and this side does not: give both sides TLS options, or none")]
    Tls,
    /// The aggregator wants TLS.
    #[error(
        "TLS is wanted here and the client does not speak it: give both sides TLS options, or none"
    )]
    TlsWanted,
    /// Another version of the protocol.
    #[error(
        "the peer speaks version {theirs} of the protocol and this is version {ours}; run the same release on both sides"
    )]
    Version {
        /// The peer's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// A channel that does not exist.
    #[error("the peer opened channel type {other}, which does not exist")]
    Channel {
        /// Its number.
        other: u8,
    },
    /// An answer that does not exist.
    #[error("the peer gave answer {other}, which does not exist")]
    Answer {
        /// Its number.
        other: u8,
    },
    /// A message above its limit.
    #[error("a message of {bytes} bytes was announced; the limit is {limit}")]
    TooLong {
        /// Bytes announced.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Not a message.
    #[error("the peer sent bytes that are no message: {error}")]
    Decode {
        /// Why.
        error: String,
    },
    /// A message, and something behind it.
    #[error("the peer sent a message with {bytes} bytes too many")]
    Trailing {
        /// Bytes behind the message.
        bytes: usize,
    },
    /// A message that is not what the peer sent.
    #[error(
        "a message does not carry the right seal: it was changed, repeated or left out on the way, or \
         comes from somebody else"
    )]
    Seal,
    /// A message of ours that cannot be encoded.
    #[error("a message could not be encoded: {error}")]
    Encode {
        /// Why.
        error: String,
    },
}

/// A message that is valid and must not come here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// At this point of the session it makes no sense.
    #[error("the peer sent {what} when none was due")]
    Unexpected {
        /// What came.
        what: &'static str,
    },
    /// A stream that the session does not have.
    #[error("the peer spoke of stream {stream}, which the session does not have")]
    Stream {
        /// Its number.
        stream: u32,
    },
    /// More checksums than chunks.
    #[error("the peer announced checksums of chunks that the model does not have")]
    TooManySums,
    /// A checksum that is not the one announced before.
    #[error(
        "the checksum of chunk {chunk} is not the one that was announced before: its update changed while it was being sent"
    )]
    Changed {
        /// The chunk.
        chunk: usize,
    },
    /// More messages than anyone has to send.
    #[error("the peer sent more messages than a session has use for")]
    Flood,
    /// The same chunks again and again.
    #[error("the peer asked for chunks of stream {stream} more often than a transfer takes")]
    TooOften {
        /// The stream.
        stream: u32,
    },
    /// Chunks that are not of the stream they are wanted on.
    #[error("the peer wants chunks of stream {stream} that it does not have")]
    Chunks {
        /// The stream.
        stream: u32,
    },
}

/// Why a control channel ended.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The peer closed it.
    #[error("the connection was closed by the other side")]
    Closed,
    /// No sign of life for the length of the deadline.
    #[error("no sign of life within the deadline; if it only was slow, raise --deadline-ms")]
    Silent,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// Bytes that are not this protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A message that must not come here.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// A place that the aggregator does not have.
    #[error("it has nothing for this secret: the secrets differ, or what was here is gone")]
    NoPlace,
    /// Certificates, or a connection that is not encrypted on both sides.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Somebody without the secret, or whose first bytes were changed.
    #[error(
        "the other side could not prove that it knows the secret: the secrets differ, or it is \
         somebody else"
    )]
    Stranger,
}

/// Why a visitor was not let in. Goes to the log of the aggregator, and ends nothing else.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// Its bytes or its silence.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// Others hold all the memory that there is for visitors.
    #[error("too many large first messages at once; try again")]
    Crowded,
    /// A control channel that begins with something else.
    #[error("its first message was not a request to join")]
    NoJoin,
    /// A message that names another place than the first bytes did.
    #[error("it asked for another place than it proved to know")]
    OtherPlace,
    /// A client with somebody else's name.
    #[error("\"{name}\" is not in its certificate, or not among the names that may join")]
    Name {
        /// The name that it gave.
        name: String,
    },
    /// A control channel to nowhere.
    #[error("it has another secret, or none, or comes for something that is gone")]
    NoPlace,
    /// A data channel that may not be opened.
    #[error("its ticket was not accepted ({answer})")]
    Ticket {
        /// What it was told.
        answer: &'static str,
    },
}

/// Why the bytes of one stream could not be moved.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The socket failed.
    #[error("the data connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer closed it before the last byte.
    #[error("the data connection was closed before all bytes had come")]
    Closed,
    /// The peer sent on behind the last byte.
    #[error("more bytes than were agreed came on a data connection")]
    TooMuch,
    /// No byte moved for the length of the deadline.
    #[error(
        "no byte moved for {seconds:.1} s, which is longer than the deadline; if the link is that slow, raise --deadline-ms"
    )]
    Stalled {
        /// How long.
        seconds: f64,
    },
    /// A chunk came and its checksum did not.
    #[error("no checksum was announced for bytes that came, within the deadline")]
    NoChecksum,
    /// Bytes that are not those which were announced.
    #[error("bytes {} to {} do not match their checksum: they were changed on the way, or in the source while it was being sent", bytes.start, bytes.end)]
    Checksum {
        /// Their range in the model.
        bytes: Range<u64>,
    },
    /// A chunk buffer could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The sink failed.
    #[error(transparent)]
    Sink(#[from] SinkError),
}

/// Why a lane ended early.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// One of its streams failed.
    #[error("stream of peer {peer}: {error}")]
    Peer {
        /// Which one, counted among the lane's streams.
        peer: usize,
        /// What happened.
        error: TransferError,
    },
    /// Another thread asked for it.
    #[error("cancelled")]
    Cancelled,
    /// Waiting for sockets failed.
    #[error("waiting for sockets failed: {0}")]
    Poll(#[from] io::Error),
    /// The host refused its thread.
    #[error("a thread could not be started: {0}; see `ulimit -v` and `ulimit -u`")]
    Thread(io::Error),
    /// A fault of this program.
    #[error("a lane panicked: {message}; please report this")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

impl LaneError {
    /// A failure of one stream.
    pub fn peer(peer: usize, error: impl Into<TransferError>) -> LaneError {
        LaneError::Peer { peer, error: error.into() }
    }
}

/// A wish for a path that cannot be met.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The table has no such path.
    #[error("there is no path \"{name}\"; there are: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The source has not what the path needs.
    #[error(
        "send path {path} cannot send from this source; leave the choice to fedlane, or use write"
    )]
    Source {
        /// The path.
        path: &'static str,
    },
}

/// What went wrong with one client.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Its control channel.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// One of its data channels.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The aggregator began again, and the client did not find it.
    #[error("has not come back since the aggregator began again")]
    NotBack,
    /// It said so itself.
    #[error("gave up: {reason}")]
    GaveUp {
        /// Its words.
        reason: String,
    },
    /// Its model is described wrongly.
    #[error("its manifest is not valid: {0}")]
    Manifest(#[from] ManifestError),
    /// Its model is another one.
    #[error("its model differs from the session's: {difference}")]
    Model {
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// Its model is larger than it may be.
    #[error("its model has {bytes} bytes and at most {most} may come (--max-model)")]
    TooBig {
        /// The size of its model.
        bytes: u64,
        /// The largest that may come.
        most: u64,
    },
    /// There is no room for its model.
    #[error("its model has no room here: {0}")]
    NoRoom(#[from] RegionError),
    /// Its weight cannot be used.
    #[error("its number of examples is {examples:?}; it must be finite and not negative")]
    Examples {
        /// What it sent.
        examples: f64,
    },
    /// Its weight cannot be used beside those of the others.
    #[error("its number of examples is {examples:?}, which {why}")]
    Weight {
        /// What it sent.
        examples: f64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// It brings sums, where nobody adds them up.
    #[error("it is an edge, and this aggregator takes none: start it with --topology tree")]
    Edge,
    /// Its sums are made in another order than the mean.
    #[error("it averages in another order: give the same --order to the whole tree")]
    Order,
    /// Its name cannot be used.
    #[error("its name {why}")]
    Name {
        /// Why.
        why: &'static str,
    },
    /// It received another model than it was sent.
    #[error("the model it received has another digest than the one sent")]
    Digest,
    /// It has the model, or lost it, and says neither.
    #[error("did not confirm the model within {seconds} s of the last byte")]
    Unconfirmed {
        /// How long it had.
        seconds: u64,
    },
    /// Its update has elements that are not finite.
    #[error(
        "its update is rejected: element {index} of tensor \"{tensor}\" is NaN or infinite (--on-nonfinite)"
    )]
    Nonfinite {
        /// The tensor.
        tensor: String,
        /// The element, counted in the tensor.
        index: u64,
    },
    /// Its update is so large that nothing is left of it when it is clipped.
    #[error(
        "its update is rejected: its norm is {norm:e}, which leaves nothing of it when it is clipped (--clip-norm)"
    )]
    TooLarge {
        /// The norm.
        norm: f64,
    },
    /// Its update was not whole in time.
    #[error("its update was not whole {seconds} s after it was asked for (--round-deadline)")]
    TooLate {
        /// How long it had.
        seconds: f64,
    },
    /// A neighbour of it in the ring says so.
    #[error("cannot be reached in the ring: {neighbour}: {reason}")]
    Neighbour {
        /// Who says so.
        neighbour: String,
        /// Its words.
        reason: String,
    },
    /// It did not open all its data channels.
    #[error("opened {opened} of {wanted} data connections within the deadline")]
    Streams {
        /// How many it opened.
        opened: usize,
        /// How many were agreed.
        wanted: usize,
    },
}

/// Why an aggregator ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum AggregatorError {
    /// A setting out of its bounds.
    #[error("{what}: {value} is not between {least} and {most}")]
    Config {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The least value.
        least: u64,
        /// The largest value.
        most: u64,
    },
    /// An edge has lost the aggregator above it.
    #[error("above this edge: {why}")]
    Above {
        /// What happened there.
        why: String,
    },
    /// What a tree does not do.
    #[error("{what} does not work in a tree: leave it out")]
    Tree {
        /// The option.
        what: &'static str,
    },
    /// A norm that nothing can be clipped to.
    #[error("the clip norm is {clip_norm}; it must be finite and above zero")]
    ClipNorm {
        /// Its value.
        clip_norm: f64,
    },
    /// A model that no norm can be measured from.
    #[error(
        "element {index} of tensor \"{tensor}\" of the model is NaN or infinite, so updates cannot be clipped (--clip-norm): begin with another model"
    )]
    Nonfinite {
        /// The tensor.
        tensor: String,
        /// The element, counted in the tensor.
        index: u64,
    },
    /// More clients than this process may have connections.
    #[error(
        "{clients} clients take at least {wanted} open files and the limit is {limit}; raise it with `ulimit -n`"
    )]
    OpenFiles {
        /// Clients to wait for.
        clients: usize,
        /// Descriptors that they take.
        wanted: u64,
        /// Descriptors that there may be.
        limit: u64,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another --listen address or port")]
    Listen {
        /// The address.
        address: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The session cannot be kept on disk.
    #[error(transparent)]
    State(#[from] StateError),
    /// Other hosts would be let in, whoever they are.
    #[error(
        "whoever reaches {address} could join and read the models: give both sides a secret \
         (--secret-file) or TLS (--tls-cert), or say --insecure; in Python secret= or insecure=True"
    )]
    Open {
        /// Where it should listen.
        address: SocketAddr,
    },
    /// The initial model is not the session's.
    #[error("the initial model differs from the session's: {difference}")]
    Initial {
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// Updates that cannot be in one mean.
    #[error("the updates differ from those that came before: {difference}")]
    Sums {
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// Too few clients are left for a mean.
    #[error("{left} clients are left and a mean needs {wanted} (--min-clients)")]
    Quorum {
        /// How many are left.
        left: usize,
        /// How many are needed.
        wanted: usize,
    },
    /// A client ended the session.
    #[error("{client}: {error}")]
    Client {
        /// Name and address.
        client: String,
        /// What happened.
        error: Fault,
    },
    /// Memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Weights, or a dtype that is not averaged.
    #[error(transparent)]
    Reducer(#[from] ReducerError),
    /// The model cannot be cut into chunks.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The initial model.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The sink of a lane.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The send path asked for.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A lane, for a reason that is no client's.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// Another thread asked for it.
    #[error("the aggregator was stopped")]
    Cancelled,
    /// Threads or descriptors.
    #[error("the host refused a thread or descriptor: {0}")]
    Host(#[from] io::Error),
}

/// Why an exchange could not receive an update, or make a mean.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// One client; the others are as they were.
    #[error("{error}")]
    Update {
        /// The secret of its update.
        secret: Secret,
        /// What happened to it.
        #[source]
        error: Box<AggregatorError>,
    },
    /// Its client has not come.
    #[error("no client came with the update within {:.1} s: it is gone, or cannot reach this port", seconds.as_secs_f64())]
    Missing {
        /// The secret of its update.
        secret: Secret,
        /// How long it was awaited.
        seconds: Duration,
    },
    /// Its model is another one.
    #[error("an update differs from the others: {difference}")]
    Model {
        /// The secret of the update.
        secret: Secret,
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// Models that cannot be averaged with each other.
    #[error("an update differs from the others: {difference}")]
    Differs {
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// An update that is larger than any that is taken.
    #[error(
        "an update has {bytes} bytes and at most {most} are taken from one (max_update_bytes of the exchange)"
    )]
    TooBig {
        /// Its secret.
        secret: Secret,
        /// Its size.
        bytes: u64,
        /// The largest that is taken.
        most: u64,
    },
    /// An update that nobody said would come.
    #[error("an update is wanted that was never expected, or is released already")]
    NotExpected {
        /// Its secret.
        secret: Secret,
    },
    /// An update with two weights.
    #[error("an update is wanted twice; name each once")]
    Twice {
        /// Its secret.
        secret: Secret,
    },
    /// A mean of nothing.
    #[error("there is no update to average")]
    Nobody,
    /// The exchange ends.
    #[error("the exchange was closed")]
    Closed,
    /// Memory of another size than the model's.
    #[error("the memory has {bytes} bytes and the model {model_bytes}")]
    Size {
        /// Bytes of the memory.
        bytes: u64,
        /// Bytes of the model.
        model_bytes: u64,
    },
    /// A header that describes no model.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Something that is no client's fault.
    #[error(transparent)]
    Aggregator(#[from] AggregatorError),
    /// The host.
    #[error("the host refused a thread or descriptor: {0}")]
    Host(#[from] io::Error),
}

impl ExchangeError {
    /// The update that is to blame, if one is.
    pub fn culprit(&self) -> Option<Secret> {
        match self {
            ExchangeError::Update { secret, .. }
            | ExchangeError::Missing { secret, .. }
            | ExchangeError::Model { secret, .. }
            | ExchangeError::TooBig { secret, .. }
            | ExchangeError::Twice { secret }
            | ExchangeError::NotExpected { secret } => Some(*secret),
            _ => None,
        }
    }
}

/// Why a client ended early.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error("cannot reach an aggregator at {address}: {source}; is `fedlane serve` running there?")]
    Dial {
        /// The address.
        address: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The control channel ended.
    #[error("aggregator {address}: {error}")]
    Control {
        /// Its address.
        address: String,
        /// What happened.
        error: ControlError,
    },
    /// A data channel was refused.
    #[error("aggregator {address}: refused data connection {stream} ({answer})")]
    Refused {
        /// Its address.
        address: String,
        /// The stream.
        stream: u32,
        /// Its answer.
        answer: &'static str,
    },
    /// A data channel failed.
    #[error("aggregator {address}: {error}")]
    Transfer {
        /// Its address.
        address: String,
        /// What happened.
        error: TransferError,
    },
    /// It began again, and not with the session that this client was in.
    #[error("aggregator {address} has begun another session; start this client again to join it")]
    OtherSession {
        /// Its address.
        address: String,
    },
    /// The aggregator said why it ended.
    #[error("aggregator {address} ended the session: {reason}")]
    Ended {
        /// Its address.
        address: String,
        /// Its words.
        reason: String,
    },
    /// What it came for is not there, or not any more.
    #[error(
        "aggregator {address}: there is no such model or update here any more, or it has another \
         secret"
    )]
    NotWanted {
        /// Its address.
        address: String,
    },
    /// It lets nobody in without a secret.
    #[error(
        "aggregator {address} lets in only those who know its secret; give it with --secret-file"
    )]
    SecretWanted {
        /// Its address.
        address: String,
    },
    /// A plan that no honest aggregator makes.
    #[error("aggregator {address} sent a plan that is not valid: {why}")]
    Plan {
        /// Its address.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// What came is not what was announced.
    #[error("aggregator {address}: the model that came has another digest than the one announced")]
    Digest {
        /// Its address.
        address: String,
    },
    /// The model offered has another layout than the one joined with.
    #[error("the update differs from the model joined with: {difference}")]
    Model {
        /// The first tensor that differs, and how.
        difference: String,
    },
    /// Memory of another size than the model's.
    #[error("the region has {bytes} bytes and the model {model_bytes}")]
    Size {
        /// Bytes of the region.
        bytes: u64,
        /// Bytes of the model.
        model_bytes: u64,
    },
    /// The send path asked for.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The update could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The model could not be kept.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// Memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A lane, for a reason that is not the aggregator's.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// Another thread asked for it.
    #[error("the client was stopped")]
    Cancelled,
    /// The host.
    #[error("the host refused a thread or descriptor: {0}")]
    Host(#[from] io::Error),
}
