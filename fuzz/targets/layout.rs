//! Tensors that are put anywhere: a header of them is accepted just when they fill the data
//! section. Mutated text hardly ever gets that far.
#![no_main]

use std::fmt::Write;

use fedlane::limits;
use fedlane::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

const DTYPES: [(&str, u64); 5] = [("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8), ("C64", 8)];

/// Three bytes make a tensor: dtype, where it begins, how many elements.
type Tensor = [u8; 3];

fuzz_target!(|bytes: &[u8]| {
    let (tensors, _) = bytes.as_chunks::<3>();
    let manifest = Manifest::from_header(header(tensors).as_bytes());
    let end = end_if_gapless(tensors);
    assert_eq!(manifest.as_ref().ok().map(Manifest::data_bytes), end);
    let Ok(manifest) = manifest else { return };
    assert_eq!(manifest.tensors().len(), tensors.len());
    let chunks = manifest.chunks(limits::MIN_CHUNK_BYTES).expect("few and small tensors");
    let lanes = chunks.lanes(3);
    let bytes: u64 = lanes.iter().map(|lane| chunks.bytes_of(lane)).map(|b| b.end - b.start).sum();
    assert_eq!(bytes, manifest.data_bytes());
});

fn place([dtype, begin, elements]: Tensor) -> (u64, u64) {
    let (_, size) = DTYPES[usize::from(dtype) % DTYPES.len()];
    (begin.into(), u64::from(begin) + size * u64::from(elements))
}

fn header(tensors: &[Tensor]) -> String {
    let mut header = String::from("{");
    for (index, &tensor) in tensors.iter().enumerate() {
        let (name, _) = DTYPES[usize::from(tensor[0]) % DTYPES.len()];
        let (begin, end) = place(tensor);
        let comma = if index > 0 { "," } else { "" };
        let shape = tensor[2];
        let written = write!(
            header,
            r#"{comma}"{index}":{{"dtype":"{name}","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#
        );
        written.expect("a String takes everything");
    }
    header + "}"
}

/// Counts how often each byte is covered, which is slow and plain.
fn end_if_gapless(tensors: &[Tensor]) -> Option<u64> {
    let places: Vec<(u64, u64)> = tensors.iter().map(|&tensor| place(tensor)).collect();
    let end = places.iter().map(|(_, end)| *end).max().unwrap_or(0);
    let mut covered = vec![0_u32; end as usize];
    for (begin, end) in &places {
        covered[*begin as usize..*end as usize].iter_mut().for_each(|count| *count += 1);
    }
    // A tensor without bytes must still lie where others meet.
    let meets = |at: u64| at == 0 || places.iter().any(|(begin, end)| begin < end && *end == at);
    let empty_fit = places.iter().all(|(begin, end)| begin < end || meets(*begin));
    (covered.iter().all(|count| *count == 1) && empty_fit).then_some(end)
}
