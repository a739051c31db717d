//! `fedlane.Client`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fedlane::client::{self, Canceller, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::error::ClientError;
use fedlane::manifest::Manifest;
use fedlane::paths::ReceiveKind;
use fedlane::source::region::RegionSource;
use pyo3::prelude::*;

use crate::blocking;
use crate::door::ClientFiles;
use crate::errors::{FedlaneError, OrRaise};
use crate::progress::{Counters, Reporter};
use crate::region::Region;

/// The process that trains: it joins an aggregator, sends its updates and gets the mean.
///
/// Client(address, *, name, examples, model, deadline_ms=30000, progress=None, secret=None, tls_ca=None,
/// tls_name=None, tls_cert=None, tls_key=None) dials "HOST:PORT" and waits until all clients of the session have joined. `name` is unique in the session. `examples`,
/// 0 or more, is this client's weight in the mean. `model`, a Region, says the layout; it is what
/// `client.model` is at first. An aggregator that is silent for `deadline_ms` milliseconds is
/// given up.
///
/// Iterating gives the number of each round, from 1, when its update is wanted:
///
///     with fedlane.Client("host:7733", name="a", examples=100, model=region) as client:
///         for round in client:
///             train(client.model)      # changes it in place
///             client.send(client.model)
///     use(client.model)                # the last mean
///
/// Every call that waits lets other threads run and ends on Ctrl-C. Leaving the `with` block early
/// tells the aggregator why.
///
/// `secret`, 32 bytes, is that of the aggregator, if it has one. Where the aggregator has TLS, `tls_ca` is the
/// PEM file (str or os.PathLike) with the authority of its certificate, and `tls_name` the name in that, if
/// it is not the host that is dialled. `tls_cert` and `tls_key` are files with this client's own certificate
/// and key, for an aggregator that wants one.
///
/// `progress` is called as progress(phase, name, done_bytes, total_bytes) every 50 ms while bytes
/// move, and at the end of each phase, "upload" or "download". What it raises ends the session.
///
/// After any error of a call the session has ended; only ModelError from send() and wrong use leave
/// it as it was.
///
/// Raises PeerError if no aggregator is there, it refuses this client or is not to be trusted; ValueError
/// for TLS files of which some are missing; FedlaneError otherwise.
#[pyclass(frozen, weakref, module = "fedlane", name = "Client")]
pub struct Client {
    name: String,
    rounds: u32,
    manifest: Arc<Manifest>,
    canceller: Canceller,
    progress: Option<Py<PyAny>>,
    state: Mutex<State>,
    left_out: Mutex<Option<String>>,
    model: Mutex<Option<Py<Region>>>,
}

type Engine = Box<client::Client>;

enum State {
    /// Nothing is asked of this client that it knows of.
    Idle(Engine),
    /// The update of this round is wanted.
    Wanted(Engine, u32),
    /// A call runs, maybe on another thread.
    Busy,
    /// Why nothing can be done any more.
    Ended(&'static str),
}

const CLOSED: &str = "this client was closed";
const FAILED: &str = "the session has ended with an error before";
const DONE: &str = "all rounds are done";
const STOPPED: &str = "the client was stopped";

impl Client {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_back(&self, next: State) {
        let mut state = self.lock();
        // Whoever closed it meanwhile has the last word.
        if matches!(*state, State::Busy) {
            *state = next;
        }
    }

    /// Runs a call of the engine that has the client to itself.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        mut engine: Engine,
        phase: Option<&str>,
        work: impl FnOnce(&mut client::Client) -> Result<T, ClientError> + Send + 'static,
    ) -> PyResult<(Engine, T)> {
        let model_bytes = self.manifest.data_bytes();
        let counters = Counters::Client(engine.progress(), self.name.clone(), model_bytes);
        let callback = self.progress.as_ref().map(|callback| callback.clone_ref(py));
        let mut reporter = Reporter::new(callback, Some(counters));
        let run = move || work(&mut engine).map(|value| (engine, value));
        let tick = |py: Python<'_>| reporter.report(py);
        let result = blocking::run_ticking(py, run, || self.canceller.cancel(STOPPED), tick);
        let result = result.and_then(OrRaise::or_raise).and_then(|value| {
            phase.map_or(Ok(()), |phase| reporter.finish(py, phase)).map(|()| value)
        });
        result.inspect_err(|_| self.put_back(State::Ended(FAILED)))
    }

    /// Takes a model into memory that nobody uses any more, or else into new memory.
    fn download(
        &self,
        py: Python<'_>,
        engine: Engine,
        round: u32,
        digest: [u8; 32],
    ) -> PyResult<Engine> {
        let old = self.take_model().map(|model| model.get().memory().clone());
        let bytes = self.manifest.data_bytes();
        let (engine, memory) = self.call(py, engine, Some("download"), move |engine| {
            let mut memory = match old.and_then(Arc::into_inner) {
                Some(memory) => memory,
                None => fedlane::region::Region::new(bytes)?,
            };
            engine.download(round, digest, Target::Region(&mut memory))?;
            engine.confirm(round);
            Ok(memory)
        })?;
        let model = Py::new(py, Region::wrap(Arc::new(memory), self.manifest.clone()))?;
        *self.model.lock().unwrap_or_else(PoisonError::into_inner) = Some(model);
        Ok(engine)
    }

    fn take_model(&self) -> Option<Py<Region>> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Ends the session; `reason` tells the aggregator why.
    fn end(&self, py: Python<'_>, reason: &str) {
        let state = std::mem::replace(&mut *self.lock(), State::Ended(CLOSED));
        py.detach(move || {
            if matches!(state, State::Idle(_) | State::Wanted(..) | State::Busy) {
                self.canceller.cancel(reason);
            }
            // Joins threads.
            drop(state);
        });
    }
}

impl State {
    /// Why a call is refused in this state.
    fn refusal(&self, otherwise: &str) -> PyErr {
        FedlaneError::new_err(match self {
            State::Busy => "another thread is in a call of this client".to_owned(),
            State::Ended(why) => (*why).to_owned(),
            _ => otherwise.to_owned(),
        })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (address, *, name, examples, model, deadline_ms=30_000, progress=None, secret=None, tls_ca=None, tls_name=None, tls_cert=None, tls_key=None))]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    fn new(
        py: Python<'_>,
        address: String,
        name: String,
        examples: f64,
        model: Py<Region>,
        deadline_ms: u64,
        progress: Option<Py<PyAny>>,
        secret: Option<[u8; 32]>,
        tls_ca: Option<PathBuf>,
        tls_name: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
    ) -> PyResult<Client> {
        let (authority, certificate, key) = (tls_ca, tls_cert, tls_key);
        let tls = ClientFiles { authority, name: tls_name, certificate, key }.read()?;
        let config = ClientConfig {
            name: name.clone(),
            examples,
            secret: blocking::check_secret(secret)?,
            tls,
            send_path: None,
            receive_path: ReceiveKind::default(),
            congestion: Congestion::Auto,
            deadline: Duration::from_millis(blocking::check_deadline(deadline_ms)?),
            reconnect: None,
        };
        let manifest = model.get().manifest().clone();
        let canceller = Canceller::default();
        let (inside, layout) = (canceller.clone(), manifest.clone());
        let join = move || {
            client::Client::join_cancellable(address, config, &layout, &inside).map(Box::new)
        };
        let engine = blocking::run(py, join, || canceller.cancel(STOPPED))?.or_raise()?;
        Ok(Client {
            name,
            rounds: engine.rounds(),
            manifest,
            canceller,
            progress,
            state: Mutex::new(State::Idle(engine)),
            left_out: Mutex::default(),
            model: Mutex::new(Some(model)),
        })
    }

    /// The newest model of the aggregator: a Region, yours to change. Before the first one, the Region
    /// that this client joined with.
    ///
    /// The memory is used again for the next model if nothing refers to this Region or its views
    /// by then.
    #[getter]
    fn model(&self, py: Python<'_>) -> PyResult<Py<Region>> {
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        match &*model {
            Some(model) => Ok(model.clone_ref(py)),
            None => Err(FedlaneError::new_err("a model is being received, or failed to be")),
        }
    }

    /// How many rounds the aggregator wants to run.
    #[getter]
    fn rounds(&self) -> u32 {
        self.rounds
    }

    /// Why the update of the newest round is not in the mean, as the aggregator says; None if it is.
    #[getter]
    fn left_out(&self) -> Option<String> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Send the update of this round, and wait until the round is over. Returns whether the update is in
    /// the mean: False if it came too late or was rejected; `left_out` says which.
    ///
    /// `update` is a Region of the layout joined with, `client.model` if it is not given. Its views
    /// are read-only meanwhile.
    ///
    /// Raises ModelError, before anything is sent, if the layout is another one; PeerError if the
    /// aggregator ends the session, also if the update was changed while it was sent; FedlaneError
    /// if no update is wanted.
    #[pyo3(signature = (update=None))]
    fn send(&self, py: Python<'_>, update: Option<Py<Region>>) -> PyResult<bool> {
        let update = update.map_or_else(|| self.model(py), Ok)?;
        let region = update.get();
        if let Some(difference) = self.manifest.first_difference(region.manifest()) {
            return Err(ClientError::Model { difference }).or_raise();
        }
        let (engine, round) = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Busy) {
                State::Wanted(engine, round) => (engine, round),
                other => {
                    let error = other.refusal("no update is wanted now; iterate over the client");
                    *state = other;
                    return Err(error);
                }
            }
        };
        let (memory, manifest) = (region.memory().clone(), self.manifest.clone());
        let (engine, left_out) = region.while_frozen(py, || {
            self.call(py, engine, Some("upload"), move |engine| {
                let threads = std::thread::available_parallelism().map_or(1, usize::from);
                let source = RegionSource::seal(&manifest, &memory, engine.chunks(), threads);
                engine.upload(round, &source)
            })
        })?;
        self.put_back(State::Idle(engine));
        let counted = left_out.is_none();
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = left_out;
        Ok(counted)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Wait until the next update is wanted, and take the models that come before. Returns the number
    /// of the round, from 1.
    ///
    /// Raises StopIteration after the last round; PeerError if the aggregator ends the session;
    /// OutOfMemory; FedlaneError if the last round's update was not sent.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let mut engine = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Busy) {
                State::Idle(engine) => engine,
                State::Ended(DONE) => {
                    *state = State::Ended(DONE);
                    return Ok(None);
                }
                other => {
                    let error = other.refusal("the update of this round was not sent; call send()");
                    *state = other;
                    return Err(error);
                }
            }
        };
        loop {
            let (idle, task) = self.call(py, engine, None, client::Client::next_task)?;
            match task {
                Task::Download { round, digest } => {
                    engine = self.download(py, idle, round, digest)?;
                }
                Task::Upload { round } => {
                    self.put_back(State::Wanted(idle, round));
                    return Ok(Some(round));
                }
                Task::Done => {
                    self.put_back(State::Ended(DONE));
                    py.detach(move || drop(idle));
                    return Ok(None);
                }
            }
        }
    }

    /// Leave the session and close every connection. A call that another thread waits in fails.
    ///
    /// Can be called twice.
    fn close(&self, py: Python<'_>) {
        self.end(py, "the client was closed");
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, trace, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Bound<'_, PyAny>>,
        error: Option<Bound<'_, PyAny>>,
        trace: Option<Bound<'_, PyAny>>,
    ) {
        let _ = (kind, trace);
        match error {
            Some(error) => self.end(py, &blocking::describe(&error)),
            None => self.close(py),
        }
    }
}
