//! What the bytes of a model mean: its tensors, their dtypes, shapes and places.
//!
//! A [`Manifest`] is read from the header of a safetensors file and keeps that header as it was,
//! so that an averaged model can carry the very same one. Its tensors fill the data section
//! without holes and without overlap, which is checked once, here. Everything after this works
//! on two views of it:
//!
//! - [`Run`]: neighbouring tensors of one dtype, since averaging cares for dtypes and not names;
//! - [`Chunk`]: a piece of one run, the unit of checksum, averaging, acknowledgement and resume.

mod chunks;
mod header;
mod preset;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::ManifestError;
use crate::limits;

pub use chunks::{Chunk, ChunkTable};
pub use preset::{PRESETS, preset, synthetic};
pub use safetensors::Dtype;

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, unique in the model.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Elements along each dimension; `[]` is one element, and a 0 anywhere means no elements.
    pub shape: Vec<u64>,
    /// Its bytes, counted from the begin of the data section.
    pub range: Range<u64>,
}

/// Neighbouring tensors of one dtype, taken together. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The dtype of all its elements.
    pub dtype: Dtype,
    /// Its bytes, counted from the begin of the data section.
    pub range: Range<u64>,
}

/// The ordered tensors of a model.
#[derive(Clone)]
pub struct Manifest {
    header: Vec<u8>,
    tensors: Vec<Tensor>,
    runs: Arc<[Run]>,
    layout_digest: [u8; 32],
}

impl Manifest {
    /// Reads the JSON header of a safetensors file (without the eight bytes of its length).
    ///
    /// # Errors
    /// Whatever the official library refuses is refused, and also a name that stands twice and
    /// a header beyond [`limits`].
    pub fn from_header(header: &[u8]) -> Result<Self, ManifestError> {
        let mut tensors = Vec::new();
        for entry in header::parse(header)? {
            tensors.push(entry.into_tensor()?);
        }
        // Stable, so that tensors without bytes keep the order of the header.
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        refuse_gaps(&tensors)?;
        Ok(Self {
            header: header.to_vec(),
            runs: merge(&tensors),
            layout_digest: digest(&tensors),
            tensors,
        })
    }

    /// Lays tensors out one after the other, in the order given, and makes their header. The
    /// header is padded so that the data section begins at a multiple of 8 in the file.
    ///
    /// # Errors
    /// As for [`Manifest::from_header`].
    pub fn from_tensors(
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>)>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, ManifestError> {
        Self::from_header(&header::compose(tensors, metadata)?)
    }

    /// The JSON header, byte for byte as it was read or made.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// A text of the header's metadata.
    pub fn metadata(&self, key: &str) -> Option<String> {
        header::metadata(&self.header, key)
    }

    /// The tensors in the order of their bytes; those without bytes in the order of the header.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensors merged by dtype, in the order of their bytes.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Size of the data section in bytes.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |tensor| tensor.range.end)
    }

    /// Names the layout: BLAKE3 over names, dtypes, shapes and ranges. Two headers that differ
    /// only in spelling or metadata have the same digest.
    pub fn layout_digest(&self) -> [u8; 32] {
        self.layout_digest
    }

    /// Cuts the model into chunks of at most `chunk_bytes`, rounded down to whole elements.
    ///
    /// # Errors
    /// If a chunk could not hold one element, or there would be more than
    /// [`limits::MAX_CHUNKS`].
    pub fn chunks(&self, chunk_bytes: u64) -> Result<ChunkTable, ManifestError> {
        ChunkTable::new(Arc::clone(&self.runs), chunk_bytes)
    }

    /// The tensor that owns the byte at `offset` of the data section.
    pub fn tensor_at(&self, offset: u64) -> Option<&Tensor> {
        let index = self.tensors.partition_point(|tensor| tensor.range.end <= offset);
        self.tensors.get(index)
    }

    /// Says in one phrase where `other` departs from this layout, or `None` if it does not.
    pub fn first_difference(&self, other: &Manifest) -> Option<String> {
        for (index, ours) in self.tensors.iter().enumerate() {
            match other.tensors.get(index) {
                Some(theirs) if theirs.name == ours.name => {
                    if let Some(difference) = difference(ours, theirs) {
                        return Some(difference);
                    }
                }
                found => return Some(self.misplaced(other, ours, found)),
            }
        }
        let extra = other.tensors.get(self.tensors.len())?;
        Some(format!("tensor {:?} is not expected", extra.name))
    }

    /// Tells apart missing, extra and moved tensors, where `found` stands in place of `ours`.
    fn misplaced(&self, other: &Manifest, ours: &Tensor, found: Option<&Tensor>) -> String {
        let has = |manifest: &Manifest, name: &str| manifest.tensors.iter().any(|t| t.name == name);
        match found {
            Some(found) if has(other, &ours.name) && has(self, &found.name) => {
                format!("tensor {:?} stands where {:?} is expected", found.name, ours.name)
            }
            Some(found) if has(other, &ours.name) => {
                format!("tensor {:?} is not expected", found.name)
            }
            _ => format!("tensor {:?} is missing", ours.name),
        }
    }
}

impl fmt::Debug for Manifest {
    /// Sizes only: a header may have megabytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manifest")
            .field("tensors", &self.tensors.len())
            .field("data_bytes", &self.data_bytes())
            .finish_non_exhaustive()
    }
}

/// Bytes of the smallest group of elements that fills whole bytes: one element, or for the
/// packed dtypes F4 two in 1 byte and F6 four in 3 bytes.
pub(crate) fn unit_bytes(dtype: Dtype) -> u64 {
    match dtype.bitsize() as u64 {
        4 => 1,
        6 => 3,
        bits => bits / 8,
    }
}

/// Checks that sorted tensors follow each other without hole or overlap.
fn refuse_gaps(tensors: &[Tensor]) -> Result<(), ManifestError> {
    let mut end = 0;
    let mut previous = "";
    for Tensor { name, range, .. } in tensors {
        if range.start > end {
            let tensor = name.clone();
            return Err(ManifestError::Hole { tensor, begin: end, end: range.start });
        }
        if range.start < end {
            let (tensor, other) = (name.clone(), previous.to_owned());
            return Err(ManifestError::Overlap { tensor, other, at: range.start });
        }
        (end, previous) = (range.end, name);
    }
    if end > limits::MAX_MODEL_BYTES {
        return Err(ManifestError::TooLarge { bytes: end });
    }
    Ok(())
}

fn merge(tensors: &[Tensor]) -> Arc<[Run]> {
    let mut runs: Vec<Run> = Vec::new();
    for Tensor { dtype, range, .. } in tensors.iter().filter(|tensor| !tensor.range.is_empty()) {
        match runs.last_mut() {
            Some(run) if run.dtype == *dtype => run.range.end = range.end,
            _ => runs.push(Run { dtype: *dtype, range: range.clone() }),
        }
    }
    runs.into()
}

/// Every field has a fixed size or follows its length, so that no two layouts hash the same
/// bytes.
fn digest(tensors: &[Tensor]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"fedlane layout 1");
    for tensor in tensors {
        let dtype = tensor.dtype.to_string();
        for text in [&tensor.name, &dtype] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&(tensor.shape.len() as u64).to_le_bytes());
        for number in tensor.shape.iter().chain([&tensor.range.start, &tensor.range.end]) {
            hasher.update(&number.to_le_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}

/// How two tensors of one name differ.
fn difference(ours: &Tensor, theirs: &Tensor) -> Option<String> {
    let name = &ours.name;
    if ours.dtype != theirs.dtype {
        return Some(format!("tensor {name:?} is {}, not {}", theirs.dtype, ours.dtype));
    }
    (ours.shape != theirs.shape)
        .then(|| format!("tensor {name:?} has the shape {:?}, not {:?}", theirs.shape, ours.shape))
}
