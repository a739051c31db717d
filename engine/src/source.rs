//! Where parameters come from: the first stage of the flow.
//!
//! A [`Source`] is read at any place, by several threads at once. Those that hold their bytes
//! in memory or in a file say so, and spare the sender a copy.

pub mod file;
pub mod generator;
pub mod region;
pub mod scaled;

use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::error::SourceError;
use crate::manifest::{Dtype, Manifest, unit_bytes};

/// Where a client's parameters come from.
pub trait Source: Send + Sync {
    /// What the bytes mean.
    fn manifest(&self) -> &Manifest;

    /// Fills `out` with the bytes of the data section from `offset` on. Neither needs to fall on
    /// the border of an element.
    ///
    /// # Errors
    /// If the range leaves the data section, or the bytes cannot be had.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError>;

    /// The bytes of a range of the data section, where they already stand in memory.
    fn lend(&self, _range: Range<u64>) -> Option<&[u8]> {
        None
    }

    /// The descriptor and the position of the data section in it, where the kernel can send
    /// from a file.
    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    /// Checksums of the chunks of `chunk_bytes`, where they are known already.
    fn checksums(&self, _chunk_bytes: u64) -> Option<&[u64]> {
        None
    }
}

impl<S: Source + ?Sized> Source for Box<S> {
    fn manifest(&self) -> &Manifest {
        (**self).manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        (**self).read(offset, out)
    }

    fn lend(&self, range: Range<u64>) -> Option<&[u8]> {
        (**self).lend(range)
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        (**self).file()
    }

    fn checksums(&self, chunk_bytes: u64) -> Option<&[u64]> {
        (**self).checksums(chunk_bytes)
    }
}

/// Whole elements of one run.
struct Piece<'a> {
    /// The number of the run in the manifest.
    run: usize,
    dtype: Dtype,
    /// Place of the first byte in the data section.
    offset: u64,
    bytes: &'a mut [u8],
}

/// Refuses ranges outside the data section.
fn check_range(manifest: &Manifest, offset: u64, bytes: usize) -> Result<(), SourceError> {
    let (bytes, data_bytes) = (bytes as u64, manifest.data_bytes());
    match offset.checked_add(bytes) {
        Some(end) if end <= data_bytes => Ok(()),
        _ => Err(SourceError::OutOfRange { offset, bytes, data_bytes }),
    }
}

/// Fills `out` from `offset` on with what `fill` makes, which is asked for whole elements of one
/// dtype only. Elements that lie partly in `out` are made aside and cut.
fn fill_by_elements(
    manifest: &Manifest,
    offset: u64,
    mut out: &mut [u8],
    fill: impl Fn(Piece<'_>) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    check_range(manifest, offset, out.len())?;
    let mut at = offset;
    let mut run = manifest.runs().partition_point(|run| run.range.end <= offset);
    while !out.is_empty() {
        let (dtype, range) = (manifest.runs()[run].dtype, &manifest.runs()[run].range);
        let unit = unit_bytes(dtype) as usize;
        let into = ((at - range.start) % unit as u64) as usize;
        // Fits, as it is at most the length of `out`.
        let left = (range.end - at).min(out.len() as u64) as usize;
        let taken = if into == 0 && left >= unit {
            let whole = left - left % unit;
            fill(Piece { run, dtype, offset: at, bytes: &mut out[..whole] })?;
            whole
        } else {
            let mut element = [0; 8];
            let (offset, bytes) = (at - into as u64, &mut element[..unit]);
            fill(Piece { run, dtype, offset, bytes })?;
            let part = left.min(unit - into);
            out[..part].copy_from_slice(&element[into..into + part]);
            part
        };
        out = &mut out[taken..];
        at += taken as u64;
        run += usize::from(at == range.end);
    }
    Ok(())
}
