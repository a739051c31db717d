//! The extension module `fedlane._core`: thin Python classes over the engine.
#![deny(unsafe_code)]

mod aggregator;
mod blocking;
mod client;
mod descriptor;
mod door;
mod dtypes;
mod edge;
mod errors;
mod exchange;
mod export;
mod files;
mod progress;
mod region;
mod ring;
mod views;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    exchange::register(module)?;
    module.add_class::<region::Region>()?;
    module.add_class::<aggregator::Aggregator>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<edge::Edge>()?;
    module.add_class::<ring::Ring>()?;
    module.add_class::<views::DlpackTensor>()?;
    module.add_function(wrap_pyfunction!(files::save, module)?)?;
    module.add_function(wrap_pyfunction!(files::load, module)?)
}
