//! `fedlane serve`: the aggregator.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use fedlane::aggregator::{Aggregator, AggregatorConfig, Session};
use fedlane::limits;
use fedlane::manifest::Manifest;
use fedlane::named::Named;
use fedlane::ring::{Coordinator, RingConfig};
use fedlane::sink::file::ModelFile;
use fedlane::source::Source;
use fedlane::source::file::FileSource;
use fedlane::sys::process;
use fedlane::topology::tree::Leaf;
use fedlane::topology::{Shape, Topology};
use fedlane::verdict::OnNonfinite;
use serde_json::json;

use crate::args::{Averager, Paths, by_name};
use crate::check::Expected;
use crate::door::Door;
use crate::output::{Output, error_text, phase_fields, phase_text, update_fields, update_text};
use crate::progress::{Bar, Progress};
use crate::transfers::Watch;

/// Wait for clients, average their models while they arrive, and send the mean back
///
/// The clients run `fedlane join`. Every client must bring the same tensors. The mean is weighted
/// by each client's --examples. A client whose connection breaks may come back and goes on where it
/// was. One that does not, or that sends something else, is left out if --min-clients are left;
/// otherwise it ends the session for all, with an error that names it.
#[derive(Args)]
pub struct Serve {
    /// Address and port to listen on; 0.0.0.0:PORT lets other machines in
    ///
    /// That takes --secret-file or --tls-cert, or else --insecure: everyone who reaches the port can then join.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7733")]
    listen: String,

    /// Number of clients to wait for; in a tree, of those that join this process: edges and clients
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=limits::MAX_CLIENTS as u64))]
    clients: u64,

    /// Who sends to whom
    #[arg(long, value_parser = by_name::<Topology>(), default_value = Topology::Star.name())]
    topology: Topology,

    /// Number of rounds to run
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::MAX_ROUNDS)))]
    rounds: u32,

    /// Send this safetensors file to every client before the first round
    #[arg(long, value_name = "FILE")]
    initial: Option<PathBuf>,

    /// Write the model here after every round; the file is replaced whole
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Keep the session in this directory, so that the same command, started again, goes on with it
    ///
    /// For an aggregator that is killed: clients dial again for --reconnect-ms and what has come of their
    /// updates is not sent again. The directory is made if there is none, and holds nothing but an empty lock
    /// when all rounds are done. It needs room for what the rounds hold, and a local file system.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,

    /// Name of the next client in a ring or chain, from the first on, as `fedlane plan` says; can be given
    /// more than once. Those who are not named stand behind
    #[arg(long, value_name = "NAME")]
    rank: Vec<String>,

    #[command(flatten)]
    averager: Averager,

    #[command(flatten)]
    paths: Paths,

    #[command(flatten)]
    door: Door,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,

    /// What the clients send, as JSON: the result is compared with the mean of it
    #[arg(long, value_name = "JSON", hide = true)]
    expect: Option<Expected>,
}

impl Serve {
    /// Runs the session.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        if let Some(shape) = self.topology.shape() {
            return self.run_ring(shape, output);
        }
        if let Some(path) = &self.output {
            try_output(path)?;
        }
        let initial = self.initial.as_ref().map(FileSource::open).transpose()?;
        let config = AggregatorConfig {
            secret: self.door.secret.read()?,
            tls: self.door.certificates.read()?,
            insecure: self.door.insecure,
            state: self.state.clone(),
            tree: self.topology == Topology::Tree,
            ..self.averager.config(self.clients as usize, self.rounds, &self.paths)
        };
        let aggregator = Aggregator::bind(self.listen.as_str(), config)?;
        let address = aggregator.address();
        output.event(
            "listening",
            json!({ "address": address.to_string(), "clients": self.clients }),
            &format!("listening on {address}, waiting for {} clients", self.clients),
        );
        let mut session = aggregator.gather(initial.as_ref().map(|i| i.manifest().clone()))?;
        let result = self.run_rounds(&mut session, initial.as_ref(), output);
        if let Err(error) = result {
            session.give_up(&error_text(&error));
            return Err(match &self.state {
                Some(path) => error.context(format!(
                    "the session is kept in {}: start the same command again to go on, or remove the directory",
                    path.display()
                )),
                None => error,
            });
        }
        session.finish()?;
        let path = self.output.as_deref().map(Path::display);
        let saved = path.map_or(String::new(), |path| format!("; the model is in {path}"));
        output.event(
            "done",
            json!({ "rounds": self.rounds, "peak_rss_bytes": process::peak_rss_bytes() }),
            &format!("{} of {} rounds done{saved}", self.rounds, self.rounds),
        );
        Ok(())
    }

    /// Keeps a ring or a chain together.
    fn run_ring(&self, shape: Shape, output: Output) -> anyhow::Result<()> {
        let name = self.topology.name();
        if self.initial.is_some() || self.output.is_some() || self.expect.is_some() {
            bail!(
                "in a {name} no model passes through this process: give --output to `fedlane join`, and \
                 leave --initial out"
            );
        }
        if self.state.is_some() {
            bail!("in a {name} this process holds nothing that could be kept; leave --state out");
        }
        self.averager.check_without_aggregator(self.topology)?;
        let mut ring = Coordinator::bind(self.listen.as_str(), self.ring_config(shape)?)?;
        let address = ring.address();
        output.event(
            "listening",
            json!({ "address": address.to_string(), "clients": self.clients }),
            &format!("listening on {address}, waiting for {} clients of a {name}", self.clients),
        );
        ring.gather()?;
        for _ in 0..self.rounds {
            let report = ring.run_round()?;
            let on_nonfinite = self.averager.on_nonfinite;
            let nonfinite: BTreeMap<&str, &str> = report
                .nonfinite
                .iter()
                .map(|(name, what)| (name.as_str(), what.as_str()))
                .collect();
            let counts =
                |name: &&str| on_nonfinite != OnNonfinite::Reject || !nonfinite.contains_key(name);
            let names: Vec<&str> =
                report.ranks.iter().map(|(name, _)| name.as_str()).filter(counts).collect();
            for (name, what) in &nonfinite {
                let done = if counts(name) { "that counts as zero" } else { "it is left out" };
                output.event(
                    "nonfinite",
                    json!({ "round": report.round, "client": name, "why": what }),
                    &format!("round {}: update of {name}: {what}: {done}", report.round),
                );
            }
            let attempts = match report.attempts {
                1 => String::new(),
                attempts => format!(", at attempt {attempts}"),
            };
            output.event(
                "averaged",
                json!({ "round": report.round, "clients": names, "attempts": report.attempts,
                    "seconds": report.seconds, "nonfinite": nonfinite }),
                &format!(
                    "round {}: the mean of {}, the same on all of them, in {:.3} s{attempts}",
                    report.round,
                    names.join(" -> "),
                    report.seconds
                ),
            );
        }
        ring.finish();
        output.event(
            "done",
            json!({ "rounds": self.rounds, "peak_rss_bytes": process::peak_rss_bytes() }),
            &format!("{} of {} rounds done", self.rounds, self.rounds),
        );
        Ok(())
    }

    fn ring_config(&self, shape: Shape) -> anyhow::Result<RingConfig> {
        Ok(RingConfig {
            shape,
            ranks: self.clients as usize,
            min_ranks: self.averager.min_clients.map(|least| least as usize),
            round_deadline: self.averager.round_deadline,
            rounds: self.rounds,
            streams: self.averager.streams,
            chunk_bytes: self.averager.chunk_bytes.min(limits::RING_CHUNK_BYTES),
            deadline: self.paths.deadline(),
            congestion: self.paths.congestion.clone(),
            on_nonfinite: self.averager.on_nonfinite,
            secret: self.door.secret.read()?,
            tls: self.door.certificates.read()?,
            insecure: self.door.insecure,
            order: self.rank.clone(),
        })
    }

    fn run_rounds(
        &self,
        session: &mut Session,
        initial: Option<&FileSource>,
        output: Output,
    ) -> anyhow::Result<()> {
        if let Some(path) = &self.output {
            // Reserves the space and gives it back: a full disk shows now.
            ModelFile::create(path, session.manifest())?;
        }
        let mut reported = self.report(session, output, 0);
        if let (Some(path), Some(model), 1..) =
            (&self.output, session.model(), session.rounds_done())
        {
            // Of an earlier process, which may not have saved it.
            save(path, session.manifest(), model.bytes())?;
        }
        if let Some(initial) = initial.filter(|_| session.sent().is_none()) {
            session.send_initial(initial)?;
        }
        while session.rounds_done() < self.rounds || session.is_unsent() {
            if let Err(error) = self.run_round(session, output) {
                report_updates(session, output);
                return Err(error);
            }
            reported = self.report(session, output, reported);
            report_updates(session, output);
        }
        if let (Some(expected), Some(model)) = (&self.expect, session.model()) {
            let checked = expected.check(session.manifest(), model.bytes())?;
            output.event(
                "verified",
                json!({ "verified": true, "elements": checked.elements,
                    "largest_error_of_tolerance": checked.largest_error }),
                &format!(
                    "verified: {} elements, largest error {:.2} of what rounding allows",
                    checked.elements, checked.largest_error
                ),
            );
        }
        Ok(())
    }

    fn run_round(&self, session: &mut Session, output: Output) -> anyhow::Result<()> {
        let total_bytes = session.progress().model_bytes();
        let bars = |upload: bool| {
            let progress = session.progress();
            let names: Vec<String> = progress.clients().map(|c| c.name.to_string()).collect();
            let arrow = if upload { "from" } else { "to" };
            let bars = names.into_iter().enumerate().map(|(index, name)| {
                let progress = progress.clone();
                let position = move || {
                    let client = progress.clients().nth(index);
                    client.map_or(0, |c| if upload { c.uploaded_bytes } else { c.downloaded_bytes })
                };
                Bar { label: format!("{arrow} {name}"), total_bytes, position: Box::new(position) }
            });
            bars.collect::<Vec<_>>()
        };
        let (uploads, downloads) = (bars(true), bars(false));
        let watch = |session: &Session, upload| {
            self.json.then(|| Watch::start(session.progress(), upload)).flatten()
        };
        let shown = Progress::show(uploads, !self.json);
        let watched = watch(session, true);
        if !session.is_unsent() {
            session.round()?;
        }
        drop(shown);
        report_leaves(&session.leaves(), session.rounds_done(), "round", output);
        watched.into_iter().for_each(|watched| watched.report(session.rounds_done(), output));
        // The clients need not wait for the disk, nor the disk for the clients.
        let saving = self.output.clone().zip(session.model()).map(|(path, model)| {
            let manifest = session.manifest().clone();
            std::thread::Builder::new().spawn(move || save(&path, &manifest, model.bytes()))
        });
        let saving = saving.transpose().context("the host refused a thread to save the model")?;
        let shown = Progress::show(downloads, !self.json);
        let watched = watch(session, false);
        let sent = session.broadcast();
        drop(shown);
        watched.into_iter().for_each(|watched| watched.report(session.rounds_done(), output));
        let saved = saving.map_or(Ok(()), |saving| {
            saving.join().unwrap_or_else(|_| bail!("saving the model panicked; please report this"))
        });
        // Without the file there is no result, whoever received the model.
        saved.and_then(|()| Ok(sent?))
    }

    /// Prints the phases from number `from` on and returns how many there are now.
    fn report(&self, session: &Session, output: Output, from: usize) -> usize {
        for phase in &session.phases()[from..] {
            let mut fields = phase_fields(phase);
            fields["clients"] = json!(self.clients);
            output.event("phase", fields, &phase_text(phase));
        }
        session.phases().len()
    }
}

/// Says whose updates are in the mean of a round.
pub fn report_leaves(leaves: &[Leaf], round: u32, what: &str, output: Output) {
    let of = |in_mean: bool| leaves.iter().filter(move |leaf| leaf.left_out.is_none() == in_mean);
    let names = |in_mean| of(in_mean).map(|leaf| leaf.name.as_str()).collect::<Vec<_>>();
    let (counted, left_out) = (names(true), names(false));
    let text = match left_out.as_slice() {
        [] => format!("{what} {round}: the mean of {} clients", counted.len()),
        missing => format!(
            "{what} {round}: the mean of {}, without {}",
            counted.join(", "),
            missing.join(", ")
        ),
    };
    let why: serde_json::Map<_, _> =
        of(false).map(|leaf| (leaf.name.clone(), json!(leaf.left_out))).collect();
    let fields = json!({ "round": round, "clients": counted, "left_out": left_out, "why": why });
    let event = if what == "round" { "averaged" } else { "averaged_locally" };
    output.event(event, fields, &text);
}

/// Prints what was found in the updates of the newest round.
pub fn report_updates(session: &Session, output: Output) {
    for report in session.updates() {
        output.event("update", update_fields(report), &update_text(report));
    }
}

/// Finds out before anything is moved whether `path` can be written.
pub fn try_output(path: &Path) -> anyhow::Result<()> {
    let empty = Manifest::from_tensors([], &Default::default())?;
    ModelFile::create(path, &empty)?;
    Ok(())
}

fn save(path: &Path, manifest: &Manifest, model: &[u8]) -> anyhow::Result<()> {
    let file = ModelFile::create(path, manifest)?;
    file.write_at(0, model)?;
    file.finish()
        .with_context(|| format!("the model was averaged but not saved to {}", path.display()))
}
