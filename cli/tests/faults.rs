//! Breaks sessions on purpose: real processes, real sockets, and peers that break the rules.
//!
//! After every fault each honest process must end soon with status 1 and one line that names
//! whoever is to blame, nothing may be half-written, and strangers at the port must end nothing.

mod hostile;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use fedlane::control::{read_fixed, write_fixed};
use fedlane::wire::hello::{Answer, Channel, DataHello, Preamble};
use fedlane::wire::message::{ClientMessage, Plan};
use hostile::{CHUNK_BYTES, HostileClient, MODEL_BYTES, Process, model};
use rustix::process::Signal;
use tempfile::TempDir;

/// Milliseconds of silence after which a peer is given up, in most tests.
const DEADLINE_MS: u64 = 600;

/// A few deadlines, and what a busy host adds.
const SOON: Duration = Duration::from_secs(8);

/// An aggregator and an honest client, with outputs in a directory of their own.
struct Session {
    directory: TempDir,
    serve: Process,
    honest: Process,
    address: String,
}

impl Session {
    /// Waits for one client more.
    fn start() -> Session {
        Session::start_with(&[], MODEL_BYTES, DEADLINE_MS)
    }

    fn start_with(args: &[&str], model_bytes: u64, deadline_ms: u64) -> Session {
        let directory = tempfile::tempdir().unwrap();
        let output = |name: &str| directory.path().join(name).to_str().unwrap().to_string();
        let (chunk_bytes, deadline) = (CHUNK_BYTES.to_string(), deadline_ms.to_string());
        let mut serve = vec!["--streams=2", "--chunk-bytes", &chunk_bytes];
        let mean = output("mean");
        serve.extend(["--output", &mean, "--deadline-ms", &deadline]);
        serve.extend(if args.is_empty() { &["--clients=2"] } else { args });
        let (serve, address) = Process::serve(&serve);
        let (size, mine) = (model_bytes.to_string(), output("honest"));
        let join = ["--generate", &size, "--output", &mine, "--deadline-ms", &deadline];
        let honest = Process::join(&address, "good", &join);
        serve.await_word("\"good\"");
        Session { directory, serve, honest, address }
    }

    /// Both processes fail and say that the client "bad" is to blame, and how.
    fn is_ended_by_bad(self, words: &[&str]) {
        let words = [&["client \"bad\" (127.0.0.1:"], words].concat();
        self.serve.fails(SOON, &words);
        self.honest.fails(SOON, &[&[self.address.as_str()], &words[..]].concat());
        assert_empty(self.directory.path());
    }
}

fn assert_empty(directory: &Path) {
    let left: Vec<_> = directory.read_dir().unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// A client "bad" does `act`; the session must end and say `words` about it.
fn hostile(act: impl FnOnce(&mut HostileClient), words: &[&str]) {
    hostile_in(Session::start(), act, words);
}

/// As [`hostile`], while a third client is awaited.
fn hostile_while_waiting(act: impl FnOnce(&mut HostileClient), words: &[&str]) {
    hostile_in(Session::start_with(&["--clients=3"], MODEL_BYTES, DEADLINE_MS), act, words);
}

fn hostile_in(session: Session, act: impl FnOnce(&mut HostileClient), words: &[&str]) {
    let mut bad = HostileClient::join(&session.address, "bad", &model());
    act(&mut bad);
    session.is_ended_by_bad(words);
}

// ---- Clients that lie, stall or vanish ----

#[test]
fn a_client_that_gives_no_sign_of_life() {
    hostile_while_waiting(|_| {}, &["no sign of life within the deadline"]);
}

#[test]
fn a_client_that_opens_no_data_connection() {
    let act = |bad: &mut HostileClient| drop(bad.await_plan());
    hostile(act, &["opened 0 of 2 data connections"]);
}

#[test]
fn a_client_that_opens_some_data_connections_only() {
    let act = |bad: &mut HostileClient| {
        bad.await_plan();
        bad.open(1..2);
    };
    hostile(act, &["opened 1 of 2 data connections"]);
}

#[test]
fn a_client_that_announces_its_update_and_sends_nothing() {
    hostile(HostileClient::begin_upload, &["no byte moved"]);
}

#[test]
fn a_client_that_sends_half_and_stays() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        let half = bad.bytes(0).len() / 2;
        let bytes = bad.bytes(0);
        bad.streams[0].write_all(&bytes[..half]).unwrap();
    };
    hostile(act, &["no byte moved"]);
}

#[test]
fn a_client_that_sends_half_and_closes_the_data_connection() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        let bytes = bad.bytes(1);
        bad.streams[1].write_all(&bytes[..bytes.len() / 2]).unwrap();
        bad.streams[1].shutdown(Shutdown::Both).unwrap();
    };
    hostile(act, &["data connection was closed before all bytes had come"]);
}

#[test]
fn a_client_that_closes_its_control_connection() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        bad.control.shutdown(Shutdown::Both).unwrap();
    };
    hostile(act, &["closed by the other side"]);
}

#[test]
fn a_client_that_sends_too_much() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        let bytes = [bad.bytes(0), vec![0; 5000]].concat();
        bad.streams[0].write_all(&bytes).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        let bytes = bad.bytes(1);
        bad.streams[1].write_all(&bytes).unwrap();
    };
    hostile(act, &["more bytes than were agreed"]);
}

#[test]
fn a_client_that_sends_other_bytes_than_it_announced() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        let mut bytes = bad.bytes(0);
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        bad.streams[0].write_all(&bytes).unwrap();
    };
    hostile(act, &["do not match their checksum"]);
}

#[test]
fn a_client_that_never_announces_checksums() {
    let act = |bad: &mut HostileClient| {
        bad.await_upload();
        bad.say(&ClientMessage::Uploading { round: 1 });
        for stream in 0..2 {
            let bytes = bad.bytes(stream);
            // Its connection may end before all is sent.
            let _ = bad.streams[stream].write_all(&bytes);
        }
    };
    hostile(act, &["no byte moved"]);
}

#[test]
fn a_client_that_announces_checksums_twice() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        bad.announce(0);
    };
    hostile(act, &["more checksums than the stream has chunks"]);
}

#[test]
fn a_client_that_announces_checksums_of_a_stream_that_does_not_exist() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        bad.say(&ClientMessage::Sums { stream: 7, sums: vec![[0; 8]] });
    };
    hostile(act, &["stream 7, which the session does not have"]);
}

#[test]
fn a_client_that_announces_checksums_before_there_is_a_plan() {
    let session = Session::start();
    let mut third = HostileClient::join(&session.address, "bad", &model());
    third.await_plan();
    third.say(&ClientMessage::Sums { stream: u32::MAX, sums: vec![[0; 8]; 100] });
    session.is_ended_by_bad(&["stream 4294967295"]);
}

#[test]
fn a_client_that_uploads_for_another_round() {
    let act = |bad: &mut HostileClient| {
        bad.await_upload();
        bad.say(&ClientMessage::Uploading { round: 2 });
    };
    hostile(act, &["an upload when none was due"]);
}

#[test]
fn a_client_that_received_something_else() {
    let act = |bad: &mut HostileClient| {
        bad.upload();
        bad.download();
        bad.say(&ClientMessage::Received { round: 1, digest: [0; 32] });
    };
    let session = Session::start();
    let mut bad = HostileClient::join(&session.address, "bad", &model());
    act(&mut bad);
    // The mean was whole and is already where it belongs; only "bad" has not got it.
    session.serve.fails(SOON, &["client \"bad\" (127.0.0.1:", "another digest"]);
    session.honest.fails(SOON, &[&session.address, "client \"bad\" (127.0.0.1:"]);
}

#[test]
fn a_client_that_confirms_what_was_never_sent() {
    let act = |bad: &mut HostileClient| {
        bad.await_upload();
        bad.say(&ClientMessage::Received { round: 1, digest: [0; 32] });
    };
    hostile(act, &["a confirmation when none was due"]);
}

#[test]
fn a_client_that_joins_twice() {
    let act = |bad: &mut HostileClient| {
        let header = model().header().to_vec();
        bad.await_plan();
        bad.say(&ClientMessage::Join { name: "worse".into(), examples: 1.0, header });
    };
    hostile(act, &["a message when none was due"]);
}

#[test]
fn a_client_that_says_why_it_gives_up_in_many_dirty_words() {
    let reason = "\x1b[2J\r\nout of\tmemory\u{7}\n".repeat(9000);
    let act = |bad: &mut HostileClient| {
        bad.await_plan();
        bad.say(&ClientMessage::Failed { reason });
    };
    hostile(act, &["gave up:", "out of memory"]);
}

#[test]
fn a_message_that_does_not_exist() {
    hostile_while_waiting(
        |bad| bad.say_bytes(&[2, 0, 0, 0, 99, 0]),
        &["bytes that are no message"],
    );
}

#[test]
fn a_message_with_bytes_behind_it() {
    hostile_while_waiting(|bad| bad.say_bytes(&[2, 0, 0, 0, 4, 0]), &["1 bytes too many"]);
}

#[test]
fn garbage_instead_of_messages() {
    let garbage: Vec<u8> = (0..10_000_u32).map(|i| (i * i + 255) as u8).collect();
    hostile_while_waiting(|bad| bad.say_bytes(&garbage), &["a message of", "was announced"]);
}

#[test]
fn a_message_of_four_gigabytes() {
    hostile_while_waiting(
        |bad| bad.say_bytes(&[255; 4]),
        &["a message of 4294967295 bytes was announced"],
    );
}

#[test]
fn a_message_that_stops_in_the_middle() {
    hostile_while_waiting(|bad| bad.say_bytes(&[200, 0, 0, 0, 1, 2]), &["no sign of life"]);
}

#[test]
fn a_client_that_does_not_read_the_mean() {
    let session = Session::start_with(&[], 48 << 20, 1500);
    let large = fedlane::manifest::synthetic(48 << 20, fedlane::manifest::Dtype::F32).unwrap();
    let mut bad = HostileClient::join(&session.address, "bad", &large);
    bad.upload();
    session.serve.fails(SOON, &["client \"bad\" (127.0.0.1:", "no byte moved"]);
    session.honest.fails(SOON, &[&session.address, "client \"bad\" (127.0.0.1:"]);
}

// ---- Processes that are killed or stopped ----

/// A model that takes a while to send.
const LARGE: &str = "768MiB";

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
    session.is_ended_by_bad(&["closed by the other side"]);
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
    session.honest.fails(SOON, &[&session.address, "closed by the other side"]);
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

// ---- Strangers at the port ----

/// Strangers do what `visit` does; then the session still runs to its end.
fn strangers(visit: impl FnOnce(&Session), warning: &str) {
    let session = Session::start();
    visit(&session);
    if !warning.is_empty() {
        session.serve.await_word(warning);
    }
    session.completes();
}

/// A stranger sends these bytes and waits for the connection to end.
fn stranger_sends(bytes: &'static [u8], warning: &str) {
    let visit = |session: &Session| {
        let mut socket = TcpStream::connect(&session.address).unwrap();
        socket.write_all(bytes).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        // A reset ends it as well as a close does.
        let _ = std::io::copy(&mut socket, &mut std::io::sink());
    };
    strangers(visit, warning);
}

impl Session {
    /// The second client comes and the round runs to its end.
    fn completes(self) {
        let other = Process::join(&self.address, "other", &["--generate", "1MiB"]);
        let said = self.serve.succeeds(SOON);
        assert!(!said.contains("panicked"), "{said}");
        self.honest.succeeds(SOON);
        other.succeeds(SOON);
    }
}

#[test]
fn a_web_browser_at_the_port() {
    stranger_sends(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it began with \"GET / HT\"");
}

#[test]
fn a_tls_client_at_the_port() {
    let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x1b[31m";
    stranger_sends(hello, "it began with \"\\x16\\x03\\x01");
}

#[test]
fn another_version_at_the_port() {
    stranger_sends(b"fedlane\0\x63\x01\x01\0", "speaks version 355 of the protocol");
}

#[test]
fn a_channel_that_does_not_exist() {
    stranger_sends(b"fedlane\0\x01\0\x07\0", "channel type 7, which does not exist");
}

#[test]
fn a_control_channel_that_begins_with_four_gigabytes() {
    stranger_sends(b"fedlane\0\x01\0\x01\0\xff\xff\xff\xff", "4294967295 bytes was announced");
}

#[test]
fn a_control_channel_that_begins_with_garbage() {
    stranger_sends(b"fedlane\0\x01\0\x01\0\x03\0\0\0\xee\xee\xee", "bytes that are no message");
}

#[test]
fn a_control_channel_that_begins_with_something_else() {
    stranger_sends(b"fedlane\0\x01\0\x01\0\x01\0\0\0\x04", "not a request to join");
}

#[test]
fn a_data_channel_before_there_is_a_plan() {
    const HELLO: [u8; 68] = {
        let mut hello = [0; 68];
        let preamble = *b"fedlane\0\x01\0\x02\0";
        let mut at = 0;
        while at < preamble.len() {
            hello[at] = preamble[at];
            at += 1;
        }
        hello
    };
    stranger_sends(&HELLO, "its ticket was not accepted");
}

#[test]
fn strangers_that_leave_or_say_little() {
    let visit = |session: &Session| {
        for part in [&b""[..], b"f", b"fedlan", b"fedlane\0\x01\0\x01\0\x10\0"] {
            let mut socket = TcpStream::connect(&session.address).unwrap();
            socket.write_all(part).unwrap();
        }
    };
    strangers(visit, "closed by the other side");
}

#[test]
fn three_hundred_strangers_that_say_nothing() {
    let mut silent = Vec::new();
    let visit = |session: &Session| {
        for _ in 0..300 {
            silent.push(TcpStream::connect(&session.address).unwrap());
        }
    };
    strangers(visit, "others came, and it had said nothing");
}

/// Data channels that `forge` makes from a plan are refused, and the session completes.
fn forged(forge: impl Fn(&Plan) -> DataHello) {
    let session = Session::start();
    let mut peer = HostileClient::join(&session.address, "peer", &model());
    let plan = peer.await_plan();
    let mut socket = TcpStream::connect(&session.address).unwrap();
    write_fixed(&mut socket, &Preamble::new(Channel::Data)).unwrap();
    write_fixed(&mut socket, &forge(&plan)).unwrap();
    let answer: Preamble = read_fixed(&mut socket).unwrap();
    assert_eq!(answer.answer(), Ok(Answer::WrongTicket));
    session.serve.await_word("its ticket was not accepted");
    peer.open(0..2);
    peer.finish();
    session.serve.succeeds(SOON);
    session.honest.succeeds(SOON);
}

#[test]
fn a_data_channel_with_a_wrong_ticket() {
    forged(|plan| DataHello::new(plan.session, plan.client, 0, &[1; 32]));
}

#[test]
fn a_data_channel_of_another_session() {
    forged(|plan| DataHello::new([1; 16], plan.client, 0, &plan.ticket));
}

#[test]
fn a_data_channel_of_another_client() {
    forged(|plan| DataHello::new(plan.session, 1 - plan.client, 0, &plan.ticket));
}

#[test]
fn a_data_channel_of_a_client_that_does_not_exist() {
    forged(|plan| DataHello::new(plan.session, u32::MAX, 0, &plan.ticket));
}

#[test]
fn a_data_channel_that_is_out_of_range() {
    forged(|plan| DataHello::new(plan.session, plan.client, u32::MAX, &plan.ticket));
}

#[test]
fn a_data_channel_that_is_opened_twice() {
    let session = Session::start();
    let mut peer = HostileClient::join(&session.address, "peer", &model());
    let plan = peer.await_plan();
    peer.open(0..1);
    let mut socket = TcpStream::connect(&session.address).unwrap();
    write_fixed(&mut socket, &Preamble::new(Channel::Data)).unwrap();
    let hello = DataHello::new(plan.session, plan.client, 0, &plan.ticket);
    write_fixed(&mut socket, &hello).unwrap();
    let answer: Preamble = read_fixed(&mut socket).unwrap();
    assert_eq!(answer.answer(), Ok(Answer::Taken));
    peer.open(1..2);
    peer.finish();
    session.serve.succeeds(SOON);
    session.honest.succeeds(SOON);
}

#[test]
fn a_client_that_comes_too_late() {
    let session = Session::start();
    let mut peer = HostileClient::join(&session.address, "peer", &model());
    peer.await_plan();
    let late = Process::join(&session.address, "late", &["--generate", "1MiB"]);
    late.fails(SOON, &[&session.address, "all 2 clients have joined already"]);
    session.serve.await_word("came too late");
    peer.open(0..2);
    peer.finish();
    session.serve.succeeds(SOON);
    session.honest.succeeds(SOON);
}
