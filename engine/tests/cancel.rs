//! Whatever an aggregator or a client waits for, another thread can end it. The deadlines are ten
//! minutes: nothing else could.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fedlane::aggregator::{Aggregator, AggregatorConfig, Session};
use fedlane::client::{Canceller, Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::error::{AggregatorError, ClientError};
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::paths::ReceiveKind;
use fedlane::region::Region;
use fedlane::source::generator::Generator;

const DEADLINE: Duration = Duration::from_secs(600);

fn model() -> Manifest {
    synthetic(1 << 20, Dtype::F32).unwrap()
}

fn bind(clients: usize) -> Aggregator {
    let config = AggregatorConfig { clients, deadline: DEADLINE, ..Default::default() };
    Aggregator::bind("127.0.0.1:0", config).unwrap()
}

fn join(address: SocketAddr, canceller: &Canceller) -> Result<Client, ClientError> {
    let config = ClientConfig {
        name: "a".to_string(),
        examples: 1.0,
        secret: fedlane::wire::hello::Secret::OPEN,
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: DEADLINE,
        reconnect: None,
    };
    Client::join_cancellable(address, config, &model(), canceller)
}

/// A session whose only client is driven by the test.
fn session() -> (Session, Client, fedlane::aggregator::Canceller, Canceller) {
    let aggregator = bind(1);
    let (address, stop) = (aggregator.address(), aggregator.canceller());
    let gathering = thread::spawn(move || aggregator.gather(None));
    let canceller = Canceller::default();
    let client = join(address, &canceller).unwrap();
    (gathering.join().unwrap().unwrap(), client, stop, canceller)
}

/// Runs `work` on a thread; the receiver hears when it begins.
fn start<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> (JoinHandle<T>, Receiver<()>) {
    let (begun, begins) = channel();
    let thread = thread::spawn(move || {
        begun.send(()).unwrap();
        work()
    });
    (thread, begins)
}

#[test]
fn an_aggregator_that_waits_for_clients() {
    let aggregator = bind(1);
    let stop = aggregator.canceller();
    let (waiting, begins) = start(move || aggregator.gather(None).map(drop));
    begins.recv().unwrap();
    stop.cancel();
    assert!(matches!(waiting.join().unwrap(), Err(AggregatorError::Cancelled)));
}

#[test]
fn an_aggregator_that_waits_for_updates_and_its_client_hears_why() {
    let (mut session, mut client, stop, _) = session();
    let (waiting, begins) = start(move || session.round());
    begins.recv().unwrap();
    assert!(matches!(client.next_task().unwrap(), Task::Upload { round: 1 }));
    stop.cancel();
    assert!(matches!(waiting.join().unwrap(), Err(AggregatorError::Cancelled)));
    let ended = client.next_task().unwrap_err().to_string();
    assert!(ended.ends_with("ended the session: the aggregator was stopped"), "{ended}");
}

#[test]
fn an_aggregator_that_waits_for_goodbyes() {
    let (session, client, stop, _) = session();
    stop.cancel();
    assert!(matches!(session.finish(), Err(AggregatorError::Cancelled)));
    drop(client);
}

#[test]
fn a_client_that_nobody_answers() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let canceller = Canceller::default();
    let inside = canceller.clone();
    let joining = thread::spawn(move || join(address, &inside).map(drop));
    let _accepted = silent.accept().unwrap();
    canceller.cancel("enough");
    assert!(joining.join().unwrap().is_err());
    // What was cancelled stays so.
    assert!(matches!(join(address, &canceller), Err(ClientError::Cancelled)));
}

#[test]
fn a_client_that_waits_for_a_task_and_its_aggregator_hears_why() {
    let (mut session, mut client, _, canceller) = session();
    let (waiting, begins) = start(move || client.next_task().map(drop));
    begins.recv().unwrap();
    canceller.cancel("enough");
    assert!(waiting.join().unwrap().is_err());
    let ended = session.round().unwrap_err().to_string();
    assert!(ended.contains("client \"a\"") && ended.ends_with("gave up: enough"), "{ended}");
}

#[test]
fn a_region_is_sent_as_the_model() {
    let (mut session, mut client, _, _) = session();
    let mut region = Region::new(model().data_bytes()).unwrap();
    region.bytes_mut().0.fill(7);
    let other = Region::new(8).unwrap();
    let refused = session.send_region(&synthetic(8, Dtype::F32).unwrap(), Arc::new(other));
    assert!(matches!(refused, Err(AggregatorError::Initial { .. })));
    let sending =
        thread::spawn(move || session.send_region(&model(), Arc::new(region)).map(|()| session));
    let Task::Download { round: 0, digest } = client.next_task().unwrap() else { panic!() };
    let mut target = Region::new(model().data_bytes()).unwrap();
    client.download(0, digest, Target::Region(&mut target)).unwrap();
    client.confirm(0);
    assert!(target.bytes().iter().all(|&byte| byte == 7));
    let mut session = sending.join().unwrap().unwrap();
    let running = thread::spawn(move || session.round());
    assert!(matches!(client.next_task().unwrap(), Task::Upload { round: 1 }));
    client.upload(1, &Generator::new(model(), 1)).unwrap();
    running.join().unwrap().unwrap();
}
