//! Slow is not dead: who gives signs of life is waited for.

use std::io::Write;
use std::time::{Duration, Instant};

use super::hostile::{HostileClient, Process};
use super::session::{SOON, Session, tensor, two};
use fedlane::manifest::{Dtype, synthetic};

/// A client that sends 1 KiB every 100 ms.
fn slow_client(order: &str, deadline_ms: u64) {
    let size = 40 << 10;
    let small = synthetic(size, Dtype::F32).unwrap();
    let args = ["--clients=2", order, "--streams=1", "--chunk-bytes=8KiB"];
    let session = Session::start_with(&args, size, deadline_ms);
    let mut slow = HostileClient::join(&session.address, "a-slow", &small);
    slow.await_plan();
    slow.open(0..1);
    slow.await_request();
    slow.announce_upload();
    let (began, bytes) = (Instant::now(), slow.bytes(0));
    for part in bytes.chunks(1 << 10) {
        slow.streams[0].write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(began.elapsed() > Duration::from_millis(5 * deadline_ms));
    slow.confirm();
    session.serve.succeeds(SOON);
    session.honest.succeeds(SOON);
}

#[test]
fn a_slow_client_is_waited_for() {
    slow_client("--order=arrival", 600);
}

#[test]
fn a_slow_client_that_is_first_in_turn_is_waited_for() {
    slow_client("--order=client", 600);
}

#[test]
fn training_may_take_much_longer_than_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    let path = path.to_str().unwrap();
    std::fs::write(path, two(&tensor("second", "F32", "[4]", 16, 32))).unwrap();
    let (serve, address) = Process::serve(&["--clients=2", "--deadline-ms=600"]);
    let join = |name, train| {
        Process::join(&address, name, &["--model", path, "--deadline-ms=600", "--train", train])
    };
    let (quick, slow) = (join("quick", "true"), join("slow", "sleep 3"));
    serve.succeeds(SOON);
    quick.succeeds(SOON);
    slow.succeeds(SOON);
}

#[test]
fn training_that_fails() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    let path = path.to_str().unwrap();
    std::fs::write(path, two(&tensor("second", "F32", "[4]", 16, 32))).unwrap();
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let client = Process::join(&address, "a", &["--model", path, "--train", "exit 3"]);
    client.fails(SOON, &["--train command failed in round 1", "3"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:", "gave up: the --train command failed"]);
}

#[test]
fn deadlines_may_differ() {
    for (ours, theirs) in [("600", "60000"), ("60000", "600")] {
        let ours = format!("--deadline-ms={ours}");
        let (serve, address) = Process::serve(&["--clients=2", &ours]);
        let theirs = format!("--deadline-ms={theirs}");
        let join = |name| Process::join(&address, name, &["--generate=1MiB", &theirs]);
        let first = join("first");
        // Much longer than the shorter deadline.
        std::thread::sleep(Duration::from_millis(2500));
        let second = join("second");
        serve.succeeds(SOON);
        first.succeeds(SOON);
        second.succeeds(SOON);
    }
}
