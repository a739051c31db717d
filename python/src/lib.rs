//! The extension module `fedlane._core`: thin Python classes over the engine.
#![deny(unsafe_code)]

mod blocking;
mod dtypes;
mod errors;
mod region;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    module.add_class::<region::Region>()
}
