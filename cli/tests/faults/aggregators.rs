//! Aggregators that lie, stall or vanish: the client ends and names them.

use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use super::hostile::{FakeAggregator, Process};
use super::session::{DEADLINE_MS, SOON, assert_empty};
use fedlane::wire::hello::Answer;
use fedlane::wire::message::{AggregatorMessage, Plan};

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
    fake_answers(b"fedlane\0\x02\0\x01\0", &["version 2 of the protocol and this is version 3"]);
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
    const GARBAGE: [u8; 76] = {
        let mut bytes = [0xde; 76];
        let preamble = *b"fedlane\0\x03\0\x01\0";
        let mut at = 0;
        while at < preamble.len() {
            bytes[at] = preamble[at];
            at += 1;
        }
        bytes
    };
    fake_answers(&GARBAGE, &["could not prove that it knows the secret"]);
}

#[test]
fn an_aggregator_that_sends_what_is_no_message() {
    let act = |listener| {
        let fake = FakeAggregator::welcome(listener);
        fake.writer.send_frame(b"\x04\0\0\0\xee\xee\xee\xee").unwrap();
        fake
    };
    fake(act, &["bytes that are no message"]);
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
        fake.say(&AggregatorMessage::Sums { first: 1 << 20, sums: vec![[0; 8]] });
    };
    fake_session(act, &["checksums of chunks that the model does not have"]);
}

#[test]
fn an_aggregator_that_is_done_before_it_has_begun() {
    fake_session(|fake| fake.say(&AggregatorMessage::Done), &["after 0 of 1 rounds"]);
}

#[test]
fn an_aggregator_that_has_averaged_what_an_earlier_process_sent() {
    let act = |fake: &mut FakeAggregator| {
        fake.say(&AggregatorMessage::Applied { round: 1, left_out: None });
        fake.say(&AggregatorMessage::Failed { reason: "news".into() });
    };
    fake_session(act, &["ended the session:", "news"]);
}

#[test]
fn an_aggregator_that_gives_dirty_reasons() {
    let reason = "\x1b]0;gone\x07\x1b[2J\r\nnews\u{85}".repeat(2_000);
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

/// A client with so much time to dial that only another rule can end it soon.
fn patient(address: &str) -> Process {
    let args = ["--generate=1MiB", "--deadline-ms=60000", "--reconnect-ms=60000"];
    Process::join(address, "victim", &args)
}

#[test]
fn an_aggregator_that_ends_in_the_middle_of_a_handshake() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let client = patient(&address);
    let (socket, _) = listener.accept().unwrap();
    drop((listener, socket));
    client.fails(SOON, &[address.as_str()]);
}

#[test]
fn an_aggregator_that_begins_again_while_a_client_waits() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let client = patient(&address);
    drop(FakeAggregator::welcome(listener));
    client.await_word("dialling again");
    std::thread::sleep(Duration::from_millis(300));
    let serve = Process::start(&["serve", "--clients=1", "--listen", &address]);
    serve.succeeds(SOON);
    client.succeeds(SOON);
}
