//! The side that dials: fetches models, and waits with updates until they are wanted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Parcel;
use crate::client::{Canceller, Client, ClientConfig, Target, Task};
use crate::control::{self, Congestion, ControlChannel};
use crate::error::{ClientError, ControlError, RegionError};
use crate::limits;
use crate::link::Link;
use crate::paths::ReceiveKind;
use crate::pool::RegionPool;
use crate::region::Region;
use crate::tls::ClientTls;
use crate::wire::hello::Secret;
use crate::wire::message::{AggregatorMessage, ClientMessage};

/// How to reach an exchange.
#[derive(Clone, Debug)]
pub struct LineConfig {
    /// Host and port.
    pub address: String,
    /// Name for logs.
    pub name: String,
    /// How long dialling may take, and how long the exchange may be silent.
    pub deadline: Duration,
    /// Congestion control of the data channels.
    pub congestion: Congestion,
    /// TLS, where the exchange has it.
    pub tls: Option<ClientTls>,
}

impl LineConfig {
    /// An exchange at `address`, called by `name`.
    pub fn new(address: impl Into<String>, name: impl Into<String>) -> LineConfig {
        LineConfig {
            address: address.into(),
            name: name.into(),
            deadline: limits::DEADLINE,
            congestion: Congestion::Auto,
            tls: None,
        }
    }

    fn client(&self, secret: Secret, examples: f64) -> ClientConfig {
        ClientConfig {
            name: self.name.clone(),
            examples,
            secret,
            tls: self.tls.clone(),
            send_path: None,
            receive_path: ReceiveKind::default(),
            congestion: self.congestion.clone(),
            deadline: self.deadline,
            // Who waits with an update comes again by itself.
            reconnect: Some(Duration::ZERO),
        }
    }
}

/// Takes the model that is on offer under `secret` into memory of `pool`.
///
/// # Errors
/// Nobody there, nothing on offer (any more), bytes that do not match, no memory.
pub fn fetch(
    line: &LineConfig,
    secret: Secret,
    pool: &Arc<RegionPool>,
) -> Result<Parcel, ClientError> {
    fetch_into(line, secret, pool, |bytes| pool.take(bytes))
}

/// As [`fetch`], for one `owner`: memory that only his models have stood in need not be zeroed before it
/// is lent to him.
///
/// # Errors
/// As [`fetch`].
pub fn fetch_for(
    line: &LineConfig,
    secret: Secret,
    pool: &Arc<RegionPool>,
    owner: &str,
) -> Result<Parcel, ClientError> {
    fetch_into(line, secret, pool, |bytes| pool.take_for(bytes, owner))
}

fn fetch_into(
    line: &LineConfig,
    secret: Secret,
    pool: &Arc<RegionPool>,
    take: impl FnOnce(u64) -> Result<Region, RegionError>,
) -> Result<Parcel, ClientError> {
    let mut client = Client::join_unknowing(&line.address, line.client(secret, 0.0))?;
    let Task::Download { round, digest } = client.next_task()? else {
        return Err(client.unexpected("a message"));
    };
    let manifest = client.manifest().clone();
    let mut region = take(manifest.data_bytes())?;
    client.download(round, digest, Target::Region(&mut region))?;
    client.confirm(round);
    let sums = client.received_sums();
    // The model is here; whether the exchange says goodbye changes nothing.
    let _ = client.next_task();
    Ok(Parcel::sealed(manifest, Arc::new(region), sums, pool))
}

/// Asks whether the exchange can be reached and knows `secret`.
///
/// # Errors
/// Nobody there, or nothing of that name.
pub fn call(line: &LineConfig, secret: Secret) -> Result<(), ClientError> {
    let at = |error: ControlError| ClientError::Control { address: line.address.clone(), error };
    let socket = control::dial(&line.address, &line.congestion, line.deadline)
        .map_err(|source| ClientError::Dial { address: line.address.clone(), source })?;
    let until = Instant::now() + line.deadline;
    let tls = line.tls.as_ref().map(|tls| tls.at(&line.address));
    let link = Link::dialled(socket, tls.as_ref(), until).map_err(at)?;
    let opened = ControlChannel::open(link, &secret, line.deadline);
    let mut channel = match opened {
        Err(ControlError::NoPlace) => {
            return Err(ClientError::NotWanted { address: line.address.clone() });
        }
        opened => opened.map_err(at)?,
    };
    let call = ClientMessage::Call { name: line.name.clone(), place: secret.place() };
    channel.writer.send(&call).map_err(at)?;
    match channel.reader.read(limits::MAX_FRAME_BYTES).map_err(at)? {
        AggregatorMessage::Done => Ok(()),
        AggregatorMessage::Failed { reason } => Err(ClientError::Ended {
            address: line.address.clone(),
            reason: control::printable(&reason),
        }),
        _ => Err(at(crate::error::ProtocolError::Unexpected { what: "a message" }.into())),
    }
}

/// Longest pause before an exchange that went away is dialled again.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// An update that waits until it is wanted. Dropping it gives it up.
pub struct Deposit {
    gone: Arc<AtomicBool>,
    stop: Option<mpsc::Sender<()>>,
    canceller: Canceller,
    ended: Arc<Mutex<Option<Result<(), String>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Deposit {
    /// Waits with `update`, on a thread of its own, until the exchange releases it. Connections
    /// that break are made anew; an exchange that has not answered for `line.deadline` is over.
    ///
    /// # Errors
    /// A host that refuses a thread.
    pub fn leave(
        line: LineConfig,
        secret: Secret,
        update: Arc<Parcel>,
    ) -> std::io::Result<Deposit> {
        let gone = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(Mutex::new(None));
        let (stop, stopped) = mpsc::channel();
        let (inside, outcome) = (gone.clone(), ended.clone());
        let canceller = Canceller::default();
        let held = canceller.clone();
        let wait = move || {
            let result = wait_with(&line, secret, &update, &held, &stopped);
            // The memory is free before anybody hears that it is.
            drop(update);
            *outcome.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(result.map_err(|error| error.to_string()));
            inside.store(true, Ordering::SeqCst);
        };
        let thread = std::thread::Builder::new().name("deposit".into()).spawn(wait)?;
        Ok(Deposit { gone, stop: Some(stop), canceller, ended, thread: Some(thread) })
    }

    /// Whether the update is released, or given up.
    pub fn is_over(&self) -> bool {
        // A thread that has ended says nothing more, however it ended.
        let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        self.gone.load(Ordering::SeqCst) || has_ended
    }

    /// Why it was given up, if it was.
    pub fn failure(&self) -> Option<String> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.as_ref().and_then(|result| result.as_ref().err().cloned())
    }
}

impl Drop for Deposit {
    fn drop(&mut self) {
        self.stop.take();
        // The thread ends now, or when it has dialled. Nobody need wait for that.
        self.canceller.cancel("the update is given up");
    }
}

fn wait_with(
    line: &LineConfig,
    secret: Secret,
    update: &Parcel,
    canceller: &Canceller,
    stopped: &Receiver<()>,
) -> Result<(), ClientError> {
    let mut pause = Duration::ZERO;
    let mut heard = Instant::now();
    loop {
        let began = Instant::now();
        let error = match serve(line, secret, update, canceller) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if canceller.has_answered() {
            heard = Instant::now();
        }
        if heard.elapsed() > line.deadline {
            return Err(error);
        }
        tracing::info!("update waits on: {error}");
        // Who was served for a while is not in a loop of failures.
        pause = match began.elapsed() > LONGEST_PAUSE {
            true => Duration::ZERO,
            false => (2 * pause).clamp(Duration::from_millis(20), LONGEST_PAUSE),
        };
        if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
            return Err(error);
        }
    }
}

/// Waits once, and sends the update each time it is wanted. Done when it is released.
fn serve(
    line: &LineConfig,
    secret: Secret,
    update: &Parcel,
    canceller: &Canceller,
) -> Result<(), ClientError> {
    let config = line.client(secret, 0.0);
    let joined = Client::join_with(&line.address, config, Some(&update.manifest), canceller);
    let mut client = match joined {
        Err(ClientError::NotWanted { .. }) => return Ok(()),
        joined => joined?,
    };
    loop {
        match client.next_task()? {
            Task::Upload { round } => drop(client.upload(round, &update.source())?),
            Task::Done => return Ok(()),
            Task::Download { .. } => return Err(client.unexpected("a model")),
        }
    }
}
