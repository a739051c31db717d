//! Arrays and tensors of other libraries that share a region's memory.

use fedlane::manifest::{Dtype, Tensor};
use pyo3::exceptions::{PyBufferError, PyImportError, PyModuleNotFoundError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::dtypes;
use crate::errors::ModelError;
use crate::export;
use crate::region::Region;

/// A NumPy array over one tensor. It is writable if the region's buffer is.
pub fn numpy<'py>(region: &Bound<'py, Region>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let py = region.py();
    let numpy = import(py, "numpy", "numpy", tensor)?;
    let arguments = PyDict::new(py);
    arguments.set_item("shape", PyTuple::new(py, &tensor.shape)?)?;
    arguments.set_item("dtype", numpy_dtype(&numpy, tensor)?)?;
    arguments.set_item("buffer", region)?;
    arguments.set_item("offset", tensor.range.start)?;
    numpy.getattr("ndarray")?.call((), Some(&arguments))
}

/// The dtype itself and never another of its size: bfloat16 as uint16 would be averaged wrongly.
fn numpy_dtype<'py>(numpy: &Bound<'py, PyModule>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    refuse_packed(tensor)?;
    let name = dtypes::name(tensor.dtype)?;
    if !dtypes::needs_ml_dtypes(tensor.dtype) {
        return numpy.getattr("dtype")?.call1((name,));
    }
    let ml_dtypes = import(numpy.py(), "ml_dtypes", "ml_dtypes", tensor)?;
    let kind = ml_dtypes.getattr(name).map_err(|_| {
        PyImportError::new_err(format!(
            "tensor {:?} is {name}, which this version of ml_dtypes does not have: pip install -U ml_dtypes",
            tensor.name
        ))
    })?;
    numpy.getattr("dtype")?.call1((kind,))
}

/// A PyTorch tensor over one tensor.
pub fn torch<'py>(region: &Bound<'py, Region>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let py = region.py();
    let torch = import(py, "torch", "torch", tensor)?;
    refuse_packed(tensor)?;
    refuse_misaligned(tensor)?;
    let name = dtypes::name(tensor.dtype)?;
    let dtype = torch.getattr(name).map_err(|_| {
        PyImportError::new_err(format!(
            "tensor {:?} is {name}, which this version of torch does not have: pip install -U torch",
            tensor.name
        ))
    })?;
    let shape = PyTuple::new(py, &tensor.shape)?;
    let arguments = PyDict::new(py);
    arguments.set_item("dtype", dtype)?;
    if tensor.range.is_empty() {
        return torch.getattr("empty")?.call((shape,), Some(&arguments));
    }
    arguments.set_item("offset", tensor.range.start)?;
    arguments.set_item("count", tensor.shape.iter().product::<u64>())?;
    let flat = torch.getattr("frombuffer")?.call((region,), Some(&arguments))?;
    flat.call_method1("reshape", (shape,))
}

fn import<'py>(
    py: Python<'py>,
    module: &str,
    package: &str,
    tensor: &Tensor,
) -> PyResult<Bound<'py, PyModule>> {
    py.import(module).map_err(|error| {
        if !error.is_instance_of::<PyModuleNotFoundError>(py) {
            return error;
        }
        let name = dtypes::name(tensor.dtype).unwrap_or("of an unknown dtype");
        PyImportError::new_err(format!(
            "a view of tensor {:?}, which is {name}, needs {module}: pip install {package}",
            tensor.name
        ))
    })
}

fn refuse_packed(tensor: &Tensor) -> PyResult<()> {
    match tensor.dtype {
        Dtype::F4 | Dtype::F6_E2M3 | Dtype::F6_E3M2 => Err(ModelError::new_err(format!(
            "tensor {:?} is {}, several elements to the byte, which no array holds; its bytes are \
             in memoryview(region)",
            tensor.name,
            dtypes::name(tensor.dtype)?
        ))),
        _ => Ok(()),
    }
}

/// Other code expects elements at multiples of their size. Only a loaded file can be otherwise.
fn refuse_misaligned(tensor: &Tensor) -> PyResult<()> {
    let element_bytes = (tensor.dtype.bitsize() as u64 / 8).max(1);
    if tensor.range.start.is_multiple_of(element_bytes) {
        return Ok(());
    }
    Err(PyBufferError::new_err(format!(
        "tensor {:?} starts at byte {}, which is no multiple of its {element_bytes}-byte elements; \
         use Region.numpy, or copy it with Region.from_arrays",
        tensor.name, tensor.range.start
    )))
}

/// One tensor for `numpy.from_dlpack`, `torch.from_dlpack` and others.
#[pyclass(frozen, module = "fedlane._core")]
pub struct DlpackTensor {
    region: Py<Region>,
    tensor: Tensor,
}

impl DlpackTensor {
    pub fn new(region: Py<Region>, tensor: &Tensor) -> PyResult<DlpackTensor> {
        refuse_misaligned(tensor)?;
        Ok(DlpackTensor { region, tensor: tensor.clone() })
    }
}

/// The CPU's number in DLPack.
const CPU: (i32, i32) = (1, 0);

#[pymethods]
impl DlpackTensor {
    /// Return the DLPack capsule: the region's memory, never a copy. It keeps the memory alive.
    ///
    /// Raises BufferError for another device, for a copy, and where the consumer's version of
    /// the protocol lacks what is needed.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() || dl_device.is_some_and(|device| device != CPU) {
            return Err(PyBufferError::new_err("a region is in the memory of the CPU"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a region exports views and makes no copies"));
        }
        let region = self.region.get();
        let version_1 = max_version.is_some_and(|(major, _)| major >= 1);
        export::capsule(py, region.memory(), &self.tensor, region.is_frozen(), version_1)
    }

    /// Return the device: (1, 0), the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        CPU
    }
}
