//! What is known of hosts and of the links between them: measured once, kept in a file, and corrected by
//! what rounds measure.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::PlanError;
use crate::limits;

/// Hosts and links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// All hosts, in any order.
    #[serde(deserialize_with = "hosts")]
    pub hosts: Vec<HostProfile>,
    /// What is known of pairs of hosts; where a pair is not listed, what is known of its ends counts.
    #[serde(default, deserialize_with = "links")]
    pub links: Vec<LinkProfile>,
}

/// What is known of one host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostProfile {
    /// Its name, unique in the profile.
    pub name: String,
    /// Where others reach it, HOST or HOST:PORT; the name, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Whether it trains.
    #[serde(default)]
    pub client: bool,
    /// Whether it may average for others.
    #[serde(default)]
    pub aggregator: bool,
    /// Most clients and edges that may be connected to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_clients: Option<u64>,
    /// Cores that may work for fedlane.
    #[serde(default = "default_cores")]
    pub cores: f64,
    /// Bytes of memory for fedlane; enough, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// What it can send to all others together, in 10^9 bit a second.
    pub up_gbit_s: f64,
    /// What it can receive from all others together, in 10^9 bit a second.
    pub down_gbit_s: f64,
    /// Time to any other host and back, in milliseconds, where no link says it.
    #[serde(default)]
    pub rtt_ms: f64,
    /// Seconds of one core that sending 10^9 bytes takes.
    #[serde(default = "default_send_cpu")]
    pub send_cpu_s_per_gb: f64,
    /// Seconds of one core that receiving and averaging 10^9 bytes takes.
    #[serde(default = "default_receive_cpu")]
    pub receive_cpu_s_per_gb: f64,
    /// When this was measured, and how often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// What is known of one pair of hosts. It holds for both directions, unless the other is listed too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    /// The host that sends.
    pub from: String,
    /// The host that receives.
    pub to: String,
    /// What this pair can move alone, in 10^9 bit a second; 0 where they do not reach each other. What their
    /// ends can, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gbit_s: Option<f64>,
    /// Time there and back, in milliseconds; that of the ends, if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// When this was measured, and how often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// How well something is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// How many measurements are in it.
    pub count: u64,
    /// When the newest was made, in seconds since 1970.
    pub at_unix_s: u64,
}

fn hosts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<HostProfile>, D::Error> {
    from.deserialize_seq(Few { limit: limits::MAX_PLAN_HOSTS, of: PhantomData })
}

fn links<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<LinkProfile>, D::Error> {
    from.deserialize_seq(Few { limit: limits::MAX_PLAN_LINKS, of: PhantomData })
}

/// Reads a list that ends at its limit, so that a file cannot take many times its own length.
struct Few<T> {
    limit: usize,
    of: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            if list.len() == self.limit {
                return Err(A::Error::custom(format!("above the limit of {}", self.limit)));
            }
            list.push(item);
        }
        Ok(list)
    }
}

fn default_cores() -> f64 {
    1.0
}

/// Of `fedlane bench targets` on one machine.
fn default_send_cpu() -> f64 {
    0.04
}

/// Of `fedlane bench targets` on one machine.
fn default_receive_cpu() -> f64 {
    0.12
}

impl HostProfile {
    /// A client or aggregator with this name and rates, in 10^9 bit a second, and defaults.
    pub fn new(name: &str, up_gbit_s: f64, down_gbit_s: f64) -> HostProfile {
        HostProfile {
            name: name.to_owned(),
            address: None,
            client: false,
            aggregator: false,
            max_clients: None,
            cores: default_cores(),
            memory_bytes: None,
            up_gbit_s,
            down_gbit_s,
            rtt_ms: 0.0,
            send_cpu_s_per_gb: default_send_cpu(),
            receive_cpu_s_per_gb: default_receive_cpu(),
            measured: None,
        }
    }
}

/// Rates that hosts have: from 1 bit a second to a million times what any has today.
const RATES: (f64, f64) = (1e-9, 1e9);
/// Seconds of CPU for 10^9 bytes: to a byte a second.
const CPU: (f64, f64) = (0.0, 1e9);
/// An hour there and back is no link.
const RTT_MS: (f64, f64) = (0.0, 3.6e6);
const CORES: (f64, f64) = (1e-3, 1e6);

impl Profile {
    /// Reads a profile and checks it.
    ///
    /// # Errors
    /// [`PlanError`] names the field, and the line where the text itself is wrong.
    pub fn from_json(text: &str) -> Result<Profile, PlanError> {
        let bytes = text.len() as u64;
        if bytes > limits::MAX_PROFILE_BYTES {
            return Err(PlanError::TooLong { bytes, limit: limits::MAX_PROFILE_BYTES });
        }
        let mut json = serde_json::Deserializer::from_str(text);
        let read = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            // "?" stands for what was not read far enough to have a name.
            let at = error.path().to_string();
            let at = match at.trim_end_matches(".?") {
                "." | "?" => "its beginning".to_owned(),
                at => at.to_owned(),
            };
            PlanError::Profile { at, why: error.into_inner().to_string() }
        });
        let profile: Profile = read?;
        json.end()
            .map_err(|error| PlanError::Profile { at: "its end".into(), why: error.to_string() })?;
        profile.check()?;
        Ok(profile)
    }

    /// The profile as text, one host or link a line.
    pub fn to_json(&self) -> String {
        let lines = |items: Vec<String>| match items.is_empty() {
            true => "[]".to_owned(),
            false => format!("[\n  {}\n]", items.join(",\n  ")),
        };
        // Names and numbers that were checked; JSON has them all.
        let hosts = self.hosts.iter().filter_map(|host| serde_json::to_string(host).ok());
        let links = self.links.iter().filter_map(|link| serde_json::to_string(link).ok());
        let (hosts, links) = (lines(hosts.collect()), lines(links.collect()));
        format!("{{\"hosts\": {hosts},\n\"links\": {links}}}\n")
    }

    /// Checks all names and numbers.
    ///
    /// # Errors
    /// [`PlanError`] names the first field that is wrong.
    pub fn check(&self) -> Result<(), PlanError> {
        at_most("hosts", self.hosts.len(), limits::MAX_PLAN_HOSTS)?;
        at_most("links", self.links.len(), limits::MAX_PLAN_LINKS)?;
        for (index, host) in self.hosts.iter().enumerate() {
            host.check(index)?;
        }
        let names = self.names()?;
        let mut seen = HashMap::new();
        for (index, link) in self.links.iter().enumerate() {
            let ends = link.check(index, &names)?;
            if seen.insert(ends, index).is_some() {
                let (from, to) = (shown(&link.from), shown(&link.to));
                return Err(PlanError::LinkTwice { at: format!("links[{index}]"), from, to });
            }
        }
        Ok(())
    }

    /// The place of each host by its name.
    pub(crate) fn names(&self) -> Result<HashMap<&str, usize>, PlanError> {
        let mut names = HashMap::new();
        for (index, host) in self.hosts.iter().enumerate() {
            if names.insert(host.name.as_str(), index).is_some() {
                let at = format!("hosts[{index}].name");
                return Err(PlanError::Twice { at, name: shown(&host.name) });
            }
        }
        Ok(names)
    }
}

impl HostProfile {
    fn check(&self, index: usize) -> Result<(), PlanError> {
        let at = |field: &str| match self.name.is_empty() {
            true => format!("hosts[{index}].{field}"),
            false => format!("hosts[{index}].{field} (\"{}\")", shown(&self.name)),
        };
        check_text(&self.name, || at("name"))?;
        if let Some(address) = &self.address {
            check_text(address, || at("address"))?;
        }
        let numbers = [
            ("cores", self.cores, CORES),
            ("up_gbit_s", self.up_gbit_s, RATES),
            ("down_gbit_s", self.down_gbit_s, RATES),
            ("rtt_ms", self.rtt_ms, RTT_MS),
            ("send_cpu_s_per_gb", self.send_cpu_s_per_gb, CPU),
            ("receive_cpu_s_per_gb", self.receive_cpu_s_per_gb, CPU),
        ];
        numbers
            .into_iter()
            .try_for_each(|(name, value, range)| check_number(name, value, range, &at))
    }
}

impl LinkProfile {
    /// Gives the places of both hosts.
    fn check(
        &self,
        index: usize,
        names: &HashMap<&str, usize>,
    ) -> Result<(usize, usize), PlanError> {
        let find = |field: &str, name: &str| {
            names.get(name).copied().ok_or_else(|| PlanError::Unknown {
                at: format!("links[{index}].{field}"),
                name: shown(name),
            })
        };
        let ends = (find("from", &self.from)?, find("to", &self.to)?);
        let at = |field: &str| {
            format!("links[{index}].{field} (\"{}\" to \"{}\")", shown(&self.from), shown(&self.to))
        };
        if ends.0 == ends.1 {
            let why = "a host has no link to itself".to_owned();
            return Err(PlanError::Profile { at: at("to"), why });
        }
        if let Some(rate) = self.gbit_s.filter(|rate| *rate != 0.0) {
            check_number("gbit_s", rate, RATES, &at)?;
        }
        if let Some(rtt) = self.rtt_ms {
            check_number("rtt_ms", rtt, RTT_MS, &at)?;
        }
        Ok(ends)
    }
}

fn check_number(
    what: &'static str,
    value: f64,
    (least, most): (f64, f64),
    at: &impl Fn(&str) -> String,
) -> Result<(), PlanError> {
    // NaN is in no range.
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let must = format!("from {least:e} to {most:e}");
    Err(PlanError::Value { at: at(what), what, value: format!("{value:e}"), must })
}

/// Names go into commands and onto terminals.
fn check_text(text: &str, at: impl Fn() -> String) -> Result<(), PlanError> {
    let limit = limits::MAX_HOST_NAME_BYTES;
    let why = if text.is_empty() {
        "it is empty".to_owned()
    } else if text.len() > limit {
        format!("it has {} bytes, above the limit of {limit}", text.len())
    } else if shown(text) != text {
        "it has control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(PlanError::Profile { at: at(), why })
}

fn at_most(what: &'static str, count: usize, limit: usize) -> Result<(), PlanError> {
    if count > limit { Err(PlanError::TooMany { what, count, limit }) } else { Ok(()) }
}

fn shown(text: &str) -> String {
    crate::control::printable(text)
}
