//! Strangers at the port: they end nothing.

use std::io::Write;
use std::net::TcpStream;

use super::hostile::{HostileClient, Process, hello_answer, model};
use super::session::{SOON, Session};
use fedlane::control::ControlChannel;
use fedlane::link::Link;
use fedlane::wire::hello::{Answer, DataHello, Secret};
use fedlane::wire::message::Plan;

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

#[test]
fn a_web_browser_at_the_port() {
    stranger_sends(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it began with \"GET / HT\"");
}

#[test]
fn a_tls_client_at_the_port() {
    let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x1b[31m";
    stranger_sends(hello, "the peer speaks TLS and this side does not");
}

#[test]
fn another_version_at_the_port() {
    stranger_sends(b"fedlane\0\x63\x01\x01\0", "speaks version 355 of the protocol");
}

#[test]
fn a_channel_that_does_not_exist() {
    stranger_sends(b"fedlane\0\x03\0\x07\0", "channel type 7, which does not exist");
}

/// Somebody who has opened a control channel says this first, with the right seals.
fn first_frame(frame: &'static [u8], warning: &str) {
    let visit = |session: &Session| {
        let link = Link::plain(TcpStream::connect(&session.address).unwrap());
        let channel = ControlChannel::open(link, &Secret::OPEN, SOON).unwrap();
        channel.writer.send_frame(frame).unwrap();
        session.serve.await_word(warning);
    };
    strangers(visit, warning);
}

#[test]
fn a_control_channel_that_begins_with_four_gigabytes() {
    first_frame(b"\xff\xff\xff\xff", "4294967295 bytes was announced");
}

#[test]
fn a_control_channel_that_begins_with_garbage() {
    first_frame(b"\x03\0\0\0\xee\xee\xee", "bytes that are no message");
}

#[test]
fn a_control_channel_that_begins_with_something_else() {
    first_frame(b"\x01\0\0\0\x04", "not a request to join");
}

#[test]
fn a_control_channel_to_a_place_that_is_not() {
    let opening = b"fedlane\0\x03\0\x01\0a place of 16 by and a nonce of any 32 bytes, yes.";
    stranger_sends(opening, "has another secret");
}

#[test]
fn a_control_channel_without_proof() {
    const OPENING: [u8; 92] = {
        let mut bytes = [0; 92];
        let preamble = *b"fedlane\0\x03\0\x01\0";
        let mut at = 0;
        while at < preamble.len() {
            bytes[at] = preamble[at];
            at += 1;
        }
        bytes
    };
    stranger_sends(&OPENING, "could not prove that it knows the secret");
}

#[test]
fn a_data_channel_before_there_is_a_plan() {
    const HELLO: [u8; 68] = {
        let mut hello = [0; 68];
        let preamble = *b"fedlane\0\x03\0\x02\0";
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
        for part in [&b""[..], b"f", b"fedlan", b"fedlane\0\x03\0\x01\0\x10\0"] {
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
    let socket = TcpStream::connect(&session.address).unwrap();
    assert_eq!(hello_answer(&socket, &forge(&plan)), Answer::WrongTicket);
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
    let socket = TcpStream::connect(&session.address).unwrap();
    let hello = DataHello::new(plan.session, plan.client, 0, &plan.ticket);
    assert_eq!(hello_answer(&socket, &hello), Answer::Taken);
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
