//! What sources give, and what they say when they cannot.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use fedlane::error::SourceError;
use fedlane::limits;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::source::Source;
use fedlane::source::file::FileSource;
use fedlane::source::generator::Generator;
use fedlane::source::scaled::Scaled;
use proptest::prelude::*;

const SEED: u64 = 0x0123_4567_89ab_cdef;

fn model(tensors: &[(Dtype, u64)]) -> Manifest {
    let named = tensors.iter().enumerate();
    let named = named.map(|(index, (dtype, len))| (format!("t{index}"), *dtype, vec![*len]));
    Manifest::from_tensors(named, &BTreeMap::new()).unwrap()
}

fn mixed() -> Manifest {
    model(&[
        (Dtype::U8, 3),
        (Dtype::F32, 1000),
        (Dtype::BF16, 7),
        (Dtype::F32, 5),
        (Dtype::F16, 600),
        (Dtype::BOOL, 0),
        (Dtype::F6_E2M3, 8),
        (Dtype::C64, 3),
        (Dtype::F64, 9),
        (Dtype::I64, 2),
    ])
}

fn read(source: &impl Source, offset: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0xaa; bytes];
    source.read(offset, &mut out).unwrap();
    out
}

fn read_all(source: &impl Source) -> Vec<u8> {
    read(source, 0, source.manifest().data_bytes() as usize)
}

/// The file of a manifest and its data.
fn file_bytes(manifest: &Manifest, data: &[u8]) -> Vec<u8> {
    let length = (manifest.header().len() as u64).to_le_bytes();
    [&length[..], manifest.header(), data].concat()
}

fn open_bytes(bytes: &[u8]) -> Result<FileSource, SourceError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    fs::write(&path, bytes).unwrap();
    FileSource::open(&path)
}

/// The numbers were made by this script with NumPy 2.4 and ml_dtypes 0.6:
///
/// ```python
/// def mix(x):
///     x = x.astype(np.uint32)
///     x ^= x >> np.uint32(16); x *= np.uint32(0x7feb352d)
///     x ^= x >> np.uint32(15); x *= np.uint32(0x846ca68b)
///     return x ^ (x >> np.uint32(16))
/// def hashes(seed, first, count):
///     i = np.arange(first, first + count, dtype=np.uint64)
///     high = np.uint64(seed >> 32) + (i >> np.uint64(32))
///     return mix(i.astype(np.uint32) ^ mix(np.uint32(seed & 0xffffffff) ^ mix(high)))
/// h = hashes(0x0123456789abcdef, 1, 4)
/// f32 = (h.view(np.int32) >> 8).astype(np.float32) / np.float32(2**23)
/// f16, bf16 = f32.astype(np.float16), f32.astype(ml_dtypes.bfloat16)
/// f64, i64, boolean = h.view(np.int32) / 2.0**31, h.view(np.int32).astype(np.int64), h & 1
/// ```
#[test]
fn generated_parameters_are_what_numpy_makes_of_the_formula() {
    let item = |dtype: Dtype| {
        let bytes = dtype.bitsize() / 8;
        read(&Generator::new(model(&[(dtype, 5)]), SEED), bytes as u64, 4 * bytes)
    };
    let words = |words: [u32; 4]| words.map(u32::to_le_bytes).concat();
    let halves = |halves: [u16; 4]| halves.map(u16::to_le_bytes).concat();
    let longs = |longs: [u64; 4]| longs.map(u64::to_le_bytes).concat();
    let hashes = [0xf709_66e6_u32, 0xe0eb_b66f, 0xc248_60ee, 0xcd87_59da];
    assert_eq!(item(Dtype::U32), words(hashes));
    assert_eq!(item(Dtype::I32), words(hashes));
    assert_eq!(item(Dtype::F32), words([0xbd8f_69a0, 0xbe78_a250, 0xbef6_de80, 0xbec9_e29c]));
    assert_eq!(item(Dtype::F16), halves([0xac7b, 0xb3c5, 0xb7b7, 0xb64f]));
    assert_eq!(item(Dtype::BF16), halves([0xbd8f, 0xbe79, 0xbef7, 0xbeca]));
    assert_eq!(
        item(Dtype::F64),
        longs([
            0xbfb1_ed32_3400_0000,
            0xbfcf_1449_9100_0000,
            0xbfde_dbcf_8900_0000,
            0xbfd9_3c53_1300_0000,
        ])
    );
    let signed = [-150_378_778_i64, -521_423_249, -1_035_443_986, -846_767_654];
    assert_eq!(item(Dtype::I64), signed.map(i64::to_le_bytes).concat());
    assert_eq!(item(Dtype::U64), longs(hashes.map(u64::from)));
    assert_eq!(item(Dtype::U16), halves(hashes.map(|hash| hash as u16)));
    assert_eq!(item(Dtype::I8), [-26_i8, 111, -18, -38].map(|byte| byte as u8));
    assert_eq!(item(Dtype::BOOL), [0, 1, 0, 0]);
    let complex = read(&Generator::new(model(&[(Dtype::C64, 3)]), SEED), 4, 16);
    assert_eq!(complex, item(Dtype::F32));
}

#[test]
fn generated_parameters_do_not_repeat_after_four_billion() {
    let large = Generator::new(model(&[(Dtype::U8, 1 << 40)]), SEED);
    // hashes(0x0123456789abcdef, 2**32 - 2, 4).astype(np.uint8)
    assert_eq!(read(&large, (1 << 32) - 2, 4), [197, 126, 24, 85]);
    assert_ne!(read(&large, 0, 64), read(&large, 1 << 32, 64));
    assert_eq!(read(&large, (1 << 40) - 1, 1).len(), 1);
}

#[test]
fn items_count_on_from_run_to_run() {
    let manifest = model(&[(Dtype::BF16, 1), (Dtype::U32, 2), (Dtype::F32, 2)]);
    let golden = read(&Generator::new(model(&[(Dtype::U32, 5)]), SEED), 4, 8);
    assert_eq!(read(&Generator::new(manifest, SEED), 2, 8), golden);
}

#[test]
fn generated_floats_are_uniform_between_minus_one_and_one() {
    let generator = Generator::new(model(&[(Dtype::F32, 100_000)]), 1);
    let bytes = read_all(&generator);
    let values = bytes.as_chunks().0.iter().map(|item| f64::from(f32::from_le_bytes(*item)));
    assert!(values.clone().all(|value| (-1.0..1.0).contains(&value)));
    let mean = values.clone().sum::<f64>() / 1e5;
    let variance = values.map(|value| value * value).sum::<f64>() / 1e5;
    assert!(mean.abs() < 0.01 && (variance - 1.0 / 3.0).abs() < 0.01, "{mean} {variance}");
}

#[test]
fn seeds_differ_in_both_halves() {
    let bytes = |seed| read_all(&Generator::new(mixed(), seed));
    assert_eq!(bytes(1), bytes(1));
    assert_ne!(bytes(1), bytes(2));
    assert_ne!(bytes(1), bytes(1 | 1 << 32));
}

#[test]
fn scaling_by_powers_of_two_is_exact_in_every_dtype() {
    let manifest = model(&[(Dtype::F32, 999), (Dtype::F64, 99), (Dtype::F16, 999)]);
    let original = read_all(&Generator::new(manifest.clone(), 3));
    for exponent in [-3, 0, 1, 5] {
        let source = Scaled::new(Generator::new(manifest.clone(), 3), exponent).unwrap();
        let bytes = read_all(&source);
        let (singles, rest) = bytes.split_at(4 * 999);
        let (doubles, halves) = rest.split_at(8 * 99);
        let (singles_before, rest) = original.split_at(4 * 999);
        let (doubles_before, halves_before) = rest.split_at(8 * 99);
        let factor = 2_f64.powi(exponent);
        for (after, before) in singles.as_chunks().0.iter().zip(singles_before.as_chunks().0) {
            let before = f64::from(f32::from_le_bytes(*before));
            assert_eq!(f64::from(f32::from_le_bytes(*after)), before * factor);
        }
        for (after, before) in doubles.as_chunks().0.iter().zip(doubles_before.as_chunks().0) {
            assert_eq!(f64::from_le_bytes(*after), f64::from_le_bytes(*before) * factor);
        }
        for (after, before) in halves.as_chunks().0.iter().zip(halves_before.as_chunks().0) {
            let before = half::f16::from_le_bytes(*before).to_f64() * factor;
            assert_eq!(half::f16::from_le_bytes(*after), half::f16::from_f64(before));
        }
    }
}

#[test]
fn scaling_leaves_other_dtypes_alone() {
    let manifest = model(&[(Dtype::I32, 50), (Dtype::F8_E4M3, 50), (Dtype::C64, 5)]);
    let original = Generator::new(manifest, 3);
    let scaled = Scaled::new(original.clone(), 4).unwrap();
    assert_eq!(read_all(&scaled), read_all(&original));
}

#[test]
fn scales_beyond_the_limit_are_refused() {
    for exponent in [limits::MAX_SCALE_EXPONENT + 1, i32::MIN, i32::MAX] {
        let refused = Scaled::new(Generator::new(mixed(), 0), exponent);
        assert!(matches!(refused, Err(SourceError::Exponent { .. })));
    }
    for exponent in [-limits::MAX_SCALE_EXPONENT, limits::MAX_SCALE_EXPONENT] {
        assert!(Scaled::new(Generator::new(mixed(), 0), exponent).is_ok());
    }
}

#[test]
fn reads_outside_the_model_are_refused() {
    let generator = Generator::new(mixed(), 0);
    let file = open_bytes(&file_bytes(&mixed(), &read_all(&generator))).unwrap();
    let end = mixed().data_bytes();
    let sources: [&dyn Source; 2] = [&generator, &file];
    for source in sources {
        assert!(source.read(end, &mut []).is_ok());
        for (offset, bytes) in [(end, 1), (end - 1, 2), (end + 1, 0), (u64::MAX, 1)] {
            let refused = source.read(offset, &mut vec![0; bytes]);
            assert!(matches!(refused, Err(SourceError::OutOfRange { .. })), "{offset} {bytes}");
        }
    }
}

#[test]
fn a_file_gives_its_data_section() {
    let data = read_all(&Generator::new(mixed(), 5));
    let file = open_bytes(&file_bytes(&mixed(), &data)).unwrap();
    assert_eq!(file.manifest().header(), mixed().header());
    assert_eq!(read_all(&file), data);
    assert_eq!(read(&file, 17, 100), data[17..117]);
    let (_, start) = file.file().unwrap();
    assert_eq!(start, 8 + mixed().header().len() as u64);
    assert!(open_bytes(&file_bytes(&model(&[]), &[])).is_ok());
}

#[test]
fn a_file_of_another_length_than_its_header_says_is_refused() {
    let data = read_all(&Generator::new(mixed(), 5));
    let mut bytes = file_bytes(&mixed(), &data);
    let whole = bytes.len();
    bytes.push(0);
    assert!(matches!(open_bytes(&bytes), Err(SourceError::TooLong { .. })));
    match open_bytes(&bytes[..whole - 1]) {
        Err(SourceError::TooShort { tensor, .. }) => assert_eq!(tensor, "t9"),
        other => panic!("{other:?}"),
    }
    match open_bytes(&bytes[..8 + mixed().header().len()]) {
        Err(SourceError::TooShort { tensor, .. }) => assert_eq!(tensor, "t0"),
        other => panic!("{other:?}"),
    }
    let header_cut = open_bytes(&bytes[..20]);
    assert!(matches!(header_cut, Err(SourceError::HeaderLength { .. })));
    for length in 0..8 {
        assert!(matches!(open_bytes(&bytes[..length]), Err(SourceError::NoHeader { .. })));
    }
}

#[test]
fn a_header_length_out_of_range_allocates_nothing() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, limits::MAX_HEADER_BYTES + 1] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        assert!(matches!(open_bytes(&bytes), Err(SourceError::HeaderLength { .. })));
    }
}

#[test]
fn a_bad_header_is_reported_with_the_path() {
    let text = open_bytes(b"\x02\0\0\0\0\0\0\0[]").unwrap_err().to_string();
    assert!(text.contains("m.safetensors") && text.contains("not a safetensors header"), "{text}");
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let directory = tempfile::tempdir().unwrap();
    let fifo = directory.path().join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let text = |path: &Path| FileSource::open(path).unwrap_err().to_string();
    assert!(text(&fifo).contains("is a FIFO"), "{}", text(&fifo));
    assert!(text(directory.path()).contains("is a directory"));
    assert!(text(Path::new("/dev/null")).contains("is a device"));
    let missing = directory.path().join("missing");
    assert!(text(&missing).starts_with(&format!("cannot open {}", missing.display())));
}

#[test]
fn a_path_need_not_be_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(OsStr::from_bytes(b"\xff\xfe.safetensors"));
    let text = FileSource::open(&path).unwrap_err().to_string();
    assert!(text.contains('\u{fffd}'), "{text}");
    fs::write(&path, file_bytes(&model(&[]), &[])).unwrap();
    assert_eq!(FileSource::open(&path).unwrap().path(), path);
}

#[test]
fn a_file_truncated_in_use_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    let data = read_all(&Generator::new(mixed(), 5));
    fs::write(&path, file_bytes(&mixed(), &data)).unwrap();
    let source = FileSource::open(&path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    let cut = source.read(0, &mut vec![0; data.len()]);
    assert!(matches!(cut, Err(SourceError::Truncated { .. })));
}

proptest! {
    #[test]
    fn any_part_equals_the_same_part_of_the_whole(start in 0..7000_u64, bytes in 0..3000_usize) {
        let generator = Generator::new(mixed(), SEED);
        let scaled = Scaled::new(generator.clone(), 3).unwrap();
        let start = start.min(mixed().data_bytes());
        let bytes = bytes.min((mixed().data_bytes() - start) as usize);
        let part = start as usize..start as usize + bytes;
        prop_assert_eq!(&read(&generator, start, bytes), &read_all(&generator)[part.clone()]);
        prop_assert_eq!(&read(&scaled, start, bytes), &read_all(&scaled)[part]);
    }
}
