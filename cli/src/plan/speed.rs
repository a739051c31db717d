//! `fedlane plan listen` and `fedlane plan probe`: profiles that are measured.

use std::path::{Path, PathBuf};

use clap::Args;
use fedlane::control::printable;
use fedlane::speed::{SpeedListener, measure};
use fedlane::topology::measured::Speed;
use serde_json::json;

use super::{add_speed, probed};
use crate::door::{ClientCertificates, Door, SharedSecret};
use crate::join::host_name;
use crate::output::Output;

/// Under which name, and where, a measurement is kept.
#[derive(Args)]
struct Kept {
    /// Name of this host in profiles [default: that of the machine]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Keep what is found in this file; it is made if there is none
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// Wait for hosts that measure the way to this one, and keep what they find in a profile
///
/// Runs until it is ended. One host is measured at a time, in at most a minute and some GB.
#[derive(Args)]
pub struct Listen {
    /// Address and port to listen on; 0.0.0.0:PORT lets other machines in
    ///
    /// That takes --secret-file or --tls-cert, or else --insecure.
    #[arg(value_name = "ADDRESS", default_value = "127.0.0.1:7734")]
    listen: String,

    #[command(flatten)]
    kept: Kept,

    #[command(flatten)]
    door: Door,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

/// Measure the way to hosts where `fedlane plan listen` runs, and keep what is found in a profile
///
/// Transfers of rising size, until one takes half a second, in both directions; round trips; CPU costs.
#[derive(Args)]
pub struct Probe {
    /// Where the others listen, HOST:PORT
    #[arg(value_name = "ADDRESS", required = true)]
    addresses: Vec<String>,

    #[command(flatten)]
    kept: Kept,

    #[command(flatten)]
    secret: SharedSecret,

    #[command(flatten)]
    certificates: ClientCertificates,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

impl Listen {
    /// Answers until the process is ended.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        let door = (self.door.secret.read()?, self.door.certificates.read()?, self.door.insecure);
        let name = self.kept.name.unwrap_or_else(host_name);
        let listener = SpeedListener::bind(self.listen.as_str(), &name, door)?;
        let address = listener.address()?;
        let fields = json!({ "address": address.to_string(), "name": name });
        output.event("listening", fields, &format!("listening on {address} as \"{name}\""));
        let profile = self.kept.profile;
        // One visitor is measured at a time, but the last words of two may come together.
        let writing = std::sync::Mutex::new(());
        listener.run(move |speed| {
            let _one = writing.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Err(error) = keep(profile.as_deref(), &speed) {
                tracing::warn!("{}", crate::output::error_text(&error));
            }
            report(&speed, output);
        })?;
        Ok(())
    }
}

impl Probe {
    /// Measures one way after the other.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        let (secret, tls) = (self.secret.read()?, self.certificates.read()?);
        let name = self.kept.name.unwrap_or_else(host_name);
        for address in &self.addresses {
            let speed = probed(address, measure(address, &name, &secret, tls.as_ref()))?;
            report(&speed, output);
            keep(self.kept.profile.as_deref(), &speed)?;
        }
        Ok(())
    }
}

fn keep(profile: Option<&Path>, speed: &Speed) -> anyhow::Result<()> {
    profile.map_or(Ok(()), |profile| add_speed(profile, speed))
}

fn report(speed: &Speed, output: Output) {
    let (here, there) = (&speed.here, &speed.there);
    let (up, down) = (speed.up_bytes_s * 8e-9, speed.down_bytes_s * 8e-9);
    let gb = speed.cpu_s.map(|cpu| cpu * 1e9);
    let fields = json!({ "from": here.name, "to": there.name, "up_gbit_s": up, "down_gbit_s": down,
        "rtt_ms": speed.rtt_s * 1e3, "send_cpu_s_per_gb": gb[0], "receive_cpu_s_per_gb": gb[1],
        "peer_send_cpu_s_per_gb": gb[2], "peer_receive_cpu_s_per_gb": gb[3] });
    let text = format!(
        "{} to {}: {up:.3} Gbit/s, back {down:.3} Gbit/s, {:.3} ms there and back",
        printable(&here.name),
        printable(&there.name),
        speed.rtt_s * 1e3
    );
    output.event("speed", fields, &text);
}
