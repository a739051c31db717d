//! Doors: who changes a byte on the way, replays a recording or has another secret gets no session.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use fedlane::aggregator::{Aggregator, AggregatorConfig};
use fedlane::control::ControlChannel;
use fedlane::error::{ControlError, WireError};
use fedlane::limits::{MAX_FRAME_BYTES, MAX_LATE};
use fedlane::link::Link;
use fedlane::wire::hello::{Channel, Preamble, Secret};
use fedlane::wire::message::{AggregatorMessage, ClientMessage};

/// Whatever waits so long hangs.
const PATIENCE: Duration = Duration::from_secs(20);

const SECRET: Secret = Secret::new([7; 32]);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialled, listener.accept().unwrap().0)
}

/// The aggregator's end: lets a client in, hears one message, says one.
fn aggregator(socket: TcpStream, secret: Secret) -> Result<(), ControlError> {
    let (link, until) = (Link::plain(socket), Instant::now() + PATIENCE);
    assert_eq!(link.read_fixed::<Preamble>(until)?.dialled()?, Channel::Control);
    let find = |place: &_| Ok((*place == secret.place()).then_some(secret));
    let (mut channel, place) = ControlChannel::accept(link, find, until)?;
    assert_eq!(place, secret.place());
    let heard = channel.reader.read::<ClientMessage>(MAX_FRAME_BYTES)?;
    assert_eq!(heard, ClientMessage::Uploading { round: 3 });
    channel.writer.send(&AggregatorMessage::Applied { round: 3, left_out: None })
}

/// The client's end.
fn client(socket: TcpStream, secret: Secret) -> Result<(), ControlError> {
    let mut channel = ControlChannel::open(Link::plain(socket), &secret, PATIENCE)?;
    channel.writer.send(&ClientMessage::Uploading { round: 3 })?;
    let heard = channel.reader.read::<AggregatorMessage>(MAX_FRAME_BYTES)?;
    assert_eq!(heard, AggregatorMessage::Applied { round: 3, left_out: None });
    Ok(())
}

/// Passes bytes on until one side closes, and changes them as they pass; gives what came.
fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(usize, &mut u8)) -> Vec<u8> {
    let (mut passed, mut byte) = (Vec::new(), [0]);
    while matches!(from.read(&mut byte), Ok(1)) {
        change(passed.len(), &mut byte[0]);
        passed.push(byte[0]);
        if to.write_all(&byte).is_err() {
            break;
        }
    }
    // The other side may have closed before.
    let _ = to.shutdown(Shutdown::Write);
    passed
}

/// What each end came to, and what crossed in each direction.
struct Crossed {
    client: Result<(), ControlError>,
    aggregator: Result<(), ControlError>,
    there: Vec<u8>,
    back: Vec<u8>,
}

/// A session in which one bit is changed on the way: in the direction of the aggregator, or back.
fn cross(flip: Option<(bool, usize, u8)>) -> Crossed {
    let ((ours, near), (far, theirs)) = (pair(), pair());
    let flips = move |there: bool| {
        move |at: usize, byte: &mut u8| {
            if let Some((direction, place, bit)) = flip
                && (direction, place) == (there, at)
            {
                *byte ^= 1 << bit;
            }
        }
    };
    let (near_back, far_back) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    let there = thread::spawn(move || pass(near, far, flips(true)));
    let back = thread::spawn(move || pass(far_back, near_back, flips(false)));
    let listening = thread::spawn(move || aggregator(theirs, SECRET));
    let client = client(ours, SECRET);
    Crossed {
        client,
        aggregator: listening.join().unwrap(),
        there: there.join().unwrap(),
        back: back.join().unwrap(),
    }
}

#[test]
fn a_bit_that_is_changed_anywhere_ends_the_channel() {
    let whole = cross(None);
    whole.client.unwrap();
    whole.aggregator.unwrap();
    // Preamble, place and number, proof, and a message of two or three bytes in its seals.
    assert_eq!(whole.there.len(), 12 + 48 + 32 + 4 + 16 + 2 + 16);
    assert_eq!(whole.back.len(), 12 + 64 + 4 + 16 + 3 + 16);
    for (to_aggregator, length) in [(true, whole.there.len()), (false, whole.back.len())] {
        for at in 0..length {
            let bit = (at % 8) as u8;
            let crossed = cross(Some((to_aggregator, at, bit)));
            let receiver = if to_aggregator { crossed.aggregator } else { crossed.client };
            let shown = receiver.expect_err(&format!("bit {bit} of byte {at}")).to_string();
            assert!(!shown.is_empty());
        }
    }
}

#[test]
fn a_recording_opens_nothing() {
    let recorded = cross(None);
    // Of a client, played to an aggregator: it has another number now.
    let (mut ours, theirs) = pair();
    ours.write_all(&recorded.there).unwrap();
    let refused = aggregator(theirs, SECRET);
    assert!(matches!(refused, Err(ControlError::Stranger)), "{refused:?}");
    // Of an aggregator, played to a client.
    let (ours, mut theirs) = pair();
    theirs.write_all(&recorded.back).unwrap();
    let refused = client(ours, SECRET);
    assert!(matches!(refused, Err(ControlError::Stranger)), "{refused:?}");
}

/// Whoever sends our own words back to us knows nothing.
#[test]
fn a_mirror_is_no_peer() {
    let (ours, mut theirs) = pair();
    let mirror = thread::spawn(move || {
        let mut said = [0; 76];
        theirs.read_exact(&mut said[..60]).unwrap();
        // Its first twelve bytes are those of an aggregator too, and its number stands where the proof
        // belongs.
        theirs.write_all(&said).unwrap();
        theirs.read_to_end(&mut Vec::new()).unwrap()
    });
    let refused = client(ours, SECRET);
    assert!(matches!(refused, Err(ControlError::Stranger)), "{refused:?}");
    assert_eq!(mirror.join().unwrap(), 0, "it heard more");
}

#[test]
fn a_wrong_secret_is_found_on_both_sides() {
    let (ours, theirs) = pair();
    let listening = thread::spawn(move || aggregator(theirs, SECRET));
    let refused = client(ours, Secret::new([8; 32]));
    assert!(matches!(refused, Err(ControlError::NoPlace)), "{refused:?}");
    let refused = listening.join().unwrap();
    assert!(matches!(refused, Err(ControlError::NoPlace)), "{refused:?}");
}

/// It says that it has the place, and cannot prove it: the client sends nothing more.
#[test]
fn an_aggregator_without_the_secret_hears_nothing() {
    let (ours, mut theirs) = pair();
    let pretends = thread::spawn(move || {
        theirs.read_exact(&mut [0; 60]).unwrap();
        theirs.write_all(b"fedlane\0\x03\0\x01\0").unwrap();
        theirs.write_all(&[9; 64]).unwrap();
        let mut more = Vec::new();
        theirs.read_to_end(&mut more).unwrap();
        more
    });
    let refused = client(ours, SECRET);
    assert!(matches!(refused, Err(ControlError::Stranger)), "{refused:?}");
    assert!(pretends.join().unwrap().is_empty());
}

/// An attacker on the way cannot put in a message of its own, nor repeat one.
#[test]
fn a_message_that_is_put_in_ends_the_channel() {
    for put_in in [vec![0xee; 40], vec![0; 40]] {
        let (ours, theirs) = pair();
        let mut forger = ours.try_clone().unwrap();
        let listening = thread::spawn(move || aggregator(theirs, SECRET));
        let channel = ControlChannel::open(Link::plain(ours), &SECRET, PATIENCE).unwrap();
        forger.write_all(&put_in).unwrap();
        let refused = listening.join().unwrap();
        assert!(matches!(refused, Err(ControlError::Wire(WireError::Seal))), "{refused:?}");
        drop(channel);
    }
}

/// Bytes that come steadily win no time: all of them have to be there at the end.
#[test]
fn a_peer_that_sends_byte_after_byte_is_sent_away() {
    let (mut ours, theirs) = pair();
    let link = Link::plain(theirs);
    let dribbles = thread::spawn(move || {
        let mut sent = 0;
        while ours.write_all(&[0]).is_ok() {
            sent += 1;
            thread::sleep(Duration::from_millis(20));
        }
        sent
    });
    let until = Instant::now() + Duration::from_millis(400);
    let refused = ControlChannel::accept(link, |_| Ok(Some(SECRET)), until);
    assert!(matches!(refused.err(), Some(ControlError::Silent)));
    assert!(dribbles.join().unwrap() < 48, "all of it came");
}

/// The same for a message, once a peer may send one.
#[test]
fn a_message_that_comes_byte_after_byte_ends_the_channel() {
    let (ours, theirs) = pair();
    let mut raw = ours.try_clone().unwrap();
    let until = Instant::now() + Duration::from_secs(2);
    let listening = thread::spawn(move || {
        let link = Link::plain(theirs);
        link.read_fixed::<Preamble>(until)?.dialled()?;
        let (mut channel, _) = ControlChannel::accept(link, |_| Ok(Some(SECRET)), until)?;
        channel.reader.read::<ClientMessage>(MAX_FRAME_BYTES).map(drop)
    });
    let channel = ControlChannel::open(Link::plain(ours), &SECRET, PATIENCE).unwrap();
    let dribbles = thread::spawn(move || {
        while raw.write_all(&[0]).is_ok() {
            thread::sleep(Duration::from_millis(200));
        }
    });
    let refused = listening.join().unwrap();
    assert!(matches!(refused, Err(ControlError::Silent)), "{refused:?}");
    drop(channel);
    dribbles.join().unwrap();
}

/// While an aggregator does something else, those who want to join wait, but not any number of them.
#[test]
fn a_crowd_that_wants_to_join_is_sent_away() {
    let config = AggregatorConfig { clients: 1, ..Default::default() };
    let aggregator = Aggregator::bind("127.0.0.1:0", config).unwrap();
    let join = |number: usize| {
        let socket = TcpStream::connect(aggregator.address()).unwrap();
        let channel = ControlChannel::open(Link::plain(socket), &Secret::OPEN, PATIENCE).unwrap();
        let (name, header, place) = (number.to_string(), Vec::new(), Secret::OPEN.place());
        channel
            .writer
            .send(&ClientMessage::Join { name, examples: 1.0, header, place, resumes: None })
            .unwrap();
        channel
    };
    let mut crowd: Vec<ControlChannel> = (0..MAX_LATE + 2).map(join).collect();
    // Which of them is refused depends on whose thread is faster.
    let (until, mut refused) = (Instant::now() + PATIENCE, Vec::new());
    while refused.is_empty() && Instant::now() < until {
        refused.extend(crowd.iter_mut().filter_map(|channel| {
            channel.set_deadline(Duration::from_millis(20)).unwrap();
            channel.reader.read::<AggregatorMessage>(MAX_FRAME_BYTES).ok()
        }));
    }
    let reason = "too many others want to join".to_owned();
    assert_eq!(refused, [AggregatorMessage::Failed { reason }]);
}
