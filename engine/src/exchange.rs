//! One port for many transfers: models on offer, and updates that wait until they are wanted.
//!
//! Every transfer has a [`Secret`], which both sides learn elsewhere. Clients dial: [`fetch`] takes
//! a model that is on offer; a [`Deposit`] joins with its update and waits, for as long as it may
//! take, until the [`Exchange`] collects or averages it. Nothing is sent before that, so the
//! exchange alone decides whose updates count and how many come at once. An update stays where it
//! is until the exchange releases it: a transfer that breaks can be repeated.

mod client;
mod local;
mod places;

use std::any::Any;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::aggregator::door::{Door, Reception};
use crate::aggregator::{
    Aggregator, AggregatorConfig, Averaging, Session, default_streams, descriptors_of,
};
use crate::control::{self, Congestion};
use crate::error::{AggregatorError, ExchangeError};
use crate::lane::receive::Order;
use crate::limits;
use crate::manifest::Manifest;
use crate::pool::RegionPool;
use crate::reducer::RunningWeights;
use crate::region::Region;
use crate::sink::mean::Wave;
use crate::source::region::RegionSource;
use crate::sys::process;
use crate::tls::ServerTls;
use crate::verdict::{OnNonfinite, UpdatePolicy};
use crate::wire::hello::Secret;

pub use client::{Deposit, LineConfig, call, fetch, fetch_for};
pub use local::average;
use places::{Places, Served};

/// A model or update in a region, with the checksums of its chunks.
pub struct Parcel {
    manifest: Manifest,
    /// Given back to the pool when nobody needs it any more.
    region: Option<Arc<Region>>,
    sums: Vec<u64>,
    pool: Arc<RegionPool>,
    /// What must live as long as the memory is used.
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Parcel {
    /// Wraps a filled region.
    ///
    /// # Errors
    /// A region that is not as large as the model.
    pub fn new(
        manifest: Manifest,
        region: Region,
        pool: &Arc<RegionPool>,
    ) -> Result<Parcel, ExchangeError> {
        let (bytes, model_bytes) = (region.bytes().len() as u64, manifest.data_bytes());
        if bytes != model_bytes {
            return Err(ExchangeError::Size { bytes, model_bytes });
        }
        let chunks = manifest.chunks(limits::CHUNK_BYTES)?;
        let sums = RegionSource::seal(&manifest, &region, &chunks, default_streams()).into_sums();
        Ok(Parcel::sealed(manifest, Arc::new(region), sums, pool))
    }

    /// Wraps the part of another process's memory file that begins at `position`.
    ///
    /// # Errors
    /// A file that is too short, or cannot be mapped.
    pub fn adopt(
        manifest: Manifest,
        file: OwnedFd,
        position: u64,
    ) -> Result<Parcel, ExchangeError> {
        let region = Region::adopt(file, position, manifest.data_bytes())?;
        // Nobody takes from this pool: the memory is another's.
        Parcel::new(manifest, region, &Arc::default())
    }

    /// The same, and `owner` lives at least as long.
    pub fn keeping(self, owner: Arc<dyn Any + Send + Sync>) -> Parcel {
        let mut parcel = self;
        parcel._keep = Some(owner);
        parcel
    }

    fn sealed(
        manifest: Manifest,
        region: Arc<Region>,
        sums: Vec<u64>,
        pool: &Arc<RegionPool>,
    ) -> Parcel {
        Parcel { manifest, region: Some(region), sums, pool: pool.clone(), _keep: None }
    }

    /// What the bytes mean.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes.
    pub fn region(&self) -> &Arc<Region> {
        self.region.as_ref().expect("taken in drop only")
    }

    fn source(&self) -> RegionSource<'_> {
        let sums = self.sums.clone();
        RegionSource::new(&self.manifest, self.region(), limits::CHUNK_BYTES, sums)
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        if let Some(region) = self.region.take().and_then(Arc::into_inner) {
            self.pool.give_back(region);
        }
    }
}

/// How an exchange works.
#[derive(Clone, Debug)]
pub struct ExchangeConfig {
    /// Silence after which a peer is given up.
    pub deadline: Duration,
    /// Data channels of each client.
    pub streams: usize,
    /// Congestion control of the data channels.
    pub congestion: Congestion,
    /// Bytes of the largest update that is taken: memory is set aside for what a client says that its
    /// update has.
    pub max_update_bytes: u64,
    /// TLS on all connections.
    pub tls: Option<ServerTls>,
}

impl Default for ExchangeConfig {
    fn default() -> Self {
        ExchangeConfig {
            deadline: limits::DEADLINE,
            streams: default_streams(),
            congestion: Congestion::Auto,
            max_update_bytes: limits::MAX_MODEL_BYTES,
            tls: None,
        }
    }
}

/// A listening port where models are offered and updates are awaited.
pub struct Exchange {
    config: ExchangeConfig,
    address: SocketAddr,
    pool: Arc<RegionPool>,
    places: Arc<Places>,
    door: Arc<Door>,
}

/// An update that is wanted, and its weight in the mean.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The secret of its place.
    pub secret: Secret,
    /// Its weight.
    pub weight: f64,
}

/// The sums of updates that came so far, of a mean that more may come to.
pub struct MeanSums {
    manifest: Manifest,
    region: Region,
    weights: RunningWeights,
}

impl MeanSums {
    fn begin(session: &Session, pool: &RegionPool) -> Result<MeanSums, AggregatorError> {
        let layout = session.layout().ok_or_else(|| io::Error::other("no sums"))?;
        let region = pool.take(layout.bytes())?;
        let manifest = session.manifest().clone();
        Ok(MeanSums { manifest, region, weights: RunningWeights::default() })
    }
}

impl Exchange {
    /// Listens on `address`.
    ///
    /// # Errors
    /// An address that cannot be listened on, or a host that refuses threads.
    pub fn listen(
        address: impl ToSocketAddrs + std::fmt::Display,
        config: ExchangeConfig,
    ) -> Result<Exchange, AggregatorError> {
        let listen = |source| AggregatorError::Listen { address: address.to_string(), source };
        let listener = control::listen(&address, &config.congestion).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        // As many as the host allows; more clients than that have to come one after the other.
        let descriptors = process::allow_open_files(limits::EXCHANGE_DESCRIPTORS);
        let pool = Arc::new(RegionPool::default());
        let serving = session_config(&config, Averaging::Discard);
        let served = Served::new(most_served(&serving, descriptors));
        let places = Arc::new(Places::new(serving, config.max_update_bytes, served, pool.clone()));
        let reception = places.clone();
        let keeper = places.clone();
        let reception = Reception {
            secret: Box::new(move |place| keeper.secret(place)),
            welcome: Box::new(move |visit| reception.receive(visit)),
        };
        let tls = config.tls.clone();
        let door =
            Door::open(listener, config.congestion.clone(), tls, limits::MAX_VISITORS, reception)
                .map_err(listen)?;
        let door = Arc::new(door);
        places.open(&door, bound)?;
        Ok(Exchange { config, address: bound, pool, places, door })
    }

    /// Where clients can dial.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Memory for parcels of this exchange.
    pub fn pool(&self) -> &Arc<RegionPool> {
        &self.pool
    }

    /// Offers a model to everyone who knows `secret`, until it is released.
    pub fn offer(&self, secret: Secret, model: Arc<Parcel>) {
        self.places.offer(secret, model);
    }

    /// Awaits the update whose client knows `secret`.
    pub fn expect(&self, secret: Secret) {
        self.places.expect(secret);
    }

    /// Closes a place: an offer ends, and a waiting client hears that its update is released.
    pub fn release(&self, secret: Secret) {
        self.places.release(secret);
    }

    /// Whether a client of this name has ever come.
    pub fn has_met(&self, name: &str) -> bool {
        self.places.has_met(name)
    }

    /// The layout of an update, once its client has come.
    ///
    /// # Errors
    /// A client that does not come within `patience`.
    pub fn await_update(
        &self,
        secret: Secret,
        patience: Duration,
    ) -> Result<Manifest, ExchangeError> {
        self.places.await_update(secret, patience)
    }

    /// Receives one update whole, and releases it: the place is closed, and the client hears it.
    /// Waits for the client for at most `patience`.
    ///
    /// # Errors
    /// A client that does not come, dies, stalls or lies. Its update can be asked for again.
    pub fn collect(&self, secret: Secret, patience: Duration) -> Result<Parcel, ExchangeError> {
        let wanted = Wanted { secret, weight: 1.0 };
        let (manifest, (sums, region, session)) =
            self.transfer(&[wanted], Averaging::Keep, patience, |mut session| {
                let region = session.collect()?.pop();
                let region = region.ok_or_else(|| io::Error::other("no update"))?;
                Ok((session.upload_sums(0), region, session))
            })?;
        // What has been received stays so, whether or not the client hears it. If not, it comes
        // again, and then hears it from a place that is closed.
        self.places.release(secret);
        let _ = session.finish();
        Ok(Parcel::sealed(manifest, Arc::new(region), sums, &self.pool))
    }

    /// Averages updates while they come, in the order given. Waits for their clients for at most
    /// `patience`. They stay with their clients until they are released.
    ///
    /// # Errors
    /// A client that does not come, dies, stalls or lies is named by its secret. Nothing of the
    /// mean is kept then; without that client it can be asked for again.
    pub fn average(&self, wanted: &[Wanted], patience: Duration) -> Result<Parcel, ExchangeError> {
        let (manifest, model) =
            self.transfer(wanted, Averaging::Streaming, patience, |mut session| {
                session.round()?;
                Ok(session.into_model())
            })?;
        let (region, sums) = model.ok_or_else(|| io::Error::other("no model"))?;
        Ok(Parcel::sealed(manifest, region, sums, &self.pool))
    }

    /// Adds updates to the sums of a mean while they come, in the order given: the same bits as of
    /// one [`Exchange::average`] of all. Otherwise the same.
    ///
    /// # Errors
    /// As [`Exchange::average`]; the sums are lost then.
    pub fn add(
        &self,
        sums: Option<MeanSums>,
        wanted: &[Wanted],
        patience: Duration,
    ) -> Result<MeanSums, ExchangeError> {
        let weights: Vec<f64> = wanted.iter().map(|wanted| wanted.weight).collect();
        let pool = &self.pool;
        let fold = |mut session: Session| {
            let mut sums = match sums {
                Some(sums) => sums,
                None => MeanSums::begin(&session, pool)?,
            };
            if let Some(difference) = sums.manifest.first_difference(session.manifest()) {
                return Err(AggregatorError::Sums { difference });
            }
            let (weights, carry) = sums.weights.extend(&weights)?;
            sums.region = session.fold(weights, Wave { carry }, sums.region)?;
            Ok(sums)
        };
        Ok(self.transfer(wanted, Averaging::Wave, patience, fold)?.1)
    }

    /// The mean of sums.
    ///
    /// # Errors
    /// Memory; weights that sum to zero.
    pub fn finish(&self, sums: MeanSums) -> Result<Parcel, ExchangeError> {
        let weights = sums.weights.weights()?;
        local::finish(sums.manifest, sums.region, &weights, &self.pool)
    }

    /// Runs a session with the clients of `wanted`, in this order.
    fn transfer<T>(
        &self,
        wanted: &[Wanted],
        averaging: Averaging,
        patience: Duration,
        run: impl FnOnce(Session) -> Result<T, AggregatorError>,
    ) -> Result<(Manifest, T), ExchangeError> {
        let secrets: Vec<Secret> = wanted.iter().map(|wanted| wanted.secret).collect();
        let (mut clients, manifest) = self.places.take(&secrets, patience)?;
        for (rank, (client, wanted)) in clients.iter_mut().zip(wanted).enumerate() {
            (client.rank, client.examples) = (rank, wanted.weight);
        }
        let who: Vec<(String, Secret)> =
            clients.iter().map(|client| client.label()).zip(secrets).collect();
        let config = session_config(&self.config, averaging);
        let (door, pool) = (self.door.clone(), self.pool.clone());
        let result = Aggregator::of(door, self.address, pool, config, clients)
            .and_then(|aggregator| run(aggregator.gather(Some(manifest.clone()))?));
        Ok((manifest, result.map_err(|error| blame(error, &who))?))
    }

    /// Ends everything: nobody is let in any more, those who wait hear that their updates are not
    /// wanted, and [`Exchange::collect`] and [`Exchange::average`] that wait for clients end.
    /// Transfers that are under way end by themselves.
    pub fn close(&self) {
        // First: nobody may come back and find the place closed.
        self.door.close();
        self.places.close();
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.close();
    }
}

fn session_config(config: &ExchangeConfig, averaging: Averaging) -> AggregatorConfig {
    AggregatorConfig {
        streams: config.streams,
        deadline: config.deadline,
        // The same bits whoever is faster; and sums need no memory beyond their tiles.
        order: Order::Client,
        averaging,
        congestion: config.congestion.clone(),
        // A transfer that breaks is begun anew.
        reconnect: Duration::ZERO,
        // What is bad is for the strategy to say.
        updates: UpdatePolicy { on_nonfinite: OnNonfinite::Keep, clip_norm: None },
        ..AggregatorConfig::default()
    }
}

/// How many clients a model can be sent to at once, with half of the descriptors: the other half is for
/// updates and visitors.
fn most_served(config: &AggregatorConfig, descriptors: u64) -> usize {
    let most = descriptors / 2 / descriptors_of(config).max(1);
    most.clamp(1, limits::MAX_SERVED as u64) as usize
}

/// Finds the client that an error names.
fn blame(error: AggregatorError, who: &[(String, Secret)]) -> ExchangeError {
    let named = match &error {
        AggregatorError::Client { client, .. } => {
            who.iter().find(|(label, _)| label == client).map(|(_, secret)| *secret)
        }
        _ => None,
    };
    match named {
        Some(secret) => ExchangeError::Update { secret, error: Box::new(error) },
        None => error.into(),
    }
}
