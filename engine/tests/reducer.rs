//! The weighted mean: same bits at every level, within its error bound, and clear refusals.

use std::ops::Range;

use dashu_ratio::RBig;
use fedlane::error::ReducerError;
use fedlane::manifest::Manifest;
use fedlane::reducer::{
    AccumulatorLayout, AccumulatorType, Level, Weights, accumulate, accumulate_at,
    accumulate_held_at, accumulator, complete_at, finish, finish_at, is_own_sum,
};
use half::bf16;
use proptest::prelude::*;
use proptest::sample::select;
use safetensors::Dtype;

const DTYPES: [Dtype; 13] = [
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

fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// An aligned accumulator.
struct Sums {
    words: Vec<u64>,
    bytes: usize,
}

impl Sums {
    fn new(dtype: Dtype, elements: usize) -> Sums {
        let bytes = accumulator("", dtype).unwrap().bytes() as usize * elements;
        Sums { words: vec![u64::MAX; bytes.div_ceil(8)], bytes }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut zerocopy::IntoBytes::as_mut_bytes(&mut self.words[..])[..self.bytes]
    }
}

/// The mean at one level, with payloads and result `skew` bytes off alignment, and the sums.
fn mean(
    level: Level,
    dtype: Dtype,
    weights: &[f64],
    tensors: &[Vec<u8>],
    skew: usize,
) -> [Vec<u8>; 2] {
    let weights = Weights::new(weights).unwrap();
    let mut sums = Sums::new(dtype, tensors[0].len() / element_bytes(dtype));
    for (client, tensor) in tensors.iter().enumerate() {
        let skewed: Vec<u8> =
            std::iter::repeat_n(0xff, skew).chain(tensor.iter().copied()).collect();
        let weight = weights.get(client).unwrap();
        accumulate_at(level, dtype, client == 0, weight, &skewed[skew..], sums.get()).unwrap();
    }
    let mut out = vec![0; skew + tensors[0].len()];
    finish_at(level, dtype, &weights, sums.get(), &mut out[skew..]).unwrap();
    [out.split_off(skew), sums.get().to_vec()]
}

/// The mean as a lane makes it: the first payload stands for its sums where it can, and the last one
/// is folded in, divided and written in one pass.
fn mean_in_fewer_passes(
    level: Level,
    dtype: Dtype,
    weights: &[f64],
    tensors: &[Vec<u8>],
) -> Vec<u8> {
    let weights = Weights::new(weights).unwrap();
    let weight = |client: usize| weights.get(client).unwrap();
    let mut sums = Sums::new(dtype, tensors[0].len() / element_bytes(dtype));
    let mut out = vec![0; tensors[0].len()];
    let (last, others) = tensors.split_last().unwrap();
    let mut held = None;
    for (client, tensor) in others.iter().enumerate() {
        if client == 0 && is_own_sum(dtype) && weight(0).is_positive() {
            sums.get().copy_from_slice(tensor);
            held = Some(weight(0));
        } else if let (Some(first), true) = (held, weight(client).is_positive()) {
            let second = Some((weight(client), tensor.as_slice()));
            accumulate_held_at(level, dtype, first, second, sums.get()).unwrap();
            held = None;
        } else {
            if let Some(first) = held.take() {
                accumulate_held_at(level, dtype, first, None, sums.get()).unwrap();
            }
            accumulate_at(level, dtype, client == 0, weight(client), tensor, sums.get()).unwrap();
        }
    }
    if let Some(first) = held {
        accumulate_held_at(level, dtype, first, None, sums.get()).unwrap();
    }
    let (first, weight) = (others.is_empty(), weight(others.len()));
    complete_at(level, dtype, first, weight, &weights, last, sums.get(), &mut out).unwrap();
    out
}

fn f32_mean(weights: &[f64], values: &[f32]) -> f32 {
    let tensors: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
    let [out, _] = mean(Level::best(), Dtype::F32, weights, &tensors, 0);
    f32::from_le_bytes(out.try_into().unwrap())
}

fn f64_mean(weights: &[f64], values: &[f64]) -> f64 {
    let tensors: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
    let [out, _] = mean(Level::best(), Dtype::F64, weights, &tensors, 0);
    f64::from_le_bytes(out.try_into().unwrap())
}

/// Bytes of one element: any, or an extreme: zeros, ones, infinities, NaN, subnormals.
fn element(dtype: Dtype) -> impl Strategy<Value = Vec<u8>> {
    let bytes = element_bytes(dtype);
    let top = |high: u8, low: u8| {
        move |mut b: Vec<u8>| {
            let n = b.len();
            b[n - 1] = high;
            if n > 1 {
                b[n - 2] = low;
            }
            b
        }
    };
    let any_bytes = || prop::collection::vec(any::<u8>(), bytes);
    let zeros = || Just(vec![0; bytes]);
    prop_oneof![
        6 => any_bytes(),
        1 => zeros(),
        1 => zeros().prop_map(top(0x80, 0)),
        1 => zeros().prop_map(top(0x7f, 0x80)),
        1 => zeros().prop_map(top(0xff, 0xf0)),
        1 => zeros().prop_map(top(0x7c, 0)),
        1 => Just(vec![0xff; bytes]),
        2 => any_bytes().prop_map(top(0, 0)),
    ]
}

fn tensors(clients: Range<usize>) -> impl Strategy<Value = (Dtype, Vec<f64>, Vec<Vec<u8>>)> {
    (select(&DTYPES[..]), clients, 0usize..=130).prop_flat_map(|(dtype, clients, elements)| {
        let tensor = prop::collection::vec(element(dtype), elements).prop_map(|e| e.concat());
        let weights = prop::collection::vec(1e-3..1e3f64, clients);
        (Just(dtype), weights, prop::collection::vec(tensor, clients))
    })
}

/// The sums with every NaN made the same: its payload may depend on the order of operands.
fn without_payloads(dtype: Dtype, sums: &[u8]) -> Vec<u64> {
    match accumulator("", dtype).unwrap() {
        AccumulatorType::F32 => (sums.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)))
            .map(|x| if x.is_nan() { u64::MAX } else { x.to_bits().into() })
            .collect(),
        AccumulatorType::F64 => (sums.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)))
            .map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() })
            .collect(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_level_gives_the_same_bits((dtype, weights, tensors) in tensors(1..4), skew in 0usize..8) {
        let [out, sums] = mean(Level::Scalar, dtype, &weights, &tensors, 0);
        for level in Level::available() {
            let [other_out, other_sums] = mean(level, dtype, &weights, &tensors, skew);
            prop_assert_eq!(&out, &other_out, "{:?} {:?}", dtype, level);
            prop_assert_eq!(without_payloads(dtype, &sums), without_payloads(dtype, &other_sums));
            let fewer = mean_in_fewer_passes(level, dtype, &weights, &tensors);
            prop_assert_eq!(&out, &fewer, "{:?} {:?} in fewer passes", dtype, level);
        }
    }

    #[test]
    fn one_client_gets_its_numbers_back((dtype, weights, tensors) in tensors(1..2)) {
        // Sums in f64 do not hold every 64-bit integer, nor do they hold which NaN or true it was.
        prop_assume!(!matches!(dtype, Dtype::BOOL | Dtype::I64 | Dtype::U64));
        let [out, _] = mean(Level::best(), dtype, &weights, &tensors, 0);
        let pairs = out.chunks(element_bytes(dtype)).zip(tensors[0].chunks(element_bytes(dtype)));
        for (got, sent) in pairs {
            prop_assert!(got == sent || is_nan(dtype, got) && is_nan(dtype, sent));
        }
    }

    #[test]
    fn f32_is_within_its_bound(clients in clients(-130, 127)) {
        let (weights, values): (Vec<f64>, Vec<f64>) = clients.into_iter().unzip();
        let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        let got = f32_mean(&weights, &values);
        let bound = Bound { mantissa_bits: 23, least_ulp: -149, roundings: values.len() + 5, u: -24, underflow: -148 };
        bound.check(&weights, values.iter().map(|&v| v.into()), got.into())?;
    }

    #[test]
    fn bf16_is_within_its_bound(clients in clients(-130, 127)) {
        let (weights, values): (Vec<f64>, Vec<f64>) = clients.into_iter().unzip();
        let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f64(v)).collect();
        prop_assume!(values.iter().all(|v| v.is_finite()));
        let tensors: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        let [out, _] = mean(Level::best(), Dtype::BF16, &weights, &tensors, 0);
        let got = bf16::from_le_bytes(out.try_into().unwrap());
        let bound = Bound { mantissa_bits: 7, least_ulp: -133, roundings: values.len() + 5, u: -24, underflow: -148 };
        bound.check(&weights, values.iter().map(|v| v.to_f64()), got.to_f64())?;
    }

    #[test]
    fn f64_is_within_its_bound(clients in clients(-1030, 1023)) {
        let (weights, values): (Vec<f64>, Vec<f64>) = clients.into_iter().unzip();
        let got = f64_mean(&weights, &values);
        let bound = Bound { mantissa_bits: 52, least_ulp: -1074, roundings: 2 * values.len() + 5, u: -53, underflow: -1072 };
        bound.check(&weights, values.iter().copied(), got)?;
    }
}

fn is_nan(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F16 => half::f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

/// Pairs of a weight and a value. Values are alike or far apart, so that they cancel or vanish.
fn clients(least: i32, most: i32) -> impl Strategy<Value = Vec<(f64, f64)>> {
    let weight = prop_oneof![(1u32..5000).prop_map(f64::from), 1e-6..1e6f64];
    let value = move |middle: i32| {
        let exponent = prop_oneof![middle - 3..=middle, least..=most];
        (-1.99..1.99f64, exponent).prop_map(move |(m, e)| m * 2f64.powi(e.clamp(least, most)))
    };
    (least..=most)
        .prop_flat_map(move |middle| prop::collection::vec((weight.clone(), value(middle)), 1..20))
}

/// The documented bound, with exact arithmetic.
struct Bound {
    mantissa_bits: i32,
    least_ulp: i32,
    roundings: usize,
    u: i32,
    underflow: i32,
}

impl Bound {
    fn check(
        &self,
        weights: &[f64],
        values: impl Iterator<Item = f64>,
        got: f64,
    ) -> Result<(), TestCaseError> {
        let (mut sum, mut spread, mut total) = (RBig::ZERO, RBig::ZERO, RBig::ZERO);
        for (&weight, value) in weights.iter().zip(values) {
            let product = exact(weight) * exact(value);
            spread += abs(product.clone());
            sum += product;
            total += exact(weight);
        }
        let mean = sum / total.clone();
        let ulp = self.ulp(&mean);
        let bound = ulp / RBig::from(2)
            + RBig::from(self.roundings) * power_of_two(self.u) * spread / total
            + RBig::from(weights.len() + 1) * power_of_two(self.underflow);
        prop_assert!(got.is_finite());
        let error = abs(exact(got) - mean.clone());
        prop_assert!(error <= bound, "got {}, mean {}", got, mean.to_f64().value());
        Ok(())
    }

    fn ulp(&self, mean: &RBig) -> RBig {
        let magnitude = abs(mean.clone());
        let mut exponent = self.least_ulp + self.mantissa_bits;
        while power_of_two(exponent + 1) <= magnitude {
            exponent += 1;
        }
        power_of_two(exponent - self.mantissa_bits)
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

#[test]
fn a_client_of_weight_zero_does_not_count() {
    for hostile in [f32::NAN, f32::INFINITY, 7.0] {
        assert_eq!(f32_mean(&[0.0, 1.0, 3.0], &[hostile, 1.0, 5.0]), 4.0);
        assert_eq!(f32_mean(&[1.0, 0.0, 3.0], &[1.0, hostile, 5.0]), 4.0);
        assert_eq!(f32_mean(&[0.0, 9.0], &[hostile, -0.0]).to_bits(), (-0.0f32).to_bits());
    }
}

#[test]
fn the_mean_of_the_largest_numbers_is_finite() {
    let weights: Vec<f64> = (1..=100).map(|n| 1.0 / f64::from(n)).collect();
    for clients in 1..=100 {
        let got = f32_mean(&weights[..clients], &vec![f32::MAX; clients]);
        assert!(got >= f32::MAX * 0.9999 && got.is_finite());
        let got = f64_mean(&weights[..clients], &vec![-f64::MAX; clients]);
        assert!(got <= -f64::MAX * 0.9999 && got.is_finite());
    }
}

#[test]
fn infinities_and_nan_follow_ieee() {
    assert_eq!(f32_mean(&[1.0, 2.0], &[f32::INFINITY, 1.0]), f32::INFINITY);
    let opposite = f32_mean(&[1.0, 2.0], &[f32::INFINITY, f32::NEG_INFINITY]);
    assert_eq!(opposite.to_bits(), 0x7fc0_0000);
    assert_eq!(f64_mean(&[1.0], &[f64::from_bits(u64::MAX)]).to_bits(), 0x7ff8 << 48);
}

#[test]
fn huge_and_tiny_weights_are_scaled() {
    for unit in [2f64.powi(1000), 1.0, 2f64.powi(-1000), f64::from_bits(1)] {
        assert_eq!(f32_mean(&[unit, 3.0 * unit], &[8.0, 4.0]), 5.0);
        assert_eq!(f64_mean(&[unit, 3.0 * unit], &[8.0, 4.0]), 5.0);
    }
    assert_eq!(f64_mean(&[f64::MAX / 2.0, f64::MAX / 2.0], &[1.0, 2.0]), 1.5);
    let uneven = f64_mean(&[1.0, 2f64.powi(63)], &[2f64.powi(63), 0.0]);
    assert_eq!(uneven, 1.0);
}

#[test]
fn integers_round_half_to_even_and_keep_their_range() {
    let i8_mean = |weights: &[f64], values: &[i8]| {
        let tensors: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        mean(Level::best(), Dtype::I8, weights, &tensors, 0)[0][0] as i8
    };
    assert_eq!(i8_mean(&[1.0, 1.0], &[1, 2]), 2);
    assert_eq!(i8_mean(&[1.0, 1.0], &[2, 3]), 2);
    assert_eq!(i8_mean(&[1.0, 1.0], &[-1, -2]), -2);
    assert_eq!(i8_mean(&[0.1, 0.7], &[-128, -128]), -128);
    let largest = vec![u64::MAX.to_le_bytes().to_vec(); 3];
    let [out, _] = mean(Level::best(), Dtype::U64, &[0.1, 0.2, 0.7], &largest, 0);
    assert_eq!(out, [0xff; 8]);
}

#[test]
fn bool_needs_more_than_half_of_the_weight() {
    let vote = |weights: &[f64], votes: &[u8]| {
        let tensors: Vec<Vec<u8>> = votes.iter().map(|&v| vec![v]).collect();
        mean(Level::best(), Dtype::BOOL, weights, &tensors, 0)[0][0]
    };
    assert_eq!(vote(&[1.0, 1.0], &[1, 0]), 0);
    assert_eq!(vote(&[2.0, 1.0], &[0x80, 0]), 1);
    assert_eq!(vote(&[1.0, 3.0, 1.0], &[1, 0, 1]), 0);
    assert_eq!(vote(&[5.0], &[7]), 1);
}

#[test]
fn bad_weights_are_refused_by_client() {
    let refused = |weights: &[f64]| Weights::new(weights).unwrap_err();
    assert_eq!(refused(&[1.0, -1.0]), ReducerError::Weight { client: 1, weight: -1.0 });
    assert!(matches!(refused(&[f64::NAN]), ReducerError::Weight { client: 0, .. }));
    assert!(matches!(refused(&[1.0, f64::INFINITY]), ReducerError::Weight { client: 1, .. }));
    assert_eq!(refused(&[f64::MAX, 1.0, f64::MAX]), ReducerError::WeightSum { client: 2 });
    assert_eq!(refused(&[0.0, 0.0]), ReducerError::NoWeight);
    assert_eq!(refused(&[]), ReducerError::NoWeight);
    assert!(matches!(refused(&[1e300, 1e200]), ReducerError::WeightTooSmall { client: 1, .. }));
}

#[test]
fn lengths_alignment_and_dtypes_are_checked() {
    let weights = Weights::new(&[1.0]).unwrap();
    let weight = weights.get(0).unwrap();
    let mut sums = Sums::new(Dtype::F64, 4);
    let mut call = |dtype, payload: &[u8], acc: Range<usize>| {
        let done = accumulate(dtype, true, weight, payload, &mut sums.get()[acc.clone()]);
        let mut out = payload.to_vec();
        assert_eq!(done, finish(dtype, &weights, &sums.get()[acc], &mut out));
        done
    };
    assert_eq!(call(Dtype::F32, &[0; 8], 0..8), Ok(()));
    let partial = ReducerError::PartialElement { dtype: Dtype::F32, bytes: 7 };
    assert_eq!(call(Dtype::F32, &[0; 7], 0..8), Err(partial));
    let length = ReducerError::Length { dtype: Dtype::U8, elements: 2, accumulator_bytes: 8 };
    assert_eq!(call(Dtype::U8, &[0; 2], 0..8), Err(length));
    assert_eq!(
        call(Dtype::F32, &[0; 4], 1..5),
        Err(ReducerError::Misaligned { dtype: Dtype::F32 })
    );
    assert!(matches!(call(Dtype::C64, &[0; 8], 0..8), Err(ReducerError::NotAveraged { .. })));
}

#[test]
fn refused_dtypes_are_named_with_their_tensor() {
    let error = accumulator("head.scale", Dtype::F8_E4M3).unwrap_err().to_string();
    assert!(error.contains("head.scale") && error.contains("F8_E4M3"), "{error}");
}

#[test]
fn a_model_of_f32_alone_has_an_accumulator_like_its_data() {
    let layout = AccumulatorLayout::new([(Dtype::F32, 0..4004)]).unwrap();
    assert_eq!(layout.bytes(), 4004);
    assert_eq!(layout.range(400..800, Dtype::F32), Ok(400..800));
    assert_eq!(layout.span(400..4004), Ok(400..4004));
}

#[test]
fn runs_are_placed_on_cache_lines() {
    let runs =
        [(Dtype::F32, 0..12), (Dtype::U8, 12..15), (Dtype::I8, 15..15), (Dtype::BF16, 15..25)];
    let layout = AccumulatorLayout::new(runs).unwrap();
    assert_eq!(layout.bytes(), 128 + 5 * 4);
    assert_eq!(layout.range(4..12, Dtype::F32), Ok(4..12));
    assert_eq!(layout.range(12..15, Dtype::U8), Ok(64..88));
    assert_eq!(layout.range(17..25, Dtype::BF16), Ok(132..148));
    // Spans that tile the data tile the accumulator.
    assert_eq!(layout.span(0..12), Ok(0..64));
    assert_eq!(layout.span(12..13), Ok(64..72));
    assert_eq!(layout.span(13..25), Ok(72..148));
    assert_eq!(layout.span(25..25), Ok(148..148));
    for (chunk, dtype) in [
        (0..13, Dtype::F32),
        (2..12, Dtype::F32),
        (0..12, Dtype::I32),
        (12..17, Dtype::U8),
        (25..26, Dtype::BF16),
    ] {
        assert_eq!(layout.range(chunk.clone(), dtype), Err(ReducerError::Chunk { range: chunk }));
    }
    for span in [0..26, 0..16, 30..31] {
        assert_eq!(layout.span(span.clone()), Err(ReducerError::Chunk { range: span }));
    }
    let backwards = Range { start: 12, end: 4 };
    assert!(
        layout.span(backwards.clone()).is_err() && layout.range(backwards, Dtype::F32).is_err()
    );
}

#[test]
fn impossible_runs_are_refused() {
    let refused =
        |runs: &[(Dtype, Range<u64>)]| AccumulatorLayout::new(runs.iter().cloned()).unwrap_err();
    let f32s = (Dtype::F32, 0..4);
    assert!(matches!(refused(&[f32s.clone(), (Dtype::F32, 8..12)]), ReducerError::Run { .. }));
    assert!(matches!(refused(&[f32s.clone(), (Dtype::F32, 0..4)]), ReducerError::Run { .. }));
    assert!(matches!(refused(&[(Dtype::F32, 0..5)]), ReducerError::Run { .. }));
    let backwards = Range { start: 8, end: 4 };
    assert!(matches!(refused(&[(Dtype::F32, backwards)]), ReducerError::Run { .. }));
    assert!(matches!(refused(&[(Dtype::F4, 0..4)]), ReducerError::NotAveraged { .. }));
    assert_eq!(refused(&[(Dtype::U8, 0..u64::MAX)]), ReducerError::TooLarge);
}

/// Runs of every length and order: what is sent as a model is the accumulator, byte for byte.
#[test]
fn sums_are_a_model_that_stands_as_the_accumulator_does() {
    let mut random = proptest::test_runner::TestRng::deterministic_rng(
        proptest::test_runner::RngAlgorithm::ChaCha,
    );
    for _ in 0..200 {
        let tensors = (0..random.next_u32() % 9).map(|index| {
            let dtype = DTYPES[random.next_u32() as usize % DTYPES.len()];
            (format!("gap before t{index}"), dtype, vec![u64::from(random.next_u32() % 70)])
        });
        let tensors: Vec<_> = tensors.collect();
        let named = tensors.iter().cloned().chain([("t1".into(), Dtype::BOOL, vec![3])]);
        let manifest = Manifest::from_tensors(named, &Default::default()).unwrap();
        let layout = AccumulatorLayout::of(&manifest).unwrap();
        let sums = AccumulatorLayout::sums_manifest(&manifest).unwrap();
        assert_eq!(sums.data_bytes(), layout.bytes());
        assert!(AccumulatorLayout::of(&sums).unwrap().is_in_place());
        for tensor in manifest.tensors().iter().filter(|tensor| !tensor.range.is_empty()) {
            let place = layout.range(tensor.range.clone(), tensor.dtype).unwrap();
            let sent = sums.tensors().iter().find(|sent| sent.name == tensor.name).unwrap();
            assert_eq!(sent.range, place);
        }
    }
}

#[test]
fn parts_of_a_mean_are_scaled_as_the_whole_is() {
    let weights = [600.0, 0.1, 0.0, 3e9, 7.0];
    let scale = Weights::scale(&weights).unwrap();
    let whole = Weights::new(&weights).unwrap();
    let part = Weights::part(&weights[1..4], scale);
    for client in 0..3 {
        assert_eq!(part.get(client), whole.get(client + 1));
    }
    // Alone everywhere, alone in its part, one of several, nobody.
    let alone = (vec![0.0, 0.1], None);
    let several = (vec![600.0, 7.0], Weights::scale(&[600.0, 7.0]).unwrap());
    let nobody = (vec![0.0], None);
    let parts = [alone, several.clone(), nobody];
    let factors = Weights::factors(&parts, scale);
    assert_eq!(factors.get(0), whole.get(1));
    let power = 2f64.powi(scale.unwrap() - several.1.unwrap());
    assert_eq!(factors.get(1), Weights::part(&[power], Some(0)).get(0));
    assert!(!factors.get(2).unwrap().is_positive());
    let itself = Weights::factors(&parts[..1], None);
    assert_eq!(itself.get(0), Weights::new(&[5.0]).unwrap().get(0));
}
