//! Peers that come in crowds, drip, or describe more than there is: what the aggregator holds stays
//! within its bounds, and honest clients complete meanwhile.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fedlane::limits::{MAX_MODEL_BYTES, MAX_VISITOR_THREADS, MAX_VISITORS};
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::sys::process;
use fedlane::wire::message::{AggregatorMessage, ClientMessage};

use super::host::limited;
use super::hostile::{HostileClient, MODEL_BYTES, Process, model};
use super::session::{SOON, Session};

/// Memory that the aggregator may take for a flood: stacks of the threads of visitors, and what an
/// allocator keeps.
const SLACK_KIB: u64 = 48 << 10;

/// Descriptors and threads that a small session has besides.
const OWN: usize = 80;

/// Most that a process ever held while it was watched.
#[derive(Clone, Copy, Debug, Default)]
struct Most {
    descriptors: usize,
    threads: usize,
    resident_kib: u64,
}

/// Looks at a process again and again until it is told to stop.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Most>,
}

fn entries(path: &Path) -> usize {
    path.read_dir().map_or(0, Iterator::count)
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    line.and_then(|line| line.split_whitespace().nth(1)).map_or(0, |kib| kib.parse().unwrap())
}

impl Watch {
    fn start(pid: u32) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let look = move || {
            let directory = format!("/proc/{pid}");
            let mut most = Most::default();
            while !stopped.load(Ordering::SeqCst) {
                most.descriptors = most.descriptors.max(entries(&Path::new(&directory).join("fd")));
                most.threads = most.threads.max(entries(&Path::new(&directory).join("task")));
                most.resident_kib = most.resident_kib.max(resident_kib(pid));
                std::thread::sleep(Duration::from_millis(5));
            }
            most
        };
        Watch { stop, thread: std::thread::spawn(look) }
    }

    fn end(self) -> Most {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// A flood, which counts its connections, comes while a session of two clients runs to its end.
fn flooded(flood: impl Fn(&str, &AtomicBool, &AtomicUsize) + Sync) -> Most {
    process::allow_open_files(16 << 10);
    let session = Session::start_with(&[], 64 << 20, 20_000);
    let (pid, address) = (session.serve.pid(), session.address.clone());
    let before = resident_kib(pid);
    let (over, came) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let watch = Watch::start(pid);
        scope.spawn(|| flood(&address, &over, &came));
        scope.spawn(|| flood(&address, &over, &came));
        let until = Instant::now() + Duration::from_secs(60);
        while came.load(Ordering::SeqCst) < 2000 {
            assert!(Instant::now() < until, "{came:?} connections only");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Whoever means well may have to try again while others push at the door.
        let other = ["--generate=64MiB", "--deadline-ms=20000"];
        let until = Instant::now() + Duration::from_secs(60);
        let joins = || Process::join(&address, "other", &other).end(Duration::from_secs(60)).0;
        while !joins().success() {
            assert!(Instant::now() < until, "no honest client gets in");
        }
        let most = watch.end();
        over.store(true, Ordering::SeqCst);
        session.serve.succeeds(SOON);
        session.honest.succeeds(SOON);
        // The model and its sums, and one chunk for each stream.
        let grown = most.resident_kib.saturating_sub(before + 2 * (64 << 10));
        assert!(grown < SLACK_KIB, "{grown} KiB for the flood: {most:?}");
        most
    })
}

#[test]
fn thousands_of_connections_at_once() {
    let most = flooded(|address, over, came| {
        let mut held = Vec::new();
        while !over.load(Ordering::SeqCst) && held.len() < 6000 {
            match TcpStream::connect(address) {
                Ok(socket) => {
                    held.push(socket);
                    came.fetch_add(1, Ordering::SeqCst);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        while !over.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(most.threads <= MAX_VISITOR_THREADS as usize + OWN, "{most:?}");
    // Each thread has a visitor's socket, and those who are still waiting are held twice.
    let visitors = MAX_VISITORS + MAX_VISITOR_THREADS as usize;
    assert!(most.descriptors <= visitors + OWN, "{most:?}");
}

/// Each sends one byte now and then, of a first message that is as long as it may be.
#[test]
fn visitors_that_drip() {
    flooded(|address, over, came| {
        let mut held: Vec<TcpStream> = Vec::new();
        let mut byte = 0;
        while !over.load(Ordering::SeqCst) {
            held.retain_mut(|socket| {
                socket.write_all(&b"fedlane\0\x03\0\x01\0"[byte..=byte]).is_ok()
            });
            byte = (byte + 1) % 12;
            while held.len() < 200 {
                let Ok(socket) = TcpStream::connect(address) else { break };
                held.push(socket);
                came.fetch_add(1, Ordering::SeqCst);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// What a model of that size is told.
fn announced(manifest: &Manifest, args: &[&str], why: &str) {
    let usual = ["--clients=2", "--min-clients=1", "--deadline-ms=2000", "--streams=2"];
    let (serve, address) = Process::serve(&[&usual, args].concat());
    let before = resident_kib(serve.pid());
    let mut hostile = HostileClient::join(&address, "bad", manifest);
    let refused = hostile.next().unwrap();
    let AggregatorMessage::Failed { reason } = refused else { panic!("{refused:?}") };
    assert!(reason.contains("client \"bad\"") && reason.contains(why), "{reason}");
    let grown = resident_kib(serve.pid()).saturating_sub(before);
    assert!(grown < SLACK_KIB, "{grown} KiB for a model that was refused");
    // Its model is not the session's.
    let clients = ["a", "b"].map(|name| Process::join(&address, name, &["--generate=1MiB"]));
    clients.into_iter().for_each(|client| drop(client.succeeds(SOON)));
    serve.succeeds(SOON);
}

#[test]
fn a_first_client_that_announces_a_model_that_no_host_has() {
    let chunks = "its model has no room here";
    announced(&synthetic(MAX_MODEL_BYTES - 4, Dtype::F32).unwrap(), &[], chunks);
}

#[test]
fn a_first_client_that_announces_more_than_is_wanted() {
    let manifest = synthetic(8 << 20, Dtype::F32).unwrap();
    announced(&manifest, &["--max-model=4MiB"], "at most 4194304 may come (--max-model)");
}

/// Valid messages, as fast as they go, while the round runs: they are heard, or else their sender is left out.
#[test]
fn a_member_that_says_again_and_again_that_it_begins() {
    // Who has begun and sends nothing is given up after the deadline.
    let args = ["--min-clients=1", "--reconnect-ms=0"];
    let session = Session::start_with(&args, MODEL_BYTES, 20_000);
    let mut peer = HostileClient::join(&session.address, "peer", &model());
    peer.await_upload();
    let before = resident_kib(session.serve.pid());
    let again = ClientMessage::Uploading { round: 1 };
    (0..200_000).take_while(|_| peer.writer.send(&again).is_ok()).for_each(drop);
    let grown = resident_kib(session.serve.pid()).saturating_sub(before);
    assert!(grown < SLACK_KIB, "{grown} KiB for 200000 messages");
    drop(peer);
    session.serve.succeeds(SOON);
    session.honest.succeeds(SOON);
}

/// Visitors do not take the descriptors that clients need.
#[test]
fn a_crowd_where_open_files_are_few() {
    let args = ["serve", "--listen=127.0.0.1:0", "--clients=2", "--streams=2"];
    let serve = limited("-n 160", &args);
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let mut crowd: Vec<TcpStream> =
        (0..400).map(|_| TcpStream::connect(address).unwrap()).collect();
    serve.await_word("others came, and it had said nothing");
    let clients = ["a", "b"].map(|name| Process::join(address, name, &["--generate=1MiB"]));
    // More come all the while, until there is nobody to come to.
    crowd.extend((0..100).map_while(|_| TcpStream::connect(address).ok()));
    clients.into_iter().for_each(|client| drop(client.succeeds(SOON)));
    let said = serve.succeeds(SOON);
    assert!(!said.contains("could not be accepted"), "{said}");
}
