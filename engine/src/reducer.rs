//! 5: the streaming weighted mean. Chunks are folded into an accumulator as they arrive.
//!
//! | dtype | summed in | mean |
//! |---|---|---|
//! | F32, F16, BF16 | f32 | rounded to nearest even |
//! | F64 | f64 | rounded to nearest even |
//! | I8 to I64, U8 to U64 | f64 | rounded half to even, held within the dtype's range |
//! | BOOL | f64 | true if clients with more than half of the weight say true (any non-zero byte) |
//!
//! Other dtypes are refused. For each element the reducer computes, each operation rounded on
//! its own,
//!
//! ```text
//! sum = w'[0] * x[0];  sum = sum + w'[k] * x[k];  mean = sum / denominator
//! ```
//!
//! with the scaled weights w' of [`Weights`]. So equal chunks in equal order give equal bits on
//! every CPU, and the same bits as NumPy's `acc += w * x`. A mean that is NaN is the dtype's
//! positive quiet NaN without payload; infinities and signed zeros follow IEEE 754.
//!
//! With K clients, unit roundoff u (2^-24 for f32 sums, 2^-53 for f64 sums) and S the weighted mean
//! of |x|, the mean of floats is off by at most half an ulp of the dtype plus (K + 5) u S, or
//! (2 K + 5) u S for f64 sums, because there the denominator is summed in u as well. Where
//! products underflow, (K + 1) 2^-148, or (K + 1) 2^-1072, is added. The bound is the usual one for recursive
//! summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2).

pub mod clip;
pub mod inspect;
mod kernels;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use safetensors::Dtype;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::ReducerError;
use crate::limits::{ACCUMULATOR_ALIGN_BYTES, MIN_WEIGHT_SHARE};
use crate::manifest::{Chunk, Manifest};
use crate::wire::checksum::ChunkSum;
use kernels::{Add, Bf16, Bool, Element, F16, Finish, First, Last, Only, Scale, ScaleAdd};

pub use crate::sys::simd::Level;
pub use clip::{ClipBase, clip_factor};
pub use inspect::{Found, Norm, clean, clean_at, inspect, inspect_at};
pub use kernels::store_past_cache;

/// The type in which elements are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccumulatorType {
    /// 4 bytes an element.
    F32,
    /// 8 bytes an element.
    F64,
}

impl AccumulatorType {
    /// Bytes of one sum.
    pub fn bytes(self) -> u64 {
        match self {
            AccumulatorType::F32 => 4,
            AccumulatorType::F64 => 8,
        }
    }

    fn of(dtype: Dtype) -> Option<AccumulatorType> {
        use Dtype::*;
        match dtype {
            F32 | F16 | BF16 => Some(AccumulatorType::F32),
            F64 | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64 | BOOL => Some(AccumulatorType::F64),
            _ => None,
        }
    }
}

/// The type in which `tensor`, whose elements are `dtype`, is summed; an error that names the
/// tensor if its dtype is not averaged.
pub fn accumulator(tensor: &str, dtype: Dtype) -> Result<AccumulatorType, ReducerError> {
    let refused = || ReducerError::NotAveraged { tensor: tensor.to_owned(), dtype };
    AccumulatorType::of(dtype).ok_or_else(refused)
}

/// Bytes of the sums of a chunk.
///
/// # Errors
/// A dtype that is not averaged.
pub fn sums_bytes(chunk: &Chunk) -> Result<usize, ReducerError> {
    let accumulator = accumulator("of this chunk", chunk.dtype)?;
    let elements = chunk.length() / (chunk.dtype.bitsize() / 8);
    Ok(elements * accumulator.bytes() as usize)
}

/// One client's weight, scaled for every type of element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weight {
    /// For floats that are summed in f32.
    f32: f32,
    /// For floats that are summed in f64.
    f64: f64,
    /// For integers and BOOL, which are never clipped.
    whole: f64,
}

/// The weights of one round's clients, scaled.
///
/// With 2^e <= sum of weights < 2^(e+1), each weight is divided by m = 2^(e+2). That is exact, and
/// the scaled weights sum to less than one half, so no weighted sum of finite numbers overflows.
/// For f32 accumulators the scaled weight is then rounded to f32; a whole-numbered weight up to 2^24
/// stays exact. The denominator is the f64 sum, in client order, of the scaled weights as used,
/// rounded to the accumulator's type. If one client alone has a positive weight, its scaled weight
/// and the denominator are one: the mean is that client's tensor, but for 64-bit integers beyond
/// 2^53, which f64 rounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    clients: Vec<Weight>,
    denominator: Weight,
    /// Others are in the mean too: however few of these are left, they keep their weights.
    is_part: bool,
}

/// The power of two, as its exponent, that weights are multiplied with when they are scaled. None
/// where one client alone counts: its scaled weight is one.
pub type WeightScale = Option<i32>;

impl Weight {
    /// For what is multiplied with nothing.
    pub const ONE: Weight = Weight { f32: 1.0, f64: 1.0, whole: 1.0 };

    /// Whether the client counts in means of floats.
    pub fn is_positive(self) -> bool {
        self.f64 > 0.0
    }

    /// Of a client that is not clipped.
    fn plain(weight: f64) -> Weight {
        Weight { f32: weight as f32, f64: weight, whole: weight }
    }

    /// The sum of weights as used, in their order, rounded to the accumulator's type.
    fn sum(weights: &[Weight]) -> Weight {
        Weight {
            f32: weights.iter().map(|w| f64::from(w.f32)).sum::<f64>() as f32,
            f64: weights.iter().map(|w| w.f64).sum(),
            whole: weights.iter().map(|w| w.whole).sum(),
        }
    }

    /// For elements of one dtype.
    fn of<E: Element<Sum: Sum>>(self) -> E::Sum {
        E::Sum::pick(self, E::IS_FLOAT)
    }

    /// Whether the client counts in means of one dtype.
    fn counts<E: Element<Sum: Sum>>(self) -> bool {
        self.of::<E>().into() > 0.0
    }
}

impl Weights {
    /// Scales `weights`, one per client, usually its number of examples. A client of weight zero
    /// is left out of the mean, whatever it sends.
    ///
    /// # Errors
    /// A weight that is negative, NaN, infinite, or positive but below
    /// [`MIN_WEIGHT_SHARE`] of the sum; a sum that is zero or overflows.
    pub fn new(weights: &[f64]) -> Result<Weights, ReducerError> {
        Ok(Weights { is_part: false, ..Weights::part(weights, Weights::scale(weights)?) })
    }

    /// What [`Weights::new`] scales these weights with.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub fn scale(weights: &[f64]) -> Result<WeightScale, ReducerError> {
        let sum = checked_sum(weights)?;
        let positive = weights.iter().filter(|&&w| w > 0.0).count();
        Ok(if positive == 1 { None } else { Some(-exponent(sum) - 2) })
    }

    /// Some of the clients in a mean, whose weights are scaled with those of all of them. Their
    /// denominator is the part that they have in that of the mean.
    pub fn part(weights: &[f64], scale: WeightScale) -> Weights {
        let scaled =
            |&w: &f64| scale.map_or((w > 0.0).into(), |shift| times_power_of_two(w, shift));
        Weights::of(weights.iter().map(scaled).map(Weight::plain).collect())
    }

    /// What sums are multiplied with, for each part of the clients of a mean. A part says its weights,
    /// and what they were scaled with; `scale` is that of the mean. The factors are powers of two, but
    /// for one client that was alone, whose tensor stands for its sums: that is its scaled weight.
    pub fn factors(parts: &[(Vec<f64>, WeightScale)], scale: WeightScale) -> Weights {
        let factor = |(weights, of): &(Vec<f64>, WeightScale)| {
            let alone = weights.iter().copied().find(|&w| w > 0.0);
            Weight::plain(match (alone, *of, scale) {
                (None, ..) => 0.0,
                (_, _, None) => 1.0,
                (Some(_), Some(of), Some(to)) => times_power_of_two(1.0, to.saturating_sub(of)),
                (Some(weight), None, Some(to)) => times_power_of_two(weight, to),
            })
        };
        Weights::of(parts.iter().map(factor).collect())
    }

    /// Of a part.
    fn of(clients: Vec<Weight>) -> Weights {
        Weights { denominator: Weight::sum(&clients), clients, is_part: true }
    }

    /// The scaled weight of a client, by its index in the slice given to [`Weights::new`].
    pub fn get(&self, client: usize) -> Option<Weight> {
        self.clients.get(client).copied()
    }

    /// Leaves a client out, so that the means of the others alone come out, with the same bits. True
    /// if only one with a positive weight is left, whose tensor is then the mean itself: sums that
    /// were made before are of no use.
    ///
    /// # Errors
    /// No weight is left; nothing has changed then.
    pub fn lose(&mut self, client: usize) -> Result<bool, ReducerError> {
        let mut left = self.clients.clone();
        match left.get_mut(client) {
            Some(weight) if weight.is_positive() => *weight = Weight::plain(0.0),
            _ => return Ok(false),
        }
        match left.iter().filter(|weight| weight.is_positive()).count() {
            _ if self.is_part => {
                *self = Weights::of(left);
                Ok(false)
            }
            0 => Err(ReducerError::NoWeight),
            1 => {
                let alone = |w: &Weight| f64::from(u8::from(w.is_positive()));
                *self = Weights::new(&left.iter().map(alone).collect::<Vec<_>>())?;
                Ok(true)
            }
            _ => {
                *self = Weights { is_part: false, ..Weights::of(left) };
                Ok(false)
            }
        }
    }

    /// A checksum of the weights with which sums of these clients' tensors are made, or with
    /// `is_mean` their mean: those of other weights are of no use.
    pub fn digest(&self, clients: impl Iterator<Item = usize>, is_mean: bool) -> u64 {
        let of_clients = clients.filter_map(|client| self.get(client));
        let all = of_clients.chain(is_mean.then_some(self.denominator));
        let mut sum = ChunkSum::new();
        for Weight { f32, f64, whole } in all {
            sum.update(&f32.to_le_bytes());
            sum.update(&f64.to_le_bytes());
            sum.update(&whole.to_le_bytes());
        }
        sum.finish()
    }

    /// Number of clients, those of weight zero included.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }
}

/// Weights of clients that come in waves, when nobody knows yet how many there will be.
#[derive(Clone, Debug, Default)]
pub struct RunningWeights {
    all: Vec<f64>,
}

impl RunningWeights {
    /// The weights of the clients so far.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub fn weights(&self) -> Result<Weights, ReducerError> {
        Weights::new(&self.all)
    }

    /// The scaled weights of the next wave, and what the sums so far are to be multiplied with: a
    /// power of two, or the weight of the only client whose tensor they are. So the sums have the
    /// same bits as if all had come at once, in the same order, and no sum had been subnormal.
    ///
    /// # Errors
    /// As [`Weights::new`] for all clients so far; they are then as they were.
    pub fn extend(&mut self, wave: &[f64]) -> Result<(Weights, Option<Weight>), ReducerError> {
        let all = [self.all.as_slice(), wave].concat();
        let scaled = Weights::new(&all)?;
        let carry = match self.all.iter().position(|&weight| weight > 0.0) {
            None => None,
            Some(client) => {
                let (old, new) = (self.weights()?.clients[client], scaled.clients[client]);
                Some(Weight {
                    f32: new.f32 / old.f32,
                    f64: new.f64 / old.f64,
                    whole: new.whole / old.whole,
                })
            }
        };
        let clients = scaled.clients[self.all.len()..].to_vec();
        self.all = all;
        Ok((Weights { clients, ..scaled }, carry))
    }
}

fn checked_sum(weights: &[f64]) -> Result<f64, ReducerError> {
    let mut sum = 0.0;
    for (client, &weight) in weights.iter().enumerate() {
        if !weight.is_finite() || weight < 0.0 {
            return Err(ReducerError::Weight { client, weight });
        }
        sum += weight;
        if sum.is_infinite() {
            return Err(ReducerError::WeightSum { client });
        }
    }
    if sum == 0.0 {
        return Err(ReducerError::NoWeight);
    }
    let lost = |&(_, &weight): &(usize, &f64)| weight > 0.0 && weight / sum < MIN_WEIGHT_SHARE;
    match weights.iter().enumerate().find(lost) {
        Some((client, &weight)) => Err(ReducerError::WeightTooSmall { client, weight }),
        None => Ok(sum),
    }
}

/// e with 2^e <= x < 2^(e+1), for a positive finite x.
fn exponent(x: f64) -> i32 {
    match x.is_normal() {
        true => (x.to_bits() >> 52) as i32 - 1023,
        // The leading one of a subnormal weighs 2^-1074 times two to its position.
        false => -1074 + x.to_bits().ilog2() as i32,
    }
}

/// x * 2^n in two steps, because 2^n itself may be out of range. Exact if the product is normal.
fn times_power_of_two(x: f64, n: i32) -> f64 {
    let half = n / 2;
    x * 2f64.powi(half) * 2f64.powi(n - half)
}

/// Folds one chunk into its accumulator slice with the best instructions of this CPU.
///
/// `payload` holds whole little-endian elements of `dtype`, at any alignment; `acc` holds one
/// accumulator element for each, aligned to that element. The `first` chunk of a round
/// overwrites `acc`, later ones are added.
///
/// # Errors
/// Lengths or alignment that do not fit, or a dtype that is not averaged; `acc` is then unchanged.
pub fn accumulate(
    dtype: Dtype,
    first: bool,
    weight: Weight,
    payload: &[u8],
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    accumulate_at(Level::best(), dtype, first, weight, payload, acc)
}

/// Writes the mean of an accumulator slice to `out`, whole elements of `dtype` at any alignment.
///
/// # Errors
/// As [`accumulate`]; `out` is then unchanged.
pub fn finish(
    dtype: Dtype,
    weights: &Weights,
    acc: &[u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    finish_at(Level::best(), dtype, weights, acc, out)
}

/// [`accumulate`] for the last client's chunk and [`finish`] in one pass, with the same bits. What
/// `acc` holds afterwards is of no use.
///
/// # Errors
/// As [`accumulate`].
pub fn complete(
    dtype: Dtype,
    first: bool,
    weight: Weight,
    weights: &Weights,
    payload: &[u8],
    acc: &mut [u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    complete_at(Level::best(), dtype, first, weight, weights, payload, acc, out)
}

/// Whether elements of `dtype` are summed in their own type. The first client's payload can then
/// stand for its sums, unscaled, until the second comes: [`accumulate_held`].
pub fn is_own_sum(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F64)
}

/// [`accumulate`] of two chunks in one pass, with the same bits: `acc` holds the payload of the
/// first, whose weight is `held`, and then the sums. Both weights are positive.
///
/// # Errors
/// As [`accumulate`]; and a dtype that is not [`is_own_sum`].
pub fn accumulate_held(
    dtype: Dtype,
    held: Weight,
    weight: Weight,
    payload: &[u8],
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    accumulate_held_at(Level::best(), dtype, held, Some((weight, payload)), acc)
}

/// Turns a held payload, whose weight is `held`, into its sums.
///
/// # Errors
/// As [`accumulate_held`].
pub fn settle(dtype: Dtype, held: Weight, acc: &mut [u8]) -> Result<(), ReducerError> {
    accumulate_held_at(Level::best(), dtype, held, None, acc)
}

/// Multiplies the sums of elements of `dtype` by `factor`.
///
/// # Errors
/// As [`accumulate`].
pub fn rescale(dtype: Dtype, factor: Weight, acc: &mut [u8]) -> Result<(), ReducerError> {
    match AccumulatorType::of(dtype) {
        Some(AccumulatorType::F32) if factor.f32 == 1.0 => Ok(()),
        Some(AccumulatorType::F32) => settle(Dtype::F32, factor, acc),
        Some(AccumulatorType::F64) => {
            let f64 = if dtype == Dtype::F64 { factor.f64 } else { factor.whole };
            if f64 == 1.0 { Ok(()) } else { settle(Dtype::F64, Weight { f64, ..factor }, acc) }
        }
        None => Err(ReducerError::NotAveraged { tensor: "of this chunk".to_owned(), dtype }),
    }
}

/// [`accumulate_held`], or without a second chunk [`settle`], at a chosen level.
///
/// # Errors
/// As [`accumulate_held`].
pub fn accumulate_held_at(
    level: Level,
    dtype: Dtype,
    held: Weight,
    second: Option<(Weight, &[u8])>,
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    match dtype {
        Dtype::F32 => fold_held::<f32>(level, dtype, held, second, acc),
        Dtype::F64 => fold_held::<f64>(level, dtype, held, second, acc),
        _ => Err(ReducerError::NotAveraged { tensor: "of this chunk".to_owned(), dtype }),
    }
}

/// Calls `$function::<E>($arguments)` with the element type `E` of a dtype.
macro_rules! dispatch {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            Dtype::F32 => $function::<f32>($($argument),*),
            Dtype::F16 => $function::<F16>($($argument),*),
            Dtype::BF16 => $function::<Bf16>($($argument),*),
            Dtype::F64 => $function::<f64>($($argument),*),
            Dtype::I8 => $function::<i8>($($argument),*),
            Dtype::I16 => $function::<i16>($($argument),*),
            Dtype::I32 => $function::<i32>($($argument),*),
            Dtype::I64 => $function::<i64>($($argument),*),
            Dtype::U8 => $function::<u8>($($argument),*),
            Dtype::U16 => $function::<u16>($($argument),*),
            Dtype::U32 => $function::<u32>($($argument),*),
            Dtype::U64 => $function::<u64>($($argument),*),
            Dtype::BOOL => $function::<Bool>($($argument),*),
            dtype => {
                let tensor = "of this chunk".to_owned();
                Err(ReducerError::NotAveraged { tensor, dtype })
            }
        }
    };
}

/// [`accumulate`] at a chosen level, to compare and to measure levels. A level this CPU lacks
/// is replaced by the best it has.
///
/// # Errors
/// As [`accumulate`].
pub fn accumulate_at(
    level: Level,
    dtype: Dtype,
    first: bool,
    weight: Weight,
    payload: &[u8],
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    dispatch!(dtype, fold(level, dtype, first, weight, payload, acc))
}

/// [`finish`] at a chosen level, as [`accumulate_at`].
///
/// # Errors
/// As [`finish`].
pub fn finish_at(
    level: Level,
    dtype: Dtype,
    weights: &Weights,
    acc: &[u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    dispatch!(dtype, write_mean(level, dtype, weights, acc, out))
}

/// [`complete`] at a chosen level, as [`accumulate_at`].
///
/// # Errors
/// As [`complete`].
#[allow(clippy::too_many_arguments)]
pub fn complete_at(
    level: Level,
    dtype: Dtype,
    first: bool,
    weight: Weight,
    weights: &Weights,
    payload: &[u8],
    acc: &mut [u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    dispatch!(dtype, write_last(level, dtype, first, weight, weights, payload, acc, out))
}

/// The accumulator types, as numbers.
trait Sum: Copy + Into<f64> + FromBytes + IntoBytes + Immutable {
    const NOTHING: Self;
    fn pick(weight: Weight, is_float: bool) -> Self;
}

impl Sum for f32 {
    /// Negative zero, because adding it to anything, negative zero included, changes nothing.
    const NOTHING: f32 = -0.0;
    fn pick(weight: Weight, _is_float: bool) -> f32 {
        weight.f32
    }
}

impl Sum for f64 {
    const NOTHING: f64 = -0.0;
    fn pick(weight: Weight, is_float: bool) -> f64 {
        if is_float { weight.f64 } else { weight.whole }
    }
}

fn fold<E: Element<Sum: Sum, Bytes: FromBytes + Immutable>>(
    level: Level,
    dtype: Dtype,
    first: bool,
    weight: Weight,
    payload: &[u8],
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    let payload = whole_elements::<E>(dtype, payload)?;
    check_accumulator::<E>(dtype, payload.len(), acc)?;
    let sums = <[E::Sum]>::mut_from_bytes(acc).map_err(|_| ReducerError::Misaligned { dtype })?;
    let counts = weight.counts::<E>();
    let weight = weight.of::<E>();
    match (first, counts) {
        (true, true) => level.run(First::<E> { weight, payload, sums }),
        (false, true) => level.run(Add::<E> { weight, payload, sums }),
        // Not multiplied by zero: zero times infinity is NaN.
        (true, false) => sums.fill(E::Sum::NOTHING),
        (false, false) => {}
    }
    Ok(())
}

fn fold_held<E: Element<Sum: Sum, Bytes: FromBytes + Immutable>>(
    level: Level,
    dtype: Dtype,
    held: Weight,
    second: Option<(Weight, &[u8])>,
    acc: &mut [u8],
) -> Result<(), ReducerError> {
    let scale = held.of::<E>();
    let Some((weight, payload)) = second else {
        let sums =
            <[E::Sum]>::mut_from_bytes(acc).map_err(|_| ReducerError::Misaligned { dtype })?;
        level.run(Scale::<E> { scale, sums });
        return Ok(());
    };
    let payload = whole_elements::<E>(dtype, payload)?;
    check_accumulator::<E>(dtype, payload.len(), acc)?;
    let sums = <[E::Sum]>::mut_from_bytes(acc).map_err(|_| ReducerError::Misaligned { dtype })?;
    level.run(ScaleAdd::<E> { scale, weight: weight.of::<E>(), payload, sums });
    Ok(())
}

fn write_mean<E: Element<Sum: Sum, Bytes: FromBytes + IntoBytes + Immutable>>(
    level: Level,
    dtype: Dtype,
    weights: &Weights,
    acc: &[u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    let bytes = out.len();
    let out = <[E::Bytes]>::mut_from_bytes(out)
        .map_err(|_| ReducerError::PartialElement { dtype, bytes })?;
    check_accumulator::<E>(dtype, out.len(), acc)?;
    let sums = <[E::Sum]>::ref_from_bytes(acc).map_err(|_| ReducerError::Misaligned { dtype })?;
    let denominator = weights.denominator.of::<E>();
    level.run(Finish::<E> { denominator, sums, out });
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn write_last<E: Element<Sum: Sum, Bytes: FromBytes + IntoBytes + Immutable>>(
    level: Level,
    dtype: Dtype,
    first: bool,
    weight: Weight,
    weights: &Weights,
    payload: &[u8],
    acc: &mut [u8],
    out: &mut [u8],
) -> Result<(), ReducerError> {
    if !weight.counts::<E>() {
        fold::<E>(level, dtype, first, weight, payload, acc)?;
        return write_mean::<E>(level, dtype, weights, acc, out);
    }
    let out_bytes = out.len();
    let payload = whole_elements::<E>(dtype, payload)?;
    let out = <[E::Bytes]>::mut_from_bytes(out)
        .map_err(|_| ReducerError::PartialElement { dtype, bytes: out_bytes })?;
    check_accumulator::<E>(dtype, payload.len(), acc)?;
    check_accumulator::<E>(dtype, out.len(), acc)?;
    let sums = <[E::Sum]>::ref_from_bytes(acc).map_err(|_| ReducerError::Misaligned { dtype })?;
    let (weight, denominator) = (weight.of::<E>(), weights.denominator.of::<E>());
    match first {
        true => level.run(Only::<E> { weight, payload, denominator, out }),
        false => level.run(Last::<E> { weight, payload, sums, denominator, out }),
    }
    Ok(())
}

fn whole_elements<E: Element<Bytes: FromBytes + Immutable>>(
    dtype: Dtype,
    payload: &[u8],
) -> Result<&[E::Bytes], ReducerError> {
    <[E::Bytes]>::ref_from_bytes(payload)
        .map_err(|_| ReducerError::PartialElement { dtype, bytes: payload.len() })
}

fn check_accumulator<E: Element>(
    dtype: Dtype,
    elements: usize,
    acc: &[u8],
) -> Result<(), ReducerError> {
    match elements.checked_mul(size_of::<E::Sum>()) == Some(acc.len()) {
        true => Ok(()),
        false => Err(ReducerError::Length { dtype, elements, accumulator_bytes: acc.len() }),
    }
}

/// Where the sums of a model's elements lie in its accumulator.
///
/// Runs are stretches of the data section with one dtype. Each run's sums start at a multiple of
/// [`ACCUMULATOR_ALIGN_BYTES`]. A model of F32 alone has an accumulator as long as its data.
#[derive(Clone, Debug, PartialEq)]
pub struct AccumulatorLayout {
    runs: Vec<Placed>,
    bytes: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Placed {
    dtype: Dtype,
    data: Range<u64>,
    element_bytes: u64,
    sum_bytes: u64,
    start: u64,
}

impl AccumulatorLayout {
    /// Lays out the sums of `runs`, which cover the data section in order and without gap. Empty
    /// runs are left out.
    ///
    /// # Errors
    /// A dtype that is not averaged, runs that do not follow each other in whole elements, or an
    /// accumulator beyond 2^64 bytes.
    pub fn new(
        runs: impl IntoIterator<Item = (Dtype, Range<u64>)>,
    ) -> Result<AccumulatorLayout, ReducerError> {
        let mut layout = AccumulatorLayout { runs: Vec::new(), bytes: 0 };
        for (dtype, data) in runs {
            layout.push(dtype, data)?;
        }
        Ok(layout)
    }

    /// Lays out the sums of a model.
    ///
    /// # Errors
    /// As [`AccumulatorLayout::new`]; a dtype that is not averaged is named with its tensor.
    pub fn of(manifest: &Manifest) -> Result<AccumulatorLayout, ReducerError> {
        for tensor in manifest.tensors() {
            accumulator(&tensor.name, tensor.dtype)?;
        }
        Self::new(manifest.runs().iter().map(|run| (run.dtype, run.range.clone())))
    }

    fn push(&mut self, dtype: Dtype, data: Range<u64>) -> Result<(), ReducerError> {
        let sum_bytes = accumulator(&format!("at byte {}", data.start), dtype)?.bytes();
        let element_bytes = dtype.bitsize() as u64 / 8;
        let follows = self.runs.last().is_none_or(|last| last.data.end == data.start);
        let length = data.end.checked_sub(data.start).filter(|l| l % element_bytes == 0);
        let (true, Some(length)) = (follows, length) else {
            return Err(ReducerError::Run { dtype, range: data });
        };
        if length == 0 {
            return Ok(());
        }
        let start = self.bytes.checked_next_multiple_of(ACCUMULATOR_ALIGN_BYTES);
        let sums = (length / element_bytes).checked_mul(sum_bytes);
        let end = start.zip(sums).and_then(|(start, sums)| start.checked_add(sums));
        let (Some(start), Some(end)) = (start, end) else { return Err(ReducerError::TooLarge) };
        self.runs.push(Placed { dtype, data, element_bytes, sum_bytes, start });
        self.bytes = end;
        Ok(())
    }

    /// Length of the accumulator in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The accumulator of a model as a model of its own, which can be sent: byte for byte the same, with
    /// the same names. What aligns a run is a tensor too.
    ///
    /// # Errors
    /// As [`AccumulatorLayout::of`]; and a header beyond its limits.
    pub fn sums_manifest(manifest: &Manifest) -> Result<Manifest, ReducerError> {
        let layout = AccumulatorLayout::of(manifest)?;
        let mut names: HashSet<String> =
            manifest.tensors().iter().map(|tensor| tensor.name.clone()).collect();
        let mut tensors: Vec<(String, Dtype, Vec<u64>)> = Vec::new();
        let (mut end, mut before) = (0, Dtype::F32);
        for tensor in manifest.tensors().iter().filter(|tensor| !tensor.range.is_empty()) {
            let (dtype, sum_bytes) = match accumulator(&tensor.name, tensor.dtype)? {
                AccumulatorType::F32 => (Dtype::F32, 4),
                AccumulatorType::F64 => (Dtype::F64, 8),
            };
            let place = layout.range(tensor.range.clone(), tensor.dtype)?;
            if place.start > end {
                // Of the dtype before it, so that every run still begins at an aligned place.
                let bytes = if before == Dtype::F32 { 4 } else { 8 };
                let mut name = format!("gap before {}", tensor.name);
                while !names.insert(name.clone()) {
                    name.push('+');
                }
                tensors.push((name, before, vec![(place.start - end) / bytes]));
            }
            let elements = (place.end - place.start) / sum_bytes;
            tensors.push((tensor.name.clone(), dtype, vec![elements]));
            (end, before) = (place.end, dtype);
        }
        Manifest::from_tensors(tensors, &BTreeMap::new())
            .map_err(|error| ReducerError::Sums { why: error.to_string() })
    }

    /// Whether every sum stands where its element stands in the data section, and is as large:
    /// then the mean can take the place of the sums, and no second region is needed.
    pub fn is_in_place(&self) -> bool {
        self.runs
            .iter()
            .all(|run| run.start == run.data.start && run.sum_bytes == run.element_bytes)
    }

    /// Where the accumulator holds a chunk: bytes `chunk` of the data section, whole elements
    /// inside one run of `dtype`.
    ///
    /// # Errors
    /// A chunk that is not that.
    pub fn range(&self, chunk: Range<u64>, dtype: Dtype) -> Result<Range<u64>, ReducerError> {
        let run = self.run_at(chunk.start).filter(|run| run.dtype == dtype);
        let placed = run.and_then(|run| Some(run.place(chunk.start)?..run.place(chunk.end)?));
        placed.filter(|r| r.start <= r.end).ok_or(ReducerError::Chunk { range: chunk })
    }

    /// The accumulator bytes that cover bytes `span` of the data section, which may hold many
    /// runs. Spans that meet in the data meet in the accumulator, so spans that tile the data cut
    /// the accumulator into disjoint slices that one thread each may own.
    ///
    /// # Errors
    /// A span that is outside the data or cuts an element.
    pub fn span(&self, span: Range<u64>) -> Result<Range<u64>, ReducerError> {
        let ends = self.position(span.start).zip(self.position(span.end));
        let covered = ends.filter(|(start, end)| start <= end).map(|(start, end)| start..end);
        covered.ok_or(ReducerError::Chunk { range: span })
    }

    /// Where the sums from `byte` of the data section on begin.
    fn position(&self, byte: u64) -> Option<u64> {
        match self.run_at(byte) {
            Some(run) => run.place(byte),
            None => (byte == self.runs.last().map_or(0, |run| run.data.end)).then_some(self.bytes),
        }
    }

    fn run_at(&self, byte: u64) -> Option<&Placed> {
        let run = self.runs.get(self.runs.partition_point(|run| run.data.end <= byte))?;
        run.data.contains(&byte).then_some(run)
    }
}

impl Placed {
    /// The accumulator byte of data byte `byte`, which is an element's start or the run's end.
    fn place(&self, byte: u64) -> Option<u64> {
        let offset = byte.checked_sub(self.data.start).filter(|_| byte <= self.data.end)?;
        let whole = offset % self.element_bytes == 0;
        whole.then(|| self.start + offset / self.element_bytes * self.sum_bytes)
    }
}
