//! `fedlane.Ring`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fedlane::client::{Canceller, ClientConfig};
use fedlane::control::Congestion;
use fedlane::error::ClientError;
use fedlane::manifest::Manifest;
use fedlane::paths::ReceiveKind;
use fedlane::ring::{Coordinator, Joined, Member, RingConfig, RingMember, Stopper, join_any};
use fedlane::source::region::RegionSource;
use fedlane::tls::{ClientTls, ServerTls};
use fedlane::topology::Shape;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::aggregator::by_name;
use crate::blocking;
use crate::door::{ClientFiles, ServerFiles};
use crate::errors::{FedlaneError, OrRaise};
use crate::region::Region;

/// A ring all-reduce: hosts average their models among themselves, and all get the same mean.
///
/// Ring(address, *, name, model, ranks=None, min_ranks=None, topology="ring", on_nonfinite="reject",
/// deadline_ms=30000, secret=None, insecure=False, advertise=None, tls_ca=None, tls_name=None, tls_cert=None,
/// tls_key=None, tls_client_ca=None) joins the ring that is kept together at "HOST:PORT". One of the hosts gives
/// `ranks`, the number of all hosts, 2 to 64: it listens there (port 0 takes a free one, see `ring.address`).
/// The models do not pass through it: each host sends to the next one, and all send and receive at once.
/// With its `topology="chain"` sums go down a line of hosts instead, and the mean comes back the same way.
/// `name` is unique in the ring. `model`, a Region, says the layout, which is the same on all hosts.
///
///     with fedlane.Ring("host-a:7733", name="b", model=region) as ring:
///         for step in range(100):
///             train(region)                              # changes it in place
///             region = ring.all_reduce(region, weight=examples)
///
/// A host that is silent for `deadline_ms` milliseconds, or whose connection breaks, ends the ring for
/// all with the same PeerError, which names it. With `min_ranks` (of the host that listens) the others go
/// on without it as long as so many are left, exactly: the all-reduce begins again. A model with elements that
/// are NaN or infinite is left out in the same way; with `on_nonfinite="zero"` (of the host that listens) those
/// elements count as zero, and with "keep" as they are.
///
/// Where other machines can reach it, the host that listens takes a `secret`, 32 bytes that all know, or
/// insecure=True, or TLS: it has `tls_cert` and `tls_key`, PEM files (str or os.PathLike) with its certificate and the
/// key, and all have `tls_ca`, the authority of that, and `tls_name`, if the name in it is not the host that is
/// dialled. Then everything is encrypted, between neighbours too. With its `tls_client_ca` each host shows
/// `tls_cert` and `tls_key` of its own, with its name in it. Each host also listens on a free port of the address that it
/// dials from, for its neighbour; behind NAT, `advertise` is the HOST:PORT that reaches it.
///
/// Raises PeerError if no ring is there or it refuses this host; ValueError for numbers out of bounds;
/// FedlaneError if the address cannot be listened on.
#[pyclass(frozen, weakref, module = "fedlane", name = "Ring")]
pub struct Ring {
    address: String,
    manifest: Arc<Manifest>,
    canceller: Canceller,
    keeper: Option<Stopper>,
    state: Mutex<State>,
    /// Memory of the last two means: nobody waits for new memory where one of them is free again.
    means: Mutex<Vec<Arc<fedlane::region::Region>>>,
    members: Mutex<Vec<(String, f64)>>,
}

enum State {
    Idle(Box<Member>),
    /// A call runs, maybe on another thread.
    Busy,
    /// Why nothing can be done any more.
    Ended(&'static str),
}

const CLOSED: &str = "this ring was closed";
const FAILED: &str = "the ring has ended with an error before";
const STOPPED: &str = "the host was stopped";

/// Means that are kept: one that the program still uses, and one for the next.
const KEPT_MEANS: usize = 2;

impl Ring {
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

    fn take(&self) -> PyResult<Box<Member>> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Busy) {
            State::Idle(member) => Ok(member),
            State::Busy => Err(FedlaneError::new_err("another thread is in a call of this ring")),
            State::Ended(why) => {
                *state = State::Ended(why);
                Err(FedlaneError::new_err(why))
            }
        }
    }

    /// Memory of an earlier mean that nobody uses any more.
    fn free_mean(&self) -> Option<fedlane::region::Region> {
        let mut means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        let place = means.iter().position(|mean| Arc::strong_count(mean) == 1)?;
        Arc::into_inner(means.swap_remove(place))
    }

    fn keep(&self, mean: &Arc<fedlane::region::Region>) {
        let mut means = self.means.lock().unwrap_or_else(PoisonError::into_inner);
        means.push(mean.clone());
        let surplus = means.len().saturating_sub(KEPT_MEANS);
        means.drain(..surplus);
    }

    /// Ends this host's part; `reason` tells the others why.
    fn end(&self, py: Python<'_>, reason: &str) {
        let state = std::mem::replace(&mut *self.lock(), State::Ended(CLOSED));
        py.detach(move || {
            if let Some(keeper) = &self.keeper {
                keeper.stop();
            }
            if !matches!(state, State::Ended(_)) {
                self.canceller.cancel(reason);
            }
            // Joins threads.
            drop(state);
        });
    }
}

/// Keeps a ring together on a thread of its own, until it is stopped.
fn keep_together(address: &str, config: RingConfig) -> PyResult<(String, Stopper)> {
    let mut coordinator = Coordinator::bind(address, config).or_raise()?;
    let (address, stopper) = (coordinator.address().to_string(), coordinator.stopper());
    std::thread::Builder::new().name("ring".into()).spawn(move || {
        let mut ended = coordinator.gather();
        while ended.is_ok() {
            ended = coordinator.run_round().map(drop);
        }
        // The members have heard why; one that has not gets to know it is over.
        coordinator.give_up("the host that keeps the ring together has left it");
    })?;
    Ok((address, stopper))
}

#[pymethods]
impl Ring {
    #[new]
    #[pyo3(signature = (address, *, name, model, ranks=None, min_ranks=None, deadline_ms=30_000, secret=None, insecure=false, advertise=None, topology=None, on_nonfinite=None, tls_ca=None, tls_name=None, tls_cert=None, tls_key=None, tls_client_ca=None))]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    fn new(
        py: Python<'_>,
        address: String,
        name: String,
        model: Py<Region>,
        ranks: Option<usize>,
        min_ranks: Option<usize>,
        deadline_ms: u64,
        secret: Option<[u8; 32]>,
        insecure: bool,
        advertise: Option<String>,
        topology: Option<&str>,
        on_nonfinite: Option<&str>,
        tls_ca: Option<PathBuf>,
        tls_name: Option<String>,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        tls_client_ca: Option<PathBuf>,
    ) -> PyResult<Ring> {
        let deadline = Duration::from_millis(blocking::check_deadline(deadline_ms)?);
        let secret = blocking::check_secret(secret)?;
        let says = min_ranks.is_some() || insecure || topology.is_some() || on_nonfinite.is_some();
        if ranks.is_none() && (says || tls_client_ca.is_some()) {
            let text = "min_ranks, topology, on_nonfinite, insecure and tls_client_ca are for the \
                        host that gives ranks, and listens";
            return Err(PyValueError::new_err(text));
        }
        let files = Files { tls_ca, tls_name, tls_cert, tls_key, tls_client_ca };
        let (server, tls) = files.read(ranks.is_some())?;
        let shape = parse_topology(topology.unwrap_or("ring"))?;
        let on_nonfinite = by_name("on_nonfinite", on_nonfinite.unwrap_or("reject"))?;
        let (address, keeper) = match ranks {
            None => (address, None),
            Some(ranks) => {
                let config = RingConfig {
                    shape,
                    on_nonfinite,
                    ranks,
                    min_ranks,
                    rounds: u32::MAX,
                    deadline,
                    secret,
                    tls: server,
                    insecure,
                    ..RingConfig::default()
                };
                // Looks a name up.
                let bound = blocking::run(py, move || keep_together(&address, config), || {})??;
                (bound.0, Some(bound.1))
            }
        };
        let client = ClientConfig {
            name,
            examples: 1.0,
            secret,
            tls,
            send_path: None,
            receive_path: ReceiveKind::default(),
            congestion: Congestion::Auto,
            deadline,
            reconnect: Some(Duration::ZERO),
        };
        let manifest = model.get().manifest().clone();
        let canceller = Canceller::default();
        let (inside, layout, at) = (canceller.clone(), manifest.clone(), dialled(&address));
        let config = RingMember { client, advertise };
        let join = move || join_any(at, config, &layout, &inside);
        let stop = || keeper.iter().for_each(Stopper::stop);
        let joined =
            blocking::run(py, join, || canceller.cancel(STOPPED)).and_then(OrRaise::or_raise);
        let member = match joined.inspect_err(|_| stop())? {
            Joined::Ring(member) => member,
            Joined::Star(client) => {
                py.detach(move || drop(client));
                let text = format!("what is at {address} is an aggregator and no ring");
                return Err(FedlaneError::new_err(text));
            }
        };
        Ok(Ring {
            address,
            manifest,
            canceller,
            keeper,
            state: Mutex::new(State::Idle(member)),
            means: Mutex::default(),
            members: Mutex::default(),
        })
    }

    /// Where the ring is kept together: "HOST:PORT".
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Whose models are in the newest mean: a dict of name to weight, in the order of the ring. Empty
    /// before the first.
    #[getter]
    fn members<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let members = PyDict::new(py);
        for (name, weight) in self.members.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            members.set_item(name, weight)?;
        }
        Ok(members)
    }

    /// Average `region` with those of all other hosts, weighted by `weight`, and wait until all have the mean.
    ///
    /// `region` is a Region of the layout joined with; it is not changed, and its views are read-only
    /// meanwhile. `weight`, 0 or more, is usually a number of training examples.
    ///
    /// Returns the mean: another Region, with the same bits on every host, yours to change. Its memory
    /// is used again for a later mean if nothing refers to it or its views by then; so a host holds its
    /// model and at most two means.
    ///
    /// Raises ModelError, before anything is sent, if the layout is another one; PeerError, which names
    /// the host that was lost, if too few are left; OutOfMemory. After a PeerError the ring has ended.
    #[pyo3(signature = (region, weight=1.0))]
    fn all_reduce(&self, py: Python<'_>, region: Py<Region>, weight: f64) -> PyResult<Region> {
        let region = region.get();
        if !weight.is_finite() || weight < 0.0 {
            return Err(PyValueError::new_err(format!(
                "weight: {weight} is not a finite number of 0 or more"
            )));
        }
        if let Some(difference) = self.manifest.first_difference(region.manifest()) {
            return Err(ClientError::Model { difference }).or_raise();
        }
        let mut member = self.take()?;
        let (source, manifest, free) =
            (region.memory().clone(), self.manifest.clone(), self.free_mean());
        let work = move || {
            let mut mean = match free {
                Some(mean) => mean,
                None => fedlane::region::Region::new(manifest.data_bytes())?,
            };
            let source = RegionSource::new(&manifest, &source, 0, Vec::new());
            let outcome = member.all_reduce(&source, weight, &mut mean)?;
            Ok::<_, ClientError>((member, mean, outcome))
        };
        let reduced = region.while_frozen(py, || {
            blocking::run(py, work, || self.canceller.cancel(STOPPED)).and_then(OrRaise::or_raise)
        });
        let (member, mean, outcome) =
            reduced.inspect_err(|_| self.put_back(State::Ended(FAILED)))?;
        self.put_back(State::Idle(member));
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) = outcome.ranks;
        let mean = Arc::new(mean);
        self.keep(&mean);
        Ok(Region::wrap(mean, self.manifest.clone()))
    }

    /// Leave the ring and close every connection. A call that another thread waits in fails.
    ///
    /// Can be called twice.
    fn close(&self, py: Python<'_>) {
        self.end(py, "the ring was closed");
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

/// Certificates, as the arguments name their files.
struct Files {
    tls_ca: Option<PathBuf>,
    tls_name: Option<String>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
}

impl Files {
    /// What a host shows to those who join, if it listens, and what it does when it joins itself.
    fn read(self, listens: bool) -> PyResult<(Option<ServerTls>, Option<ClientTls>)> {
        let server = ServerFiles {
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            client_authority: self.tls_client_ca.clone(),
            allow: None,
        };
        let server = if listens { server.read()? } else { None };
        let shows = !listens || self.tls_client_ca.is_some();
        let client = ClientFiles {
            authority: self.tls_ca,
            name: self.tls_name,
            certificate: self.tls_cert.filter(|_| shows),
            key: self.tls_key.filter(|_| shows),
        };
        match (server, client.read()?) {
            (Some(_), None) => Err(PyValueError::new_err(
                "the host that listens joins too: it takes tls_ca, the authority of its certificate",
            )),
            read => Ok(read),
        }
    }
}

fn parse_topology(name: &str) -> PyResult<Shape> {
    match name {
        "ring" => Ok(Shape::Ring),
        "chain" => Ok(Shape::Chain),
        other => {
            let text = format!("topology is \"ring\" or \"chain\", not {other:?}");
            Err(PyValueError::new_err(text))
        }
    }
}

/// Where the host that listens joins its own ring: all addresses are no address to dial.
fn dialled(address: &str) -> String {
    let wild = [("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")];
    let own =
        wild.iter().find_map(|(all, own)| Some(format!("{own}{}", address.strip_prefix(all)?)));
    own.unwrap_or_else(|| address.to_owned())
}
