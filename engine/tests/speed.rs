//! Measuring a link: who may, what comes out, and what strangers cannot do.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::time::Duration;

use fedlane::error::ControlError;
use fedlane::limits;
use fedlane::speed::{SpeedListener, measure};
use fedlane::topology::measured::{PeerHost, Speed};
use fedlane::topology::profile::Profile;
use fedlane::wire::hello::Secret;

const SECRET: Secret = Secret::new([7; 32]);

/// A listener in a thread that ends with the tests; what is found comes out.
fn listener(secret: Secret) -> (String, mpsc::Receiver<Speed>) {
    let listener = SpeedListener::bind("127.0.0.1:0", "hub", (secret, None, false)).unwrap();
    let address = listener.address().unwrap().to_string();
    let (sender, found) = mpsc::channel();
    std::thread::spawn(move || listener.run(move |speed| drop(sender.send(speed))));
    (address, found)
}

#[test]
fn both_sides_have_the_same_figures() {
    let (address, found) = listener(SECRET);
    let speed = measure(&address, "site", &SECRET, None).unwrap();
    assert_eq!(found.recv_timeout(Duration::from_secs(60)).unwrap(), speed);
    assert_eq!((speed.here.name.as_str(), speed.there.name.as_str()), ("site", "hub"));
    assert!(speed.up_bytes_s > 0.0 && speed.down_bytes_s > 0.0 && speed.rtt_s > 0.0, "{speed:?}");
    assert!(speed.here.cores > 0 && speed.there.memory_bytes > 0);
    let mut profile = Profile::default();
    profile.add_speed(&speed, 5).unwrap();
    assert!(profile.hosts[0].client && profile.hosts[1].aggregator);
    assert_eq!(profile.links.len(), 2);
    let up = profile.links[0].gbit_s.unwrap();
    assert!((up / (speed.up_bytes_s * 8e-9) - 1.0).abs() < 1e-9, "{up}");
    profile.add_speed(&speed, 6).unwrap();
    assert_eq!((profile.hosts.len(), profile.links.len()), (2, 2));
    assert_eq!(profile.links[1].measured.unwrap().count, 2);
    assert_eq!(profile.links[1].measured.unwrap().at_unix_s, 6);
}

#[test]
fn strangers_measure_nothing_and_hold_up_nobody() {
    let (address, found) = listener(SECRET);
    let other = measure(&address, "site", &Secret::new([8; 32]), None);
    assert!(matches!(other, Err(ControlError::NoPlace)), "{other:?}");
    let open = measure(&address, "site", &Secret::OPEN, None);
    assert!(matches!(open, Err(ControlError::NoPlace)), "{open:?}");
    let silent = TcpStream::connect(&address).unwrap();
    let mut http = TcpStream::connect(&address).unwrap();
    http.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    http.set_read_timeout(Some(limits::HANDSHAKE)).unwrap();
    // It is told nothing.
    let told = http.read(&mut [0; 64]);
    assert!(matches!(told, Ok(0) | Err(_)), "{told:?}");
    measure(&address, "site", &SECRET, None).unwrap();
    assert_eq!(found.recv_timeout(Duration::from_secs(60)).unwrap().here.name, "site");
    assert!(found.try_recv().is_err());
    drop(silent);
}

#[test]
fn an_open_listener_stays_on_this_machine() {
    let refused = SpeedListener::bind("0.0.0.0:0", "hub", (Secret::OPEN, None, false));
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("--insecure"), "{error}");
    for door in [(SECRET, None, false), (Secret::OPEN, None, true)] {
        SpeedListener::bind("0.0.0.0:0", "hub", door).unwrap();
    }
}

#[test]
fn measurements_that_no_profile_may_have_change_nothing() {
    let host = |name: &str| PeerHost { name: name.into(), cores: 2, memory_bytes: 1 << 30 };
    let good = Speed {
        here: host("a"),
        there: host("b"),
        rtt_s: 0.01,
        up_bytes_s: 1e8,
        down_bytes_s: 1e8,
        cpu_s: [1e-10; 4],
    };
    let mut profile = Profile::default();
    profile.add_speed(&good, 1).unwrap();
    let before = profile.clone();
    let bad = [
        Speed { here: host(""), ..good.clone() },
        Speed { here: host("b"), ..good.clone() },
        Speed { rtt_s: 1e9, ..good.clone() },
        Speed { rtt_s: f64::NAN, ..good.clone() },
        Speed { up_bytes_s: f64::INFINITY, ..good.clone() },
        Speed { cpu_s: [-1.0; 4], ..good.clone() },
    ];
    for speed in bad {
        assert!(profile.add_speed(&speed, 2).is_err(), "{speed:?}");
        assert_eq!(profile, before);
    }
}
