//! The memory of a region for other programs' code: the buffer protocol and DLPack.
//!
//! This is the only file of the package with `unsafe`. Both protocols hand out bare addresses. The
//! memory stays where it is and outlives every export, because each holds the region. The engine
//! reads it while it is sent; whoever writes to it then, through an address that cannot be taken
//! back, breaks checksums that were made before, and the transfer fails.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use fedlane::manifest::{Dtype, Tensor};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::region::Region;

type Memory = Arc<fedlane::region::Region>;

#[pymethods]
impl Region {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let region = slf.get();
        let start = region.memory().start().as_ptr().cast::<c_void>();
        // Never more than the address space: the memory is mapped.
        let bytes = region.manifest().data_bytes() as ffi::Py_ssize_t;
        let readonly = c_int::from(region.is_frozen());
        // SAFETY: Python gives a valid `view`; start and length are those of the mapping, which
        // lives as long as `slf`, and `view` takes a reference to that.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, readonly, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// What one tensor is in DLPack's words: code, bits.
fn dlpack_dtype(dtype: Dtype) -> Option<(u8, u8)> {
    Some(match dtype {
        Dtype::I8 => (0, 8),
        Dtype::I16 => (0, 16),
        Dtype::I32 => (0, 32),
        Dtype::I64 => (0, 64),
        Dtype::U8 => (1, 8),
        Dtype::U16 => (1, 16),
        Dtype::U32 => (1, 32),
        Dtype::U64 => (1, 64),
        Dtype::F16 => (2, 16),
        Dtype::F32 => (2, 32),
        Dtype::F64 => (2, 64),
        Dtype::BF16 => (4, 16),
        Dtype::C64 => (5, 64),
        Dtype::BOOL => (6, 8),
        Dtype::F8_E4M3 => (10, 8),
        Dtype::F8_E4M3FNUZ => (11, 8),
        Dtype::F8_E5M2 => (12, 8),
        Dtype::F8_E5M2FNUZ => (13, 8),
        Dtype::F8_E8M0 => (14, 8),
        _ => return None,
    })
}

/// Codes from here on came with version 1 of the protocol.
const FIRST_FP8_CODE: u8 = 7;

/// Flag of version 1: nobody may write.
const READ_ONLY: u64 = 1;

/// The version whose structures these are. 1.1 brought the 8-bit floats.
const VERSION: (u32, u32) = (1, 1);

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    /// 1 is the CPU; there is one of them.
    device_type: i32,
    device_id: i32,
    dims: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// Before version 1 of the protocol.
#[repr(C)]
struct Unversioned {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut Unversioned),
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut Versioned),
    flags: u64,
    tensor: DlTensor,
}

/// What an export owns.
struct Owned {
    /// As long as the tensor has dimensions each.
    shape: Vec<i64>,
    strides: Vec<i64>,
    memory: Memory,
}

impl Owned {
    /// The pointers stay right when `self` moves: they point into heap and mapping.
    fn tensor(&mut self, tensor: &Tensor, (code, bits): (u8, u8)) -> DlTensor {
        DlTensor {
            data: self.memory.start().as_ptr().wrapping_add(tensor.range.start as usize).cast(),
            device_type: 1,
            device_id: 0,
            dims: self.shape.len() as i32,
            code,
            bits,
            lanes: 1,
            shape: self.shape.as_mut_ptr(),
            strides: self.strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

/// Makes the capsule of one tensor, whose bytes have to start at a whole element. `version_1`
/// says whether the consumer understands version 1.
pub fn capsule<'py>(
    py: Python<'py>,
    memory: &Memory,
    tensor: &Tensor,
    readonly: bool,
    version_1: bool,
) -> PyResult<Bound<'py, PyCapsule>> {
    let refuse = |why: &str| PyBufferError::new_err(format!("tensor {:?} {why}", tensor.name));
    let dtype = dlpack_dtype(tensor.dtype)
        .ok_or_else(|| refuse("has a packed dtype, which cannot be exported by DLPack"))?;
    let shape: Vec<i64> = tensor.shape.iter().map(|&elements| elements as i64).collect();
    let strides = strides(&shape);
    let mut owned = Box::new(Owned { shape, strides, memory: memory.clone() });
    let dl_tensor = owned.tensor(tensor, dtype);
    if version_1 {
        let context = Box::into_raw(owned).cast();
        let flags = if readonly { READ_ONLY } else { 0 };
        let (major, minor) = VERSION;
        let deleter = delete_versioned;
        let managed = Versioned { major, minor, context, deleter, flags, tensor: dl_tensor };
        new_capsule(py, managed, VERSIONED, destroy_versioned)
    } else if readonly {
        Err(refuse("is being sent, and this consumer's DLPack knows no read-only tensors"))
    } else if (FIRST_FP8_CODE..).contains(&dtype.0) {
        Err(refuse("has an 8-bit float dtype, which needs a consumer of DLPack version 1"))
    } else {
        let context = Box::into_raw(owned).cast();
        let managed = Unversioned { tensor: dl_tensor, context, deleter: delete_unversioned };
        new_capsule(py, managed, UNVERSIONED, destroy_unversioned)
    }
}

/// Of the C order, in elements.
fn strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for index in (1..shape.len()).rev() {
        // Shapes whose size overflows are refused by the manifest, unless they have no elements.
        strides[index - 1] = strides[index].saturating_mul(shape[index].max(1));
    }
    strides
}

const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

fn new_capsule<'py, T>(
    py: Python<'py>,
    managed: T,
    name: &'static CStr,
    destroy: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyCapsule>> {
    let managed = NonNull::from(Box::leak(Box::new(managed))).cast();
    // SAFETY: the pointer is valid until the consumer's deleter, or the destructor of a capsule that
    // nobody consumed, frees it. Both may run on any thread.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, managed, name, Some(destroy)) }
}

unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: `capsule` made both boxes, and a consumer calls its deleter once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Owned>()));
    }
}

unsafe extern "C" fn delete_unversioned(managed: *mut Unversioned) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Owned>()));
    }
}

unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this once, with a capsule of `new_capsule`. A consumer renames it and
    // then owns what it holds.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

unsafe extern "C" fn destroy_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `destroy_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete_unversioned(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()).cast());
        }
    }
}
