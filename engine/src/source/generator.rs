//! Reproducible random parameters of any size, made on the fly.
//!
//! Item number `i` of the model is made from one hash of `i` and the seed, so that any part can
//! be made without the rest, by any thread, or by a checker in another language. Items are
//! elements, but the parts of a complex number count apart, and so do the bytes of the dtypes
//! that the table does not name. A run of one dtype counts on from the items of the run before.
//!
//! ```text
//! lowbias32(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
//! key  = lowbias32(low32(seed) ^ lowbias32(high32(seed) + high32(i)))
//! hash = lowbias32(low32(i) ^ key)                      all modulo 2^32
//!
//! F64                    int32(hash) / 2^31
//! F32 F16 BF16 C64       (int32(hash) >> 8) / 2^23, rounded to nearest even
//! I8 to I64, U8 to U64   hash: its low bits; I64 extends its sign, U64 does not
//! BOOL                   hash & 1
//! all others             each byte is the low byte of a hash
//! ```
//!
//! Floating-point values lie in [-1, 1), where F16 and BF16 may round up to 1.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Piece, Source, fill_by_elements};
use crate::error::SourceError;
use crate::manifest::{Dtype, Manifest};
use crate::sys::simd::{Kernel, Level};

/// Random parameters for a manifest.
#[derive(Clone, Debug)]
pub struct Generator {
    manifest: Manifest,
    seed: u64,
    /// Items before each run of the manifest.
    first_items: Vec<u64>,
}

impl Generator {
    /// Parameters laid out as `manifest` says. Equal seeds make equal parameters.
    pub fn new(manifest: Manifest, seed: u64) -> Self {
        let mut items = 0;
        let mut first_items = Vec::with_capacity(manifest.runs().len());
        for run in manifest.runs() {
            first_items.push(items);
            items += (run.range.end - run.range.start) / item_bytes(run.dtype);
        }
        Self { manifest, seed, first_items }
    }

    fn fill(&self, piece: Piece<'_>) {
        let Piece { run, dtype, offset, mut bytes } = piece;
        let start = self.manifest.runs()[run].range.start;
        let item_bytes = item_bytes(dtype);
        let mut item = self.first_items[run] + (offset - start) / item_bytes;
        while !bytes.is_empty() {
            // The key is the same for 2^32 items.
            let hashes = Hashes { key: key(self.seed, item), first: item as u32 };
            let items = (1 << 32) - u64::from(hashes.first);
            let take = bytes.len().min(usize::try_from(items * item_bytes).unwrap_or(usize::MAX));
            let (now, later) = bytes.split_at_mut(take);
            Level::best().run(Fill { hashes, dtype, out: now });
            item += items;
            bytes = later;
        }
    }
}

impl Source for Generator {
    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        fill_by_elements(&self.manifest, offset, out, |piece| {
            self.fill(piece);
            Ok(())
        })
    }
}

/// Bytes that are made from one hash.
fn item_bytes(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::C64 => 4,
        _ => (dtype.bitsize() as u64 / 8).max(1),
    }
}

fn key(seed: u64, item: u64) -> u32 {
    let high = ((seed >> 32) as u32).wrapping_add((item >> 32) as u32);
    lowbias32(seed as u32 ^ lowbias32(high))
}

/// Chris Wellons' mixer with the least bias known for two multiplications.
#[inline(always)]
fn lowbias32(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Parameters of one dtype, made of hashes.
struct Fill<'a> {
    hashes: Hashes,
    dtype: Dtype,
    out: &'a mut [u8],
}

impl Kernel for Fill<'_> {
    #[inline(always)]
    fn run(self) {
        self.hashes.fill(self.dtype, self.out);
    }
}

/// The hashes of neighbouring items.
#[derive(Clone, Copy)]
struct Hashes {
    key: u32,
    first: u32,
}

impl Hashes {
    #[inline(always)]
    fn at(self, index: usize) -> u32 {
        lowbias32(self.first.wrapping_add(index as u32) ^ self.key)
    }

    #[inline(always)]
    fn fill(self, dtype: Dtype, out: &mut [u8]) {
        match dtype {
            Dtype::F64 => self.each(out, |hash| (f64::from(hash as i32) / UNIT_F64).to_le_bytes()),
            Dtype::F32 | Dtype::C64 => self.each(out, |hash| unit_f32(hash).to_le_bytes()),
            Dtype::BF16 => self.each(out, |hash| bf16::from_f32(unit_f32(hash)).to_le_bytes()),
            Dtype::F16 => self.fill_f16(out),
            Dtype::I64 => self.each(out, |hash| i64::from(hash as i32).to_le_bytes()),
            Dtype::U64 => self.each(out, |hash| u64::from(hash).to_le_bytes()),
            Dtype::I32 | Dtype::U32 => self.each(out, u32::to_le_bytes),
            Dtype::I16 | Dtype::U16 => self.each(out, |hash| (hash as u16).to_le_bytes()),
            Dtype::BOOL => self.each(out, |hash| [(hash & 1) as u8]),
            _ => self.each(out, |hash| [hash as u8]),
        }
    }

    #[inline(always)]
    fn each<const N: usize>(self, out: &mut [u8], item: impl Fn(u32) -> [u8; N]) {
        let (items, _) = out.as_chunks_mut::<N>();
        for (index, slot) in items.iter_mut().enumerate() {
            *slot = item(self.at(index));
        }
    }

    /// By blocks, because only whole slices are converted at the speed of the processor.
    fn fill_f16(mut self, out: &mut [u8]) {
        const BLOCK: usize = 256;
        for block in out.chunks_mut(2 * BLOCK) {
            let items = block.len() / 2;
            let (mut wide, mut narrow) = ([0.0; BLOCK], [f16::ZERO; BLOCK]);
            for (index, value) in wide.iter_mut().enumerate() {
                *value = unit_f32(self.at(index));
            }
            narrow.convert_from_f32_slice(&wide);
            for (slot, value) in block.as_chunks_mut::<2>().0.iter_mut().zip(narrow) {
                *slot = value.to_le_bytes();
            }
            self.first = self.first.wrapping_add(items as u32);
        }
    }
}

const UNIT_F64: f64 = (1_u64 << 31) as f64;

/// Uniform in [-1, 1) and exact: 24 bits are what an f32 holds.
#[inline(always)]
fn unit_f32(hash: u32) -> f32 {
    ((hash as i32) >> 8) as f32 / (1 << 23) as f32
}
