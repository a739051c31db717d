//! Files that are read and written: their paths, and what stands there before and after.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use crate::memory::Nobody;
use crate::models::every_dtype;
use crate::process::{fedlane, join, run, serve, start};

/// A session of one client, with an output on both sides.
fn average(model: &Path, served: &Path, joined: &Path, directory: &Path) {
    let mut command = serve(1);
    command.arg("--output").arg(served).current_dir(directory);
    let mut server = start(command, [""; 0]);
    let mut client = join(&server.address(), "a", model);
    client.arg("--output").arg(joined).current_dir(directory);
    run(&mut client).done();
    server.finish().done();
}

fn names_in(directory: &Path) -> Vec<OsString> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn paths_that_are_not_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &[u8]| directory.path().join(OsStr::from_bytes(name));
    let (model, served, joined) =
        (path(b"model \xff.safetensors"), path(b"served \xfe"), path(b"joined \xc0\x80"));
    every_dtype().write_client(0, &model);
    average(&model, &served, &joined, directory.path());
    for output in [&served, &joined] {
        assert!(fs::read(output).unwrap() == fs::read(&model).unwrap());
    }
    assert_eq!(names_in(directory.path()).len(), 3);
    let demo = run(fedlane("demo").arg("--model").arg(&model)).done();
    assert!(demo.out.join("\n").contains("verified: all"), "{}", demo.said());
}

#[test]
fn a_path_that_is_not_text_reaches_the_training_command() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &[u8]| directory.path().join(OsStr::from_bytes(name));
    let (model, spare) = (path(b"model \xff"), path(b"spare"));
    every_dtype().write_client(0, &model);
    every_dtype().write_client(1, &spare);
    let mut server = start(serve(1), [""; 0]);
    let client = join(&server.address(), "a", &model);
    let command = format!("cp '{}' \"$FEDLANE_MODEL\"", spare.display());
    start(client, ["--train", &command]).finish().done();
    server.finish().done();
    assert!(fs::read(model).unwrap() == fs::read(spare).unwrap());
}

#[test]
fn relative_paths() {
    let directory = tempfile::tempdir().unwrap();
    let below = directory.path().join("below");
    fs::create_dir(&below).unwrap();
    every_dtype().write_client(0, &directory.path().join("model"));
    average(Path::new("../model"), Path::new("served"), Path::new("./joined"), &below);
    assert_eq!(names_in(&below), ["joined", "served"]);
}

#[test]
fn an_output_replaces_the_file_before_it_and_touches_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    every_dtype().write_client(0, &path("model"));
    for name in ["served", "joined", "other", "served.tmp"] {
        fs::write(path(name), format!("old {name}")).unwrap();
    }
    let before = ["served", "joined"].map(|name| (name, File::open(path(name)).unwrap()));
    average(&path("model"), &path("served"), &path("joined"), directory.path());
    for (name, mut old) in before {
        assert!(fs::read(path(name)).unwrap() == fs::read(path("model")).unwrap());
        // Who had the old file open still reads it whole: it was not written over.
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("old {name}"));
        assert_ne!(old.metadata().unwrap().ino(), fs::metadata(path(name)).unwrap().ino());
    }
    for name in ["other", "served.tmp"] {
        assert_eq!(fs::read_to_string(path(name)).unwrap(), format!("old {name}"));
    }
    assert_eq!(names_in(directory.path()), ["joined", "model", "other", "served", "served.tmp"]);
}

#[test]
fn a_client_may_write_over_its_own_model() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    every_dtype().write_client(0, &model);
    let before = fs::read(&model).unwrap();
    let mut server = start(serve(1), ["--rounds=3"]);
    let mut client = join(&server.address(), "a", &model);
    run(client.arg("--output").arg(&model)).done();
    server.finish().done();
    assert!(fs::read(&model).unwrap() == before);
}

/// Neither side says a word to the other when it could not keep the result.
fn refused(program: impl Fn(&str) -> Command, output: &Path, model: &Path, why: &str) {
    let mut command = program("serve");
    command.args(["--listen=127.0.0.1:0", "--json", "--clients=1", "--output"]).arg(output);
    let server = run(&mut command);
    assert!(server.out.is_empty(), "{}", server.said());
    assert_eq!(server.err.len(), 1, "{}", server.said());
    let words = server.failed();
    assert!(words.contains(why), "{words}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut command = program("join");
    command.arg(listener.local_addr().unwrap().to_string()).args(["--name=a", "--model"]);
    let client = run(command.arg(model).arg("--output").arg(output));
    assert_eq!(client.err.len(), 1, "{}", client.said());
    let words = client.failed();
    assert!(words.contains(why), "{words}");
    let called = listener.accept();
    assert_eq!(called.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_anything_moves() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    every_dtype().write_client(0, &path("model"));
    fs::create_dir(path("directory")).unwrap();
    for (output, why) in [
        ("missing/mean", "its directory does not exist"),
        ("model/mean", "its directory is a file"),
        ("directory", "a directory stands there"),
        ("new/", "it names a directory"),
    ] {
        refused(fedlane, &path(output), &path("model"), why);
    }
    refused(fedlane, Path::new("/dev/null"), &path("model"), "something other than a file");
    assert_eq!(names_in(directory.path()), ["directory", "model"]);
}

#[test]
fn a_directory_without_the_right_to_write_is_refused_too() {
    let directory = tempfile::tempdir().unwrap();
    let Some(nobody) = Nobody::or_skip(directory.path()) else { return };
    let path = |name: &str| directory.path().join(name);
    every_dtype().write_client(0, &path("model"));
    fs::create_dir(path("closed")).unwrap();
    fs::set_permissions(path("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    let program = |command: &str| nobody.fedlane(command);
    refused(program, &path("closed/mean"), &path("model"), "Permission denied");
    assert!(names_in(&path("closed")).is_empty());
}

#[test]
fn models_that_cannot_be_read_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let model = every_dtype().client(0);
    fs::write(path("short"), &model[..model.len() - 1]).unwrap();
    fs::write(path("long"), [&model[..], b"x"].concat()).unwrap();
    fs::write(path("nothing"), "").unwrap();
    fs::create_dir(path("directory")).unwrap();
    for name in ["short", "long", "nothing", "directory", "missing"] {
        let words = run(&mut join("127.0.0.1:1", "a", &path(name))).failed();
        assert!(
            words.contains(&format!("/{name} ")) || words.contains(&format!("/{name}:")),
            "{words}"
        );
        let initial = run(serve(1).arg("--initial").arg(path(name)));
        assert!(initial.out.is_empty(), "{}", initial.said());
        assert_eq!(initial.failed(), words);
    }
}
