//! Lines for programs: one JSON object a line, units in the key names.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use fedlane::meter::Phase;
use fedlane::sys::process;
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
