//! What an exchange has: models on offer, and clients that wait with their updates.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::Parcel;
use crate::aggregator::door::{Door, Visit};
use crate::aggregator::{Aggregator, AggregatorConfig, Joined, refuse};
use crate::error::{AggregatorError, ExchangeError};
use crate::limits;
use crate::manifest::Manifest;
use crate::pool::RegionPool;
use crate::sys::memory::Pages;
use crate::wire::hello::{Place, Secret};
use crate::wire::message::{AggregatorMessage, ClientMessage};

/// How often those who wait are told that we live, and looked at.
const ROUNDS: Duration = Duration::from_millis(50);

/// Messages of a client that waits that are read at once: many minutes of signs of life.
const MOST_SIGNS: usize = 16 << 10;

/// Bytes of a sign of life, without seal.
const SIGN_BYTES: u64 = 1;

pub(super) struct Places {
    config: AggregatorConfig,
    pool: Arc<RegionPool>,
    rooms: Mutex<Rooms>,
    /// A client came or went.
    changed: Condvar,
    door: OnceLock<(Weak<Door>, SocketAddr)>,
    closed: AtomicBool,
    /// Bytes of the largest update that is taken.
    max_update_bytes: u64,
    served: Served,
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
    pub fn new(
        config: AggregatorConfig,
        max_update_bytes: u64,
        served: Served,
        pool: Arc<RegionPool>,
    ) -> Places {
        Places {
            config,
            max_update_bytes,
            served,
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

    /// Nothing is on offer or expected any more. Those who wait hear it.
    pub fn close(&self) {
        let mut rooms = self.rooms();
        // While nobody is between looking and waiting.
        self.closed.store(true, Ordering::SeqCst);
        let left = std::mem::take(&mut rooms.places);
        drop(rooms);
        self.changed.notify_all();
        left.into_values().for_each(Room::dismiss);
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a place is reached with.
    pub fn secret(&self, place: &Place) -> Option<Secret> {
        match self.rooms().places.get(place)? {
            Room::Offer(secret, _) | Room::Update(secret, _) => Some(*secret),
        }
    }

    pub fn offer(&self, secret: Secret, model: Arc<Parcel>) {
        self.rooms().places.insert(secret.place(), Room::Offer(secret, model));
    }

    pub fn expect(&self, secret: Secret) {
        self.rooms().places.entry(secret.place()).or_insert(Room::Update(secret, None));
    }

    pub fn release(&self, secret: Secret) {
        let room = self.rooms().places.remove(&secret.place());
        self.changed.notify_all();
        room.into_iter().for_each(Room::dismiss);
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
        let waiting = rooms.waiting(&secret).ok_or(ExchangeError::Nobody)?;
        self.check_size(secret, &waiting.manifest)?;
        Ok(waiting.manifest.clone())
    }

    /// Memory is not set aside for as much as any client may say.
    fn check_size(&self, secret: Secret, update: &Manifest) -> Result<(), ExchangeError> {
        let (bytes, most) = (update.data_bytes(), self.max_update_bytes);
        match bytes > most {
            true => Err(ExchangeError::TooBig { secret, bytes, most }),
            false => Ok(()),
        }
    }

    /// Takes the clients of `secrets` out of their places, once all have come, with their model.
    /// Those whose models differ stay.
    pub fn take(
        &self,
        secrets: &[Secret],
        patience: Duration,
    ) -> Result<(Vec<Joined>, Manifest), ExchangeError> {
        refuse_twice(secrets)?;
        let mut rooms = self.await_all(secrets, patience)?;
        let first = secrets.first().and_then(|secret| rooms.waiting(secret));
        let manifest = first.ok_or(ExchangeError::Nobody)?.manifest.clone();
        for secret in secrets {
            let waiting = rooms.waiting(secret).ok_or(ExchangeError::Nobody)?;
            self.check_size(*secret, &waiting.manifest)?;
            if let Some(difference) = manifest.first_difference(&waiting.manifest) {
                return Err(ExchangeError::Model { secret: *secret, difference });
            }
        }
        let clients = secrets.iter().filter_map(|secret| rooms.leave(secret)).collect();
        Ok((clients, manifest))
    }

    fn await_all(
        &self,
        secrets: &[Secret],
        patience: Duration,
    ) -> Result<MutexGuard<'_, Rooms>, ExchangeError> {
        let began = Instant::now();
        let mut rooms = self.rooms();
        loop {
            if self.closed.load(Ordering::SeqCst) {
                return Err(ExchangeError::Closed);
            }
            // Those that left just now come back, so it is worth to wait for them.
            if rooms.missing(secrets)?.is_none() {
                rooms.forget_dead(secrets);
            }
            let Some(missing) = rooms.missing(secrets)? else { return Ok(rooms) };
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(ExchangeError::Missing { secret: missing, seconds: patience });
            }
            let woken = self.changed.wait_timeout(rooms, left);
            rooms = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Serves a visitor on the thread that let him in.
    pub fn receive(self: &Arc<Self>, visit: Visit) {
        match visit {
            Visit::Call { channel, name, place } => {
                let mut rooms = self.rooms();
                match rooms.places.contains_key(&place) {
                    true => {
                        rooms.meet(name);
                        drop(rooms);
                        // A client that is gone need not hear it.
                        let _ = channel.writer.send_now(&AggregatorMessage::Done);
                    }
                    false => {
                        drop(rooms);
                        refuse(&channel, "there is no such model or update here any more");
                    }
                }
            }
            Visit::Join(client) if client.is_edge => {
                refuse(&client.channel, &crate::error::Fault::Edge.to_string());
            }
            Visit::Join(client) => self.receive_client(client),
        }
    }

    fn receive_client(self: &Arc<Self>, client: Box<Joined>) {
        let mut rooms = self.rooms();
        let offer = match rooms.places.get(&client.place) {
            Some(Room::Offer(_, model)) => Some(model.clone()),
            Some(Room::Update(..)) => None,
            None => {
                drop(rooms);
                return dismiss(*client);
            }
        };
        rooms.meet(client.name.clone());
        drop(rooms);
        match offer {
            Some(model) => self.receive_guest(*client, &model),
            None => self.receive_update(client),
        }
    }

    /// Lets a client with an update wait. One that waits there already is gone: it is the same
    /// client, whose connection broke.
    fn receive_update(&self, client: Box<Joined>) {
        // Without the lock: a header may be long, and a peer may not read.
        let waiting = match prepare(client) {
            Ok(waiting) => waiting,
            Err((client, error)) => return refuse(&client.channel, &error.to_string()),
        };
        let mut rooms = self.rooms();
        match rooms.places.get_mut(&waiting.client.place) {
            Some(Room::Update(_, place)) => {
                let last = place.replace(waiting);
                drop(rooms);
                drop(last);
                self.changed.notify_all();
            }
            // Released meanwhile.
            _ => {
                drop(rooms);
                dismiss(*waiting.client);
            }
        }
    }

    fn receive_guest(&self, client: Joined, model: &Parcel) {
        let (label, address) = (client.label(), client.address.ip());
        if !self.served.enter(address) {
            return refuse(&client.channel, "too many others are being sent a model; try again");
        }
        if let Err(error) = self.serve(client, model) {
            tracing::warn!("the model could not be sent: {error} ({label})");
        }
        self.served.leave(address);
    }

    /// Sends a model to the client that came for it.
    fn serve(&self, mut client: Joined, model: &Parcel) -> Result<(), AggregatorError> {
        let Some((door, address)) = self.door.get() else { return Ok(()) };
        let Some(door) = door.upgrade() else { return Ok(()) };
        // There is no mean, and so no weight; a session wants one.
        client.examples = 1.0;
        let config = self.config.clone();
        let aggregator = Aggregator::of(door, *address, self.pool.clone(), config, vec![client])?;
        let mut session = aggregator.gather(Some(model.manifest.clone()))?;
        session.send(model.region().clone(), model.sums.clone())?;
        // With base pages it would cost more to touch them again.
        if model.region().pages() == Pages::Huge {
            model.region().rest();
        }
        session.finish().map(|_| ())
    }

    /// Tells those who wait that we live, and forgets those who left.
    fn attend(&self) {
        self.rooms().places.values_mut().for_each(Room::forget_dead);
    }
}

/// Clients that a model is being sent to, by their addresses.
pub(super) struct Served {
    most: usize,
    now: Mutex<HashMap<IpAddr, usize>>,
}

impl Served {
    pub fn new(most: usize) -> Served {
        Served { most, now: Mutex::default() }
    }

    /// One more client of this address, if there is room: no address gets more than half of what the
    /// others leave, so none shuts them out.
    fn enter(&self, address: IpAddr) -> bool {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = now.values().sum();
        let here = now.get(&address).copied().unwrap_or(0);
        let left = self.most.saturating_sub(all - here);
        let may = here < left.div_ceil(2);
        if may {
            now.insert(address, here + 1);
        }
        may
    }

    fn leave(&self, address: IpAddr) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(here) = now.get_mut(&address) {
            *here -= 1;
            if *here == 0 {
                now.remove(&address);
            }
        }
    }
}

impl Room {
    fn forget_dead(&mut self) {
        if let Room::Update(_, waiting) = self
            && waiting.as_mut().is_some_and(|waiting| !waiting.lives())
        {
            *waiting = None;
        }
    }

    /// Tells a client that waits here that its update is not wanted any more.
    fn dismiss(self) {
        if let Room::Update(_, Some(waiting)) = self {
            dismiss(*waiting.client);
        }
    }
}

impl Rooms {
    fn meet(&mut self, name: String) {
        // Names are given by peers who know a place; a bound all the same.
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

    fn forget_dead(&mut self, secrets: &[Secret]) {
        for secret in secrets {
            self.places.entry(secret.place()).and_modify(Room::forget_dead);
        }
    }

    fn leave(&mut self, secret: &Secret) -> Option<Joined> {
        match self.places.get_mut(&secret.place()) {
            Some(Room::Update(_, waiting)) => waiting.take().map(|waiting| *waiting.client),
            _ => None,
        }
    }
}

/// A client that counted twice would have two weights and send once.
fn refuse_twice(secrets: &[Secret]) -> Result<(), ExchangeError> {
    let mut seen = HashSet::new();
    match secrets.iter().find(|secret| !seen.insert(secret.place())) {
        Some(secret) => Err(ExchangeError::Twice { secret: *secret }),
        None => Ok(()),
    }
}

type Refused = (Box<Joined>, ExchangeError);

/// Makes a client wait.
fn prepare(client: Box<Joined>) -> Result<Waiting, Refused> {
    match Manifest::from_header(&client.header) {
        Ok(manifest) => Ok(Waiting { client, manifest }),
        Err(error) => Err((client, error.into())),
    }
}

impl Waiting {
    /// Hears what the client says, which can only be that it lives, and says the same. It must never
    /// block the attendant.
    fn lives(&mut self) -> bool {
        let alive = AggregatorMessage::Alive;
        self.is_well() && self.client.channel.writer.send_now(&alive).is_ok()
    }

    /// Reads all that the client has said.
    fn is_well(&mut self) -> bool {
        for _ in 0..MOST_SIGNS {
            match self.client.channel.reader.try_read(SIGN_BYTES) {
                Ok(Some(ClientMessage::Alive)) => {}
                Ok(None) => return true,
                Ok(Some(_)) | Err(_) => return false,
            }
        }
        // Nobody has so many signs of life to give.
        false
    }
}

/// The client's update is not, or no longer, wanted.
fn dismiss(mut client: Joined) {
    // The socket closes after that, so nobody waits for a peer that does not read.
    let _ = client.channel.set_deadline(limits::LAST_WORDS);
    // A client that is gone need not hear it.
    let _ = client.channel.writer.send(&AggregatorMessage::Done);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_shuts_the_others_out() {
        let served = Served::new(8);
        let address = |last| IpAddr::from([127, 0, 0, last]);
        let came = |last| (0..8).filter(|_| served.enter(address(last))).count();
        assert_eq!([came(1), came(2), came(3), came(4)], [4, 2, 1, 1]);
        assert_eq!(came(5), 0);
        (0..4).for_each(|_| served.leave(address(1)));
        assert_eq!(came(5), 2);
        // One that is alone on a small host.
        assert!(Served::new(1).enter(address(1)));
    }
}
