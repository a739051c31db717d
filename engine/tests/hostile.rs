//! Many sessions in one process, half of which fail, leave no descriptor, no thread and no
//! memory behind.

mod honest;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fedlane::aggregator::{Aggregator, AggregatorConfig};
use fedlane::client::{Client, Task};
use fedlane::control::{ControlChannel, Heartbeat, Writer};
use fedlane::link::Link;
use fedlane::wire::hello::Secret;
use fedlane::wire::message::ClientMessage;

use honest::{config, honest, model};

const DEADLINE: Duration = Duration::from_millis(500);

/// Memory that allocator and runtime may keep between two looks.
const SLACK_KIB: u64 = 16 << 10;

/// Starts an aggregator for two clients; it gives what its session came to.
fn aggregator() -> (SocketAddr, JoinHandle<Result<(), String>>) {
    let config = AggregatorConfig {
        clients: 2,
        streams: 2,
        deadline: DEADLINE,
        reconnect: Duration::ZERO,
        ..Default::default()
    };
    let aggregator = Aggregator::bind("127.0.0.1:0", config).unwrap();
    let address = aggregator.address();
    let run = move || {
        let mut session = aggregator.gather(None)?;
        session.round()?;
        session.broadcast()?;
        session.finish().map(drop)
    };
    let run = move || run().map_err(|error: fedlane::error::AggregatorError| error.to_string());
    (address, std::thread::spawn(run))
}

/// A control connection that has joined as "bad".
fn joined(address: SocketAddr) -> (TcpStream, Arc<Writer>) {
    let socket = TcpStream::connect(address).unwrap();
    let link = Link::plain(socket.try_clone().unwrap());
    let writer = ControlChannel::open(link, &Secret::OPEN, DEADLINE).unwrap().writer;
    let header = model().header().to_vec();
    let place = Secret::OPEN.place();
    let join =
        ClientMessage::Join { name: "bad".into(), examples: 1.0, header, place, resumes: None };
    writer.send(&join).unwrap();
    (socket, writer)
}

/// What the second client does.
#[derive(Clone, Copy, Debug)]
enum Second {
    PlaysByTheRules,
    LeavesWhenAsked,
    SendsGarbage,
    SaysNothing,
    LivesAndDoesNothing,
    HasATakenName,
}

impl Second {
    fn run(self, address: SocketAddr) {
        match self {
            Second::PlaysByTheRules => honest(address, "bad", DEADLINE).join().unwrap().unwrap(),
            Second::LeavesWhenAsked => {
                let mut client = Client::join(address, config("bad", DEADLINE), &model()).unwrap();
                assert_eq!(client.next_task().unwrap(), Task::Upload { round: 1 });
            }
            Second::SendsGarbage => joined(address).0.write_all(&[0xee; 64]).unwrap(),
            Second::SaysNothing => await_end(&mut joined(address).0),
            Second::LivesAndDoesNothing => {
                let (mut socket, writer) = joined(address);
                let listeners = Arc::new(Mutex::new(vec![writer]));
                let pulse = Heartbeat::start(listeners, ClientMessage::Alive, DEADLINE).unwrap();
                await_end(&mut socket);
                drop(pulse);
            }
            Second::HasATakenName => {
                honest(address, "good", DEADLINE).join().unwrap().unwrap_err();
            }
        }
    }
}

/// Reads until the other side ends the connection.
fn await_end(socket: &mut TcpStream) {
    socket.set_read_timeout(Some(20 * DEADLINE)).unwrap();
    let read = std::io::copy(socket, &mut std::io::sink());
    let timed_out = read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!timed_out, "the connection is still open");
}

/// One session; strangers hold connections open all the while.
fn session(second: Second) {
    let (address, aggregator) = aggregator();
    let strangers: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(address).unwrap()).collect();
    let first = honest(address, "good", DEADLINE);
    second.run(address);
    let results = [aggregator.join().unwrap(), first.join().unwrap()];
    match second {
        Second::PlaysByTheRules => assert_eq!(results, [Ok(()), Ok(())]),
        // Where both have the same name, either may be the second to come.
        Second::HasATakenName => assert!(results.iter().all(Result::is_err), "{results:?}"),
        _ => {
            let [aggregator, first] = results.map(Result::unwrap_err);
            assert!(aggregator.contains("client \"bad\" (127.0.0.1:"), "{second:?}: {aggregator}");
            // The session may have ended before it let the first client in.
            assert!(first.contains(&address.to_string()), "{second:?}: {first}");
        }
    }
    drop(strangers);
}

fn entries(directory: &str) -> usize {
    Path::new(directory).read_dir().unwrap().count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Open descriptors and threads, once nothing of the last session is ending any more.
fn settled() -> (usize, usize) {
    let count = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let mut last = (count(), Instant::now());
    while last.1.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(10));
        let now = count();
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    last.0
}

#[test]
fn thirty_sessions_leave_nothing_behind() {
    const FAULTS: [Second; 5] = [
        Second::LeavesWhenAsked,
        Second::SendsGarbage,
        Second::SaysNothing,
        Second::LivesAndDoesNothing,
        Second::HasATakenName,
    ];
    let run = |sessions: usize| {
        for number in 0..sessions / 2 {
            session(Second::PlaysByTheRules);
            session(FAULTS[number % FAULTS.len()]);
        }
    };
    // The first sessions load what stays loaded.
    run(10);
    let before = settled();
    let resident = resident_kib();
    run(30);
    assert_eq!(settled(), before, "descriptors and threads");
    let grown = resident_kib().saturating_sub(resident);
    assert!(grown < SLACK_KIB, "{grown} KiB more are resident");
}
