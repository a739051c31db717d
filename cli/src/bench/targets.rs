//! The comparisons that fedlane promises. Each runs its sides in turn, in one run, and compares
//! medians; the results of every session are checked.

use clap::Args;
use clap::FromArgMatches;
use serde_json::json;

use super::interleave;
use super::sample::{Summary, table};
use super::setup::{Kind, Setup};
use crate::output::Output;

/// Run the comparisons that fedlane promises, each interleaved in one run
#[derive(Args)]
pub struct Targets {
    /// Only these comparisons; all of them if none is named
    #[arg(value_name = "NAME", value_parser = known)]
    names: Vec<String>,

    /// Sessions of each side
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Print one JSON object a line instead of tables
    #[arg(long)]
    json: bool,
}

/// One comparison.
struct Target {
    name: &'static str,
    /// What is compared, for people.
    what: &'static str,
    /// Each side: a name, raw or round, and the arguments of `fedlane bench round`.
    sides: &'static [(&'static str, Kind, &'static str)],
    /// The figure made of the medians of the sides.
    figure: fn(&[Summary]) -> f64,
    /// What the figure must be.
    goal: Goal,
}

enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

static TARGETS: &[Target] = &[
    Target {
        name: "one-flow",
        what: "Gbit/s of receiving and averaging one client, against receiving alone, both sent with write",
        sides: &[
            ("round", Kind::Round, "--clients=1 --streams=1 --send-path=write"),
            ("raw", Kind::Raw, "--clients=1 --streams=1 --send-path=write"),
        ],
        figure: |sides| sides[0].goodput_gbit_s / sides[1].goodput_gbit_s,
        goal: Goal::AtLeast(0.95),
    },
    Target {
        name: "three-clients",
        what: "Gbit/s of averaging three clients with default paths, against plain sockets that drop the bytes",
        sides: &[
            ("round", Kind::Round, "--clients=3"),
            ("raw", Kind::Raw, "--clients=3 --send-path=write"),
        ],
        figure: |sides| sides[0].goodput_gbit_s / sides[1].goodput_gbit_s,
        goal: Goal::AtLeast(1.0),
    },
    Target {
        name: "spool",
        what: "Gbit/s of averaging while receiving, against receiving everything first and averaging after",
        sides: &[
            ("round", Kind::Round, "--clients=3"),
            ("spool", Kind::Round, "--clients=3 --averaging=spool"),
        ],
        figure: |sides| sides[0].goodput_gbit_s / sides[1].goodput_gbit_s,
        goal: Goal::AtLeast(1.5),
    },
    Target {
        name: "fused-cpu",
        what: "receiver CPU s/GB of receiving and averaging, against receiving alone plus averaging alone",
        sides: &[
            ("round", Kind::Round, "--clients=3"),
            ("raw", Kind::Raw, "--clients=3 --send-path=sendfile"),
            ("spool", Kind::Round, "--clients=3 --averaging=spool"),
        ],
        figure: |sides| {
            sides[0].receiver_cpu_s_per_gb
                / (sides[1].receiver_cpu_s_per_gb + sides[2].average_cpu_s_per_gb)
        },
        goal: Goal::AtMost(0.95),
    },
    Target {
        name: "checksum",
        what: "CPU s/GB of checking what came, against that of a whole round, receiver and senders",
        sides: &[
            ("round", Kind::Round, "--clients=3"),
            ("checked", Kind::Round, "--clients=3 --sink=checksum"),
            ("unseen", Kind::Round, "--clients=3 --sink=discard"),
        ],
        figure: |sides| {
            (sides[1].receiver_cpu_s_per_gb - sides[2].receiver_cpu_s_per_gb)
                / (sides[0].receiver_cpu_s_per_gb + sides[0].sender_cpu_s_per_gb)
        },
        goal: Goal::AtMost(0.05),
    },
    Target {
        name: "sender-cpu",
        what: "sender CPU s/GB of the default send path, against write",
        sides: &[
            ("default", Kind::Round, "--clients=1"),
            ("write", Kind::Round, "--clients=1 --send-path=write"),
        ],
        figure: |sides| sides[0].sender_cpu_s_per_gb / sides[1].sender_cpu_s_per_gb,
        goal: Goal::AtMost(0.5),
    },
    Target {
        name: "fan-in",
        what: "receiver CPU s/GB of 16 clients x 256 MiB, against 1 client x 4 GiB",
        sides: &[
            ("16 clients", Kind::Round, "--clients=16 --bytes=256MiB"),
            ("1 client", Kind::Round, "--clients=1 --bytes=4GiB"),
        ],
        figure: |sides| sides[0].receiver_cpu_s_per_gb / sides[1].receiver_cpu_s_per_gb,
        goal: Goal::AtMost(1.1),
    },
    Target {
        name: "memory",
        what: "receiver MiB beyond one model, the most of 1, 3 and 16 clients x 256 MiB",
        sides: &[
            ("1 client", Kind::Round, "--clients=1 --bytes=256MiB"),
            ("3 clients", Kind::Round, "--clients=3 --bytes=256MiB"),
            ("16 clients", Kind::Round, "--clients=16 --bytes=256MiB"),
        ],
        figure: |sides| {
            let most = sides.iter().map(|side| side.peak_rss_bytes.0).max().unwrap_or(0) as f64;
            most / f64::from(1 << 20) - 256.0
        },
        goal: Goal::AtMost(64.0),
    },
    Target {
        name: "page-faults",
        what: "page faults of the receiver in a round after the first, 3 clients x 1 GiB",
        sides: &[("round", Kind::Round, "--clients=3")],
        figure: |sides| sides[0].page_faults,
        goal: Goal::AtMost(1000.0),
    },
    Target {
        name: "large",
        what: "MiB of the largest process, 2 clients x 50 GB generated on the fly, checked and dropped",
        sides: &[(
            "round",
            Kind::Round,
            "--clients=2 --bytes=50GB --on-the-fly --sink=checksum --rounds=1",
        )],
        figure: |sides| {
            let (receiver, sender) = sides[0].peak_rss_bytes;
            receiver.max(sender) as f64 / f64::from(1 << 20)
        },
        goal: Goal::AtMost(1024.0),
    },
];

fn known(name: &str) -> Result<String, String> {
    match TARGETS.iter().any(|target| target.name == name) {
        true => Ok(name.to_string()),
        false => {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            Err(format!("there are: {}", names.join(", ")))
        }
    }
}

impl Targets {
    /// Runs them and fails if one is missed.
    pub fn run(self) -> anyhow::Result<()> {
        let mut missed = Vec::new();
        for target in TARGETS {
            if !self.names.is_empty() && !self.names.iter().any(|name| name == target.name) {
                continue;
            }
            if !target.run(self.runs, Output { json: self.json })? {
                missed.push(target.name);
            }
        }
        anyhow::ensure!(missed.is_empty(), "missed: {}", missed.join(", "));
        Ok(())
    }
}

impl Target {
    fn run(&self, runs: u32, output: Output) -> anyhow::Result<bool> {
        let sides: anyhow::Result<Vec<_>> = self
            .sides
            .iter()
            .map(|(name, kind, args)| Ok((name.to_string(), parse_setup(args)?, *kind)))
            .collect();
        // A hundred gigabytes say enough in one session.
        let runs = if self.name == "large" { 1 } else { runs };
        let summaries = interleave(&sides?, runs, output)?;
        let figure = (self.figure)(&summaries);
        let (met, goal) = match self.goal {
            Goal::AtLeast(least) => (figure >= least, format!("at least {least}")),
            Goal::AtMost(most) => (figure <= most, format!("at most {most}")),
        };
        if !output.json {
            anstream::println!("{}", table(&summaries));
        }
        output.event(
            "target",
            json!({ "target": self.name, "what": self.what, "figure": figure,
                "goal": goal, "met": met }),
            &format!(
                "{}: {}: {figure:.2}, {goal}: {}\n",
                self.name,
                self.what,
                if met { "met" } else { "MISSED" }
            ),
        );
        Ok(met)
    }
}

fn parse_setup(args: &str) -> anyhow::Result<Setup> {
    let command = Setup::augment_args(clap::Command::new("setup").no_binary_name(true));
    Ok(Setup::from_arg_matches(&command.try_get_matches_from(args.split_whitespace())?)?)
}
