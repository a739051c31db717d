//! Models that are known by name or made to size, for demonstrations and benchmarks.

use std::collections::BTreeMap;

use super::{Dtype, Manifest, unit_bytes};
use crate::error::ManifestError;
use crate::limits;

/// The names that [`preset`] knows.
pub const PRESETS: &[&str] = &["gemma-2-2b"];

/// The manifest of a public model, or `None` if the name is not in [`PRESETS`].
pub fn preset(name: &str) -> Option<Manifest> {
    match name {
        "gemma-2-2b" => gemma_2_2b().ok(),
        _ => None,
    }
}

/// google/gemma-2-2b, as the official library would order it in one file: by name. The output
/// layer shares the embedding and so has no tensor.
fn gemma_2_2b() -> Result<Manifest, ManifestError> {
    const HIDDEN: u64 = 2304;
    const INNER: u64 = 9216;
    const QUERIES: u64 = 8 * 256;
    const KEYS: u64 = 4 * 256;
    const LAYER: [(&str, &[u64]); 11] = [
        ("input_layernorm", &[HIDDEN]),
        ("mlp.down_proj", &[HIDDEN, INNER]),
        ("mlp.gate_proj", &[INNER, HIDDEN]),
        ("mlp.up_proj", &[INNER, HIDDEN]),
        ("post_attention_layernorm", &[HIDDEN]),
        ("post_feedforward_layernorm", &[HIDDEN]),
        ("pre_feedforward_layernorm", &[HIDDEN]),
        ("self_attn.k_proj", &[KEYS, HIDDEN]),
        ("self_attn.o_proj", &[HIDDEN, QUERIES]),
        ("self_attn.q_proj", &[QUERIES, HIDDEN]),
        ("self_attn.v_proj", &[KEYS, HIDDEN]),
    ];
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), Dtype::BF16, vec![256_000, HIDDEN]),
        ("model.norm.weight".to_owned(), Dtype::BF16, vec![HIDDEN]),
    ];
    for layer in 0..26 {
        for (part, shape) in LAYER {
            let name = format!("model.layers.{layer}.{part}.weight");
            tensors.push((name, Dtype::BF16, shape.to_vec()));
        }
    }
    tensors.sort();
    Manifest::from_tensors(tensors, &pytorch())
}

/// A model of exactly `data_bytes` in the shape of a transformer: layers of four square
/// projections, two of the perceptron and a norm, then an embedding and a norm that take the
/// rest. It has at most 2,500 tensors for each tebi-element.
///
/// # Errors
/// If `data_bytes` is no whole number of elements or above [`limits::MAX_MODEL_BYTES`].
pub fn synthetic(data_bytes: u64, dtype: Dtype) -> Result<Manifest, ManifestError> {
    let unit = unit_bytes(dtype);
    if data_bytes > limits::MAX_MODEL_BYTES {
        return Err(ManifestError::TooLarge { bytes: data_bytes });
    }
    if !data_bytes.is_multiple_of(unit) {
        return Err(ManifestError::NotWholeElements { bytes: data_bytes, dtype, unit });
    }
    let elements = data_bytes * 8 / dtype.bitsize() as u64;
    let hidden = hidden_size(elements);
    let layers = elements / layer_elements(hidden);
    let rest = elements % layer_elements(hidden);
    let mut tensors = Vec::new();
    for layer in 0..layers {
        for (part, shape) in synthetic_layer(hidden) {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), dtype, shape));
        }
    }
    if rest >= hidden {
        let shape = vec![rest / hidden, hidden];
        tensors.push(("model.embed_tokens.weight".to_owned(), dtype, shape));
    }
    if !rest.is_multiple_of(hidden) {
        tensors.push(("model.norm.weight".to_owned(), dtype, vec![rest % hidden]));
    }
    Manifest::from_tensors(tensors, &pytorch())
}

/// The smallest power of two that makes at most 64 layers; no public model is wider than the
/// last one.
fn hidden_size(elements: u64) -> u64 {
    let enough = |hidden: &u64| elements / layer_elements(*hidden) <= 64;
    (6..14).map(|power| 1 << power).find(enough).unwrap_or(1 << 14)
}

fn layer_elements(hidden: u64) -> u64 {
    synthetic_layer(hidden).iter().map(|(_, shape)| shape.iter().product::<u64>()).sum()
}

fn synthetic_layer(hidden: u64) -> [(&'static str, Vec<u64>); 7] {
    [
        ("norm", vec![hidden]),
        ("self_attn.q_proj", vec![hidden, hidden]),
        ("self_attn.k_proj", vec![hidden, hidden]),
        ("self_attn.v_proj", vec![hidden, hidden]),
        ("self_attn.o_proj", vec![hidden, hidden]),
        ("mlp.up_proj", vec![4 * hidden, hidden]),
        ("mlp.down_proj", vec![hidden, 4 * hidden]),
    ]
}

/// The metadata without which the transformers library refuses a file.
fn pytorch() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}
