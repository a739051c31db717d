//! A message from arbitrary bytes: it is refused, or it survives being sent on.
#![no_main]

use fedlane::limits;
use fedlane::wire::frame::{self, LENGTH_BYTES};
use fedlane::wire::message::{AggregatorMessage, ClientMessage};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

fuzz_target!(|bytes: &[u8]| {
    send_on::<ClientMessage>(bytes);
    send_on::<AggregatorMessage>(bytes);
});

/// Bytes are compared, not messages: a number of examples may be NaN. Nor are the first bytes
/// compared, because a number in them may be spelled longer than it need be.
fn send_on<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(message) = frame::decode::<T>(bytes) else { return };
    let sent = frame::encode(&message).expect("what came in a frame fits into one");
    let (prefix, body) = sent.split_at(LENGTH_BYTES);
    let prefix = prefix.try_into().expect("four bytes");
    let length = frame::length(prefix, limits::MAX_FRAME_BYTES).expect("below the limit");
    assert_eq!(length, body.len() as u64);
    assert!(body.len() <= bytes.len(), "no spelling is shorter");
    let again: T = frame::decode(body).expect("what was sent can be read");
    assert_eq!(frame::encode(&again).expect("as before"), sent);
}
