//! `fedlane.Edge`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fedlane::aggregator::AggregatorConfig;
use fedlane::client::ClientConfig;
use fedlane::control::Congestion;
use fedlane::edge::{self, EdgeCanceller, EdgeConfig, EdgeStep};
use fedlane::error::AggregatorError;
use fedlane::paths::ReceiveKind;
use fedlane::topology::tree::Leaf;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::aggregator::by_name;
use crate::blocking;
use crate::door::{ClientFiles, ServerFiles};
use crate::errors::{FedlaneError, OrRaise};

/// An aggregator for its clients that is itself a client of the aggregator above it.
///
/// Edge(address, above, *, clients, name, local_rounds=1, min_clients=None, order="arrival",
/// deadline_ms=30000, secret=None, above_secret=None, insecure=False, tls_cert=None, tls_key=None,
/// above_tls_ca=None) listens at once on `address`, "HOST:PORT" (port 0 takes a free one), for its `clients`,
/// which may be edges too. `above` is where the aggregator above it listens, one with topology="tree" or another edge;
/// `name` is unique there.
///
///     fedlane.Edge("0.0.0.0:7734", "top:7733", clients=4, name="ward-a", secret=key).run()
///
/// In each round it averages its clients and sends one sum up, and the mean of all clients comes down. With
/// `local_rounds` it runs so many rounds with its clients for each one above. `order` is the same in the
/// whole tree; with "client" the mean has the bits of one aggregator with all clients, and updates wait here,
/// which takes memory for all of them. `min_clients`, `deadline_ms`, `secret`, `insecure`, `tls_cert` and
/// `tls_key` are those of an Aggregator. `above_secret` is the secret of the aggregator above, if it is another
/// one; `above_tls_ca` the PEM file with the authority of its certificate.
///
/// Raises ValueError for numbers out of bounds; FedlaneError if the address cannot be listened on, or others
/// could reach it, or a TLS file cannot be used.
#[pyclass(frozen, module = "fedlane", name = "Edge")]
pub struct Edge {
    address: SocketAddr,
    above: String,
    canceller: EdgeCanceller,
    edge: Mutex<Option<edge::Edge>>,
}

/// A round of the aggregator above.
struct Round {
    round: u32,
    counted: bool,
    leaves: Vec<Leaf>,
}

fn run(edge: edge::Edge, above: &str) -> Result<Vec<Round>, AggregatorError> {
    let mut edge = edge.join(above)?;
    let mut rounds = Vec::new();
    loop {
        match edge.step()? {
            EdgeStep::Round { round, counted, leaves } => {
                rounds.push(Round { round, counted, leaves });
            }
            EdgeStep::Done => return Ok(rounds),
            EdgeStep::Local { .. } | EdgeStep::Model { .. } => {}
        }
    }
}

#[pymethods]
impl Edge {
    #[new]
    #[pyo3(signature = (address, above, *, clients, name, local_rounds=1, min_clients=None, order="arrival", deadline_ms=30_000, secret=None, above_secret=None, insecure=false, tls_cert=None, tls_key=None, above_tls_ca=None))]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    fn new(
        py: Python<'_>,
        address: String,
        above: String,
        clients: usize,
        name: String,
        local_rounds: u32,
        min_clients: Option<usize>,
        order: &str,
        deadline_ms: u64,
        secret: Option<[u8; 32]>,
        above_secret: Option<[u8; 32]>,
        insecure: bool,
        tls_cert: Option<PathBuf>,
        tls_key: Option<PathBuf>,
        above_tls_ca: Option<PathBuf>,
    ) -> PyResult<Edge> {
        let order = by_name("order", order)?;
        let deadline = Duration::from_millis(blocking::check_deadline(deadline_ms)?);
        let (certificate, key) = (tls_cert, tls_key);
        let tls = ServerFiles { certificate, key, client_authority: None, allow: None }.read()?;
        let above_files =
            ClientFiles { authority: above_tls_ca, name: None, certificate: None, key: None };
        let client = ClientConfig {
            name,
            examples: 0.0,
            secret: blocking::check_secret(above_secret.or(secret))?,
            tls: above_files.read()?,
            send_path: None,
            receive_path: ReceiveKind::default(),
            congestion: Congestion::Auto,
            deadline,
            reconnect: None,
        };
        let secret = blocking::check_secret(secret)?;
        let (reconnect, below) = (deadline, AggregatorConfig::default());
        let below = AggregatorConfig {
            clients,
            min_clients,
            order,
            deadline,
            reconnect,
            secret,
            insecure,
            tls,
            ..below
        };
        let config = EdgeConfig { above: client, below, local_rounds };
        // Looks a name up.
        let bind = move || edge::Edge::bind(address, config);
        let edge = blocking::run(py, bind, || {})?.or_raise()?;
        let (address, canceller) = (edge.address(), edge.canceller());
        Ok(Edge { address, above, canceller, edge: Mutex::new(Some(edge)) })
    }

    /// Where clients can dial: "HOST:PORT".
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// Wait for the clients, join the aggregator above, and take part until all rounds are done.
    ///
    /// Returns a dict for each round of the aggregator above: "round", "counted" (whether the sum of this edge
    /// is in its mean), "clients" (names of those whose updates are in the sum) and "left_out" (a dict of the
    /// others to why).
    ///
    /// Raises PeerError, which names the client, if fewer than min_clients are left, and if the aggregator
    /// above ends; everybody hears it. OutOfMemory; FedlaneError the second time.
    fn run<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let edge = self.edge.lock().unwrap_or_else(PoisonError::into_inner).take();
        let edge = edge.ok_or_else(|| FedlaneError::new_err("this edge has run already"))?;
        let above = self.above.clone();
        let canceller = self.canceller.clone();
        let cancel = move || canceller.cancel("it was interrupted");
        let rounds = blocking::run(py, move || run(edge, &above), cancel)?.or_raise()?;
        rounds.iter().map(|round| round.describe(py)).collect()
    }
}

impl Round {
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counted, left_out) = (PyDict::new(py), PyDict::new(py));
        counted.set_item("round", self.round)?;
        counted.set_item("counted", self.counted)?;
        let in_sum = self.leaves.iter().filter(|leaf| leaf.left_out.is_none());
        let names: Vec<&str> = in_sum.map(|leaf| leaf.name.as_str()).collect();
        counted.set_item("clients", names)?;
        for leaf in &self.leaves {
            if let Some(why) = &leaf.left_out {
                left_out.set_item(&leaf.name, why)?;
            }
        }
        counted.set_item("left_out", left_out)?;
        Ok(counted)
    }
}
