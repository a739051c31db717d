//! `fedlane edge`: an aggregator for its clients that is a client of the aggregator above.

use std::path::PathBuf;

use clap::Args;
use fedlane::aggregator::AggregatorConfig;
use fedlane::client::ClientConfig;
use fedlane::edge::{Edge as Engine, EdgeConfig, EdgeStep, RunningEdge};
use fedlane::limits;
use fedlane::sys::process;
use fedlane::topology::tree::Leaf;
use serde_json::json;

use crate::args::{Averager, Paths};
use crate::door::{AboveCertificates, Door, read_secret};
use crate::join::default_name;
use crate::output::{Output, phase_fields, phase_text};
use crate::serve::{report_leaves, report_updates};

/// Average the models of some clients, send their sum up, and pass the mean of all down
///
/// To the aggregator above (`fedlane serve --topology tree`, or another edge) this is one client that
/// brings one sum and the weight of all clients below; to those (`fedlane join`, or more edges) it is
/// their aggregator. So each link carries one model in each direction, however many clients are below.
/// An edge that is lost is left out of the mean with all of its clients, where the aggregator above has
/// --min-clients.
#[derive(Args)]
pub struct Edge {
    /// Address and port of the aggregator above
    #[arg(value_name = "ADDRESS")]
    above: String,

    /// Address and port to listen on for the clients below; 0.0.0.0:PORT lets other machines in
    ///
    /// That takes --secret-file or --tls-cert, or else --insecure: everyone who reaches the port can then join.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7734")]
    listen: String,

    /// Number of clients below to wait for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=limits::MAX_CLIENTS as u64))]
    clients: u64,

    /// Name in logs and errors above, unique there [default: host name and process number]
    #[arg(long)]
    name: Option<String>,

    /// Rounds that are run below for each one above: before the last, clients get the mean of this edge
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::MAX_ROUNDS)))]
    local_rounds: u32,

    #[command(flatten)]
    averager: Averager,

    #[command(flatten)]
    paths: Paths,

    #[command(flatten)]
    door: Door,

    /// File with the secret of the aggregator above, if it is another one than that of --secret-file
    #[arg(long, value_name = "FILE")]
    above_secret_file: Option<PathBuf>,

    #[command(flatten)]
    above_certificates: AboveCertificates,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

impl Edge {
    /// Runs the edge's part of the session.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        let edge = Engine::bind(self.listen.as_str(), self.config()?)?;
        let address = edge.address();
        output.event(
            "listening",
            json!({ "address": address.to_string(), "clients": self.clients }),
            &format!("listening on {address}, waiting for {} clients", self.clients),
        );
        let mut edge = edge.join(&self.above)?;
        let (mut phases, mut rounds) = ((0, 0), 0);
        loop {
            let step = edge.step();
            phases = report_phases(&edge, output, phases);
            // Of a round that is over, or that ended with an error.
            if !matches!(step, Ok(EdgeStep::Model { .. } | EdgeStep::Done)) {
                report_updates(edge.session(), output);
            }
            match step? {
                EdgeStep::Local { round, leaves } => {
                    report_leaves(&leaves, round, "local round", output);
                }
                EdgeStep::Round { round, counted, leaves } => {
                    report_round(round, counted, &leaves, output);
                }
                EdgeStep::Model { round } => rounds = round,
                EdgeStep::Done => break,
            }
        }
        output.event(
            "done",
            json!({ "rounds": rounds, "peak_rss_bytes": process::peak_rss_bytes() }),
            &format!("{rounds} rounds done"),
        );
        Ok(())
    }

    fn config(&self) -> anyhow::Result<EdgeConfig> {
        let secret = self.door.secret.read()?;
        let above = ClientConfig {
            name: self.name.clone().unwrap_or_else(default_name),
            examples: 0.0,
            secret: self.above_secret_file.as_deref().map_or(Ok(secret), read_secret)?,
            tls: self.above_certificates.read()?,
            send_path: self.paths.send_path,
            receive_path: self.paths.receive_path,
            congestion: self.paths.congestion.clone(),
            deadline: self.paths.deadline(),
            reconnect: self.paths.reconnect(),
        };
        let below = AggregatorConfig {
            secret,
            tls: self.door.certificates.read()?,
            insecure: self.door.insecure,
            ..self.averager.config(self.clients as usize, 1, &self.paths)
        };
        Ok(EdgeConfig { above, below, local_rounds: self.local_rounds })
    }
}

fn report_round(round: u32, counted: bool, leaves: &[Leaf], output: Output) {
    if counted {
        return report_leaves(leaves, round, "round", output);
    }
    output.event(
        "left_out",
        json!({ "round": round }),
        &format!(
            "round {round}: this edge is not in the mean: it came too late or was rejected; the aggregator above says which"
        ),
    );
}

/// Prints the phases below and above that are new, and returns how many there are now.
fn report_phases(edge: &RunningEdge, output: Output, from: (usize, usize)) -> (usize, usize) {
    let (below, above) = (edge.session().phases(), edge.client().phases());
    for (side, phases) in [("below", &below[from.0..]), ("above", &above[from.1..])] {
        for phase in phases {
            let mut fields = phase_fields(phase);
            fields["side"] = json!(side);
            output.event("phase", fields, &format!("{side}: {}", phase_text(phase)));
        }
    }
    (below.len(), above.len())
}
