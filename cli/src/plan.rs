//! `fedlane plan`: which shape a session should have, and who is where in it.

mod commands;
mod report;
mod speed;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use fedlane::error::ControlError;
use fedlane::limits;
use fedlane::manifest::Dtype;
use fedlane::reducer::AccumulatorLayout;
use fedlane::topology::Topology;
use fedlane::topology::cost::ModelSize;
use fedlane::topology::measured::Speed;
use fedlane::topology::plan::{Method, Plan as Found, best, plan};
use fedlane::topology::profile::Profile;

use crate::args::{by_name, parse_bytes, parse_dtype, parse_preset};
use crate::output::Output;
use crate::update::Update;

/// Find out which shape a session should have, so that a round takes the least time
///
/// A profile says what hosts and links can do; docs/PLAN.md says how it is written. The plan names the
/// shape (star, tree, chain or ring), what it takes, what it waits for, and the command of each host.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Plan {
    #[command(subcommand)]
    measure: Option<Measure>,

    /// The profile of hosts and links, a JSON file; --measured changes it
    #[arg(long, value_name = "FILE", required = true)]
    profile: Option<PathBuf>,

    /// A safetensors file of the model that will be trained
    #[arg(long, value_name = "FILE", conflicts_with_all = ["generate", "preset"])]
    #[arg(required_unless_present_any = ["generate", "preset", "measured"])]
    model: Option<PathBuf>,

    /// Plan for a model of this size, e.g. 1GiB or 500MB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "preset")]
    generate: Option<u64>,

    /// Plan for a known model, e.g. gemma-2-2b
    #[arg(long, value_name = "NAME", value_parser = parse_preset)]
    preset: Option<String>,

    /// Dtype of --generate: f32, f16, bf16, f64, i64, ...
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    dtype: Dtype,

    /// Plan this shape only [default: the fastest of them]
    #[arg(long, value_parser = by_name::<Topology>())]
    topology: Option<Topology>,

    /// Correct the profile first by what the aggregator HOST printed with `fedlane serve --json`
    ///
    /// Clients must have joined under their names in the profile (--name). Newer rounds count more than
    /// older ones. Can be given more than once.
    #[arg(long, value_name = "HOST=FILE", value_parser = parse_measured)]
    measured: Vec<(String, PathBuf)>,

    /// Show the prediction for each transfer, what the round waits for, and the other shapes
    #[arg(long)]
    explain: bool,

    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

/// How profiles are measured.
#[derive(Subcommand)]
enum Measure {
    Listen(speed::Listen),
    Probe(speed::Probe),
}

fn parse_measured(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((host, file)) if !host.is_empty() && !file.is_empty() => {
            Ok((host.into(), file.into()))
        }
        _ => {
            Err("write HOST=FILE: the aggregator's name in the profile, and what it printed".into())
        }
    }
}

impl Plan {
    /// Corrects the profile if there is anything new, and prints the plan.
    pub fn run(self) -> anyhow::Result<()> {
        match self.measure {
            Some(Measure::Listen(listen)) => return listen.run(),
            Some(Measure::Probe(probe)) => return probe.run(),
            None => {}
        }
        let output = Output { json: self.json };
        let file = self.profile.as_deref().context("name --profile")?;
        let shown = file.display();
        let mut profile = read_profile(file)?;
        if !self.measured.is_empty() {
            self.learn(file, &mut profile, output)?;
        }
        let Some(model) = self.model_size()? else { return Ok(()) };
        let found = match self.topology {
            Some(topology) => plan(&profile, model, topology, Method::Best),
            None => best(&profile, model, Method::Best),
        };
        let found = found.with_context(|| format!("{shown} cannot be planned with"))?;
        let others = match (self.explain, self.topology) {
            (true, None) => self.others(&profile, model, &found),
            _ => Vec::new(),
        };
        report::print(&profile, model, &found, &others, self.explain, output);
        Ok(())
    }

    /// What the other shapes take, or why they cannot be.
    fn others(
        &self,
        profile: &Profile,
        model: ModelSize,
        found: &Found,
    ) -> Vec<(Topology, Result<f64, String>)> {
        let others = Topology::ALL.into_iter().filter(|&topology| topology != found.topology);
        let seconds = |topology| match plan(profile, model, topology, Method::Best) {
            // A tree without edges is a star, which is shown already.
            Ok(other) if other.topology != topology => Err("the best one has no edges".to_owned()),
            Ok(other) => Ok(other.seconds()),
            Err(error) => Err(error.to_string()),
        };
        others.map(|topology| (topology, seconds(topology))).collect()
    }

    /// Corrects the profile by rounds, and writes it.
    fn learn(&self, path: &Path, profile: &mut Profile, output: Output) -> anyhow::Result<()> {
        let now = unix_s();
        let mut rounds = 0;
        for (host, file) in &self.measured {
            let lines = read(file, limits::MAX_PROFILE_BYTES)?;
            let learnt = profile.learn(host, &lines, now);
            rounds += learnt.with_context(|| format!("{} was not used", file.display()))?;
        }
        write(path, &profile.to_json())?;
        let shown = path.display();
        output.event(
            "measured",
            serde_json::json!({ "rounds": rounds, "profile": shown.to_string() }),
            &format!("{shown}: corrected by {rounds} rounds"),
        );
        Ok(())
    }

    fn model_size(&self) -> anyhow::Result<Option<ModelSize>> {
        if self.model.is_none() && self.generate.is_none() && self.preset.is_none() {
            return Ok(None);
        }
        let update = Update {
            model: self.model.clone(),
            generate: self.generate,
            preset: self.preset.clone(),
            dtype: self.dtype,
            seed: 0,
            scale_exponent: 0,
        };
        let source = update.open()?;
        let manifest = source.manifest();
        let sum_bytes = AccumulatorLayout::of(manifest)?.bytes();
        Ok(Some(ModelSize { bytes: manifest.data_bytes(), sum_bytes }))
    }
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn read_profile(path: &Path) -> anyhow::Result<Profile> {
    let text = read(path, limits::MAX_PROFILE_BYTES)?;
    Profile::from_json(&text).with_context(|| format!("{} cannot be planned with", path.display()))
}

/// Writes what was measured into a profile, which is made if there is none.
fn add_speed(path: &Path, speed: &Speed) -> anyhow::Result<()> {
    let mut profile = if path.exists() { read_profile(path)? } else { Profile::default() };
    let added = profile.add_speed(speed, unix_s());
    added.with_context(|| format!("what was measured is not in {}", path.display()))?;
    write(path, &profile.to_json())
}

/// Says which host could not be measured.
fn probed(address: &str, found: Result<Speed, ControlError>) -> anyhow::Result<Speed> {
    found.with_context(|| format!("{address} was not measured"))
}

/// Reads a file that has at most `limit` bytes.
fn read(path: &Path, limit: u64) -> anyhow::Result<String> {
    let shown = path.display();
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {shown}"))?;
    let mut bytes = Vec::new();
    let read = file.take(limit + 1).read_to_end(&mut bytes);
    read.with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() as u64 > limit {
        bail!("{shown} has more than {limit} bytes; name a profile, or what `--json` printed");
    }
    String::from_utf8(bytes).with_context(|| format!("{shown} is not text"))
}

/// Replaces a file whole, so that nobody reads half of it.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        // It may not be there.
        let _ = std::fs::remove_file(&beside);
    }
    written
        .with_context(|| format!("the profile was corrected but not written to {}", path.display()))
}
