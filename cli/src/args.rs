//! Values and groups of arguments that several commands share.

use std::time::Duration;

use anyhow::bail;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use fedlane::aggregator::{AggregatorConfig, Averaging, OnLoss, default_streams};
use fedlane::control::Congestion;
use fedlane::lane::receive::Order;
use fedlane::limits;
use fedlane::manifest::{Dtype, PRESETS};
use fedlane::named::Named;
use fedlane::paths::{ReceiveKind, SendKind};
use fedlane::receiver::Lands;
use fedlane::topology::Topology;
use fedlane::verdict::{OnNonfinite, UpdatePolicy};

/// Sizes: a number of bytes, or with a unit: KiB MiB GiB TiB, KB MB GB TB.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| "a size starts with a number".to_string())?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit {unit:?}; use KiB, MiB, GiB, KB, MB or GB")),
    };
    let bytes = number * factor as f64;
    if bytes > limits::MAX_MODEL_BYTES as f64 {
        return Err(format!("more than the limit of {} bytes", limits::MAX_MODEL_BYTES));
    }
    Ok(bytes as u64)
}

/// Dtypes by their safetensors name, in any case.
pub fn parse_dtype(name: &str) -> Result<Dtype, String> {
    let value = serde_json::Value::String(name.to_ascii_uppercase());
    serde_json::from_value(value)
        .map_err(|_| "unknown dtype; use f32, f16, bf16, f64, i8 to i64, u8 to u64, bool".into())
}

/// Presets by name.
pub fn parse_preset(name: &str) -> Result<String, String> {
    if PRESETS.contains(&name) {
        Ok(name.to_string())
    } else {
        Err(format!("there are: {}", PRESETS.join(", ")))
    }
}

/// Numbers of training examples.
pub fn parse_examples(text: &str) -> Result<f64, String> {
    let examples: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    if examples.is_finite() && examples >= 0.0 {
        Ok(examples)
    } else {
        Err("must be finite and not negative".into())
    }
}

/// One of the values of a setting.
pub fn by_name<T: Named + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let values = T::VALUES.iter().map(|(_, name, help)| PossibleValue::new(*name).help(*help));
    let parse = |name: String| T::named(&name).ok_or("unknown");
    PossibleValuesParser::new(values).try_map(parse)
}

fn parse_congestion(name: &str) -> Result<Congestion, String> {
    Ok(match name {
        "auto" => Congestion::Auto,
        name => Congestion::Named(name.to_string()),
    })
}

/// A receive path that keeps the bytes.
pub fn parse_receive_path(name: &str) -> Result<ReceiveKind, String> {
    let kind: ReceiveKind = name.parse().map_err(|error| format!("{error}"))?;
    if kind.lands() == Lands::Nowhere {
        return Err(format!("{name} drops the bytes; only `fedlane bench raw` takes it"));
    }
    Ok(kind)
}

/// Lists the paths for `--help`.
pub fn send_path_help() -> String {
    let paths = SendKind::all().map(|path| format!("\n- {}: {}", path.name(), path.summary()));
    format!(
        "How parameters are sent; chosen by what the host offers if not said:{}",
        paths.collect::<String>()
    )
}

/// Lists the paths for `--help`.
pub fn receive_path_help() -> String {
    let paths = ReceiveKind::all().filter(|path| path.lands() != Lands::Nowhere);
    let lines: String =
        paths.map(|path| format!("\n- {}: {}", path.name(), path.summary())).collect();
    format!("How parameters are received:{lines}")
}

/// How bytes travel, for both ends.
#[derive(Clone, Debug, Args)]
pub struct Paths {
    #[arg(long, value_name = "PATH", help = "How parameters are sent [default: the best the host offers]", long_help = send_path_help())]
    pub send_path: Option<SendKind>,

    #[arg(long, value_name = "PATH", default_value = "read", value_parser = parse_receive_path, help = "How parameters are received", long_help = receive_path_help())]
    pub receive_path: ReceiveKind,

    /// Congestion control of data connections
    ///
    /// "auto" is CUBIC between processes of one host and the kernel's default otherwise.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_congestion)]
    pub congestion: Congestion,

    /// Milliseconds without any sign of life after which a peer is given up
    ///
    /// Half of it is silence after which the connection is dialled again, unless --reconnect-ms is 0.
    #[arg(long, value_name = "MS", default_value_t = limits::DEADLINE.as_millis() as u64)]
    #[arg(value_parser = clap::value_parser!(u64).range(limits::MIN_DEADLINE_MS..=limits::MAX_DEADLINE_MS))]
    pub deadline_ms: u64,

    /// Milliseconds for which a connection that broke is dialled again, or awaited; 0 for never
    /// [default: the deadline of the session]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=limits::MAX_DEADLINE_MS))]
    pub reconnect_ms: Option<u64>,
}

impl Paths {
    /// How long a broken connection may take to come back.
    pub fn reconnect(&self) -> Option<Duration> {
        self.reconnect_ms.map(Duration::from_millis)
    }

    /// The deadline.
    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms)
    }

    /// The command-line arguments that say the same.
    pub fn to_args(&self) -> Vec<String> {
        let congestion = match &self.congestion {
            Congestion::Auto => "auto".to_string(),
            Congestion::Named(name) => name.clone(),
        };
        let mut args = vec![
            format!("--receive-path={}", self.receive_path),
            format!("--congestion={congestion}"),
            format!("--deadline-ms={}", self.deadline_ms),
        ];
        args.extend(self.reconnect_ms.map(|ms| format!("--reconnect-ms={ms}")));
        args.extend(self.send_path.map(|path| format!("--send-path={path}")));
        args
    }
}

/// How the aggregator works.
#[derive(Clone, Debug, Args)]
pub struct Averager {
    /// Receiver threads, and data connections of each client [default: one per core]
    #[arg(long, value_name = "N", value_parser = parse_streams)]
    pub streams: Option<usize>,

    /// Bytes that are checked and averaged as one unit
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_chunk_bytes)]
    pub chunk_bytes: u64,

    /// Least number of clients in a mean: the session goes on without those that are lost, as long as
    /// so many are left [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=limits::MAX_CLIENTS as u64))]
    pub min_clients: Option<u64>,

    /// Seconds that a round waits for updates, training included; those that are late are left out of
    /// it [default: for ever]
    ///
    /// Also how long the session waits for its clients before it begins with --min-clients.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub round_deadline: Option<Duration>,

    /// In which order clients are averaged
    #[arg(long, value_parser = by_name::<Order>(), default_value = Order::Arrival.name())]
    pub order: Order,

    /// What happens to an update with elements that are NaN or infinite
    #[arg(long, value_name = "WHAT", value_parser = by_name::<OnNonfinite>())]
    #[arg(default_value = OnNonfinite::default().name())]
    pub on_nonfinite: OnNonfinite,

    /// Largest norm of an update; larger ones are scaled down to it
    ///
    /// The norm is the Euclidean one over all floats of the model, measured from the model that was
    /// sent before, or from zero if none was. Integers and bools are neither measured nor scaled. An
    /// update more than 2^48 times as large is left out.
    #[arg(long, value_name = "NORM", value_parser = parse_clip_norm)]
    pub clip_norm: Option<f64>,

    /// What is done about a client that is lost in mid-upload
    #[arg(long, value_name = "WHAT", value_parser = by_name::<OnLoss>())]
    #[arg(default_value = OnLoss::default().name())]
    pub on_loss: OnLoss,

    /// Largest model that the first client may bring, where there is no --initial one [default: what the
    /// host has memory for]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub max_model: Option<u64>,

    /// What happens to updates; all but "streaming" are for benchmarks
    #[arg(long, value_enum, default_value_t = AveragingArg::Streaming, hide = true)]
    pub averaging: AveragingArg,
}

/// `--averaging`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AveragingArg {
    /// While they arrive
    Streaming,
    /// After all have arrived
    Spool,
    /// Checked and dropped
    Checksum,
    /// Dropped unseen
    Discard,
}

impl Averager {
    /// Refuses what says nothing where clients average among themselves.
    pub fn check_without_aggregator(&self, topology: Topology) -> anyhow::Result<()> {
        let is_said = [
            ("--clip-norm", self.clip_norm.is_some()),
            ("--max-model", self.max_model.is_some()),
            ("--on-loss", self.on_loss != OnLoss::Auto),
            ("--averaging", self.averaging != AveragingArg::Streaming),
        ];
        match is_said.iter().find(|(_, is_said)| *is_said) {
            None => Ok(()),
            Some((flag, _)) => bail!(
                "{flag} is for --topology star, where one aggregator sees every update; leave it out in a {}",
                topology.name()
            ),
        }
    }

    /// The engine's configuration.
    pub fn config(&self, clients: usize, rounds: u32, paths: &Paths) -> AggregatorConfig {
        AggregatorConfig {
            clients,
            min_clients: self.min_clients.map(|least| least as usize),
            round_deadline: self.round_deadline,
            reconnect: paths.reconnect().unwrap_or(paths.deadline()),
            rounds,
            streams: self.streams.unwrap_or_else(default_streams),
            chunk_bytes: self.chunk_bytes,
            deadline: paths.deadline(),
            order: self.order,
            averaging: match self.averaging {
                AveragingArg::Streaming => Averaging::Streaming,
                AveragingArg::Spool => Averaging::Spool,
                AveragingArg::Checksum => Averaging::Checksum,
                AveragingArg::Discard => Averaging::Discard,
            },
            on_loss: self.on_loss,
            receive_path: paths.receive_path,
            send_path: paths.send_path,
            congestion: paths.congestion.clone(),
            updates: UpdatePolicy { on_nonfinite: self.on_nonfinite, clip_norm: self.clip_norm },
            max_model_bytes: self.max_model.unwrap_or(limits::MAX_MODEL_BYTES),
            ..AggregatorConfig::default()
        }
    }

    /// The command-line arguments that say the same.
    pub fn to_args(&self) -> Vec<String> {
        let name = |value: clap::builder::PossibleValue| value.get_name().to_string();
        let averaging = self.averaging.to_possible_value().map(name).unwrap_or_default();
        let mut args = vec![
            format!("--on-loss={}", self.on_loss.name()),
            format!("--chunk-bytes={}", self.chunk_bytes),
            format!("--order={}", self.order.name()),
            format!("--averaging={averaging}"),
            format!("--on-nonfinite={}", self.on_nonfinite.name()),
        ];
        args.extend(self.min_clients.map(|least| format!("--min-clients={least}")));
        let seconds = self.round_deadline.map(|deadline| deadline.as_secs_f64());
        args.extend(seconds.map(|seconds| format!("--round-deadline={seconds}")));
        args.extend(self.clip_norm.map(|norm| format!("--clip-norm={norm}")));
        args.extend(self.max_model.map(|bytes| format!("--max-model={bytes}")));
        args.extend(self.streams.map(|streams| format!("--streams={streams}")));
        args
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_string())?;
    let most = limits::MAX_DEADLINE_MS as f64 / 1000.0;
    if seconds > 0.0 && seconds <= most {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("must be more than 0 and at most {most}"))
    }
}

fn parse_clip_norm(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(norm) if norm.is_finite() && norm > 0.0 => Ok(norm),
        Ok(_) => Err("must be finite and above zero".into()),
        Err(_) => Err("not a number".into()),
    }
}

fn parse_streams(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(streams) if (1..=limits::MAX_STREAMS).contains(&streams) => Ok(streams),
        _ => Err(format!("must be a number from 1 to {}", limits::MAX_STREAMS)),
    }
}

fn parse_chunk_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    let (least, most) = (limits::MIN_CHUNK_BYTES, limits::MAX_CHUNK_BYTES);
    if (least..=most).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("must be from {least} to {most} bytes"))
    }
}
