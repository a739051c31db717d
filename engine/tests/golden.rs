//! The reducer against means computed by NumPy (tests/golden/make.py), bit for bit.

use std::path::Path;

use fedlane::reducer::{Level, Weights, accumulate_at, accumulator, finish_at};
use safetensors::Dtype;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    dtype: Dtype,
    weights: String,
    tensors: Vec<String>,
    mean: String,
}

fn from_hex(digits: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

fn mean(level: Level, case: &Case) -> String {
    let weights = from_hex(&case.weights);
    let weights: Vec<f64> =
        weights.as_chunks().0.iter().map(|&bytes| f64::from_le_bytes(bytes)).collect();
    let weights = Weights::new(&weights).unwrap();
    let mut out = vec![0; case.mean.len() / 2];
    let elements = out.len() * 8 / case.dtype.bitsize();
    let acc_bytes = accumulator("", case.dtype).unwrap().bytes() as usize * elements;
    let mut acc = vec![0u64; acc_bytes.div_ceil(8)];
    let acc = &mut zerocopy::IntoBytes::as_mut_bytes(&mut acc[..])[..acc_bytes];
    for (client, tensor) in case.tensors.iter().enumerate() {
        let weight = weights.get(client).unwrap();
        accumulate_at(level, case.dtype, client == 0, weight, &from_hex(tensor), acc).unwrap();
    }
    finish_at(level, case.dtype, &weights, acc, &mut out).unwrap();
    out.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn means_equal_those_of_numpy() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/golden.json");
    let text = std::fs::read_to_string(path).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 48);
    for (index, case) in cases.iter().enumerate() {
        for level in Level::available() {
            let got = mean(level, case);
            assert_eq!(got, case.mean, "case {index}: {:?} at {level:?}", case.dtype);
        }
    }
}
