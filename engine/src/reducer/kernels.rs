//! The inner loops of the weighted mean: one definition, compiled for several instruction sets.
//!
//! Every loop is plain Rust that the compiler turns into vector code; [`crate::sys::simd::Level::run`] picks the
//! copy that was compiled for this CPU. A product and a sum are never fused, divisions are
//! exact, and a result that is NaN is replaced by one fixed NaN, so all copies give the same bits.
#![allow(unsafe_code)]

use crate::sys::simd::Kernel;

/// Copies `source` to `target`, which is as long, past the caches: for bytes that are not read soon.
/// An ordinary store first fetches the old bytes from memory.
#[cfg(target_arch = "x86_64")]
pub fn store_past_cache(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    assert_eq!(target.len(), source.len());
    // Streaming stores need a target aligned to 16 bytes.
    let head = target.as_ptr().align_offset(size_of::<__m128i>()).min(target.len());
    let (target_head, target) = target.split_at_mut(head);
    let (source_head, source) = source.split_at(head);
    target_head.copy_from_slice(source_head);
    let (target, target_tail) = target.as_chunks_mut::<16>();
    let (source, source_tail) = source.as_chunks::<16>();
    for (target, source) in target.iter_mut().zip(source) {
        // SAFETY: both are 16 bytes, the target is aligned, and every x86-64 CPU has SSE2.
        unsafe {
            let bytes = _mm_loadu_si128(source.as_ptr().cast());
            _mm_stream_si128(target.as_mut_ptr().cast(), bytes);
        }
    }
    target_tail.copy_from_slice(source_tail);
    // SAFETY: every x86-64 CPU has it. It orders the stores before all that follow.
    unsafe { _mm_sfence() };
}

/// Copies `source` to `target`, which is as long.
#[cfg(not(target_arch = "x86_64"))]
pub fn store_past_cache(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

/// How one dtype is read, and how its mean is written. Bytes are little-endian.
pub(super) trait Element {
    const IS_FLOAT: bool;
    type Bytes: Copy;
    type Sum: Copy + std::ops::Add<Output = Self::Sum> + std::ops::Mul<Output = Self::Sum>;
    fn widen(bytes: Self::Bytes) -> Self::Sum;
    fn mean(sum: Self::Sum, denominator: Self::Sum) -> Self::Bytes;
}

/// `sums = weight * payload`
pub(super) struct First<'a, E: Element> {
    pub weight: E::Sum,
    pub payload: &'a [E::Bytes],
    pub sums: &'a mut [E::Sum],
}

impl<E: Element> Kernel for First<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.sums.iter_mut().zip(self.payload) {
            *sum = self.weight * E::widen(x);
        }
    }
}

/// `sums = sums + weight * payload`, rounded after the product and after the sum.
pub(super) struct Add<'a, E: Element> {
    pub weight: E::Sum,
    pub payload: &'a [E::Bytes],
    pub sums: &'a mut [E::Sum],
}

impl<E: Element> Kernel for Add<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.sums.iter_mut().zip(self.payload) {
            *sum = *sum + self.weight * E::widen(x);
        }
    }
}

/// `sums = scale * sums`: [`First`] of a payload that stands where its sums shall stand.
pub(super) struct Scale<'a, E: Element> {
    pub scale: E::Sum,
    pub sums: &'a mut [E::Sum],
}

impl<E: Element> Kernel for Scale<'_, E> {
    #[inline(always)]
    fn run(self) {
        for sum in self.sums.iter_mut() {
            *sum = self.scale * *sum;
        }
    }
}

/// `sums = scale * sums + weight * payload`: [`Scale`] and [`Add`] in one pass, with the same
/// roundings.
pub(super) struct ScaleAdd<'a, E: Element> {
    pub scale: E::Sum,
    pub weight: E::Sum,
    pub payload: &'a [E::Bytes],
    pub sums: &'a mut [E::Sum],
}

impl<E: Element> Kernel for ScaleAdd<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (sum, &x) in self.sums.iter_mut().zip(self.payload) {
            *sum = self.scale * *sum + self.weight * E::widen(x);
        }
    }
}

/// `out = round(sums / denominator)`
pub(super) struct Finish<'a, E: Element> {
    pub denominator: E::Sum,
    pub sums: &'a [E::Sum],
    pub out: &'a mut [E::Bytes],
}

impl<E: Element> Kernel for Finish<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (out, &sum) in self.out.iter_mut().zip(self.sums) {
            *out = E::mean(sum, self.denominator);
        }
    }
}

/// `out = round((sums + weight * payload) / denominator)`: [`Add`] and [`Finish`] in one pass, with
/// the same roundings.
pub(super) struct Last<'a, E: Element> {
    pub weight: E::Sum,
    pub payload: &'a [E::Bytes],
    pub sums: &'a [E::Sum],
    pub denominator: E::Sum,
    pub out: &'a mut [E::Bytes],
}

impl<E: Element> Kernel for Last<'_, E> {
    #[inline(always)]
    fn run(self) {
        for ((out, &sum), &x) in self.out.iter_mut().zip(self.sums).zip(self.payload) {
            *out = E::mean(sum + self.weight * E::widen(x), self.denominator);
        }
    }
}

/// `out = round(weight * payload / denominator)`: [`First`] and [`Finish`] in one pass.
pub(super) struct Only<'a, E: Element> {
    pub weight: E::Sum,
    pub payload: &'a [E::Bytes],
    pub denominator: E::Sum,
    pub out: &'a mut [E::Bytes],
}

impl<E: Element> Kernel for Only<'_, E> {
    #[inline(always)]
    fn run(self) {
        for (out, &x) in self.out.iter_mut().zip(self.payload) {
            *out = E::mean(self.weight * E::widen(x), self.denominator);
        }
    }
}

pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Bool;

/// A float that is its own accumulator. The quotient of a finite sum may round past the largest
/// finite number; the mean of finite numbers is finite, so it is brought back.
macro_rules! float {
    ($float:ident, $bytes:literal) => {
        impl Element for $float {
            const IS_FLOAT: bool = true;
            type Bytes = [u8; $bytes];
            type Sum = $float;

            #[inline(always)]
            fn widen(bytes: [u8; $bytes]) -> $float {
                $float::from_le_bytes(bytes)
            }

            #[inline(always)]
            fn mean(sum: $float, denominator: $float) -> [u8; $bytes] {
                let mean = sum / denominator;
                let bounded = mean.clamp($float::MIN, $float::MAX);
                let mean = if sum.is_finite() { bounded } else { mean };
                let mean = if mean.is_nan() { $float::NAN } else { mean };
                mean.to_le_bytes()
            }
        }
    };
}

float!(f32, 4);
float!(f64, 8);

/// An integer, summed in f64: the mean is rounded half to even, and `as` saturates.
macro_rules! integer {
    ($($integer:ident $bytes:literal),*) => {$(
        impl Element for $integer {
            const IS_FLOAT: bool = false;
            type Bytes = [u8; $bytes];
            type Sum = f64;

            #[inline(always)]
            fn widen(bytes: [u8; $bytes]) -> f64 {
                $integer::from_le_bytes(bytes) as f64
            }

            #[inline(always)]
            fn mean(sum: f64, denominator: f64) -> [u8; $bytes] {
                ((sum / denominator).round_ties_even() as $integer).to_le_bytes()
            }
        }
    )*};
}

integer!(u8 1, i8 1, u16 2, i16 2, u32 4, i32 4, u64 8, i64 8);

impl Element for Bool {
    const IS_FLOAT: bool = false;
    type Bytes = [u8; 1];
    type Sum = f64;

    #[inline(always)]
    fn widen(bytes: [u8; 1]) -> f64 {
        u8::from(bytes[0] != 0).into()
    }

    #[inline(always)]
    fn mean(sum: f64, denominator: f64) -> [u8; 1] {
        [u8::from(sum + sum > denominator)]
    }
}

impl Element for Bf16 {
    const IS_FLOAT: bool = true;
    type Bytes = [u8; 2];
    type Sum = f32;

    #[inline(always)]
    fn widen(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }

    #[inline(always)]
    fn mean(sum: f32, denominator: f32) -> [u8; 2] {
        let mean = sum / denominator;
        let bits = mean.to_bits();
        // Adding just under half of the last kept bit, and one more if that bit is odd, carries
        // exactly when rounding to nearest even goes up.
        let odd = (bits >> 16) & 1;
        let rounded = (bits.wrapping_add(0x7fff + odd) >> 16) as u16;
        let rounded = if mean.is_nan() { 0x7fc0 } else { rounded };
        rounded.to_le_bytes()
    }
}

impl Element for F16 {
    const IS_FLOAT: bool = true;
    type Bytes = [u8; 2];
    type Sum = f32;

    #[inline(always)]
    fn widen(bytes: [u8; 2]) -> f32 {
        f16_to_f32(u16::from_le_bytes(bytes))
    }

    #[inline(always)]
    fn mean(sum: f32, denominator: f32) -> [u8; 2] {
        f32_to_f16(sum / denominator).to_le_bytes()
    }
}

/// Bits of 2^-14, the smallest normal f16, as f32.
const F16_MIN_NORMAL: u32 = (127 - 14) << 23;

/// Exact. Written with selects, not branches, so that it becomes vector code.
#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let sign = u32::from(half & 0x8000) << 16;
    let rebias = if magnitude >= 0x7c00 { (255 - 31) << 23 } else { (127 - 15) << 23 };
    let normal = (magnitude << 13) + rebias;
    // A subnormal half has no hidden one: give it one, then subtract it.
    let with_one = f32::from_bits(F16_MIN_NORMAL | (magnitude << 13));
    let subnormal = (with_one - f32::from_bits(F16_MIN_NORMAL)).to_bits();
    f32::from_bits(sign | if magnitude < 0x0400 { subnormal } else { normal })
}

/// Rounds to nearest even; every NaN becomes 0x7e00.
#[inline(always)]
fn f32_to_f16(float: f32) -> u16 {
    // The last bit of this number weighs 2^-24 as that of a subnormal half does, so adding it
    // makes the hardware round there.
    const ALIGN: u32 = (127 - 24 + 23) << 23;
    let magnitude = float.to_bits() & 0x7fff_ffff;
    let sign = (float.to_bits() >> 16) & 0x8000;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits() - ALIGN;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub((127 - 15) << 23) >> 13;
    let small = magnitude < F16_MIN_NORMAL;
    let finite = if small { subnormal } else { normal.min(0x7c00) };
    let rounded = if magnitude >= 0x4780_0000 { 0x7c00 } else { finite };
    if float.is_nan() { 0x7e00 } else { (sign | rounded) as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32_const();
            let got = f16_to_f32(bits);
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan());
        }
    }

    /// Every exponent and sign, with the mantissas about each rounding boundary.
    fn floats() -> impl Iterator<Item = f32> {
        let tops = (0..=u16::MAX).map(|top| u32::from(top) << 16);
        let lows = [0, 1, 0xfff, 0x1000, 0x1001, 0x2000, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff];
        tops.flat_map(move |top| lows.map(|low| f32::from_bits(top | low)))
    }

    #[test]
    fn f32_narrows_as_the_half_crate_does() {
        for float in floats() {
            let f16 = half::f16::from_f32_const(float).to_bits();
            let f16 = if float.is_nan() { 0x7e00 } else { f16 };
            assert_eq!(F16::mean(float, 1.0), f16.to_le_bytes(), "{float:e}");
            let bf16 = half::bf16::from_f32_const(float).to_bits();
            let bf16 = if float.is_nan() { 0x7fc0 } else { bf16 };
            assert_eq!(Bf16::mean(float, 1.0), bf16.to_le_bytes(), "{float:e}");
        }
    }
}
