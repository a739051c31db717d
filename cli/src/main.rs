//! The `fedlane` command.

mod args;
mod bench;
mod cert;
mod check;
mod demo;
mod doctor;
mod door;
mod edge;
mod group;
mod join;
mod output;
mod plan;
mod progress;
mod serve;
mod transfers;
mod update;

use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Moves model weights between an aggregator and its clients and averages them on the way
///
/// The environment variable FEDLANE_LOG sets what is logged: error, warn, info (the default), debug.
#[derive(Parser)]
#[command(name = "fedlane", version, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Demo),
    Serve(serve::Serve),
    Join(join::Join),
    Edge(edge::Edge),
    Bench(bench::Bench),
    #[command(hide = true)]
    TrainShell(join::TrainShell),
    Doctor(doctor::Doctor),
    Plan(plan::Plan),
    Cert(cert::Cert),
    /// Print a completion script for a shell
    ///
    /// For example: fedlane completions bash > /etc/bash_completion.d/fedlane
    Completions {
        /// The shell to complete for
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    group::end_with_parent();
    fedlane::sys::process::survive_file_size_limit();
    start_log();
    let done = match cli.command {
        Command::Demo(demo) => demo.run(),
        Command::Bench(bench) => bench.run(),
        Command::Serve(serve) => serve.run(),
        Command::Join(join) => join.run(),
        Command::Edge(edge) => edge.run(),
        Command::TrainShell(shell) => shell.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Plan(plan) => plan.run(),
        Command::Cert(cert) => cert.run(),
        Command::Completions { shell } => {
            let mut command = Cli::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "fedlane", &mut script);
            // A reader that has seen enough is no failure.
            match std::io::stdout().write_all(&script) {
                Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
                _ => Ok(()),
            }
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // With a closed standard error there is only the status to tell by. In one piece: other
            // processes may write there too.
            let line = format!("fedlane: {}\n", output::error_text(&error));
            let _ = std::io::stderr().write_all(line.as_bytes());
            ExitCode::FAILURE
        }
    }
}

/// Warnings and notes go to the standard error, a line each; `FEDLANE_LOG` sets how many.
fn start_log() {
    let level = std::env::var("FEDLANE_LOG").ok().and_then(|level| level.parse().ok());
    tracing_subscriber::fmt()
        .with_max_level(level.unwrap_or(tracing::Level::INFO))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would say so on the same closed standard error, and that ends the thread.
        .log_internal_errors(false)
        .with_target(false)
        .without_time()
        .init();
}
