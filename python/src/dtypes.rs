//! Names of dtypes: NumPy's and those of safetensors files.

use fedlane::manifest::Dtype;
use pyo3::prelude::*;

use crate::errors::ModelError;

/// NumPy's name, or `ml_dtypes`' where NumPy has none, of every dtype that safetensors has.
const NAMES: [(Dtype, &str); 22] = [
    (Dtype::BOOL, "bool"),
    (Dtype::F4, "float4_e2m1fn"),
    (Dtype::F6_E2M3, "float6_e2m3fn"),
    (Dtype::F6_E3M2, "float6_e3m2fn"),
    (Dtype::U8, "uint8"),
    (Dtype::I8, "int8"),
    (Dtype::F8_E5M2, "float8_e5m2"),
    (Dtype::F8_E4M3, "float8_e4m3fn"),
    (Dtype::F8_E8M0, "float8_e8m0fnu"),
    (Dtype::F8_E4M3FNUZ, "float8_e4m3fnuz"),
    (Dtype::F8_E5M2FNUZ, "float8_e5m2fnuz"),
    (Dtype::I16, "int16"),
    (Dtype::U16, "uint16"),
    (Dtype::F16, "float16"),
    (Dtype::BF16, "bfloat16"),
    (Dtype::I32, "int32"),
    (Dtype::U32, "uint32"),
    (Dtype::F32, "float32"),
    (Dtype::C64, "complex64"),
    (Dtype::F64, "float64"),
    (Dtype::I64, "int64"),
    (Dtype::U64, "uint64"),
];

/// NumPy's name of a dtype.
pub fn name(dtype: Dtype) -> PyResult<&'static str> {
    let known = NAMES.iter().find(|(known, _)| *known == dtype);
    known.map(|(_, name)| *name).ok_or_else(|| {
        ModelError::new_err(format!("dtype {dtype} is not known to this version of fedlane"))
    })
}

/// The dtype with this name, in NumPy's or in safetensors' spelling.
pub fn parse(text: &str) -> PyResult<Dtype> {
    let known = NAMES.iter().find(|(dtype, name)| *name == text || dtype.to_string() == text);
    known.map(|(dtype, _)| *dtype).ok_or_else(|| {
        let names: Vec<_> = NAMES.iter().map(|(_, name)| *name).collect();
        ModelError::new_err(format!("there is no dtype {text:?}; there are {}", names.join(", ")))
    })
}

/// Whether NumPy itself lacks the dtype.
pub fn needs_ml_dtypes(dtype: Dtype) -> bool {
    NAMES.iter().any(|(known, name)| {
        *known == dtype && (name.starts_with("bfloat") || name.starts_with("float8"))
    })
}
