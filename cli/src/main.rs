//! The `fedlane` command.

mod doctor;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Moves model weights between an aggregator and its clients and averages them on the way
#[derive(Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Doctor),
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
    let done = match cli.command {
        Command::Doctor(doctor) => doctor.run(),
        Command::Completions { shell } => {
            let mut command = Cli::command();
            clap_complete::generate(shell, &mut command, "fedlane", &mut std::io::stdout());
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            anstream::eprintln!("fedlane: {error:#}");
            ExitCode::FAILURE
        }
    }
}
