//! Every order in which threads may meet in the table of checksums: no lane sleeps while there is
//! something for it, and none sees a checksum that was not announced.
//!
//! `sums.rs` is built here a second time, on shuttle's atomics, which try the orders. Shuttle and not
//! loom, because the table relies on sequential consistency, which loom does not model.

#[path = "../src/sums.rs"]
#[allow(dead_code)]
mod sums;

/// What `sums.rs` uses of the engine.
mod error {
    pub use fedlane::error::ProtocolError;
}
mod wire {
    pub use fedlane::wire::message;
}
mod sync {
    pub use shuttle::sync::atomic;
}

/// As the engine's signal: what was given before is seen by whoever waits after, and at once forgotten.
mod signal {
    use shuttle::sync::atomic::{AtomicBool, Ordering};
    use shuttle::sync::{Condvar, Mutex};

    #[derive(Default)]
    pub struct Signal {
        given: Mutex<bool>,
        changed: Condvar,
        cancelled: AtomicBool,
    }

    impl Signal {
        pub fn wake(&self) {
            *self.given.lock().unwrap() = true;
            self.changed.notify_all();
        }

        pub fn cancel(&self) {
            self.cancelled.store(true, Ordering::SeqCst);
            self.wake();
        }

        /// As a lane's poller, without the time after which that looks again anyway.
        pub fn wait(&self) -> Result<(), ()> {
            self.check()?;
            let mut given = self.given.lock().unwrap();
            while !*given {
                given = self.changed.wait(given).unwrap();
            }
            *given = false;
            drop(given);
            self.check()
        }

        fn check(&self) -> Result<(), ()> {
            if self.cancelled.load(Ordering::SeqCst) { Err(()) } else { Ok(()) }
        }
    }
}

use std::sync::Arc;

use shuttle::thread;
use signal::Signal;
use sums::SumTable;

/// Orders of each model that are tried at most; there are fewer in most.
const MOST: Option<usize> = Some(200_000);

fn check(model: impl Fn() + Send + Sync + 'static) {
    shuttle::check_dfs(model, MOST);
}

/// One stream with room for so many checksums.
fn table(chunks: usize) -> (Arc<SumTable>, Arc<Signal>) {
    let signal = Arc::new(Signal::default());
    #[allow(clippy::single_range_in_vec_init)]
    let lanes = [0..chunks];
    (Arc::new(SumTable::new(&lanes, std::slice::from_ref(&signal))), signal)
}

/// The checksum of each chunk.
fn sum(index: usize) -> u64 {
    1000 + index as u64
}

fn announce(table: &SumTable, chunks: std::ops::Range<usize>) {
    let first = chunks.start;
    let sums: Vec<_> = chunks.map(|index| sum(index).to_le_bytes()).collect();
    table.announce(first as u32, &sums).unwrap();
}

/// As a lane with one stream: takes a checksum, or asks to be woken and waits.
fn take(table: &SumTable, signal: &Signal, index: usize) -> Result<u64, ()> {
    loop {
        if let Some(sum) = table.lane(0).get(index) {
            return Ok(sum);
        }
        if !table.lane(0).park(index) {
            signal.wait()?;
        }
    }
}

#[test]
fn a_lane_gets_every_checksum_and_never_sleeps_for_ever() {
    check(|| {
        let (table, signal) = table(3);
        let inside = table.clone();
        let reader = thread::spawn(move || {
            announce(&inside, 0..1);
            announce(&inside, 1..3);
        });
        for index in 0..3 {
            assert_eq!(take(&table, &signal, index), Ok(sum(index)));
        }
        reader.join().unwrap();
    });
}

#[test]
fn a_lane_that_waits_can_be_cancelled() {
    check(|| {
        let (table, signal) = table(2);
        let (inside, canceller) = (table.clone(), signal.clone());
        let reader = thread::spawn(move || announce(&inside, 0..1));
        let stopper = thread::spawn(move || canceller.cancel());
        let first = take(&table, &signal, 0);
        assert!(first == Ok(sum(0)) || first == Err(()), "{first:?}");
        // Never announced.
        assert_eq!(take(&table, &signal, 1), Err(()));
        reader.join().unwrap();
        stopper.join().unwrap();
    });
}

#[test]
fn what_came_for_the_next_model_is_not_taken_for_the_last() {
    check(|| {
        let (table, signal) = table(1);
        announce(&table, 0..1);
        assert_eq!(take(&table, &signal, 0), Ok(sum(0)));
        // The lane has ended; the reader hears of the next model before the next lane begins.
        table.clear();
        let inside = table.clone();
        let reader = thread::spawn(move || inside.announce(0, &[7_u64.to_le_bytes()]).unwrap());
        assert_eq!(take(&table, &signal, 0), Ok(7));
        reader.join().unwrap();
    });
}

#[test]
fn a_lane_waits_until_every_doubt_is_gone() {
    check(|| {
        let (table, signal) = table(2);
        announce(&table, 0..2);
        for index in 0..2 {
            table.lane(0).verify(index);
            table.lane(0).doubt(index);
        }
        let inside = table.clone();
        let reader = thread::spawn(move || {
            announce(&inside, 1..2);
            announce(&inside, 0..1);
        });
        while !table.lane(0).park_for_proof() {
            signal.wait().unwrap();
        }
        reader.join().unwrap();
        assert!(table.announce(0, &[7_u64.to_le_bytes()]).is_err());
    });
}
