//! `fedlane demo`: one round on this machine, checked, and what it cost.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use fedlane::manifest::Dtype;
use fedlane::named::Named;
use fedlane::sys::process::available_memory;
use fedlane::topology::Topology;
use serde_json::{Value, json};

use crate::args::{Averager, Paths, by_name, parse_bytes, parse_dtype, parse_preset};
use crate::check::{Expected, Sender};
use crate::group::{Group, Report};
use crate::join::memory_holds;
use crate::output::{Output, bytes_text, table};
use crate::update::Update;

/// Run an aggregator and clients on this machine, check the mean, and show what it cost
///
/// Every process is one of its own. The result is compared with a reference average, element by
/// element. Nothing is written to disk and no port is left open.
#[derive(Args)]
pub struct Demo {
    /// A safetensors file to average; each client gets it scaled by another power of two
    #[arg(long, value_name = "FILE", conflicts_with_all = ["generate", "preset"])]
    model: Option<PathBuf>,

    /// Size of the generated model, e.g. 1GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "256MiB", conflicts_with = "preset")]
    generate: u64,

    /// Generate a model in the exact shape of a known one: gemma-2-2b
    #[arg(long, value_name = "NAME", value_parser = parse_preset)]
    preset: Option<String>,

    /// Dtype of the generated model
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    dtype: Dtype,

    /// Number of clients
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: u32,

    /// Who sends to whom
    #[arg(long, value_parser = by_name::<Topology>(), default_value = Topology::Star.name())]
    topology: Topology,

    /// Number of edges in a tree, which share the clients
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    edges: u32,

    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Most memory of a client in a ring or chain: models may be larger, and are then sampled to be checked
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,

    #[command(flatten)]
    averager: Averager,

    #[command(flatten)]
    paths: Paths,

    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

impl Demo {
    /// Runs the demo.
    pub fn run(self) -> anyhow::Result<()> {
        let output = Output { json: self.json };
        if self.memory.is_some() && self.topology.shape().is_none() {
            bail!("--memory is for --topology ring or chain; aggregators hold the model");
        }
        let senders: Vec<Sender> = (0..self.clients).map(|client| self.sender(client)).collect();
        let manifest = senders[0].update.open()?.manifest().clone();
        let model_bytes = manifest.data_bytes();
        let stages = self.memory_allows_staging(model_bytes);
        output.event(
            "demo",
            json!({ "clients": self.clients, "bytes": model_bytes,
                "tensors": manifest.tensors().len() }),
            &format!(
                "{} clients, {} tensors, {} each, on loopback",
                self.clients,
                manifest.tensors().len(),
                bytes_text(model_bytes)
            ),
        );
        let reports = self.run_group(&senders, stages, output)?;
        if self.json {
            for report in &reports {
                for event in &report.events {
                    let mut event = event.clone();
                    event["process"] = json!(report.name);
                    output.event("process", event, "");
                }
            }
        } else {
            print_tables(&reports);
        }
        Ok(())
    }

    fn sender(&self, client: u32) -> Sender {
        let generated = self.model.is_none();
        let update = Update {
            model: self.model.clone(),
            generate: (generated && self.preset.is_none()).then_some(self.generate),
            preset: self.preset.clone(),
            dtype: self.dtype,
            seed: u64::from(client) + 1,
            // One real file makes clients that differ: 1, 1/2, 1/4, ... of every parameter.
            scale_exponent: if generated { 0 } else { -((client % 8) as i32) },
        };
        Sender { update, examples: f64::from(10 * (client + 1)) }
    }

    /// Clients send from a warm region, as after training, unless the model is too large for that.
    fn memory_allows_staging(&self, model_bytes: u64) -> bool {
        // Without an aggregator that averages, each holds the mean too.
        let copies = match self.topology {
            Topology::Star => u64::from(self.clients) + 3,
            Topology::Ring | Topology::Chain => 2 * u64::from(self.clients) + 1,
            // An edge holds its sums and the mean, or in order the updates of its clients.
            Topology::Tree => 2 * u64::from(self.clients) + 3 * u64::from(self.edges) + 3,
        };
        model_bytes.saturating_mul(copies) < available_memory().0 / 2
            && memory_holds(self.memory, model_bytes, 2)
    }

    fn run_group(
        &self,
        senders: &[Sender],
        stages: bool,
        output: Output,
    ) -> anyhow::Result<Vec<Report>> {
        let mut group = Group::new();
        let mut serve = vec!["serve".to_string(), "--listen=127.0.0.1:0".to_string()];
        let is_tree = self.topology == Topology::Tree;
        let edges = if is_tree { self.edges.min(self.clients) } else { 0 };
        serve.push(format!("--clients={}", if is_tree { edges } else { self.clients }));
        serve.push(format!("--rounds={}", self.rounds));
        let expect = format!("--expect={}", serde_json::to_string(&Expected(senders.to_vec()))?);
        match self.topology {
            Topology::Star => serve.push(expect.clone()),
            Topology::Tree => serve.extend([expect.clone(), "--topology=tree".to_string()]),
            topology => serve.push(format!("--topology={}", topology.name())),
        }
        serve.extend(self.averager.to_args());
        serve.extend(self.paths.to_args());
        group.start("aggregator", &serve)?;
        let listening = group.await_event("listening")?;
        let address = listening["address"].as_str().unwrap_or_default().to_string();
        let below = self.start_edges(&mut group, &address, edges)?;
        let width = self.clients.to_string().len();
        for (client, sender) in senders.iter().enumerate() {
            // Names in the order of the clients, also as text.
            let name = format!("client-{:0width$}", client + 1);
            let edge = below.iter().find(|(clients, _)| clients.contains(&(client as u32)));
            let address = edge.map_or(&address, |(_, edge)| edge);
            let mut join = vec!["join".to_string(), address.clone(), format!("--name={name}")];
            join.push(format!("--examples={}", sender.examples));
            join.extend(sender.update.to_args());
            join.extend(self.paths.to_args());
            join.extend(stages.then(|| "--stage".to_string()));
            join.extend(self.memory.map(|bytes| format!("--memory={bytes}")));
            // All have the same mean, which is compared by its digest.
            let checks = self.topology != Topology::Star && client == 0;
            join.extend(checks.then(|| expect.clone()));
            let mut join: Vec<OsString> = join.into_iter().map(OsString::from).collect();
            join.extend(sender.update.model_arg());
            group.start(&name, &join)?;
        }
        group.finish(&mut |process, event| {
            if !output.json && process == "aggregator" {
                announce(event);
            }
        })
    }
}

impl Demo {
    /// Starts edges that share the clients in order. Gives each one's clients and its address.
    fn start_edges(
        &self,
        group: &mut Group,
        above: &str,
        edges: u32,
    ) -> anyhow::Result<Vec<(Range<u32>, String)>> {
        let mut started = Vec::new();
        let width = edges.to_string().len();
        let averager = Averager { min_clients: None, ..self.averager.clone() };
        for edge in 0..edges {
            let clients = self.clients * edge / edges..self.clients * (edge + 1) / edges;
            let name = format!("edge-{:0width$}", edge + 1);
            let mut args = vec!["edge".to_string(), above.to_string(), format!("--name={name}")];
            args.push("--listen=127.0.0.1:0".to_string());
            args.push(format!("--clients={}", clients.len()));
            args.extend(averager.to_args());
            args.extend(self.paths.to_args());
            group.start(&name, &args)?;
            let listening = group.await_event("listening")?;
            started.push((clients, listening["address"].as_str().unwrap_or_default().to_string()));
        }
        Ok(started)
    }
}

/// Says what is going on, while it does.
fn announce(event: &Value) {
    match event["event"].as_str() {
        Some("phase") if event["phase"] == "prepare" => {
            anstream::eprintln!("all clients have joined; memory is ready");
        }
        Some("phase") if event["bytes"] != 0 => anstream::eprintln!(
            "round {} {}: {:.1} Gbit/s",
            event["round"],
            event["phase"].as_str().unwrap_or_default(),
            event["goodput_gbit_s"].as_f64().unwrap_or(0.0)
        ),
        _ => {}
    }
}

fn print_tables(reports: &[Report]) {
    let mut phases =
        table(&["process", "round", "phase", "bytes", "seconds", "Gbit/s", "user", "kernel"]);
    for report in reports {
        for event in report.events.iter().filter(|event| event["event"] == "phase") {
            phases.add_row(phase_row(&report.name, event));
        }
    }
    let mut memory = table(&["process", "peak RSS"]);
    for report in reports {
        memory.add_row([report.name.clone(), bytes_text(report.peak_rss_bytes())]);
    }
    anstream::println!("{phases}\n(user, kernel: CPU seconds per GB)\n\n{memory}\n");
    if let Some(verified) = reports.iter().find_map(|report| report.event("verified")) {
        let elements = match verified["sampled"] == true {
            true => format!("{} elements, some of every tensor,", verified["elements"]),
            false => format!("all {} elements", verified["elements"]),
        };
        anstream::println!(
            "verified: {elements} are the weighted mean\n(largest error {:.2} of what rounding allows), and all clients got it",
            verified["largest_error_of_tolerance"].as_f64().unwrap_or(f64::NAN)
        );
    }
}

fn phase_row(process: &str, event: &Value) -> Vec<String> {
    let number = |key: &str| event[key].as_f64().unwrap_or(0.0);
    let text = |key: &str| event[key].as_str().unwrap_or_default().to_string();
    let bytes = event["bytes"].as_u64().unwrap_or(0);
    let mut row = vec![process.to_string(), event["round"].to_string(), text("phase")];
    if bytes == 0 {
        row.extend(["".into(), format!("{:.3}", number("seconds"))]);
        return row;
    }
    row.extend([
        bytes_text(bytes),
        format!("{:.3}", number("seconds")),
        format!("{:.1}", number("goodput_gbit_s")),
        format!("{:.3}", number("cpu_user_s_per_gb")),
        format!("{:.3}", number("cpu_kernel_s_per_gb")),
    ]);
    row
}
