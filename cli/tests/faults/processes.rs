//! Real processes that are killed or stopped.

use std::time::{Duration, Instant};

use super::hostile::{HostileClient, MODEL_BYTES, Process, model};
use super::session::{DEADLINE_MS, SOON, Session, assert_empty};
use rustix::process::Signal;

/// A model that takes a while to send.
const LARGE: &str = "6GiB";

/// An aggregator and two honest clients with a large model, which they have begun to send.
struct Upload {
    serve: Process,
    first: Process,
    second: Process,
    address: String,
}

impl Upload {
    fn start(deadline_ms: &str) -> Upload {
        let deadline = ["--deadline-ms", deadline_ms];
        // Dropping the updates leaves more cores and memory to the other tests.
        let kind = ["--clients=2", "--averaging=checksum"];
        let (serve, address) = Process::serve(&[&kind[..], &deadline].concat());
        let join =
            |name| Process::join(&address, name, &[&["--generate", LARGE][..], &deadline].concat());
        let (first, second) = (join("first"), join("second"));
        serve.await_line("prepare:");
        std::thread::sleep(Duration::from_millis(200));
        Upload { serve, first, second, address }
    }
}

#[test]
fn a_client_that_is_killed_while_it_waits() {
    let session = Session::start_with(&["--clients=3"], MODEL_BYTES, DEADLINE_MS);
    let victim = Process::join(&session.address, "bad", &["--generate", "1MiB"]);
    session.serve.await_word("\"bad\"");
    victim.signal(Signal::KILL);
    session.fails_because_of_bad(&["closed by the other side"]);
}

#[test]
fn a_client_that_is_killed_while_it_uploads() {
    let Upload { serve, first, second, address } = Upload::start("2000");
    second.signal(Signal::KILL);
    serve.fails(SOON, &["client \"second\" (127.0.0.1:"]);
    first.fails(SOON, &[&address, "client \"second\" (127.0.0.1:"]);
}

#[test]
fn a_client_that_is_stopped_while_it_uploads() {
    let Upload { serve, first, second, address } = Upload::start("700");
    second.signal(Signal::STOP);
    serve.fails(SOON, &["client \"second\" (127.0.0.1:"]);
    first.fails(SOON, &[&address, "client \"second\" (127.0.0.1:"]);
    // It finds out when it wakes.
    second.signal(Signal::CONT);
    second.fails(SOON, &[&address]);
}

#[test]
fn a_client_that_is_killed_while_it_downloads() {
    let session = Session::start_with(&[], MODEL_BYTES, 3000);
    let mut slow = HostileClient::join(&session.address, "slow", &model());
    slow.upload();
    // The round cannot end: "slow" does not confirm.
    session.honest.await_line("upload:");
    session.honest.signal(Signal::KILL);
    session.serve.fails(SOON, &["client \"good\" (127.0.0.1:"]);
}

#[test]
fn an_aggregator_that_is_killed_while_clients_wait() {
    let session = Session::start();
    session.serve.signal(Signal::KILL);
    session.honest.fails(SOON, &[&session.address, "closed by the other side"]);
    assert_empty(session.directory.path());
}

#[test]
fn an_aggregator_that_is_killed_while_clients_upload() {
    let Upload { serve, first, second, address } = Upload::start("2000");
    serve.signal(Signal::KILL);
    first.fails(SOON, &[&address]);
    second.fails(SOON, &[&address]);
}

#[test]
fn an_aggregator_that_is_killed_while_others_download() {
    let session = Session::start_with(&[], MODEL_BYTES, 3000);
    let mut slow = HostileClient::join(&session.address, "slow", &model());
    slow.upload();
    session.honest.await_line("download:");
    session.serve.signal(Signal::KILL);
    // It has the model of the last round, and whoever it would hear that from is gone.
    session.honest.succeeds(SOON);
}

#[test]
fn an_aggregator_that_is_stopped_while_clients_wait() {
    let session = Session::start();
    session.serve.signal(Signal::STOP);
    session.honest.fails(SOON, &[&session.address, "no sign of life within the deadline"]);
    assert_empty(session.directory.path());
}

#[test]
fn an_aggregator_that_is_stopped_while_clients_upload() {
    let Upload { serve, first, second, address } = Upload::start("700");
    serve.signal(Signal::STOP);
    first.fails(SOON, &[&address, "no sign of life"]);
    second.fails(SOON, &[&address, "no sign of life"]);
}

#[test]
fn a_demo_that_is_killed_leaves_no_process() {
    let demo = Process::start(&["demo", "--generate=512MiB", "--clients=2"]);
    let children = await_children(demo.pid(), 3);
    demo.signal(Signal::KILL);
    let until = Instant::now() + SOON;
    while children.iter().any(|pid| is_running(*pid)) {
        assert!(Instant::now() < until, "one of {children:?} still runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn await_children(parent: u32, wanted: usize) -> Vec<u32> {
    let until = Instant::now() + SOON;
    loop {
        let list = format!("/proc/{parent}/task/{parent}/children");
        let children = std::fs::read_to_string(list).unwrap_or_default();
        let children: Vec<u32> = children.split_whitespace().flat_map(str::parse).collect();
        if children.len() >= wanted {
            return children;
        }
        assert!(Instant::now() < until, "{} of {wanted} processes came", children.len());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that has ended and was not yet waited for runs no more.
fn is_running(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.contains("fedlane") && !status.contains("State:\tZ")
}
