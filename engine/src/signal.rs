//! How one thread wakes or ends another that waits for sockets.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::LaneError;

/// Ends and wakes a lane from another thread.
pub struct Signal {
    event: OwnedFd,
    cancelled: AtomicBool,
}

impl Signal {
    /// A signal that has not been given.
    pub fn new() -> io::Result<Signal> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Signal { event, cancelled: AtomicBool::new(false) })
    }

    /// Makes the lane look at its streams again.
    pub fn wake(&self) {
        // The only failure is a counter that is full, and then the lane is awake already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Makes the lane end.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// An error once the lane was cancelled.
    pub fn check(&self) -> Result<(), LaneError> {
        if self.cancelled.load(Ordering::SeqCst) { Err(LaneError::Cancelled) } else { Ok(()) }
    }

    /// Forgets that the lane was woken.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
