//! The exchange, for `fedlane.flower`: models on offer, updates that wait, and their memory.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fedlane::exchange::{self, ExchangeConfig, LineConfig, MeanSums, Wanted};
use fedlane::manifest::{Dtype, Manifest};
use fedlane::pool::RegionPool;
use fedlane::region::Region;
use fedlane::tls::{ClientTls, ServerTls};
use fedlane::wire::hello::Secret;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::blocking;
use crate::dtypes;
use crate::errors::OrRaise;

/// Adds the classes and functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Pool>()?;
    module.add_class::<Memory>()?;
    module.add_class::<Parcel>()?;
    module.add_class::<Exchange>()?;
    module.add_class::<Route>()?;
    module.add_class::<Deposit>()?;
    module.add_class::<Mean>()?;
    module.add_function(wrap_pyfunction!(fetch, module)?)?;
    module.add_function(wrap_pyfunction!(call, module)?)?;
    module.add_function(wrap_pyfunction!(average, module)?)?;
    module.add_function(wrap_pyfunction!(header, module)?)?;
    module.add_function(wrap_pyfunction!(tensors, module)?)
}

fn secret(bytes: [u8; 32]) -> Secret {
    Secret::new(bytes)
}

fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{value} s is no time to wait: {error}")))
}

/// The safetensors header of tensors (name, dtype, shape) that follow each other without holes,
/// with a remark in its metadata.
#[pyfunction]
fn header<'py>(
    py: Python<'py>,
    tensors: Vec<(String, String, Vec<u64>)>,
    remark: String,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut described: Vec<(String, Dtype, Vec<u64>)> = Vec::new();
    for (name, dtype, shape) in tensors {
        described.push((name, dtypes::parse(&dtype)?, shape));
    }
    let manifest =
        Manifest::from_tensors(described, &[(REMARK.to_owned(), remark)].into()).or_raise()?;
    Ok(PyBytes::new(py, manifest.header()))
}

/// Where the metadata of a header holds the remark.
const REMARK: &str = "fedlane";

type Described = (String, &'static str, Vec<u64>);

/// The tensors of a header (name, dtype, shape) in the order of their bytes, and the remark.
#[pyfunction]
fn tensors(header: &[u8]) -> PyResult<(Vec<Described>, String)> {
    let manifest = Manifest::from_header(header).or_raise()?;
    let describe = |tensor: &fedlane::manifest::Tensor| {
        Ok((tensor.name.clone(), dtypes::name(tensor.dtype)?, tensor.shape.clone()))
    };
    let described: PyResult<Vec<Described>> = manifest.tensors().iter().map(describe).collect();
    Ok((described?, manifest.metadata(REMARK).unwrap_or_default()))
}

/// Warm memory: what was used and given back serves again.
#[pyclass(frozen)]
pub struct Pool(Arc<RegionPool>);

#[pymethods]
impl Pool {
    #[new]
    fn new() -> Pool {
        Pool(Arc::default())
    }

    /// Memory of `nbytes` bytes, which goes back to the pool when nothing refers to it. Nobody but
    /// `owner` has ever written to it; without one, any bytes may stand in it.
    #[pyo3(signature = (nbytes, owner=None))]
    fn take(&self, py: Python<'_>, nbytes: u64, owner: Option<&str>) -> PyResult<Memory> {
        let take = || match owner {
            Some(owner) => self.0.lend(nbytes, owner),
            None => self.0.take(nbytes),
        };
        let region = py.detach(take).or_raise()?;
        // Python maps the file itself.
        region.rest();
        Ok(Memory(Arc::new(Warm { region: Some(region), pool: self.0.clone() })))
    }

    /// Makes sure that `count` pieces of `nbytes` bytes are free here, while nobody waits for them.
    fn warm(&self, py: Python<'_>, nbytes: u64, count: usize) -> PyResult<()> {
        let sizes = std::iter::repeat_n(nbytes, count);
        py.detach(|| self.0.warm(sizes)).or_raise()
    }

    /// Gives free memory back to the host.
    fn trim(&self, py: Python<'_>) {
        py.detach(|| self.0.trim());
    }

    /// Bytes of memory that is free here, and not the host's.
    #[getter]
    fn free_bytes(&self) -> u64 {
        self.0.free_bytes()
    }
}

/// Memory of a pool.
#[pyclass(frozen, weakref)]
pub struct Memory(Arc<Warm>);

struct Warm {
    /// Given back to the pool when nobody needs it any more.
    region: Option<Region>,
    pool: Arc<RegionPool>,
}

#[pymethods]
impl Memory {
    /// The memory file; byte 0 is at position 0.
    fn fileno(&self) -> i32 {
        self.0.region.as_ref().map_or(-1, |region| region.file().as_raw_fd())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.region.as_ref().map_or(0, |region| region.bytes().len())
    }
}

impl Drop for Warm {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.pool.give_back(region);
        }
    }
}

/// A model or update in a memory file, with the checksums of its chunks.
#[pyclass(frozen, weakref)]
pub struct Parcel(Arc<exchange::Parcel>);

#[pymethods]
impl Parcel {
    /// The bytes of memory file `fd` from `position` on, which `header` describes.
    #[staticmethod]
    fn adopt(py: Python<'_>, header: &[u8], fd: i32, position: u64) -> PyResult<Parcel> {
        let manifest = Manifest::from_header(header).or_raise()?;
        let file = duplicate(fd)?;
        let parcel = py.detach(|| exchange::Parcel::adopt(manifest, file, position)).or_raise()?;
        Ok(Parcel(Arc::new(parcel)))
    }

    /// The bytes of `memory` from `position` on, which stays taken from its pool as long.
    #[staticmethod]
    fn within(py: Python<'_>, header: &[u8], memory: &Memory, position: u64) -> PyResult<Parcel> {
        let manifest = Manifest::from_header(header).or_raise()?;
        let (file, owner) = (duplicate(memory.fileno())?, memory.0.clone());
        let parcel = py.detach(|| exchange::Parcel::adopt(manifest, file, position)).or_raise()?;
        Ok(Parcel(Arc::new(parcel.keeping(owner))))
    }

    #[getter]
    fn header<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.manifest().header())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.manifest().data_bytes()
    }

    /// Where the first byte stands in the memory file.
    #[getter]
    fn position(&self) -> u64 {
        self.0.region().position()
    }

    /// The memory file.
    fn fileno(&self) -> i32 {
        self.0.region().file().as_raw_fd()
    }
}

fn duplicate(fd: i32) -> PyResult<OwnedFd> {
    crate::descriptor::duplicate(fd).map_err(|error| {
        PyValueError::new_err(format!("file descriptor {fd} cannot be used: {error}"))
    })
}

/// A listening port where models are offered and updates are awaited.
#[pyclass(frozen)]
pub struct Exchange {
    exchange: Arc<exchange::Exchange>,
    certificate: Vec<u8>,
}

#[pymethods]
impl Exchange {
    /// Listens on `host` and `port`; port 0 takes a free one.
    #[new]
    #[pyo3(signature = (host, port, *, deadline_s = 30.0, streams = None, max_update_bytes = None, tls = false))]
    fn new(
        host: &str,
        port: u16,
        deadline_s: f64,
        streams: Option<usize>,
        max_update_bytes: Option<u64>,
        tls: bool,
    ) -> PyResult<Exchange> {
        let mut config = ExchangeConfig { deadline: seconds(deadline_s)?, ..Default::default() };
        config.streams = streams.unwrap_or(config.streams);
        config.max_update_bytes = max_update_bytes.unwrap_or(config.max_update_bytes);
        let mut certificate = Vec::new();
        if tls {
            let (own, shown) = ServerTls::self_signed().or_raise()?;
            (config.tls, certificate) = (Some(own), shown);
        }
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let exchange = exchange::Exchange::listen(format!("{host}:{port}"), config).or_raise()?;
        Ok(Exchange { exchange: Arc::new(exchange), certificate })
    }

    /// What clients know it by, with TLS; nothing without.
    #[getter]
    fn certificate<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.certificate)
    }

    #[getter]
    fn port(&self) -> u16 {
        self.exchange.address().port()
    }

    /// The pool that collected updates and means stand in.
    #[getter]
    fn pool(&self) -> Pool {
        Pool(self.exchange.pool().clone())
    }

    fn offer(&self, py: Python<'_>, key: [u8; 32], model: &Parcel) {
        py.detach(|| self.exchange.offer(secret(key), model.0.clone()));
    }

    fn expect(&self, py: Python<'_>, key: [u8; 32]) {
        py.detach(|| self.exchange.expect(secret(key)));
    }

    fn release(&self, py: Python<'_>, key: [u8; 32]) {
        py.detach(|| self.exchange.release(secret(key)));
    }

    fn has_met(&self, name: &str) -> bool {
        self.exchange.has_met(name)
    }

    /// The header of the update that waits under `key`; waits for its client.
    fn header<'py>(
        &self,
        py: Python<'py>,
        key: [u8; 32],
        patience_s: f64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (exchange, patience) = (self.exchange.clone(), seconds(patience_s)?);
        let manifest =
            blocking::run(py, move || exchange.await_update(secret(key), patience), || {})?;
        Ok(PyBytes::new(py, manifest.or_raise()?.header()))
    }

    fn collect(&self, py: Python<'_>, key: [u8; 32], patience_s: f64) -> PyResult<Parcel> {
        let (exchange, patience) = (self.exchange.clone(), seconds(patience_s)?);
        let parcel = blocking::run(py, move || exchange.collect(secret(key), patience), || {})?;
        Ok(Parcel(Arc::new(parcel.or_raise()?)))
    }

    /// Adds updates (key, weight), in this order, to the sums of a mean. An error loses the sums.
    fn add(
        &self,
        py: Python<'_>,
        mean: &Mean,
        updates: Vec<([u8; 32], f64)>,
        patience_s: f64,
    ) -> PyResult<()> {
        let (exchange, patience) = (self.exchange.clone(), seconds(patience_s)?);
        let (wanted, sums) = (wanted(updates), mean.take());
        let added = blocking::run(py, move || exchange.add(sums, &wanted, patience), || {})?;
        *mean.sums() = Some(added.or_raise()?);
        Ok(())
    }

    /// The mean of all updates that were added.
    fn finish(&self, py: Python<'_>, mean: &Mean) -> PyResult<Parcel> {
        let exchange = self.exchange.clone();
        let sums = mean.take().ok_or_else(|| PyValueError::new_err("nothing was added"))?;
        let parcel = blocking::run(py, move || exchange.finish(sums), || {})?;
        Ok(Parcel(Arc::new(parcel.or_raise()?)))
    }

    /// The mean of updates (key, weight), in this order.
    fn average(
        &self,
        py: Python<'_>,
        updates: Vec<([u8; 32], f64)>,
        patience_s: f64,
    ) -> PyResult<Parcel> {
        let (exchange, patience) = (self.exchange.clone(), seconds(patience_s)?);
        let wanted = wanted(updates);
        let parcel = blocking::run(py, move || exchange.average(&wanted, patience), || {})?;
        Ok(Parcel(Arc::new(parcel.or_raise()?)))
    }
}

fn wanted(updates: Vec<([u8; 32], f64)>) -> Vec<Wanted> {
    let want = |(key, weight)| Wanted { secret: secret(key), weight };
    updates.into_iter().map(want).collect()
}

/// The sums of a mean that more updates may come to.
#[pyclass(frozen)]
#[derive(Default)]
pub struct Mean(Mutex<Option<MeanSums>>);

impl Mean {
    fn sums(&self) -> MutexGuard<'_, Option<MeanSums>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<MeanSums> {
        self.sums().take()
    }
}

#[pymethods]
impl Mean {
    #[new]
    fn new() -> Mean {
        Mean::default()
    }
}

/// How a client reaches an exchange, and under which name.
#[pyclass(frozen)]
pub struct Route(LineConfig);

#[pymethods]
impl Route {
    /// `certificate` is that of the exchange, if it has TLS; else there is none, or an empty one.
    #[new]
    #[pyo3(signature = (address, name, *, deadline_s, certificate = None))]
    fn new(
        address: String,
        name: String,
        deadline_s: f64,
        certificate: Option<Vec<u8>>,
    ) -> PyResult<Route> {
        let pinned = certificate.filter(|certificate| !certificate.is_empty());
        let tls = pinned.map(|pinned| ClientTls::pinned(&pinned).or_raise()).transpose()?;
        let deadline = seconds(deadline_s)?;
        Ok(Route(LineConfig { deadline, tls, ..LineConfig::new(address, name) }))
    }
}

/// Takes the model that is offered under `key`, of one `owner` if that is said: its memory is then not
/// zeroed before it is lent to him again.
#[pyfunction]
#[pyo3(signature = (route, key, pool, owner=None))]
fn fetch(
    py: Python<'_>,
    route: &Route,
    key: [u8; 32],
    pool: &Pool,
    owner: Option<String>,
) -> PyResult<Parcel> {
    let line = route.0.clone();
    let pool = pool.0.clone();
    let fetch = move || match owner {
        Some(owner) => exchange::fetch_for(&line, secret(key), &pool, &owner),
        None => exchange::fetch(&line, secret(key), &pool),
    };
    let fetched = blocking::run(py, fetch, || {})?;
    Ok(Parcel(Arc::new(fetched.or_raise()?)))
}

/// The mean of updates that are on this host, in this order, in memory of `pool`.
#[pyfunction]
fn average(
    py: Python<'_>,
    updates: Vec<(PyRef<'_, Parcel>, f64)>,
    pool: &Pool,
) -> PyResult<Parcel> {
    let updates: Vec<_> =
        updates.iter().map(|(update, weight)| (update.0.clone(), *weight)).collect();
    let pool = pool.0.clone();
    let mean = blocking::run(py, move || exchange::average(&updates, &pool), || {})?;
    Ok(Parcel(Arc::new(mean.or_raise()?)))
}

/// Asks whether the exchange can be reached and knows `key`.
#[pyfunction]
fn call(py: Python<'_>, route: &Route, key: [u8; 32]) -> PyResult<()> {
    let line = route.0.clone();
    blocking::run(py, move || exchange::call(&line, secret(key)), || {})?.or_raise()
}

/// An update that waits until the exchange releases it.
#[pyclass(frozen)]
pub struct Deposit(exchange::Deposit);

#[pymethods]
impl Deposit {
    #[new]
    fn new(route: &Route, key: [u8; 32], update: &Parcel) -> PyResult<Deposit> {
        let deposit = exchange::Deposit::leave(route.0.clone(), secret(key), update.0.clone())?;
        Ok(Deposit(deposit))
    }

    #[getter]
    fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Why it was given up, if it was.
    #[getter]
    fn failure(&self) -> Option<String> {
        self.0.failure()
    }
}
