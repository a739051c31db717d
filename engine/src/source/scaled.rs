//! Another source, multiplied by a power of two.
//!
//! It gives demonstration clients different parameters made from one real file: powers of two
//! are exact, so the mean of the clients is known exactly as well.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Piece, Source, fill_by_elements};
use crate::error::SourceError;
use crate::limits;
use crate::manifest::{Dtype, Manifest};

/// A source whose F32, F64, F16 and BF16 elements are multiplied by 2^exponent.
///
/// Products are rounded to nearest even and exact where they are normal numbers. Elements of
/// other dtypes are as they were.
#[derive(Clone, Debug)]
pub struct Scaled<S> {
    inner: S,
    factor: f32,
}

impl<S: Source> Scaled<S> {
    /// Scales `inner` by 2^`exponent`.
    ///
    /// # Errors
    /// If the exponent is beyond [`limits::MAX_SCALE_EXPONENT`] in either direction.
    pub fn new(inner: S, exponent: i32) -> Result<Self, SourceError> {
        if exponent.unsigned_abs() > limits::MAX_SCALE_EXPONENT.unsigned_abs() {
            return Err(SourceError::Exponent { exponent });
        }
        // The bound makes it a normal number; 127 is the bias of an f32, which has 23 bits of
        // mantissa.
        let factor = f32::from_bits(((127 + exponent) as u32) << 23);
        Ok(Self { inner, factor })
    }
}

impl<S: Source> Source for Scaled<S> {
    fn manifest(&self) -> &Manifest {
        self.inner.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        fill_by_elements(self.manifest(), offset, out, |piece| {
            let Piece { dtype, offset, bytes, .. } = piece;
            self.inner.read(offset, bytes)?;
            scale(dtype, bytes, self.factor);
            Ok(())
        })
    }
}

fn scale(dtype: Dtype, bytes: &mut [u8], factor: f32) {
    match dtype {
        Dtype::F32 => each(bytes, |item| (f32::from_le_bytes(item) * factor).to_le_bytes()),
        Dtype::F64 => {
            each(bytes, |item| (f64::from_le_bytes(item) * f64::from(factor)).to_le_bytes());
        }
        Dtype::BF16 => each(bytes, |item| {
            bf16::from_f32(bf16::from_le_bytes(item).to_f32() * factor).to_le_bytes()
        }),
        Dtype::F16 => scale_f16(bytes, factor),
        _ => {}
    }
}

#[inline(always)]
fn each<const N: usize>(bytes: &mut [u8], scaled: impl Fn([u8; N]) -> [u8; N]) {
    for item in bytes.as_chunks_mut::<N>().0 {
        *item = scaled(*item);
    }
}

/// By blocks, because only whole slices are converted at the speed of the processor.
fn scale_f16(bytes: &mut [u8], factor: f32) {
    const BLOCK: usize = 256;
    for block in bytes.chunks_mut(2 * BLOCK) {
        let (mut wide, mut narrow) = ([0.0; BLOCK], [f16::ZERO; BLOCK]);
        let (items, _) = block.as_chunks_mut::<2>();
        for (value, item) in narrow.iter_mut().zip(items.iter()) {
            *value = f16::from_le_bytes(*item);
        }
        narrow.convert_to_f32_slice(&mut wide);
        wide.iter_mut().for_each(|value| *value *= factor);
        narrow.convert_from_f32_slice(&wide);
        for (item, value) in items.iter_mut().zip(narrow) {
            *item = value.to_le_bytes();
        }
    }
}
