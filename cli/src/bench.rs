//! `fedlane bench`: measurements that anyone can repeat.

mod raw;
mod sample;
mod seal;
mod setup;
mod targets;

use clap::{Args, Subcommand};

use sample::Summary;
use setup::{Kind, Setup};

use crate::output::Output;

/// Measure: plain sockets, whole rounds, and one against the other
#[derive(Args)]
pub struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Plain sockets: clients write from memory, the receiver throws the bytes away
    ///
    /// The baseline. Each client and the receiver are processes of their own; the receiver has one
    /// thread for each connection, which calls recv() into a buffer that it uses again and again.
    /// The bytes are not checked.
    Raw(Run),
    /// Whole rounds: clients send from warm regions, the aggregator averages while bytes arrive
    ///
    /// The result of every session is compared with a reference average.
    Round(Run),
    Seal(seal::Seal),
    /// The comparisons that fedlane promises, each interleaved in one run
    Targets(targets::Targets),
    #[command(hide = true)]
    RawReceive(raw::RawReceive),
    #[command(hide = true)]
    RawSend(raw::RawSend),
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    setup: Setup,

    /// Sessions to run; each begins with a round that warms up and is not counted
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Interleave with another kind of run, and print the ratio of the medians
    #[arg(long, value_name = "KIND", value_enum)]
    against: Option<Against>,

    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Against {
    /// Plain sockets with the `write` sender, that throw the bytes away
    Raw,
    /// Receive everything first and average after
    Spool,
    /// The same, sent with the `write` path
    Write,
    /// The same without --tls
    Plain,
}

impl Bench {
    /// Runs the benchmark.
    pub fn run(self) -> anyhow::Result<()> {
        match self.what {
            What::Raw(run) => run.measure(Kind::Raw),
            What::Round(run) => run.measure(Kind::Round),
            What::Seal(seal) => seal.run(),
            What::Targets(targets) => targets.run(),
            What::RawReceive(receive) => receive.run(),
            What::RawSend(send) => send.run(),
        }
    }
}

impl Run {
    fn measure(self, kind: Kind) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        let mut sides = vec![(kind.name().to_string(), self.setup.clone(), kind)];
        if let Some(against) = self.against {
            let (name, setup, kind) = against.side(&self.setup);
            sides.push((name, setup, kind));
        }
        let summaries = interleave(&sides, self.runs, output)?;
        if !self.json {
            anstream::println!("{}", sample::table(&summaries));
        }
        if let [this, other] = summaries.as_slice() {
            let ratio = this.goodput_gbit_s / other.goodput_gbit_s;
            let text = format!("{} / {}: {ratio:.2} of the Gbit/s", this.name, other.name);
            let fields = serde_json::json!({ "of": this.name, "against": other.name,
                "goodput_ratio": ratio });
            output.event("ratio", fields, &text);
        }
        Ok(())
    }
}

impl Against {
    fn side(self, setup: &Setup) -> (String, Setup, Kind) {
        let mut setup = setup.clone();
        match self {
            Against::Raw => {
                setup.paths.send_path = "write".parse().ok();
                setup.paths.receive_path = Default::default();
                ("raw".into(), setup, Kind::Raw)
            }
            Against::Spool => {
                setup.averager.averaging = crate::args::AveragingArg::Spool;
                ("spool".into(), setup, Kind::Round)
            }
            Against::Plain => {
                setup.tls = false;
                ("plain".into(), setup, Kind::Round)
            }
            Against::Write => {
                setup.paths.send_path = "write".parse().ok();
                ("write".into(), setup, Kind::Round)
            }
        }
    }
}

/// Runs every side once, then every side again, and so on, so that a disturbance of the machine
/// hits all of them; gives the medians of each.
fn interleave(
    sides: &[(String, Setup, Kind)],
    runs: u32,
    output: Output,
) -> anyhow::Result<Vec<Summary>> {
    let mut samples: Vec<Vec<sample::Sample>> = sides.iter().map(|_| Vec::new()).collect();
    for run in 1..=runs {
        for ((name, setup, kind), samples) in sides.iter().zip(&mut samples) {
            for sample in setup.run(*kind)? {
                if output.json {
                    let mut fields = sample.fields();
                    fields["side"] = serde_json::json!(name);
                    fields["run"] = serde_json::json!(run);
                    output.event("sample", fields, "");
                }
                samples.push(sample);
            }
        }
    }
    let names = sides.iter().map(|(name, ..)| name);
    let summaries: Vec<_> =
        names.zip(&samples).map(|(name, samples)| Summary::new(name, samples)).collect();
    if output.json {
        for summary in &summaries {
            output.event("median", summary.fields(), "");
        }
    }
    Ok(summaries)
}
