//! One side of a benchmark: which processes to start, and what to read from their reports.

use std::path::PathBuf;

use clap::Args;
use fedlane::manifest::Dtype;

use super::sample::Sample;
use crate::args::{Averager, AveragingArg, Paths, parse_bytes, parse_dtype};
use crate::cert;
use crate::check::{Expected, Sender};
use crate::group::Group;
use crate::update::Update;

/// What to measure.
#[derive(Clone, Debug, Args)]
pub struct Setup {
    /// Number of clients
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,

    /// Size of the model
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_bytes)]
    pub bytes: u64,

    /// Dtype of the model
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    pub dtype: Dtype,

    /// Rounds of a session that are measured, after one that warms up
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Generate parameters while they are sent, instead of sending from a warm region
    #[arg(long)]
    pub on_the_fly: bool,

    /// What the aggregator does with updates: "checksum" and "discard" drop them
    #[arg(long, value_enum, value_name = "SINK", default_value_t = Sink::Mean)]
    pub sink: Sink,

    /// Encrypt all connections of whole rounds with TLS
    #[arg(long)]
    pub tls: bool,

    #[command(flatten)]
    pub averager: Averager,

    #[command(flatten)]
    pub paths: Paths,
}

/// `--sink`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sink {
    /// Averages them
    Mean,
    /// Checks and drops them
    Checksum,
    /// Drops them unseen
    Discard,
}

/// Which kind of session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Plain sockets.
    Raw,
    /// A fedlane session.
    Round,
}

impl Kind {
    /// For reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Raw => "raw",
            Kind::Round => "round",
        }
    }
}

impl Setup {
    /// Runs one session and gives a sample for each measured round.
    pub fn run(&self, kind: Kind) -> anyhow::Result<Vec<Sample>> {
        let mut group = Group::new();
        let certificates = (self.tls && kind == Kind::Round).then(Certificates::new).transpose()?;
        let (shown, trusted) = certificates.as_ref().map(Certificates::args).unwrap_or_default();
        group.start("receiver", &[self.receiver_args(kind)?, shown].concat())?;
        let listening = group.await_event("listening")?;
        let address = listening["address"].as_str().unwrap_or_default();
        for client in 0..self.clients {
            let name = format!("client-{:03}", client + 1);
            let args = self.sender_args(kind, client, &name, address);
            group.start(&name, &[args, trusted.clone()].concat())?;
        }
        let reports = group.finish(&mut |_, _| {})?;
        Sample::read(&reports, self.clients)
    }

    fn averaging(&self) -> AveragingArg {
        match self.sink {
            Sink::Mean => self.averager.averaging,
            Sink::Checksum => AveragingArg::Checksum,
            Sink::Discard => AveragingArg::Discard,
        }
    }

    fn update(&self, client: u32) -> Update {
        Update {
            model: None,
            generate: Some(self.bytes),
            preset: None,
            dtype: self.dtype,
            seed: u64::from(client) + 1,
            scale_exponent: 0,
        }
    }

    fn receiver_args(&self, kind: Kind) -> anyhow::Result<Vec<String>> {
        let rounds = format!("--rounds={}", self.rounds + 1);
        let clients = format!("--clients={}", self.clients);
        let mut args: Vec<String>;
        match kind {
            Kind::Raw => {
                args = vec!["bench".into(), "raw-receive".into(), rounds, clients];
                args.push(format!("--bytes={}", self.bytes));
                args.extend(self.averager.streams.map(|streams| format!("--streams={streams}")));
                args.push(format!("--receive-path={}", self.paths.receive_path));
            }
            Kind::Round => {
                args = vec!["serve".into(), "--listen=127.0.0.1:0".into(), rounds, clients];
                let averager = Averager { averaging: self.averaging(), ..self.averager.clone() };
                args.extend(averager.to_args());
                args.extend(self.paths.to_args());
                if self.sink == Sink::Mean {
                    let senders = (0..self.clients)
                        .map(|client| Sender { update: self.update(client), examples: 1.0 });
                    let expected = Expected(senders.collect());
                    args.push(format!("--expect={}", serde_json::to_string(&expected)?));
                }
            }
        }
        Ok(args)
    }

    fn sender_args(&self, kind: Kind, client: u32, name: &str, address: &str) -> Vec<String> {
        let mut args: Vec<String>;
        match kind {
            Kind::Raw => {
                args = vec!["bench".into(), "raw-send".into(), address.into()];
                args.push(format!("--rounds={}", self.rounds + 1));
                args.push(format!("--bytes={}", self.bytes));
                args.extend(self.averager.streams.map(|streams| format!("--streams={streams}")));
                args.extend(self.paths.send_path.map(|path| format!("--send-path={path}")));
            }
            Kind::Round => {
                args = vec!["join".into(), address.into(), format!("--name={name}")];
                args.extend(self.update(client).to_args());
                args.extend(self.paths.to_args());
                args.extend((!self.on_the_fly).then(|| "--stage".to_string()));
            }
        }
        args
    }
}

/// Certificates of one session, in a directory that goes with it.
struct Certificates {
    directory: PathBuf,
}

impl Certificates {
    fn new() -> anyhow::Result<Certificates> {
        let name = format!("fedlane-bench-{}", std::process::id());
        let certificates = Certificates { directory: std::env::temp_dir().join(name) };
        cert::write_certificates(&certificates.directory, &[], &[])?;
        Ok(certificates)
    }

    /// Of the aggregator, and of its clients.
    fn args(&self) -> (Vec<String>, Vec<String>) {
        let arg =
            |flag: &str, file: &str| format!("{flag}={}", self.directory.join(file).display());
        let shown = vec![arg("--tls-cert", "server.pem"), arg("--tls-key", "server.key")];
        (shown, vec![arg("--tls-ca", "ca.pem")])
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        // What is left there is of no use to anyone.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
