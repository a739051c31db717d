//! The first bytes of a connection: whatever they say, only the ticket lets a data channel in.
#![no_main]

use std::sync::LazyLock;

use fedlane::wire::hello::{DataHello, Nonce, Preamble, Secret, SessionId, Ticket};
use fedlane::wire::keys::ControlKeys;
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes, IntoBytes};

// Those of the examples, so that one of the seeds is let in.
const SESSION: SessionId = *b"session-of-16-by";
const TICKET: Ticket = *b"a secret ticket of 32 bytes, yes";
const SECRET: Secret = Secret::new(*b"a secret of 32 bytes, never sent");
const CLIENT: Nonce = *b"a random number of the client...";
const AGGREGATOR: Nonce = *b"a random number of the listener.";

static KEY: LazyLock<Ticket> =
    LazyLock::new(|| ControlKeys::new(&SECRET, &CLIENT, &AGGREGATOR).binding().key(&TICKET));

fuzz_target!(|bytes: &[u8]| {
    let Ok((preamble, rest)) = Preamble::read_from_prefix(bytes) else { return };
    if let (Ok(channel), Ok(answer)) = (preamble.channel(), preamble.answer()) {
        // Every accepted preamble is one of those that we send.
        assert_eq!(preamble, Preamble::answering(channel, answer));
    }
    let Ok((hello, _)) = DataHello::read_from_prefix(rest) else { return };
    let honest = DataHello::new(SESSION, hello.client(), hello.stream(), &KEY);
    assert!(honest.is_admitted_by(&SESSION, &KEY));
    assert_eq!(hello.is_admitted_by(&SESSION, &KEY), hello == honest);
    assert_eq!(hello.as_bytes().len(), 56);
});
