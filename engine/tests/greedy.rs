//! What one client can make an aggregator hold, send and keep open has bounds.

mod honest;

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fedlane::aggregator::{Aggregator, AggregatorConfig, Session};
use fedlane::control::{ControlChannel, Reader, Writer};
use fedlane::limits::MAX_FRAME_BYTES;
use fedlane::link::Link;
use fedlane::source::generator::Generator;
use fedlane::wire::hello::{DataHello, Secret};
use fedlane::wire::message::{AggregatorMessage, ChunkRange, ClientMessage};

use honest::{honest, model};

/// Whatever waits so long hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn entries(directory: &str) -> usize {
    Path::new(directory).read_dir().unwrap().count()
}

/// A control connection that has joined as "bad".
fn joined(address: SocketAddr) -> ControlChannel {
    let link = Link::plain(TcpStream::connect(address).unwrap());
    let channel = ControlChannel::open(link, &Secret::OPEN, PATIENCE).unwrap();
    let (header, place) = (model().header().to_vec(), Secret::OPEN.place());
    let join =
        ClientMessage::Join { name: "bad".into(), examples: 1.0, header, place, resumes: None };
    channel.writer.send(&join).unwrap();
    channel
}

/// A client that is one of one, up to its data channels.
struct Agreed {
    reader: Reader,
    writer: Arc<Writer>,
    _streams: Vec<TcpStream>,
}

impl Agreed {
    fn join(address: SocketAddr) -> Agreed {
        let ControlChannel { mut reader, writer, binding } = joined(address);
        let AggregatorMessage::Plan(plan) = next(&mut reader) else { panic!("no plan") };
        let key = binding.key(&plan.ticket);
        let open = |stream| {
            let link = Link::plain(TcpStream::connect(address).unwrap());
            let socket = TcpStream::from(link.as_fd().try_clone_to_owned().unwrap());
            let hello = DataHello::new(plan.session, plan.client, stream, &key);
            let until = Instant::now() + PATIENCE;
            fedlane::channel::open(link, &hello, &key, until).unwrap().unwrap();
            socket
        };
        let streams = (0..plan.streams).map(open).collect();
        Agreed { reader, writer, _streams: streams }
    }
}

/// The next message that is no sign of life.
fn next(reader: &mut Reader) -> AggregatorMessage {
    loop {
        match reader.read(MAX_FRAME_BYTES).unwrap() {
            AggregatorMessage::Alive => {}
            message => return message,
        }
    }
}

/// A session with this model to send, and one client.
fn session_of_one() -> (JoinHandle<Session>, SocketAddr) {
    let config = AggregatorConfig {
        streams: 2,
        deadline: PATIENCE,
        reconnect: Duration::ZERO,
        ..Default::default()
    };
    let aggregator = Aggregator::bind("127.0.0.1:0", config).unwrap();
    let address = aggregator.address();
    (std::thread::spawn(move || aggregator.gather(Some(model())).unwrap()), address)
}

/// Each message of it is valid, and there is nobody who listens: the session's owner does something else.
#[test]
fn a_flood_of_messages_ends_the_connection_before_it_fills_the_memory() {
    let (gathering, address) = session_of_one();
    let client = Agreed::join(address);
    let mut session = gathering.join().unwrap();
    let chunks = vec![ChunkRange { first: 0, end: 1 }; 4096];
    let flood = ClientMessage::Want { stream: 0, chunks };
    // 8 KiB each. What sockets take and nobody reads comes on top.
    let sent = (0..10_000).take_while(|_| client.writer.send(&flood).is_ok()).count();
    assert!(sent < 10_000, "all of the flood was taken");
    let error = session.round().unwrap_err().to_string();
    assert!(error.contains("client \"bad\" (127.0.0.1:"), "{error}");
}

/// The same while somebody listens.
#[test]
fn chunks_that_are_asked_for_again_and_again_are_not_sent() {
    let (gathering, address) = session_of_one();
    let mut client = Agreed::join(address);
    let mut session = gathering.join().unwrap();
    let broadcast =
        std::thread::spawn(move || session.send_initial(&Generator::new(model(), 1)).unwrap_err());
    assert!(matches!(next(&mut client.reader), AggregatorMessage::Download { round: 0, .. }));
    for _ in 0..9 {
        let chunks = vec![ChunkRange { first: 0, end: 1 }];
        // The last ones may find the connection closed.
        let _ = client.writer.send(&ClientMessage::Prove { stream: 0, chunks });
    }
    let error = broadcast.join().unwrap().to_string();
    assert!(error.contains("chunks of stream 0 more often than a transfer takes"), "{error}");
}

/// A client that joins again and again leaves no connection behind, though nobody sends anything for long.
#[test]
fn a_client_that_comes_again_and_again_holds_one_connection() {
    let config = AggregatorConfig {
        clients: 2,
        min_clients: Some(1),
        streams: 2,
        // So long that signs of life, which also find dead connections, are rare.
        deadline: PATIENCE,
        reconnect: Duration::from_secs(1),
        ..Default::default()
    };
    let aggregator = Aggregator::bind("127.0.0.1:0", config).unwrap();
    let address = aggregator.address();
    let gathering = std::thread::spawn(move || aggregator.gather(Some(model())).unwrap());
    let good = honest(address, "good", PATIENCE);
    let bad = Agreed::join(address);
    let mut session = gathering.join().unwrap();
    let rounds = std::thread::spawn(move || {
        session.round()?;
        session.broadcast()?;
        session.finish()
    });
    drop(bad);
    let (mut first, mut held) = (0, 0);
    for number in 0..200 {
        drop(joined(address));
        held = entries("/proc/self/fd");
        first = if number == 20 { held } else { first };
    }
    assert!(held < first + 40, "{held} descriptors, {first} before");
    rounds.join().unwrap().unwrap();
    good.join().unwrap().unwrap();
}
