//! How an exchange ends, and what its clients make of that.

use std::net::TcpListener;
use std::sync::Arc;

use fedlane::error::ExchangeError;
use fedlane::exchange::{Deposit, Exchange, ExchangeConfig, LineConfig, fetch};
use fedlane::wire::message::AggregatorMessage;

use crate::common::{
    PATIENCE, SHORT, exchange, floats, leave, line, line_to, parcel, patient, secret, until,
    until_released, wanted,
};
use crate::peer::{Peer, join};

#[test]
fn those_who_wait_hear_that_the_exchange_ends() {
    let exchange = patient();
    let update = parcel(&floats(), 1, &Arc::default());
    let deposits = [1, 2, 3].map(|number| leave(&exchange, number, &update));
    let all_have_come = || (1..=3).all(|number| exchange.has_met(&format!("client-{number}")));
    until("the clients have come", all_have_come);
    drop(exchange);
    deposits.iter().for_each(until_released);
    assert_eq!(Arc::strong_count(&update), 1);
}

#[test]
fn the_port_of_an_exchange_that_ended_is_free_although_it_still_sends() {
    let exchange = patient();
    let address = exchange.address();
    exchange.offer(secret(1), parcel(&floats(), 1, exchange.pool()));
    let mut peer = Peer::come(&exchange, &join("slow", &[], secret(1).place()), secret(1));
    peer.agree();
    assert!(matches!(peer.next().unwrap(), AggregatorMessage::Download { .. }));
    peer.want(&floats());
    drop(exchange);
    let again = Exchange::listen(address, ExchangeConfig::default()).unwrap();
    drop(again);
    // What was under way still comes.
    assert_eq!(peer.receive(&floats()).len() as u64, floats().data_bytes());
}

#[test]
fn an_exchange_that_is_closed_awaits_nobody() {
    let exchange = patient();
    exchange.expect(secret(1));
    std::thread::scope(|scope| {
        let collected = scope.spawn(|| exchange.collect(secret(1), PATIENCE).err().unwrap());
        let averaged = scope.spawn(|| exchange.average(&[wanted(1, 1.0)], PATIENCE).err().unwrap());
        std::thread::sleep(SHORT);
        exchange.close();
        for error in [collected.join().unwrap(), averaged.join().unwrap()] {
            assert!(matches!(error, ExchangeError::Closed), "{error}");
        }
    });
    let error = exchange.collect(secret(1), PATIENCE).err().unwrap();
    assert!(matches!(error, ExchangeError::Closed), "{error}");
}

#[test]
fn an_exchange_that_is_closed_in_mid_transfer_hangs_nobody() {
    let exchange = exchange(500);
    let update = parcel(&floats(), 1, &Arc::default());
    let deposit = leave(&exchange, 1, &update);
    exchange.expect(secret(2));
    let mut peer = Peer::join(&exchange, "stalls", &floats(), secret(2));
    let both = [wanted(1, 1.0), wanted(2, 1.0)];
    std::thread::scope(|scope| {
        let averaged = scope.spawn(|| exchange.average(&both, PATIENCE).err().unwrap());
        peer.begin_upload(&update);
        exchange.close();
        let error = averaged.join().unwrap();
        assert_eq!(error.culprit(), Some(secret(2)), "{error}");
    });
    until("the deposit ends", || deposit.is_over());
    assert_eq!(Arc::strong_count(&update), 1);
}

#[test]
fn an_exchange_that_vanished_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let update = parcel(&floats(), 1, &Arc::default());
    let line = LineConfig { deadline: SHORT, ..line_to(address, "c") };
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    until("the deposit gives up", || deposit.is_over());
    let failure = deposit.failure().unwrap();
    assert!(failure.contains(&address.to_string()), "{failure}");
    assert_eq!(Arc::strong_count(&update), 1);
}

/// As when the process of an exchange is stopped, or something else listens there.
#[test]
fn a_port_that_never_answers_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let update = parcel(&floats(), 1, &Arc::default());
    let line = LineConfig { deadline: SHORT, ..line_to(address, "c") };
    let deposit = Deposit::leave(line.clone(), secret(1), update.clone()).unwrap();
    until("the deposit gives up", || deposit.is_over());
    assert!(deposit.failure().is_some());
    // Nor does one that is dropped hang on.
    let patient = LineConfig { deadline: PATIENCE, ..line };
    drop(Deposit::leave(patient, secret(1), update.clone()).unwrap());
    until("the deposit lets go of its update", || Arc::strong_count(&update) == 1);
}

/// The exchange was started anew, and knows nothing of the old updates.
#[test]
fn an_exchange_that_comes_back_tells_who_is_not_wanted() {
    let exchange = patient();
    let address = exchange.address();
    let update = parcel(&floats(), 1, &Arc::default());
    let line = LineConfig { deadline: PATIENCE, ..line_to(address, "c") };
    drop(exchange);
    let deposit = Deposit::leave(line, secret(1), update.clone()).unwrap();
    let again = Exchange::listen(address, ExchangeConfig::default()).unwrap();
    until_released(&deposit);
    drop(again);
}

#[test]
fn a_fetch_from_an_exchange_that_ends_does_not_hang() {
    let exchange = patient();
    exchange.offer(secret(1), parcel(&floats(), 1, exchange.pool()));
    let line = line(&exchange, "c");
    std::thread::scope(|scope| {
        let fetches: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| fetch(&line, secret(1), &Arc::default()).map(drop)))
            .collect();
        drop(exchange);
        for fetched in fetches {
            // In time or too late; but each ends.
            let _ = fetched.join().unwrap();
        }
    });
}
