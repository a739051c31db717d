//! Thousands of short sessions use up no ports of the host. A process of its own, because it counts
//! what the host keeps of it.

// Each test program uses a part of this.
#[allow(dead_code)]
#[path = "exchange/common.rs"]
mod common;

use std::sync::Arc;

use fedlane::exchange::fetch;
use fedlane::manifest::Dtype;

use common::{line, manifest, parcel, patient, secret};

const SESSIONS: usize = 2000;
const AT_ONCE: usize = 8;

/// Connections that have ended and hold their port for a minute, at this port and towards it.
fn ended_connections(port: u16) -> (usize, usize) {
    const TIME_WAIT: &str = "06";
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        let port_of = |address: &str| u16::from_str_radix(address.split_once(':')?.1, 16).ok();
        (state == TIME_WAIT).then_some((port_of(local)?, port_of(remote)?))
    });
    rows.fold((0, 0), |(here, there), (local, remote)| {
        (here + usize::from(local == port), there + usize::from(remote == port))
    })
}

#[test]
fn two_thousand_sessions_use_up_no_ports() {
    let exchange = patient();
    let tiny = manifest(&[("w", Dtype::F32, &[3])]);
    let model = parcel(&tiny, 1, exchange.pool());
    exchange.offer(secret(1), model.clone());
    let pool = Arc::default();
    let fetch_some = || {
        for number in 0..SESSIONS / AT_ONCE {
            let fetched = fetch(&line(&exchange, "c"), secret(1), &pool);
            let fetched = fetched.unwrap_or_else(|error| panic!("session {number}: {error}"));
            assert!(fetched.region().bytes() == model.region().bytes());
        }
    };
    std::thread::scope(|scope| {
        (0..AT_ONCE).for_each(|_| drop(scope.spawn(fetch_some)));
    });
    let (here, there) = ended_connections(exchange.address().port());
    println!("{SESSIONS} sessions: {here} connections wait at the exchange, {there} at clients");
    // Mostly the client closes first, and then a port of its host waits. At the exchange, which may be a
    // moment earlier, a connection that waits takes no port: all have the same.
    assert!(here < there, "{here} connections wait at the exchange, {there} at clients");
}
