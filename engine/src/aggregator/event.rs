//! What a session hears, and of whom: one thread reads each client's control channel.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::lanes::Lanes;
use crate::channel::DataChannel;
use crate::control::{ControlChannel, Reader};
use crate::error::{AggregatorError, ControlError, Fault, LaneError, ProtocolError};
use crate::lane::ConnectionId;
use crate::lane::receive::ReceiveReport;
use crate::lane::send::SendBroken;
use crate::limits;
use crate::meter::Phase;
use crate::quota::{Quota, Share};
use crate::sums::SumTable;
use crate::topology::tree::{Hearing, SumsReport};
use crate::verdict::Findings;
use crate::wire::hello::{Place, Ticket};
use crate::wire::message::ClientMessage;

/// Something that the session has to react to.
pub(crate) enum Event {
    Joined(Box<Joined>),
    Stream {
        connection: ConnectionId,
        stream: u32,
        channel: DataChannel,
    },
    Message {
        connection: ConnectionId,
        message: ClientMessage,
        /// Given back when somebody has heard it.
        _unheard: Share,
    },
    Lost {
        connection: ConnectionId,
        error: ControlError,
    },
    /// From a lane that receives.
    Received {
        lane: usize,
        report: ReceiveReport,
    },
    /// From a lane that sends.
    SendBroken(SendBroken),
    /// The end of a lane.
    Lane {
        result: Result<(), LaneError>,
    },
    /// A call of an edge to the aggregator above, on another thread, is over.
    Above,
    /// The memory of the rounds is there, or cannot be had; or the session shall end.
    Warm {
        result: Result<Phase, AggregatorError>,
    },
}

/// A client that wants to join.
pub(crate) struct Joined {
    pub channel: ControlChannel,
    pub address: SocketAddr,
    pub name: String,
    pub examples: f64,
    pub header: Vec<u8>,
    pub place: Place,
    /// The ticket of its last plan, if it comes again.
    pub resumes: Option<Ticket>,
    /// Clients are ordered by rank, and those of one rank by name.
    pub rank: usize,
    /// Whether it brings the sums of clients of its own.
    pub is_edge: bool,
    /// Given back when somebody has looked at it: as long as it waits it holds its connection and the
    /// header of its model.
    pub seat: Option<(Share, Share)>,
}

/// Clients that may wait to be looked at.
pub(crate) struct WaitingRoom {
    seats: Arc<Quota>,
    header_bytes: Arc<Quota>,
}

impl WaitingRoom {
    pub(crate) fn new(clients: usize) -> WaitingRoom {
        let seats = Quota::new((clients + limits::MAX_LATE) as u64);
        WaitingRoom { seats, header_bytes: Quota::new(limits::MAX_JOINED_BYTES) }
    }

    pub(crate) fn seat(&self, client: &Joined) -> Option<(Share, Share)> {
        self.seats.take(1).zip(self.header_bytes.take(client.header.len() as u64))
    }
}

impl Joined {
    /// For logs and errors.
    pub fn label(&self) -> String {
        label(&self.name, self.address)
    }
}

pub(crate) fn label(name: &str, address: SocketAddr) -> String {
    format!("client \"{name}\" ({address})")
}

/// What the thread that reads a client's control channel shares with the lanes.
#[derive(Default)]
pub(super) struct PeerShared {
    pub sums: OnceLock<SumTable>,
    /// What was found in its update.
    pub findings: OnceLock<Findings>,
    pub round: AtomicU32,
    pub began: AtomicBool,
    /// It is an edge, and this is what it said of its sums.
    pub edge: Option<Mutex<Hearing>>,
    /// Bytes of the update that came, and of the model that went, in this round.
    pub came: AtomicU64,
    pub sent: AtomicU64,
}

impl PeerShared {
    /// Of a client of a session whose model is cut like that.
    pub fn of(lanes: &Lanes) -> PeerShared {
        let shared = PeerShared::default();
        shared.cut(lanes);
        shared
    }

    /// The model is known.
    pub fn cut(&self, lanes: &Lanes) {
        // Nothing else sets them.
        let _ = self.sums.set(SumTable::new(&lanes.ranges, &lanes.signals));
        let _ = self.findings.set(Findings::new(lanes.chunks.len()));
    }

    /// Before a round: nothing has come of its update.
    pub fn start_round(&self, round: u32, ready: bool) {
        if let Some(sums) = self.sums.get() {
            sums.clear();
        }
        if let Some(findings) = self.findings.get() {
            findings.clear();
        }
        self.forget_report();
        self.began.store(ready, Ordering::SeqCst);
        self.came.store(0, Ordering::Relaxed);
        self.round.store(round, Ordering::SeqCst);
    }

    /// What an edge said of its sums, if it has.
    pub fn report(&self) -> Option<SumsReport> {
        let hearing = self.edge.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        hearing.report().cloned()
    }

    pub fn is_edge(&self) -> bool {
        self.edge.is_some()
    }

    /// Other sums will come than those that came before in this round, if any did.
    pub fn await_sums(&self) {
        self.sums.get().into_iter().for_each(SumTable::clear);
        self.findings.get().into_iter().for_each(Findings::clear);
        self.began.store(false, Ordering::SeqCst);
    }

    fn forget_report(&self) {
        if let Some(edge) = &self.edge {
            *edge.lock().unwrap_or_else(PoisonError::into_inner) = Hearing::default();
        }
    }
}

/// Reads one client's control channel until it ends. `note` takes what it can, and gives back what the
/// session must decide on.
pub(crate) fn read_client(
    mut reader: Reader,
    connection: ConnectionId,
    events: &Sender<Event>,
    note: impl Fn(ClientMessage) -> Result<Option<ClientMessage>, ProtocolError>,
) {
    let unheard = Quota::new(limits::MAX_UNHEARD_BYTES);
    loop {
        let event = match hear(&mut reader, &note, &unheard) {
            Ok(None) => continue,
            Ok(Some((message, share))) => Event::Message { connection, message, _unheard: share },
            Err(error) => Event::Lost { connection, error },
        };
        let last = matches!(event, Event::Lost { .. });
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Reads one message, and gives it with its share of what may wait to be heard, if the session must
/// decide on it.
fn hear(
    reader: &mut Reader,
    note: &impl Fn(ClientMessage) -> Result<Option<ClientMessage>, ProtocolError>,
    unheard: &Arc<Quota>,
) -> Result<Option<(ClientMessage, Share)>, ControlError> {
    let bytes = reader.read_length(limits::MAX_SHORT_FRAME_BYTES)?;
    let Some(message) = note(reader.read_body(bytes)?)? else { return Ok(None) };
    let share = unheard.take(bytes + limits::UNHEARD_BYTES).ok_or(ProtocolError::Flood)?;
    Ok(Some((message, share)))
}

/// Takes what concerns the lanes; gives back what the session must decide on.
pub(super) fn note(
    message: ClientMessage,
    shared: &PeerShared,
) -> Result<Option<ClientMessage>, ProtocolError> {
    match message {
        ClientMessage::Alive => Ok(None),
        ClientMessage::Sums { first, sums } => {
            let table = shared.sums.get().ok_or(ProtocolError::Unexpected { what: "checksums" })?;
            table.announce(first, &sums)?;
            Ok(None)
        }
        ClientMessage::Uploading { round } => {
            let current = shared.round.load(Ordering::SeqCst);
            // The lanes may have all bytes of a round before this thread reads that they come.
            if (1..current).contains(&round) {
                return Ok(None);
            }
            if round != current || round == 0 {
                return Err(ProtocolError::Unexpected { what: "an upload" });
            }
            shared.began.store(true, Ordering::Release);
            Ok(Some(message))
        }
        ClientMessage::Leaves { .. } => note_leaves(message, shared),
        other => Ok(Some(other)),
    }
}

/// An edge says whose updates its sums hold. The session has to hear of a whole list.
fn note_leaves(
    message: ClientMessage,
    shared: &PeerShared,
) -> Result<Option<ClientMessage>, ProtocolError> {
    let refused = ProtocolError::Unexpected { what: "a list of clients" };
    let ClientMessage::Leaves { round, scale, in_order, first, leaves, last } = message else {
        return Err(refused);
    };
    let current = shared.round.load(Ordering::SeqCst);
    // Of an edge that was left out.
    if (1..current).contains(&round) {
        return Ok(None);
    }
    let Some(edge) = shared.edge.as_ref().filter(|_| round == current && round > 0) else {
        return Err(refused);
    };
    let mut hearing = edge.lock().unwrap_or_else(PoisonError::into_inner);
    let is_whole = hearing.hear((scale, in_order), first, leaves, last)?;
    let leaves = Vec::new();
    let whole = ClientMessage::Leaves { round, scale, in_order, first, leaves, last };
    Ok(is_whole.then_some(whole))
}

/// Something that makes no sense here.
pub(super) fn unexpected(what: &'static str) -> Fault {
    Fault::Control(ProtocolError::Unexpected { what }.into())
}
