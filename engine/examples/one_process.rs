//! Federated averaging inside one process: an aggregator and two clients, each in a thread, with
//! real sockets between them.
//!
//! Run it with `cargo run --example one_process`.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::thread;

use fedlane::aggregator::{Aggregator, AggregatorConfig};
use fedlane::client::{Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::limits;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::paths::ReceiveKind;
use fedlane::region::Region;
use fedlane::source::region::RegionSource;
use fedlane::wire::hello::Secret;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ROUNDS: u32 = 3;

pub fn main() -> Outcome<()> {
    // What all of them agree on: one tensor of four numbers.
    let tensors = [("weights".to_string(), Dtype::F32, vec![4])];
    let manifest = Manifest::from_tensors(tensors, &BTreeMap::new())?;

    // Port 0 lets the kernel choose; `address` says what it chose.
    let config = AggregatorConfig { clients: 2, rounds: ROUNDS, ..AggregatorConfig::default() };
    let aggregator = Aggregator::bind("127.0.0.1:0", config)?;
    let address = aggregator.address().to_string();

    // The second client has seen three times as many examples, so it counts three times as much.
    let learned = thread::scope(|scope| {
        let first = scope.spawn(|| take_part(&address, "first", 10.0, 1.0, &manifest));
        let second = scope.spawn(|| take_part(&address, "second", 30.0, 5.0, &manifest));
        aggregate(aggregator)?;
        Ok::<_, Box<dyn Error + Send + Sync>>([result_of(first)?, result_of(second)?])
    })?;
    println!("both clients have {:?}", learned[0]);
    assert_eq!(learned[0], learned[1]);
    // Every round moves the mean halfway to (10 * 1 + 30 * 5) / 40 = 4.
    assert_eq!(learned[0], [3.5; 4]);
    Ok(())
}

/// The server's side: wait for everyone, then run the rounds.
fn aggregate(aggregator: Aggregator) -> Outcome<()> {
    let mut session = aggregator.gather(None)?;
    for round in 1..=ROUNDS {
        // Updates are averaged while they arrive; then the mean goes back to every client.
        session.round()?;
        session.broadcast()?;
        println!("round {round} of {ROUNDS} is done");
    }
    session.finish()?;
    Ok(())
}

/// A client's side: do what the aggregator asks until it says that all rounds are done.
fn take_part(
    address: &str,
    name: &str,
    examples: f64,
    goal: f32,
    manifest: &Manifest,
) -> Outcome<Vec<f32>> {
    let config = ClientConfig {
        name: name.to_string(),
        examples,
        // The session is open to all.
        secret: Secret::OPEN,
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline: limits::DEADLINE,
        reconnect: None,
    };
    let mut client = Client::join(address, config, manifest)?;
    // One region holds the parameters: they are trained, sent and received in this memory.
    let mut region = Region::new(manifest.data_bytes())?;
    loop {
        match client.next_task()? {
            Task::Upload { round } => {
                train(region.bytes_mut().0, goal);
                let sealed = RegionSource::seal(manifest, &region, client.chunks(), 1);
                client.upload(round, &sealed)?;
            }
            Task::Download { round, digest } => {
                client.download(round, digest, Target::Region(&mut region))?;
                client.confirm(round);
            }
            Task::Done => return Ok(numbers(region.bytes())),
        }
    }
}

/// Stands for training: moves every parameter halfway to where this client's data would have it.
fn train(parameters: &mut [u8], goal: f32) {
    for parameter in parameters.as_chunks_mut().0 {
        let number = f32::from_le_bytes(*parameter);
        *parameter = (number + (goal - number) / 2.0).to_le_bytes();
    }
}

fn numbers(parameters: &[u8]) -> Vec<f32> {
    parameters.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn result_of<T>(client: thread::ScopedJoinHandle<'_, Outcome<T>>) -> Outcome<T> {
    client.join().map_err(|_| io::Error::other("a client panicked"))?
}
