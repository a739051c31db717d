//! Rounds between processes, from files to files.

use std::fs;
use std::path::Path;

use crate::models::every_dtype;
use crate::process::{join, run, serve, start};
use crate::python::Python;
use crate::session::{Member, average, average_exactly, same_bytes};

#[test]
fn three_rounds_give_the_mean_to_everyone() {
    let ended = average_exactly(&every_dtype(), &["--rounds=3"], &[]);
    assert_eq!(ended.serve.phases("upload").len(), 3);
    for client in &ended.clients {
        assert_eq!(client.phases("upload").len(), 3);
        assert_eq!(client.phases("download").len(), 3);
        assert_eq!(client.events().last().unwrap()["event"], "done");
    }
}

#[test]
fn every_path_carries_files() {
    let layout = every_dtype();
    for args in [
        ["--send-path=write", "--receive-path=splice"],
        ["--send-path=sendfile", "--receive-path=read"],
        ["--send-path=sendfile", "--receive-path=splice"],
    ] {
        let mut serve_args = args.to_vec();
        serve_args.push("--chunk-bytes=4KiB");
        average_exactly(&layout, &serve_args, &args);
    }
}

#[test]
fn a_path_that_a_file_cannot_feed_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model.safetensors");
    every_dtype().write_client(0, &model);
    let mut server = start(serve(1), [""; 0]);
    let address = server.address();
    let words = run(join(&address, "a", &model).arg("--send-path=vmsplice")).failed();
    assert!(words.contains("vmsplice cannot send from this source"), "{words}");
    let words = server.finish().failed();
    assert!(words.contains("client \"a\""), "{words}");
}

#[test]
fn the_initial_model_comes_before_the_first_round() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let layout = every_dtype();
    fs::write(path("initial"), layout.file(2.0)).unwrap();
    layout.write_client(0, &path("model"));
    let mut command = serve(1);
    command.arg("--initial").arg(path("initial"));
    let mut server = start(command, [""; 0]);
    let mut client = join(&server.address(), "a", &path("model"));
    client.arg("--output").arg(path("output"));
    // What it has been sent is there when it trains for the first round.
    let client = run(client.args(["--train", "cp \"$FEDLANE_OUTPUT\" \"$FEDLANE_OUTPUT\".seen"]));
    let rounds: Vec<_> = client.phases("download").iter().map(|p| p["round"].clone()).collect();
    assert_eq!(rounds, [0, 1], "{}", client.said());
    client.done();
    server.finish().done();
    assert!(same_bytes(&path("output.seen"), &path("initial")));
    assert!(same_bytes(&path("output"), &path("model")));
}

#[test]
fn one_client_of_weight_zero_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let layout = every_dtype();
    layout.write_client(0, &path("a"));
    layout.write_client(1, &path("b"));
    let members = [Member::new("a", path("a"), 0), Member::new("b", path("b"), 0.5)];
    let ended = average(directory.path(), &members, &[], &[]);
    assert!(same_bytes(&ended.model, &path("b")));
}

#[test]
fn weights_without_a_sum_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    every_dtype().write_client(0, &model);
    let mut server = start(serve(1), [""; 0]);
    let words = run(join(&server.address(), "a", &model).arg("--examples=0")).failed();
    let told = server.finish().failed();
    assert!(words.contains("weight") && told.contains("weight"), "{words} {told}");
}

#[test]
fn another_model_is_refused_by_the_name_of_its_tensor() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (directory.path().join("a"), directory.path().join("b"));
    let layout = every_dtype();
    layout.write_client(0, &a);
    let other = String::from_utf8(layout.client(0)[8..8 + layout.header.len()].to_vec()).unwrap();
    let other = other.replace("\"double\"", "\"triple\"");
    let mut file = layout.client(0);
    file[8..8 + other.len()].copy_from_slice(other.as_bytes());
    fs::write(&b, file).unwrap();
    let mut server = start(serve(2), [""; 0]);
    let address = server.address();
    let first = start(join(&address, "a", &a), [""; 0]);
    server.await_note("joined");
    let second = run(&mut join(&address, "b", &b)).failed();
    for words in [second, first.finish().failed(), server.finish().failed()] {
        assert!(words.contains("client \"b\"") && words.contains("tensor \"double\""), "{words}");
    }
}

/// What NumPy and the official library have to say. The clients' files are made from that of the
/// official library.
#[test]
fn numpy_gets_the_same_bits_in_client_order_and_the_same_mean_in_any() {
    let Some(python) = Python::or_skip() else { return };
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join("made.safetensors");
    run(python.script("make_model.py").arg(&made)).done();
    let members = perturbed(&python, directory.path(), &made, &["17", "250", "33.5"]);
    let files: Vec<_> = members.iter().map(|m| (m.model.clone(), m.examples.as_str())).collect();
    for (order, how) in [("--order=client", "bits"), ("--order=arrival", "close")] {
        let args = ["--rounds=3", order, "--chunk-bytes=4KiB", "--initial", made.to_str().unwrap()];
        let ended = average(directory.path(), &members, &args, &[]);
        python.check_mean(how, &ended.model, &files);
    }
}

/// Clients with numbers of their own, made from one file.
pub fn perturbed(
    python: &Python,
    directory: &Path,
    model: &Path,
    examples: &[&str],
) -> Vec<Member> {
    (1..)
        .zip(examples)
        .map(|(client, examples)| {
            let file = directory.join(format!("client-{client}.safetensors"));
            let mut script = python.script("perturb.py");
            run(script.arg(model).arg(&file).arg(client.to_string())).done();
            Member::new(&format!("client-{client}"), file, examples)
        })
        .collect()
}
