//! Lines for programs: one JSON object a line, units in the key names.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use fedlane::meter::Phase;
use fedlane::sys::process;
use fedlane::verdict::{Rejection, UpdateReport, Verdict};
use serde_json::{Map, Value, json};

/// Writes the results of a process, for people or for programs.
#[derive(Clone, Copy)]
pub struct Output {
    /// JSON instead of text.
    pub json: bool,
}

impl Output {
    /// One thing that happened.
    pub fn event(self, event: &str, fields: Value, text: &str) {
        if self.json {
            let mut object = Map::new();
            object.insert("event".into(), json!(event));
            if let Value::Object(fields) = fields {
                object.extend(fields);
            }
            write_line(&Value::Object(object).to_string());
        } else {
            write_line(text);
        }
    }
}

/// A closed standard output is no reason to end a round.
fn write_line(line: &str) {
    use std::io::Write;
    let mut out = anstream::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// An error and its causes on one line. Many errors quote their cause: that is not said twice.
pub fn error_text(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).fold(error.to_string(), |text, cause| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    })
}

/// A phase as a JSON object.
pub fn phase_fields(phase: &Phase) -> Value {
    let (user, kernel) = phase.cpu_s_per_gb();
    let mut fields = json!({
        "phase": phase.name,
        "round": phase.round,
        "bytes": phase.bytes,
        "seconds": phase.seconds,
        "goodput_gbit_s": phase.goodput_gbit_s(),
        "cpu_user_s": phase.usage.cpu_user_s,
        "cpu_kernel_s": phase.usage.cpu_kernel_s,
        "cpu_user_s_per_gb": user,
        "cpu_kernel_s_per_gb": kernel,
        "cpu_s_per_gb": user + kernel,
        "page_faults": phase.usage.page_faults,
        "peak_rss_bytes": process::peak_rss_bytes(),
    });
    if let Some(path) = phase.send_path {
        fields["send_path"] = json!(path.name());
    }
    if let Some(path) = phase.receive_path {
        fields["receive_path"] = json!(path.name());
    }
    fields
}

/// A phase as a line of text.
pub fn phase_text(phase: &Phase) -> String {
    if phase.bytes == 0 {
        return match phase.round {
            0 => format!("{}: {:.3} s", phase.name, phase.seconds),
            round => format!("round {round} {}: {:.3} s", phase.name, phase.seconds),
        };
    }
    let (user, kernel) = phase.cpu_s_per_gb();
    format!(
        "round {} {}: {} in {:.3} s, {:.1} Gbit/s, {:.3} CPU s/GB ({:.3} user, {:.3} kernel)",
        phase.round,
        phase.name,
        bytes_text(phase.bytes),
        phase.seconds,
        phase.goodput_gbit_s(),
        user + kernel,
        user,
        kernel
    )
}

/// What was found in an update, and what was done with it, as a JSON object. A norm beyond f64 is
/// null.
pub fn update_fields(report: &UpdateReport) -> Value {
    let found = &report.summary;
    let mut fields = json!({
        "round": report.round,
        "client": report.client,
        "bytes": found.bytes,
        "elements": found.elements,
        "nonfinite": found.nonfinite,
        "weight": report.weight,
    });
    if let Some(first) = &found.first_nonfinite {
        fields["first_nonfinite"] = json!({ "tensor": first.tensor, "index": first.index });
    }
    if let Some(norm) = found.norm {
        fields["norm"] = json!(norm);
    }
    match report.verdict {
        Verdict::Counted { clip_factor, zeroed } => {
            fields["counted"] = json!(true);
            fields["clip_factor"] = json!(clip_factor);
            fields["zeroed"] = json!(if zeroed { found.nonfinite } else { 0 });
        }
        Verdict::Rejected(why) => {
            fields["counted"] = json!(false);
            fields["rejected"] = json!(match why {
                Rejection::Nonfinite => "nonfinite",
                Rejection::TooLarge => "too_large",
            });
        }
    }
    fields
}

/// What was found in an update, and what was done with it, as a line of text.
pub fn update_text(report: &UpdateReport) -> String {
    let found = &report.summary;
    let mut text = format!(
        "round {} update of {:?}: {} elements, {}",
        report.round,
        report.client,
        found.elements,
        bytes_text(found.bytes)
    );
    if let Some(norm) = found.norm {
        text += &format!(", norm {norm:.4e}");
    }
    if let Some(first) = &found.first_nonfinite {
        let (tensor, index) = (&first.tensor, first.index);
        text += &format!(", {} not finite, first {tensor:?} at {index}", found.nonfinite);
    }
    text + &match report.verdict {
        Verdict::Rejected(Rejection::Nonfinite) => "; left out: not finite".to_owned(),
        Verdict::Rejected(Rejection::TooLarge) => "; left out: too large to be clipped".to_owned(),
        Verdict::Counted { clip_factor, zeroed } => {
            let zeroed = if zeroed { " zeroed," } else { "" };
            let clipped = match clip_factor < 1.0 {
                true => format!(" clipped by {clip_factor:.4e},"),
                false => String::new(),
            };
            format!(";{zeroed}{clipped} counted with weight {}", report.weight)
        }
    }
}

/// A size for people: decimal units, as goodput has them.
pub fn bytes_text(bytes: u64) -> String {
    indicatif::DecimalBytes(bytes).to_string()
}

/// A table whose first column is text and whose others are figures.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Cells wrap rather than lines where the terminal is narrow.
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use fedlane::verdict::{OnNonfinite, Place, Summary, UpdatePolicy};

    use super::*;

    fn report(policy: UpdatePolicy, nonfinite: u64, norm: Option<f64>) -> UpdateReport {
        let first_nonfinite =
            (nonfinite > 0).then(|| Place { tensor: "a \"b\"\n".into(), index: 7 });
        let summary = Summary { bytes: 4000, elements: 1000, nonfinite, first_nonfinite, norm };
        policy.report("site-1".into(), 2, 40.0, summary)
    }

    #[test]
    fn updates_are_reported_in_one_line() {
        let head = "round 2 update of \"site-1\": 1000 elements, 4.00 kB";
        let bad = "2 not finite, first \"a \\\"b\\\"\\n\" at 7";
        let reject = UpdatePolicy::default();
        let text = |policy, nonfinite, norm| update_text(&report(policy, nonfinite, norm));
        assert_eq!(text(reject, 0, None), format!("{head}; counted with weight 40"));
        assert_eq!(text(reject, 2, None), format!("{head}, {bad}; left out: not finite"));
        let zero = UpdatePolicy { on_nonfinite: OnNonfinite::Zero, clip_norm: Some(1.0) };
        assert_eq!(
            text(zero, 2, Some(4.0)),
            format!(
                "{head}, norm 4.0000e0, {bad}; zeroed, clipped by 2.5000e-1, counted with weight 10"
            )
        );
        assert_eq!(
            text(zero, 0, Some(f64::INFINITY)),
            format!("{head}, norm inf; left out: too large to be clipped")
        );
    }

    #[test]
    fn updates_are_reported_as_json() {
        let zero = UpdatePolicy { on_nonfinite: OnNonfinite::Zero, clip_norm: Some(1.0) };
        let clipped = json!({
            "round": 2, "client": "site-1", "bytes": 4000, "elements": 1000, "nonfinite": 2,
            "first_nonfinite": { "tensor": "a \"b\"\n", "index": 7 }, "norm": 4.0,
            "counted": true, "clip_factor": 0.25, "zeroed": 2, "weight": 10.0,
        });
        assert_eq!(update_fields(&report(zero, 2, Some(4.0))), clipped);
        let rejected = json!({
            "round": 2, "client": "site-1", "bytes": 4000, "elements": 1000, "nonfinite": 0,
            "norm": null, "counted": false, "rejected": "too_large", "weight": 0.0,
        });
        assert_eq!(update_fields(&report(zero, 0, Some(f64::INFINITY))), rejected);
        let counted = json!({
            "round": 2, "client": "site-1", "bytes": 4000, "elements": 1000, "nonfinite": 0,
            "counted": true, "clip_factor": 1.0, "zeroed": 0, "weight": 40.0,
        });
        assert_eq!(update_fields(&report(UpdatePolicy::default(), 0, None)), counted);
    }
}
