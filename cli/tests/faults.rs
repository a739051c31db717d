//! Breaks sessions on purpose: real processes, real sockets, and peers that break the rules.
//!
//! After every fault each honest process must end soon with status 1 and one line that names
//! whoever is to blame, nothing may be half-written, and strangers at the port must end nothing.

mod hostile;

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use fedlane::control::{read_fixed, write_fixed};
use fedlane::manifest::{Dtype, synthetic};
use fedlane::sink::file::ModelFile;
use fedlane::wire::hello::{Answer, Channel, DataHello, Preamble};
use fedlane::wire::message::{AggregatorMessage, ClientMessage, Plan};
use hostile::{FakeAggregator, HostileClient, MODEL_BYTES, Process, command, model};
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
        let (deadline, mean) = (deadline_ms.to_string(), output("mean"));
        let mut serve = vec!["--output", &mean, "--deadline-ms", &deadline];
        for usual in ["--clients=2", "--streams=2", "--chunk-bytes=64KiB"] {
            let name = usual.split('=').next().unwrap();
            serve.extend((!args.iter().any(|arg| arg.starts_with(name))).then_some(usual));
        }
        serve.extend(args);
        let (serve, address) = Process::serve(&serve);
        let (size, mine) = (model_bytes.to_string(), output("honest"));
        let join = ["--generate", &size, "--output", &mine, "--deadline-ms", &deadline];
        let honest = Process::join(&address, "good", &join);
        serve.await_word("\"good\"");
        Session { directory, serve, honest, address }
    }

    /// Both processes fail and say that the client "bad" is to blame, and how.
    fn fails_because_of_bad(self, words: &[&str]) {
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
    session.fails_because_of_bad(words);
}

// ---- Clients that lie, stall or vanish ----

#[test]
fn a_client_that_gives_no_sign_of_life() {
    hostile_while_waiting(|_| {}, &["no sign of life within the deadline"]);
}

#[test]
fn a_client_that_opens_no_data_connection() {
    let act = |bad: &mut HostileClient| assert_eq!(bad.await_plan().streams, 2);
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
    session.fails_because_of_bad(&["stream 4294967295"]);
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
    let large = synthetic(48 << 20, Dtype::F32).unwrap();
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
    session.honest.fails(SOON, &[&session.address]);
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

// ---- Aggregators that lie, stall or vanish ----

/// A client dials whoever listens; `act` plays the other side. The client must fail and say
/// `words` and the address, and leave no output.
fn fake<T>(act: impl FnOnce(TcpListener) -> T, words: &[&str]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("mean");
    let deadline = DEADLINE_MS.to_string();
    let args = ["--generate", "1MiB", "--deadline-ms", &deadline, "--output"];
    let join = [&args[..], &[output.to_str().unwrap()]].concat();
    let client = Process::join(&address, "victim", &join);
    let held = act(listener);
    client.fails(SOON, &[&[address.as_str()], words].concat());
    drop(held);
    assert_empty(directory.path());
}

/// As [`fake`], where the other side answers the first bytes with these.
fn fake_answers(bytes: &'static [u8], words: &[&str]) {
    let act = |listener: TcpListener| {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(bytes).unwrap();
        socket
    };
    fake(act, words);
}

/// As [`fake`], where `spoil` changes the plan.
fn fake_plan(spoil: impl FnOnce(&mut Plan), words: &[&str]) {
    let act = |listener| {
        let fake = FakeAggregator::welcome(listener);
        let mut plan = FakeAggregator::plan();
        spoil(&mut plan);
        fake.say(&AggregatorMessage::Plan(plan));
        fake
    };
    fake(act, words);
}

/// As [`fake`], once the data channels are open.
fn fake_session(act: impl FnOnce(&mut FakeAggregator), words: &[&str]) {
    let act = |listener| {
        let mut fake = FakeAggregator::agree(listener);
        act(&mut fake);
        fake
    };
    fake(act, words);
}

#[test]
fn a_web_server_instead_of_an_aggregator() {
    fake_answers(b"HTTP/1.1 400 Bad Request\r\n\r\n", &["does not speak fedlane", "HTTP/1.1"]);
}

#[test]
fn a_mail_server_with_colours_instead_of_an_aggregator() {
    fake_answers(b"\x1b[31m220 hi\r\n\r\n", &["does not speak fedlane", "\\x1b[31m220"]);
}

#[test]
fn an_aggregator_of_another_version() {
    fake_answers(b"fedlane\0\x02\0\x01\0", &["version 2 of the protocol and this is version 1"]);
}

#[test]
fn an_aggregator_that_closes_at_once() {
    fake(|listener| drop(listener.accept().unwrap()), &[]);
}

#[test]
fn an_aggregator_that_closes_in_its_answer() {
    let act = |listener: TcpListener| listener.accept().unwrap().0.write_all(b"fedl").unwrap();
    fake(act, &[]);
}

#[test]
fn an_aggregator_that_says_nothing() {
    fake(|listener| listener.accept().unwrap(), &["no sign of life within the deadline"]);
}

#[test]
fn an_aggregator_that_never_accepts() {
    fake(|listener| listener, &["no sign of life within the deadline"]);
}

#[test]
fn an_aggregator_that_sends_garbage() {
    let garbage = b"fedlane\0\x01\0\x01\0\xde\xad\xbe\xef\xde\xad\xbe\xef";
    fake_answers(garbage, &["bytes was announced"]);
}

#[test]
fn an_aggregator_that_sends_what_is_no_message() {
    let message = b"fedlane\0\x01\0\x01\0\x04\0\0\0\xee\xee\xee\xee";
    fake_answers(message, &["bytes that are no message"]);
}

#[test]
fn a_plan_without_streams() {
    fake_plan(|plan| plan.streams = 0, &["plan that is not valid: streams 0"]);
}

#[test]
fn a_plan_with_four_billion_streams() {
    fake_plan(|plan| plan.streams = u32::MAX, &["plan that is not valid: streams 4294967295"]);
}

#[test]
fn a_plan_without_chunk_bytes() {
    fake_plan(|plan| plan.chunk_bytes = 0, &["plan that is not valid: chunk bytes 0"]);
}

#[test]
fn a_plan_with_huge_chunks() {
    fake_plan(|plan| plan.chunk_bytes = u64::MAX, &["plan that is not valid: chunk bytes"]);
}

#[test]
fn a_plan_without_deadline() {
    fake_plan(|plan| plan.deadline_ms = 0, &["plan that is not valid: deadline 0"]);
}

#[test]
fn a_plan_with_an_endless_deadline() {
    fake_plan(|plan| plan.deadline_ms = u64::MAX, &["plan that is not valid: deadline"]);
}

#[test]
fn an_aggregator_that_refuses_the_data_connections() {
    let act = |listener| {
        let fake = FakeAggregator::welcome(listener);
        fake.say(&AggregatorMessage::Plan(FakeAggregator::plan()));
        (fake.answer_stream(Answer::WrongTicket), fake)
    };
    fake(act, &["refused data connection 0"]);
}

#[test]
fn an_aggregator_that_does_not_answer_the_data_connections() {
    fake_plan(|_| {}, &["no sign of life within the deadline"]);
}

#[test]
fn an_aggregator_that_sends_no_byte_of_a_model() {
    fake_session(|fake| fake.announce(fake.digest(), &fake.sums()), &["no byte moved"]);
}

#[test]
fn an_aggregator_that_sends_half_a_model() {
    let act = |fake: &mut FakeAggregator| {
        fake.announce(fake.digest(), &fake.sums());
        let bytes = fake.bytes(0);
        fake.send(0, &bytes);
        let bytes = fake.bytes(1);
        fake.send(1, &bytes[..bytes.len() / 2]);
    };
    fake_session(act, &["no byte moved"]);
}

#[test]
fn an_aggregator_that_ends_in_the_middle_of_a_model() {
    let act = |listener| {
        let mut fake = FakeAggregator::agree(listener);
        fake.announce(fake.digest(), &fake.sums());
        let bytes = fake.bytes(0);
        fake.send(0, &bytes[..bytes.len() / 2]);
    };
    fake(act, &["closed"]);
}

#[test]
fn an_aggregator_that_sends_other_bytes_than_it_announced() {
    let act = |fake: &mut FakeAggregator| {
        let mut sums = fake.sums();
        sums[3] ^= 1;
        fake.announce(fake.digest(), &sums);
        for stream in 0..2 {
            let bytes = fake.bytes(stream);
            fake.send(stream, &bytes);
        }
    };
    fake_session(act, &["do not match their checksum"]);
}

#[test]
fn an_aggregator_that_announces_another_model_than_it_sends() {
    let act = |fake: &mut FakeAggregator| {
        fake.announce([0; 32], &fake.sums());
        for stream in 0..2 {
            let bytes = fake.bytes(stream);
            fake.send(stream, &bytes);
        }
    };
    fake_session(act, &["another digest than the one announced"]);
}

#[test]
fn an_aggregator_that_sends_too_much() {
    let act = |fake: &mut FakeAggregator| {
        fake.announce(fake.digest(), &fake.sums());
        let bytes = [fake.bytes(0), vec![0; 100]].concat();
        fake.send(0, &bytes);
        std::thread::sleep(Duration::from_millis(200));
        let bytes = fake.bytes(1);
        fake.send(1, &bytes);
    };
    fake_session(act, &["more bytes than were agreed"]);
}

#[test]
fn an_aggregator_that_announces_too_many_checksums() {
    let act = |fake: &mut FakeAggregator| {
        fake.announce(fake.digest(), &fake.sums());
        fake.say(&AggregatorMessage::Sums { stream: 1, sums: vec![[0; 8]] });
    };
    fake_session(act, &["more checksums than the stream has chunks"]);
}

#[test]
fn an_aggregator_that_is_done_before_it_has_begun() {
    fake_session(|fake| fake.say(&AggregatorMessage::Done), &["after 0 of 1 rounds"]);
}

#[test]
fn an_aggregator_that_has_averaged_what_it_never_asked_for() {
    let act = |fake: &mut FakeAggregator| fake.say(&AggregatorMessage::Applied { round: 1 });
    fake_session(act, &["a message when none was due"]);
}

#[test]
fn an_aggregator_that_gives_dirty_reasons() {
    let reason = "\x1b]0;gone\x07\x1b[2J\r\nnews\u{85}".repeat(30_000);
    let act = |fake: &mut FakeAggregator| fake.say(&AggregatorMessage::Failed { reason });
    fake_session(act, &["ended the session:", "news"]);
}

#[test]
fn nobody_at_the_address() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let client = Process::join(&address, "a", &["--generate", "1KiB"]);
    let line = client.fails(SOON, &["cannot reach", &address, "Connection refused"]);
    assert_eq!(line.matches("refused").count(), 1, "said twice: {line}");
}

#[test]
fn a_host_name_that_does_not_exist() {
    let client = Process::join("no-such-host.invalid:7733", "a", &["--generate", "1KiB"]);
    client.fails(Duration::from_secs(30), &["cannot reach", "no-such-host.invalid:7733"]);
}

#[test]
fn an_address_without_a_port() {
    let client = Process::join("127.0.0.1", "a", &["--generate", "1KiB"]);
    client.fails(SOON, &["cannot reach", "127.0.0.1"]);
}

// ---- Models ----

/// The bytes of a safetensors file with this header and so much data.
fn model_file(header: &str, data_bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), &vec![0; data_bytes]].concat()
}

fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

/// A model of two tensors, the second of which is `second`.
fn two(second: &str) -> Vec<u8> {
    let header = format!("{{{},{second}}}", tensor("first", "F32", "[4]", 0, 16));
    model_file(&header, 32)
}

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
    let mut waits = HostileClient::join(&address, "a", &large);
    waits.begin_upload();
    std::thread::sleep(Duration::from_millis(300));
    spoil(&path);
    for stream in 0..2 {
        let bytes = waits.bytes(stream);
        let mut socket = waits.streams[stream].try_clone().unwrap();
        // The connection ends in the middle.
        std::thread::spawn(move || drop(socket.write_all(&bytes)));
    }
    serve.fails(SOON, &["client \"bad\" (127.0.0.1:"]);
    bad.fails(SOON, &[&[address.as_str()], words].concat());
    assert!(!output.exists());
}

#[test]
fn a_file_that_is_cut_short_while_it_is_sent() {
    let cut = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(1000).unwrap();
    };
    spoilt_on_the_way(cut, &["became shorter while it was"]);
}

#[test]
fn a_file_that_is_written_while_it_is_sent() {
    // Bytes that are summed and in the socket already are the ones that change.
    let write = |path: &Path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![9; 60 << 20], 4 << 20 >> 4).unwrap();
    };
    spoilt_on_the_way(write, &["do not match their checksum"]);
}

// ---- Weights and names ----

#[test]
fn weights_on_the_command_line() {
    for examples in ["-1", "nan", "inf", "-inf", "1e999", "many", ""] {
        let join = format!("--examples={examples}");
        let client = Process::join("127.0.0.1:1", "a", &["--generate=1KiB", &join]);
        let (status, said) = client.end(SOON);
        assert_eq!(status.code(), Some(2), "{examples}: {said}");
        assert!(said.contains("--examples"), "{said}");
    }
}

#[test]
fn weights_that_are_all_zero() {
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let client = Process::join(&address, "a", &["--generate=1KiB", "--examples=0"]);
    serve.fails(SOON, &["the weights sum to zero"]);
    client.fails(SOON, &[&address, "the weights sum to zero"]);
}

#[test]
fn forged_weights() {
    for (examples, text) in [
        (-1.0, "is -1.0;"),
        (f64::NAN, "is NaN;"),
        (f64::INFINITY, "is inf;"),
        (-f64::MAX, "is -1.79"),
    ] {
        let session = Session::start();
        let header = model().header().to_vec();
        let _bad = joined(&session, &ClientMessage::Join { name: "bad".into(), examples, header });
        session.fails_because_of_bad(&["its number of examples", text]);
    }
}

#[test]
fn a_weight_that_is_too_small_to_count() {
    let session = Session::start();
    let header = model().header().to_vec();
    let join = ClientMessage::Join { name: "bad".into(), examples: f64::MIN_POSITIVE, header };
    let _bad = joined(&session, &join);
    session.fails_because_of_bad(&["its number of examples is 2.2", "too small"]);
}

fn joined(session: &Session, join: &ClientMessage) -> HostileClient {
    let socket = TcpStream::connect(&session.address).unwrap();
    HostileClient::join_with(socket, join, &model())
}

/// A client of this name ends the session, which says `words`.
fn forged_name(name: &str, words: &[&str]) {
    let session = Session::start();
    let _bad = HostileClient::join(&session.address, name, &model());
    session.serve.fails(SOON, words);
    session.honest.fails(SOON, words);
}

#[test]
fn an_empty_name() {
    forged_name("", &["client \"\" (127.0.0.1:", "its name is empty"]);
}

#[test]
fn a_name_that_is_taken() {
    forged_name("good", &["client \"good\" (127.0.0.1:", "taken by another client"]);
}

#[test]
fn a_name_that_would_paint_the_terminal() {
    // It says nothing more, and so is blamed by its name.
    forged_name("\x1b[31mred\r\n\u{9b}2J", &["client \" [31mred   2J\" (127.0.0.1:"]);
}

#[test]
fn a_name_of_a_megabyte() {
    let name = "\x1b]".repeat(1 << 19);
    forged_name(&name, &["client \" ] ] ", "..."]);
}

#[test]
fn a_header_of_thirty_megabytes_that_says_nothing() {
    let session = Session::start();
    let join =
        ClientMessage::Join { name: "bad".into(), examples: 1.0, header: vec![b' '; 30 << 20] };
    let _bad = joined(&session, &join);
    session.fails_because_of_bad(&["its manifest is not valid"]);
}

// ---- The host ----

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs a script with the program as `$0`, in a mount namespace of its own where that is allowed.
fn in_namespace(script: &str, arguments: &[&str]) -> Option<Process> {
    let try_it = || std::process::Command::new("unshare").args(["-m", "true"]).output();
    if !is_root() || !try_it().is_ok_and(|done| done.status.success()) {
        eprintln!("skipped: a mount namespace takes root and the right to mount");
        return None;
    }
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["-m", "sh", "-ec", script, env!("CARGO_BIN_EXE_fedlane")]).args(arguments);
    Some(Process::spawn(&mut unshare))
}

/// Runs the program under a limit that `ulimit` sets.
fn limited(limit: &str, arguments: &[&str]) -> Process {
    let script = format!("ulimit {limit} && exec \"$0\" \"$@\"");
    let mut shell = std::process::Command::new("sh");
    Process::spawn(shell.args(["-c", &script, env!("CARGO_BIN_EXE_fedlane")]).args(arguments))
}

#[test]
fn a_port_in_use() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = Process::start(&["serve", "--clients=1", "--listen", &address]);
    serve.fails(SOON, &["cannot listen on", &address, "--listen"]);
}

#[test]
fn an_address_to_listen_on_that_is_none() {
    for address in ["nonsense", "256.1.1.1:80", "127.0.0.1:99999", "192.0.2.1:7733"] {
        let serve = Process::start(&["serve", "--clients=1", "--listen", address]);
        serve.fails(Duration::from_secs(30), &["cannot listen on", address]);
    }
}

#[test]
fn a_model_that_no_memory_holds() {
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let client = Process::join(&address, "a", &["--generate", "1000GiB"]);
    serve.fails(SOON, &["cannot be made", "leaves"]);
    client.fails(SOON, &[&address, "cannot be made"]);
}

#[test]
fn too_few_open_files_for_the_aggregator() {
    let serve = limited("-n 20", &["serve", "--listen=127.0.0.1:0", "--clients=40"]);
    serve.fails(SOON, &["open files", "ulimit -n"]);
}

#[test]
fn too_few_open_files_for_a_client() {
    let (serve, address) = Process::serve(&["--clients=1", "--streams=40", "--deadline-ms=600"]);
    let args = ["join", &address, "--name=a", "--generate=64MiB"];
    let client = limited("-n 20", &args);
    client.fails(SOON, &["Too many open files"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:"]);
}

#[test]
fn too_little_address_space() {
    // From too little to start a thread to enough for all but the region.
    for kib in [60_000, 80_000, 120_000, 200_000, 260_000] {
        let limit = format!("-v {kib}");
        let args = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--deadline-ms=600"];
        let serve = limited(&limit, &args);
        let Some(line) = serve.try_line("listening on ") else {
            serve.fails(SOON, &[]);
            continue;
        };
        let address = line.split([' ', ',']).nth(2).unwrap().to_string();
        let client = Process::join(&address, "a", &["--generate", "256MiB"]);
        serve.fails(SOON, &[]);
        client.fails(SOON, &[]);
    }
}

/// A session runs to its end with this done to /dev/shm before.
fn without_shared_memory(how: &str) {
    let script = format!("{how}; exec \"$0\" demo --generate=8MiB --clients=2");
    if let Some(demo) = in_namespace(&script, &[]) {
        demo.succeeds(Duration::from_secs(30));
    }
}

#[test]
fn a_tiny_dev_shm_does_not_matter() {
    without_shared_memory("mount -t tmpfs -o size=64k none /dev/shm");
}

#[test]
fn an_absent_dev_shm_does_not_matter() {
    without_shared_memory("mount -t tmpfs none /dev; mknod -m 666 /dev/null c 1 3");
}

#[test]
fn a_full_disk_shows_before_anything_is_sent() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let script = "mount -t tmpfs -o size=1m none \"$1\"; cd \"$1\"; status=0
        \"$0\" serve --listen=127.0.0.1:0 --clients=1 --deadline-ms=600 --output=mean || status=$?
        test -z \"$(ls -A)\" || status=9; exit $status";
    let Some(serve) = in_namespace(script, &[disk]) else { return };
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let client = Process::join(address, "a", &["--generate", "4MiB"]);
    serve.fails(SOON, &["no room for mean", "bytes"]);
    client.fails(SOON, &[address, "no room for mean"]);
}

#[test]
fn a_full_disk_of_a_client() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().to_str().unwrap();
    let script = "mount -t tmpfs -o size=1m none \"$1\"; cd \"$1\"; status=0
        \"$0\" join \"$2\" --name=a --generate=4MiB --output=mean || status=$?
        test -z \"$(ls -A)\" || status=9; exit $status";
    let (serve, address) = Process::serve(&["--clients=1", "--deadline-ms=600"]);
    let Some(client) = in_namespace(script, &[disk, &address]) else { return };
    client.fails(SOON, &["no room for mean", "bytes"]);
    serve.fails(SOON, &["client \"a\" (127.0.0.1:", "no room for mean"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    for output in ["/proc/mean", "/nowhere/mean", "/dev/null", "/", "/tmp/"] {
        let args = ["serve", "--listen=127.0.0.1:0", "--clients=1", "--output", output];
        Process::start(&args).fails(SOON, &[output]);
        let args = ["--generate=1KiB", "--output", output];
        Process::join("127.0.0.1:1", "a", &args).fails(SOON, &[output]);
    }
}

#[test]
fn a_read_only_directory() {
    let directory = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o ro,size=1m none \"$1\"
        exec \"$0\" serve --listen=127.0.0.1:0 --clients=1 --output=\"$1/mean\"";
    let path = directory.path().to_str().unwrap();
    let Some(serve) = in_namespace(script, &[path]) else { return };
    serve.fails(SOON, &[path, "Read-only"]);
}

#[test]
fn outputs_that_nobody_reads() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let mut children = Vec::new();
    for args in [
        vec!["serve", "--listen", &address, "--clients=2"],
        vec!["join", &address, "--name=a", "--generate=1MiB"],
        vec!["join", &address, "--name=b", "--generate=1MiB"],
    ] {
        let mut child =
            command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        children.push(child);
        let until = Instant::now() + SOON;
        // A stranger makes it warn; and says when it listens.
        while children.len() == 1 && TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_memory_cgroup_that_is_too_small() {
    let Some(group) = Cgroup::new(96 << 20) else { return };
    let script = "echo $$ > \"$1\"; exec \"$0\" serve --listen=127.0.0.1:0 --clients=1";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-ec", script, env!("CARGO_BIN_EXE_fedlane")]).arg(group.0.join("cgroup.procs"));
    let serve = Process::spawn(&mut shell);
    let line = serve.await_line("listening on ");
    let address = line.split([' ', ',']).nth(2).unwrap();
    let client = Process::join(address, "a", &["--generate", "256MiB"]);
    serve.fails(SOON, &["cannot be made", "the cgroup limit in "]);
    client.fails(SOON, &[address, "the cgroup limit in "]);
}

/// A memory cgroup, removed in the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(limit_bytes: u64) -> Option<Cgroup> {
        let name = format!("fedlane-test-{}", std::process::id());
        for (root, file) in [("memory", "memory.limit_in_bytes"), ("", "memory.max")] {
            let directory = Path::new("/sys/fs/cgroup").join(root).join(&name);
            if std::fs::create_dir(&directory).is_ok() {
                let group = Cgroup(directory);
                if std::fs::write(group.0.join(file), limit_bytes.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        eprintln!("skipped: no memory cgroup can be made here");
        None
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Where a process is still ending in it, it stays, empty.
        let _ = std::fs::remove_dir(&self.0);
    }
}

// ---- Slow, but alive ----

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
    let (serve, address) = Process::serve(&["--clients=2", "--deadline-ms=300"]);
    let join = |name, train| {
        Process::join(&address, name, &["--model", path, "--deadline-ms=300", "--train", train])
    };
    let (quick, slow) = (join("quick", "true"), join("slow", "sleep 2"));
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
    for (ours, theirs) in [("300", "60000"), ("60000", "300")] {
        let ours = format!("--deadline-ms={ours}");
        let (serve, address) = Process::serve(&["--clients=2", &ours]);
        let theirs = format!("--deadline-ms={theirs}");
        let join = |name| Process::join(&address, name, &["--generate=1MiB", &theirs]);
        let first = join("first");
        // Much longer than the shorter deadline.
        std::thread::sleep(Duration::from_millis(1500));
        let second = join("second");
        serve.succeeds(SOON);
        first.succeeds(SOON);
        second.succeeds(SOON);
    }
}
