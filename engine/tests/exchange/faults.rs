//! Clients that die, stall or lie while their update is wanted.

use std::sync::Arc;

use fedlane::error::ExchangeError;
use fedlane::exchange::{Deposit, Exchange, Parcel};

use crate::common::{
    PATIENCE, SHORT, exchange, floats, leave, line_to, mean, parcel, patient, secret, until,
    until_released, wanted,
};
use crate::peer::Peer;
use crate::relay::Relay;

/// Asks for the mean of two honest updates, 1 and 3, and of a bad one between them, which does
/// `act`. It is named with these words, and the mean without it is right.
fn bad(exchange: &Exchange, words: &str, act: impl FnOnce(&mut Peer, &Parcel) + Send) {
    let pool = Arc::default();
    let updates = [1, 2, 3].map(|seed| parcel(&floats(), seed, &pool));
    let deposits = [1, 3].map(|number| leave(exchange, number, &updates[usize::from(number) - 1]));
    exchange.expect(secret(2));
    let mut peer = Peer::join(exchange, "bad", &floats(), secret(2));
    let all = [wanted(1, 5.0), wanted(2, 1.0), wanted(3, 7.0)];
    std::thread::scope(|scope| {
        let averaged = scope.spawn(|| exchange.average(&all, PATIENCE));
        act(&mut peer, &updates[1]);
        let error = averaged.join().unwrap().err().unwrap();
        assert_eq!(error.culprit(), Some(secret(2)), "{error}");
        assert!(error.to_string().contains("client \"bad\" (127.0.0.1:"), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    });
    let without = exchange.average(&[all[0], all[2]], PATIENCE).unwrap();
    let updates = [(updates[0].as_ref(), 5.0), (updates[2].as_ref(), 7.0)];
    assert!(without.region().bytes() == mean(&floats(), &updates));
    [1, 3].into_iter().for_each(|number| exchange.release(secret(number)));
    deposits.iter().for_each(until_released);
}

#[test]
fn one_that_dies_in_mid_upload() {
    bad(&patient(), "closed", |peer, update| {
        peer.begin_upload(update);
        peer.send(update, 0.6, |_| {});
        peer.streams.clear();
        peer.control.shutdown(std::net::Shutdown::Both).unwrap();
    });
}

#[test]
fn one_that_dies_before_its_first_byte() {
    bad(&patient(), "closed", |peer, _| {
        peer.await_plan();
        peer.control.shutdown(std::net::Shutdown::Both).unwrap();
    });
}

#[test]
fn one_that_loses_a_data_channel() {
    bad(&patient(), "connection", |peer, update| {
        peer.begin_upload(update);
        peer.send(update, 0.5, |_| {});
        peer.streams[1].shutdown(std::net::Shutdown::Both).unwrap();
    });
}

#[test]
fn one_that_sends_other_bytes_than_it_announced() {
    bad(&patient(), "do not match their checksum", |peer, update| {
        peer.begin_upload(update);
        peer.send(update, 1.0, |bytes| *bytes.last_mut().unwrap() ^= 1);
    });
}

#[test]
fn one_that_stalls_in_mid_upload() {
    bad(&exchange(500), "no byte moved", |peer, update| {
        peer.begin_upload(update);
        peer.send(update, 0.6, |_| {});
    });
}

/// It lives, and agrees to everything, and sends nothing: an update that waits is due at once.
#[test]
fn one_that_never_begins() {
    bad(&exchange(500), "no byte moved", |peer, _| peer.agree());
}

#[test]
fn one_that_has_the_ticket_of_another_control_channel() {
    bad(&exchange(500), "data connections", |peer, _| {
        let ticket = peer.await_plan().ticket;
        let answer = peer.open_with(0, &ticket);
        assert_eq!(answer, fedlane::wire::hello::Answer::WrongTicket);
    });
}

#[test]
fn one_that_knows_the_place_and_not_the_secret() {
    let exchange = patient();
    exchange.expect(secret(1));
    crate::peer::knock_without_secret(&exchange, secret(1).place());
    assert!(!exchange.has_met("eve"));
}

#[test]
fn a_wrong_secret_finds_no_place() {
    let exchange = patient();
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    let wrong = Deposit::leave(line_to(exchange.address(), "wrong"), secret(2), update).unwrap();
    until("the client is told that it is not wanted", || wrong.is_over());
    assert!(!exchange.has_met("wrong"));
}

#[test]
fn a_join_that_is_changed_on_the_way_admits_nothing() {
    let exchange = exchange(500);
    let relay = Relay::to(exchange.address());
    relay.tamper(true);
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    let line = line_to(relay.address, "client-1");
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    let error = exchange.collect(secret(1), SHORT).err().unwrap();
    assert!(matches!(error, ExchangeError::Missing { .. }), "{error}");
    assert!(relay.accepted() >= 1 && !exchange.has_met("klient-1"));
    // With an honest network the update comes, as it was.
    relay.tamper(false);
    relay.cut();
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert!(collected.region().bytes() == update.region().bytes());
    until_released(&deposit);
}

#[test]
fn an_update_whose_connections_break_in_mid_upload_comes_when_it_is_asked_for_again() {
    let exchange = patient();
    let relay = Relay::to(exchange.address());
    exchange.expect(secret(1));
    let update = parcel(&floats(), 1, &Arc::default());
    let line = line_to(relay.address, "client-1");
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| exchange.collect(secret(1), PATIENCE));
        // The control channel and both data channels.
        until("the upload begins", || relay.accepted() >= 3);
        relay.cut();
        // It may have been too late to break.
        if let Err(error) = first.join().unwrap() {
            assert_eq!(error.culprit(), Some(secret(1)));
            let again = exchange.collect(secret(1), PATIENCE).unwrap();
            assert!(again.region().bytes() == update.region().bytes());
        }
    });
    until_released(&deposit);
}
