//! Means of updates that wait.

use std::sync::Arc;

use fedlane::error::ExchangeError;
use fedlane::exchange::{Deposit, Exchange, Parcel, Wanted, fetch};
use fedlane::manifest::{Dtype, Manifest};

use crate::common::{
    PATIENCE, SHORT, floats, leave, line, manifest, mean, parcel, patient, secret, until,
    until_released, wanted,
};

/// Tensors of every kind of sum.
fn mixed() -> Manifest {
    manifest(&[
        ("w", Dtype::F32, &[300, 1000]),
        ("scalar", Dtype::F32, &[]),
        ("nothing", Dtype::F32, &[0]),
        ("brain", Dtype::BF16, &[600_001]),
        ("double", Dtype::F64, &[70_000]),
        ("steps", Dtype::I64, &[1001]),
    ])
}

/// Leaves these updates, numbered from 1, one after the other in this order.
fn leave_all(exchange: &Exchange, updates: &[Arc<Parcel>], order: &[usize]) -> Vec<Deposit> {
    let mut deposits = Vec::new();
    for &index in order {
        let number = index as u8 + 1;
        deposits.push(leave(exchange, number, &updates[index]));
        until("the client has come", || exchange.has_met(&format!("client-{number}")));
    }
    deposits
}

fn updates(manifest: &Manifest, count: u64) -> Vec<Arc<Parcel>> {
    let pool = Arc::default();
    (1..=count).map(|seed| parcel(manifest, seed, &pool)).collect()
}

const WEIGHTS: [f64; 5] = [600.0, 1.0, 37.0, 2048.0, 99.0];

fn all_wanted(order: &[usize]) -> Vec<Wanted> {
    order.iter().map(|&index| wanted(index as u8 + 1, WEIGHTS[index])).collect()
}

fn expected(manifest: &Manifest, updates: &[Arc<Parcel>], order: &[usize]) -> Vec<u8> {
    let updates: Vec<_> = order.iter().map(|&i| (updates[i].as_ref(), WEIGHTS[i])).collect();
    mean(manifest, &updates)
}

fn release_all(exchange: &Exchange, deposits: &[Deposit]) {
    (1..=deposits.len()).for_each(|number| exchange.release(secret(number as u8)));
    deposits.iter().for_each(until_released);
}

#[test]
fn a_mean_has_the_bits_of_its_order_whoever_came_first() {
    let updates = updates(&mixed(), 5);
    let orders = [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]];
    // Otherwise this test could not tell orders apart.
    assert!(expected(&mixed(), &updates, &orders[0]) != expected(&mixed(), &updates, &orders[1]));
    for arrival in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 1, 0, 3]] {
        let exchange = patient();
        let deposits = leave_all(&exchange, &updates, &arrival);
        for order in orders {
            let mean = exchange.average(&all_wanted(&order), PATIENCE).unwrap();
            assert_eq!(mean.manifest().layout_digest(), mixed().layout_digest());
            let is_right = mean.region().bytes() == expected(&mixed(), &updates, &order);
            assert!(is_right, "came as {arrival:?}, wanted as {order:?}");
        }
        release_all(&exchange, &deposits);
    }
}

#[test]
fn a_mean_can_be_offered_as_it_is() {
    let exchange = patient();
    let updates = updates(&mixed(), 3);
    let deposits = leave_all(&exchange, &updates, &[0, 1, 2]);
    let mean = exchange.average(&all_wanted(&[0, 1, 2]), PATIENCE).unwrap();
    exchange.offer(secret(9), Arc::new(mean));
    let fetched = fetch(&line(&exchange, "c"), secret(9), &Arc::default()).unwrap();
    assert!(fetched.region().bytes() == expected(&mixed(), &updates, &[0, 1, 2]));
    release_all(&exchange, &deposits);
}

#[test]
fn updates_can_be_averaged_again_and_collected_until_they_are_released() {
    let exchange = patient();
    let updates = updates(&mixed(), 3);
    let deposits = leave_all(&exchange, &updates, &[0, 1, 2]);
    for order in [&[0, 1, 2][..], &[1, 0], &[2, 1, 0]] {
        let mean = exchange.average(&all_wanted(order), PATIENCE).unwrap();
        assert!(mean.region().bytes() == expected(&mixed(), &updates, order));
    }
    let collected = exchange.collect(secret(2), PATIENCE).unwrap();
    assert!(collected.region().bytes() == updates[1].region().bytes());
    release_all(&exchange, &deposits);
    updates.iter().for_each(|update| assert_eq!(Arc::strong_count(update), 1));
}

#[test]
fn the_mean_of_one_is_itself() {
    let exchange = patient();
    let updates = updates(&mixed(), 1);
    let deposits = leave_all(&exchange, &updates, &[0]);
    let mean = exchange.average(&[wanted(1, 3.0)], PATIENCE).unwrap();
    // Without a rounding: a weight alone is one.
    assert!(mean.region().bytes() == self::mean(&mixed(), &[(&updates[0], 1.0)]));
    release_all(&exchange, &deposits);
}

#[test]
fn models_without_bytes_have_a_mean() {
    let exchange = patient();
    let model = manifest(&[("e", Dtype::F32, &[0])]);
    let updates = updates(&model, 2);
    let deposits = leave_all(&exchange, &updates, &[0, 1]);
    let mean = exchange.average(&all_wanted(&[0, 1]), PATIENCE).unwrap();
    assert_eq!(mean.manifest().layout_digest(), model.layout_digest());
    release_all(&exchange, &deposits);
}

#[test]
fn an_update_of_another_layout_is_named_and_the_others_wait_on() {
    let exchange = patient();
    let mut updates = updates(&floats(), 3);
    updates[1] = parcel(&mixed(), 2, &Arc::default());
    let deposits = leave_all(&exchange, &updates, &[0, 1, 2]);
    let error = exchange.average(&all_wanted(&[0, 1, 2]), PATIENCE).err().unwrap();
    assert!(matches!(error, ExchangeError::Model { .. }), "{error}");
    assert_eq!(error.culprit(), Some(secret(2)));
    assert!(error.to_string().contains("\"w\""), "{error}");
    // Nobody had to come back for this.
    let without = all_wanted(&[0, 2]);
    let mean = exchange.average(&without, std::time::Duration::ZERO).unwrap();
    assert!(mean.region().bytes() == expected(&floats(), &updates, &[0, 2]));
    release_all(&exchange, &deposits);
}

#[test]
fn a_dtype_without_a_mean_is_named_and_the_updates_come_back() {
    let exchange = patient();
    let model = manifest(&[("w", Dtype::F32, &[8]), ("tiny", Dtype::F8_E5M2, &[8])]);
    let updates = updates(&model, 2);
    let deposits = leave_all(&exchange, &updates, &[0, 1]);
    let error = exchange.average(&all_wanted(&[0, 1]), PATIENCE).err().unwrap();
    assert!(
        error.to_string().contains("\"tiny\"") || error.to_string().contains("tiny"),
        "{error}"
    );
    assert_eq!(error.culprit(), None);
    for number in [1, 2] {
        let collected = exchange.collect(secret(number), PATIENCE).unwrap();
        assert!(collected.region().bytes() == updates[number as usize - 1].region().bytes());
    }
    release_all(&exchange, &deposits);
}

#[test]
fn weights_that_cannot_be_used_are_refused() {
    let exchange = patient();
    let updates = updates(&floats(), 2);
    let deposits = leave_all(&exchange, &updates, &[0, 1]);
    for (weight, culprit) in
        [(-1.0, true), (f64::NAN, true), (f64::MIN_POSITIVE, true), (f64::MAX, true)]
    {
        let others = if weight == f64::MAX { f64::MAX } else { 1.0 };
        let wanted = [wanted(1, others), wanted(2, weight)];
        let error = exchange.average(&wanted, PATIENCE).err().unwrap();
        assert_eq!(error.culprit().is_some(), culprit, "{weight}: {error}");
        assert!(error.culprit().is_none_or(|culprit| culprit == secret(2)), "{weight}: {error}");
    }
    let error = exchange.average(&[wanted(1, 0.0), wanted(2, 0.0)], PATIENCE).err().unwrap();
    assert!(error.to_string().contains("zero"), "{error}");
    let twice = [wanted(1, 1.0), wanted(2, 1.0), wanted(1, 2.0)];
    let error = exchange.average(&twice, PATIENCE).err().unwrap();
    assert!(matches!(error, ExchangeError::Twice { .. }), "{error}");
    assert_eq!(error.culprit(), Some(secret(1)));
    assert!(matches!(exchange.average(&[], PATIENCE), Err(ExchangeError::Nobody)));
    // After all that both are still there.
    let mean = exchange.average(&all_wanted(&[0, 1]), PATIENCE).unwrap();
    assert!(mean.region().bytes() == expected(&floats(), &updates, &[0, 1]));
    release_all(&exchange, &deposits);
}

#[test]
fn one_that_is_missing_is_named_and_the_others_wait_on() {
    let exchange = patient();
    let updates = updates(&floats(), 3);
    let deposits = leave_all(&exchange, &updates, &[0, 2]);
    exchange.expect(secret(2));
    let error = exchange.average(&all_wanted(&[0, 1, 2]), SHORT).err().unwrap();
    assert!(matches!(error, ExchangeError::Missing { .. }), "{error}");
    assert_eq!(error.culprit(), Some(secret(2)));
    let mean = exchange.average(&all_wanted(&[0, 2]), std::time::Duration::ZERO).unwrap();
    assert!(mean.region().bytes() == expected(&floats(), &updates, &[0, 2]));
    [1, 3].into_iter().for_each(|number| exchange.release(secret(number)));
    deposits.iter().for_each(until_released);
}

#[test]
fn many_transfers_go_through_one_port_at_once() {
    let exchange = patient();
    let pool = Arc::default();
    let averaged = updates(&mixed(), 5);
    let deposits = leave_all(&exchange, &averaged, &[3, 1, 4, 0, 2]);
    let model = parcel(&mixed(), 77, exchange.pool());
    exchange.offer(secret(99), model.clone());
    let collect = |number: u8| {
        let update = parcel(&mixed(), number.into(), &pool);
        let deposit = leave(&exchange, number, &update);
        let collected = exchange.collect(secret(number), PATIENCE).unwrap();
        assert!(collected.region().bytes() == update.region().bytes(), "update {number}");
        until_released(&deposit);
    };
    let fetch_one = |number: u8| {
        let line = line(&exchange, &format!("fetcher {number}"));
        let fetched = fetch(&line, secret(99), &Arc::default()).unwrap();
        assert!(fetched.region().bytes() == model.region().bytes(), "fetch {number}");
    };
    std::thread::scope(|scope| {
        (100..108).for_each(|number| drop(scope.spawn(move || collect(number))));
        (0..8).for_each(|number| drop(scope.spawn(move || fetch_one(number))));
        let mean = exchange.average(&all_wanted(&[0, 1, 2, 3, 4]), PATIENCE).unwrap();
        let expected = expected(&mixed(), &averaged, &[0, 1, 2, 3, 4]);
        assert!(mean.region().bytes() == expected);
    });
    release_all(&exchange, &deposits);
}

/// Adds the updates of `order` in waves of these sizes.
fn in_waves(exchange: &Exchange, order: &[usize], sizes: &[usize]) -> Parcel {
    let mut rest = order;
    let mut sums = None;
    for &size in sizes {
        let (wave, after) = rest.split_at(size);
        rest = after;
        sums = Some(exchange.add(sums, &all_wanted(wave), PATIENCE).unwrap());
    }
    assert!(rest.is_empty(), "the sizes of the waves fit");
    exchange.finish(sums.unwrap()).unwrap()
}

#[test]
fn a_mean_in_waves_has_the_bits_of_one_at_once() {
    for model in [mixed(), floats()] {
        let exchange = patient();
        let updates = updates(&model, 5);
        let deposits = leave_all(&exchange, &updates, &[0, 1, 2, 3, 4]);
        let order = [1, 3, 0, 4, 2];
        for sizes in [&[5][..], &[1, 4], &[1, 1, 1, 1, 1], &[2, 3], &[4, 1], &[2, 1, 2]] {
            let mean = in_waves(&exchange, &order, sizes);
            assert!(mean.region().bytes() == expected(&model, &updates, &order), "{sizes:?}");
            // Its checksums are right: it can be offered.
            exchange.offer(secret(9), Arc::new(mean));
            let fetched = fetch(&line(&exchange, "c"), secret(9), &Arc::default()).unwrap();
            assert!(fetched.region().bytes() == expected(&model, &updates, &order));
            exchange.release(secret(9));
        }
        release_all(&exchange, &deposits);
    }
}

#[test]
fn a_mean_in_waves_of_which_only_one_came_is_that_one() {
    let exchange = patient();
    let updates = updates(&mixed(), 1);
    let deposits = leave_all(&exchange, &updates, &[0]);
    let mean = in_waves(&exchange, &[0], &[1]);
    assert!(mean.region().bytes() == self::mean(&mixed(), &[(&updates[0], 1.0)]));
    release_all(&exchange, &deposits);
}

#[test]
fn a_wave_of_another_layout_is_an_error() {
    let exchange = patient();
    let mut updates = updates(&floats(), 2);
    updates[1] = parcel(&mixed(), 2, &Arc::default());
    let deposits = leave_all(&exchange, &updates, &[0, 1]);
    let sums = exchange.add(None, &all_wanted(&[0]), PATIENCE).unwrap();
    let error = exchange.add(Some(sums), &all_wanted(&[1]), PATIENCE).err().unwrap();
    assert!(error.to_string().contains("differ"), "{error}");
    release_all(&exchange, &deposits);
}
