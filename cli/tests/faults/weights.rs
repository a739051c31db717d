//! Weights and names that cannot be used.

use std::net::TcpStream;

use super::hostile::{HostileClient, Process, model};
use super::session::{SOON, Session};
use fedlane::wire::hello::Secret;
use fedlane::wire::message::ClientMessage;

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
        let _bad = joined(&session, &join(examples, model().header().to_vec()));
        session.fails_because_of_bad(&["its number of examples", text]);
    }
}

#[test]
fn a_weight_that_is_too_small_to_count() {
    let session = Session::start();
    let _bad = joined(&session, &join(f64::MIN_POSITIVE, model().header().to_vec()));
    session.fails_because_of_bad(&["its number of examples is 2.2", "too small"]);
}

fn join(examples: f64, header: Vec<u8>) -> ClientMessage {
    let (name, place) = ("bad".into(), Secret::OPEN.place());
    ClientMessage::Join { name, examples, header, place, resumes: None }
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
    let _bad = joined(&session, &join(1.0, vec![b' '; 30 << 20]));
    session.fails_because_of_bad(&["its manifest is not valid"]);
}
