//! What an exchange has: models on offer, and clients that wait with their updates.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

use super::Parcel;
use crate::aggregator::door::{Door, Visit};
use crate::aggregator::{Aggregator, AggregatorConfig, Joined, refuse};
use crate::control::Writer;
use crate::error::{AggregatorError, ExchangeError};
use crate::limits;
use crate::manifest::Manifest;
use crate::region::RegionPool;
use crate::wire::frame;
use crate::wire::hello::{Place, Secret};
use crate::wire::message::{AggregatorMessage, ClientMessage};

/// How often those who wait are told that we live, and looked at.
const ROUNDS: Duration = Duration::from_millis(50);

pub(super) struct Places {
    config: AggregatorConfig,
    pool: Arc<RegionPool>,
    rooms: Mutex<Rooms>,
    /// A client came or went.
    changed: Condvar,
    door: OnceLock<(Weak<Door>, SocketAddr)>,
    closed: AtomicBool,
}

#[derive(Default)]
struct Rooms {
    places: HashMap<Place, Room>,
    met: HashSet<String>,
}

enum Room {
    Offer(Secret, Arc<Parcel>),
    /// The client, once it has come.
    Update(Secret, Option<Waiting>),
}

struct Waiting {
    client: Box<Joined>,
    manifest: Manifest,
}

impl Places {
    pub fn new(config: AggregatorConfig, pool: Arc<RegionPool>) -> Places {
        Places {
            config,
            pool,
            rooms: Mutex::default(),
            changed: Condvar::new(),
            door: OnceLock::new(),
            closed: AtomicBool::new(false),
        }
    }

    /// From now on visitors are served.
    pub fn open(self: &Arc<Self>, door: &Arc<Door>, address: SocketAddr) -> std::io::Result<()> {
        // Nothing else sets it.
        let _ = self.door.set((Arc::downgrade(door), address));
        let places = self.clone();
        let attend = move || {
            while !places.closed.load(Ordering::SeqCst) {
                places.attend();
                std::thread::sleep(ROUNDS);
            }
        };
        std::thread::Builder::new().name("attendant".into()).spawn(attend)?;
        Ok(())
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.rooms().places.clear();
        self.changed.notify_all();
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn offer(&self, secret: Secret, model: Arc<Parcel>) {
        self.rooms().places.insert(secret.place(), Room::Offer(secret, model));
    }

    pub fn expect(&self, secret: Secret) {
        self.rooms().places.entry(secret.place()).or_insert(Room::Update(secret, None));
    }

    pub fn release(&self, secret: Secret) {
        let room = self.rooms().places.remove(&secret.place());
        if let Some(Room::Update(_, Some(waiting))) = room {
            dismiss(&waiting.client);
        }
        self.changed.notify_all();
    }

    pub fn has_met(&self, name: &str) -> bool {
        self.rooms().met.contains(name)
    }

    pub fn await_update(
        &self,
        secret: Secret,
        patience: Duration,
    ) -> Result<Manifest, ExchangeError> {
        let rooms = self.await_all(&[secret], patience)?;
        rooms.waiting(&secret).map(|waiting| waiting.manifest.clone()).ok_or(ExchangeError::Nobody)
    }

    /// Waits until all clients of `secrets` have come.
    fn await_all(
        &self,
        secrets: &[Secret],
        patience: Duration,
    ) -> Result<MutexGuard<'_, Rooms>, ExchangeError> {
        let until = Instant::now() + patience;
        let mut rooms = self.rooms();
        while let Some(missing) = rooms.missing(secrets)? {
            if self.closed.load(Ordering::SeqCst) {
                return Err(ExchangeError::Closed);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ExchangeError::Missing { secret: missing, seconds: patience });
            }
            rooms =
                self.changed.wait_timeout(rooms, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(rooms)
    }

    /// Takes the clients of `secrets` out of their places, once all have come, with their model.
    pub fn take(
        &self,
        secrets: &[Secret],
        patience: Duration,
    ) -> Result<(Vec<Box<Joined>>, Manifest), ExchangeError> {
        let mut rooms = self.await_all(secrets, patience)?;
        let first = secrets.first().and_then(|secret| rooms.waiting(secret));
        let manifest = first.ok_or(ExchangeError::Nobody)?.manifest.clone();
        for secret in secrets {
            let waiting = rooms.waiting(secret).ok_or(ExchangeError::Nobody)?;
            if let Some(difference) = manifest.first_difference(&waiting.manifest) {
                return Err(ExchangeError::Model { secret: *secret, difference });
            }
        }
        let clients = secrets.iter().filter_map(|secret| rooms.leave(secret)).collect::<Vec<_>>();
        for client in &clients {
            client.socket.set_nonblocking(false)?;
        }
        Ok((clients, manifest))
    }

    /// Serves a visitor on the thread that let him in.
    pub fn receive(self: &Arc<Self>, visit: Visit) {
        match visit {
            Visit::Call { socket, name, place } => {
                let mut rooms = self.rooms();
                match rooms.places.contains_key(&place) {
                    true => {
                        rooms.meet(name);
                        drop(rooms);
                        answer(&socket, &AggregatorMessage::Done);
                    }
                    false => {
                        drop(rooms);
                        refuse(&socket, "there is no such model or update here any more");
                    }
                }
            }
            Visit::Join(client) => self.receive_client(client),
        }
    }

    fn receive_client(self: &Arc<Self>, mut client: Box<Joined>) {
        let mut rooms = self.rooms();
        match rooms.places.get(&client.place) {
            Some(Room::Offer(secret, model)) => {
                let model = model.clone();
                client.secret = *secret;
                // A session wants a positive weight, though this one averages nothing.
                client.examples = 1.0;
                rooms.meet(client.name.clone());
                drop(rooms);
                let label = client.label();
                if let Err(error) = self.serve(client, &model) {
                    tracing::warn!("the model could not be sent: {error} ({label})");
                }
            }
            Some(Room::Update(secret, _)) => {
                let secret = *secret;
                client.secret = secret;
                match prepare(client) {
                    Ok(waiting) => {
                        rooms.meet(waiting.client.name.clone());
                        let room = Room::Update(secret, Some(waiting));
                        rooms.places.insert(secret.place(), room);
                        drop(rooms);
                        self.changed.notify_all();
                    }
                    Err((client, error)) => refuse(&client.socket, &error.to_string()),
                }
            }
            None => {
                drop(rooms);
                dismiss(&client);
            }
        }
    }

    /// Sends a model to the client that came for it.
    fn serve(&self, client: Box<Joined>, model: &Parcel) -> Result<(), AggregatorError> {
        let Some((door, address)) = self.door.get() else { return Ok(()) };
        let Some(door) = door.upgrade() else { return Ok(()) };
        let config = self.config.clone();
        let aggregator = Aggregator::of(door, *address, self.pool.clone(), config, vec![client])?;
        let mut session = aggregator.gather(Some(model.manifest.clone()))?;
        session.send(model.region().clone(), model.sums.clone())?;
        session.finish().map(|_| ())
    }

    /// Tells those who wait that we live, and forgets those who left.
    fn attend(&self) {
        let mut rooms = self.rooms();
        for room in rooms.places.values_mut() {
            let Room::Update(_, waiting) = room else { continue };
            if waiting.as_ref().is_some_and(|waiting| !waiting.lives()) {
                *waiting = None;
            }
        }
    }
}

impl Rooms {
    fn meet(&mut self, name: String) {
        // Names are given by peers who know a secret; a bound all the same.
        if self.met.len() < limits::MAX_CLIENTS {
            self.met.insert(name);
        }
    }

    fn waiting(&self, secret: &Secret) -> Option<&Waiting> {
        match self.places.get(&secret.place()) {
            Some(Room::Update(_, waiting)) => waiting.as_ref(),
            _ => None,
        }
    }

    /// The first client that has not come yet.
    fn missing(&self, secrets: &[Secret]) -> Result<Option<Secret>, ExchangeError> {
        for secret in secrets {
            match self.places.get(&secret.place()) {
                Some(Room::Update(_, Some(_))) => {}
                Some(Room::Update(_, None)) => return Ok(Some(*secret)),
                _ => return Err(ExchangeError::NotExpected { secret: *secret }),
            }
        }
        Ok(None)
    }

    fn leave(&mut self, secret: &Secret) -> Option<Box<Joined>> {
        match self.places.get_mut(&secret.place()) {
            Some(Room::Update(_, waiting)) => waiting.take().map(|waiting| waiting.client),
            _ => None,
        }
    }
}

type Refused = (Box<Joined>, ExchangeError);

/// Makes a client wait: its socket must never block the attendant.
fn prepare(client: Box<Joined>) -> Result<Waiting, Refused> {
    let manifest = match Manifest::from_header(&client.header) {
        Ok(manifest) => manifest,
        Err(error) => return Err((client, error.into())),
    };
    match client.socket.set_nonblocking(true) {
        Ok(()) => Ok(Waiting { client, manifest }),
        Err(error) => Err((client, error.into())),
    }
}

impl Waiting {
    /// Reads what the client says, which can only be that it lives, and says the same.
    fn lives(&self) -> bool {
        let alive = frame::encode(&ClientMessage::Alive).unwrap_or_default();
        let mut heard = [0; 4096];
        let peeked = rustix::net::recv(&self.client.socket, heard.as_mut_slice(), RecvFlags::PEEK);
        match peeked {
            Ok((_, 0)) => return false,
            Ok((_, bytes)) => {
                let whole = bytes - bytes % alive.len();
                if heard[..whole].chunks(alive.len()).any(|said| said != alive) {
                    return false;
                }
                let read =
                    rustix::net::recv(&self.client.socket, &mut heard[..whole], RecvFlags::empty());
                if whole > 0 && read.is_err() {
                    return false;
                }
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
        answer(&self.client.socket, &AggregatorMessage::Alive)
    }
}

/// Says one short message; false if it did not go out whole.
fn answer(socket: &std::net::TcpStream, message: &AggregatorMessage) -> bool {
    let Ok(frame) = frame::encode(message) else { return false };
    matches!(std::io::Write::write(&mut &*socket, &frame), Ok(bytes) if bytes == frame.len())
}

/// The client's update is not, or no longer, wanted.
fn dismiss(client: &Joined) {
    // The socket closes after that, so nobody waits for a peer that does not read.
    let _ = client.socket.set_nonblocking(false);
    if let Ok(writer) = Writer::new(&client.socket, limits::LAST_WORDS) {
        // A client that is gone need not hear it.
        let _ = writer.send(&AggregatorMessage::Done);
    }
}
