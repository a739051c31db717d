//! Many transfers leave no descriptor, no thread and no memory behind. A process of its own,
//! because it counts what is open in it.

// Each test program uses a part of these.
#[allow(dead_code)]
#[path = "exchange/common.rs"]
mod common;
#[allow(dead_code)]
#[path = "exchange/peer.rs"]
mod peer;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fedlane::exchange::{Exchange, fetch};
use fedlane::pool::RegionPool;

use common::{PATIENCE, exchange, floats, leave, line, parcel, secret, until_released, wanted};
use peer::Peer;

/// Memory that allocator and runtime may keep between two looks: a part of what cycles move.
const SLACK_KIB: u64 = 16 << 10;

/// A model is offered and fetched, updates are averaged with and without one that dies, one is
/// collected, the others are released.
fn cycle(exchange: &Exchange, pool: &Arc<RegionPool>, dies: bool) {
    exchange.offer(secret(9), parcel(&floats(), 9, exchange.pool()));
    drop(fetch(&line(exchange, "f"), secret(9), pool).unwrap());
    let deposits = [1, 2, 3].map(|n| leave(exchange, n, &parcel(&floats(), n.into(), pool)));
    let honest = [1, 2, 3].map(|number| wanted(number, number.into()));
    if dies {
        exchange.expect(secret(4));
        let mut peer = Peer::join(exchange, "dies", &floats(), secret(4));
        let update = parcel(&floats(), 4, pool);
        std::thread::scope(|scope| {
            let all = [&honest[..], &[wanted(4, 1.0)]].concat();
            let averaged = scope.spawn(move || exchange.average(&all, PATIENCE));
            peer.begin_upload(&update);
            peer.send(&update, 0.5, |_| {});
            drop(peer);
            let error = averaged.join().unwrap().err().unwrap();
            assert_eq!(error.culprit(), Some(secret(4)), "{error}");
        });
    }
    drop(exchange.average(&honest, PATIENCE).unwrap());
    drop(exchange.collect(secret(1), PATIENCE).unwrap());
    [2, 3, 4, 9].into_iter().for_each(|number| exchange.release(secret(number)));
    deposits.iter().for_each(until_released);
}

fn entries(directory: &str) -> usize {
    Path::new(directory).read_dir().unwrap().count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Open descriptors and threads, once nothing is ending any more.
fn settled() -> (usize, usize) {
    let count = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let mut last = (count(), Instant::now());
    while last.1.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(10));
        let now = count();
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    last.0
}

#[test]
fn fifty_cycles_leave_nothing_behind() {
    let alone = settled();
    let exchange = exchange(10_000);
    let pool = Arc::default();
    // The first cycles take what is kept warm.
    (0..6).for_each(|number| cycle(&exchange, &pool, number % 2 == 1));
    let (before, resident) = (settled(), resident_kib());
    (0..50).for_each(|number| cycle(&exchange, &pool, number % 2 == 1));
    assert_eq!(settled(), before, "descriptors and threads");
    let grown = resident_kib().saturating_sub(resident);
    assert!(grown < SLACK_KIB, "{grown} KiB more are resident");
    drop((exchange, pool));
    assert_eq!(settled(), alone, "descriptors and threads without an exchange");
}
