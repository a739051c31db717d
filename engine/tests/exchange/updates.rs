//! Updates that wait, and are collected whole.

use std::sync::Arc;
use std::time::Duration;

use fedlane::error::ExchangeError;
use fedlane::exchange::{Deposit, Exchange, ExchangeConfig};
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::pool::RegionPool;
use fedlane::wire::message::{AggregatorMessage, ClientMessage};

use crate::common::{
    PATIENCE, SHORT, exchange, floats, leave, line, line_to, manifest, parcel, parcel_of, patient,
    secret, until, until_released, wanted,
};
use crate::peer::Peer;
use crate::relay::Relay;

/// Every kind of tensor that only has to travel.
pub fn awkward() -> Manifest {
    manifest(&[
        ("large", Dtype::F32, &[700, 1000]),
        ("nothing", Dtype::F32, &[0, 7]),
        ("scalar", Dtype::F64, &[]),
        ("steps", Dtype::I64, &[1001]),
        ("mask", Dtype::BOOL, &[3, 5]),
        ("tiny", Dtype::F8_E4M3, &[17]),
        ("tinier", Dtype::F8_E5M2, &[1, 1, 1]),
        ("half", Dtype::F16, &[9]),
        ("brain", Dtype::BF16, &[600_000]),
        ("bytes", Dtype::U8, &[1]),
    ])
}

/// NaNs with payloads, the largest integers, bytes that are no bool: bits count, not numbers.
fn awkward_bytes() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..awkward().data_bytes()).map(|i| (i * 31 % 251) as u8).collect();
    let mut put = |name: &str, element: &[u8]| {
        let manifest = awkward();
        let tensor = manifest.tensors().iter().find(|tensor| tensor.name == name).unwrap();
        bytes[tensor.range.start as usize..][..element.len()].copy_from_slice(element);
    };
    put("large", &0x7fa0_1234_u32.to_le_bytes());
    put("scalar", &0xfff4_0000_dead_beef_u64.to_le_bytes());
    put("steps", &((1_i64 << 53) + 1).to_le_bytes());
    put("mask", &[2, 255, 0]);
    bytes
}

#[test]
fn an_update_comes_bit_for_bit() {
    let exchange = patient();
    let pool = Arc::default();
    let update = parcel_of(&awkward(), &awkward_bytes(), &pool);
    let deposit = leave(&exchange, 1, &update);
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert_eq!(collected.manifest().header(), awkward().header());
    assert!(collected.region().bytes() == awkward_bytes());
    until_released(&deposit);
    // What was received can be offered as it is: its checksums came with it.
    exchange.offer(secret(2), Arc::new(collected));
    let fetched = fedlane::exchange::fetch(&line(&exchange, "c"), secret(2), &pool).unwrap();
    assert!(fetched.region().bytes() == awkward_bytes());
}

#[test]
fn models_without_bytes_come_too() {
    let exchange = patient();
    let pool = Arc::default();
    for model in [manifest(&[]), manifest(&[("e", Dtype::F32, &[0]), ("f", Dtype::I8, &[3, 0])])] {
        let deposit = leave(&exchange, 1, &parcel_of(&model, &[], &pool));
        let collected = exchange.collect(secret(1), PATIENCE).unwrap();
        assert_eq!(collected.manifest().header(), model.header());
        until_released(&deposit);
        exchange.offer(secret(2), Arc::new(collected));
        fedlane::exchange::fetch(&line(&exchange, "c"), secret(2), &pool).unwrap();
    }
}

#[test]
fn the_memory_of_an_update_is_free_once_it_is_released() {
    let exchange = patient();
    let pool = Arc::default();
    let update = parcel(&floats(), 1, &pool);
    let place = update.region().bytes().as_ptr();
    let deposit = leave(&exchange, 1, &update);
    drop(update);
    exchange.collect(secret(1), PATIENCE).unwrap();
    until_released(&deposit);
    assert_eq!(pool.take(floats().data_bytes()).unwrap().bytes().as_ptr(), place);
}

#[test]
fn a_collected_update_is_not_collected_twice() {
    let exchange = patient();
    let deposit = leave(&exchange, 1, &parcel(&floats(), 1, &Arc::default()));
    exchange.collect(secret(1), PATIENCE).unwrap();
    let error = exchange.collect(secret(1), PATIENCE).err().unwrap();
    assert!(matches!(error, ExchangeError::NotExpected { .. }), "{error}");
    until_released(&deposit);
}

#[test]
fn an_update_that_waits_longer_than_deadlines_is_not_lost() {
    // Of both sides.
    let exchange = exchange(300);
    let mut line = line(&exchange, "client-1");
    line.deadline = Duration::from_millis(300);
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    let relay = Relay::to(exchange.address());
    line.address = relay.address.to_string();
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    until("the client has come", || exchange.has_met("client-1"));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(relay.accepted(), 1, "it waited on one connection");
    assert!(!deposit.is_over());
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert!(collected.region().bytes() == update.region().bytes());
    until_released(&deposit);
}

#[test]
fn an_update_whose_connection_breaks_comes_back() {
    let exchange = patient();
    let relay = Relay::to(exchange.address());
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    let line = line_to(relay.address, "client-1");
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    for times in 1..5 {
        until("the client has come", || relay.accepted() >= times);
        relay.cut();
    }
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert!(collected.region().bytes() == update.region().bytes());
    until_released(&deposit);
}

#[test]
fn a_client_that_does_not_come_is_missed() {
    let exchange = patient();
    exchange.expect(secret(1));
    let error = exchange.collect(secret(1), SHORT).err().unwrap();
    assert!(matches!(error, ExchangeError::Missing { .. }), "{error}");
    assert_eq!(error.culprit(), Some(secret(1)));
    let error = exchange.collect(secret(2), PATIENCE).err().unwrap();
    assert!(matches!(error, ExchangeError::NotExpected { .. }), "{error}");
    assert_eq!(error.culprit(), Some(secret(2)));
    // It may still come later.
    let deposit = leave(&exchange, 1, &parcel(&floats(), 1, &Arc::default()));
    exchange.collect(secret(1), PATIENCE).unwrap();
    until_released(&deposit);
}

#[test]
fn a_client_that_comes_while_it_is_awaited_is_not_missed() {
    let exchange = patient();
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    std::thread::scope(|scope| {
        let collected = scope.spawn(|| exchange.collect(secret(1), PATIENCE).unwrap());
        std::thread::sleep(SHORT);
        let deposit = leave(&exchange, 1, &update);
        assert!(collected.join().unwrap().region().bytes() == update.region().bytes());
        until_released(&deposit);
    });
}

#[test]
fn an_update_that_is_not_wanted_is_released() {
    let exchange = patient();
    let update = parcel(&floats(), 1, &Arc::default());
    let waits = leave(&exchange, 1, &update);
    until("the client has come", || exchange.has_met("client-1"));
    exchange.release(secret(1));
    until_released(&waits);
    // One that comes when its place is closed.
    exchange.expect(secret(2));
    exchange.release(secret(2));
    let late = Deposit::leave(line(&exchange, "late"), secret(2), update.clone()).unwrap();
    until_released(&late);
    assert_eq!(Arc::strong_count(&update), 1);
}

#[test]
fn a_release_ends_the_wait_for_a_client() {
    let exchange = patient();
    exchange.expect(secret(1));
    std::thread::scope(|scope| {
        let collected = scope.spawn(|| exchange.collect(secret(1), PATIENCE).err().unwrap());
        std::thread::sleep(SHORT);
        exchange.release(secret(1));
        let error = collected.join().unwrap();
        assert!(matches!(error, ExchangeError::NotExpected { .. }), "{error}");
    });
}

#[test]
fn a_deposit_that_is_dropped_gives_its_update_up() {
    let exchange = patient();
    let pool: Arc<RegionPool> = Arc::default();
    let update = parcel(&floats(), 1, &pool);
    let deposit = leave(&exchange, 1, &update);
    until("the client has come", || exchange.has_met("client-1"));
    drop(deposit);
    until("the deposit lets go of its update", || Arc::strong_count(&update) == 1);
    let error = exchange.collect(secret(1), SHORT).err().unwrap();
    assert_eq!(error.culprit(), Some(secret(1)));
}

#[test]
fn who_comes_again_takes_the_place_of_the_old_connection() {
    let exchange = patient();
    exchange.expect(secret(1));
    let mut old = Peer::join(&exchange, "old", &floats(), secret(1));
    until("the first has come", || exchange.has_met("old"));
    let update = parcel(&floats(), 1, &Arc::default());
    let deposit = leave(&exchange, 1, &update);
    assert!(old.next().is_err(), "the old connection is closed");
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert!(collected.region().bytes() == update.region().bytes());
    until_released(&deposit);
}

#[test]
fn a_client_that_waits_may_only_say_that_it_lives() {
    let exchange = patient();
    for message in [
        ClientMessage::Uploading { round: 1 },
        ClientMessage::Failed { reason: "no more".into() },
        ClientMessage::Sums { first: 0, sums: vec![[0; 8]; 2000] },
    ] {
        exchange.expect(secret(1));
        let mut peer = Peer::join(&exchange, "p", &floats(), secret(1));
        peer.say(&message);
        assert!(peer.next().is_err(), "{message:?} ends the connection");
        let error = exchange.collect(secret(1), SHORT).err().unwrap();
        assert_eq!(error.culprit(), Some(secret(1)));
    }
}

#[test]
fn a_header_that_means_nothing_is_refused() {
    let exchange = patient();
    exchange.expect(secret(1));
    for header in
        [&b"{"[..], b"", b"{\"w\":{\"dtype\":\"F32\",\"shape\":[9],\"data_offsets\":[0,8]}}"]
    {
        let mut peer =
            Peer::come(&exchange, &crate::peer::join("p", header, secret(1).place()), secret(1));
        assert!(matches!(peer.next().unwrap(), AggregatorMessage::Failed { .. }));
    }
    // And does not disturb the one that waits.
    let deposit = leave(&exchange, 1, &parcel(&floats(), 1, &Arc::default()));
    until("the client has come", || exchange.has_met("client-1"));
    let mut peer =
        Peer::come(&exchange, &crate::peer::join("p", b"[]", secret(1).place()), secret(1));
    assert!(matches!(peer.next().unwrap(), AggregatorMessage::Failed { .. }));
    exchange.collect(secret(1), Duration::ZERO).unwrap();
    until_released(&deposit);
}

/// Memory is not set aside for what any client says that its update has.
#[test]
fn an_update_that_is_larger_than_wanted_takes_no_memory() {
    let most = floats().data_bytes();
    let config = ExchangeConfig { max_update_bytes: most, streams: 2, ..Default::default() };
    let exchange = Exchange::listen("127.0.0.1:0", config).unwrap();
    let fits = leave(&exchange, 1, &parcel(&floats(), 1, &Arc::default()));
    exchange.expect(secret(2));
    let huge = synthetic(1 << 45, Dtype::F32).unwrap();
    let peer = Peer::join(&exchange, "client-2", &huge, secret(2));
    for attempt in [
        exchange.collect(secret(2), PATIENCE).err().unwrap(),
        exchange.average(&[wanted(2, 1.0)], PATIENCE).err().unwrap(),
        exchange.await_update(secret(2), PATIENCE).err().unwrap(),
    ] {
        assert!(matches!(attempt, ExchangeError::TooBig { .. }), "{attempt}");
        assert_eq!(attempt.culprit(), Some(secret(2)));
    }
    assert_eq!(exchange.pool().free_bytes(), 0);
    exchange.collect(secret(1), PATIENCE).unwrap();
    until_released(&fits);
    drop(peer);
}
