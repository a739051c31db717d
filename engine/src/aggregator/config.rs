//! How an aggregator works, and whether the host can do that.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::loss::OnLoss;
use crate::control::Congestion;
use crate::error::AggregatorError;
use crate::lane::receive::Order;
use crate::limits;
use crate::paths::{ReceiveKind, SendKind};
use crate::sys::process;
use crate::tls::ServerTls;
use crate::verdict::UpdatePolicy;
use crate::wire::hello::Secret;

/// What happens to the updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averaging {
    /// Averaged while they arrive.
    Streaming,
    /// Added to the sums of clients who came in earlier sessions.
    Wave,
    /// Received whole, every client's into a region of its own, and averaged after: for norms, for
    /// [`OnLoss::Spool`], and as the baseline that streaming is measured against.
    Spool,
    /// Received whole, every client's into a region of its own, and handed over; there is no mean.
    Keep,
    /// Checked and dropped; there is no mean. For benchmarks.
    Checksum,
    /// Dropped unseen; there is no mean. For benchmarks.
    Discard,
}

/// How an aggregator works. [`Default`] gives every field but `clients` a value for daily use.
#[derive(Clone, Debug)]
pub struct AggregatorConfig {
    /// Clients to wait for.
    pub clients: usize,
    /// Clients without whom there is no mean; all of them if this is not said.
    pub min_clients: Option<usize>,
    /// How long a round waits for updates, training included, before it goes on without those that
    /// are late.
    pub round_deadline: Option<Duration>,
    /// How long a client whose connection broke may take to come back; zero for never.
    pub reconnect: Duration,
    /// Rounds that will be run; told to the clients.
    pub rounds: u32,
    /// Lanes, and so data channels of each client.
    pub streams: usize,
    /// Most bytes of a chunk.
    pub chunk_bytes: u64,
    /// Silence after which a peer is given up.
    pub deadline: Duration,
    /// In which order chunks are averaged.
    pub order: Order,
    /// What happens to the updates.
    pub averaging: Averaging,
    /// How updates are received.
    pub receive_path: ReceiveKind,
    /// How the model is sent; without a wish the best that the host offers.
    pub send_path: Option<SendKind>,
    /// Congestion control of the data channels.
    pub congestion: Congestion,
    /// What clients must know to be let in; [`Secret::OPEN`] lets in everyone.
    pub secret: Secret,
    /// TLS on all connections; without it nothing is encrypted.
    pub tls: Option<ServerTls>,
    /// Whether everyone may join also from other hosts.
    pub insecure: bool,
    /// What is done with bad updates.
    pub updates: UpdatePolicy,
    /// What is done about clients that are lost in mid-upload, where updates are averaged.
    pub on_loss: OnLoss,
    /// A directory in which the session is kept: a process that is started with it again goes on with
    /// the session, as it was. The memory of the rounds are files there.
    pub state: Option<PathBuf>,
    /// Whether clients may be edges, which bring the sums of clients of their own: `docs/WIRE.md`
    /// says how. [`super::Session::leaves`] then names all whose updates are in the mean.
    pub tree: bool,
    /// Bytes of the largest model that the first client may bring, where there is no initial one. What
    /// the host has no memory for is refused in any case.
    pub max_model_bytes: u64,
}

impl Default for AggregatorConfig {
    fn default() -> Self {
        AggregatorConfig {
            clients: 1,
            min_clients: None,
            round_deadline: None,
            reconnect: limits::DEADLINE,
            rounds: 1,
            streams: default_streams(),
            chunk_bytes: limits::CHUNK_BYTES,
            deadline: limits::DEADLINE,
            order: Order::Arrival,
            averaging: Averaging::Streaming,
            receive_path: ReceiveKind::default(),
            send_path: None,
            congestion: Congestion::Auto,
            secret: Secret::OPEN,
            tls: None,
            insecure: false,
            updates: UpdatePolicy::default(),
            on_loss: OnLoss::default(),
            state: None,
            tree: false,
            max_model_bytes: limits::MAX_MODEL_BYTES,
        }
    }
}

/// One lane for each core this process may use: more gain nothing.
pub fn default_streams() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(limits::MAX_STREAMS)
}

impl AggregatorConfig {
    /// A norm is known when an update is whole, so updates that may be clipped are averaged after that.
    pub(super) fn settled(mut self) -> AggregatorConfig {
        let why = match self.updates.clip_norm {
            Some(_) => Some("their norms are needed"),
            None if self.on_loss == OnLoss::Spool => Some("none of them is then sent again"),
            // In its turn.
            None if self.tree && self.order == Order::Client => {
                Some("one sum goes through the tree, in order")
            }
            None => None,
        };
        if let (Some(why), Averaging::Streaming) = (why, self.averaging) {
            tracing::info!("updates are received whole before they are averaged: {why}");
            self.averaging = Averaging::Spool;
        }
        self
    }
}

pub(super) fn check(config: &AggregatorConfig) -> Result<(), AggregatorError> {
    let within = |what, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            Ok(())
        } else {
            Err(AggregatorError::Config { what, value, least, most })
        }
    };
    within("clients", config.clients as u64, 1, limits::MAX_CLIENTS as u64)?;
    if let Some(least) = config.min_clients {
        within("min clients", least as u64, 1, config.clients as u64)?;
    }
    within("rounds", config.rounds.into(), 1, limits::MAX_ROUNDS.into())?;
    within("streams", config.streams as u64, 1, limits::MAX_STREAMS as u64)?;
    within("chunk bytes", config.chunk_bytes, limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES)?;
    let possible = |norm: &f64| norm.is_finite() && *norm > 0.0;
    if let Some(clip_norm) = config.updates.clip_norm.filter(|norm| !possible(norm)) {
        return Err(AggregatorError::ClipNorm { clip_norm });
    }
    let averages = matches!(config.averaging, Averaging::Streaming | Averaging::Spool);
    for (is_given, what) in [
        (config.updates.clip_norm.is_some(), "--clip-norm"),
        (config.state.is_some(), "--state"),
        (!averages, "--averaging"),
    ] {
        if config.tree && is_given {
            return Err(AggregatorError::Tree { what });
        }
    }
    let deadline_ms = config.deadline.as_millis().min(u64::MAX.into()) as u64;
    within("deadline in ms", deadline_ms, limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS)
}

/// Lets nobody in by oversight: behind a door that is open to all there must be nothing but this host,
/// unless somebody says so.
pub(crate) fn refuse_open(is_open: bool, bound: SocketAddr) -> Result<(), AggregatorError> {
    match is_open && !bound.ip().to_canonical().is_loopback() {
        true => Err(AggregatorError::Open { address: bound }),
        false => Ok(()),
    }
}

/// Makes room for the connections of all clients, or says now that there is none: later, clients
/// would wait before a door that cannot open. Gives how many visitors there is room for besides.
pub(super) fn allow_connections(config: &AggregatorConfig) -> Result<usize, AggregatorError> {
    let wanted = descriptors_of(config);
    let limit = process::allow_open_files(wanted + VISITORS_DESCRIPTORS);
    match limit < wanted {
        true => Err(AggregatorError::OpenFiles { clients: config.clients, wanted, limit }),
        false => Ok(visitors_within(limit - wanted)),
    }
}

/// Open files that a session takes.
pub(crate) fn descriptors_of(config: &AggregatorConfig) -> u64 {
    let (clients, streams) = (config.clients as u64, config.streams as u64);
    let sending = config.send_path.map_or_else(SendKind::most_descriptors, SendKind::descriptors);
    let path = sending.max(config.receive_path.descriptors());
    // A control channel is held by its reader and its writer, a data channel by its socket, its
    // chunk buffer and its path; a lane has its signal, its poller and its tiles.
    // An update that is received whole has a region.
    let each_client = 3 + streams * (2 + path);
    let each_lane = 2 + limits::MEAN_TILES as u64 + 1;
    limits::OWN_DESCRIPTORS + streams * each_lane + clients * each_client
}

/// A visitor's socket is held twice, and that of another one by a thread that was made to leave.
const EACH_VISITOR: u64 = 3;

/// Those who are late hold one each.
const VISITORS_DESCRIPTORS: u64 =
    EACH_VISITOR * limits::MAX_VISITORS as u64 + limits::MAX_LATE as u64;

/// How many visitors there may be, so that they do not take the descriptors of clients.
fn visitors_within(descriptors: u64) -> usize {
    let visitors = descriptors.saturating_sub(limits::MAX_LATE as u64) / EACH_VISITOR;
    // At most `MAX_VISITORS`.
    visitors.min(limits::MAX_VISITORS as u64).max(limits::MIN_VISITORS as u64) as usize
}
