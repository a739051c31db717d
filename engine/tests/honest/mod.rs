//! A client that plays by the rules, beside those that do not.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use fedlane::client::{Client, ClientConfig, Target, Task};
use fedlane::control::Congestion;
use fedlane::error::ClientError;
use fedlane::manifest::{Dtype, Manifest, synthetic};
use fedlane::paths::ReceiveKind;
use fedlane::source::generator::Generator;
use fedlane::wire::hello::Secret;

/// What all clients bring: 1 MiB.
pub fn model() -> Manifest {
    synthetic(1 << 20, Dtype::F32).unwrap()
}

/// A client that never comes back.
pub fn config(name: &str, deadline: Duration) -> ClientConfig {
    ClientConfig {
        name: name.to_string(),
        examples: 1.0,
        secret: Secret::OPEN,
        tls: None,
        send_path: None,
        receive_path: ReceiveKind::default(),
        congestion: Congestion::Auto,
        deadline,
        reconnect: Some(Duration::ZERO),
    }
}

/// Takes part in a session to its end, and gives what that was.
pub fn honest(
    address: SocketAddr,
    name: &'static str,
    deadline: Duration,
) -> JoinHandle<Result<(), String>> {
    let run = move || {
        let mut client = Client::join(address, config(name, deadline), &model())?;
        loop {
            match client.next_task()? {
                Task::Upload { round } => drop(client.upload(round, &Generator::new(model(), 1))?),
                Task::Download { round, digest } => {
                    client.download(round, digest, Target::Check)?;
                    client.confirm(round);
                }
                Task::Done => return Ok(()),
            }
        }
    };
    std::thread::spawn(move || run().map_err(|error: ClientError| error.to_string()))
}
