//! One example of everything that crosses the wire, with its parts named.

use fedlane::manifest::Manifest;
use fedlane::topology::Shape;
use fedlane::verdict::OnNonfinite;
use fedlane::wire::checksum::{chunk_sum, model_digest};
use fedlane::wire::frame;
use fedlane::wire::hello::{Answer, Channel, DataHello, Opening, Preamble, Reply, Secret};
use fedlane::wire::keys::{Binding, ControlKeys, Side};
use fedlane::wire::message::{
    AggregatorMessage, ChunkRange, ClientMessage, Leaf, Plan, RingTerms, Turn, WireSum,
};
use serde::Serialize;
use zerocopy::IntoBytes;

/// The model of the examples: two numbers of four bytes.
pub const HEADER: &[u8] = br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;

/// A model of three runs, for the fuzzers.
pub const THREE_DTYPES: &[u8] = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},"b":{"dtype":"F64","shape":[2],"data_offsets":[12,28]},"c":{"dtype":"BOOL","shape":[],"data_offsets":[28,29]},"empty":{"dtype":"I8","shape":[0,4],"data_offsets":[29,29]}}  "#;

const SESSION: [u8; 16] = *b"session-of-16-by";
const TICKET: [u8; 32] = *b"a secret ticket of 32 bytes, yes";

/// What two peers of an exchange know of each other.
pub const SECRET: [u8; 32] = *b"a secret of 32 bytes, never sent";

const CLIENT_NONCE: [u8; 32] = *b"a random number of the client...";
const AGGREGATOR_NONCE: [u8; 32] = *b"a random number of the listener.";

/// Some bytes of the protocol.
pub struct Example {
    /// `preamble-...`, `client-message-...` and so on.
    pub name: String,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// How many bytes each part has, and what it is.
    parts: Vec<(usize, &'static str)>,
}

impl Example {
    fn new(name: &str, bytes: &[u8], parts: &[(usize, &'static str)]) -> Example {
        let covered: usize = parts.iter().map(|(length, _)| length).sum();
        assert_eq!(covered, bytes.len(), "the parts of {name} cover it");
        Example { name: name.to_owned(), bytes: bytes.to_vec(), parts: parts.to_vec() }
    }

    fn message(name: &str, message: &impl Serialize, parts: &[(usize, &'static str)]) -> Example {
        let parts = [&[(4, "length of what follows")], parts].concat();
        Example::new(name, &frame::encode(message).unwrap(), &parts)
    }

    /// Sixteen bytes a line, each part on lines of its own.
    pub fn drawing(&self) -> String {
        let mut rest = &self.bytes[..];
        let mut lines = Vec::new();
        for (length, note) in &self.parts {
            let (part, after) = rest.split_at(*length);
            rest = after;
            for (index, row) in part.chunks(16).enumerate() {
                let hex: Vec<String> = row.iter().map(|byte| format!("{byte:02x}")).collect();
                let note = if index == 0 { note } else { "" };
                lines.push(format!("{:<48} {note}", hex.join(" ")).trim_end().to_owned());
            }
        }
        lines.join("\n")
    }
}

/// Everything, in the order of docs/WIRE.md.
pub fn examples() -> Vec<Example> {
    let mut examples = fixed();
    examples.extend(client_messages());
    examples.extend(aggregator_messages());
    examples
}

fn fixed() -> Vec<Example> {
    let data = (Channel::Data, "channel: data");
    let keys = ControlKeys::new(&Secret::new(SECRET), &CLIENT_NONCE, &AGGREGATOR_NONCE);
    let opening = Opening { place: Secret::new(SECRET).place(), nonce: CLIENT_NONCE };
    let reply = Reply { nonce: AGGREGATOR_NONCE, proof: keys.aggregator_proof() };
    let alive = frame::encode(&ClientMessage::Alive).unwrap();
    let mut seal = keys.seal(Side::Client);
    let sealed = [seal.close(&alive), seal.close(&alive)].concat();
    let sealed_parts = [
        (4, "length of the message"),
        (16, "seal of the length"),
        (1, "message 4: alive"),
        (16, "seal of the message"),
        (4, "the same, as the second message"),
        (16, "seal of the length"),
        (1, "message 4: alive"),
        (16, "seal of the message"),
    ];
    let key = keys.binding().key(&TICKET);
    let hello = DataHello::new(SESSION, 1, 2, &key);
    let hello_parts = [(16, "session"), (4, "client 1"), (4, "stream 2"), (32, "proof")];
    let admission = hello.admission(&key);
    let admission_parts = [
        (8, "magic"),
        (2, "version 3"),
        (1, "channel: data"),
        (1, "answer: admitted"),
        (32, "proof"),
    ];
    vec![
        preamble(
            "preamble-control",
            (Channel::Control, "channel: control"),
            Answer::Admitted,
            "no answer",
        ),
        Example::new("opening", opening.as_bytes(), &[(16, "place"), (32, "the client's number")]),
        Example::new("reply", reply.as_bytes(), &[(32, "the aggregator's number"), (32, "proof")]),
        Example::new("client-proof", &keys.client_proof(), &[(32, "proof")]),
        preamble(
            "answer-no-place",
            (Channel::Control, "channel: control"),
            Answer::NoPlace,
            "answer: no such place",
        ),
        preamble(
            "answer-tls-wanted",
            (Channel::Control, "channel: control"),
            Answer::TlsWanted,
            "answer: TLS wanted",
        ),
        Example::new("sealed-messages", &sealed, &sealed_parts),
        preamble("preamble-data", data, Answer::Admitted, "no answer"),
        Example::new("data-hello", hello.as_bytes(), &hello_parts),
        Example::new("answer-admitted", admission.as_bytes(), &admission_parts),
        preamble("answer-wrong-ticket", data, Answer::WrongTicket, "answer: wrong ticket"),
        preamble("answer-taken", data, Answer::Taken, "answer: taken"),
        preamble("answer-expired", data, Answer::Expired, "answer: expired"),
    ]
}

fn preamble(
    name: &str,
    (channel, channel_note): (Channel, &'static str),
    answer: Answer,
    answer_note: &'static str,
) -> Example {
    let parts = [(8, "magic"), (2, "version 3"), (1, channel_note), (1, answer_note)];
    Example::new(name, Preamble::answering(channel, answer).as_bytes(), &parts)
}

/// In the order of their numbers.
fn client_messages() -> Vec<Example> {
    let example = |name: &str, message: ClientMessage, parts: &[(usize, &'static str)]| {
        Example::message(&format!("client-message-{name}"), &message, parts)
    };
    let join = ClientMessage::Join {
        name: "site-a".into(),
        examples: 600.0,
        header: HEADER.to_vec(),
        place: Secret::OPEN.place(),
        resumes: None,
    };
    let call = ClientMessage::Call { name: "site-a".into(), place: Secret::new(SECRET).place() };
    vec![
        example(
            "0-join",
            join,
            &[
                (1, "message 0: join"),
                (1, "name: 6 bytes"),
                (6, "\"site-a\""),
                (8, "examples: 600.0"),
                (1, "header: 54 bytes"),
                (54, "the JSON, as it stands in the file"),
                (16, "place: the only session"),
                (1, "resumes nothing"),
            ],
        ),
        example(
            "1-uploading",
            ClientMessage::Uploading { round: 1 },
            &[(1, "message 1: uploading"), (1, "round 1")],
        ),
        example(
            "2-sums",
            ClientMessage::Sums { first: 0, sums: vec![sum()] },
            &[
                (1, "message 2: sums"),
                (1, "from chunk 0 on"),
                (1, "1 sum"),
                (8, "sum of the chunk"),
            ],
        ),
        example(
            "3-received",
            ClientMessage::Received { round: 1, digest: digest() },
            &[(1, "message 3: received"), (1, "round 1"), (32, "digest of what came")],
        ),
        example("4-alive", ClientMessage::Alive, &[(1, "message 4: alive")]),
        example(
            "5-failed",
            ClientMessage::Failed { reason: "disk full".into() },
            &[(1, "message 5: failed"), (1, "reason: 9 bytes"), (9, "\"disk full\"")],
        ),
        example(
            "6-call",
            call,
            &[(1, "message 6: call"), (1, "name: 6 bytes"), (6, "\"site-a\""), (16, "place")],
        ),
        example(
            "7-want",
            ClientMessage::Want { stream: 1, chunks: chunks() },
            &[
                (1, "message 7: want"),
                (1, "stream 1"),
                (1, "2 ranges"),
                (3, "chunks 5 to 299"),
                (2, "chunk 1"),
            ],
        ),
        example(
            "8-prove",
            ClientMessage::Prove { stream: 0, chunks: vec![ChunkRange { first: 0, end: 5 }] },
            &[(1, "message 8: prove"), (1, "stream 0"), (1, "1 range"), (2, "chunks 0 to 4")],
        ),
        example("9-ready", ready(), READY_PARTS),
        example(
            "10-reduced",
            ClientMessage::Reduced { round: 1, attempt: 0, digest: digest() },
            &[
                (1, "message 10: reduced"),
                (1, "round 1"),
                (1, "attempt 0"),
                (32, "digest of the mean"),
            ],
        ),
        example(
            "11-broken",
            ClientMessage::Broken {
                round: 1,
                attempt: 0,
                from_left: true,
                to_right: false,
                stalled: false,
                reason: "it was closed".into(),
            },
            &[
                (1, "message 11: broken"),
                (1, "round 1"),
                (1, "attempt 0"),
                (1, "nothing usable comes from the left"),
                (1, "what goes to the right does go"),
                (1, "silence was not the only sign"),
                (1, "reason: 13 bytes"),
                (13, "\"it was closed\""),
            ],
        ),
        example("12-join-as-edge", join_as_edge(), JOIN_AS_EDGE_PARTS),
        example("13-leaves", leaves(), LEAVES_PARTS),
    ]
}

/// In the order of their numbers.
fn aggregator_messages() -> Vec<Example> {
    let example = |name: &str, message: AggregatorMessage, parts: &[(usize, &'static str)]| {
        Example::message(&format!("aggregator-message-{name}"), &message, parts)
    };
    vec![
        example("0-plan", AggregatorMessage::Plan(plan()), PLAN_PARTS),
        example(
            "1-download",
            AggregatorMessage::Download { round: 0, digest: digest() },
            &[
                (1, "message 1: download"),
                (1, "round 0: the initial model"),
                (32, "digest of the model"),
            ],
        ),
        example(
            "2-sums",
            AggregatorMessage::Sums { first: 0, sums: vec![sum()] },
            &[
                (1, "message 2: sums"),
                (1, "from chunk 0 on"),
                (1, "1 sum"),
                (8, "sum of the chunk"),
            ],
        ),
        example(
            "3-upload",
            AggregatorMessage::Upload { round: 1 },
            &[(1, "message 3: upload"), (1, "round 1")],
        ),
        example(
            "4-applied",
            AggregatorMessage::Applied { round: 300, left_out: None },
            &[(1, "message 4: applied"), (2, "round 300"), (1, "its update counts")],
        ),
        example(
            "4-applied-without",
            AggregatorMessage::Applied { round: 300, left_out: Some("it was late".into()) },
            &[
                (1, "message 4: applied"),
                (2, "round 300"),
                (1, "its update does not count"),
                (1, "why: 11 bytes"),
                (11, "\"it was late\""),
            ],
        ),
        example("5-done", AggregatorMessage::Done, &[(1, "message 5: done")]),
        example("6-alive", AggregatorMessage::Alive, &[(1, "message 6: alive")]),
        example(
            "7-failed",
            AggregatorMessage::Failed { reason: "out of memory".into() },
            &[(1, "message 7: failed"), (1, "reason: 13 bytes"), (13, "\"out of memory\"")],
        ),
        example(
            "8-want",
            AggregatorMessage::Want { stream: 1, chunks: chunks() },
            &[
                (1, "message 8: want"),
                (1, "stream 1"),
                (1, "2 ranges"),
                (3, "chunks 5 to 299"),
                (2, "chunk 1"),
            ],
        ),
        example(
            "9-prove",
            AggregatorMessage::Prove { stream: 0, chunks: vec![ChunkRange { first: 0, end: 5 }] },
            &[(1, "message 9: prove"), (1, "stream 0"), (1, "1 range"), (2, "chunks 0 to 4")],
        ),
        example(
            "10-ring",
            AggregatorMessage::Ring(RingTerms {
                session: SESSION,
                rounds: 300,
                deadline_ms: 30_000,
                header: Vec::new(),
                shape: Shape::Ring,
                on_nonfinite: OnNonfinite::Reject,
            }),
            &[
                (1, "message 10: ring"),
                (16, "session"),
                (2, "rounds: 300"),
                (3, "deadline_ms: 30,000"),
                (1, "header: none"),
                (1, "shape: ring"),
                (1, "on_nonfinite: reject"),
            ],
        ),
        example("11-turn", AggregatorMessage::Turn(turn()), TURN_PARTS),
        example(
            "12-halt",
            AggregatorMessage::Halt { round: 1, attempt: 0, reason: "site-c is gone".into() },
            &[
                (1, "message 12: halt"),
                (1, "round 1"),
                (1, "attempt 0"),
                (1, "reason: 14 bytes"),
                (14, "\"site-c is gone\""),
            ],
        ),
        example(
            "13-fold",
            AggregatorMessage::Fold { round: 1, scale: Some(-11), seed: Some(digest()) },
            &[
                (1, "message 13: fold"),
                (1, "round 1"),
                (2, "scale: 2 to the power of -11"),
                (1, "there are sums to begin from"),
                (32, "their digest"),
            ],
        ),
    ]
}

const JOIN_AS_EDGE_PARTS: &[(usize, &str)] = &[
    (1, "message 12: join as edge"),
    (1, "name: 6 bytes"),
    (6, "\"edge-a\""),
    (8, "examples: 800.0"),
    (1, "header: 54 bytes"),
    (54, "the JSON, as it stands in the file"),
    (16, "place: the only session"),
    (1, "resumes nothing"),
];

fn join_as_edge() -> ClientMessage {
    ClientMessage::JoinAsEdge {
        name: "edge-a".into(),
        examples: 800.0,
        header: HEADER.to_vec(),
        place: Secret::OPEN.place(),
        resumes: None,
    }
}

const LEAVES_PARTS: &[(usize, &str)] = &[
    (1, "message 13: leaves"),
    (1, "round 1"),
    (2, "scale: 2 to the power of -11"),
    (1, "it waits for no turn"),
    (1, "no leaf before these"),
    (1, "2 leaves"),
    (1, "name: 6 bytes"),
    (6, "\"site-a\""),
    (8, "examples: 600.0"),
    (1, "its update is in the sums"),
    (1, "name: 6 bytes"),
    (6, "\"site-b\""),
    (8, "examples: 200.0"),
    (1, "its update is not"),
    (1, "reason: 7 bytes"),
    (7, "\"is gone\""),
    (1, "these are the last"),
];

fn leaves() -> ClientMessage {
    let leaf = |name: &str, examples, left_out: Option<&str>| Leaf {
        name: name.into(),
        examples,
        left_out: left_out.map(Into::into),
    };
    ClientMessage::Leaves {
        round: 1,
        scale: Some(-11),
        in_order: false,
        first: 0,
        leaves: vec![leaf("site-a", 600.0, None), leaf("site-b", 200.0, Some("is gone"))],
        last: true,
    }
}

const READY_PARTS: &[(usize, &str)] = &[
    (1, "message 9: ready"),
    (1, "round 1"),
    (1, "attempt 0"),
    (8, "examples: 600.0"),
    (1, "host: where this comes from"),
    (3, "port 40,000"),
    (32, "key, veiled"),
    (1, "certificate: none"),
];

fn ready() -> ClientMessage {
    let key = binding().veil(Side::Client, 1, 0, &TICKET);
    ClientMessage::Ready {
        round: 1,
        attempt: 0,
        examples: 600.0,
        host: String::new(),
        port: 40_000,
        key,
        certificate: Vec::new(),
    }
}

const TURN_PARTS: &[(usize, &str)] = &[
    (1, "message 11: turn"),
    (1, "round 1"),
    (1, "attempt 0"),
    (1, "rank 1"),
    (1, "2 ranks"),
    (1, "rank 0: name: 6 bytes"),
    (6, "\"site-a\""),
    (8, "examples: 600.0"),
    (1, "rank 1: name: 6 bytes"),
    (6, "\"site-b\""),
    (8, "examples: 200.0"),
    (1, "streams: 2"),
    (3, "chunk_bytes: 524,288"),
    (1, "right neighbour: 14 bytes"),
    (14, "\"10.0.0.1:40000\""),
    (32, "its key, veiled"),
    (1, "its certificate: none"),
];

fn turn() -> Turn {
    Turn {
        round: 1,
        attempt: 0,
        rank: 1,
        ranks: vec![("site-a".into(), 600.0), ("site-b".into(), 200.0)],
        streams: 2,
        chunk_bytes: 524_288,
        right: "10.0.0.1:40000".into(),
        right_key: binding().veil(Side::Aggregator, 1, 0, &TICKET),
        right_certificate: Vec::new(),
    }
}

/// Of the control channel of the examples.
fn binding() -> Binding {
    ControlKeys::new(&Secret::new(SECRET), &CLIENT_NONCE, &AGGREGATOR_NONCE).binding()
}

const PLAN_PARTS: &[(usize, &str)] = &[
    (1, "message 0: plan"),
    (16, "session"),
    (1, "client 1"),
    (32, "ticket"),
    (1, "streams: 4"),
    (3, "chunk_bytes: 262,144"),
    (2, "rounds: 300"),
    (3, "deadline_ms: 30,000"),
    (1, "header: none"),
];

fn plan() -> Plan {
    Plan {
        session: SESSION,
        client: 1,
        ticket: TICKET,
        streams: 4,
        chunk_bytes: 262_144,
        rounds: 300,
        deadline_ms: 30_000,
        header: Vec::new(),
    }
}

/// The model's only chunk: the numbers 1.0 and 2.0.
const CHUNK: [u8; 8] = [0, 0, 0x80, 0x3f, 0, 0, 0, 0x40];

fn chunks() -> Vec<ChunkRange> {
    vec![ChunkRange { first: 5, end: 300 }, ChunkRange { first: 1, end: 2 }]
}

fn sum() -> WireSum {
    chunk_sum(&CHUNK).to_le_bytes()
}

fn digest() -> [u8; 32] {
    let layout = Manifest::from_header(HEADER).unwrap().layout_digest();
    model_digest(&layout, 262_144, &[chunk_sum(&CHUNK)])
}
