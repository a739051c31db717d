//! A plan for people and for programs.

use fedlane::named::Named;
use fedlane::topology::Topology;
use fedlane::topology::cost::{Limit, ModelSize, Stage, Transfer};
use fedlane::topology::plan::{Layout, Plan};
use fedlane::topology::profile::Profile;
use serde_json::{Value, json};

use super::commands::commands;
use crate::output::{Output, bytes_text, table};

/// Prints a plan, what the other shapes take, and what to run.
pub fn print(
    profile: &Profile,
    model: ModelSize,
    plan: &Plan,
    others: &[(Topology, Result<f64, String>)],
    explain: bool,
    output: Output,
) {
    let report = Report { profile, plan };
    output.event("plan", report.fields(model), &report.text(model));
    if explain {
        for (shape, other) in others {
            report.other(*shape, other, output);
        }
        report.stages(output);
        report.transfers(output);
    }
    let note = "with a secret of `fedlane cert --secret door.secret`, the same file on every host:";
    if !output.json {
        output.event("", Value::Null, &format!("\n{note}"));
    }
    for command in commands(profile, plan) {
        let (host, text) = (report.name(command.host), command.text());
        let fields = json!({ "host": host, "command": text, "arguments": command.words });
        output.event("command", fields, &format!("{host}: {text}"));
    }
}

struct Report<'a> {
    profile: &'a Profile,
    plan: &'a Plan,
}

impl Report<'_> {
    fn name(&self, host: usize) -> &str {
        &self.profile.hosts[host].name
    }

    fn fields(&self, model: ModelSize) -> Value {
        let plan = self.plan;
        let mut fields = json!({
            "topology": plan.topology.name(),
            "bytes": model.bytes,
            "sum_bytes": model.sum_bytes,
            "seconds": plan.seconds(),
            "lower_bound_s": plan.lower_bound_s,
            "round_robin_s": plan.round_robin_s,
            "random_s": plan.random_s,
            "proven": plan.is_proven,
        });
        if let Some(stage) = plan.prediction.bottleneck() {
            fields["bottleneck"] = self.stage_fields(stage);
        }
        match &plan.layout {
            Layout::Tree { root, clients } => {
                let names = clients.iter().map(|&(client, to)| (self.name(client), self.name(to)));
                fields["root"] = json!(self.name(*root));
                fields["clients"] =
                    names.map(|(client, to)| (client.to_owned(), json!(to))).collect();
            }
            Layout::Row(order) => {
                let names: Vec<&str> = order.iter().map(|&host| self.name(host)).collect();
                fields["order"] = json!(names);
            }
        }
        fields
    }

    fn text(&self, model: ModelSize) -> String {
        let plan = self.plan;
        let (shape, bytes) = (plan.topology.name(), bytes_text(model.bytes));
        let mut text =
            format!("{shape}: a round with {bytes} takes {} s\n", seconds_text(plan.seconds()));
        if let Some(stage) = plan.prediction.bottleneck() {
            let seconds = seconds_text(stage.seconds);
            text += &format!("bottleneck: {}, {seconds} s of it\n", self.limit(stage.limit));
        }
        let best = if plan.is_proven {
            "the best one, all were weighed"
        } else {
            "not proven to be the best one"
        };
        text += &format!(
            "lower bound {} s; in the order of the profile {} s, at random {} s; {best}\n",
            seconds_text(plan.lower_bound_s),
            seconds_text(plan.round_robin_s),
            seconds_text(plan.random_s)
        );
        text + &self.layout()
    }

    fn layout(&self) -> String {
        match &self.plan.layout {
            Layout::Row(order) => {
                let names: Vec<&str> = order.iter().map(|&host| self.name(host)).collect();
                format!("order: {}", names.join(" -> "))
            }
            Layout::Tree { root, clients } => {
                let of = |hub: usize| {
                    let own = clients.iter().filter(|&&(_, to)| to == hub);
                    own.map(|&(client, _)| self.name(client)).collect::<Vec<_>>().join(", ")
                };
                let mut lines = vec![format!("root {}: {}", self.name(*root), of(*root))];
                let edges = self.plan.edges();
                if let (false, true) = (edges.is_empty(), of(*root).is_empty()) {
                    lines[0] = format!("root {}: its edges only", self.name(*root));
                }
                lines.extend(
                    edges.iter().map(|&edge| format!("edge {}: {}", self.name(edge), of(edge))),
                );
                lines.join("\n")
            }
        }
    }

    fn limit(&self, limit: Limit) -> String {
        match limit {
            Limit::Uplink(host) => format!("what {} can send", self.name(host)),
            Limit::Downlink(host) => format!("what {} can receive", self.name(host)),
            Limit::Cpu(host) => format!("the cores of {}", self.name(host)),
            Limit::Link(from, to) => format!("{} to {}", self.name(from), self.name(to)),
            Limit::Delay => "the way of a chunk over all links".to_owned(),
        }
    }

    fn stage_fields(&self, stage: &Stage) -> Value {
        let (limit, hosts) = match stage.limit {
            Limit::Uplink(host) => ("uplink", vec![host]),
            Limit::Downlink(host) => ("downlink", vec![host]),
            Limit::Cpu(host) => ("cpu", vec![host]),
            Limit::Link(from, to) => ("link", vec![from, to]),
            Limit::Delay => ("delay", Vec::new()),
        };
        let hosts: Vec<&str> = hosts.into_iter().map(|host| self.name(host)).collect();
        json!({ "limit": limit, "hosts": hosts, "seconds": stage.seconds })
    }

    fn other(&self, shape: Topology, other: &Result<f64, String>, output: Output) {
        let name = shape.name();
        let (fields, text) = match other {
            Ok(seconds) => (
                json!({ "topology": name, "seconds": seconds }),
                format!("{name}: {} s", seconds_text(*seconds)),
            ),
            Err(why) => (json!({ "topology": name, "why": why }), format!("{name}: no: {why}")),
        };
        output.event("other", fields, &text);
    }

    fn stages(&self, output: Output) {
        for (index, stage) in self.plan.prediction.stages.iter().enumerate() {
            let mut fields = self.stage_fields(stage);
            fields["step"] = json!(index + 1);
            let seconds = seconds_text(stage.seconds);
            let text = format!("waits {seconds} s for {}", self.limit(stage.limit));
            output.event("waits", fields, &text);
        }
    }

    fn transfers(&self, output: Output) {
        let transfers = &self.plan.prediction.transfers;
        if !output.json {
            let mut rows = table(&["from", "to", "what", "bytes", "begins s", "ends s", "alone s"]);
            for transfer in transfers {
                let what = if transfer.gathers { "update" } else { "mean" };
                let times = [transfer.begins_s, transfer.ends_s, transfer.alone_s];
                let mut row = vec![self.name(transfer.from).into(), self.name(transfer.to).into()];
                row.extend([what.to_owned(), bytes_text(transfer.bytes as u64)]);
                row.extend(times.map(seconds_text));
                rows.add_row(row);
            }
            return output.event("", Value::Null, &format!("\n{rows}"));
        }
        let fields = |transfer: &Transfer| {
            json!({ "from": self.name(transfer.from), "to": self.name(transfer.to),
                "gathers": transfer.gathers, "bytes": transfer.bytes, "begins_s": transfer.begins_s,
                "ends_s": transfer.ends_s, "alone_s": transfer.alone_s })
        };
        transfers.iter().for_each(|transfer| output.event("predicted", fields(transfer), ""));
    }
}

/// Three digits, whatever the size.
fn seconds_text(seconds: f64) -> String {
    match seconds {
        s if s.is_infinite() => "endless".to_owned(),
        s if s == 0.0 || s >= 100.0 => format!("{s:.0}"),
        s if s >= 1e-3 => format!("{s:.*}", (2.0 - s.log10().floor()) as usize),
        s => format!("{s:.2e}"),
    }
}
