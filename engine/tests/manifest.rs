//! What a header means, and that it means the same to the official library.

use std::collections::BTreeMap;

use fedlane::error::ManifestError;
use fedlane::limits;
use fedlane::manifest::{Dtype, Manifest, PRESETS, Run, preset, synthetic};
use proptest::prelude::*;
use safetensors::tensor::Metadata;

const DTYPES: [Dtype; 22] = [
    Dtype::BOOL,
    Dtype::F4,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

fn read(header: &str) -> Result<Manifest, ManifestError> {
    Manifest::from_header(header.as_bytes())
}

fn message(header: &str) -> String {
    read(header).unwrap_err().to_string()
}

type Spec<'a> = (&'a str, Dtype, &'a [u64]);

fn model(tensors: &[Spec]) -> Manifest {
    let tensors = tensors.iter().map(|(name, dtype, shape)| {
        let (name, shape) = ((*name).to_owned(), shape.to_vec());
        (name, *dtype, shape)
    });
    Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap()
}

/// What the official library makes of a header, whatever the file's length.
fn official(header: &[u8]) -> Option<Metadata> {
    serde_json::from_str(std::str::from_utf8(header).ok()?).ok()
}

/// Both readers refuse a header, or both read the same from it. Duplicates, and what is beyond
/// our limits, only we refuse.
fn assert_agrees(header: &[u8]) {
    let text = String::from_utf8_lossy(header);
    match (Manifest::from_header(header), official(header)) {
        (Ok(ours), Some(theirs)) => {
            assert_eq!(ours.data_bytes(), theirs.data_len() as u64, "{text}");
            assert_eq!(ours.tensors().len(), theirs.tensors().len(), "{text}");
            for tensor in ours.tensors() {
                let info = theirs.info(&tensor.name).expect("a tensor of that name");
                let shape: Vec<u64> = info.shape.iter().map(|dim| *dim as u64).collect();
                let (begin, end) = info.data_offsets;
                assert_eq!((tensor.dtype, &tensor.shape), (info.dtype, &shape), "{text}");
                assert_eq!(tensor.range, begin as u64..end as u64, "{text}");
            }
        }
        (Err(_), None) => {}
        (Err(ManifestError::Duplicate { .. } | ManifestError::TooLarge { .. }), Some(_)) => {}
        (ours, theirs) => panic!("{text}: ours {ours:?}, official {theirs:?}"),
    }
}

#[test]
fn odd_headers_mean_what_the_official_library_reads() {
    let deep = |depth| format!(r#"{{"a":{{"x":{}{}}}}}"#, "[".repeat(depth), "]".repeat(depth));
    let with = |field: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]{field}}}}}"#)
    };
    let headers = [
        "".into(),
        "{}".into(),
        "\t\n {} \r ".into(),
        "\u{feff}{}".into(),
        "[]".into(),
        "null".into(),
        "{} {}".into(),
        r#"{"__metadata__":null}"#.into(),
        r#"{"__metadata__":{}}"#.into(),
        r#"{"__metadata__":{"a":"b","a":"c"}}"#.into(),
        r#"{"__metadata__":{"a":1}}"#.into(),
        r#"{"__metadata__":[]}"#.into(),
        r#"{"__metadata__":{},"__metadata__":{}}"#.into(),
        with(""),
        with(r#","more":[1,{"x":null}]"#),
        with(r#","more":1e999"#),
        with(r#","more":"\ud800""#),
        with(r#","more":{"a":1,"a":2}"#),
        with(r#","dtype":"F32""#),
        with(r#","d\u0074ype":"F32""#),
        deep(100),
        deep(125),
        deep(126),
        deep(127),
        deep(200),
        r#"{"a":["F32",[1],[0,4]]}"#.into(),
        r#"{"a":["F32",[1],[0,4],1]}"#.into(),
        r#"{"a":["F32",[1]]}"#.into(),
        r#"{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":{"F32":{}},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":{"F32":[]},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":{"F32":{"a":1}},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":{"F32":null,"F64":null},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":17,"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":null,"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":{},"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,5]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2,0],"data_offsets":[0,0]}}"#.into(),
        r#"{"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}}"#.into(),
        r#"{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#.into(),
        r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#.into(),
        r#"{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}"#.into(),
        r#"{"a":{"shape":[1],"data_offsets":[0,4]}}"#.into(),
        r#"{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#.into(),
    ];
    for header in headers {
        assert_agrees(header.as_bytes());
    }
}

#[test]
fn a_refused_header_names_the_tensor_and_the_fault() {
    let one = |dtype, shape, offsets| {
        message(&format!(
            r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#
        ))
    };
    let two = |name, first, second| {
        message(&format!(
            r#"{{"w":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},
                "{name}":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        ))
    };
    let texts = [
        (one("F99", "[1]", "[0,4]"), r#"tensor "w" has the unknown dtype "F99""#),
        (one("F32", "[1]", "[4,0]"), r#"tensor "w" ends at byte 0, before it begins at byte 4"#),
        (
            one("F32", "[3]", "[0,4]"),
            r#"tensor "w" has a range of 4 bytes, but its shape and dtype need 12"#,
        ),
        (
            one("F32", "[4294967296,4294967296]", "[0,4]"),
            r#"tensor "w" has a shape [4294967296, 4294967296] whose size overflows 64 bits"#,
        ),
        (one("F4", "[3]", "[0,2]"), r#"tensor "w" has 12 bits, which is no whole number of bytes"#),
        (one("U8", "[4]", "[4,8]"), r#"bytes 0 to 4, before tensor "w", belong to no tensor"#),
        (two("v", "[0,4]", "[2,6]"), r#"tensor "v" overlaps tensor "w" at byte 2"#),
        (two("v", "[8,12]", "[0,4]"), r#"bytes 4 to 8, before tensor "w", belong to no tensor"#),
        (two("w", "[0,4]", "[4,8]"), r#"tensor "w" is described twice"#),
    ];
    for (text, expected) in texts {
        assert_eq!(text, expected);
    }
    assert!(
        message(r#"{"w":{"dtype":"U8","shape":[4]}}"#).contains(r#"tensor "w": missing field"#)
    );
    assert!(message("{").contains("not a safetensors header"));
    assert!(Manifest::from_header(b"\xff").unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn messages_stay_short_whatever_the_header_holds() {
    let long = "x".repeat(100_000);
    let body = |dtype: &str| format!(r#"{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,1]}}"#);
    let headers = [
        format!(r#"{{"w":{}}}"#, body(&long)),
        format!(r#"{{"w":"{long}"}}"#),
        format!(r#"{{"{long}":{}}}"#, body("U8")),
        format!(r#"{{"{long}":1}}"#),
        format!(r#"{{"{long}":{},"{long}":{}}}"#, body("U8"), body("U8")),
    ];
    for header in headers {
        let text = message(&header);
        assert!(text.len() < 400, "{}", text.len());
    }
}

#[test]
fn limits_hold_for_headers_of_any_kind() {
    let tensors = |count| (0..count).map(|i| (format!("t{i}"), Dtype::U8, vec![1]));
    let made = |count| Manifest::from_tensors(tensors(count), &BTreeMap::new());
    assert_eq!(made(limits::MAX_TENSORS).unwrap().tensors().len(), limits::MAX_TENSORS);
    assert!(matches!(made(limits::MAX_TENSORS + 1), Err(ManifestError::TooManyTensors)));
    let one = |name: &str, shape: &str| {
        read(&format!(r#"{{"{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[0,1]}}}}"#))
    };
    let ones = |count| format!("[{}]", vec!["1"; count].join(","));
    assert!(one("w", &ones(limits::MAX_TENSOR_DIMS)).is_ok());
    let dims = one("w", &ones(limits::MAX_TENSOR_DIMS + 1));
    assert!(matches!(dims, Err(ManifestError::TooManyDims { .. })));
    assert!(one(&"n".repeat(limits::MAX_TENSOR_NAME_BYTES), "[1]").is_ok());
    let name = one(&"n".repeat(limits::MAX_TENSOR_NAME_BYTES + 1), "[1]");
    assert!(matches!(name, Err(ManifestError::NameTooLong { .. })));
    let long = vec![b' '; limits::MAX_HEADER_BYTES as usize + 1];
    assert!(matches!(Manifest::from_header(&long), Err(ManifestError::HeaderTooLong { .. })));
    let large = limits::MAX_MODEL_BYTES;
    assert_eq!(model(&[("w", Dtype::U8, &[large])]).data_bytes(), large);
    let larger = vec![("w".to_owned(), Dtype::U8, vec![large + 1])];
    let larger = Manifest::from_tensors(larger, &BTreeMap::new());
    assert!(matches!(larger, Err(ManifestError::TooLarge { .. })));
}

#[test]
fn the_reserved_name_is_refused() {
    let tensor = ("__metadata__".to_owned(), Dtype::U8, vec![1]);
    let made = Manifest::from_tensors([tensor], &BTreeMap::new());
    assert!(matches!(made, Err(ManifestError::ReservedName)));
}

#[test]
fn tensors_without_bytes_keep_the_order_of_the_header() {
    let header = r#"{
        "end":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},
        "z":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},
        "scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
        "a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}"#;
    let manifest = read(header).unwrap();
    let names: Vec<_> = manifest.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["z", "a", "scalar", "end"]);
    assert_eq!(manifest.tensor_at(0).unwrap().name, "scalar");
    assert_eq!(manifest.tensor_at(3).unwrap().name, "scalar");
    assert!(manifest.tensor_at(4).is_none());
    assert_eq!(manifest.runs(), [Run { dtype: Dtype::F32, range: 0..4 }]);
}

#[test]
fn the_header_is_kept_byte_for_byte() {
    let header = " { \"a\\u0062\" : {\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"U8\"}}\n ";
    let manifest = read(header).unwrap();
    assert_eq!(manifest.header(), header.as_bytes());
    assert_eq!(manifest.tensors()[0].name, "ab");
}

#[test]
fn the_digest_names_the_layout_and_not_its_spelling() {
    let plain = model(&[("a", Dtype::F32, &[2]), ("b", Dtype::F32, &[2])]);
    let spelt = read(
        r#"{"b":{"shape":[2],"dtype":"F32","data_offsets":[8,16]},"__metadata__":{"x":"y"},
            "\u0061":{"data_offsets":[0,8],"dtype":"F32","shape":[2]}}"#,
    );
    let spelt = spelt.unwrap();
    assert_eq!(plain.layout_digest(), spelt.layout_digest());
    assert_eq!(plain.first_difference(&spelt), None);
    let others = [
        model(&[("b", Dtype::F32, &[2]), ("a", Dtype::F32, &[2])]),
        model(&[("a", Dtype::I32, &[2]), ("b", Dtype::F32, &[2])]),
        model(&[("a", Dtype::F32, &[2, 1]), ("b", Dtype::F32, &[2])]),
        model(&[("a", Dtype::F32, &[2])]),
    ];
    for other in others {
        assert_ne!(plain.layout_digest(), other.layout_digest());
    }
}

#[test]
fn the_digest_does_not_change_between_releases() {
    let manifest = model(&[("a", Dtype::F32, &[2, 3]), ("b", Dtype::BF16, &[])]);
    let digest = blake3::Hash::from_bytes(manifest.layout_digest());
    assert_eq!(digest.to_hex().as_str(), GOLDEN_DIGEST);
}

const GOLDEN_DIGEST: &str = "ada3c2ed40f2015d507f50b69ae254c9bdb8c4df1086f5c85ac338b5d2db7e1e";

#[test]
fn the_first_difference_is_named() {
    let ours = model(&[("a", Dtype::F32, &[2]), ("b", Dtype::F32, &[3]), ("c", Dtype::U8, &[1])]);
    let cases: [(&[Spec], &str); 6] = [
        (&[("a", Dtype::F32, &[2]), ("b", Dtype::F32, &[3])], r#"tensor "c" is missing"#),
        (&[("a", Dtype::F32, &[2]), ("c", Dtype::U8, &[1])], r#"tensor "b" is missing"#),
        (
            &[("a", Dtype::F32, &[2]), ("x", Dtype::F32, &[3]), ("b", Dtype::F32, &[3])],
            r#"tensor "x" is not expected"#,
        ),
        (&[("a", Dtype::BF16, &[2])], r#"tensor "a" is BF16, not F32"#),
        (&[("a", Dtype::F32, &[1, 2])], r#"tensor "a" has the shape [1, 2], not [2]"#),
        (
            &[("b", Dtype::F32, &[3]), ("a", Dtype::F32, &[2]), ("c", Dtype::U8, &[1])],
            r#"tensor "b" stands where "a" is expected"#,
        ),
    ];
    for (theirs, expected) in cases {
        assert_eq!(ours.first_difference(&model(theirs)).as_deref(), Some(expected));
    }
    let more = model(&[
        ("a", Dtype::F32, &[2]),
        ("b", Dtype::F32, &[3]),
        ("c", Dtype::U8, &[1]),
        ("d", Dtype::U8, &[1]),
    ]);
    let extra = ours.first_difference(&more);
    assert_eq!(extra.as_deref(), Some(r#"tensor "d" is not expected"#));
}

#[test]
fn chunks_hold_one_dtype_and_whole_elements() {
    let manifest = model(&[
        ("a", Dtype::F32, &[3]),
        ("b", Dtype::F32, &[2]),
        ("c", Dtype::F6_E3M2, &[12]),
        ("d", Dtype::F64, &[2]),
    ]);
    let table = manifest.chunks(8).unwrap();
    let chunks: Vec<_> = (0..table.len()).map(|index| table.get(index)).collect();
    let expected = [
        (0..8, Dtype::F32),
        (8..16, Dtype::F32),
        (16..20, Dtype::F32),
        (20..26, Dtype::F6_E3M2),
        (26..29, Dtype::F6_E3M2),
        (29..37, Dtype::F64),
        (37..45, Dtype::F64),
    ];
    for (index, (chunk, (bytes, dtype))) in chunks.iter().zip(expected).enumerate() {
        assert_eq!((chunk.index, &chunk.bytes, chunk.dtype), (index, &bytes, dtype));
    }
    assert_eq!(chunks.len(), 7);
}

#[test]
fn chunk_sizes_without_sense_are_refused() {
    let manifest = model(&[("a", Dtype::U8, &[1]), ("b", Dtype::F64, &[1 << 23])]);
    assert!(matches!(manifest.chunks(0), Err(ManifestError::ChunkTooSmall { .. })));
    assert!(matches!(manifest.chunks(7), Err(ManifestError::ChunkTooSmall { .. })));
    let many = manifest.chunks(8).unwrap_err();
    assert!(many.to_string().ends_with("use larger chunks"), "{many}");
    assert_eq!(manifest.chunks(u64::MAX).unwrap().len(), 2);
    assert_eq!(model(&[]).chunks(0).unwrap().lanes(2), [0..0, 0..0]);
}

#[test]
fn gemma_has_its_published_number_of_parameters() {
    let gemma = preset("gemma-2-2b").unwrap();
    assert_eq!(gemma.data_bytes(), 2 * 2_614_341_888);
    assert_eq!(gemma.tensors().len(), 2 + 26 * 11);
    assert_eq!(gemma.runs().len(), 1);
    assert_eq!(gemma.tensors()[0].name, "model.embed_tokens.weight");
    assert_eq!(gemma.tensors()[1].name, "model.layers.0.input_layernorm.weight");
    for name in PRESETS {
        assert!(preset(name).is_some(), "{name}");
    }
    assert!(preset("gpt-5").is_none());
}

#[test]
fn synthetic_models_have_the_size_asked_for() {
    for bytes in [0, 8, 1000, 1 << 20, (1 << 30) + 8, 5 << 30, 1 << 40] {
        for dtype in DTYPES {
            let bytes = if dtype.bitsize() == 6 { bytes / 3 * 3 } else { bytes };
            let manifest = synthetic(bytes, dtype).unwrap();
            assert_eq!(manifest.data_bytes(), bytes);
            assert!(manifest.tensors().len() <= 5000, "{bytes} {dtype}");
        }
    }
    assert!(synthetic(7, Dtype::F32).unwrap_err().to_string().contains("multiple of 4 bytes"));
    assert!(synthetic(u64::MAX, Dtype::U8).is_err());
}

fn tensors() -> impl Strategy<Value = Vec<(String, Dtype, Vec<u64>)>> {
    let shape = prop::collection::vec(0..6_u64, 0..4);
    prop::collection::vec((prop::sample::select(&DTYPES[..]), shape), 0..12).prop_map(|tensors| {
        let named = tensors.into_iter().enumerate().map(|(index, (dtype, mut shape))| {
            if dtype.bitsize() < 8 {
                shape.push(4);
            }
            (format!("t{index}"), dtype, shape)
        });
        named.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn made_headers_are_read_back_by_both_libraries(tensors in tensors()) {
        let metadata = BTreeMap::from([("format".to_owned(), "pt \"\n".to_owned())]);
        let manifest = Manifest::from_tensors(tensors.clone(), &metadata).unwrap();
        prop_assert_eq!(manifest.header().len() % 8, 0);
        assert_agrees(manifest.header());
        let official = official(manifest.header()).unwrap();
        prop_assert_eq!(&official.metadata().as_ref().unwrap()["format"], "pt \"\n");
        prop_assert_eq!(manifest.tensors().len(), tensors.len());
    }

    #[test]
    fn mutated_headers_mean_the_same_to_both_libraries(
        tensors in tensors(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8, any::<u8>()), 1..4),
    ) {
        const JSON: &[u8] = b"0123456789{}[]\",:- .eEuFIB\\tn";
        let manifest = Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap();
        let mut header = manifest.header().to_vec();
        for (place, edit, byte) in edits {
            let at = place.index(header.len());
            let byte = if byte < 200 { JSON[usize::from(byte) % JSON.len()] } else { byte };
            match edit {
                0 => header[at] = byte,
                1 => header.insert(at, byte),
                _ => drop(header.remove(at)),
            }
        }
        assert_agrees(&header);
    }

    #[test]
    fn shuffled_fields_mean_the_same_to_both_libraries(
        tensors in prop::collection::vec((0..4_u8, 0..5_u64, 0..5_u64, 0..8_u64), 0..5),
    ) {
        let fields: Vec<_> = tensors.iter().map(|(name, dim, begin, length)| {
            let end = begin + length;
            format!(r#""{name}":{{"dtype":"U8","shape":[{dim}],"data_offsets":[{begin},{end}]}}"#)
        }).collect();
        assert_agrees(format!("{{{}}}", fields.join(",")).as_bytes());
    }

    #[test]
    fn chunks_cover_the_model_once(tensors in tensors(), chunk_bytes in 8..100_u64) {
        let manifest = Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap();
        let table = manifest.chunks(chunk_bytes).unwrap();
        let mut end = 0;
        for index in 0..table.len() {
            let chunk = table.get(index);
            prop_assert_eq!(chunk.index, index);
            prop_assert_eq!(chunk.bytes.start, end);
            prop_assert!(!chunk.bytes.is_empty() && chunk.bytes.end - end <= chunk_bytes);
            prop_assert_eq!((chunk.bytes.end - end) * 8 % chunk.dtype.bitsize() as u64, 0);
            let mut owners = (chunk.bytes.start..chunk.bytes.end)
                .map(|byte| manifest.tensor_at(byte).unwrap().dtype);
            prop_assert!(owners.all(|dtype| dtype == chunk.dtype));
            end = chunk.bytes.end;
        }
        prop_assert_eq!(end, manifest.data_bytes());
    }

    #[test]
    fn lanes_cover_all_chunks_and_are_balanced(
        tensors in tensors(), chunk_bytes in 8..100_u64, lanes in 1..20_usize,
    ) {
        let manifest = Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap();
        let table = manifest.chunks(chunk_bytes).unwrap();
        let ranges = table.lanes(lanes);
        prop_assert_eq!(ranges.len(), lanes);
        let fair = manifest.data_bytes() / lanes as u64;
        let mut next = 0;
        for range in ranges {
            prop_assert_eq!(range.start, next);
            let chunks = range.clone().map(|index| table.get(index).bytes);
            let bytes: u64 = chunks.map(|bytes| bytes.end - bytes.start).sum();
            prop_assert!(bytes.abs_diff(fair) <= chunk_bytes + 1);
            next = range.end;
        }
        prop_assert_eq!(next, table.len());
    }
}
