//! Every byte of the protocol: golden bytes, the drawings of docs/WIRE.md, and what the decoders
//! refuse.

mod wire_examples;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fedlane::error::WireError;
use fedlane::limits;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::topology::Shape;
use fedlane::verdict::OnNonfinite;
use fedlane::wire::checksum::{chunk_sum, model_digest};
use fedlane::wire::frame::{self, LENGTH_BYTES};
use fedlane::wire::hello::{
    Answer, Channel, DataAnswer, DataHello, MAGIC, Preamble, Secret, VERSION,
};
use fedlane::wire::keys::{ControlKeys, Side};
use fedlane::wire::message::{AggregatorMessage, ChunkRange, ClientMessage, Plan, RingTerms, Turn};
use proptest::collection::vec;
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use zerocopy::FromBytes;

use wire_examples::{Example, examples};

fn from_root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

#[test]
fn bytes_equal_the_golden_ones() {
    for example in examples() {
        insta::assert_snapshot!(example.name.as_str(), example.drawing());
    }
}

/// The document shows each example in a block ```` ```hex name ````.
#[test]
fn the_document_shows_the_golden_bytes() {
    let text = std::fs::read_to_string(from_root("docs/WIRE.md")).unwrap();
    let mut shown = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("```hex ") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            shown.push((name.to_owned(), block.join("\n")));
        }
    }
    let drawn: Vec<_> = examples().iter().map(|e| (e.name.clone(), e.drawing())).collect();
    for (name, drawing) in &drawn {
        let block = shown.iter().find(|(shown, _)| shown == name);
        let (_, block) = block.unwrap_or_else(|| panic!("docs/WIRE.md has no block {name}"));
        assert_eq!(block, drawing, "block {name} of docs/WIRE.md");
    }
    assert_eq!(shown.len(), drawn.len(), "docs/WIRE.md has a block that is no example");
}

#[test]
fn the_document_names_the_numbers_in_force() {
    let text = std::fs::read_to_string(from_root("docs/WIRE.md")).unwrap();
    let numbers: [(&str, u64); 25] = [
        ("MAX_FRAME_BYTES", limits::MAX_FRAME_BYTES),
        ("MAX_SHORT_FRAME_BYTES", limits::MAX_SHORT_FRAME_BYTES),
        ("MAX_UNHEARD_BYTES", limits::MAX_UNHEARD_BYTES),
        ("MAX_ASKED", limits::MAX_ASKED as u64),
        ("MAX_JOINED_BYTES", limits::MAX_JOINED_BYTES),
        ("MAX_LATE", limits::MAX_LATE as u64),
        ("MAX_HEADER_BYTES", limits::MAX_HEADER_BYTES),
        ("MAX_TENSORS", limits::MAX_TENSORS as u64),
        ("MAX_TENSOR_NAME_BYTES", limits::MAX_TENSOR_NAME_BYTES as u64),
        ("MAX_TENSOR_DIMS", limits::MAX_TENSOR_DIMS as u64),
        ("MAX_MODEL_BYTES", limits::MAX_MODEL_BYTES),
        ("MAX_CHUNKS", limits::MAX_CHUNKS as u64),
        ("MIN_CHUNK_BYTES", limits::MIN_CHUNK_BYTES),
        ("MAX_CHUNK_BYTES", limits::MAX_CHUNK_BYTES),
        ("SUMS_PER_MESSAGE", limits::SUMS_PER_MESSAGE as u64),
        ("MAX_CLIENTS", limits::MAX_CLIENTS as u64),
        ("MAX_RANKS", limits::MAX_RANKS as u64),
        ("MAX_LEAVES", limits::MAX_LEAVES as u64),
        ("MAX_CERTIFICATE_BYTES", limits::MAX_CERTIFICATE_BYTES as u64),
        ("MAX_STREAMS", limits::MAX_STREAMS as u64),
        ("MAX_SERVED", limits::MAX_SERVED as u64),
        ("MAX_ROUNDS", limits::MAX_ROUNDS.into()),
        ("MIN_DEADLINE_MS", limits::MIN_DEADLINE_MS),
        ("MAX_DEADLINE_MS", limits::MAX_DEADLINE_MS),
        ("MAX_VISITORS", limits::MAX_VISITORS as u64),
    ];
    for (name, number) in numbers {
        let row = text.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("docs/WIRE.md does not list {name}"));
        let cell = row.split('|').nth(2).unwrap().trim().replace(',', "");
        assert_eq!(cell, number.to_string(), "{name} in docs/WIRE.md");
    }
}

/// The fuzzers start from the examples. FEDLANE_WRITE_SEEDS=1 writes them anew.
#[test]
fn the_seeds_of_the_fuzzers_are_the_examples() {
    for (target, name, bytes) in seeds(&examples()) {
        let path = from_root("fuzz/seeds").join(target).join(&name);
        if std::env::var_os("FEDLANE_WRITE_SEEDS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let found = std::fs::read(&path).unwrap_or_default();
        assert!(found == bytes, "fuzz/seeds/{target}/{name}: run with FEDLANE_WRITE_SEEDS=1");
    }
}

fn seeds(examples: &[Example]) -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for side in ["client", "aggregator"] {
        let message = format!("{side}-message-");
        let frames = examples.iter().filter(|example| example.name.starts_with(&message));
        for example in frames.clone() {
            seeds.push(("frame", example.name.clone(), example.bytes[LENGTH_BYTES..].to_vec()));
        }
        let session: Vec<u8> = frames.flat_map(|example| example.bytes.clone()).collect();
        seeds.push(("control", side.to_owned(), session));
    }
    let bytes = |name| &examples.iter().find(|example| example.name == name).unwrap().bytes[..];
    seeds.push(("hello", "control".to_owned(), bytes("preamble-control").to_vec()));
    let data = [bytes("preamble-data"), bytes("data-hello")].concat();
    seeds.push(("hello", "data".to_owned(), data));
    seeds.push(("manifest", "one-tensor".to_owned(), wire_examples::HEADER.to_vec()));
    seeds.push(("manifest", "three-dtypes".to_owned(), wire_examples::THREE_DTYPES.to_vec()));
    // A U8 tensor of 4 elements, a BF16 one of 3, an F32 one of none.
    let gapless = [[0, 0, 4], [1, 4, 3], [2, 10, 0]].concat();
    seeds.push(("layout", "gapless".to_owned(), gapless));
    seeds
}

#[test]
fn a_checksum_is_crc64_nvme() {
    // The check value of the catalogue of CRC algorithms.
    assert_eq!(chunk_sum(b"123456789"), 0xae8b_1486_0a79_9888);
}

#[test]
fn a_digest_follows_its_definition() {
    let (layout, sums) = ([7; 32], [1, 0xae8b_1486_0a79_9888]);
    let mut hashed = layout.to_vec();
    hashed.extend_from_slice(&262_144_u64.to_le_bytes());
    hashed.extend(sums.iter().flat_map(|sum: &u64| sum.to_le_bytes()));
    let expected = blake3::derive_key("fedlane 2026 model digest", &hashed);
    assert_eq!(model_digest(&layout, 262_144, &sums), expected);
}

#[test]
fn a_layout_digest_follows_its_definition() {
    let mut hashed = b"fedlane layout 1".to_vec();
    for text in ["w", "F32"] {
        hashed.extend((text.len() as u64).to_le_bytes());
        hashed.extend(text.bytes());
    }
    // One dimension of 2, at bytes 0 to 8.
    hashed.extend([1_u64, 2, 0, 8].iter().flat_map(|number| number.to_le_bytes()));
    let manifest = Manifest::from_header(wire_examples::HEADER).unwrap();
    assert_eq!(manifest.layout_digest(), *blake3::hash(&hashed).as_bytes());
}

#[test]
fn the_documents_example_is_cut_as_it_says() {
    let tensor = ("w".to_owned(), Dtype::F32, vec![250_000]);
    let manifest = Manifest::from_tensors([tensor], &BTreeMap::new()).unwrap();
    let chunks = manifest.chunks(262_144).unwrap();
    let lengths: Vec<usize> = (0..chunks.len()).map(|index| chunks.get(index).length()).collect();
    assert_eq!(lengths, [262_144, 262_144, 262_144, 213_568]);
    let streams: Vec<_> = chunks.lanes(2).iter().map(|lane| chunks.bytes_of(lane)).collect();
    assert_eq!(streams, [0..524_288, 524_288..1_000_000]);
}

#[test]
fn a_preamble_tells_who_does_not_speak_the_protocol() {
    let read = |bytes: &[u8; 12]| Preamble::read_from_bytes(bytes).unwrap();
    let mut bytes = *b"fedlane\0\x03\0\x01\0";
    assert_eq!(read(&bytes), Preamble::new(Channel::Control));
    for theirs in [2, 4] {
        bytes[8] = theirs as u8;
        assert_eq!(read(&bytes).channel(), Err(WireError::Version { theirs, ours: VERSION }));
    }
    bytes[8..11].copy_from_slice(&[3, 0, 3]);
    assert_eq!(read(&bytes).channel(), Err(WireError::Channel { other: 3 }));
    bytes[11] = 6;
    assert_eq!(read(&bytes).answer(), Err(WireError::Answer { other: 6 }));
    let first = "GET / HT".to_owned();
    assert_eq!(read(b"GET / HTTP/1").channel(), Err(WireError::NotFedlane { first }));
}

#[test]
fn every_bit_of_a_data_hello_is_proven() {
    let (session, ticket) = ([3; 16], [4; 32]);
    let hello = DataHello::new(session, 5, 6, &ticket);
    let bytes = zerocopy::IntoBytes::as_bytes(&hello).to_vec();
    assert!(hello.is_admitted_by(&session, &ticket));
    assert!(!hello.is_admitted_by(&session, &[5; 32]));
    assert!(!hello.is_admitted_by(&[4; 16], &ticket));
    for bit in 0..bytes.len() * 8 {
        let mut forged = bytes.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        let forged = DataHello::read_from_bytes(&forged).unwrap();
        assert!(!forged.is_admitted_by(&session, &ticket), "bit {bit}");
    }
}

#[test]
fn every_bit_of_an_admission_is_proven() {
    let (session, key) = ([3; 16], [4; 32]);
    let hello = DataHello::new(session, 5, 6, &key);
    let answer = hello.admission(&key);
    assert!(answer.is_of(&hello, &key));
    assert!(!answer.is_of(&hello, &[5; 32]));
    for other in [(6, 6), (5, 7)] {
        let other = DataHello::new(session, other.0, other.1, &key);
        assert!(!answer.is_of(&other, &key));
    }
    let bytes = zerocopy::IntoBytes::as_bytes(&answer).to_vec();
    for bit in 12 * 8..bytes.len() * 8 {
        let mut forged = bytes.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        let forged = DataAnswer::read_from_bytes(&forged).unwrap();
        assert!(!forged.is_of(&hello, &key), "bit {bit}");
    }
    // Nobody can send a hello back as its answer.
    let mirrored: [u8; 32] = zerocopy::IntoBytes::as_bytes(&hello)[24..].try_into().unwrap();
    assert!(!DataAnswer::admitted(mirrored).is_of(&hello, &key));
}

#[test]
fn a_place_and_keys_follow_their_definitions() {
    let secret = Secret::new(wire_examples::SECRET);
    let name = blake3::derive_key("fedlane 2026 place", &wire_examples::SECRET);
    assert_eq!(secret.place(), name[..16]);
    assert_eq!(Secret::OPEN.place(), [0; 16]);
    let keys = ControlKeys::new(&secret, &[1; 32], &[2; 32]);
    let made_of = [&wire_examples::SECRET[..], &[1; 32], &[2; 32]].concat();
    let base = blake3::derive_key("fedlane 2026 control channel", &made_of);
    let part = |label: &str| *blake3::keyed_hash(&base, label.as_bytes()).as_bytes();
    assert_eq!(keys.aggregator_proof(), part("the aggregator knows"));
    assert_eq!(keys.client_proof(), part("the client knows"));
    let key = blake3::keyed_hash(&part("data channels"), &[4; 32]);
    assert_eq!(keys.binding().key(&[4; 32]), *key.as_bytes());
    let sealed = keys.seal(Side::Client).close(&[1, 0, 0, 0, 9]);
    let seal = |part: u8, bytes: &[u8], key: [u8; 32]| {
        let made_of = [&0_u64.to_le_bytes()[..], &[part], bytes].concat();
        blake3::keyed_hash(&key, &made_of).as_bytes()[..16].to_vec()
    };
    let key = part("from the client");
    let head = [vec![1, 0, 0, 0], seal(0, &[1, 0, 0, 0], key)].concat();
    assert_eq!(sealed, [head, vec![9], seal(1, &[9], key)].concat());
}

/// Whoever knows all but one of what keys are made of knows nothing.
#[test]
fn keys_need_the_secret_and_both_numbers() {
    let secret = Secret::new([1; 32]);
    let keys = ControlKeys::new(&secret, &[2; 32], &[3; 32]);
    for wrong in [
        ControlKeys::new(&Secret::new([9; 32]), &[2; 32], &[3; 32]),
        ControlKeys::new(&Secret::OPEN, &[2; 32], &[3; 32]),
        ControlKeys::new(&secret, &[9; 32], &[3; 32]),
        ControlKeys::new(&secret, &[2; 32], &[9; 32]),
        ControlKeys::new(&secret, &[3; 32], &[2; 32]),
    ] {
        assert!(!keys.is_aggregator(&wrong.aggregator_proof()));
        assert!(!keys.is_client(&wrong.client_proof()));
        let (key, other) = (keys.binding().key(&[4; 32]), wrong.binding().key(&[4; 32]));
        assert!(!DataHello::new([3; 16], 5, 6, &other).is_admitted_by(&[3; 16], &key));
    }
    // What one side says proves nothing when it is sent back.
    assert!(!keys.is_client(&keys.aggregator_proof()));
    assert!(!keys.is_aggregator(&keys.client_proof()));
    let mirrored = keys.seal(Side::Client).close(&[1, 0, 0, 0, 9]);
    assert_eq!(open(&mut keys.seal(Side::Aggregator), &mirrored), Err(WireError::Seal));
}

fn open(seal: &mut frame::Seal, sealed: &[u8]) -> Result<Vec<u8>, WireError> {
    let (head, rest) = sealed.split_first_chunk().unwrap();
    let bytes = seal.open_head(head, limits::MAX_FRAME_BYTES)?;
    assert_eq!(bytes as usize + frame::SEAL_BYTES, rest.len());
    Ok(seal.open_message(rest)?.to_vec())
}

#[test]
fn a_changed_repeated_or_moved_message_is_refused() {
    let keys = ControlKeys::new(&Secret::new([1; 32]), &[2; 32], &[3; 32]);
    let frame = frame::encode(&ClientMessage::Uploading { round: 7 }).unwrap();
    let mut writer = keys.seal(Side::Client);
    let (first, second) = (writer.close(&frame), writer.close(&frame));
    let mut reader = keys.seal(Side::Client);
    assert_eq!(open(&mut reader, &second), Err(WireError::Seal), "one was left out");
    for bit in 0..first.len() * 8 {
        let mut forged = first.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(open(&mut reader, &forged), Err(WireError::Seal), "bit {bit}");
    }
    assert_eq!(open(&mut reader, &first).unwrap(), frame[LENGTH_BYTES..]);
    assert_eq!(open(&mut reader, &first), Err(WireError::Seal), "it came twice");
    assert_eq!(open(&mut reader, &second).unwrap(), frame[LENGTH_BYTES..]);
}

/// A secret in a log would open its place.
#[test]
fn a_secret_is_not_shown() {
    let shown = format!("{:?}", Secret::new([0xab; 32]));
    assert!(!shown.contains("ab, ab") && !shown.contains("171, 171"), "{shown}");
}

#[test]
fn a_length_above_the_limit_is_refused() {
    let limit = limits::MAX_FRAME_BYTES;
    let prefix = |bytes: u64| (bytes as u32).to_le_bytes();
    assert_eq!(frame::length(prefix(limit), limit), Ok(limit));
    for bytes in [limit + 1, u32::MAX.into()] {
        let refused = Err(WireError::TooLong { bytes, limit });
        assert_eq!(frame::length(prefix(bytes), limit), refused);
    }
}

#[test]
fn the_longest_header_fits_and_a_longer_message_is_not_sent() {
    let join = |bytes: u64| ClientMessage::Join {
        name: "n".repeat(limits::MAX_SHOWN_CHARS * 4),
        examples: 1.0,
        header: vec![b' '; bytes as usize],
        place: [7; 16],
        resumes: None,
    };
    assert!(frame::encode(&join(limits::MAX_HEADER_BYTES)).is_ok());
    let refused = frame::encode(&join(limits::MAX_FRAME_BYTES));
    assert!(matches!(refused, Err(WireError::TooLong { .. })));
}

/// A message may claim any length of what is in it. If memory were taken on its word, these
/// would end the test.
#[test]
fn a_length_inside_a_message_that_lies_is_refused() {
    let claim = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let joins_with = |head: &[u8]| [head, &claim].concat();
    let header = [&[0, 0][..], &[0; 8]].concat();
    for lie in [
        joins_with(&[0]),
        joins_with(&header),
        joins_with(&[2, 0]),
        joins_with(&[5]),
        joins_with(&[6]),
    ] {
        assert!(matches!(decode_client(&lie), Err(WireError::Decode { .. })), "{lie:?}");
    }
    for lie in [joins_with(&[2, 0]), joins_with(&[7])] {
        assert!(matches!(decode_aggregator(&lie), Err(WireError::Decode { .. })), "{lie:?}");
    }
}

#[test]
fn the_next_variant_is_refused() {
    assert!(matches!(decode_client(&[7]), Err(WireError::Decode { .. })));
    assert!(matches!(decode_aggregator(&[8]), Err(WireError::Decode { .. })));
}

fn decode_client(bytes: &[u8]) -> Result<ClientMessage, WireError> {
    frame::decode(bytes)
}

fn decode_aggregator(bytes: &[u8]) -> Result<AggregatorMessage, WireError> {
    frame::decode(bytes)
}

/// The message comes back from its bytes, and from nothing shorter or longer.
fn assert_exact<T>(message: &T)
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let encoded = frame::encode(message).unwrap();
    let (prefix, bytes) = encoded.split_first_chunk().unwrap();
    assert_eq!(frame::length(*prefix, limits::MAX_FRAME_BYTES), Ok(bytes.len() as u64));
    assert_eq!(frame::decode::<T>(bytes).as_ref(), Ok(message));
    for end in 0..bytes.len() {
        let cut = frame::decode::<T>(&bytes[..end]);
        assert!(matches!(cut, Err(WireError::Decode { .. })), "{message:?} cut at {end}");
    }
    for extra in [0, 1, 0xff] {
        let longer = [bytes, &[extra]].concat();
        assert_eq!(frame::decode::<T>(&longer), Err(WireError::Trailing { bytes: 1 }));
    }
}

/// Random messages, long enough that lengths take more than one byte.
fn client_messages() -> impl Strategy<Value = ClientMessage> {
    use ClientMessage::{
        Alive, Broken, Call, Failed, Join, Prove, Ready, Received, Reduced, Sums, Uploading, Want,
    };
    let examples = any::<f64>().prop_filter("NaN equals nothing", |number| !number.is_nan());
    let weight = examples.clone();
    let resumes = proptest::option::of(any::<[u8; 32]>());
    let join = (".{0,40}", examples, vec(any::<u8>(), 0..300), any::<[u8; 16]>(), resumes);
    prop_oneof![
        join.prop_map(|(name, examples, header, place, resumes)| Join {
            name,
            examples,
            header,
            place,
            resumes
        }),
        any::<u32>().prop_map(|round| Uploading { round }),
        (any::<u32>(), vec(any::<[u8; 8]>(), 0..200))
            .prop_map(|(first, sums)| Sums { first, sums }),
        (any::<u32>(), any::<[u8; 32]>()).prop_map(|(round, digest)| Received { round, digest }),
        Just(Alive),
        ".{0,40}".prop_map(|reason| Failed { reason }),
        (".{0,40}", any::<[u8; 16]>()).prop_map(|(name, place)| Call { name, place }),
        (any::<u32>(), chunks()).prop_map(|(stream, chunks)| Want { stream, chunks }),
        (any::<u32>(), chunks()).prop_map(|(stream, chunks)| Prove { stream, chunks }),
        (any::<(u32, u32)>(), weight, ".{0,40}", any::<u16>(), any::<[u8; 32]>(), der()).prop_map(
            |((round, attempt), examples, host, port, key, certificate)| Ready {
                round,
                attempt,
                examples,
                host,
                port,
                key,
                certificate,
            }
        ),
        any::<(u32, u32, [u8; 32])>().prop_map(|(round, attempt, digest)| Reduced {
            round,
            attempt,
            digest
        }),
        (any::<(u32, u32, bool, bool, bool)>(), ".{0,40}").prop_map(
            |((round, attempt, from_left, to_right, stalled), reason)| Broken {
                round,
                attempt,
                from_left,
                to_right,
                stalled,
                reason,
            }
        ),
    ]
}

fn turns() -> impl Strategy<Value = Turn> {
    let weight = any::<f64>().prop_filter("NaN equals nothing", |number| !number.is_nan());
    let ranks = vec((".{0,10}", weight), 0..70);
    let numbers = any::<(u32, u32, u32, u32, u64)>();
    (numbers, ranks, ".{0,40}", any::<[u8; 32]>(), der()).prop_map(
        |(numbers, ranks, right, right_key, right_certificate)| {
            let (round, attempt, rank, streams, chunk_bytes) = numbers;
            Turn {
                round,
                attempt,
                rank,
                ranks,
                streams,
                chunk_bytes,
                right,
                right_key,
                right_certificate,
            }
        },
    )
}

fn der() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..100)
}

fn terms() -> impl Strategy<Value = RingTerms> {
    let numbers = any::<([u8; 16], u32, u64)>();
    let shape = prop_oneof![Just(Shape::Ring), Just(Shape::Chain)];
    (numbers, vec(any::<u8>(), 0..300), shape).prop_map(
        |((session, rounds, deadline_ms), header, shape)| RingTerms {
            session,
            rounds,
            deadline_ms,
            header,
            shape,
            on_nonfinite: OnNonfinite::Zero,
        },
    )
}

fn chunks() -> impl Strategy<Value = Vec<ChunkRange>> {
    vec(any::<(u32, u32)>().prop_map(|(first, end)| ChunkRange { first, end }), 0..50)
}

fn plans() -> impl Strategy<Value = Plan> {
    let names = (any::<[u8; 16]>(), any::<u32>(), any::<[u8; 32]>());
    let numbers = (any::<u32>(), any::<u64>(), any::<u32>(), any::<u64>());
    let header = vec(any::<u8>(), 0..300);
    (names, numbers, header).prop_map(|((session, client, ticket), numbers, header)| {
        let (streams, chunk_bytes, rounds, deadline_ms) = numbers;
        Plan { session, client, ticket, streams, chunk_bytes, rounds, deadline_ms, header }
    })
}

fn aggregator_messages() -> impl Strategy<Value = AggregatorMessage> {
    use AggregatorMessage::{
        Alive, Applied, Done, Download, Failed, Halt, Prove, Sums, Upload, Want,
    };
    prop_oneof![
        plans().prop_map(AggregatorMessage::Plan),
        (any::<u32>(), any::<[u8; 32]>()).prop_map(|(round, digest)| Download { round, digest }),
        (any::<u32>(), vec(any::<[u8; 8]>(), 0..200))
            .prop_map(|(first, sums)| Sums { first, sums }),
        any::<u32>().prop_map(|round| Upload { round }),
        any::<(u32, Option<String>)>().prop_map(|(round, left_out)| Applied { round, left_out }),
        (any::<u32>(), chunks()).prop_map(|(stream, chunks)| Want { stream, chunks }),
        (any::<u32>(), chunks()).prop_map(|(stream, chunks)| Prove { stream, chunks }),
        Just(Done),
        Just(Alive),
        ".{0,40}".prop_map(|reason| Failed { reason }),
        terms().prop_map(AggregatorMessage::Ring),
        turns().prop_map(AggregatorMessage::Turn),
        (any::<u32>(), any::<u32>(), ".{0,40}").prop_map(|(round, attempt, reason)| Halt {
            round,
            attempt,
            reason
        }),
    ]
}

proptest! {
    #[test]
    fn client_messages_are_exact(message in client_messages()) {
        assert_exact(&message);
    }

    #[test]
    fn aggregator_messages_are_exact(message in aggregator_messages()) {
        assert_exact(&message);
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..400)) {
        let _ = decode_client(&bytes);
        let _ = decode_aggregator(&bytes);
        if let Ok((preamble, _)) = Preamble::read_from_prefix(&bytes) {
            let _ = (preamble.channel(), preamble.answer());
        }
        if let Ok((hello, _)) = DataHello::read_from_prefix(&bytes) {
            prop_assert!(!hello.is_admitted_by(&[0; 16], &[0; 32]));
        }
    }

    /// Near misses go deeper into the decoders than noise does.
    #[test]
    fn damaged_messages_never_panic(
        message in client_messages(), at in any::<prop::sample::Index>(), damage in any::<u8>()
    ) {
        let mut frame = frame::encode(&message).unwrap();
        let at = LENGTH_BYTES + at.index(frame.len() - LENGTH_BYTES);
        frame[at] ^= damage;
        let _ = decode_client(&frame[LENGTH_BYTES..]);
    }

    #[test]
    fn hellos_tell_client_and_stream(client in any::<u32>(), stream in any::<u32>()) {
        let hello = DataHello::new([1; 16], client, stream, &[2; 32]);
        prop_assert_eq!((hello.client(), hello.stream()), (client, stream));
        prop_assert!(hello.is_admitted_by(&[1; 16], &[2; 32]));
    }

    #[test]
    fn preambles_tell_channel_and_answer(data in any::<bool>(), answer in 0..3_usize) {
        let channel = if data { Channel::Data } else { Channel::Control };
        let answer = [Answer::Admitted, Answer::WrongTicket, Answer::Taken][answer];
        let preamble = Preamble::answering(channel, answer);
        prop_assert_eq!((preamble.channel(), preamble.answer()), (Ok(channel), Ok(answer)));
        prop_assert_eq!(&zerocopy::IntoBytes::as_bytes(&preamble)[..8], &MAGIC[..]);
    }
}
