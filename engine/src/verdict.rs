//! What is found in each client's update, what is done with it, and the report of both.
//!
//! [`crate::reducer::inspect()`] looks at chunks; [`Findings`] gathers what it found, in whatever
//! order chunks come; [`UpdatePolicy::judge`] says what follows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use crate::error::ReducerError;
use crate::limits::MIN_CLIP_FACTOR;
use crate::manifest::{ChunkTable, Manifest};
use crate::named::Named;
use crate::reducer::{Found, clip_factor};

/// What happens to an update with elements that are NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// It is left out whole: the mean is that of the others.
    #[default]
    Reject,
    /// Those elements count as zero.
    Zero,
    /// It counts as it is: those elements of the mean are NaN or infinite too.
    Keep,
}

impl Named for OnNonfinite {
    const VALUES: &'static [(OnNonfinite, &'static str, &'static str)] = &[
        (OnNonfinite::Reject, "reject", "It is left out whole: the mean is that of the others"),
        (OnNonfinite::Zero, "zero", "Those elements count as zero"),
        (
            OnNonfinite::Keep,
            "keep",
            "It counts as it is: those elements of the mean are NaN or infinite too",
        ),
    ];
}

/// What is done with bad updates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdatePolicy {
    /// With elements that are no numbers.
    pub on_nonfinite: OnNonfinite,
    /// The largest norm of an update, measured from the model that was sent before, or from zero if
    /// none was. Larger ones are scaled down to it. Positive and finite.
    pub clip_norm: Option<f64>,
}

/// What was found in an update. Of one that was rejected before it was whole, this is what was found in the
/// chunks that had come.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Its size in bytes.
    pub bytes: u64,
    /// Its elements.
    pub elements: u64,
    /// Those that are NaN or infinite.
    pub nonfinite: u64,
    /// The first of them in the order of bytes.
    pub first_nonfinite: Option<Place>,
    /// Its norm, if one was wanted; elements that are not finite count as zero.
    pub norm: Option<f64>,
}

/// One element of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The tensor's name.
    pub tensor: String,
    /// The element's number in the tensor, in row-major order.
    pub index: u64,
}

/// Why an update was left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// It has elements that are NaN or infinite.
    Nonfinite,
    /// Its norm is so large that it would be clipped below [`MIN_CLIP_FACTOR`].
    TooLarge,
}

/// What is done with an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// It is in the mean.
    Counted {
        /// What it is multiplied with; 1 if it is not clipped.
        clip_factor: f64,
        /// Whether elements that are not finite are to be made zero first.
        zeroed: bool,
    },
    /// Nothing of it is in the mean.
    Rejected(Rejection),
}

/// What came from one client in one round, and what was done with it.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateReport {
    /// The client's name.
    pub client: String,
    /// The round.
    pub round: u32,
    /// What was found.
    pub summary: Summary,
    /// What was done.
    pub verdict: Verdict,
    /// The weight it has in the mean: its examples times its clip factor, 0 if it was left out.
    pub weight: f64,
}

impl UpdatePolicy {
    /// Says what is done with an update.
    pub fn judge(&self, summary: &Summary) -> Verdict {
        let nonfinite = summary.nonfinite > 0;
        if nonfinite && self.on_nonfinite == OnNonfinite::Reject {
            return Verdict::Rejected(Rejection::Nonfinite);
        }
        let factor = self.clip_norm.zip(summary.norm).map(|(most, norm)| clip_factor(norm, most));
        match factor.unwrap_or(1.0) {
            // Also a norm beyond f64, whose factor is zero.
            factor if factor < MIN_CLIP_FACTOR => Verdict::Rejected(Rejection::TooLarge),
            clip_factor => {
                let zeroed = nonfinite && self.on_nonfinite == OnNonfinite::Zero;
                Verdict::Counted { clip_factor, zeroed }
            }
        }
    }

    /// Judges an update and reports it. `examples` is the client's weight.
    pub fn report(
        &self,
        client: String,
        round: u32,
        examples: f64,
        summary: Summary,
    ) -> UpdateReport {
        let verdict = self.judge(&summary);
        let weight = match verdict {
            Verdict::Counted { clip_factor, .. } => examples * clip_factor,
            Verdict::Rejected(_) => 0.0,
        };
        UpdateReport { client, round, summary, verdict, weight }
    }
}

/// What was found in the chunks of one update. Lanes note their chunks without a lock; a chunk that
/// is inspected again takes the place of what was known of it, and is not counted twice.
pub struct Findings {
    chunks: Box<[Slot]>,
}

/// What was found in one chunk. Its two words are read only when no lane writes any more.
struct Slot {
    /// The number of elements that are not finite, and in the lower half the index of the first.
    nonfinite: AtomicU64,
    /// An f64; NaN if no norm was wanted.
    squares: AtomicU64,
}

/// Of a chunk that was not inspected. No chunk has as many elements.
const UNKNOWN: u64 = u64::MAX;

impl Findings {
    /// Room for so many chunks, 16 bytes each.
    pub fn new(chunks: usize) -> Findings {
        let slot = |_| Slot { nonfinite: AtomicU64::new(UNKNOWN), squares: AtomicU64::new(0) };
        Findings { chunks: (0..chunks).map(slot).collect() }
    }

    /// Forgets everything, before the next update.
    pub fn clear(&self) {
        self.chunks.iter().for_each(|slot| slot.nonfinite.store(UNKNOWN, Relaxed));
    }

    /// Notes what was found in the chunk of that number.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn note(&self, chunk: usize, found: &Found) {
        let first = found.first_nonfinite.unwrap_or(0);
        // A chunk has at most 16 MiB, so both fit.
        self.chunks[chunk].nonfinite.store(found.nonfinite << 32 | first, Relaxed);
        let squares = found.squares.unwrap_or(f64::NAN);
        self.chunks[chunk].squares.store(squares.to_bits(), Relaxed);
    }

    /// What is known of a chunk, as two words that only [`Findings::restore`] understands.
    pub fn raw(&self, chunk: usize) -> [u64; 2] {
        let slot = &self.chunks[chunk];
        [slot.nonfinite.load(Relaxed), slot.squares.load(Relaxed)]
    }

    /// A chunk was inspected in an earlier life of this process.
    pub fn restore(&self, chunk: usize, [nonfinite, squares]: [u64; 2]) {
        self.chunks[chunk].nonfinite.store(nonfinite, Relaxed);
        self.chunks[chunk].squares.store(squares, Relaxed);
    }

    /// All that was found, once every chunk has been inspected and no lane notes any more.
    ///
    /// # Errors
    /// A chunk that was not inspected.
    pub fn summary(
        &self,
        manifest: &Manifest,
        chunks: &ChunkTable,
    ) -> Result<Summary, ReducerError> {
        match (0..chunks.len()).find(|&chunk| self.found(chunk).is_none()) {
            Some(chunk) => Err(ReducerError::NotInspected { chunk }),
            None => Ok(self.so_far(manifest, chunks)),
        }
    }

    /// All that was found in the chunks that have been inspected, once no lane notes any more. The norm
    /// is that of these chunks.
    pub fn so_far(&self, manifest: &Manifest, chunks: &ChunkTable) -> Summary {
        let mut squares = 0.0;
        let mut summary =
            Summary { bytes: 0, elements: 0, nonfinite: 0, first_nonfinite: None, norm: None };
        for index in 0..chunks.len() {
            let Some((found, of_chunk)) = self.found(index) else { continue };
            if found > 0 && summary.first_nonfinite.is_none() {
                summary.first_nonfinite =
                    place(manifest, chunks, index, found & u64::from(u32::MAX));
            }
            let chunk = chunks.get(index);
            summary.bytes += chunk.length() as u64;
            summary.elements += chunk.length() as u64 * 8 / bits(chunk.dtype);
            summary.nonfinite += found >> 32;
            squares += of_chunk;
        }
        summary.norm = (!squares.is_nan()).then(|| squares.sqrt());
        summary
    }

    /// What a chunk's slot holds, if it was inspected.
    fn found(&self, chunk: usize) -> Option<(u64, f64)> {
        let slot = self.chunks.get(chunk)?;
        let nonfinite = slot.nonfinite.load(Relaxed);
        let squares = f64::from_bits(slot.squares.load(Relaxed));
        (nonfinite != UNKNOWN).then_some((nonfinite, squares))
    }
}

fn bits(dtype: crate::manifest::Dtype) -> u64 {
    dtype.bitsize() as u64
}

/// Which tensor's element is element `index` of a chunk.
pub(crate) fn place(
    manifest: &Manifest,
    chunks: &ChunkTable,
    chunk: usize,
    index: u64,
) -> Option<Place> {
    let chunk = chunks.get(chunk);
    let element_bytes = bits(chunk.dtype) / 8;
    let byte = chunk.bytes.start + index * element_bytes;
    let tensor = manifest.tensor_at(byte)?;
    let index = (byte - tensor.range.start) / element_bytes;
    Some(Place { tensor: tensor.name.clone(), index })
}
