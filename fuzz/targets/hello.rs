//! The first bytes of a connection: whatever they say, only the ticket lets a data channel in.
#![no_main]

use fedlane::wire::hello::{DataHello, Preamble, SessionId, Ticket};
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes, IntoBytes};

// Those of the examples, so that one of the seeds is let in.
const SESSION: SessionId = *b"session-of-16-by";
const TICKET: Ticket = *b"a secret ticket of 32 bytes, yes";

fuzz_target!(|bytes: &[u8]| {
    let Ok((preamble, rest)) = Preamble::read_from_prefix(bytes) else { return };
    if let (Ok(channel), Ok(answer)) = (preamble.channel(), preamble.answer()) {
        // Every accepted preamble is one of those that we send.
        assert_eq!(preamble, Preamble::answering(channel, answer));
    }
    let Ok((hello, _)) = DataHello::read_from_prefix(rest) else { return };
    let honest = DataHello::new(SESSION, hello.client(), hello.stream(), &TICKET);
    assert!(honest.is_admitted_by(&SESSION, &TICKET));
    assert_eq!(hello.is_admitted_by(&SESSION, &TICKET), hello == honest);
    assert_eq!(hello.as_bytes().len(), 56);
});
