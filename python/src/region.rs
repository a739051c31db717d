//! `fedlane.Region`: a model in shared memory.
//!
//! While its bytes are sent or saved a region is *frozen*: new views are read-only, and NumPy views
//! that exist are made read-only and get their state back after. What cannot be taken back
//! (PyTorch tensors, memoryviews, slices of NumPy views, other processes' mappings) can still
//! write; checksums made when the region was frozen then make the transfer fail.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fedlane::error::RegionError;
use fedlane::manifest::{Dtype, Manifest, Tensor};
use pyo3::exceptions::{PyBufferError, PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBytes, PyDict, PyMapping, PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference,
};

use crate::dtypes;
use crate::errors::OrRaise;
use crate::views::{self, DlpackTensor};

/// A model in shared memory: named tensors, one after the other, in one memory file.
///
/// Region(tensors, metadata=None) makes a region of zeros. `tensors` maps each name to
/// (dtype, shape): the dtype in NumPy's spelling ("float32", "bfloat16", "float8_e4m3fn") or in that
/// of safetensors ("F32", "BF16", "F8_E4M3"), the shape as a sequence of int, () for a scalar.
/// `metadata` maps str to str and goes into files that are saved.
///
/// Tensors are laid out as the safetensors library does it: dtypes by size, largest first, then by
/// name, whatever the order of the mapping. So processes with the same tensors have the same
/// layout, and every tensor starts at a multiple of its element's size.
///
/// A region supports the buffer protocol: memoryview(region) is its whole data, uint8, one
/// dimension, `region.bytes` long.
///
/// While a region is sent or saved, its NumPy views are read-only; after that they are as before. Views
/// that cannot be made read-only (slices of views, torch tensors, memoryviews, DLPack exports,
/// mappings of its file in other processes) must not be written to meanwhile. If it happens all
/// the same, the transfer fails with an error; it never delivers a wrong model.
///
/// Raises ModelError for unknown dtypes, bad names or shapes, and models beyond fedlane's limits;
/// OutOfMemory, before anything is taken, if the host or its cgroup lacks the memory.
#[pyclass(frozen, weakref, module = "fedlane")]
pub struct Region {
    memory: Arc<fedlane::region::Region>,
    manifest: Arc<Manifest>,
    places: HashMap<String, usize>,
    views: Mutex<Views>,
}

/// NumPy views, by weak references, and whether they may write.
#[derive(Default)]
struct Views {
    /// How many transfers read the memory now.
    frozen: usize,
    all: Vec<Py<PyWeakrefReference>>,
    /// Those that get the right to write back.
    revoked: Vec<Py<PyWeakrefReference>>,
    /// At this length `all` is cleared of views that are gone.
    sweep_length: usize,
}

impl Region {
    /// Zeroed memory for a model of this layout.
    pub fn from_manifest(manifest: Arc<Manifest>) -> Result<Region, RegionError> {
        let memory = fedlane::region::Region::new(manifest.data_bytes())?;
        Ok(Region::wrap(Arc::new(memory), manifest))
    }

    /// Memory that holds a model of this layout already.
    pub fn wrap(memory: Arc<fedlane::region::Region>, manifest: Arc<Manifest>) -> Region {
        let names = manifest.tensors().iter().map(|tensor| tensor.name.clone());
        let places = names.zip(0..).collect();
        Region { memory, manifest, places, views: Mutex::default() }
    }

    /// The memory. Python's views write to it unless they are frozen.
    pub fn memory(&self) -> &Arc<fedlane::region::Region> {
        &self.memory
    }

    /// What the bytes mean.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Whether the memory is being sent or saved.
    pub fn is_frozen(&self) -> bool {
        self.lock().frozen > 0
    }

    /// Runs `work` with the region frozen.
    pub fn while_frozen<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        let result = self.freeze(py).and_then(|()| work());
        self.thaw(py)?;
        result
    }

    fn freeze(&self, py: Python<'_>) -> PyResult<()> {
        let views: Vec<_> = {
            let mut views = self.lock();
            views.frozen += 1;
            views.all.iter().map(|view| view.clone_ref(py)).collect()
        };
        for weak in views {
            let Some(view) = weak.bind(py).upgrade() else { continue };
            let flags = view.getattr("flags")?;
            if flags.getattr("writeable")?.is_truthy()? {
                flags.setattr("writeable", false)?;
                self.lock().revoked.push(weak);
            }
        }
        Ok(())
    }

    fn thaw(&self, py: Python<'_>) -> PyResult<()> {
        let revoked = {
            let mut views = self.lock();
            views.frozen -= 1;
            if views.frozen == 0 { std::mem::take(&mut views.revoked) } else { Vec::new() }
        };
        for weak in revoked {
            if let Some(view) = weak.bind(py).upgrade() {
                view.getattr("flags")?.setattr("writeable", true)?;
            }
        }
        Ok(())
    }

    /// Python runs no code of its own while this is held.
    fn lock(&self) -> MutexGuard<'_, Views> {
        self.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn track(&self, view: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = view.py();
        let weak = PyWeakrefReference::new(view)?.unbind();
        let mut views = self.lock();
        if views.all.len() >= views.sweep_length {
            views.all.retain(|weak| weak.bind(py).upgrade().is_some());
            views.sweep_length = 2 * views.all.len() + 16;
        }
        if views.frozen > 0 {
            views.revoked.push(weak.clone_ref(py));
        }
        views.all.push(weak);
        Ok(())
    }

    fn tensor(&self, name: &str) -> PyResult<&Tensor> {
        let place = self.places.get(name);
        place.map(|&place| &self.manifest.tensors()[place]).ok_or_else(|| {
            PyKeyError::new_err(format!("there is no tensor {name:?}; see Region.names"))
        })
    }

    fn fill(slf: &Bound<'_, Self>, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let tensor = slf.get().tensor(name)?;
        if is_torch(value) {
            let value = value.call_method0("detach")?;
            views::torch(slf, tensor)?.call_method1("copy_", (value,))?;
        } else {
            let arguments = PyDict::new(py);
            // Only the order of bytes may change on the way.
            arguments.set_item("casting", "equiv")?;
            let view = views::numpy(slf, tensor)?;
            py.import("numpy")?.getattr("copyto")?.call((view, value), Some(&arguments))?;
        }
        Ok(())
    }
}

/// Without importing it.
fn is_torch(value: &Bound<'_, PyAny>) -> bool {
    value.hasattr("detach").unwrap_or(false) && value.hasattr("data_ptr").unwrap_or(false)
}

/// Name, dtype, shape.
type Described = (String, Dtype, Vec<u64>);

/// Lays tensors out as the safetensors library does.
fn layout(
    mut tensors: Vec<Described>,
    metadata: Option<BTreeMap<String, String>>,
) -> PyResult<Arc<Manifest>> {
    // Dtypes are ordered by size.
    tensors.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let manifest = Manifest::from_tensors(tensors, &metadata.unwrap_or_default()).or_raise()?;
    Ok(Arc::new(manifest))
}

fn describe(name: &Bound<'_, PyAny>, dtype: &str, shape: &Bound<'_, PyAny>) -> PyResult<Described> {
    let name: String = name.extract().map_err(|_| bad_type(name, "a name is a str"))?;
    let in_tensor = |error: PyErr| -> PyErr {
        let py = shape.py();
        let text = format!("tensor {name:?}: {}", error.value(py));
        PyErr::from_type(error.get_type(py), text)
    };
    let dtype = dtypes::parse(dtype).map_err(in_tensor)?;
    let shape = shape
        .try_iter()
        .and_then(|dims| dims.map(|dim| dim?.extract()).collect())
        .map_err(|_| {
            bad_type(shape, &format!("tensor {name:?}: a shape is a sequence of int, 0 or more"))
        })?;
    Ok((name, dtype, shape))
}

fn bad_type(value: &Bound<'_, PyAny>, what: &str) -> PyErr {
    let shown = value.repr().map_or_else(|_| "this".into(), |text| text.to_string());
    let shown: String = shown.chars().take(80).collect();
    PyTypeError::new_err(format!("{what}, not {shown}"))
}

#[pymethods]
impl Region {
    #[new]
    #[pyo3(signature = (tensors, *, metadata=None))]
    fn new(
        py: Python<'_>,
        tensors: &Bound<'_, PyMapping>,
        metadata: Option<BTreeMap<String, String>>,
    ) -> PyResult<Region> {
        let mut described = Vec::new();
        for item in tensors.items()? {
            let (name, description): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
            let (dtype, shape): (String, Bound<'_, PyAny>) = description
                .extract()
                .map_err(|_| bad_type(&description, "a tensor is described by (dtype, shape)"))?;
            described.push(describe(&name, &dtype, &shape)?);
        }
        let manifest = layout(described, metadata)?;
        py.detach(|| Region::from_manifest(manifest)).or_raise()
    }

    /// Make a region with the tensors of a mapping, copied once.
    ///
    /// `arrays` maps names to NumPy arrays or PyTorch tensors of any device; their dtypes, shapes and
    /// values are kept bit for bit. A state_dict() will do. The layout is that of `Region(...)`.
    ///
    /// Raises TypeError for a value that is neither; otherwise as `Region(...)`.
    #[classmethod]
    #[pyo3(signature = (arrays, *, metadata=None))]
    fn from_arrays<'py>(
        cls: &Bound<'py, PyType>,
        arrays: &Bound<'py, PyMapping>,
        metadata: Option<BTreeMap<String, String>>,
    ) -> PyResult<Bound<'py, Region>> {
        let py = cls.py();
        let items: Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)> =
            arrays.items()?.iter().map(|item| item.extract()).collect::<PyResult<_>>()?;
        let mut described = Vec::new();
        for (name, value) in &items {
            let what = "an array has a dtype and a shape";
            let part = |part| value.getattr(part).map_err(|_| bad_type(value, what));
            let (dtype, shape) = (part("dtype")?.to_string(), part("shape")?);
            let dtype = match is_torch(value) {
                true => dtype.trim_start_matches("torch.").to_owned(),
                // `str` would put the order of bytes before it.
                false => part("dtype")?.getattr("name")?.extract()?,
            };
            described.push(describe(name, &dtype, &shape)?);
        }
        let manifest = layout(described, metadata)?;
        let region = py.detach(|| Region::from_manifest(manifest)).or_raise()?;
        let region = Bound::new(py, region)?;
        for (name, value) in &items {
            Region::fill(&region, &name.extract::<String>()?, value)?;
        }
        Ok(region)
    }

    /// Names of the tensors, in the order of their bytes.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.manifest.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
    }

    /// Size of all tensors together in bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.manifest.data_bytes()
    }

    /// What a file says beside its tensors, str to str; a copy.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let header = PyBytes::new(py, self.manifest.header());
        let header = py.import("json")?.call_method1("loads", (header,))?;
        header.call_method1("get", ("__metadata__", PyDict::new(py)))
    }

    /// Return the dtype of a tensor in NumPy's spelling, "float32" for example.
    ///
    /// Raises KeyError if there is no such tensor.
    fn dtype(&self, name: &str) -> PyResult<&'static str> {
        dtypes::name(self.tensor(name)?.dtype)
    }

    /// Return the shape of a tensor in elements: a tuple of int, () for a scalar.
    ///
    /// Raises KeyError if there is no such tensor.
    fn shape<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.tensor(name)?.shape)
    }

    /// Return a numpy.ndarray that shares the memory of a tensor, with its dtype and shape.
    ///
    /// It is writable, except while the region is sent or saved. It keeps the region alive. bfloat16
    /// and 8-bit floats need the package ml_dtypes.
    ///
    /// Raises KeyError if there is no such tensor; ImportError if NumPy or ml_dtypes is not
    /// installed; ModelError for dtypes of 4 or 6 bits.
    fn numpy<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let view = views::numpy(slf, slf.get().tensor(name)?)?;
        slf.get().track(&view)?;
        Ok(view)
    }

    /// Return a torch.Tensor on the CPU that shares the memory of a tensor, with its dtype and shape.
    ///
    /// It keeps the region alive. PyTorch has no read-only tensors: do not write to it while the region
    /// is sent or saved.
    ///
    /// Raises KeyError if there is no such tensor; ImportError if torch is not installed or lacks the
    /// dtype; BufferError while the region is sent or saved, or if the tensor, in a loaded file,
    /// does not start at a multiple of its element's size; ModelError for dtypes of 4 or 6 bits.
    fn torch<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let tensor = slf.get().tensor(name)?;
        if slf.get().is_frozen() {
            return Err(PyBufferError::new_err(format!(
                "tensor {name:?} is being sent or saved, and torch has no read-only tensors; wait, \
                 or use Region.numpy"
            )));
        }
        views::torch(slf, tensor)
    }

    /// Return one tensor as an object for numpy.from_dlpack, torch.from_dlpack and others.
    ///
    /// What they make shares the memory and keeps it alive. An export made while the region is sent
    /// or saved is read-only, if the consumer knows version 1 of DLPack, and refused otherwise.
    ///
    /// Raises KeyError if there is no such tensor; BufferError if the tensor, in a loaded file, does
    /// not start at a multiple of its element's size.
    fn dlpack(slf: &Bound<'_, Self>, name: &str) -> PyResult<DlpackTensor> {
        DlpackTensor::new(slf.clone().unbind(), slf.get().tensor(name)?)
    }

    /// Return the descriptor of the memory file; the data starts at position 0.
    ///
    /// Another process that has the descriptor can map the file shared, `region.bytes` long. It
    /// belongs to the region: use os.dup to keep it, and keep the region while others use its
    /// memory: fedlane uses the memory again when the region and all its views are gone.
    fn fileno(&self) -> i32 {
        self.memory.file().as_raw_fd()
    }

    fn __repr__(&self) -> String {
        let tensors = self.manifest.tensors().len();
        format!("<fedlane.Region: {tensors} tensors, {} bytes>", self.manifest.data_bytes())
    }
}
