//! Clipped means: the bits of no clipping where nothing is clipped, and within their bound otherwise.

use dashu_ratio::RBig;
use fedlane::error::ReducerError;
use fedlane::limits::MIN_CLIP_FACTOR;
use fedlane::reducer::{
    ClipBase, Level, Norm, Weights, accumulate_at, accumulator, clip_factor, complete_at, inspect,
};
use fedlane::reference::{Contribution, check};
use proptest::prelude::*;
use proptest::sample::select;
use safetensors::Dtype;

/// The mean as a lane makes it, of all clients that `weights` knows, the model included.
fn mean(level: Level, dtype: Dtype, weights: &Weights, tensors: &[&[u8]]) -> Vec<u8> {
    assert_eq!(weights.clients(), tensors.len());
    let elements = tensors[0].len() * 8 / dtype.bitsize();
    let bytes = accumulator("", dtype).unwrap().bytes() as usize * elements;
    let mut sums = vec![0u64; bytes.div_ceil(8)];
    let sums = &mut zerocopy::IntoBytes::as_mut_bytes(&mut sums[..])[..bytes];
    let mut out = vec![0; tensors[0].len()];
    let last = tensors.len() - 1;
    for (client, payload) in tensors.iter().enumerate() {
        let (first, weight) = (client == 0, weights.get(client).unwrap());
        if client == last {
            complete_at(level, dtype, first, weight, weights, payload, sums, &mut out).unwrap();
        } else {
            accumulate_at(level, dtype, first, weight, payload, sums).unwrap();
        }
    }
    out
}

/// Little-endian elements of F32 or F64.
fn encode(dtype: Dtype, numbers: &[f64]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => numbers.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => {
            bytes.as_chunks().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect()
        }
        _ => bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect(),
    }
}

fn exact(x: f64) -> RBig {
    RBig::try_from(x).unwrap()
}

fn abs(x: RBig) -> RBig {
    if x < RBig::ZERO { -x } else { x }
}

fn power_of_two(n: i32) -> RBig {
    RBig::from(2).pow(n as isize)
}

/// One client: its weight, its factor, and its one element.
type Client = (f64, f64, f64);

fn clients() -> impl Strategy<Value = Vec<Client>> {
    let weight = prop_oneof![
        1 => Just(0.0),
        4 => (1u32..5000).prop_map(f64::from),
        4 => 1e-6..1e6f64,
    ];
    let factor = prop_oneof![
        2 => Just(1.0),
        4 => 0.01..1.0f64,
        1 => (0..48i32).prop_map(|e| 2f64.powi(-e)),
        1 => Just(1.0 - f64::EPSILON / 2.0),
        1 => Just(MIN_CLIP_FACTOR),
    ];
    let value = (-2.0..2.0f64, -20..20i32).prop_map(|(m, e)| m * 2f64.powi(e));
    prop::collection::vec((weight, factor, value), 1..20)
        .prop_filter("one client counts", |clients| clients.iter().any(|(w, _, _)| *w > 0.0))
}

/// Bits after the leading one, exponent of the least number, u, roundings of K clients, underflow.
struct Bound(i32, i32, i32, fn(usize) -> usize, i32);

fn bound(dtype: Dtype) -> Bound {
    match dtype {
        Dtype::F32 => Bound(23, -149, -24, |k| k + 6, -148),
        _ => Bound(52, -1074, -53, |k| 4 * k + 6, -1072),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_clipped_mean_is_within_its_bound(
        dtype in select(&[Dtype::F32, Dtype::F64][..]),
        clients in clients(),
        model in -2.0..2.0f64,
        base in select(&[ClipBase::Model, ClipBase::Zero][..]),
    ) {
        let weights: Vec<f64> = clients.iter().map(|c| c.0).collect();
        let factors: Vec<f64> = clients.iter().map(|c| c.1).collect();
        let scaled = Weights::clipped(&weights, &factors, base).unwrap();
        let mut tensors: Vec<Vec<u8>> = clients.iter().map(|c| encode(dtype, &[c.2])).collect();
        let clipped = clients.iter().any(|(w, s, _)| *w > 0.0 && *s < 1.0);
        let with_model = clipped && base == ClipBase::Model;
        prop_assert_eq!(scaled.clients(), clients.len() + usize::from(with_model));
        if with_model {
            tensors.push(encode(dtype, &[model]));
        }
        let tensors: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let out = mean(Level::best(), dtype, &scaled, &tensors);
        for level in Level::available() {
            prop_assert_eq!(&out, &mean(level, dtype, &scaled, &tensors), "{:?}", level);
        }
        let got = decode(dtype, &out)[0];

        let model = if base == ClipBase::Model { decode(dtype, &encode(dtype, &[model]))[0] } else { 0.0 };
        let (mut sum, mut spread, mut total) = (RBig::ZERO, RBig::ZERO, RBig::ZERO);
        for ((weight, factor, _), tensor) in clients.iter().zip(&tensors) {
            let (weight, factor) = (exact(*weight), exact(*factor));
            let x = weight.clone() * factor.clone() * exact(decode(dtype, tensor)[0]);
            let g = weight.clone() * (RBig::ONE - factor) * exact(model);
            spread += abs(x.clone()) + abs(g.clone());
            sum += x + g;
            total += weight;
        }
        let expected = sum / total.clone();
        let Bound(mantissa_bits, least, u, roundings, underflow) = bound(dtype);
        let contributions = clients.len() + 1;
        let mut exponent = least + mantissa_bits;
        while power_of_two(exponent + 1) <= abs(expected.clone()) {
            exponent += 1;
        }
        let tolerance = power_of_two(exponent - mantissa_bits - 1)
            + RBig::from(roundings(contributions)) * power_of_two(u) * spread / total
            + RBig::from(contributions + 1) * power_of_two(underflow);
        let error = abs(exact(got) - expected.clone());
        prop_assert!(error <= tolerance, "got {}, not {}", got, expected.to_f64().value());
    }

    #[test]
    fn nothing_clipped_is_bit_equal_to_no_clipping(clients in clients(), base in select(&[ClipBase::Model, ClipBase::Zero][..])) {
        let weights: Vec<f64> = clients.iter().map(|c| c.0).collect();
        // Whatever the factor of one that does not count.
        let factors: Vec<f64> = clients.iter().map(|c| if c.0 > 0.0 { 1.0 } else { c.1 }).collect();
        prop_assert_eq!(Weights::clipped(&weights, &factors, base), Weights::new(&weights));
    }

    #[test]
    fn integers_and_bools_are_not_clipped(clients in clients(), dtype in select(&[Dtype::I8, Dtype::U8, Dtype::BOOL, Dtype::I64][..]), seed in any::<u64>()) {
        let weights: Vec<f64> = clients.iter().map(|c| c.0).collect();
        let factors: Vec<f64> = clients.iter().map(|c| c.1).collect();
        let payload = |client: usize| -> Vec<u8> {
            let bits = seed.rotate_left(client as u32 * 7) & 0x0101_0101_7f7f_7f7f;
            bits.to_le_bytes().to_vec()
        };
        let mut tensors: Vec<Vec<u8>> = (0..clients.len()).map(payload).collect();
        let plain = Weights::new(&weights).unwrap();
        let scaled = Weights::clipped(&weights, &factors, ClipBase::Model).unwrap();
        let slices: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let expected = mean(Level::best(), dtype, &plain, &slices);
        if scaled.clients() > clients.len() {
            tensors.push(vec![0xff; 8]);
        }
        let slices: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(mean(Level::best(), dtype, &scaled, &slices), expected);
    }
}

/// Clips as users of NumPy do: the update less the model, scaled, and the model added again.
fn clipped_as_vectors(update: &[f64], model: &[f64], clip_norm: f64) -> Vec<f64> {
    let change: Vec<f64> = update.iter().zip(model).map(|(x, g)| x - g).collect();
    let norm = change.iter().map(|d| d * d).sum::<f64>().sqrt();
    let factor = (clip_norm / norm).min(1.0);
    model.iter().zip(change).map(|(g, d)| g + factor * d).collect()
}

#[test]
fn a_whole_round_clips_as_vectors_do() {
    const CLIP_NORM: f64 = 2.0;
    let model: Vec<f64> = (0..300).map(|i| f64::from(i % 7) - 3.0).collect();
    // Distances of the clients from the model: within the norm, at it, beyond, far beyond.
    let client = |scale: f64, seed: i32| -> Vec<f64> {
        let change = |i: i32| scale * f64::from((i * seed) % 11 - 5);
        model.iter().zip(0..).map(|(g, i)| g + change(i)).collect()
    };
    let updates = [client(1e-3, 3), client(0.05, 5), client(1.0, 7), client(1e6, 2)];
    let weights = [10.0, 20.0, 30.0, 5.0];
    for base in [ClipBase::Model, ClipBase::Zero] {
        let from: Vec<f64> = match base {
            ClipBase::Model => model.clone(),
            ClipBase::Zero => vec![0.0; model.len()],
        };
        let (from_bytes, dtype) = (encode(Dtype::F32, &from), Dtype::F32);
        let mut tensors: Vec<Vec<u8>> = updates.iter().map(|x| encode(dtype, x)).collect();
        let factor = |update: &Vec<u8>| {
            let norm = match base {
                ClipBase::Model => Norm::OfChange(&from_bytes),
                ClipBase::Zero => Norm::OfUpdate,
            };
            let squares = inspect(dtype, update, norm).unwrap().squares.unwrap();
            clip_factor(squares.sqrt(), CLIP_NORM)
        };
        let factors: Vec<f64> = tensors.iter().map(factor).collect();
        assert_eq!(factors[0] == 1.0, base == ClipBase::Model);
        assert!(factors[1..].iter().all(|factor| *factor < 1.0));

        let mut expected = vec![0.0; model.len()];
        for (bytes, weight) in tensors.iter().zip(weights) {
            let clipped = clipped_as_vectors(&decode(dtype, bytes), &from, CLIP_NORM);
            expected.iter_mut().zip(clipped).for_each(|(sum, x)| *sum += weight * x / 65.0);
        }
        let scaled = Weights::clipped(&weights, &factors, base).unwrap();
        if base == ClipBase::Model {
            tensors.push(from_bytes.clone());
        }
        let slices: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let out = mean(Level::best(), dtype, &scaled, &slices);
        for (got, expected) in decode(dtype, &out).into_iter().zip(&expected) {
            // 12 roundings of numbers below 4.
            assert!((got - expected).abs() <= 12.0 * 4.0 * 2f64.powi(-24), "{got} {expected}");
        }
        // No mean of clipped updates is further away than the norm allows.
        let squares = inspect(dtype, &out, Norm::OfChange(&from_bytes)).unwrap().squares.unwrap();
        assert!(squares.sqrt() <= CLIP_NORM * (1.0 + 1e-6));
        // The reference average agrees, with the model as one more client.
        if base == ClipBase::Model {
            let kept = weights.iter().zip(&factors).map(|(w, s)| w * s);
            let rest = weights.iter().zip(&factors).map(|(w, s)| w * (1.0 - s)).sum();
            agrees_with_the_reference(&tensors, &kept.chain([rest]).collect::<Vec<f64>>(), &out);
        }
    }
}

fn agrees_with_the_reference(tensors: &[Vec<u8>], weights: &[f64], result: &[u8]) {
    let copy = |from: &[u8], offset: u64, to: &mut [u8]| {
        let start = offset as usize;
        to.copy_from_slice(&from[start..start + to.len()]);
        Ok(())
    };
    let readers: Vec<_> =
        tensors.iter().map(|tensor| move |at, to: &mut [u8]| copy(tensor, at, to)).collect();
    let contributions: Vec<Contribution<'_>> =
        readers.iter().zip(weights).map(|(read, &weight)| Contribution { weight, read }).collect();
    let runs = [(Dtype::F32, 0..result.len() as u64)];
    check(&runs, &contributions, &|at, to: &mut [u8]| copy(result, at, to), 1).unwrap();
}

#[test]
fn one_client_alone_is_clipped_too() {
    let scaled = Weights::clipped(&[7.0], &[0.25], ClipBase::Model).unwrap();
    let tensors = [encode(Dtype::F32, &[8.0]), encode(Dtype::F32, &[4.0])];
    let slices = [tensors[0].as_slice(), tensors[1].as_slice()];
    let out = mean(Level::best(), Dtype::F32, &scaled, &slices);
    assert_eq!(decode(Dtype::F32, &out), [5.0]);
    let scaled = Weights::clipped(&[7.0], &[0.25], ClipBase::Zero).unwrap();
    let out = mean(Level::best(), Dtype::F32, &scaled, &slices[..1]);
    assert_eq!(decode(Dtype::F32, &out), [2.0]);
}

#[test]
fn large_numbers_that_are_clipped_hard_keep_their_bits() {
    // The change is 2^40 long and is to be 1: only f32's own precision is lost.
    let (model, update) = ([1.0, 0.0], [1.0, 2f64.powi(40)]);
    let tensors = [encode(Dtype::F32, &update), encode(Dtype::F32, &model)];
    let change = inspect(Dtype::F32, &tensors[0], Norm::OfChange(&tensors[1])).unwrap();
    let factor = clip_factor(change.squares.unwrap().sqrt(), 1.0);
    let scaled = Weights::clipped(&[3.0], &[factor], ClipBase::Model).unwrap();
    let out = mean(Level::best(), Dtype::F32, &scaled, &[&tensors[0], &tensors[1]]);
    assert_eq!(decode(Dtype::F32, &out), [1.0, 1.0]);
}

#[test]
fn factors_follow_from_norms() {
    assert_eq!(clip_factor(0.0, 1.0), 1.0);
    assert_eq!(clip_factor(1.0, 1.0), 1.0);
    assert_eq!(clip_factor(4.0, 1.0), 0.25);
    assert_eq!(clip_factor(f64::INFINITY, f64::MAX), 0.0);
    let above = 1.0 + f64::EPSILON;
    assert!(clip_factor(above, 1.0) <= 1.0);
}

#[test]
fn bad_factors_are_refused_by_client() {
    let clipped = |weights: &[f64], factors: &[f64]| {
        Weights::clipped(weights, factors, ClipBase::Model).map(drop)
    };
    for factor in [0.0, MIN_CLIP_FACTOR / 2.0, 1.5, -0.5, f64::INFINITY, f64::NEG_INFINITY] {
        let refused = Err(ReducerError::ClipFactor { client: 1, factor });
        assert_eq!(clipped(&[1.0, 1.0], &[0.5, factor]), refused);
        assert_eq!(clipped(&[1.0, 0.0], &[0.5, factor]), Ok(()));
    }
    let nan = clipped(&[1.0], &[f64::NAN]);
    assert!(matches!(nan, Err(ReducerError::ClipFactor { client: 0, factor }) if factor.is_nan()));
    let refused = Err(ReducerError::ClipFactors { weights: 2, factors: 1 });
    assert_eq!(clipped(&[1.0, 1.0], &[0.5]), refused);
    assert_eq!(clipped(&[0.0], &[0.5]), Err(ReducerError::NoWeight));
    assert_eq!(clipped(&[-1.0], &[0.5]), Err(ReducerError::Weight { client: 0, weight: -1.0 }));
}

#[test]
fn the_smallest_weight_and_factor_still_count() {
    // 2^-64 of the weight, clipped by 2^-48, of numbers near the largest: the product is 2^14.
    let weights = [1.0, 2f64.powi(-63)];
    let scaled = Weights::clipped(&weights, &[1.0, MIN_CLIP_FACTOR], ClipBase::Zero).unwrap();
    let tensors = [encode(Dtype::F32, &[0.0]), encode(Dtype::F32, &[2f64.powi(127)])];
    let out = mean(Level::best(), Dtype::F32, &scaled, &[&tensors[0], &tensors[1]]);
    assert_eq!(decode(Dtype::F32, &out), [2f64.powi(16)]);
}
