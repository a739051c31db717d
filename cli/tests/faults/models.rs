//! Models that differ, are damaged, or change while they are sent.

use std::path::Path;
use std::time::Duration;

use super::hostile::Process;
use super::session::{SOON, model_file, tensor, two};
use fedlane::manifest::{Dtype, synthetic};
use fedlane::sink::file::ModelFile;

/// Two clients bring these models, the one after the other; the second one is to blame.
fn differ(ours: &[u8], theirs: &[u8], words: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    };
    let (serve, address) = Process::serve(&["--clients=2", "--deadline-ms=600"]);
    let first = Process::join(&address, "first", &["--model", &path("a", ours)]);
    serve.await_word("\"first\"");
    let bad = Process::join(&address, "bad", &["--model", &path("b", theirs)]);
    let words = [&["client \"bad\" (127.0.0.1:"], words].concat();
    serve.fails(SOON, &words);
    first.fails(SOON, &[&[address.as_str()], &words[..]].concat());
    bad.fails(SOON, &[&[address.as_str()], &words[..]].concat());
}

#[test]
fn models_whose_tensors_have_other_names() {
    let ours = two(&tensor("second", "F32", "[4]", 16, 32));
    differ(&ours, &two(&tensor("other", "F32", "[4]", 16, 32)), &["\"second\" is missing"]);
}

#[test]
fn models_whose_tensors_have_other_dtypes() {
    let ours = two(&tensor("second", "F32", "[4]", 16, 32));
    let theirs = two(&tensor("second", "F16", "[8]", 16, 32));
    differ(&ours, &theirs, &["tensor \"second\" is F16, not F32"]);
}

#[test]
fn models_whose_tensors_have_other_shapes() {
    let ours = two(&tensor("second", "F32", "[4]", 16, 32));
    let theirs = two(&tensor("second", "F32", "[2,2]", 16, 32));
    differ(&ours, &theirs, &["tensor \"second\" has the shape [2, 2], not [4]"]);
}

#[test]
fn a_model_with_a_tensor_more() {
    let ours = model_file(&format!("{{{}}}", tensor("first", "F32", "[4]", 0, 16)), 16);
    let theirs = two(&tensor("bell\\u0007", "F32", "[4]", 16, 32));
    differ(&ours, &theirs, &["tensor \"bell\\u{7}\" is not expected"]);
}

#[test]
fn a_model_with_a_tensor_less() {
    let ours = two(&tensor("second", "F32", "[4]", 16, 32));
    let theirs = model_file(&format!("{{{}}}", tensor("first", "F32", "[4]", 0, 16)), 16);
    differ(&ours, &theirs, &["tensor \"second\" is missing"]);
}

/// A client that would join with this file fails before it dials, and names the file.
fn refused(file: &[u8], words: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    std::fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap();
    // Nobody listens there: a message about the address would be the wrong one.
    let client = Process::join("127.0.0.1:1", "a", &["--model", path]);
    client.fails(SOON, &[&[path], words].concat());
    let serve = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--initial", path];
    Process::start(&serve).fails(SOON, &[&[path], words].concat());
}

#[test]
fn a_file_that_was_cut_short() {
    let file = two(&tensor("second", "F32", "[4]", 16, 32));
    refused(&file[..file.len() - 1], &["was cut short", "tensor \"second\""]);
}

#[test]
fn a_file_with_bytes_behind_its_tensors() {
    let file = [two(&tensor("second", "F32", "[4]", 16, 32)), vec![0]].concat();
    refused(&file, &["it is damaged"]);
}

#[test]
fn a_file_of_a_few_bytes() {
    refused(&[1, 2, 3], &["has 3 bytes"]);
    refused(&[], &["has 0 bytes"]);
}

#[test]
fn a_header_that_claims_to_be_longer_than_the_file() {
    refused(&[[255; 8], [0; 8]].concat(), &["claims a header of 18446744073709551615 bytes"]);
    refused(&[&100_u64.to_le_bytes()[..], b"{}"].concat(), &["claims a header of 100 bytes"]);
}

#[test]
fn a_header_that_is_not_json() {
    refused(&model_file("\x1b[31m{]", 0), &["not a safetensors header"]);
    refused(&model_file("[1,2]", 0), &["not a safetensors header"]);
}

#[test]
fn a_header_that_is_nested_too_deeply() {
    let deep = "[".repeat(1 << 20);
    let header = format!(r#"{{"a":{{"dtype":"F32","shape":[0],"data_offsets":[0,0],"b":{deep}"#);
    refused(&model_file(&header, 0), &["not a safetensors header"]);
}

#[test]
fn tensors_that_overlap() {
    refused(&two(&tensor("second", "F32", "[4]", 12, 28)), &["\"second\" overlaps tensor"]);
}

#[test]
fn a_tensor_outside_of_its_file() {
    let far = u64::MAX - 3;
    refused(&two(&tensor("far", "F32", "[4]", far - 16, far)), &["\"far\""]);
    refused(&two(&tensor("far", "F32", "[4611686018427387904]", 16, 15)), &["\"far\""]);
}

#[test]
fn a_hole_between_tensors() {
    refused(&two(&tensor("second", "F32", "[3]", 20, 32)), &["before tensor \"second\""]);
}

#[test]
fn one_name_for_two_tensors() {
    refused(&two(&tensor("first", "F32", "[4]", 16, 32)), &["tensor \"first\" is described twice"]);
}

#[test]
fn a_dtype_that_nobody_knows() {
    let file = two(&tensor("second", "F\\u001b[7", "[4]", 16, 32));
    refused(&file, &["tensor \"second\" has the unknown dtype"]);
}

#[test]
fn a_dtype_that_is_not_averaged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    std::fs::write(&path, two(&tensor("red\\u001b[31m", "F8_E4M3", "[16]", 16, 32))).unwrap();
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let client = Process::join(&address, "a", &["--model", path.to_str().unwrap()]);
    let words = ["tensor \"red\\u{1b}[31m\"", "is not averaged"];
    serve.fails(SOON, &words);
    client.fails(SOON, &[&address, words[0], words[1]]);
}

#[test]
fn a_path_that_is_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    for (path, word) in [(path.as_path(), "a FIFO"), (directory.path(), "a directory")] {
        let path = path.to_str().unwrap();
        Process::join("127.0.0.1:1", "a", &["--model", path]).fails(SOON, &[path, word]);
    }
}

/// A file of 64 MiB that a client has begun to send when `spoil` gets it. The other client is
/// slow, so that it cannot have been sent yet.
fn spoilt_on_the_way(spoil: impl FnOnce(&Path), words: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let large = synthetic(64 << 20, Dtype::F32).unwrap();
    let path = directory.path().join("model");
    let file = ModelFile::create(&path, &large).unwrap();
    file.write_at(0, &vec![1; 1 << 20]).unwrap();
    file.finish().unwrap();
    let serve = ["--clients=2", "--streams=2", "--order=client", "--deadline-ms=1000"];
    let output = directory.path().join("mean");
    let (serve, address) =
        Process::serve(&[&serve[..], &["--output", output.to_str().unwrap()]].concat());
    let bad = Process::join(&address, "bad", &["--model", path.to_str().unwrap()]);
    // Its name is before "bad", and so its chunks come first.
    let slow_path = directory.path().join("slow");
    std::fs::copy(&path, &slow_path).unwrap();
    let train = ["--model", slow_path.to_str().unwrap(), "--train", "sleep 1"];
    let slow = Process::join(&address, "a", &train);
    serve.await_word("\"a\"");
    std::thread::sleep(Duration::from_millis(500));
    spoil(&path);
    serve.fails(SOON, &["client \"bad\" (127.0.0.1:"]);
    bad.fails(SOON, words);
    slow.fails(SOON, &["client \"bad\" (127.0.0.1:"]);
    assert!(!output.exists());
}

#[test]
fn a_file_that_is_cut_short_while_it_is_sent() {
    let cut = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(1000).unwrap();
    };
    // The file, and not the aggregator, is to blame.
    spoilt_on_the_way(cut, &["/model became shorter while it was"]);
}

#[test]
fn a_file_that_is_written_while_it_is_sent() {
    // Bytes that are summed and in the socket already are the ones that change.
    let write = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![9; 60 << 20], 4 << 20 >> 4).unwrap();
    };
    spoilt_on_the_way(write, &["aggregator 127.0.0.1:", "changed while it was being sent"]);
}
