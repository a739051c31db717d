//! A control channel of arbitrary bytes, read as an aggregator and as a client would.
#![no_main]

use fedlane::limits;
use fedlane::wire::frame;
use fedlane::wire::message::{AggregatorMessage, ClientMessage};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

fuzz_target!(|bytes: &[u8]| {
    read_all::<ClientMessage>(bytes);
    read_all::<AggregatorMessage>(bytes);
});

/// Reads until the channel ends or makes no sense. What was understood is the same session
/// when it is spelled again.
fn read_all<T: Serialize + DeserializeOwned>(mut bytes: &[u8]) {
    let mut spelled = Vec::new();
    let mut messages = 0;
    while let Some((message, rest)) = next::<T>(bytes) {
        spelled.extend(frame::encode(&message).expect("what came in a frame fits into one"));
        bytes = rest;
        messages += 1;
    }
    let mut spelled = &spelled[..];
    for _ in 0..messages {
        let (_, rest) = next::<T>(spelled).expect("a message that was read before");
        spelled = rest;
    }
    assert!(spelled.is_empty());
}

fn next<T: DeserializeOwned>(bytes: &[u8]) -> Option<(T, &[u8])> {
    let (prefix, rest) = bytes.split_first_chunk()?;
    let length = frame::length(*prefix, limits::MAX_FRAME_BYTES).ok()?;
    let (body, rest) = rest.split_at_checked(length as usize)?;
    Some((frame::decode(body).ok()?, rest))
}
