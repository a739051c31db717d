//! The extension module `fedlane._core`: thin Python classes over the engine.
#![deny(unsafe_code)]

mod blocking;
mod descriptor;
mod dtypes;
mod errors;
mod exchange;
mod region;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    exchange::register(module)?;
    module.add_class::<region::Region>()
}
