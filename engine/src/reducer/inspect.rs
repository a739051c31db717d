//! Looks at the numbers of an update: how many are not finite, and how large they are together.
//!
//! One pass over a chunk that is in the cache anyway. The norm is the Euclidean one over all
//! floats of a model, taken as one vector. Integers and BOOL are always finite and no part of it:
//! they are counters and masks, and a count of batches would outweigh every parameter.
//!
//! An element that is NaN or infinite counts as zero in the norm, in the update and in the model it
//! is compared with. Squares are taken and added in f64, element i of a chunk in lane i mod 32; the
//! lanes are added pairwise, the chunks in their order. So the norm has the same bits on every CPU
//! and whatever the order in which chunks came, but may differ in the last bits for another size
//! of chunks. With c chunks of at most e elements it is off by at most (e / 64 + c / 2 + 6) 2^-53 of
//! itself. Only F64 has numbers whose squares leave the range of f64: a norm of 2^512 or more may be
//! infinite, and squares that underflow add up to 2^-537 times the root of the number of elements.

use safetensors::Dtype;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::kernels::{Bf16, Element, F16};
use super::{AccumulatorType, whole_elements};
use crate::error::ReducerError;
use crate::sys::simd::{Kernel, Level};

/// Sums of squares that grow side by side: four registers of AVX-512, eight of AVX2.
const LANES: usize = 32;

/// Elements that are counted and measured together: at most 8 KiB, so that the second look finds
/// them in the L1 cache. A multiple of [`LANES`], and few enough for counters of 16 bits.
const BLOCK_ELEMENTS: usize = 1024;

/// Which norm is wanted of an update.
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// None: looking for elements that are not finite costs less.
    Skip,
    /// That of the update itself.
    OfUpdate,
    /// That of the update less the model it was trained from: this is the model's chunk.
    OfChange(&'a [u8]),
}

/// What was found in one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Found {
    /// Elements that are NaN or infinite.
    pub nonfinite: u64,
    /// The first of them, counted in elements from the begin of the chunk.
    pub first_nonfinite: Option<u64>,
    /// The sum of squares, if a norm was wanted. Never NaN.
    pub squares: Option<f64>,
}

/// Inspects one chunk with the best instructions of this CPU.
///
/// `payload` holds whole little-endian elements of `dtype`, at any alignment; so does the model's
/// chunk, as many.
///
/// # Errors
/// Bytes that are not whole elements, a model's chunk of another length, or a dtype that is not
/// averaged.
pub fn inspect(dtype: Dtype, payload: &[u8], norm: Norm<'_>) -> Result<Found, ReducerError> {
    inspect_at(Level::best(), dtype, payload, norm)
}

/// [`inspect`] at a chosen level, as [`super::accumulate_at`].
///
/// # Errors
/// As [`inspect`].
pub fn inspect_at(
    level: Level,
    dtype: Dtype,
    payload: &[u8],
    norm: Norm<'_>,
) -> Result<Found, ReducerError> {
    if let Norm::OfChange(model) = norm
        && model.len() != payload.len()
    {
        return Err(ReducerError::OtherModel { bytes: payload.len(), model_bytes: model.len() });
    }
    match dtype {
        Dtype::F32 => look::<f32>(level, dtype, payload, norm),
        Dtype::F16 => look::<F16>(level, dtype, payload, norm),
        Dtype::BF16 => look::<Bf16>(level, dtype, payload, norm),
        Dtype::F64 => look::<f64>(level, dtype, payload, norm),
        _ => refuse_other(dtype, payload).map(|()| Found {
            squares: (!matches!(norm, Norm::Skip)).then_some(0.0),
            ..Found::default()
        }),
    }
}

/// Makes every element of a chunk that is NaN or infinite zero, in place. Needed only where
/// [`inspect`] has found some: without any, nothing changes.
///
/// # Errors
/// As [`inspect`]; `payload` is then unchanged.
pub fn clean(dtype: Dtype, payload: &mut [u8]) -> Result<(), ReducerError> {
    clean_at(Level::best(), dtype, payload)
}

/// [`clean`] at a chosen level, as [`super::accumulate_at`].
///
/// # Errors
/// As [`clean`].
pub fn clean_at(level: Level, dtype: Dtype, payload: &mut [u8]) -> Result<(), ReducerError> {
    match dtype {
        Dtype::F32 => scrub::<f32>(level, dtype, payload),
        Dtype::F16 => scrub::<F16>(level, dtype, payload),
        Dtype::BF16 => scrub::<Bf16>(level, dtype, payload),
        Dtype::F64 => scrub::<f64>(level, dtype, payload),
        _ => refuse_other(dtype, payload),
    }
}

/// Refuses what is no whole elements of a dtype that is averaged.
fn refuse_other(dtype: Dtype, payload: &[u8]) -> Result<(), ReducerError> {
    if AccumulatorType::of(dtype).is_none() {
        return Err(ReducerError::NotAveraged { tensor: "of this chunk".to_owned(), dtype });
    }
    match payload.len().is_multiple_of(dtype.bitsize() / 8) {
        true => Ok(()),
        false => Err(ReducerError::PartialElement { dtype, bytes: payload.len() }),
    }
}

/// The dtypes that can be not finite.
trait Float: Element<Bytes: FromBytes + IntoBytes + Immutable, Sum: Into<f64>> {
    /// An unsigned integer as wide as an element: counters in it fill the same registers.
    type Word: Copy + Default + From<bool> + Into<u64> + std::ops::AddAssign;
    fn is_number(bytes: Self::Bytes) -> bool;
    /// Zero in place of what is not finite.
    fn cleaned(bytes: Self::Bytes) -> Self::Bytes;

    #[inline(always)]
    fn number(bytes: Self::Bytes) -> f64 {
        Self::widen(Self::cleaned(bytes)).into()
    }
}

/// A float is finite unless all bits of its exponent are set.
macro_rules! float {
    ($element:ident, $word:ident, $exponent:literal) => {
        impl Float for $element {
            type Word = $word;

            #[inline(always)]
            fn is_number(bytes: Self::Bytes) -> bool {
                $word::from_le_bytes(bytes) & $exponent != $exponent
            }

            #[inline(always)]
            fn cleaned(bytes: Self::Bytes) -> Self::Bytes {
                let word = if Self::is_number(bytes) { $word::from_le_bytes(bytes) } else { 0 };
                word.to_le_bytes()
            }
        }
    };
}

float!(F16, u16, 0x7c00);
float!(Bf16, u16, 0x7f80);
float!(f32, u32, 0x7f80_0000);
float!(f64, u64, 0x7ff0_0000_0000_0000);

fn look<E: Float>(
    level: Level,
    dtype: Dtype,
    payload: &[u8],
    norm: Norm<'_>,
) -> Result<Found, ReducerError> {
    let payload = whole_elements::<E>(dtype, payload)?;
    let mut found = Found::default();
    let mut lanes = [0.0; LANES];
    match norm {
        Norm::Skip => level.run(Count::<E> { payload, found: &mut found }),
        Norm::OfUpdate => {
            level.run(Measure::<E> { payload, found: &mut found, lanes: &mut lanes });
        }
        Norm::OfChange(model) => {
            let model = whole_elements::<E>(dtype, model)?;
            let lanes = &mut lanes;
            level.run(MeasureChange::<E> { payload, model, found: &mut found, lanes });
        }
    }
    found.squares = (!matches!(norm, Norm::Skip)).then(|| pairwise_sum(lanes));
    Ok(found)
}

fn scrub<E: Float>(level: Level, dtype: Dtype, payload: &mut [u8]) -> Result<(), ReducerError> {
    let bytes = payload.len();
    let payload = <[E::Bytes]>::mut_from_bytes(payload)
        .map_err(|_| ReducerError::PartialElement { dtype, bytes })?;
    level.run(Clean::<E> { payload });
    Ok(())
}

/// Counts what is not finite.
struct Count<'a, E: Float> {
    payload: &'a [E::Bytes],
    found: &'a mut Found,
}

impl<E: Float> Kernel for Count<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (index, block) in self.payload.chunks(BLOCK_ELEMENTS).enumerate() {
            count::<E>(index, block, self.found);
        }
    }
}

/// [`Count`], and squares.
struct Measure<'a, E: Float> {
    payload: &'a [E::Bytes],
    found: &'a mut Found,
    lanes: &'a mut [f64; LANES],
}

impl<E: Float> Kernel for Measure<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (index, block) in self.payload.chunks(BLOCK_ELEMENTS).enumerate() {
            count::<E>(index, block, self.found);
            let mut lanes = *self.lanes;
            let (rows, rest) = block.as_chunks::<LANES>();
            for row in rows {
                add_squares::<E>(&mut lanes, row);
            }
            add_squares::<E>(&mut lanes, rest);
            *self.lanes = lanes;
        }
    }
}

/// [`Count`], and squares of the distance to the model.
struct MeasureChange<'a, E: Float> {
    payload: &'a [E::Bytes],
    model: &'a [E::Bytes],
    found: &'a mut Found,
    lanes: &'a mut [f64; LANES],
}

impl<E: Float> Kernel for MeasureChange<'_, E> {
    #[inline(always)]
    fn run(self) {
        let blocks = self.payload.chunks(BLOCK_ELEMENTS).zip(self.model.chunks(BLOCK_ELEMENTS));
        for (index, (block, model)) in blocks.enumerate() {
            count::<E>(index, block, self.found);
            let mut lanes = *self.lanes;
            let (rows, rest) = block.as_chunks::<LANES>();
            let (model_rows, model_rest) = model.as_chunks::<LANES>();
            for (row, model) in rows.iter().zip(model_rows) {
                add_distances::<E>(&mut lanes, row, model);
            }
            add_distances::<E>(&mut lanes, rest, model_rest);
            *self.lanes = lanes;
        }
    }
}

/// Zero in place of what is not finite.
struct Clean<'a, E: Float> {
    payload: &'a mut [E::Bytes],
}

impl<E: Float> Kernel for Clean<'_, E> {
    #[inline(always)]
    fn run(self) {
        for element in self.payload {
            *element = E::cleaned(*element);
        }
    }
}

/// Notes what is not finite in the block of that number.
#[inline(always)]
fn count<E: Float>(index: usize, block: &[E::Bytes], found: &mut Found) {
    // One sum, which the compiler cuts into lanes by itself: with lanes written out it does not.
    let mut nonfinite = E::Word::default();
    for &x in block {
        nonfinite += (!E::is_number(x)).into();
    }
    let nonfinite: u64 = nonfinite.into();
    if nonfinite > 0 && found.nonfinite == 0 {
        let first = block.iter().position(|&x| !E::is_number(x));
        found.first_nonfinite = first.map(|first| (index * BLOCK_ELEMENTS + first) as u64);
    }
    found.nonfinite += nonfinite;
}

#[inline(always)]
fn add_squares<E: Float>(lanes: &mut [f64; LANES], row: &[E::Bytes]) {
    for (lane, &x) in lanes.iter_mut().zip(row) {
        let x = E::number(x);
        *lane += x * x;
    }
}

#[inline(always)]
fn add_distances<E: Float>(lanes: &mut [f64; LANES], row: &[E::Bytes], model: &[E::Bytes]) {
    for (lane, (&x, &model)) in lanes.iter_mut().zip(row.iter().zip(model)) {
        let distance = E::number(x) - E::number(model);
        *lane += distance * distance;
    }
}

fn pairwise_sum(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}
