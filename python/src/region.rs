//! `fedlane.Region`: a model in shared memory.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use fedlane::error::RegionError;
use fedlane::manifest::{Dtype, Manifest, Tensor};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dtypes;
use crate::errors::OrRaise;

/// A model in shared memory.
#[pyclass(frozen, weakref, module = "fedlane")]
pub struct Region {
    memory: Arc<fedlane::region::Region>,
    manifest: Arc<Manifest>,
}

impl Region {
    /// Zeroed memory for a model of this layout.
    pub fn from_manifest(manifest: Arc<Manifest>) -> Result<Region, RegionError> {
        let memory = fedlane::region::Region::new(manifest.data_bytes())?;
        Ok(Region::wrap(Arc::new(memory), manifest))
    }

    /// Memory that holds a model of this layout already.
    pub fn wrap(memory: Arc<fedlane::region::Region>, manifest: Arc<Manifest>) -> Region {
        Region { memory, manifest }
    }

    /// The memory. Python's views write to it unless they are frozen.
    pub fn memory(&self) -> &Arc<fedlane::region::Region> {
        &self.memory
    }

    /// What the bytes mean.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    fn tensor(&self, name: &str) -> PyResult<&Tensor> {
        let found = self.manifest.tensors().iter().find(|tensor| tensor.name == name);
        found.ok_or_else(|| {
            PyKeyError::new_err(format!("there is no tensor {name:?}; see Region.names"))
        })
    }
}

#[pymethods]
impl Region {
    #[new]
    fn new(py: Python<'_>, tensors: &Bound<'_, PyDict>) -> PyResult<Region> {
        let mut described: Vec<(String, Dtype, Vec<u64>)> = Vec::new();
        for (name, description) in tensors {
            let (dtype, shape): (String, Vec<u64>) = description.extract()?;
            described.push((name.extract()?, dtypes::parse(&dtype)?, shape));
        }
        let manifest = Manifest::from_tensors(described, &BTreeMap::new()).or_raise()?;
        py.detach(|| Region::from_manifest(Arc::new(manifest))).or_raise()
    }

    #[getter]
    fn names(&self) -> Vec<&str> {
        self.manifest.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
    }

    #[getter]
    fn bytes(&self) -> u64 {
        self.manifest.data_bytes()
    }

    fn dtype(&self, name: &str) -> PyResult<&'static str> {
        dtypes::name(self.tensor(name)?.dtype)
    }

    fn shape<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tensor(name)?.shape)
    }

    fn fileno(&self) -> i32 {
        self.memory.file().as_raw_fd()
    }
}
