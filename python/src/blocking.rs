//! Calls that wait: without the GIL, and so that Ctrl-C ends them.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use fedlane::limits;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::FedlaneError;

/// How often a waiting call looks for Ctrl-C. A result is never waited for: it wakes the caller.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// How long a cancelled call may take to end. After that it is left to end by itself: its thread
/// owns all it uses.
const CANCEL_PATIENCE: Duration = Duration::from_secs(2);

/// Runs `work` on a thread of its own and waits for it without the GIL. `tick` is called with the
/// GIL every 50 ms; when it or a Python signal handler raises, `cancel` has to make `work` end.
pub fn run_ticking<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    cancel: impl Fn(),
    mut tick: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let (sender, mut result) = mpsc::channel();
    std::thread::Builder::new().name("fedlane".into()).spawn(move || {
        // Nobody waits any more for a call that took too long to cancel.
        let _ = sender.send(work());
    })?;
    loop {
        match wait(py, &mut result, SIGNAL_CHECK) {
            Ok(value) => return keep_unless_interrupted(py, value),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(FedlaneError::new_err("fedlane panicked; please report this"));
            }
        }
        if let Err(interrupt) = py.check_signals().and_then(|()| tick(py)) {
            cancel();
            // What it returns now is what cancelling made of it.
            // Dropped without the GIL too: it may hold threads that end first.
            py.detach(move || drop(result.recv_timeout(CANCEL_PATIENCE)));
            return Err(interrupt);
        }
    }
}

/// Ctrl-C in the moment of the result counts too. Otherwise an error that it caused elsewhere, in
/// a peer on the same terminal, would hide it.
fn keep_unless_interrupted<T: Send>(py: Python<'_>, value: T) -> PyResult<T> {
    match py.check_signals() {
        Ok(()) => Ok(value),
        Err(interrupt) => {
            py.detach(move || drop(value));
            Err(interrupt)
        }
    }
}

/// [`run_ticking`] without a tick.
pub fn run<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    cancel: impl Fn(),
) -> PyResult<T> {
    run_ticking(py, work, cancel, |_| Ok(()))
}

fn wait<T: Send>(
    py: Python<'_>,
    result: &mut Receiver<T>,
    patience: Duration,
) -> Result<T, RecvTimeoutError> {
    py.detach(move || result.recv_timeout(patience))
}

/// An exception in one line, for the peers that it ends the session of.
pub fn describe(error: &Bound<'_, PyAny>) -> String {
    let kind = error.get_type().name().map_or_else(|_| "error".into(), |name| name.to_string());
    match error.str().map(|text| text.to_string()) {
        Ok(text) if !text.is_empty() => format!("its program ended: {kind}: {text}"),
        _ => format!("its program ended: {kind}"),
    }
}

/// Refuses deadlines that the engine cannot use.
pub fn check_deadline(deadline_ms: u64) -> PyResult<u64> {
    let (least, most) = (limits::MIN_DEADLINE_MS, limits::MAX_DEADLINE_MS);
    match (least..=most).contains(&deadline_ms) {
        true => Ok(deadline_ms),
        false => Err(PyValueError::new_err(format!(
            "deadline_ms: {deadline_ms} is not between {least} and {most}"
        ))),
    }
}

/// A shared secret as Python gives it; without one everyone may join.
pub fn check_secret(secret: Option<[u8; 32]>) -> PyResult<fedlane::wire::hello::Secret> {
    use fedlane::wire::hello::Secret;
    match secret.map(Secret::new) {
        None => Ok(Secret::OPEN),
        // Zeros mean that there is none.
        Some(Secret::OPEN) => Err(pyo3::exceptions::PyValueError::new_err(
            "a secret is 32 random bytes, as secrets.token_bytes(32) gives them, not zeros",
        )),
        Some(secret) => Ok(secret),
    }
}
