//! The JSON of a safetensors header.
//!
//! It is read as the official library reads it, odd spellings included (see the tests), so that
//! both agree on what a file means. The official types are not used for it: they lose the order
//! of the header and let the second of two equal names win. Values that mean nothing are checked
//! and dropped, never kept, so that a hostile header takes no more memory than a good one.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::{Dtype, Tensor};
use crate::error::ManifestError;
use crate::limits;

const METADATA: &str = "__metadata__";

/// One tensor as the header spells it.
pub(super) struct Entry {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

/// Reads the entries in the order of the header.
pub(super) fn parse(header: &[u8]) -> Result<Vec<Entry>, ManifestError> {
    let bytes = header.len() as u64;
    if bytes > limits::MAX_HEADER_BYTES {
        return Err(ManifestError::HeaderTooLong { bytes });
    }
    let text = std::str::from_utf8(header).map_err(ManifestError::NotUtf8)?;
    let Entries(entries) = serde_json::from_str(text).map_err(not_a_header)?;
    if entries.len() > limits::MAX_TENSORS {
        return Err(ManifestError::TooManyTensors);
    }
    refuse_duplicates(&entries)?;
    Ok(entries)
}

/// The text that the metadata of a valid header has under `key`.
pub(super) fn metadata(header: &[u8], key: &str) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Metadata {
        #[serde(rename = "__metadata__")]
        texts: std::collections::HashMap<String, String>,
    }
    serde_json::from_slice::<Metadata>(header).ok()?.texts.remove(key)
}

fn refuse_duplicates(entries: &[Entry]) -> Result<(), ManifestError> {
    let mut names = HashSet::with_capacity(entries.len());
    match entries.iter().find(|entry| !names.insert(entry.name.as_str())) {
        Some(entry) => Err(ManifestError::Duplicate { tensor: clip(&entry.name) }),
        None => Ok(()),
    }
}

/// Spells the header of tensors that lie one after the other.
pub(super) fn compose(
    tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>)>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, ManifestError> {
    let mut fields = Vec::new();
    if !metadata.is_empty() {
        fields.push(format!("{}:{}", json(METADATA)?, json(metadata)?));
    }
    let mut begin = 0_u64;
    for (index, (name, dtype, shape)) in tensors.into_iter().enumerate() {
        if index == limits::MAX_TENSORS {
            return Err(ManifestError::TooManyTensors);
        }
        if name == METADATA {
            return Err(ManifestError::ReservedName);
        }
        let end = size_bytes(&name, dtype, &shape)?.checked_add(begin);
        let end = end.ok_or(ManifestError::TooLarge { bytes: u64::MAX })?;
        let (name, shape) = (json(&name)?, json(&shape)?);
        fields.push(format!(
            r#"{name}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#
        ));
        begin = end;
    }
    let mut header = format!("{{{}}}", fields.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

fn json(value: &(impl serde::Serialize + ?Sized)) -> Result<String, ManifestError> {
    serde_json::to_string(value).map_err(not_a_header)
}

fn not_a_header(error: serde_json::Error) -> ManifestError {
    ManifestError::NotAHeader(clip(&error.to_string()))
}

/// The start of a text from a header, short enough for a message.
fn clip(text: &str) -> String {
    text.chars().take(200).collect()
}

impl Entry {
    /// Checks what can be checked of one tensor alone.
    pub(super) fn into_tensor(self) -> Result<Tensor, ManifestError> {
        let Self { name, dtype, shape, offsets: (begin, end) } = self;
        if name.len() > limits::MAX_TENSOR_NAME_BYTES {
            return Err(ManifestError::NameTooLong { start: clip(&name), bytes: name.len() });
        }
        if shape.len() > limits::MAX_TENSOR_DIMS {
            return Err(ManifestError::TooManyDims { tensor: name });
        }
        let Some(dtype) = dtype_of(&dtype) else {
            return Err(ManifestError::UnknownDtype { tensor: name, dtype: clip(&dtype) });
        };
        if end < begin {
            return Err(ManifestError::Backwards { tensor: name, begin, end });
        }
        let (range, needed) = (end - begin, size_bytes(&name, dtype, &shape)?);
        if range != needed {
            return Err(ManifestError::WrongSize { tensor: name, range, needed });
        }
        Ok(Tensor { name, dtype, shape, range: begin..end })
    }
}

fn dtype_of(name: &str) -> Option<Dtype> {
    Dtype::deserialize(StrDeserializer::<serde::de::value::Error>::new(name)).ok()
}

fn size_bytes(name: &str, dtype: Dtype, shape: &[u64]) -> Result<u64, ManifestError> {
    let bits = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
    let bits = bits.and_then(|elements| elements.checked_mul(dtype.bitsize() as u64));
    let tensor = || name.to_owned();
    let bits =
        bits.ok_or_else(|| ManifestError::Overflow { tensor: tensor(), shape: shape.to_vec() })?;
    if bits % 8 != 0 {
        return Err(ManifestError::PartOfAByte { tensor: tensor(), bits });
    }
    Ok(bits / 8)
}

/// The whole header. Holds one entry more than the limit where there are too many.
struct Entries(Vec<Entry>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if std::mem::replace(&mut has_metadata, true) {
                            return Err(A::Error::duplicate_field(METADATA));
                        }
                        map.next_value::<Option<Strings>>()?;
                    } else if entries.len() > limits::MAX_TENSORS {
                        map.next_value::<Anything>()?;
                    } else {
                        let body = map.next_value::<Body>().map_err(|error| {
                            A::Error::custom(format_args!("tensor {:?}: {error}", clip(&name)))
                        })?;
                        entries.push(body.named(name));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// What the header says of one tensor.
struct Body {
    dtype: DtypeName,
    shape: Dims,
    offsets: (u64, u64),
}

impl Body {
    fn named(self, name: String) -> Entry {
        Entry { name, dtype: self.dtype.0, shape: self.shape.0, offsets: self.offsets }
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BodyVisitor;
        impl<'de> Visitor<'de> for BodyVisitor {
            type Value = Body;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    match key.as_ref() {
                        "dtype" => fill(&mut dtype, "dtype", &mut map)?,
                        "shape" => fill(&mut shape, "shape", &mut map)?,
                        "data_offsets" => fill(&mut offsets, "data_offsets", &mut map)?,
                        _ => {
                            map.next_value::<Anything>()?;
                        }
                    }
                }
                Ok(Body {
                    dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
                    offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
                })
            }

            /// The official reader also takes the three values without their keys.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Body, A::Error> {
                let short = |len| move || A::Error::invalid_length(len, &"three values");
                Ok(Body {
                    dtype: seq.next_element()?.ok_or_else(short(0))?,
                    shape: seq.next_element()?.ok_or_else(short(1))?,
                    offsets: seq.next_element()?.ok_or_else(short(2))?,
                })
            }
        }
        deserializer.deserialize_any(BodyVisitor)
    }
}

/// Takes the value of a field that may stand only once.
fn fill<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
    slot: &mut Option<T>,
    field: &'static str,
    map: &mut A,
) -> Result<(), A::Error> {
    if slot.replace(map.next_value()?).is_some() {
        return Err(A::Error::duplicate_field(field));
    }
    Ok(())
}

/// A dtype, known or not.
struct DtypeName(String);

impl<'de> Deserialize<'de> for DtypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DtypeVisitor;
        impl<'de> Visitor<'de> for DtypeVisitor {
            type Value = DtypeName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a dtype")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<DtypeName, E> {
                Ok(DtypeName(name.to_owned()))
            }

            /// The official reader also takes `{"F32": null}`.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DtypeName, A::Error> {
                let Some((name, ())) = map.next_entry()? else {
                    return Err(A::Error::invalid_length(0, &self));
                };
                match map.next_key::<Anything>()? {
                    None => Ok(DtypeName(name)),
                    Some(_) => Err(A::Error::invalid_length(2, &self)),
                }
            }
        }
        deserializer.deserialize_any(DtypeVisitor)
    }
}

/// A shape. Holds one dimension more than the limit where there are too many.
struct Dims(Vec<u64>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    if dims.len() <= limits::MAX_TENSOR_DIMS {
                        dims.push(dim);
                    }
                }
                Ok(Dims(dims))
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}

/// Defines a type that checks a JSON value of some kinds and keeps nothing of it.
macro_rules! checked {
    ($(#[$doc:meta])* $name:ident expects $what:literal: $($method:item)*) => {
        $(#[$doc])*
        struct $name;

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any($name)
            }
        }

        impl<'de> Visitor<'de> for $name {
            type Value = $name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($what)
            }

            $($method)*
        }
    };
}

checked! {
    /// Any value. `serde::de::IgnoredAny` would let through numbers, escapes and depths that
    /// the official reader refuses.
    Anything expects "a value":

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> { Ok(self) }
    fn visit_i64<E>(self, _: i64) -> Result<Self, E> { Ok(self) }
    fn visit_u64<E>(self, _: u64) -> Result<Self, E> { Ok(self) }
    fn visit_f64<E>(self, _: f64) -> Result<Self, E> { Ok(self) }
    fn visit_str<E>(self, _: &str) -> Result<Self, E> { Ok(self) }
    fn visit_unit<E>(self) -> Result<Self, E> { Ok(self) }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<Anything>()?.is_some() {}
        Ok(self)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<Anything, Anything>()?.is_some() {}
        Ok(self)
    }
}

checked! {
    /// The metadata: its text stays in the header, nothing here needs it apart.
    Strings expects "an object of strings":

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<String, String>()?.is_some() {}
        Ok(self)
    }
}
