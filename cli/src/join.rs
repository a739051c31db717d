//! `fedlane join`: a client.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use fedlane::client::{Canceller, Client, ClientConfig, Target, Task};
use fedlane::error::{ClientError, SinkError};
use fedlane::manifest::{ChunkTable, Manifest};
use fedlane::meter::Meter;
use fedlane::region::Region;
use fedlane::ring::{self, Joined, MeanSink, Member, Outcome, RingMember};
use fedlane::sink::file::ModelFile;
use fedlane::source::Source;
use fedlane::source::region::RegionSource;
use fedlane::sys::process;
use serde_json::json;

use crate::args::{Paths, parse_bytes, parse_examples};
use crate::check::{Expected, Samples};
use crate::door::{ClientCertificates, SharedSecret};
use crate::output::{Output, error_text, phase_fields, phase_text};
use crate::progress::{Bar, Progress};
use crate::serve::try_output;
use crate::update::Update;

/// Send a model to an aggregator and take the mean of all clients' models
///
/// In every round the client runs --train, if given, then sends --model, then takes the mean
/// into --output. A connection that breaks is dialled again for --reconnect-ms.
#[derive(Args)]
pub struct Join {
    /// Address and port of `fedlane serve`
    #[arg(value_name = "ADDRESS")]
    address: String,

    #[command(flatten)]
    update: Update,

    /// Number of training examples: the weight of this client in the mean
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_examples)]
    examples: f64,

    /// Name in logs and errors, unique in the session [default: host name and process number]
    #[arg(long)]
    name: Option<String>,

    /// Write the mean here in every round; the file is replaced whole
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Shell command to run before every upload; it leaves its update in --model
    ///
    /// FEDLANE_ROUND is the round, FEDLANE_MODEL is --model, FEDLANE_OUTPUT is --output: the
    /// newest mean. Before the first mean (or --initial model) there is none, but a file of an
    /// earlier session may still stand there.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["generate", "preset"])]
    train: Option<String>,

    #[command(flatten)]
    paths: Paths,

    #[command(flatten)]
    secret: SharedSecret,

    #[command(flatten)]
    certificates: ClientCertificates,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,

    /// HOST:PORT where the neighbour in a ring or chain reaches this client, behind NAT; the port is listened on
    ///
    /// If it is not said, a free port of the address that is used to dial ADDRESS.
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,

    /// In a ring or chain: most memory that this client may take; a mean that has no room goes to --output as
    /// it comes [default: the mean is held in memory]
    ///
    /// Of --model and --generate some chunks are held at a time, and so of such a mean: any model will do.
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,

    /// What the clients of a ring or chain send, as JSON: the result is compared with the mean of it
    #[arg(long, value_name = "JSON", hide = true)]
    expect: Option<Expected>,

    /// Copy the parameters into a warm region before the first round and send from there
    #[arg(long, hide = true)]
    stage: bool,
}

/// Parameters in a region, with their checksums.
struct Staged {
    region: Region,
    manifest: Manifest,
    sums: Vec<u64>,
}

impl Staged {
    fn seal(region: Region, manifest: &Manifest, chunks: &ChunkTable) -> Staged {
        let sums = RegionSource::seal(manifest, &region, chunks, 1).into_sums();
        Staged { region, manifest: manifest.clone(), sums }
    }
}

/// How often a client that trains looks whether its session goes on.
const TRAINING_CHECK: Duration = Duration::from_millis(50);

/// Bytes that are generated at once.
const FILL_BYTES: usize = 1 << 20;

impl Join {
    /// Runs the client's side of the session.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        if let Some(path) = &self.output {
            try_output(path)?;
        }
        let source = self.update.open()?;
        let manifest = source.manifest().clone();
        // Before the others are made to wait.
        let filled = self.stage.then(|| self.fill(source.as_ref(), output)).transpose()?;
        drop(source);
        let config = ClientConfig {
            name: self.name.clone().unwrap_or_else(default_name),
            examples: self.examples,
            secret: self.secret.read()?,
            tls: self.certificates.read()?,
            send_path: self.paths.send_path,
            receive_path: self.paths.receive_path,
            congestion: self.paths.congestion.clone(),
            deadline: self.paths.deadline(),
            reconnect: self.paths.reconnect(),
        };
        output.event(
            "joining",
            json!({ "address": self.address, "bytes": manifest.data_bytes() }),
            &format!("joining {} as \"{}\"", self.address, config.name),
        );
        let member = RingMember { client: config, advertise: self.advertise.clone() };
        let canceller = Canceller::default();
        let joined = ring::join_any(self.address.as_str(), member, &manifest, &canceller)?;
        let mut client = match joined {
            Joined::Star(client) => client,
            Joined::Ring(mut member) => {
                let result = self.take_part_in_ring(&mut member, &manifest, filled, output);
                if let Err(error) = &result {
                    member.give_up(&error_text(error));
                }
                return result;
            }
        };
        let result = self.take_part(&mut client, &manifest, filled, output);
        if let Err(error) = &result {
            client.give_up(&error_text(error));
        }
        result
    }

    fn take_part(
        &self,
        client: &mut Client,
        manifest: &Manifest,
        filled: Option<Region>,
        output: Output,
    ) -> anyhow::Result<()> {
        let staged = filled.map(|region| Staged::seal(region, manifest, client.chunks()));
        let (mut reported, mut rounds) = (0, 0);
        loop {
            match client.next_task()? {
                Task::Upload { round } => {
                    rounds = round;
                    if let Some(why) = self.upload(client, round, staged.as_ref())? {
                        output.event(
                            "left_out",
                            json!({ "round": round, "why": why }),
                            &format!("round {round}: this update is not in the mean: {why}"),
                        );
                    }
                }
                Task::Download { round, digest } => {
                    self.download(client, manifest, round, digest)?;
                    // Of a client that began again, the earlier one has sent the update.
                    rounds = round;
                }
                Task::Done if rounds == client.rounds() => break,
                Task::Done => bail!(
                    "aggregator {}: ended after {rounds} of {} rounds",
                    self.address,
                    client.rounds()
                ),
            }
            reported = self.report(client, output, reported);
        }
        output.event(
            "done",
            json!({ "rounds": client.rounds(), "peak_rss_bytes": process::peak_rss_bytes() }),
            &format!("{} of {} rounds done", client.rounds(), client.rounds()),
        );
        Ok(())
    }

    fn take_part_in_ring(
        &self,
        member: &mut Member,
        manifest: &Manifest,
        filled: Option<Region>,
        output: Output,
    ) -> anyhow::Result<()> {
        let (model_bytes, staged) = (manifest.data_bytes(), u64::from(filled.is_some()));
        let mut mean = match memory_holds(self.memory, model_bytes, 1 + staged) {
            true => Some(Region::new(model_bytes)?),
            false => None,
        };
        let mut samples = None;
        while let Some(round) = member.next_round()? {
            if let Some(command) = &self.train {
                self.run_training(command, round, || member.check())?;
            }
            let source: Box<dyn Source + '_> = match &filled {
                Some(region) => Box::new(RegionSource::new(manifest, region, 0, Vec::new())),
                None => self.update.open()?,
            };
            let file = self.output.as_ref().map(|path| ModelFile::create(path, manifest));
            let file = file.transpose()?;
            let outcome = match &mut mean {
                Some(mean) => {
                    let outcome = member.all_reduce(source.as_ref(), self.examples, mean)?;
                    file.as_ref().map_or(Ok(()), |file| file.write_at(0, mean.bytes()))?;
                    outcome
                }
                None => {
                    let every = if self.expect.is_some() { Some(manifest) } else { None };
                    let sink = Passing { file: file.as_ref(), samples: every.map(Samples::new) };
                    let target = ring::Target::Sink(&sink);
                    let outcome = member.all_reduce_to(source.as_ref(), self.examples, target)?;
                    samples = sink.samples;
                    outcome
                }
            };
            report_ring(&outcome, output);
            file.map_or(Ok(()), ModelFile::finish)?;
        }
        if let Some(expected) = &self.expect {
            let checked = match (&mean, &samples) {
                (Some(mean), _) => expected.check(manifest, mean.bytes())?,
                (None, Some(samples)) => expected.check_samples(samples)?,
                (None, None) => bail!("there was no round whose mean could be checked"),
            };
            output.event(
                "verified",
                json!({ "verified": true, "elements": checked.elements, "sampled": mean.is_none(),
                    "largest_error_of_tolerance": checked.largest_error }),
                &format!(
                    "verified: {} elements, largest error {:.2} of what rounding allows",
                    checked.elements, checked.largest_error
                ),
            );
        }
        output.event(
            "done",
            json!({ "rounds": member.rounds(), "peak_rss_bytes": process::peak_rss_bytes() }),
            &format!("{} of {} rounds done", member.rounds(), member.rounds()),
        );
        Ok(())
    }

    /// Fills a region with the parameters, as a training framework would that leaves its update in
    /// shared memory.
    fn fill(&self, source: &dyn Source, output: Output) -> anyhow::Result<Region> {
        let meter = Meter::start("prepare", 0);
        let mut region = Region::new(source.manifest().data_bytes())?;
        for (number, bytes) in region.bytes_mut().0.chunks_mut(FILL_BYTES).enumerate() {
            source.read((number * FILL_BYTES) as u64, bytes)?;
        }
        let phase = meter.stop(0);
        output.event("phase", phase_fields(&phase), &phase_text(&phase));
        Ok(region)
    }

    fn upload(
        &self,
        client: &mut Client,
        round: u32,
        staged: Option<&Staged>,
    ) -> anyhow::Result<Option<String>> {
        if let Some(command) = &self.train {
            self.run_training(command, round, || client.check())?;
        }
        let source: Box<dyn Source + '_> = match staged {
            Some(Staged { region, manifest, sums }) => {
                let chunk_bytes = client.chunks().chunk_bytes();
                Box::new(RegionSource::new(manifest, region, chunk_bytes, sums.clone()))
            }
            None => self.update.open()?,
        };
        let progress = client.progress();
        let total_bytes = source.manifest().data_bytes();
        let position = Box::new(move || progress.bytes().0);
        let bar = Bar { label: format!("round {round} upload"), total_bytes, position };
        let _shown = Progress::show(vec![bar], !self.json);
        Ok(client.upload(round, source.as_ref())?)
    }

    fn download(
        &self,
        client: &mut Client,
        manifest: &Manifest,
        round: u32,
        digest: [u8; 32],
    ) -> anyhow::Result<()> {
        let progress = client.progress();
        let total_bytes = manifest.data_bytes();
        let position = Box::new(move || progress.bytes().1);
        let bar = Bar { label: format!("round {round} download"), total_bytes, position };
        let shown = Progress::show(vec![bar], !self.json);
        match &self.output {
            Some(path) => {
                let file = ModelFile::create(path, manifest)?;
                client.download(round, digest, Target::File(&file))?;
                file.finish()?;
            }
            None => client.download(round, digest, Target::Check)?,
        }
        drop(shown);
        client.confirm(round);
        Ok(())
    }

    fn run_training(
        &self,
        command: &str,
        round: u32,
        mut check: impl FnMut() -> Result<(), ClientError>,
    ) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut shell = Command::new(program);
        shell.args(["train-shell", command]).env("FEDLANE_ROUND", round.to_string());
        if let Some(path) = &self.update.model {
            shell.env("FEDLANE_MODEL", path);
        }
        if let Some(path) = &self.output {
            shell.env("FEDLANE_OUTPUT", path);
        }
        // Standard output belongs to fedlane's own lines.
        shell.stdout(std::io::stderr());
        let mut shell = shell.spawn().context("the --train command could not be started")?;
        loop {
            if let Some(status) = shell.try_wait()? {
                anyhow::ensure!(
                    status.success(),
                    "the --train command failed in round {round}: {status}"
                );
                return Ok(());
            }
            if let Err(ended) = check() {
                // Nobody waits for what it computes any more.
                shell.kill()?;
                shell.wait()?;
                return Err(ended.into());
            }
            std::thread::sleep(TRAINING_CHECK);
        }
    }

    /// Prints the phases from number `from` on and returns how many there are now.
    fn report(&self, client: &Client, output: Output, from: usize) -> usize {
        for phase in &client.phases()[from..] {
            output.event("phase", phase_fields(phase), &phase_text(phase));
        }
        client.phases().len()
    }
}

/// Memory of a client that holds no model: chunks on their way, and the program.
const OWN_BYTES: u64 = 128 << 20;

/// Whether so many models fit into `memory`.
pub fn memory_holds(memory: Option<u64>, model_bytes: u64, models: u64) -> bool {
    let needed = model_bytes.saturating_mul(models).saturating_add(OWN_BYTES);
    memory.is_none_or(|most| needed <= most)
}

fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    if bytes < OWN_BYTES {
        return Err(format!("must be {} MiB or more", OWN_BYTES >> 20));
    }
    Ok(bytes)
}

/// Where a mean goes that is not held.
struct Passing<'a> {
    file: Option<&'a ModelFile>,
    samples: Option<Samples>,
}

impl MeanSink for Passing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        if let Some(samples) = &self.samples {
            samples.take(offset, bytes);
        }
        self.file.map_or(Ok(()), |file| file.write_at(offset, bytes))
    }
}

/// Says what an all-reduce came to.
fn report_ring(outcome: &Outcome, output: Output) {
    if let Some(what) = &outcome.nonfinite {
        let (round, fields) = (outcome.round, json!({ "round": outcome.round, "why": what }));
        output.event("nonfinite", fields, &format!("round {round}: of this update, {what}"));
    }
    let mut fields = phase_fields(&outcome.phase);
    fields["clients"] = json!(outcome.ranks.len());
    fields["received_bytes"] = json!(outcome.received_bytes);
    output.event("phase", fields, &phase_text(&outcome.phase));
    let names: Vec<&str> = outcome.ranks.iter().map(|(name, _)| name.as_str()).collect();
    let fields = json!({ "round": outcome.round, "clients": names, "rank": outcome.rank,
        "attempts": outcome.attempts });
    let text = format!("round {}: the mean of {}", outcome.round, names.join(" -> "));
    output.event("averaged", fields, &text);
}

pub fn default_name() -> String {
    format!("{}-{}", host_name(), std::process::id())
}

/// The name of this machine.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Runs a shell command that ends with the process that started it.
#[derive(Args)]
pub struct TrainShell {
    command: std::ffi::OsString,
}

impl TrainShell {
    /// Becomes the shell.
    pub fn run(self) -> anyhow::Result<()> {
        let signal = rustix::process::Signal::TERM;
        // Where this is refused, `join` still ends the command itself.
        let _ = rustix::process::set_parent_process_death_signal(Some(signal));
        let error = Command::new("sh").arg("-c").arg(self.command).exec();
        Err(error).context("the shell for the --train command could not be started")
    }
}
