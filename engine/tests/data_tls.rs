//! Data channels with TLS, whether the kernel makes their records (kTLS) or this process: every way to
//! send, in both directions, between all kinds of ends.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fedlane::channel::DataChannel;
use fedlane::link::{Encryption, Link};
use fedlane::paths::{ReceiveKind, SendKind};
use fedlane::probe::{self, State};
use fedlane::receiver::Landing;
use fedlane::region::Region;
use fedlane::sender::Piece;
use fedlane::tls::{ClientTls, ServerTls};

/// Whatever waits so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who encrypts at an end that may choose.
fn by_default() -> Encryption {
    let features = probe::host().features;
    let ktls = features.iter().find(|feature| feature.name == "kTLS").unwrap();
    match ktls.state {
        State::Ok => Encryption::Kernel,
        _ => Encryption::Process,
    }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialled, listener.accept().unwrap().0)
}

/// The ends of a channel, the dialling one first.
fn channels(client: &ClientTls, server: ServerTls) -> (DataChannel, DataChannel) {
    let (ours, theirs) = sockets();
    let until = Instant::now() + PATIENCE;
    let accepting = thread::spawn(move || {
        DataChannel::new(Link::accepted(theirs, Some(&server), until).unwrap()).unwrap()
    });
    let dialled = DataChannel::new(Link::dialled(ours, Some(client), until).unwrap()).unwrap();
    (dialled, accepting.join().unwrap())
}

/// A region with bytes that do not repeat.
fn filled(bytes: usize) -> Region {
    let mut region = Region::new(bytes as u64).unwrap();
    let mut state = bytes as u32;
    for byte in region.bytes_mut().0.iter_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    }
    region
}

fn send_all(channel: &DataChannel, kind: SendKind, region: &Region) {
    let mut path = channel.send_path(kind).unwrap();
    let (bytes, until) = (region.bytes(), Instant::now() + PATIENCE);
    let mut sent = 0;
    while sent < bytes.len() {
        let rest = &bytes[sent..];
        let file = Some((region.file(), region.position() + sent as u64));
        let piece = Piece { length: rest.len(), bytes: Some(rest), file };
        match path.send(channel.as_fd(), piece) {
            Ok(more) => sent += more,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => pause(until),
            Err(error) => panic!("{kind}: {error}"),
        }
    }
}

fn receive_all(channel: &DataChannel, bytes: usize) -> Vec<u8> {
    let kind = ReceiveKind::default();
    let mut path = channel.receive_path(kind).unwrap();
    let (mut came, until) = (vec![0; bytes], Instant::now() + PATIENCE);
    let mut filled = 0;
    while filled < bytes {
        let rest = &mut came[filled..];
        let landing = Landing { length: rest.len(), bytes: Some(rest), file: None };
        match path.receive(channel.as_fd(), landing) {
            Ok(0) => panic!("it ended after {filled} bytes"),
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => pause(until),
            Err(error) => panic!("{error}"),
        }
    }
    came
}

fn pause(until: Instant) {
    assert!(Instant::now() < until, "nothing moves");
    thread::sleep(Duration::from_micros(200));
}

fn cross(from: &DataChannel, to: &DataChannel, kind: SendKind, region: &Region) {
    let before = region.bytes().to_vec();
    let came = thread::scope(|scope| {
        scope.spawn(|| send_all(from, kind, region));
        receive_all(to, before.len())
    });
    // Not by assert_eq, which would print megabytes.
    assert!(came == before, "{kind}: other bytes came");
    assert!(region.bytes() == before, "{kind}: sending changed what was sent");
}

/// Both ends choose, or one of them, or none.
#[test]
fn payload_crosses_whole_on_every_path_between_all_kinds_of_ends() {
    let (server, certificate) = ServerTls::self_signed().unwrap();
    let client = ClientTls::pinned(&certificate).unwrap();
    let (free, bound) = (by_default(), Encryption::Process);
    let ends = [
        (client.clone(), server.clone(), free, free),
        (client.clone(), server.clone().in_process(), free, bound),
        (client.clone().in_process(), server.clone(), bound, free),
        (client.in_process(), server.in_process(), bound, bound),
    ];
    for (client, server, ours, theirs) in ends {
        let (near, far) = channels(&client, server);
        assert_eq!((near.encryption(), far.encryption()), (ours, theirs));
        for kind in SendKind::all() {
            // Less than a record, a whole one and a little, and more than the sockets hold.
            for bytes in [1, 100, (16 << 10) + 1, (2 << 20) + 4099] {
                let region = filled(bytes);
                cross(&near, &far, kind, &region);
                cross(&far, &near, kind, &region);
            }
        }
        near.refuse_more().unwrap();
        far.refuse_more().unwrap();
    }
}

#[test]
fn what_was_not_agreed_is_found() {
    let (server, certificate) = ServerTls::self_signed().unwrap();
    let (near, far) = channels(&ClientTls::pinned(&certificate).unwrap(), server);
    send_all(&near, "write".parse().unwrap(), &filled(1));
    let until = Instant::now() + PATIENCE;
    while far.refuse_more().is_ok() {
        pause(until);
    }
}

#[test]
fn the_end_of_the_connection_is_an_end() {
    let (server, certificate) = ServerTls::self_signed().unwrap();
    let (near, far) = channels(&ClientTls::pinned(&certificate).unwrap(), server);
    send_all(&near, "write".parse().unwrap(), &filled(20_000));
    near.hang_up();
    receive_all(&far, 20_000);
    let mut path = far.receive_path(ReceiveKind::default()).unwrap();
    let (mut byte, until) = ([0], Instant::now() + PATIENCE);
    loop {
        let landing = Landing { length: 1, bytes: Some(&mut byte), file: None };
        match path.receive(far.as_fd(), landing) {
            Ok(bytes) => break assert_eq!(bytes, 0),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => pause(until),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Two certificates that look the same, but for their keys.
#[test]
fn another_self_signed_certificate_is_not_trusted() {
    let (server, _) = ServerTls::self_signed().unwrap();
    let (_, certificate) = ServerTls::self_signed().unwrap();
    let client = ClientTls::pinned(&certificate).unwrap();
    let (ours, theirs) = sockets();
    let until = Instant::now() + PATIENCE;
    let accepting = thread::spawn(move || Link::accepted(theirs, Some(&server), until).map(drop));
    let refused = Link::dialled(ours, Some(&client), until).map(drop).unwrap_err().to_string();
    assert!(refused.starts_with("TLS:"), "{refused}");
    assert!(accepting.join().unwrap().is_err());
}

#[test]
fn what_is_no_certificate_is_refused() {
    assert!(ClientTls::pinned(b"").is_err());
    assert!(ClientTls::pinned(b"no certificate").is_err());
}
