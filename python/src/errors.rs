//! Errors of the engine as Python exceptions, with the engine's text.
//!
//! There are as many classes as there are things a caller would do: look at the model, at the
//! peer, or at the memory of the host.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;

use fedlane::error::{
    AggregatorError, ClientError, ExchangeError, ManifestError, RegionError, SinkError,
    SourceError, TlsError,
};

create_exception!(
    fedlane,
    FedlaneError,
    PyException,
    "What went wrong, to which file, tensor or peer, and what to do. Base class of all others."
);
create_exception!(
    fedlane,
    ModelError,
    FedlaneError,
    "A model or file that cannot be used: damaged, of another layout, of a dtype without a mean."
);
create_exception!(
    fedlane,
    PeerError,
    FedlaneError,
    "The other side could not be reached, died, stalled, ended the session or broke the protocol."
);
create_exception!(
    fedlane,
    GoneError,
    PeerError,
    "A client that was awaited did not come: asking again would be in vain."
);
create_exception!(
    fedlane,
    OutOfMemory,
    FedlaneError,
    "The host or its cgroup has no memory for a region. Raised before anything is taken."
);

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("FedlaneError", py.get_type::<FedlaneError>())?;
    module.add("ModelError", py.get_type::<ModelError>())?;
    module.add("PeerError", py.get_type::<PeerError>())?;
    module.add("GoneError", py.get_type::<GoneError>())?;
    module.add("OutOfMemory", py.get_type::<OutOfMemory>())
}

/// An error of the engine that has a Python exception.
pub trait IntoPyErr {
    /// That exception.
    fn into_py_err(self) -> PyErr;
}

/// `?` for the engine's results.
pub trait OrRaise<T> {
    /// Raises the exception of the error.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: IntoPyErr> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(IntoPyErr::into_py_err)
    }
}

impl IntoPyErr for ManifestError {
    fn into_py_err(self) -> PyErr {
        ModelError::new_err(self.to_string())
    }
}

impl IntoPyErr for RegionError {
    fn into_py_err(self) -> PyErr {
        OutOfMemory::new_err(self.to_string())
    }
}

impl IntoPyErr for SourceError {
    fn into_py_err(self) -> PyErr {
        match &self {
            SourceError::Io { cause, .. } => os_error(cause, self.to_string()),
            _ => ModelError::new_err(self.to_string()),
        }
    }
}

impl IntoPyErr for SinkError {
    fn into_py_err(self) -> PyErr {
        match &self {
            SinkError::Io { cause, .. } => os_error(cause, self.to_string()),
            SinkError::Region(_) => OutOfMemory::new_err(self.to_string()),
            SinkError::BadTarget { .. } | SinkError::NoSpace { .. } => {
                PyOSError::new_err(self.to_string())
            }
            _ => ModelError::new_err(self.to_string()),
        }
    }
}

impl IntoPyErr for AggregatorError {
    fn into_py_err(self) -> PyErr {
        let text = self.to_string();
        match self {
            AggregatorError::Config { .. } | AggregatorError::ClipNorm { .. } => {
                PyValueError::new_err(text)
            }
            AggregatorError::Client { .. } | AggregatorError::Above { .. } => {
                PeerError::new_err(text)
            }
            AggregatorError::Region(_) => OutOfMemory::new_err(text),
            AggregatorError::Initial { .. }
            | AggregatorError::Nonfinite { .. }
            | AggregatorError::Sums { .. }
            | AggregatorError::Reducer(_)
            | AggregatorError::Manifest(_) => ModelError::new_err(text),
            AggregatorError::Source(error) => error.into_py_err(),
            AggregatorError::Sink(error) => error.into_py_err(),
            _ => FedlaneError::new_err(text),
        }
    }
}

impl IntoPyErr for ClientError {
    fn into_py_err(self) -> PyErr {
        let text = self.to_string();
        match self {
            ClientError::Dial { .. }
            | ClientError::Control { .. }
            | ClientError::Refused { .. }
            | ClientError::Transfer { .. }
            | ClientError::Ended { .. }
            | ClientError::NotWanted { .. }
            | ClientError::Plan { .. }
            | ClientError::Digest { .. } => PeerError::new_err(text),
            ClientError::Model { .. } => ModelError::new_err(text),
            ClientError::Region(_) => OutOfMemory::new_err(text),
            ClientError::Source(error) => error.into_py_err(),
            ClientError::Sink(error) => error.into_py_err(),
            _ => FedlaneError::new_err(text),
        }
    }
}

impl IntoPyErr for TlsError {
    fn into_py_err(self) -> PyErr {
        FedlaneError::new_err(self.to_string())
    }
}

impl IntoPyErr for ExchangeError {
    /// The update to blame, if one is, is the attribute `key`.
    fn into_py_err(self) -> PyErr {
        let (text, culprit) = (self.to_string(), self.culprit());
        let error = match self {
            ExchangeError::Manifest(_)
            | ExchangeError::Size { .. }
            | ExchangeError::Differs { .. } => ModelError::new_err(text),
            ExchangeError::Region(_) => OutOfMemory::new_err(text),
            ExchangeError::Aggregator(error) => error.into_py_err(),
            ExchangeError::Host(_)
            | ExchangeError::Closed
            | ExchangeError::Twice { .. }
            | ExchangeError::Nobody => FedlaneError::new_err(text),
            ExchangeError::Missing { .. } => GoneError::new_err(text),
            _ => PeerError::new_err(text),
        };
        if let Some(secret) = culprit {
            Python::attach(|py| {
                // An exception always takes attributes.
                let _ =
                    error.value(py).setattr("key", pyo3::types::PyBytes::new(py, secret.bytes()));
            });
        }
        error
    }
}

/// Python chooses the subclass, `FileNotFoundError` for example, by the number.
fn os_error(cause: &std::io::Error, text: String) -> PyErr {
    match cause.raw_os_error() {
        Some(number) => PyOSError::new_err((number, text)),
        None => PyOSError::new_err(text),
    }
}
