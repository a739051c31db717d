//! `fedlane.save` and `fedlane.load`: regions and safetensors files.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fedlane::sink::file::ModelFile;
use fedlane::source::Source;
use fedlane::source::file::FileSource;
use pyo3::prelude::*;

use crate::blocking;
use crate::errors::{FedlaneError, OrRaise};
use crate::region::Region;

/// Bytes that are read or written between two looks at whether to stop.
const STEP_BYTES: usize = 16 << 20;

/// Save a region as a safetensors file.
///
/// save(region, path): the file has the names, dtypes, shapes and metadata of the region. It
/// appears whole or not at all: until it is complete, whatever stood at `path` (str or os.PathLike)
/// stays. While it is saved the region's views are read-only.
///
/// Raises OSError if the disk or the directory refuses.
#[pyfunction]
pub fn save(py: Python<'_>, region: &Bound<'_, Region>, path: PathBuf) -> PyResult<()> {
    let region = region.get();
    let (manifest, memory) = (region.manifest().clone(), region.memory().clone());
    region.while_frozen(py, || {
        interruptible(py, move |stopped| {
            let file = ModelFile::create(&path, &manifest).or_raise()?;
            let bytes = &memory.bytes()[..manifest.data_bytes() as usize];
            for (number, step) in bytes.chunks(STEP_BYTES).enumerate() {
                check(stopped)?;
                file.write_at((number * STEP_BYTES) as u64, step).or_raise()?;
            }
            file.finish().or_raise()
        })
    })
}

/// Load a safetensors file into a new region.
///
/// load(path): names, dtypes, shapes, order and metadata are those of the file (str or
/// os.PathLike).
///
/// Raises OSError, FileNotFoundError for example, if the file cannot be read; ModelError if it is
/// damaged or no safetensors file; OutOfMemory if the host lacks the memory.
#[pyfunction]
pub fn load(py: Python<'_>, path: PathBuf) -> PyResult<Region> {
    interruptible(py, move |stopped| {
        let file = FileSource::open(path).or_raise()?;
        let manifest = Arc::new(file.manifest().clone());
        let mut memory = fedlane::region::Region::new(manifest.data_bytes()).or_raise()?;
        for (number, step) in memory.bytes_mut().0.chunks_mut(STEP_BYTES).enumerate() {
            check(stopped)?;
            file.read((number * STEP_BYTES) as u64, step).or_raise()?;
        }
        Ok(Region::wrap(Arc::new(memory), manifest))
    })
}

/// Runs `work`, which looks at its flag now and then, so that Ctrl-C ends it.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&AtomicBool) -> PyResult<T> + Send + 'static,
) -> PyResult<T> {
    let stopped = Arc::new(AtomicBool::new(false));
    let inside = stopped.clone();
    blocking::run(py, move || work(&inside), || stopped.store(true, Ordering::Relaxed))?
}

fn check(stopped: &AtomicBool) -> PyResult<()> {
    match stopped.load(Ordering::Relaxed) {
        true => Err(FedlaneError::new_err("interrupted")),
        false => Ok(()),
    }
}
