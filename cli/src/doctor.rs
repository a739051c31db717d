//! `fedlane doctor`: what this host can do, and why not.

mod layout;
mod sections;

use std::io::{self, Write};

use clap::Args;
use fedlane::probe::{self, Defaults, HostReport, PathReport};
use serde::Serialize;

/// Show what this host offers: limits, and which ways to send and receive work
///
/// Every way to send and receive is really tried: about 1 MiB goes over a connection on loopback
/// and is compared at the other end. Nothing on the host is changed, and nothing is left behind.
///
/// Each line begins with a mark: "ok" works or is as it should be, "off" does not work, "note" is
/// worth knowing. Below what is off stands why, and after "helps:" what would change it. What
/// could not be found out is called unknown, with the reason.
///
/// The exit status is 0 also when things are off; fedlane needs only one way to send and one to
/// receive. Run it as the user, and in the container, in which fedlane will run.
#[derive(Args)]
pub struct Doctor {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// All that was found.
#[derive(Serialize)]
struct Findings {
    #[serde(flatten)]
    host: HostReport,
    paths: Vec<PathReport>,
    defaults: Defaults,
}

impl Doctor {
    /// Probes the host and prints what was found.
    pub fn run(self) -> anyhow::Result<()> {
        let findings =
            Findings { host: probe::host(), paths: probe::paths(), defaults: probe::defaults() };
        let text = match self.json {
            true => serde_json::to_string(&findings)? + "\n",
            false => layout::text(&sections::all(&findings), &sections::verdict(&findings)),
        };
        let mut out = anstream::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // Whoever reads it has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => Ok(other?),
        }
    }
}
