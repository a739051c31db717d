//! Clients that lie, stall or vanish: the session ends and every process names them.

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use super::hostile::{HostileClient, MODEL_BYTES, model};
use super::session::{DEADLINE_MS, SOON, Session};
use fedlane::manifest::{Dtype, synthetic};
use fedlane::wire::hello::Secret;
use fedlane::wire::message::{AggregatorMessage, ClientMessage};

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
        let others = bad.bytes(1);
        bad.streams[1].write_all(&others).unwrap();
    };
    hostile(act, &["do not match their checksum"]);
}

#[test]
fn a_client_that_never_announces_checksums() {
    let act = |bad: &mut HostileClient| {
        bad.await_upload();
        bad.say(&ClientMessage::Uploading { round: 1 });
        let bytes = bad.bytes(0);
        // Its connection may end before all is sent.
        let _ = bad.streams[0].write_all(&bytes);
    };
    let session = Session::start_with(&["--clients=2", "--streams=1"], MODEL_BYTES, DEADLINE_MS);
    hostile_in(session, act, &["no checksum was announced"]);
}

#[test]
fn a_client_that_announces_other_checksums_than_before() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        bad.say(&ClientMessage::Sums { first: 1, sums: vec![[0; 8]] });
    };
    hostile(act, &["the checksum of chunk 1 is not the one that was announced before"]);
}

#[test]
fn a_client_that_announces_checksums_of_a_stream_that_does_not_exist() {
    let act = |bad: &mut HostileClient| {
        bad.begin_upload();
        bad.say(&ClientMessage::Sums { first: 1 << 20, sums: vec![[0; 8]] });
    };
    hostile(act, &["checksums of chunks that the model does not have"]);
}

#[test]
fn a_client_that_announces_checksums_before_there_is_a_plan() {
    let session = Session::start();
    let mut third = HostileClient::join(&session.address, "bad", &model());
    third.await_plan();
    third.say(&ClientMessage::Sums { first: u32::MAX, sums: vec![[0; 8]; 100] });
    session.fails_because_of_bad(&["checksums of chunks that the model does not have"]);
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

/// A client that has sent a NaN of its update does `act`; the session goes on without it.
fn spoilt(act: impl Fn(&mut HostileClient)) {
    for order in ["--order=client", "--order=arrival"] {
        let args = ["--clients=2", "--streams=2", "--min-clients=1", order];
        let session = Session::start_with(&args, MODEL_BYTES, DEADLINE_MS);
        let mut bad = HostileClient::join(&session.address, "bad", &model());
        bad.await_upload();
        bad.spoil();
        bad.announce_upload();
        let bytes = bad.bytes(0);
        bad.streams[0].write_all(&bytes[..128 << 10]).unwrap();
        session.serve.await_word("the round goes on with 1 clients");
        act(&mut bad);
        session.serve.succeeds(SOON);
        session.honest.succeeds(SOON);
    }
}

#[test]
fn a_client_that_is_rejected_and_stays() {
    spoilt(|bad| {
        let bytes = bad.bytes(0);
        bad.streams[0].write_all(&bytes[128 << 10..]).unwrap();
        let others = bad.bytes(1);
        bad.streams[1].write_all(&others).unwrap();
        match bad.next().unwrap() {
            AggregatorMessage::Applied { round: 1, left_out: Some(why) } => {
                assert!(why.contains("element 0 of tensor"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        bad.take_model();
    });
}

#[test]
fn a_client_that_is_rejected_and_stands_still() {
    spoilt(|_| {});
}

#[test]
fn a_client_that_is_rejected_and_closes_a_data_connection() {
    spoilt(|bad| bad.streams[1].shutdown(Shutdown::Both).unwrap());
}

#[test]
fn a_client_that_is_rejected_and_leaves() {
    spoilt(|bad| bad.control.shutdown(Shutdown::Both).unwrap());
}

#[test]
fn a_client_that_is_rejected_and_sends_too_much() {
    spoilt(|bad| {
        for stream in [0, 1] {
            let bytes = [bad.bytes(stream), vec![0; 256 << 10]].concat();
            // It may be hung up on before all is sent.
            let _ =
                bad.streams[stream].write_all(&bytes[if stream == 0 { 128 << 10 } else { 0 }..]);
        }
    });
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
        bad.await_plan();
        bad.say(&ClientMessage::Join {
            name: "worse".into(),
            examples: 1.0,
            header: model().header().to_vec(),
            place: Secret::OPEN.place(),
            resumes: None,
        });
    };
    hostile(act, &["a message when none was due"]);
}

#[test]
fn a_client_that_says_why_it_gives_up_in_many_dirty_words() {
    let reason = "\x1b[2J\r\nout of\tmemory\u{7}\n".repeat(2500);
    let act = |bad: &mut HostileClient| {
        bad.await_plan();
        bad.say(&ClientMessage::Failed { reason });
    };
    hostile(act, &["gave up:", "out of memory"]);
}

#[test]
fn a_message_that_does_not_exist() {
    hostile_while_waiting(
        |bad| bad.say_frame(&[2, 0, 0, 0, 99, 0]),
        &["bytes that are no message"],
    );
}

#[test]
fn a_message_with_bytes_behind_it() {
    hostile_while_waiting(|bad| bad.say_frame(&[2, 0, 0, 0, 4, 0]), &["1 bytes too many"]);
}

#[test]
fn garbage_instead_of_messages() {
    let garbage: Vec<u8> = (0..10_000_u32).map(|i| (i * i + 255) as u8).collect();
    hostile_while_waiting(|bad| bad.say_bytes(&garbage), &["does not carry the right seal"]);
}

#[test]
fn a_message_of_four_gigabytes() {
    hostile_while_waiting(
        |bad| bad.say_frame(&[255; 4]),
        &["a message of 4294967295 bytes was announced"],
    );
}

#[test]
fn a_message_that_stops_in_the_middle() {
    hostile_while_waiting(|bad| bad.say_frame(&[200, 0, 0, 0, 1, 2]), &["no sign of life"]);
}

#[test]
fn a_client_that_does_not_read_the_mean() {
    let session = Session::start_with(&[], 32 << 20, 2500);
    let large = synthetic(32 << 20, Dtype::F32).unwrap();
    let mut bad = HostileClient::join(&session.address, "bad", &large);
    bad.upload();
    bad.want();
    session.serve.fails(SOON, &["client \"bad\" (127.0.0.1:", "no byte moved"]);
    session.honest.fails(SOON, &[&session.address, "client \"bad\" (127.0.0.1:"]);
}
