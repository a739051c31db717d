//! Each fault really happens, at its byte, and to its connection only.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fedlane_testing::{Channel, Dice, Direction, Fault, Kind, Plan, Proxy, Scope, Then, Which};

/// What must come comes within this.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is held back has not come after this.
const A_WHILE: Duration = Duration::from_millis(100);

/// The first bytes of a control and of a data channel.
const CONTROL: &[u8] = b"fedlane\0\x02\0\x01\0";
const DATA: &[u8] = b"fedlane\0\x02\0\x02\0";
const START: u64 = 12;

/// A proxy before a listener that stands for an aggregator.
struct Setup {
    listener: TcpListener,
    proxy: Proxy,
}

impl Setup {
    fn new(plan: Plan) -> Setup {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap(), plan);
        Setup { listener, proxy }
    }

    fn dial(&self) -> TcpStream {
        let socket = TcpStream::connect(self.proxy.address()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    fn accept(&self) -> TcpStream {
        let (socket, _) = self.listener.accept().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    /// A client and its aggregator, which has read the first bytes.
    fn open(&self, first: &[u8]) -> (TcpStream, TcpStream) {
        let mut client = self.dial();
        client.write_all(first).unwrap();
        let mut aggregator = self.accept();
        assert_eq!(read(&mut aggregator, first.len()), first);
        (client, aggregator)
    }
}

fn read(socket: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    socket.read_exact(&mut read).unwrap();
    read
}

/// Whether nothing comes for a while.
fn is_silent(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(A_WHILE)).unwrap();
    let read = socket.read(&mut [0]);
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn assert_reset(socket: &mut TcpStream) {
    assert_eq!(socket.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

fn assert_closed(socket: &mut TcpStream) {
    assert_eq!(socket.read(&mut [0]).unwrap(), 0);
}

/// On the first data channel, upwards, three bytes after its preamble.
fn third(kind: Kind) -> Plan {
    Plan::one(Which::Data(0), Direction::Up, START + 3, kind)
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_faults_bytes_pass_and_are_counted() {
    let setup = Setup::new(Plan::honest());
    let (mut client, mut aggregator) = setup.open(CONTROL);
    aggregator.write_all(b"welcome").unwrap();
    assert_eq!(read(&mut client, 7), b"welcome");
    drop(client);
    assert_closed(&mut aggregator);
    let (mut client, mut aggregator) = setup.open(DATA);
    let bytes: Vec<u8> = (0..1_000_000u32).map(|index| index as u8).collect();
    let sent = bytes.clone();
    let sender = std::thread::spawn(move || client.write_all(&sent).map(|()| client));
    assert!(read(&mut aggregator, bytes.len()) == bytes);
    sender.join().unwrap().unwrap();
    // Bytes are counted when they have gone, so the reader may be first.
    let all = START + 1_000_000;
    wait_for("all bytes", || setup.proxy.passed(Channel::Data, Direction::Up) == all);
    let [control, data] = setup.proxy.traffic()[..] else { panic!() };
    assert_eq!(
        (control.channel, control.to_aggregator, control.to_client),
        (Channel::Control, 12, 7)
    );
    assert_eq!(
        (data.channel, data.left_client, data.to_aggregator),
        (Channel::Data, 1_000_012, 1_000_012)
    );
    assert_eq!(setup.proxy.passed(Channel::Data, Direction::Up), 1_000_012);
    assert_eq!(setup.proxy.fired(), 0);
}

#[test]
fn one_end_may_close_its_half() {
    let setup = Setup::new(Plan::honest());
    let (mut client, mut aggregator) = setup.open(CONTROL);
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_closed(&mut aggregator);
    aggregator.write_all(b"late").unwrap();
    assert_eq!(read(&mut client, 4), b"late");
}

#[test]
fn a_drop_closes_both_ends_at_its_byte() {
    let setup = Setup::new(third(Kind::Drop(Scope::Connection)));
    // Not of this kind, so it stays.
    let (mut control, mut other) = setup.open(CONTROL);
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abcdef").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    assert_closed(&mut aggregator);
    // Its unread bytes may make a reset of what is a close for the other side.
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    assert_eq!(setup.proxy.fired(), 1);
    control.write_all(b"x").unwrap();
    assert_eq!(read(&mut other, 1), b"x");
    // And the next one of the same kind goes through.
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abcdef").unwrap();
    assert_eq!(read(&mut aggregator, 6), b"abcdef");
}

#[test]
fn a_drop_may_hit_all() {
    let setup = Setup::new(third(Kind::Drop(Scope::All)));
    let (_control, mut other) = setup.open(CONTROL);
    let (mut client, _aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_closed(&mut other);
}

#[test]
fn a_reset_resets_both_ends() {
    let setup = Setup::new(third(Kind::Reset(Scope::Connection)));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    assert_reset(&mut aggregator);
    assert_reset(&mut client);
}

#[test]
fn a_stall_holds_one_connection_for_its_time() {
    let time = Duration::from_millis(400);
    let setup = Setup::new(third(Kind::Stall(Scope::Connection, Some(time))));
    let (mut client, mut aggregator) = setup.open(DATA);
    let began = Instant::now();
    client.write_all(b"abcd").unwrap();
    aggregator.write_all(b"xy").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    let (mut control, mut other) = setup.open(CONTROL);
    control.write_all(b"z").unwrap();
    assert_eq!(read(&mut other, 1), b"z");
    assert_eq!(read(&mut aggregator, 1), b"d");
    assert!(began.elapsed() >= time);
    assert_eq!(read(&mut client, 2), b"xy");
}

#[test]
fn a_cable_that_is_pulled_hides_also_the_end() {
    let setup = Setup::new(third(Kind::Stall(Scope::All, None)));
    let (mut control, mut other) = setup.open(CONTROL);
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abcd").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    assert!(is_silent(&mut aggregator));
    control.write_all(b"z").unwrap();
    drop((client, control));
    assert!(is_silent(&mut other) && is_silent(&mut aggregator));
    // New ones can be dialled, and nothing comes of it.
    let mut late = setup.dial();
    late.write_all(CONTROL).unwrap();
    assert!(is_silent(&mut late));
    drop(setup.proxy);
    assert_closed(&mut other);
}

#[test]
fn a_delay_makes_every_piece_late() {
    let time = Duration::from_millis(60);
    let setup = Setup::new(third(Kind::Delay(time)));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    for _ in 0..3 {
        let began = Instant::now();
        client.write_all(b"d").unwrap();
        assert_eq!(read(&mut aggregator, 1), b"d");
        assert!(began.elapsed() >= time);
    }
}

#[test]
fn a_throttle_keeps_its_rate() {
    let setup = Setup::new(third(Kind::Throttle { bytes_s: 10_000 }));
    let (mut client, mut aggregator) = setup.open(DATA);
    let began = Instant::now();
    client.write_all(&[7; 3003]).unwrap();
    assert_eq!(read(&mut aggregator, 3003), [7; 3003]);
    assert!(began.elapsed() >= Duration::from_millis(290));
}

#[test]
fn a_split_makes_single_bytes() {
    let setup = Setup::new(third(Kind::Split(100)));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(&[7; 103]).unwrap();
    wait_for("all bytes", || setup.proxy.passed(Channel::Data, Direction::Up) == START + 103);
    assert_eq!(read(&mut aggregator, 103), [7; 103]);
    // The first bytes and what comes before the fault may be one piece or two.
    let pieces = setup.proxy.traffic()[0].pieces_to_aggregator;
    assert!((101..=104).contains(&pieces), "{pieces} pieces");
}

#[test]
fn a_merge_makes_one_piece_of_many() {
    let setup = Setup::new(third(Kind::Merge));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    for byte in b"defghijk" {
        client.write_all(&[*byte]).unwrap();
    }
    assert_eq!(read(&mut aggregator, 8), b"defghijk");
    let pieces = setup.proxy.traffic()[0].pieces_to_aggregator;
    assert!((2..10).contains(&pieces), "{pieces} pieces");
}

#[test]
fn a_connection_may_be_overtaken() {
    let plan = Plan::one(Which::Nth(0), Direction::Up, 0, Kind::Hold(PATIENCE));
    let setup = Setup::new(plan);
    let (mut first, mut second) = (setup.dial(), setup.dial());
    first.write_all(&[CONTROL, b"first"].concat()).unwrap();
    second.write_all(&[CONTROL, b"later"].concat()).unwrap();
    let mut came = setup.accept();
    assert_eq!(read(&mut came, 17)[12..], *b"later");
    let mut came = setup.accept();
    assert_eq!(read(&mut came, 17)[12..], *b"first");
}

#[test]
fn a_flip_changes_one_bit_of_one_byte() {
    let setup = Setup::new(third(Kind::Flip(1)));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"aaaaaaaa").unwrap();
    assert_eq!(read(&mut aggregator, 8), b"aaacaaaa");
}

#[test]
fn a_flip_downwards_leaves_what_goes_up() {
    let plan = Plan::one(Which::Data(0), Direction::Down, 2, Kind::Flip(1));
    let setup = Setup::new(plan);
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"aaaa").unwrap();
    assert_eq!(read(&mut aggregator, 4), b"aaaa");
    aggregator.write_all(b"aaaa").unwrap();
    assert_eq!(read(&mut client, 4), b"aaca");
}

#[test]
fn a_truncation_ends_one_direction_only() {
    let setup = Setup::new(third(Kind::Truncate));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"abcdef").unwrap();
    assert_eq!(read(&mut aggregator, 3), b"abc");
    assert_closed(&mut aggregator);
    aggregator.write_all(b"still").unwrap();
    assert_eq!(read(&mut client, 5), b"still");
    wait_for("the rest is swallowed", || setup.proxy.traffic()[0].left_client == START + 6);
    assert_eq!(setup.proxy.traffic()[0].to_aggregator, START + 3);
}

#[test]
fn a_call_comes_before_its_byte() {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let call = move || {
        counter.fetch_add(1, Ordering::SeqCst);
    };
    let setup = Setup::new(third(Kind::Call(Arc::new(call))));
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"ab").unwrap();
    assert_eq!(read(&mut aggregator, 2), b"ab");
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    client.write_all(b"cd").unwrap();
    assert_eq!(read(&mut aggregator, 2), b"cd");
    assert_eq!((calls.load(Ordering::SeqCst), setup.proxy.fired()), (1, 0));
}

#[test]
fn after_a_fault_new_connections_may_be_refused() {
    let plan = third(Kind::Reset(Scope::Connection));
    let setup = Setup::new(Plan { then: Then::Refuse, ..plan });
    let (mut client, _aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_reset(&mut client);
    wait_for("refused", || {
        let refused = TcpStream::connect(setup.proxy.address());
        refused.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    });
}

#[test]
fn after_a_fault_new_connections_may_be_ignored() {
    let plan = third(Kind::Reset(Scope::Connection));
    let setup = Setup::new(Plan { then: Then::Silent, ..plan });
    let (mut client, _aggregator) = setup.open(DATA);
    client.write_all(b"abc").unwrap();
    assert_reset(&mut client);
    let mut late = setup.dial();
    late.write_all(CONTROL).unwrap();
    assert!(is_silent(&mut late));
}

#[test]
fn connections_may_go_to_another_aggregator() {
    let setup = Setup::new(Plan::honest());
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    setup.proxy.set_target(other.local_addr().unwrap());
    setup.dial().write_all(CONTROL).unwrap();
    assert_eq!(read(&mut other.accept().unwrap().0, 12), CONTROL);
}

#[test]
fn faults_of_one_connection_happen_in_their_order() {
    let fault =
        |at_byte, kind| Fault { which: Which::Nth(0), direction: Direction::Up, at_byte, kind };
    let faults = vec![fault(START + 5, Kind::Truncate), fault(START + 1, Kind::Flip(0))];
    let setup = Setup::new(Plan { faults, then: Then::Open });
    let (mut client, mut aggregator) = setup.open(DATA);
    client.write_all(b"bbbbbbb").unwrap();
    assert_eq!(read(&mut aggregator, 5), b"bcbbb");
    assert_closed(&mut aggregator);
    assert_eq!(setup.proxy.fired(), 2);
}

#[test]
fn the_same_seed_throws_the_same_dice() {
    let throw = |seed| {
        let mut dice = Dice::new(seed);
        [(); 20].map(|()| dice.below(1000))
    };
    assert_eq!(throw(1), throw(1));
    assert_ne!(throw(1), throw(2));
    assert!(throw(3).iter().all(|number| *number < 1000));
}
