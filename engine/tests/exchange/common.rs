//! What tests of exchanges share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fedlane::exchange::{Deposit, Exchange, ExchangeConfig, LineConfig, Parcel, Wanted};
use fedlane::manifest::{Dtype, Manifest};
use fedlane::pool::RegionPool;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::wire::hello::Secret;

/// Longer than anything here takes; whatever waits so long hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Too short for a client that does not come, long enough for one that does.
pub const SHORT: Duration = Duration::from_millis(400);

/// An exchange that gives peers up after `deadline_ms`.
pub fn exchange(deadline_ms: u64) -> Exchange {
    let deadline = Duration::from_millis(deadline_ms);
    let config = ExchangeConfig { deadline, streams: 2, ..ExchangeConfig::default() };
    Exchange::listen("127.0.0.1:0", config).unwrap()
}

/// One that gives up nobody who lives.
pub fn patient() -> Exchange {
    exchange(10_000)
}

pub fn secret(number: u8) -> Secret {
    Secret::new([number; 32])
}

pub fn manifest(tensors: &[(&str, Dtype, &[u64])]) -> Manifest {
    let tensors =
        tensors.iter().map(|(name, dtype, shape)| ((*name).into(), *dtype, shape.to_vec()));
    Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap()
}

/// Some MB of f32, in more than one chunk for each stream.
pub fn floats() -> Manifest {
    manifest(&[("w", Dtype::F32, &[1_000_000]), ("b", Dtype::F32, &[])])
}

/// A model of generated numbers.
pub fn parcel(manifest: &Manifest, seed: u64, pool: &Arc<RegionPool>) -> Arc<Parcel> {
    let mut bytes = vec![0; manifest.data_bytes() as usize];
    Generator::new(manifest.clone(), seed).read(0, &mut bytes).unwrap();
    parcel_of(manifest, &bytes, pool)
}

/// A model of these bytes.
pub fn parcel_of(manifest: &Manifest, bytes: &[u8], pool: &Arc<RegionPool>) -> Arc<Parcel> {
    let mut region = pool.take(bytes.len() as u64).unwrap();
    region.bytes_mut().0.copy_from_slice(bytes);
    Arc::new(Parcel::new(manifest.clone(), region, pool).unwrap())
}

pub fn line_to(address: impl ToString, name: &str) -> LineConfig {
    LineConfig { deadline: Duration::from_secs(5), ..LineConfig::new(address.to_string(), name) }
}

pub fn line(exchange: &Exchange, name: &str) -> LineConfig {
    line_to(exchange.address(), name)
}

/// Leaves an update, and expects it.
pub fn leave(exchange: &Exchange, number: u8, update: &Arc<Parcel>) -> Deposit {
    exchange.expect(secret(number));
    let line = line(exchange, &format!("client-{number}"));
    Deposit::leave(line, secret(number), update.clone()).unwrap()
}

pub fn wanted(number: u8, weight: f64) -> Wanted {
    Wanted { secret: secret(number), weight }
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until an update is released.
#[track_caller]
pub fn until_released(deposit: &Deposit) {
    until("an update is released", || deposit.is_over());
    assert_eq!(deposit.failure(), None);
}

/// The weighted mean of f32, bf16, f64 and i64 tensors, in the order given: plain arithmetic of each
/// dtype, as NumPy does it.
pub fn mean(manifest: &Manifest, updates: &[(&Parcel, f64)]) -> Vec<u8> {
    let mut mean = Vec::new();
    for tensor in manifest.tensors() {
        let range = tensor.range.start as usize..tensor.range.end as usize;
        let inputs: Vec<(&[u8], f64)> = updates
            .iter()
            .map(|(p, weight)| (&p.region().bytes()[range.clone()], *weight))
            .collect();
        match tensor.dtype {
            Dtype::F32 => mean_of(
                &inputs,
                |b| f32::from_le_bytes(b).into(),
                true,
                |x| (x as f32).to_le_bytes(),
                &mut mean,
            ),
            Dtype::BF16 => mean_of(
                &inputs,
                |b| half::bf16::from_le_bytes(b).into(),
                true,
                |x| half::bf16::from_f32(x as f32).to_le_bytes(),
                &mut mean,
            ),
            Dtype::F64 => mean_of(&inputs, f64::from_le_bytes, false, f64::to_le_bytes, &mut mean),
            Dtype::I64 => mean_of(
                &inputs,
                |b| i64::from_le_bytes(b) as f64,
                false,
                |x| (x.round_ties_even() as i64).to_le_bytes(),
                &mut mean,
            ),
            other => panic!("{other} has no reference here"),
        }
    }
    mean
}

/// `acc += w * x` for each element, in f32 where `single`, and then divided by the sum of weights.
fn mean_of<const N: usize>(
    inputs: &[(&[u8], f64)],
    read: impl Fn([u8; N]) -> f64,
    single: bool,
    write: impl Fn(f64) -> [u8; N],
    mean: &mut Vec<u8>,
) {
    let total: f64 = inputs.iter().map(|(_, weight)| weight).sum();
    for index in 0..inputs[0].0.len() / N {
        let elements = inputs
            .iter()
            .map(|(bytes, weight)| (read(bytes[index * N..][..N].try_into().unwrap()), *weight));
        let result = match single {
            true => {
                let products = elements.map(|(x, weight)| weight as f32 * x as f32);
                f64::from(products.reduce(|sum, product| sum + product).unwrap() / total as f32)
            }
            false => {
                let products = elements.map(|(x, weight)| weight * x);
                products.reduce(|sum, product| sum + product).unwrap() / total
            }
        };
        mean.extend(write(result));
    }
}
