//! Pages that are shared with the kernel cannot betray: whoever writes to a region while it is on its way
//! causes an error, whichever path it is sent by and in whichever direction. Nobody gets a model or
//! an average that is silently another one.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fedlane::aggregator::{Aggregator, AggregatorConfig};
use fedlane::client::{Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::paths::{ReceiveKind, SendKind};
use fedlane::region::Region;
use fedlane::source::Source;
use fedlane::source::generator::Generator;
use fedlane::source::region::RegionSource;
use fedlane::wire::hello::Secret;

/// More than all sockets on the way hold.
const MODEL_BYTES: u64 = 48 << 20;

/// Bytes of one connection and direction that pass a closed gate: all control messages do.
const PASS_BYTES: usize = 256 << 10;

/// Whatever waits so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A network that stands still in the middle of a transfer until it is told to go on.
struct Gate {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    open: Mutex<bool>,
    opened: Condvar,
    /// Connections that stand still.
    waiting: AtomicUsize,
}

impl Gate {
    fn before(aggregator: SocketAddr) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let inside = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().map(Result::unwrap) {
                let Ok(server) = TcpStream::connect(aggregator) else { return };
                let (back, there) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let (up, down) = (inside.clone(), inside.clone());
                thread::spawn(move || up.pass(client, server));
                thread::spawn(move || down.pass(back, there));
            }
        });
        Gate { address, shared }
    }

    /// Waits until a transfer stands still, with all sockets full.
    fn await_standstill(&self) {
        let until = Instant::now() + PATIENCE;
        while self.shared.waiting.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < until, "nothing was sent");
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(100));
    }

    fn open(&self) {
        *self.shared.open.lock().unwrap() = true;
        self.shared.opened.notify_all();
    }
}

impl Shared {
    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let (mut passed, mut bytes) = (0, vec![0; 64 << 10]);
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            passed += length;
            if passed > PASS_BYTES {
                self.wait();
            }
            if to.write_all(&bytes[..length]).is_err() {
                break;
            }
        }
        // The other side may have closed before.
        let _ = to.shutdown(Shutdown::Write);
    }

    fn wait(&self) {
        let open = self.open.lock().unwrap();
        if !*open {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            drop(self.opened.wait_while(open, |open| !*open).unwrap());
        }
    }
}

fn model() -> Manifest {
    synthetic(MODEL_BYTES, Dtype::F32).unwrap()
}

/// A filled region, and another way to its memory.
fn region() -> (Region, File) {
    let mut region = Region::new(MODEL_BYTES).unwrap();
    Generator::new(model(), 1).read(0, region.bytes_mut().0).unwrap();
    let file = File::from(region.file().try_clone_to_owned().unwrap());
    (region, file)
}

/// Changes every page.
fn write_to(file: &File) {
    for page in (0..MODEL_BYTES).step_by(4096) {
        file.write_all_at(b"other", page + 100).unwrap();
    }
}

fn aggregator(send_path: SendKind) -> Aggregator {
    let config = AggregatorConfig {
        streams: 2,
        deadline: PATIENCE,
        reconnect: Duration::ZERO,
        send_path: Some(send_path),
        ..Default::default()
    };
    Aggregator::bind("127.0.0.1:0", config).unwrap()
}

fn join(gate: &Gate, send_path: SendKind) -> Client {
    let config = ClientConfig {
        name: "a".into(),
        examples: 1.0,
        secret: Secret::OPEN,
        tls: None,
        send_path: Some(send_path),
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: PATIENCE,
        reconnect: Some(Duration::ZERO),
    };
    Client::join(gate.address, config, &model()).unwrap()
}

#[test]
fn an_update_that_is_written_to_while_it_is_sent_is_in_no_mean() {
    for path in SendKind::all() {
        let aggregator = aggregator(path);
        let gate = Gate::before(aggregator.address());
        let averages = thread::spawn(move || aggregator.gather(None)?.round());
        let (region, file) = region();
        let error = thread::scope(|scope| {
            let sends = scope.spawn(|| {
                let mut client = join(&gate, path);
                assert_eq!(client.next_task().unwrap(), Task::Upload { round: 1 });
                let (manifest, chunks) = (model(), client.chunks().clone());
                let update = RegionSource::seal(&manifest, &region, &chunks, 2);
                client.upload(1, &update).map(drop)
            });
            gate.await_standstill();
            write_to(&file);
            gate.open();
            assert!(sends.join().unwrap().is_err(), "{path}: the client thinks that all went well");
            averages.join().unwrap().expect_err("a mean of something else")
        });
        let error = error.to_string();
        assert!(error.contains("client \"a\""), "{path}: {error}");
        assert!(error.contains("do not match their checksum"), "{path}: {error}");
    }
}

#[test]
fn a_model_that_is_written_to_while_it_is_sent_is_found_out() {
    for path in SendKind::all() {
        let aggregator = aggregator(path);
        let gate = Gate::before(aggregator.address());
        let (region, file) = region();
        let sends = thread::spawn(move || {
            let mut session = aggregator.gather(Some(model()))?;
            session.send_region(&model(), Arc::new(region))
        });
        let mut client = join(&gate, path);
        let Task::Download { round, digest } = client.next_task().unwrap() else {
            panic!("no model")
        };
        let error = thread::scope(|scope| {
            let receives = scope.spawn(|| client.download(round, digest, Target::Check));
            gate.await_standstill();
            write_to(&file);
            gate.open();
            receives.join().unwrap().expect_err("a model that was changed")
        });
        let error = error.to_string();
        assert!(error.contains("do not match their checksum"), "{path}: {error}");
        client.give_up(&error);
        drop(client);
        let error = sends.join().unwrap().expect_err("nobody has it").to_string();
        assert!(error.contains("do not match their checksum"), "{path}: {error}");
    }
}
