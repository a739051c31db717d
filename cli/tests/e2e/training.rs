//! `--train`: a command that makes each round's update.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::models::{EXAMPLES, Layout, every_dtype};
use crate::process::{Process, join, run, serve, start};
use crate::python::Python;
use crate::session::two_members;

/// A client with an output that trains with a shell command.
fn train(mut client: Command, output: &Path, command: &str) -> Process {
    client.arg("--output").arg(output);
    start(client, ["--train", command])
}

#[test]
fn the_command_runs_before_every_upload_and_knows_where_things_are() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    every_dtype().write_client(0, &path("model"));
    let mut server = start(serve(1), ["--rounds=3"]);
    let client = join(&server.address(), "a", &path("model"));
    let note = "there=$(ls \"$FEDLANE_OUTPUT\" | wc -l); echo trained; \
        echo \"$FEDLANE_ROUND $FEDLANE_MODEL $FEDLANE_OUTPUT $there\" >> \"$FEDLANE_MODEL.log\"";
    let client = train(client, &path("output"), note).finish().done();
    server.finish().done();
    let (model, output) = (path("model"), path("output"));
    let line = |round, there| format!("{round} {} {} {there}\n", model.display(), output.display());
    // There is a mean from the second round on.
    let expected = line(1, 0) + &line(2, 1) + &line(3, 1);
    assert_eq!(fs::read_to_string(path("model.log")).unwrap(), expected);
    // Its standard output is not mixed with the lines of JSON.
    assert_eq!(client.err.iter().filter(|line| *line == "trained").count(), 3, "{}", client.said());
    assert!(!client.out.iter().any(|line| line == "trained"), "{}", client.said());
}

#[test]
fn without_an_output_there_is_no_variable_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    every_dtype().write_client(0, &model);
    let mut server = start(serve(1), [""; 0]);
    let client = join(&server.address(), "a", &model);
    let check = "test -z \"${FEDLANE_OUTPUT+set}\" && test \"$FEDLANE_ROUND\" = 1";
    start(client, ["--train", check]).finish().done();
    server.finish().done();
}

#[test]
fn what_a_client_learns_from_the_mean_counts_in_the_next_round() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let layout = Layout::new(&[("w", "F32", &[1000])], None);
    let members = two_members(&layout, directory.path());
    let mut command = serve(2);
    command.arg("--output").arg(path("mean"));
    let mut server = start(command, ["--rounds=3"]);
    let address = server.address();
    // "a" begins every round with the mean; "b" never learns anything.
    let adopt = "test ! -e \"$FEDLANE_OUTPUT\" || cp \"$FEDLANE_OUTPUT\" \"$FEDLANE_MODEL\"";
    let clients: Vec<Process> = members
        .iter()
        .zip([adopt, "true"])
        .map(|(member, command)| {
            let mut client = join(&address, &member.name, &member.model);
            client.args(["--examples", &member.examples]);
            train(client, &path(&format!("{}.mean", member.name)), command)
        })
        .collect();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
    // Distances from the mean of the first round: the weights are 1 and 3, "b" is at -1.
    assert_eq!(EXAMPLES, [1, 3]);
    let (second, third) = (-0.75, -0.9375);
    assert!(fs::read(&members[0].model).unwrap() == layout.file(second));
    assert!(fs::read(path("mean")).unwrap() == layout.file(third));
}

/// Two clients of which "b" runs a command that fails; gives what all three processes said.
fn fails(command: &str, rounds: &str) -> [String; 3] {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(2), ["--rounds", rounds]);
    let address = server.address();
    let a = start(join(&address, "a", &members[0].model), [""; 0]);
    let b = start(join(&address, "b", &members[1].model), ["--train", command]);
    [b.finish().failed(), a.finish().failed(), server.finish().failed()]
}

#[test]
fn a_command_that_fails_ends_the_session_for_all() {
    for (command, status) in [
        ("exit 7", "exit status: 7"),
        ("no-such-trainer", "exit status: 127"),
        ("kill -9 $$", "signal: 9"),
    ] {
        let [own, other, server] = fails(command, "1");
        assert!(own.contains("the --train command failed in round 1"), "{own}");
        for words in [own, other.clone(), server.clone()] {
            assert!(words.contains(status), "{words}");
        }
        for words in [other, server] {
            assert!(words.contains("client \"b\"") && words.contains("gave up"), "{words}");
        }
    }
}

#[test]
fn a_command_may_fail_in_a_later_round_too() {
    let [own, other, server] = fails("test $FEDLANE_ROUND -lt 3", "5");
    for words in [own, other, server] {
        assert!(words.contains("in round 3: exit status: 1"), "{words}");
    }
}

#[test]
fn an_update_with_other_tensors_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    every_dtype().write_client(0, &path("model"));
    Layout::new(&[("bytes", "U8", &[4])], None).write_client(0, &path("other"));
    let mut server = start(serve(1), [""; 0]);
    let client = join(&server.address(), "a", &path("model"));
    let swap = format!("cp '{}' \"$FEDLANE_MODEL\"", path("other").display());
    let words = start(client, ["--train", &swap]).finish().failed();
    assert!(words.contains("the update differs from the model joined with"), "{words}");
    assert!(words.contains("\"bytes\""), "{words}");
    let words = server.finish().failed();
    assert!(words.contains("client \"a\"") && words.contains("gave up"), "{words}");
}

/// Three clients, each with a part of the data, find together what fits all of it.
#[test]
fn federated_averaging_learns() {
    let Some(python) = Python::or_skip() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut start_model = python.script("train_line.py");
    run(start_model.arg("start").env("FEDLANE_MODEL", path("start"))).done();
    let mut command = serve(3);
    command.arg("--initial").arg(path("start")).arg("--output").arg(path("learned"));
    let mut server = start(command, ["--rounds=8"]);
    let address = server.address();
    let clients: Vec<Process> = ["0", "1", "2"]
        .iter()
        .map(|part| {
            fs::copy(path("start"), path(part)).unwrap();
            let mut client = join(&address, part, &path(part));
            client.args(["--examples", "40"]);
            let trainer = format!("{} {part}", python.shell("train_line.py"));
            train(client, &path(&format!("{part}.mean")), &trainer)
        })
        .collect();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
    let mut check = python.script("train_line.py");
    run(check.arg("check").env("FEDLANE_OUTPUT", path("learned"))).done();
}
