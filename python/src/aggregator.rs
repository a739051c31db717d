//! `fedlane.Aggregator`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fedlane::aggregator::{self, AggregatorConfig, Canceller, OnLoss, Session};
use fedlane::error::AggregatorError;
use fedlane::lane::receive::Order;
use fedlane::limits;
use fedlane::manifest::Manifest;
use fedlane::named::Named;
use fedlane::topology::tree::Leaf;
use fedlane::verdict::{OnNonfinite, Rejection, UpdatePolicy, UpdateReport, Verdict};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::blocking;
use crate::door::ServerFiles;
use crate::errors::{FedlaneError, OrRaise};
use crate::progress::{Counters, Reporter};
use crate::region::Region;

/// The process that averages: it listens, waits for its clients and runs rounds.
///
/// Aggregator(address, *, clients, min_clients=None, rounds=1, order="arrival", topology="star", deadline_ms=30000,
/// round_deadline=None, reconnect=None, on_nonfinite="reject", clip_norm=None, on_loss="auto",
/// max_model_bytes=None, progress=None, secret=None, insecure=False, tls_cert=None, tls_key=None,
/// tls_client_ca=None, allow=None) listens at once. `address` is "HOST:PORT"; port 0 takes a free one, and
/// 0.0.0.0 lets other machines in. `clients` is how many are waited for, `rounds` how many rounds there will be.
/// order="client" adds the clients' updates up in the order of their names, so that the mean has the
/// same bits whoever comes first. With topology="tree" clients may be edges (fedlane.Edge), which bring the sums of
/// clients of their own. A peer that is silent for `deadline_ms` milliseconds is given up.
///
/// Where other machines can reach it, it takes a `secret`, TLS or insecure=True. `secret` is 32 bytes
/// that all clients know too, bytes.fromhex() of the file that `fedlane cert --secret FILE` makes. It
/// encrypts no model; TLS does: `tls_cert` and `tls_key` are PEM files (str or os.PathLike) with the
/// certificate of this aggregator and its key. With `tls_client_ca`, the PEM file of an authority,
/// clients need a certificate of it that has their name, and with `allow`, a list of names, one of these.
///
///     with fedlane.Aggregator("0.0.0.0:7733", clients=2, rounds=3, secret=key) as aggregator:
///         aggregator.gather()
///         for _ in range(3):
///             mean = aggregator.round()
///
/// The session ends with the `with` block: the clients hear that all rounds are done, or else why
/// there are no more. Every call that waits lets other threads run and ends on Ctrl-C.
///
/// `progress` is called as progress(phase, client, done_bytes, total_bytes) every 50 ms while bytes
/// move, and at the end of each phase, "upload" or "download". What it raises ends the session.
///
/// A client whose connection breaks may come back within `reconnect` seconds (the deadline if not said, 0
/// for never) and goes on where it was. One that does not, or that lies, is left out if `min_clients`
/// are left (all of them if not said); otherwise it ends the session for all, with a PeerError that
/// names it. `round_deadline` is how many seconds a round waits for updates, training included, before
/// it goes on without those that are late, and how long gather() waits before it begins with
/// `min_clients`; None waits for ever. `counted`, `left_out` and `updates` say what came of a round.
///
/// `on_nonfinite` says what happens to an update with elements that are NaN or infinite: "reject"
/// leaves it out whole, "zero" makes them zero, "keep" counts them as they are. With `clip_norm`, an
/// update whose Euclidean norm, measured from the model sent before, is larger, is scaled down to it;
/// updates are then received whole before they are averaged, which takes memory for all of them.
/// `on_loss` says what is done about clients that are lost in mid-upload: with "redo" the others send again
/// what was mixed with the lost one's, with "spool" updates are kept apart until they are whole, which
/// takes memory for all of them, and "auto" takes for each round what has been the cheaper one so far.
/// `max_model_bytes` is how large a model the first client may bring to gather().
///
/// After any error of a call, the session has ended; only ModelError from send() and wrong use leave
/// it as it was.
///
/// Raises ValueError for numbers out of bounds and TLS files of which some are missing; FedlaneError if
/// the address cannot be listened on, or others could reach it, or a TLS file cannot be used.
#[pyclass(frozen, weakref, module = "fedlane", name = "Aggregator")]
pub struct Aggregator {
    address: SocketAddr,
    rounds: u32,
    canceller: Canceller,
    progress: Option<Py<PyAny>>,
    state: Mutex<State>,
    /// Of the newest round.
    outcome: Mutex<Outcome>,
}

/// What came of a round.
#[derive(Clone, Default)]
struct Outcome {
    counted: Vec<String>,
    left_out: Vec<(String, String)>,
    updates: Vec<UpdateReport>,
}

impl Outcome {
    fn of(session: &Session) -> Outcome {
        // In a star these are the clients.
        let leaves = session.leaves();
        let is_in = |leaf: &&Leaf| leaf.left_out.is_none();
        let left_out = |leaf: &Leaf| Some((leaf.name.clone(), leaf.left_out.clone()?));
        Outcome {
            counted: leaves.iter().filter(is_in).map(|leaf| leaf.name.clone()).collect(),
            left_out: leaves.iter().filter_map(left_out).collect(),
            updates: session.updates().to_vec(),
        }
    }
}

enum State {
    Listening(Box<aggregator::Aggregator>),
    /// With the rounds that are done.
    Session(Box<Session>, u32),
    /// A call runs, maybe on another thread.
    Busy,
    /// Why nothing can be done any more.
    Ended(&'static str),
}

const CLOSED: &str = "this aggregator was closed";
const FAILED: &str = "the session has ended with an error before";
const FINISHED: &str = "the session is finished";

impl Aggregator {
    fn outcome(&self) -> Outcome {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the session for a call. Until it is put back others are told to wait.
    fn take_session(&self) -> PyResult<(Box<Session>, u32)> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Busy) {
            State::Session(session, done) => Ok((session, done)),
            other => {
                let error = other.refusal("call gather() first");
                *state = other;
                Err(error)
            }
        }
    }

    /// Ends a call: with a session to go on with or, if it failed, with none.
    fn put_back(&self, next: State) {
        let mut state = self.lock();
        // Whoever closed it meanwhile has the last word; the session is dropped with `next`.
        if matches!(*state, State::Busy) {
            *state = next;
        }
    }

    /// Runs a call of the engine that has the session to itself.
    fn call(
        &self,
        py: Python<'_>,
        (mut session, done): (Box<Session>, u32),
        phases: &[&str],
        work: impl FnOnce(&mut Session) -> Result<(), AggregatorError> + Send + 'static,
    ) -> PyResult<(Box<Session>, u32)> {
        let counters = Counters::Aggregator(session.progress());
        let callback = self.progress.as_ref().map(|callback| callback.clone_ref(py));
        let mut reporter = Reporter::new(callback, Some(counters));
        let run = move || (work(&mut session), session);
        let tick = |py: Python<'_>| reporter.report(py);
        let result = blocking::run_ticking(py, run, || self.canceller.cancel(), tick);
        let session = result.and_then(|(result, session)| {
            // Also a round that failed says what it found.
            *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Outcome::of(&session);
            result.or_raise().map(|()| session)
        });
        let session = session.and_then(|session| {
            phases.iter().try_for_each(|phase| reporter.finish(py, phase)).map(|()| session)
        });
        session.map(|session| (session, done)).inspect_err(|_| {
            self.put_back(State::Ended(FAILED));
        })
    }

    /// Receives updates and, if told so, sends their mean.
    fn run_round(&self, py: Python<'_>, sends: bool) -> PyResult<Region> {
        let (session, done) = self.take_session()?;
        if done == self.rounds {
            self.put_back(State::Session(session, done));
            let text = format!("all {done} rounds are done; ask for more with rounds=");
            return Err(FedlaneError::new_err(text));
        }
        let phases: &[&str] = if sends { &["upload", "download"] } else { &["upload"] };
        let (session, _) = self.call(py, (session, done), phases, move |session| {
            session.round()?;
            if sends { session.broadcast() } else { Ok(()) }
        })?;
        let model = session.model().expect("a round that streams makes a model");
        let manifest = Arc::new(session.manifest().clone());
        self.put_back(State::Session(session, done + 1));
        Ok(Region::wrap(model, manifest))
    }

    fn send_frozen(&self, py: Python<'_>, region: &Region) -> PyResult<()> {
        let (session, done) = self.take_session()?;
        let (memory, manifest) = (region.memory().clone(), region.manifest().clone());
        let check = move || (session.check_model(&manifest, memory.bytes()), session);
        let (checked, session) = py.detach(check);
        if let Err(error) = checked {
            self.put_back(State::Session(session, done));
            return Err(error).or_raise();
        }
        let (memory, manifest) = (region.memory().clone(), region.manifest().clone());
        let (session, done) = self.call(py, (session, done), &["download"], move |session| {
            session.send_region(&manifest, memory)
        })?;
        self.put_back(State::Session(session, done));
        Ok(())
    }

    /// Ends the session; `reason` tells the clients why there are no more rounds.
    fn end(&self, py: Python<'_>, reason: &str) {
        let state = std::mem::replace(&mut *self.lock(), State::Ended(CLOSED));
        self.canceller.cancel();
        // Joins threads.
        py.detach(move || {
            if let State::Session(session, _) = &state {
                session.give_up(reason);
            }
            drop(state);
        });
    }
}

impl State {
    /// Why a call is refused in this state.
    fn refusal(&self, otherwise: &str) -> PyErr {
        FedlaneError::new_err(match self {
            State::Busy => "another thread is in a call of this aggregator".to_owned(),
            State::Ended(why) => (*why).to_owned(),
            _ => otherwise.to_owned(),
        })
    }
}

#[pymethods]
impl Aggregator {
    #[new]
    #[pyo3(signature = (address, *, clients, min_clients=None, rounds=1, order="arrival", topology="star", deadline_ms=30_000, round_deadline=None, reconnect=None, on_nonfinite="reject", clip_norm=None, on_loss="auto", max_model_bytes=None, progress=None, secret=None, insecure=false, tls_cert=None, tls_key=None, tls_client_ca=None, allow=None))]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    fn new(
        py: Python<'_>,
        address: String,
        clients: usize,
        min_clients: Option<usize>,
        rounds: u32,
        order: &str,
        topology: &str,
        deadline_ms: u64,
        round_deadline: Option<f64>,
        reconnect: Option<f64>,
        on_nonfinite: &str,
        clip_norm: Option<f64>,
        on_loss: &str,
        max_model_bytes: Option<u64>,
        progress: Option<Py<PyAny>>,
        secret: Option<[u8; 32]>,
        insecure: bool,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_client_ca: Option<PathBuf>,
        allow: Option<Vec<String>>,
    ) -> PyResult<Aggregator> {
        let order: Order = by_name("order", order)?;
        let tree = match topology {
            "star" => false,
            "tree" => true,
            other => {
                let text = format!("topology is \"star\" or \"tree\", not {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let on_nonfinite: OnNonfinite = by_name("on_nonfinite", on_nonfinite)?;
        let on_loss: OnLoss = by_name("on_loss", on_loss)?;
        let deadline = Duration::from_millis(deadline_ms);
        let round_deadline =
            round_deadline.map(|value| seconds("round_deadline", value)).transpose()?;
        if round_deadline.is_some_and(|deadline| deadline.is_zero()) {
            return Err(PyValueError::new_err("round_deadline must be more than 0 seconds"));
        }
        let reconnect = reconnect.map(|value| seconds("reconnect", value)).transpose()?;
        let secret = blocking::check_secret(secret)?;
        let (certificate, key, client_authority) = (tls_cert, tls_key, tls_client_ca);
        let tls = ServerFiles { certificate, key, client_authority, allow }.read()?;
        let config = AggregatorConfig {
            clients,
            min_clients,
            rounds,
            order,
            tree,
            deadline,
            round_deadline,
            reconnect: reconnect.unwrap_or(deadline),
            updates: UpdatePolicy { on_nonfinite, clip_norm },
            on_loss,
            max_model_bytes: max_model_bytes.unwrap_or(limits::MAX_MODEL_BYTES),
            secret,
            insecure,
            tls,
            ..Default::default()
        };
        // Looks a name up.
        let bind = move || aggregator::Aggregator::bind(address, config);
        let aggregator = blocking::run(py, bind, || {})?.or_raise()?;
        Ok(Aggregator {
            address: aggregator.address(),
            rounds,
            canceller: aggregator.canceller(),
            progress,
            state: Mutex::new(State::Listening(Box::new(aggregator))),
            outcome: Mutex::default(),
        })
    }

    /// Where clients can dial: "HOST:PORT".
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// Names of the clients whose updates are in the newest mean, in the order of the names. Those below an edge
    /// have its name and a slash before theirs.
    #[getter]
    fn counted(&self) -> Vec<String> {
        self.outcome().counted
    }

    /// The clients whose updates are not in the newest mean: a dict of name to why not.
    #[getter]
    fn left_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let left_out = PyDict::new(py);
        self.outcome()
            .left_out
            .into_iter()
            .try_for_each(|(name, why)| left_out.set_item(name, why))?;
        Ok(left_out)
    }

    /// What was found in the updates of the newest round, in the order of the clients' names.
    ///
    /// A dict for each update that came whole, or was rejected while it came: "client", "round",
    /// "bytes", "elements", "nonfinite" (elements that are NaN or infinite), "first_nonfinite" (tensor
    /// and index of the first, or None), "norm" (None without clip_norm), "counted", "rejected"
    /// ("nonfinite", "too_large" or None), "clip_factor", "zeroed" and "weight" (examples times
    /// clip_factor, 0 if it was rejected). Of an update that was rejected while it came, only what had
    /// come by then is counted.
    #[getter]
    fn updates<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.outcome().updates.iter().map(|report| describe_update(py, report)).collect()
    }

    /// Wait until all clients have joined with the same model.
    ///
    /// With `model`, a Region, clients must have that layout, and it is sent to all of them before
    /// the first round. Without, the first client's layout counts.
    ///
    /// Returns the clients: a dict of name to number of examples, in the order of the names.
    ///
    /// Raises PeerError, which names the client, if one leaves or brings another model, or one that is
    /// too large, unless enough others may still come; ModelError if the model has a dtype without a mean; OutOfMemory.
    #[pyo3(signature = (model=None))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        model: Option<&Bound<'py, Region>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let aggregator = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Busy) {
                State::Listening(aggregator) => aggregator,
                other => {
                    let error = other.refusal("all clients are here already");
                    *state = other;
                    return Err(error);
                }
            }
        };
        let manifest = model.map(|model| Manifest::clone(model.get().manifest()));
        let wait = move || aggregator.gather(manifest).map(Box::new);
        let gathered = blocking::run(py, wait, || self.canceller.cancel());
        let session = gathered.and_then(OrRaise::or_raise).inspect_err(|_| {
            self.put_back(State::Ended(FAILED));
        })?;
        let clients = PyDict::new(py);
        for (name, _, examples) in session.clients() {
            clients.set_item(name, examples)?;
        }
        self.put_back(State::Session(session, 0));
        if let Some(model) = model {
            self.send(py, model)?;
        }
        Ok(clients)
    }

    /// Run one round: average the updates of all clients while they arrive, and send the mean to all.
    ///
    /// Returns the mean, weighted by the clients' numbers of examples: a Region with the dtypes of
    /// the model. It is yours to change.
    ///
    /// Raises PeerError, which names the client, if one dies, stalls or sends what does not match
    /// its checksums, or is rejected, and fewer than min_clients are left; OutOfMemory; FedlaneError if all rounds are done.
    fn round(&self, py: Python<'_>) -> PyResult<Region> {
        self.run_round(py, true)
    }

    /// Average the updates of all clients, and send nothing.
    ///
    /// For a step of your own between the two halves of a round: change the Region that this
    /// returns, or make another one, and send() it. Raises as round().
    fn collect(&self, py: Python<'_>) -> PyResult<Region> {
        self.run_round(py, false)
    }

    /// Send a model to all clients, and wait until each has confirmed it.
    ///
    /// `model` is a Region of the session's layout; its views are read-only meanwhile.
    ///
    /// Raises ModelError, before anything is sent, if the layout is another one, or if there is a
    /// clip_norm and the model has elements that are NaN or infinite: no norm can be measured from
    /// those. PeerError as round(), also if the model was changed while it was sent.
    fn send(&self, py: Python<'_>, model: &Bound<'_, Region>) -> PyResult<()> {
        let region = model.get();
        region.while_frozen(py, || self.send_frozen(py, region))
    }

    /// Tell the clients that training is done, also if not all rounds were run, and end the session.
    ///
    /// The end of the `with` block calls this after the last round.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let (session, _) = self.take_session()?;
        let finish = move || session.finish();
        let finished = blocking::run(py, finish, || self.canceller.cancel());
        self.put_back(State::Ended(FINISHED));
        finished?.or_raise()?;
        Ok(())
    }

    /// End the session and close every connection. A call that another thread waits in fails.
    ///
    /// Can be called twice.
    fn close(&self, py: Python<'_>) {
        self.end(py, "the aggregator was closed");
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
    ) -> PyResult<()> {
        let _ = (kind, trace);
        let done = match &*self.lock() {
            State::Session(_, done) => Some(*done),
            _ => None,
        };
        let finished = match (&error, done) {
            (None, Some(done)) if done == self.rounds => self.finish(py),
            _ => Ok(()),
        };
        let reason = match &error {
            Some(error) => blocking::describe(error),
            None => {
                let (done, rounds) = (done.unwrap_or(0), self.rounds);
                format!("the aggregator was closed after {done} of {rounds} rounds")
            }
        };
        self.end(py, &reason);
        finished
    }
}

/// One of the values of a setting.
pub fn by_name<T: Named>(what: &str, name: &str) -> PyResult<T> {
    T::named(name).ok_or_else(|| {
        let mut names =
            T::VALUES.iter().map(|(_, name, _)| format!("\"{name}\"")).collect::<Vec<_>>();
        let last = names.pop().unwrap_or_default();
        PyValueError::new_err(format!("{what} is {} or {last}, not {name:?}", names.join(", ")))
    })
}

fn seconds(what: &str, value: f64) -> PyResult<Duration> {
    let most = Duration::from_millis(limits::MAX_DEADLINE_MS);
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if duration <= most => Ok(duration),
        _ => {
            let text =
                format!("{what} is {value} seconds; it must be from 0 to {}", most.as_secs());
            Err(PyValueError::new_err(text))
        }
    }
}

fn describe_update<'py>(py: Python<'py>, report: &UpdateReport) -> PyResult<Bound<'py, PyDict>> {
    let found = &report.summary;
    let first = found.first_nonfinite.as_ref().map(|first| (first.tensor.as_str(), first.index));
    let (rejected, clip_factor, zeroed) = match report.verdict {
        Verdict::Counted { clip_factor, zeroed } => (None, clip_factor, zeroed),
        Verdict::Rejected(Rejection::Nonfinite) => (Some("nonfinite"), 1.0, false),
        Verdict::Rejected(Rejection::TooLarge) => (Some("too_large"), 1.0, false),
    };
    let update = PyDict::new(py);
    update.set_item("client", &report.client)?;
    update.set_item("round", report.round)?;
    update.set_item("bytes", found.bytes)?;
    update.set_item("elements", found.elements)?;
    update.set_item("nonfinite", found.nonfinite)?;
    update.set_item("first_nonfinite", first)?;
    update.set_item("norm", found.norm)?;
    update.set_item("counted", rejected.is_none())?;
    update.set_item("rejected", rejected)?;
    update.set_item("clip_factor", clip_factor)?;
    update.set_item("zeroed", zeroed)?;
    update.set_item("weight", report.weight)?;
    Ok(update)
}

/// The default that the signature above repeats.
const _: () = assert!(limits::DEADLINE.as_millis() == 30_000);
