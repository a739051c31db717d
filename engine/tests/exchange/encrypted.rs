//! Exchanges with TLS, whose certificate clients learn elsewhere.

use std::sync::Arc;
use std::time::Duration;

use fedlane::exchange::{Deposit, Exchange, ExchangeConfig, LineConfig, call, fetch};
use fedlane::tls::{ClientTls, ServerTls};

use crate::common::{
    PATIENCE, SHORT, floats, line, mean, parcel, secret, until, until_released, wanted,
};

/// An exchange with a certificate of its own, and that.
fn encrypted() -> (Exchange, ClientTls) {
    let (tls, certificate) = ServerTls::self_signed().unwrap();
    let deadline = Duration::from_secs(10);
    let config =
        ExchangeConfig { deadline, streams: 2, tls: Some(tls), ..ExchangeConfig::default() };
    let exchange = Exchange::listen("127.0.0.1:0", config).unwrap();
    (exchange, ClientTls::pinned(&certificate).unwrap())
}

fn line_with(exchange: &Exchange, name: &str, tls: &ClientTls) -> LineConfig {
    LineConfig { tls: Some(tls.clone()), ..line(exchange, name) }
}

#[test]
fn models_and_updates_cross_it_bit_for_bit() {
    let (exchange, tls) = encrypted();
    let manifest = floats();
    let model = parcel(&manifest, 9, exchange.pool());
    exchange.offer(secret(9), model.clone());
    let line = line_with(&exchange, "client", &tls);
    call(&line, secret(9)).unwrap();
    let fetched = fetch(&line, secret(9), &Arc::default()).unwrap();
    assert!(fetched.region().bytes() == model.region().bytes());

    let updates = [1, 2].map(|seed| parcel(&manifest, seed, exchange.pool()));
    let deposits: Vec<Deposit> = (1..)
        .zip(&updates)
        .map(|(number, update)| {
            exchange.expect(secret(number));
            Deposit::leave(line.clone(), secret(number), update.clone()).unwrap()
        })
        .collect();
    let average = exchange.average(&[wanted(1, 1.0), wanted(2, 3.0)], PATIENCE).unwrap();
    let expected = mean(&manifest, &[(&updates[0], 1.0), (&updates[1], 3.0)]);
    assert!(average.region().bytes() == expected);
    let collected = exchange.collect(secret(1), PATIENCE).unwrap();
    assert!(collected.region().bytes() == updates[0].region().bytes());
    exchange.release(secret(2));
    deposits.iter().for_each(until_released);
}

/// Who knows the secret of a place, but not the certificate, has nothing of it; nor has who trusts
/// another exchange.
#[test]
fn the_secret_alone_opens_nothing() {
    let (exchange, _) = encrypted();
    let (_, other) = encrypted();
    let model = parcel(&floats(), 9, exchange.pool());
    exchange.offer(secret(9), model.clone());
    let refusal =
        |line| fetch(&line, secret(9), &Arc::default()).map(drop).unwrap_err().to_string();
    let plain = refusal(line(&exchange, "plain"));
    assert!(plain.contains("TLS is wanted here"), "{plain}");
    let foreign = refusal(line_with(&exchange, "foreign", &other));
    assert!(foreign.contains("TLS:"), "{foreign}");
    assert!(!exchange.has_met("plain") && !exchange.has_met("foreign"));

    // An update that cannot be left is not there, and its client hears why.
    exchange.expect(secret(1));
    let hasty = LineConfig { deadline: SHORT, ..line_with(&exchange, "foreign", &other) };
    let deposit = Deposit::leave(hasty, secret(1), model).unwrap();
    until("the client gives up", || deposit.is_over());
    assert!(deposit.failure().unwrap().contains("TLS:"));
    exchange.await_update(secret(1), SHORT).unwrap_err();
}
