//! What one measured round cost, and the medians of many.

use anyhow::Context;
use comfy_table::Table;
use serde_json::{Value, json};

use crate::group::Report;
use crate::output::bytes_text;

/// One round: all updates from the word to start until the last byte was dealt with.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Clients that sent.
    pub clients: u32,
    /// Payload of all of them.
    pub bytes: u64,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// CPU seconds of the receiver, in user mode and in the kernel.
    pub receiver_cpu_s: (f64, f64),
    /// CPU seconds of the receiver for averaging alone, where that is a step of its own.
    pub average_cpu_s: f64,
    /// CPU seconds of all senders.
    pub sender_cpu_s: f64,
    /// Page faults of the receiver.
    pub page_faults: u64,
    /// Most memory the receiver, and any one sender, ever held.
    pub peak_rss_bytes: (u64, u64),
    /// Paths used.
    pub send_path: String,
    /// Paths used.
    pub receive_path: String,
    /// Whether the result was compared with a reference; absent where the bytes were dropped.
    pub verified: Option<bool>,
}

impl Sample {
    /// Reads the measured rounds, all but the first, from the reports of a group whose receiver
    /// comes first.
    pub fn read(reports: &[Report], clients: u32) -> anyhow::Result<Vec<Sample>> {
        let (receiver, senders) = reports.split_first().context("no process reported")?;
        let verified = receiver.event("verified").map(|event| event["verified"] == true);
        let largest = senders.iter().map(Report::peak_rss_bytes).max().unwrap_or(0);
        let mut samples = Vec::new();
        for upload in receiver.phases("upload").filter(|phase| phase["round"] != 1) {
            let round = &upload["round"];
            let of_round = |report: &'_ Report| -> f64 {
                let phase = report.phases("upload").find(|phase| &phase["round"] == round);
                phase.map_or(f64::NAN, |phase| {
                    number(phase, "cpu_user_s") + number(phase, "cpu_kernel_s")
                })
            };
            // Clients begin at once here: the wait is part of the round.
            let wait = receiver.phases("wait").find(|phase| &phase["round"] == round);
            let of_wait = |key: &str| wait.map_or(0.0, |phase| number(phase, key));
            let average = receiver.phases("average").find(|phase| &phase["round"] == round);
            let average_cpu = average
                .map_or((0.0, 0.0), |p| (number(p, "cpu_user_s"), number(p, "cpu_kernel_s")));
            samples.push(Sample {
                clients,
                bytes: upload["bytes"].as_u64().context("a phase without bytes")?,
                seconds: of_wait("seconds")
                    + number(upload, "seconds")
                    + average.map_or(0.0, |p| number(p, "seconds")),
                receiver_cpu_s: (
                    of_wait("cpu_user_s") + number(upload, "cpu_user_s") + average_cpu.0,
                    of_wait("cpu_kernel_s") + number(upload, "cpu_kernel_s") + average_cpu.1,
                ),
                average_cpu_s: average_cpu.0 + average_cpu.1,
                sender_cpu_s: senders.iter().map(of_round).sum(),
                page_faults: upload["page_faults"].as_u64().unwrap_or(0)
                    + wait.and_then(|phase| phase["page_faults"].as_u64()).unwrap_or(0),
                peak_rss_bytes: (receiver.peak_rss_bytes(), largest),
                send_path: senders
                    .first()
                    .map_or(String::new(), |sender| path(sender, "send_path")),
                receive_path: path(receiver, "receive_path"),
                verified,
            });
        }
        Ok(samples)
    }

    /// As a JSON object.
    pub fn fields(&self) -> Value {
        let gb = self.bytes as f64 * 1e-9;
        let (user, kernel) = self.receiver_cpu_s;
        json!({
            "clients": self.clients,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "goodput_gbit_s": 8.0 * gb / self.seconds,
            "cpu_user_s": user,
            "cpu_kernel_s": kernel,
            "cpu_s_per_gb": (user + kernel) / gb,
            "sender_cpu_s_per_gb": self.sender_cpu_s / gb,
            "page_faults": self.page_faults,
            "peak_rss_bytes": self.peak_rss_bytes.0,
            "sender_peak_rss_bytes": self.peak_rss_bytes.1,
            "send_path": self.send_path,
            "receive_path": self.receive_path,
            "verified": self.verified,
        })
    }
}

fn number(object: &Value, key: &str) -> f64 {
    object[key].as_f64().unwrap_or(f64::NAN)
}

fn path(report: &Report, key: &str) -> String {
    let mut uploads = report.phases("upload");
    uploads.next().and_then(|phase| phase[key].as_str()).unwrap_or_default().to_string()
}

/// Medians of one side.
#[derive(Clone, Debug)]
pub struct Summary {
    /// The side.
    pub name: String,
    /// Samples it is made of.
    pub samples: usize,
    /// Median goodput, in units of 10^9 bit each second.
    pub goodput_gbit_s: f64,
    /// Median CPU seconds of the receiver per 10^9 bytes.
    pub receiver_cpu_s_per_gb: f64,
    /// The part of it for averaging alone, where that is a step of its own.
    pub average_cpu_s_per_gb: f64,
    /// Median CPU seconds of all senders per 10^9 bytes.
    pub sender_cpu_s_per_gb: f64,
    /// Median page faults of the receiver.
    pub page_faults: f64,
    /// Most memory the receiver, and any one sender, ever held.
    pub peak_rss_bytes: (u64, u64),
    /// Paths used.
    pub paths: (String, String),
    /// Whether every session's result was compared with a reference.
    pub verified: Option<bool>,
}

impl Summary {
    /// Medians of `samples`, of which there is at least one.
    pub fn new(name: &str, samples: &[Sample]) -> Summary {
        let median_of =
            |value: &dyn Fn(&Sample) -> f64| median(samples.iter().map(value).collect());
        let gb = |sample: &Sample| sample.bytes as f64 * 1e-9;
        let last = samples.last();
        Summary {
            name: name.to_string(),
            samples: samples.len(),
            goodput_gbit_s: median_of(&|s| 8.0 * gb(s) / s.seconds),
            receiver_cpu_s_per_gb: median_of(&|s| {
                (s.receiver_cpu_s.0 + s.receiver_cpu_s.1) / gb(s)
            }),
            average_cpu_s_per_gb: median_of(&|s| s.average_cpu_s / gb(s)),
            sender_cpu_s_per_gb: median_of(&|s| s.sender_cpu_s / gb(s)),
            page_faults: median_of(&|s| s.page_faults as f64),
            peak_rss_bytes: (
                samples.iter().map(|s| s.peak_rss_bytes.0).max().unwrap_or(0),
                samples.iter().map(|s| s.peak_rss_bytes.1).max().unwrap_or(0),
            ),
            paths: last
                .map_or(Default::default(), |s| (s.send_path.clone(), s.receive_path.clone())),
            verified: last.and_then(|s| s.verified),
        }
    }

    /// As a JSON object.
    pub fn fields(&self) -> Value {
        json!({
            "side": self.name,
            "samples": self.samples,
            "goodput_gbit_s": self.goodput_gbit_s,
            "cpu_s_per_gb": self.receiver_cpu_s_per_gb,
            "sender_cpu_s_per_gb": self.sender_cpu_s_per_gb,
            "page_faults": self.page_faults,
            "peak_rss_bytes": self.peak_rss_bytes.0,
            "sender_peak_rss_bytes": self.peak_rss_bytes.1,
            "send_path": self.paths.0,
            "receive_path": self.paths.1,
            "verified": self.verified,
        })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The sides below each other.
pub fn table(summaries: &[Summary]) -> Table {
    let mut table = crate::output::table(&[
        "medians",
        "samples",
        "Gbit/s",
        "receiver CPU s/GB",
        "sender CPU s/GB",
        "faults",
        "receiver RSS",
        "sender RSS",
        "paths",
        "verified",
    ]);
    for summary in summaries {
        table.add_row([
            summary.name.clone(),
            summary.samples.to_string(),
            format!("{:.1}", summary.goodput_gbit_s),
            format!("{:.3}", summary.receiver_cpu_s_per_gb),
            format!("{:.3}", summary.sender_cpu_s_per_gb),
            format!("{:.0}", summary.page_faults),
            bytes_text(summary.peak_rss_bytes.0),
            bytes_text(summary.peak_rss_bytes.1),
            format!("{} to {}", summary.paths.0, summary.paths.1),
            match summary.verified {
                Some(true) => "yes".into(),
                Some(false) => "no".into(),
                None => "bytes dropped".into(),
            },
        ]);
    }
    table
}
