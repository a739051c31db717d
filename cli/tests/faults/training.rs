//! Clients that train when the session ends, and a weight that changes on the way.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use fedlane::manifest::{Dtype, synthetic};
use fedlane::sink::file::ModelFile;
use rustix::process::Signal;

use super::hostile::Process;
use super::session::SOON;

/// Long beyond every deadline of these tests.
const TRAIN: &str = "touch $FEDLANE_MODEL.begun; exec sleep 97";

/// A client whose training has begun, and the directory of its files.
fn training(address: &str) -> (Process, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    ModelFile::create(&path, &synthetic(4096, Dtype::F32).unwrap()).unwrap().finish().unwrap();
    let client =
        Process::join(address, "trains", &["--model", path.to_str().unwrap(), "--train", TRAIN]);
    let begun = path.with_extension("begun");
    let patience = Instant::now() + SOON;
    while !begun.exists() {
        assert!(Instant::now() < patience, "the training did not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    (client, directory)
}

/// Processes that run `sleep 97` below the process `parent`.
fn sleepers(parent: u32) -> Vec<u32> {
    let listing = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = listing.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let of_parent = pids.filter(|pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default();
        fields.split_whitespace().nth(1) == Some(&parent.to_string())
    });
    of_parent.collect()
}

fn is_alive(pid: u32) -> bool {
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.starts_with(b"sleep")
}

fn await_end(pids: &[u32]) {
    let patience = Instant::now() + SOON;
    while pids.iter().any(|&pid| is_alive(pid)) {
        assert!(Instant::now() < patience, "the training goes on without its client");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_client_that_trains_ends_with_its_aggregator() {
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=1000"]);
    let (client, _directory) = training(&address);
    let sleeping = sleepers(client.pid());
    assert!(!sleeping.is_empty());
    serve.signal(Signal::KILL);
    client.fails(SOON, &[address.as_str(), "closed by the other side"]);
    await_end(&sleeping);
}

#[test]
fn training_ends_with_its_client() {
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=1000"]);
    let (client, _directory) = training(&address);
    let sleeping = sleepers(client.pid());
    assert!(!sleeping.is_empty());
    client.signal(Signal::TERM);
    await_end(&sleeping);
    serve.fails(SOON, &["client \"trains\" (127.0.0.1:"]);
}

/// Passes everything on between a client and the aggregator, and flips one bit of what the client
/// says first.
fn proxy(aggregator: String, flipped_byte: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut is_first = true;
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(&aggregator) else { return };
            let (to, from) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let flip = std::mem::take(&mut is_first).then_some(flipped_byte);
            std::thread::spawn(move || pass(from, to, flip));
            std::thread::spawn(move || pass(server, client, None));
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<usize>) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if let Some(byte) = flip
            && (passed..passed + length).contains(&byte)
        {
            buffer[byte - passed] ^= 4;
        }
        passed += length;
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    // One side is done: so is the other.
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// The preamble has 12 bytes, place and number 48, the proof 32, the length and its seal 20, the message's
/// number and the name's length one each; the name is "c", and then comes the weight.
const WEIGHT: usize = 12 + 48 + 32 + 20 + 1 + 1 + 1;

#[test]
fn a_weight_that_changes_on_the_way() {
    for byte in WEIGHT..WEIGHT + 8 {
        let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=1000"]);
        let through = proxy(address, byte);
        let client = Process::join(&through, "c", &["--generate=64KiB", "--examples=3"]);
        // It is found, and said again.
        client.succeeds(SOON);
        let said = serve.succeeds(SOON);
        assert!(said.contains("does not carry the right seal"), "{said}");
    }
}
