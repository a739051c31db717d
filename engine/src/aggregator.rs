//! The process that averages: waits for its clients, runs rounds, sends the model back.

mod broadcast;
mod config;
pub(crate) mod door;
mod entry;
mod event;
mod gather;
mod keep;
mod lanes;
mod loss;
mod members;
mod resume;
mod round;
mod tree;
mod upload;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use crate::control::{self, Heartbeat, printable};
use crate::error::AggregatorError;
use crate::manifest::Manifest;
use crate::meter::Phase;
use crate::pool::RegionPool;
use crate::reducer::Weights;
use crate::region::Region;
use crate::sink::mean::Wave;
use crate::state::{Record, StateDir};
use crate::verdict::UpdateReport;
use crate::wire::hello::{Secret, SessionId};
use crate::wire::message::AggregatorMessage;

pub use config::{AggregatorConfig, Averaging, default_streams};
use config::{allow_connections, check};
pub(crate) use config::{descriptors_of, refuse_open};
use door::{Door, Reception, Visit};
pub(crate) use entry::{bad_weight, check_examples, check_model, check_name, refuse};
use event::PeerShared;
pub(crate) use event::{Event, Joined, WaitingRoom, label, read_client};
use keep::Kept;
use lanes::{Lanes, Model};
use loss::Experience;
pub use loss::OnLoss;
use members::{Members, Notice};
use tree::Tree;

/// A listening aggregator that has no clients yet.
pub struct Aggregator {
    config: AggregatorConfig,
    address: SocketAddr,
    door: Arc<Door>,
    pool: Arc<RegionPool>,
    /// Where the session is kept, and one that is there already.
    state: Option<(Arc<StateDir>, Option<Record>)>,
    /// Whether clients have their updates ready, and need no time to train: bytes are due as soon as
    /// they are asked for.
    ready: bool,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl Aggregator {
    /// Checks `config` and listens on `address`.
    pub fn bind(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: AggregatorConfig,
    ) -> Result<Aggregator, AggregatorError> {
        check(&config)?;
        let config = config.settled();
        let visitors = allow_connections(&config)?;
        // First: an aggregator that was just killed may still have both the state and the port.
        let state = config.state.as_ref().map(|path| keep::open(path, &config)).transpose()?;
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &config.congestion).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let is_open = config.secret == Secret::OPEN && config.tls.is_none() && !config.insecure;
        refuse_open(is_open, bound)?;
        let (sender, events) = std::sync::mpsc::channel();
        let joined = sender.clone();
        let secret = config.secret;
        let waiting = WaitingRoom::new(config.clients);
        let reception = Reception {
            secret: Box::new(move |place| (*place == secret.place()).then_some(secret)),
            welcome: Box::new(move |visit| match visit {
                Visit::Join(mut client) => match waiting.seat(&client) {
                    // Nobody listens any more when the session has ended; the socket then closes.
                    Some(seat) => {
                        client.seat = Some(seat);
                        drop(joined.send(Event::Joined(client)));
                    }
                    None => refuse(&client.channel, "too many others want to join"),
                },
                Visit::Call { channel, .. } => refuse(&channel, "there is no such place here"),
            }),
        };
        let (congestion, tls) = (config.congestion.clone(), config.tls.clone());
        let door = Door::open(listener, congestion, tls, visitors, reception).map_err(listen)?;
        let door = Arc::new(door);
        let pool = Arc::new(match &state {
            Some((directory, _)) => RegionPool::in_directory(directory.clone()),
            None => RegionPool::default(),
        });
        Ok(Aggregator { config, address: bound, door, pool, state, ready: false, events, sender })
    }

    /// An aggregator for clients who have come through `door` already, ready to send, with memory
    /// from `pool`.
    pub(crate) fn of(
        door: Arc<Door>,
        address: SocketAddr,
        pool: Arc<RegionPool>,
        mut config: AggregatorConfig,
        clients: Vec<Joined>,
    ) -> Result<Aggregator, AggregatorError> {
        config.clients = clients.len();
        check(&config)?;
        allow_connections(&config)?;
        let (sender, events) = std::sync::mpsc::channel();
        for client in clients {
            // The other end is held here.
            let _ = sender.send(Event::Joined(Box::new(client)));
        }
        let state = None;
        Ok(Aggregator { config, address, door, pool, state, ready: true, events, sender })
    }

    /// Where clients can dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends this aggregator, or the session that it becomes, from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller { events: self.sender.clone() }
    }
}

/// Ends an aggregator from another thread, whatever it waits for.
#[derive(Clone)]
pub struct Canceller {
    events: Sender<Event>,
}

impl Canceller {
    /// Makes the call that runs, or else the next one, fail with [`AggregatorError::Cancelled`],
    /// and the clients hear of it.
    pub fn cancel(&self) {
        self.end(AggregatorError::Cancelled);
    }

    /// Makes it fail with another error.
    pub(crate) fn end(&self, error: AggregatorError) {
        // Nobody listens any more when the session has ended.
        let _ = self.events.send(Event::Warm { result: Err(error) });
    }

    /// A call to the aggregator above is over.
    pub(crate) fn end_of_call(&self) {
        let _ = self.events.send(Event::Above);
    }
}

/// An aggregator with all its clients.
pub struct Session {
    config: AggregatorConfig,
    lanes: Lanes,
    upload: upload::Upload,
    members: Members,
    /// Whose updates are in the newest mean.
    counted: Vec<bool>,
    /// Of [`Averaging::Wave`]: the weights, and the sums so far.
    wave: Option<(Weights, Wave, Region)>,
    pool: Arc<RegionPool>,
    ready: bool,
    model: Option<Model>,
    round: u32,
    /// The round whose model was sent last.
    sent: Option<u32>,
    /// The model was averaged by an earlier process, and is to be sent.
    unsent: bool,
    /// Where the session is kept on disk.
    kept: Option<Kept>,
    /// How the newest round averages.
    averaging: Averaging,
    experience: Experience,
    phases: Vec<Phase>,
    /// What was found in the updates of the newest round.
    updates: Vec<UpdateReport>,
    /// Where clients may be edges.
    tree: Option<Tree>,
    // Dropped last: they end threads.
    _heartbeat: Heartbeat,
    _admission: Admission,
}

/// Lets the data channels of a session in as long as it lives.
struct Admission {
    door: Arc<Door>,
    session: SessionId,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.door.dismiss(&self.session);
    }
}

/// How far each client is, for progress displays.
#[derive(Clone)]
pub struct Progress {
    clients: Vec<(String, Arc<PeerShared>)>,
    model_bytes: u64,
}

/// One client's progress.
pub struct ClientProgress<'a> {
    /// Its name.
    pub name: &'a str,
    /// Bytes of its update that have come in this round.
    pub uploaded_bytes: u64,
    /// Bytes of the model that have been sent to it in this round.
    pub downloaded_bytes: u64,
}

impl Progress {
    /// Bytes of the model: what each client uploads and downloads in a round.
    pub fn model_bytes(&self) -> u64 {
        self.model_bytes
    }

    /// Every client's progress, in client order.
    pub fn clients(&self) -> impl Iterator<Item = ClientProgress<'_>> {
        self.clients.iter().map(|(name, shared)| ClientProgress {
            name,
            uploaded_bytes: shared.came.load(Ordering::Relaxed),
            downloaded_bytes: shared.sent.load(Ordering::Relaxed),
        })
    }
}

impl Drop for Session {
    /// Clients that hear nothing would dial again for long. Those of an exchange shall.
    fn drop(&mut self) {
        if !self.ready && !self.members.ending {
            self.give_up("it was given up before all rounds were done");
        }
    }
}

impl Session {
    /// Clients of the session: name, address and weight, in client order.
    pub fn clients(&self) -> impl Iterator<Item = (&str, SocketAddr, f64)> {
        let peers = self.members.peers.iter();
        peers.map(|peer| (peer.name.as_str(), peer.address, peer.examples))
    }

    /// The model's manifest: that of the initial model, else of the first client.
    pub fn manifest(&self) -> &Manifest {
        &self.members.terms.manifest
    }

    /// The newest model, if there is one. It can be read, from any thread, while it is sent; the
    /// next round takes fresh memory if somebody still holds it.
    pub fn model(&self) -> Option<Arc<Region>> {
        self.model.as_ref().map(|model| model.region.clone())
    }

    /// What was measured so far.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// What was found in the updates of the newest round, and what was done with each; in client
    /// order.
    pub fn updates(&self) -> &[UpdateReport] {
        &self.updates
    }

    /// How far each client is; can be read from another thread.
    pub fn progress(&self) -> Progress {
        let peers = self.members.peers.iter();
        Progress {
            clients: peers.map(|peer| (peer.name.clone(), peer.shared.clone())).collect(),
            model_bytes: self.manifest().data_bytes(),
        }
    }

    /// The round whose model was sent last; 0 is the initial one.
    pub fn sent(&self) -> Option<u32> {
        self.sent
    }

    /// Whether the model of the newest round has yet to be sent, because the process that averaged it
    /// ended: [`Session::broadcast`] comes next, and not a round.
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// Tells every client that this aggregator cannot go on, and why.
    pub fn give_up(&self, reason: &str) {
        self.members.tell_all(&AggregatorMessage::Failed { reason: printable(reason) });
    }

    /// Tells every client that all rounds are done. One whose connection is broken may come back
    /// to hear it.
    pub fn finish(mut self) -> Result<Vec<Phase>, AggregatorError> {
        self.end()?;
        Ok(std::mem::take(&mut self.phases))
    }

    pub(crate) fn end(&mut self) -> Result<(), AggregatorError> {
        self.members.ending = true;
        self.members.tell_all(&AggregatorMessage::Done);
        // A client closes when it has read that; only then is it sure to have.
        let until = Instant::now() + self.config.deadline;
        while self.members.peers.iter().any(|peer| !peer.is_gone()) {
            match self.members.next(Some(until))? {
                Notice::Up(peer) => {
                    // Its process began again, and may have lost the model.
                    if self.members.peers[peer].holds != self.sent {
                        self.send_model(0)?;
                    }
                    self.members.tell(peer, &AggregatorMessage::Done);
                }
                Notice::Timeout => break,
                _ => {}
            }
        }
        self.kept.as_ref().map_or(Ok(()), Kept::end)
    }
}
