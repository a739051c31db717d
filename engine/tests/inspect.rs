//! What is found in an update: the same at every level, what a slow search finds, and a norm within
//! its bound.

use dashu_ratio::RBig;
use fedlane::error::ReducerError;
use fedlane::limits::CHUNK_BYTES;
use fedlane::reducer::{Found, Level, Norm, clean, clean_at, inspect, inspect_at};
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;
use safetensors::Dtype;

const FLOATS: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64];
const OTHERS: [Dtype; 9] = [
    Dtype::BOOL,
    Dtype::U8,
    Dtype::I8,
    Dtype::U16,
    Dtype::I16,
    Dtype::U32,
    Dtype::I32,
    Dtype::U64,
    Dtype::I64,
];

fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The numbers of a chunk, decoded in another way than the kernels do.
fn numbers(dtype: Dtype, payload: &[u8]) -> Vec<f64> {
    let decode = |bytes: &[u8]| match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Dtype::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        dtype => unreachable!("{dtype:?}"),
    };
    payload.chunks(element_bytes(dtype)).map(decode).collect()
}

fn encode(dtype: Dtype, number: f64) -> Vec<u8> {
    match dtype {
        Dtype::F32 => (number as f32).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f64(number).to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f64(number).to_le_bytes().to_vec(),
        Dtype::F64 => number.to_le_bytes().to_vec(),
        dtype => unreachable!("{dtype:?}"),
    }
}

/// The sum of squares in the documented order: lane by lane, then pairwise.
fn squares(update: &[f64], model: Option<&[f64]>) -> f64 {
    let finite = |x: f64| if x.is_finite() { x } else { 0.0 };
    let mut lanes = [0.0; 32];
    for (index, &x) in update.iter().enumerate() {
        let distance = finite(x) - model.map_or(0.0, |model| finite(model[index]));
        lanes[index % 32] += distance * distance;
    }
    let mut lanes = lanes.to_vec();
    while lanes.len() > 1 {
        let (left, right) = lanes.split_at(lanes.len() / 2);
        lanes = left.iter().zip(right).map(|(a, b)| a + b).collect();
    }
    lanes[0]
}

fn slowly(dtype: Dtype, payload: &[u8], model: Option<&[u8]>) -> Found {
    let update = numbers(dtype, payload);
    let model = model.map(|model| numbers(dtype, model));
    let bad = || update.iter().enumerate().filter(|(_, x)| !x.is_finite());
    Found {
        nonfinite: bad().count() as u64,
        first_nonfinite: bad().next().map(|(index, _)| index as u64),
        squares: Some(squares(&update, model.as_deref())),
    }
}

/// What one level finds, with the payload `skew` bytes off alignment.
fn found(level: Level, dtype: Dtype, payload: &[u8], model: Option<&[u8]>, skew: usize) -> Found {
    let skewed: Vec<u8> = std::iter::repeat_n(0xff, skew).chain(payload.iter().copied()).collect();
    let norm = model.map_or(Norm::OfUpdate, Norm::OfChange);
    let found = inspect_at(level, dtype, &skewed[skew..], norm).unwrap();
    let only_finite = inspect_at(level, dtype, &skewed[skew..], Norm::Skip).unwrap();
    assert_eq!(Found { squares: None, ..found }, only_finite);
    found
}

fn bits(found: &Found) -> (u64, Option<u64>, Option<u64>) {
    (found.nonfinite, found.first_nonfinite, found.squares.map(f64::to_bits))
}

/// Bytes of one element: ordinary, any, or an extreme.
fn element(dtype: Dtype) -> impl Strategy<Value = Vec<u8>> {
    let encode = move |number: f64| encode(dtype, number);
    let extremes = [
        f64::NAN,
        -f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        6e4,
        3e38,
        1e-40,
        5e-324,
    ];
    prop_oneof![
        8 => (-2.0..2.0f64).prop_map(encode),
        2 => prop::collection::vec(any::<u8>(), element_bytes(dtype)),
        1 => select(extremes.to_vec()).prop_map(encode),
    ]
}

/// From below the smallest number of f32 to its largest.
fn wide_number() -> impl Strategy<Value = f64> {
    (-1.0..1.0f64, -160..=127i32).prop_map(|(mantissa, exponent)| mantissa * 2f64.powi(exponent))
}

fn chunks() -> impl Strategy<Value = (Dtype, Vec<u8>, Vec<u8>)> {
    // Past one block of the kernel, and with whole and partial rows.
    let elements = prop_oneof![4 => 0usize..=130, 1 => 1000usize..=2100];
    (select(&FLOATS[..]), elements).prop_flat_map(|(dtype, elements)| {
        let chunk = || prop::collection::vec(element(dtype), elements).prop_map(|e| e.concat());
        (Just(dtype), chunk(), chunk())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_level_finds_what_a_slow_search_finds((dtype, payload, model) in chunks(), skew in 0usize..8) {
        for model in [None, Some(model.as_slice())] {
            let expected = slowly(dtype, &payload, model);
            for level in Level::available() {
                let got = found(level, dtype, &payload, model, skew);
                prop_assert_eq!(bits(&expected), bits(&got), "{:?} {:?}", dtype, level);
            }
        }
    }

    #[test]
    fn cleaning_makes_what_is_not_finite_zero((dtype, payload, _) in chunks(), skew in 0usize..8) {
        let size = element_bytes(dtype);
        let mut expected = payload.clone();
        for (bytes, number) in expected.chunks_mut(size).zip(numbers(dtype, &payload)) {
            if !number.is_finite() {
                bytes.fill(0);
            }
        }
        for level in Level::available() {
            let mut skewed: Vec<u8> = std::iter::repeat_n(0xff, skew).chain(payload.iter().copied()).collect();
            clean_at(level, dtype, &mut skewed[skew..]).unwrap();
            prop_assert_eq!(&expected, &skewed[skew..], "{:?} {:?}", dtype, level);
            let clean = found(level, dtype, &expected, None, 0);
            prop_assert_eq!(clean.nonfinite, 0);
            // The norm of an update with such elements is that of the cleaned one.
            prop_assert_eq!(clean.squares, found(level, dtype, &payload, None, 0).squares);
        }
    }

    #[test]
    fn squares_are_within_their_bound(
        dtype in select(&[Dtype::F32, Dtype::F16, Dtype::BF16][..]),
        pairs in prop::collection::vec((wide_number(), wide_number()), 0..300),
    ) {
        let update: Vec<u8> = pairs.iter().flat_map(|pair| encode(dtype, pair.0)).collect();
        let model: Vec<u8> = pairs.iter().flat_map(|pair| encode(dtype, pair.1)).collect();
        let got = inspect(dtype, &update, Norm::OfChange(&model)).unwrap().squares.unwrap();
        let finite = |x: f64| RBig::try_from(if x.is_finite() { x } else { 0.0 }).unwrap();
        let exact: RBig = numbers(dtype, &update).into_iter().zip(numbers(dtype, &model)).map(|(x, g)| {
            let distance = finite(x) - finite(g);
            distance.clone() * distance
        }).fold(RBig::ZERO, |sum, square| sum + square);
        // Twice the bound of the norm, without its root: three roundings of a square, and of sums.
        let roundings = pairs.len().div_ceil(32) + 3 + 5;
        let bound = exact.clone() * RBig::from(roundings) / RBig::from(2).pow(53);
        let error = RBig::try_from(got).unwrap() - exact;
        prop_assert!(error <= bound && -error <= bound);
    }
}

#[test]
fn one_bad_element_is_found_wherever_it_stands() {
    for dtype in FLOATS {
        let size = element_bytes(dtype);
        let elements = CHUNK_BYTES as usize / size;
        let mut payload: Vec<u8> = encode(dtype, -0.5).repeat(elements);
        // First, last, in the middle, and about the borders of rows and blocks of the kernel.
        let places = [0, 31, 32, 1023, 1024, 1055, elements / 2, elements - 33, elements - 1];
        for (place, bad) in places
            .into_iter()
            .zip([f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -f64::NAN].into_iter().cycle())
        {
            let bytes = place * size..(place + 1) * size;
            payload[bytes.clone()].copy_from_slice(&encode(dtype, bad));
            for level in Level::available() {
                let found = found(level, dtype, &payload, None, 0);
                assert_eq!(found.first_nonfinite, Some(place as u64), "{dtype:?} {level:?}");
                assert_eq!(found.nonfinite, 1);
                // Quarters add up without rounding.
                assert_eq!(found.squares, Some((elements - 1) as f64 / 4.0));
            }
            payload[bytes].copy_from_slice(&encode(dtype, -0.5));
        }
        let found = inspect(dtype, &payload, Norm::OfUpdate).unwrap();
        assert_eq!((found.nonfinite, found.first_nonfinite), (0, None));
    }
}

#[test]
fn a_chunk_of_nothing_but_bad_elements_is_counted() {
    for dtype in FLOATS {
        let elements = CHUNK_BYTES as usize / element_bytes(dtype);
        let payload = encode(dtype, f64::NEG_INFINITY).repeat(elements);
        for level in Level::available() {
            let found = found(level, dtype, &payload, None, 0);
            let all =
                Found { nonfinite: elements as u64, first_nonfinite: Some(0), squares: Some(0.0) };
            assert_eq!(found, all, "{dtype:?} {level:?}");
        }
    }
}

#[test]
fn elements_that_are_not_finite_count_as_zero_also_in_the_model() {
    let chunk =
        |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let update = chunk(&[f32::NAN, 1.0, 5.0]);
    let model = chunk(&[3.0, f32::INFINITY, 5.0]);
    let found = inspect(Dtype::F32, &update, Norm::OfChange(&model)).unwrap();
    assert_eq!(found, Found { nonfinite: 1, first_nonfinite: Some(0), squares: Some(10.0) });
}

#[test]
fn squares_beyond_f32_and_below_it_are_exact() {
    let squares = |dtype, number: f64| {
        inspect(dtype, &encode(dtype, number), Norm::OfUpdate).unwrap().squares.unwrap()
    };
    let largest = f64::from(f32::MAX);
    assert_eq!(squares(Dtype::F32, largest), largest * largest);
    let least = f64::from(f32::from_bits(1));
    assert_eq!(squares(Dtype::F32, least), least * least);
    assert!(least * least > 0.0);
    let least = 2f64.powi(-133);
    assert_eq!(squares(Dtype::BF16, least), least * least);
    let least = 2f64.powi(-24);
    assert_eq!(squares(Dtype::F16, least), least * least);
    let apart = |dtype, x: f64| {
        let (x, model) = (encode(dtype, x), encode(dtype, -x));
        inspect(dtype, &x, Norm::OfChange(&model)).unwrap().squares.unwrap()
    };
    assert_eq!(apart(Dtype::F32, largest), 4.0 * largest * largest);
}

#[test]
fn a_norm_beyond_f64_is_infinite_and_never_nan() {
    let chunk =
        |numbers: &[f64]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let update = chunk(&[2f64.powi(511), 2f64.powi(511), f64::NAN, 1.0]);
    let found = inspect(Dtype::F64, &update, Norm::OfUpdate).unwrap();
    assert_eq!(found.squares, Some(2f64.powi(1023)));
    let update = chunk(&[2f64.powi(512), f64::NAN]);
    let found = inspect(Dtype::F64, &update, Norm::OfUpdate).unwrap();
    assert_eq!(found.squares, Some(f64::INFINITY));
    // The distance itself overflows, in both directions.
    let (update, model) = (chunk(&[f64::MAX, f64::MIN]), chunk(&[f64::MIN, f64::MAX]));
    let found = inspect(Dtype::F64, &update, Norm::OfChange(&model)).unwrap();
    assert_eq!((found.nonfinite, found.squares), (0, Some(f64::INFINITY)));
    let tiny = inspect(Dtype::F64, &chunk(&[f64::from_bits(1); 9]), Norm::OfUpdate).unwrap();
    assert_eq!(tiny.squares, Some(0.0));
}

#[test]
fn integers_and_bools_are_finite_and_no_part_of_the_norm() {
    for dtype in OTHERS {
        let mut payload = vec![0xff; 64];
        let found = inspect(dtype, &payload, Norm::OfUpdate).unwrap();
        let nothing = Found { squares: Some(0.0), ..Found::default() };
        assert_eq!(found, nothing, "{dtype:?}");
        assert_eq!(inspect(dtype, &payload, Norm::Skip), Ok(Found::default()));
        clean(dtype, &mut payload).unwrap();
        assert_eq!(payload, [0xff; 64]);
    }
}

#[test]
fn an_empty_chunk_has_nothing() {
    for dtype in FLOATS.into_iter().chain(OTHERS) {
        let nothing = Found { squares: Some(0.0), ..Found::default() };
        assert_eq!(inspect(dtype, &[], Norm::OfChange(&[])), Ok(nothing), "{dtype:?}");
        assert_eq!(clean(dtype, &mut []), Ok(()));
    }
}

#[test]
fn partial_elements_other_models_and_dtypes_are_refused() {
    for dtype in FLOATS.into_iter().chain(OTHERS).filter(|&dtype| element_bytes(dtype) > 1) {
        let partial = ReducerError::PartialElement { dtype, bytes: 17 };
        assert_eq!(inspect(dtype, &[0; 17], Norm::Skip), Err(partial.clone()));
        assert_eq!(inspect(dtype, &[0; 17], Norm::OfChange(&[0; 17])), Err(partial.clone()));
        assert_eq!(clean(dtype, &mut [0; 17]), Err(partial));
    }
    let other = ReducerError::OtherModel { bytes: 8, model_bytes: 4 };
    assert_eq!(inspect(Dtype::F32, &[0; 8], Norm::OfChange(&[0; 4])), Err(other));
    let refused = |error| matches!(error, Err(ReducerError::NotAveraged { .. }));
    assert!(refused(inspect(Dtype::F8_E4M3, &[0; 8], Norm::Skip).map(drop)));
    assert!(refused(clean(Dtype::C64, &mut [0; 8])));
}
