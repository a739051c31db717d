//! Who finds whom, under which name.

use std::net::TcpListener;

use crate::models::{Layout, every_dtype};
use crate::process::{Process, fedlane, join, run, serve, skip, start};
use crate::session::two_members;

/// A session of two whose server listens on `address`; `seen` makes what the clients dial.
fn average_at(address: &str, seen: impl Fn(&str) -> String) {
    average_with(address, &[], seen);
}

fn average_with(address: &str, args: &[&str], seen: impl Fn(&str) -> String) {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut command = fedlane("serve");
    command.args(["--json", "--clients=2", "--listen", address]).args(args);
    let mut server = start(command, [""; 0]);
    let dialled = seen(&server.address());
    let clients: Vec<Process> = members
        .iter()
        .map(|member| start(join(&dialled, &member.name, &member.model), [""; 0]))
        .collect();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
}

#[test]
fn ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        return skip("this host has no IPv6");
    }
    average_at("[::1]:0", |address| {
        assert!(address.starts_with("[::1]:"), "{address}");
        address.to_string()
    });
}

#[test]
fn host_names() {
    let by_name = |address: &str| format!("localhost:{}", address.rsplit(':').next().unwrap());
    average_at("localhost:0", by_name);
    // The name may have an IPv6 address too, which is tried first and refuses.
    average_at("127.0.0.1:0", by_name);
}

#[test]
fn every_interface() {
    average_with("0.0.0.0:0", &["--insecure"], |address| {
        assert!(address.starts_with("0.0.0.0:"), "{address}");
        address.replace("0.0.0.0", "127.0.0.1")
    });
}

#[test]
fn a_name_that_does_not_exist() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    every_dtype().write_client(0, &model);
    let words = run(&mut join("no-such-host.invalid:1", "a", &model)).failed();
    assert!(words.contains("cannot reach an aggregator at no-such-host.invalid:1"), "{words}");
}

#[test]
fn nobody_listens() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    every_dtype().write_client(0, &model);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let words = run(&mut join(&closed, "a", &model)).failed();
    assert!(words.contains(&closed) && words.contains("is `fedlane serve` running"), "{words}");
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let words = run(fedlane("serve").args(["--clients=1", "--listen", &address])).failed();
    assert!(words.contains(&address) && words.contains("choose another --listen"), "{words}");
}

/// Silence while others are awaited is not the silence of a peer that has died.
#[test]
fn a_client_may_come_long_before_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(2), ["--deadline-ms=1500"]);
    let address = server.address();
    let early = start(join(&address, "a", &members[0].model), ["--deadline-ms=1500"]);
    server.await_note("client \"a\"");
    // More than two deadlines.
    std::thread::sleep(std::time::Duration::from_millis(3500));
    run(&mut join(&address, "b", &members[1].model)).done();
    early.finish().done();
    server.finish().done();
}

#[test]
fn names_are_shown_and_must_differ() {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(2), [""; 0]);
    let address = server.address();
    let first = start(join(&address, "klinik-münchen 1", &members[0].model), [""; 0]);
    server.await_note("client \"klinik-münchen 1\"");
    let second = run(&mut join(&address, "klinik-münchen 1", &members[1].model)).failed();
    for words in [second, first.finish().failed(), server.finish().failed()] {
        assert!(words.contains("its name is taken by another client"), "{words}");
        assert!(words.contains("klinik-münchen 1"), "{words}");
    }
}

#[test]
fn an_empty_name_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(1), [""; 0]);
    let words = run(&mut join(&server.address(), "", &members[0].model)).failed();
    assert!(words.contains("its name is empty"), "{words}");
    server.finish().failed();
}

#[test]
fn clients_without_names_get_different_ones() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    Layout::new(&[("w", "F32", &[9])], None).write_client(0, &model);
    let mut server = start(serve(2), [""; 0]);
    let address = server.address();
    let nameless = || {
        let mut join = fedlane("join");
        join.arg(&address).arg("--model").arg(&model);
        start(join, [""; 0])
    };
    let clients = [nameless(), nameless()];
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
}

#[test]
fn one_too_many_is_told_so() {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(&every_dtype(), directory.path());
    let mut server = start(serve(1), ["--rounds=1"]);
    let address = server.address();
    // It holds the session open until the other has come and been refused.
    let gate = directory.path().join("gate");
    let wait = format!("until test -e '{}'; do sleep 0.05; done", gate.display());
    let first = start(join(&address, "a", &members[0].model), ["--train", &wait]);
    server.await_note("client \"a\"");
    let words = run(&mut join(&address, "b", &members[1].model)).failed();
    assert!(words.contains("all 1 clients have joined already"), "{words}");
    std::fs::write(gate, "").unwrap();
    first.finish().done();
    server.finish().done();
}
