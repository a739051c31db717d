//! The hot loops. A lane is one thread that owns a range of the parameters and one stream of
//! every peer for that range, so no two threads touch the same bytes and no lock is needed.
//!
//! A lane outlives the connections of its peers: who runs it attaches and detaches them, and tells
//! it when it is done.

pub mod receive;
pub mod send;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use crate::error::{LaneError, TransferError};
use crate::signal::Signal;

/// How often a waiting lane looks at its deadlines: four times in the shortest.
const TICK: Duration = Duration::from_millis(50);

/// Starts a lane on a thread of its own and reports how it ends, also if there is no thread for
/// it: whoever waits hears of every lane.
pub fn start_lane<'scope>(
    scope: &'scope Scope<'scope, '_>,
    lane: impl FnOnce() -> Result<(), LaneError> + Send + 'scope,
    report: impl Fn(Result<(), LaneError>) + Clone + Send + 'scope,
) {
    let refused = report.clone();
    let thread = std::thread::Builder::new().name("lane".into());
    if let Err(error) = thread.spawn_scoped(scope, move || report(run_lane(lane))) {
        refused(Err(LaneError::Thread(error)));
    }
}

/// A panic in a lane becomes an error.
fn run_lane(lane: impl FnOnce() -> Result<(), LaneError>) -> Result<(), LaneError> {
    catch_unwind(AssertUnwindSafe(lane))
        .unwrap_or_else(|panic| Err(LaneError::Panicked { message: panic_message(panic.as_ref()) }))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// What a lane is told to do, and its signal.
pub struct Inbox<T> {
    orders: Mutex<VecDeque<T>>,
    signal: Arc<Signal>,
}

impl<T> Inbox<T> {
    /// An empty one for the lane with this signal.
    pub fn new(signal: Arc<Signal>) -> Inbox<T> {
        Inbox { orders: Mutex::default(), signal }
    }

    /// Gives the lane an order.
    pub fn put(&self, order: T) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push_back(order);
        self.signal.wake();
    }

    fn take(&self) -> Option<T> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Ends the lane at once.
    pub fn cancel(&self) {
        self.signal.cancel();
    }
}

/// Which of a peer's connections: they are numbered as they come.
pub type ConnectionId = u64;

/// Joins chunk numbers into ranges, in the order given.
fn ranges(chunks: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for chunk in chunks {
        match ranges.last_mut() {
            Some(last) if last.end == chunk => last.end += 1,
            _ => ranges.push(chunk..chunk + 1),
        }
    }
    ranges
}

/// Waits for any of a lane's sockets, or for its signal.
struct Poller<'a> {
    epoll: OwnedFd,
    signal: &'a Signal,
    events: Vec<epoll::Event>,
}

/// The number under which the signal is registered.
const SIGNAL: u64 = u64::MAX;

impl<'a> Poller<'a> {
    fn new(signal: &'a Signal) -> io::Result<Poller<'a>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            signal.as_fd(),
            epoll::EventData::new_u64(SIGNAL),
            epoll::EventFlags::IN,
        )?;
        Ok(Poller { epoll, signal, events: Vec::with_capacity(64) })
    }

    fn add(&self, socket: impl AsFd, index: usize, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(index as u64), flags)?)
    }

    fn remove(&self, socket: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, socket)?)
    }

    /// Adds the ready sockets to `ready` and says whether the signal was given.
    fn wait(&mut self, ready: &mut BTreeSet<usize>, timeout: Duration) -> Result<bool, LaneError> {
        self.signal.check()?;
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        self.events.clear();
        let buffer = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, buffer, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(LaneError::Poll(error.into())),
        }
        let mut signalled = false;
        for event in &self.events {
            match { event.data }.u64() {
                SIGNAL => signalled = true,
                index => {
                    ready.insert(index as usize);
                }
            }
        }
        if signalled {
            self.signal.clear();
            self.signal.check()?;
        }
        Ok(signalled)
    }
}

/// When a peer last moved, and how long it may stand still.
struct Progress {
    last: Instant,
    deadline: Option<Duration>,
}

impl Progress {
    fn new(deadline: Option<Duration>) -> Progress {
        Progress { last: Instant::now(), deadline }
    }

    fn made(&mut self) {
        self.last = Instant::now();
    }

    fn is_overdue(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.last.elapsed() > deadline)
    }

    fn stalled(&self) -> TransferError {
        TransferError::Stalled { seconds: self.last.elapsed().as_secs_f64() }
    }
}
