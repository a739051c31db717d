//! A model file appears whole, or not at all.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use fedlane::error::SinkError;
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::sink::file::ModelFile;
use fedlane::source::Source;
use fedlane::source::file::FileSource;
use fedlane::source::generator::Generator;

fn model() -> Manifest {
    let tensors = [
        ("layer.weight".to_owned(), Dtype::BF16, vec![64, 32]),
        ("layer.bias".to_owned(), Dtype::F32, vec![64]),
        ("empty".to_owned(), Dtype::F32, vec![0]),
        ("steps".to_owned(), Dtype::I64, vec![]),
    ];
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    Manifest::from_tensors(tensors, &metadata).unwrap()
}

fn data(manifest: &Manifest) -> Vec<u8> {
    let mut data = vec![0; manifest.data_bytes() as usize];
    Generator::new(manifest.clone(), 9).read(0, &mut data).unwrap();
    data
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_finished_file_opens_with_the_official_library() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    let (manifest, data) = (model(), data(&model()));
    let file = ModelFile::create(&path, &manifest).unwrap();
    std::thread::scope(|scope| {
        for (index, part) in data.chunks(1000).enumerate() {
            let file = &file;
            scope.spawn(move || file.write_at(index as u64 * 1000, part).unwrap());
        }
    });
    file.finish().unwrap();
    assert_eq!(names_in(directory.path()), ["out.safetensors"]);

    let bytes = fs::read(&path).unwrap();
    let official = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(official.len(), manifest.tensors().len());
    for tensor in manifest.tensors() {
        let view = official.tensor(&tensor.name).unwrap();
        let range = tensor.range.start as usize..tensor.range.end as usize;
        assert_eq!((view.dtype(), view.data()), (tensor.dtype, &data[range]));
    }
    let source = FileSource::open(&path).unwrap();
    assert_eq!(source.manifest().header(), manifest.header());
}

#[test]
fn the_old_file_stays_until_the_new_one_is_finished() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    fs::write(&path, "old").unwrap();
    let file = ModelFile::create(&path, &model()).unwrap();
    file.write_at(0, &[1; 100]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names_in(directory.path()), ["out.safetensors"]);
    ModelFile::create(&path, &model()).unwrap().finish().unwrap();
    assert!(FileSource::open(&path).is_ok());
    assert_eq!(names_in(directory.path()), ["out.safetensors"]);
}

#[test]
fn the_mode_of_the_file_follows_the_umask() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    let usual = fs::File::create(directory.path().join("usual")).unwrap();
    ModelFile::create(&path, &model()).unwrap().finish().unwrap();
    let mode = |metadata: fs::Metadata| metadata.permissions().mode();
    assert_eq!(mode(path.metadata().unwrap()), mode(usual.metadata().unwrap()));
}

#[test]
fn a_model_larger_than_the_disk_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let huge = synthetic(1 << 46, Dtype::F32).unwrap();
    let refused = ModelFile::create(directory.path().join("out"), &huge).unwrap_err();
    assert!(matches!(refused, SinkError::NoSpace { .. }), "{refused}");
    assert!(names_in(directory.path()).is_empty());
}

#[test]
fn writes_outside_the_model_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = ModelFile::create(directory.path().join("out"), &model()).unwrap();
    let end = model().data_bytes();
    file.write_at(end, &[]).unwrap();
    for (offset, bytes) in [(end, 1), (end - 1, 2), (u64::MAX, 1)] {
        let refused = file.write_at(offset, &vec![0; bytes]);
        assert!(matches!(refused, Err(SinkError::OutOfRange { .. })));
    }
}

#[test]
fn targets_that_cannot_be_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    fs::write(here.join("file"), "").unwrap();
    let cases = [
        (here.join("missing/out"), "does not exist"),
        (here.join("file/out"), "its directory is a file"),
        (here.to_owned(), "a directory stands there"),
        (here.join("out/"), "names a directory"),
        (here.join(".."), "names no file"),
        ("".into(), "names no file"),
        ("/dev/null".into(), "something other than a file"),
    ];
    for (path, why) in cases {
        let text = ModelFile::create(&path, &model()).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    }
}

#[test]
fn a_path_need_not_be_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(OsStr::from_bytes(b"\xff.safetensors"));
    ModelFile::create(&path, &model()).unwrap().finish().unwrap();
    assert!(FileSource::open(&path).is_ok());
}

#[test]
fn the_data_section_can_be_written_through_the_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.safetensors");
    let file = ModelFile::create(&path, &model()).unwrap();
    let (descriptor, start) = file.file();
    assert_eq!(rustix::io::pwrite(descriptor, b"first", start).unwrap(), 5);
    file.finish().unwrap();
    let mut bytes = [0; 6];
    FileSource::open(&path).unwrap().read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"first\0");
}
