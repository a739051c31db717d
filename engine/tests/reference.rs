//! The reference average accepts what the reducer makes and finds what is wrong.

use std::io;

use fedlane::error::ReferenceError;
use fedlane::reducer::{Weights, accumulate, accumulator, finish};
use fedlane::reference::{Checked, Contribution, check};
use half::{bf16, f16};
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use safetensors::Dtype;

const AVERAGED: [Dtype; 13] = [
    Dtype::BOOL,
    Dtype::U8,
    Dtype::I8,
    Dtype::U16,
    Dtype::I16,
    Dtype::U32,
    Dtype::I32,
    Dtype::U64,
    Dtype::I64,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
    Dtype::F64,
];

fn read(bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync {
    move |offset, out| {
        let range = offset as usize..offset as usize + out.len();
        out.copy_from_slice(bytes.get(range).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    Xoshiro256PlusPlus::seed_from_u64(seed).fill_bytes(&mut out);
    out
}

fn mean(dtype: Dtype, weights: &[f64], tensors: &[Vec<u8>]) -> Vec<u8> {
    let scaled = Weights::new(weights).unwrap();
    let mut out = vec![0; tensors[0].len()];
    let elements = out.len() / (dtype.bitsize() / 8);
    let mut words = vec![0u64; elements];
    let bytes = accumulator("", dtype).unwrap().bytes() as usize * elements;
    let acc = &mut zerocopy::IntoBytes::as_mut_bytes(&mut words[..])[..bytes];
    for (client, tensor) in tensors.iter().enumerate() {
        accumulate(dtype, client == 0, scaled.get(client).unwrap(), tensor, acc).unwrap();
    }
    finish(dtype, &scaled, acc, &mut out).unwrap();
    out
}

fn check_one(
    dtype: Dtype,
    weights: &[f64],
    tensors: &[Vec<u8>],
    result: &[u8],
) -> Result<Checked, ReferenceError> {
    let reads: Vec<_> = tensors.iter().map(|tensor| read(tensor)).collect();
    let pairs = weights.iter().zip(&reads);
    let contributions: Vec<_> =
        pairs.map(|(&weight, read)| Contribution { weight, read }).collect();
    check(&[(dtype, 0..result.len() as u64)], &contributions, &read(result), 2)
}

/// Random bits hold every NaN, infinity and subnormal of the small dtypes.
#[test]
fn results_of_the_reducer_are_accepted() {
    for (seed, dtype) in AVERAGED.into_iter().enumerate() {
        for clients in [1, 2, 7] {
            let weights: Vec<f64> = (0..clients).map(|c| 1.0 + 0.37 * f64::from(c)).collect();
            let tensors: Vec<_> =
                (0..clients).map(|c| random((100 * seed) as u64 + c as u64, 320_000)).collect();
            let result = mean(dtype, &weights, &tensors);
            let checked = check_one(dtype, &weights, &tensors, &result).unwrap();
            assert_eq!(checked.elements, 320_000 * 8 / dtype.bitsize() as u64, "{dtype:?}");
        }
    }
}

#[test]
fn the_mean_of_the_largest_numbers_is_accepted() {
    for (dtype, largest) in [
        (Dtype::F32, f32::MAX.to_le_bytes().to_vec()),
        (Dtype::F64, f64::MAX.to_le_bytes().to_vec()),
        (Dtype::F16, f16::MAX.to_le_bytes().to_vec()),
        (Dtype::BF16, bf16::MIN.to_le_bytes().to_vec()),
        (Dtype::U64, u64::MAX.to_le_bytes().to_vec()),
        (Dtype::I64, i64::MIN.to_le_bytes().to_vec()),
    ] {
        let (weights, tensors) = ([0.1, 0.7, 0.3], vec![largest; 3]);
        let result = mean(dtype, &weights, &tensors);
        check_one(dtype, &weights, &tensors, &result).unwrap();
    }
}

#[test]
fn a_wrong_element_is_named() {
    let tensors = [random(1, 400_000), random(2, 400_000)].map(|mut tensor| {
        // Exponents near that of one: no NaN.
        tensor.iter_mut().skip(3).step_by(4).for_each(|b| *b = 0x3f);
        tensor
    });
    let mut result = mean(Dtype::F32, &[1.0, 2.0], &tensors);
    check_one(Dtype::F32, &[1.0, 2.0], &tensors, &result).unwrap();
    for offset in [399_996, 123_456] {
        let element = &mut result[offset..offset + 4];
        let value = f32::from_le_bytes(element.try_into().unwrap());
        element.copy_from_slice(&f32::from_bits(value.to_bits() + 8).to_le_bytes());
        match check_one(Dtype::F32, &[1.0, 2.0], &tensors, &result) {
            Err(ReferenceError::Differs { offset: found, got, .. }) => {
                assert!(found == offset as u64 || found == 399_996);
                assert!(got.is_finite());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn nan_infinity_and_votes_must_agree() {
    let f32s = |values: &[f32]| values.iter().map(|v| v.to_le_bytes().to_vec()).collect::<Vec<_>>();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let verdict = |inputs: &[f32], result: f32| {
        check_one(Dtype::F32, &vec![1.0; inputs.len()], &f32s(inputs), &result.to_le_bytes())
            .is_ok()
    };
    assert!(verdict(&[nan, 1.0], nan) && !verdict(&[nan, 1.0], 1.0) && !verdict(&[2.0, 1.0], nan));
    assert!(verdict(&[inf, 1.0], inf) && !verdict(&[inf, 1.0], -inf) && !verdict(&[inf, 1.0], 1.0));
    assert!(verdict(&[inf, -inf], nan) && !verdict(&[f32::MAX, f32::MAX], inf));

    let vote = |weights: &[f64], votes: &[u8], result: u8| {
        let tensors: Vec<_> = votes.iter().map(|&v| vec![v]).collect();
        check_one(Dtype::BOOL, weights, &tensors, &[result]).is_ok()
    };
    assert!(vote(&[1.0, 2.0], &[1, 0], 0) && !vote(&[1.0, 2.0], &[1, 0], 1));
    assert!(vote(&[1.0, 2.0], &[0, 9], 1) && !vote(&[1.0, 2.0], &[0, 1], 2));
    assert!(vote(&[1.0, 1.0], &[0, 1], 1) && vote(&[1.0, 1.0], &[0, 1], 0));
}

#[test]
fn a_client_of_weight_zero_is_not_read() {
    let unreadable = |_: u64, _: &mut [u8]| Err(io::ErrorKind::ConnectionReset.into());
    let one = 1f32.to_le_bytes();
    let contributions = [
        Contribution { weight: 0.0, read: &unreadable },
        Contribution { weight: 2.0, read: &read(&one) },
    ];
    let checked = check(&[(Dtype::F32, 0..4)], &contributions, &read(&one), 1).unwrap();
    assert_eq!(checked, Checked { elements: 1, largest_error: 0.0 });
}

#[test]
fn what_cannot_be_checked_is_an_error() {
    let bytes = [0; 16];
    let reader = read(&bytes);
    let run = |dtype, end, weight| {
        let contributions = [Contribution { weight, read: &reader }];
        check(&[(dtype, 0..end)], &contributions, &reader, 3).unwrap_err()
    };
    assert!(matches!(run(Dtype::F32, 16, 0.0), ReferenceError::Weights));
    assert!(matches!(run(Dtype::F32, 16, f64::NAN), ReferenceError::Weights));
    assert!(matches!(run(Dtype::F32, 15, 1.0), ReferenceError::Run { .. }));
    assert!(matches!(run(Dtype::C64, 16, 1.0), ReferenceError::Dtype { .. }));
    let missing = run(Dtype::F32, 20, 1.0);
    assert!(missing.to_string().contains("client 0"), "{missing}");
}
