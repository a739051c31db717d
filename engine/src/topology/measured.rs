//! What rounds measure corrects what a profile says.
//!
//! A transfer that shared a link with others shows less than the link can do. So each is compared with what it
//! should have got: the fair share of what the aggregator can receive or send. What is slower than that shows a
//! slower host or link, what is faster than the link was thought to be shows a faster one, and what is between
//! says nothing. Where half of all transfers are too slow, the aggregator's own link is, and each
//! transfer is measured against the others.
//!
//! Old and new values are weighed exponentially: the newest counts [`NEWEST`] of the whole, and more while
//! there are few.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::profile::{HostProfile, LinkProfile, Measured, Profile};
use crate::error::PlanError;

/// What the newest measurement counts, where there are many: after five of them, five sixths are new.
pub const NEWEST: f64 = 0.3;

/// A transfer that shows less than this of its fair share is slow: TCP shares no better.
const SLOW: f64 = 0.8;

/// Transfers from which on their median says something of what they share.
const FEW: usize = 3;

/// 10^9 bit a second in one byte a second.
const GBIT_S: f64 = 8e-9;

/// Rates that a profile may have.
const LEAST_GBIT_S: f64 = 1e-9;
const MOST_GBIT_S: f64 = 1e9;

/// A host as it describes itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerHost {
    /// Its name.
    pub name: String,
    /// Its cores.
    pub cores: u32,
    /// Memory that is free, in bytes.
    pub memory_bytes: u64,
}

/// What one host measured of the way to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// The side that asked.
    pub here: PeerHost,
    /// The side that listened.
    pub there: PeerHost,
    /// Seconds there and back.
    pub rtt_s: f64,
    /// Bytes a second from here to there.
    pub up_bytes_s: f64,
    /// Bytes a second from there to here.
    pub down_bytes_s: f64,
    /// CPU seconds for a byte: sending and receiving here, sending and receiving there.
    pub cpu_s: [f64; 4],
}

/// One line of what an aggregator printed with `--json`. Lines of other events say nothing here.
#[derive(Debug, Deserialize)]
struct Line {
    event: String,
    round: Option<u32>,
    client: Option<String>,
    direction: Option<String>,
    phase: Option<String>,
    /// Of an edge: "below", or "above", where it is a client.
    side: Option<String>,
    bytes: Option<u64>,
    seconds: Option<f64>,
    cpu_s_per_gb: Option<f64>,
}

/// What passed between the aggregator and one client in a round.
#[derive(Clone, Debug, PartialEq)]
struct Transfer {
    client: usize,
    gbit_s: f64,
}

/// What one round showed.
#[derive(Debug, Default)]
struct Round {
    up: Vec<Transfer>,
    down: Vec<Transfer>,
    receive_cpu: Option<f64>,
    send_cpu: Option<f64>,
}

/// Shorter transfers show how busy a host is, not what a link can do.
const SHORTEST_S: f64 = 0.1;

impl Profile {
    /// Corrects hosts and links by what the aggregator of this name printed in its rounds, a line of JSON each;
    /// `at_unix_s` is when. Gives how many rounds there were. Clients must have joined under their names in
    /// the profile.
    ///
    /// # Errors
    /// [`PlanError`]: a name that is not in the profile; lines that are not JSON or have numbers that are none.
    pub fn learn(
        &mut self,
        aggregator: &str,
        lines: &str,
        at_unix_s: u64,
    ) -> Result<usize, PlanError> {
        self.check()?;
        let names = self.names()?;
        let unknown = |at: String, name: &str| PlanError::Unknown {
            at,
            name: crate::control::printable(name),
        };
        let hub =
            *names.get(aggregator).ok_or_else(|| unknown("--measured".to_owned(), aggregator))?;
        let mut rounds: BTreeMap<u32, Round> = BTreeMap::new();
        let mut seen = HashSet::new();
        for (index, text) in lines.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let wrong = |why: String| PlanError::Measured { line: index + 1, why };
            let line: Line =
                serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
            let Some(number) = line.round else { continue };
            match line.event.as_str() {
                "transfer" => {
                    let (name, up) = line.whose().map_err(wrong)?;
                    let client = *names.get(name).ok_or_else(|| {
                        unknown(format!("line {} of the measurements", index + 1), name)
                    })?;
                    if client == hub {
                        continue;
                    }
                    let Some(gbit_s) = line.gbit_s().map_err(wrong)? else { continue };
                    let round = rounds.entry(number).or_default();
                    let transfers = if up { &mut round.up } else { &mut round.down };
                    if !seen.insert((number, up, client)) {
                        let name = crate::control::printable(name);
                        return Err(wrong(format!(
                            "a second transfer of \"{name}\" in this round"
                        )));
                    }
                    transfers.push(Transfer { client, gbit_s });
                }
                "phase" if line.side.as_deref() != Some("above") => {
                    let cpu = line.cpu().map_err(wrong)?;
                    let round = rounds.entry(number).or_default();
                    match line.phase.as_deref() {
                        Some("upload") => round.receive_cpu = cpu,
                        Some("broadcast") => round.send_cpu = cpu,
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        let told = rounds.into_values().filter(|round| {
            let moved = !round.up.is_empty() || !round.down.is_empty();
            moved || round.receive_cpu.is_some() || round.send_cpu.is_some()
        });
        let told: Vec<Round> = told.collect();
        let links = self.links.iter().enumerate();
        let ends = |link: &LinkProfile| (names[link.from.as_str()], names[link.to.as_str()]);
        let links = links.map(|(at, link)| (ends(link), at)).collect();
        let mut learner = Learner { profile: self, links, hub, at_unix_s };
        told.iter().for_each(|round| learner.learn(round));
        Ok(told.len())
    }
}

impl Profile {
    /// Takes in what one host measured of the way to another at `at_unix_s`. Hosts that are new are added, the one
    /// that asked as a client and the one that listened as an aggregator.
    ///
    /// # Errors
    /// Names and numbers that no profile may have; the profile is then as it was.
    pub fn add_speed(&mut self, speed: &Speed, at_unix_s: u64) -> Result<(), PlanError> {
        let before = self.clone();
        let (up, down) = (speed.up_bytes_s * GBIT_S, speed.down_bytes_s * GBIT_S);
        let [send, receive, their_send, their_receive] = speed.cpu_s.map(|cpu| cpu * 1e9);
        self.add_host(&speed.here, (up, down), (send, receive), at_unix_s).client |=
            !before.hosts.iter().any(|host| host.name == speed.here.name);
        self.add_host(&speed.there, (down, up), (their_send, their_receive), at_unix_s)
            .aggregator |= !before.hosts.iter().any(|host| host.name == speed.there.name);
        let (here, there) = (&speed.here.name, &speed.there.name);
        self.add_link((here, there), up, speed.rtt_s * 1e3, at_unix_s);
        self.add_link((there, here), down, speed.rtt_s * 1e3, at_unix_s);
        self.check().inspect_err(|_| *self = before)
    }

    fn add_host(
        &mut self,
        peer: &PeerHost,
        (up, down): (f64, f64),
        (send, receive): (f64, f64),
        at_unix_s: u64,
    ) -> &mut HostProfile {
        let place = self.hosts.iter().position(|host| host.name == peer.name);
        let place = place.unwrap_or_else(|| {
            self.hosts.push(HostProfile::new(&peer.name, up, down));
            self.hosts.len() - 1
        });
        let host = &mut self.hosts[place];
        let newest = newest(host.measured);
        // All together it moves at least what one link does.
        (host.up_gbit_s, host.down_gbit_s) = (host.up_gbit_s.max(up), host.down_gbit_s.max(down));
        host.send_cpu_s_per_gb += newest * (send - host.send_cpu_s_per_gb);
        host.receive_cpu_s_per_gb += newest * (receive - host.receive_cpu_s_per_gb);
        host.cores = f64::from(peer.cores);
        host.memory_bytes = Some(peer.memory_bytes);
        note(&mut host.measured, at_unix_s);
        host
    }

    fn add_link(&mut self, (from, to): (&str, &str), gbit_s: f64, rtt_ms: f64, at_unix_s: u64) {
        let place = self.links.iter().position(|link| link.from == from && link.to == to);
        let place = place.unwrap_or_else(|| {
            let (from, to) = (from.to_owned(), to.to_owned());
            self.links.push(LinkProfile { from, to, gbit_s: None, rtt_ms: None, measured: None });
            self.links.len() - 1
        });
        let link = &mut self.links[place];
        let newest = newest(link.measured);
        let known = link.gbit_s.filter(|&known| known > 0.0).unwrap_or(gbit_s);
        link.gbit_s = Some(blend(known, gbit_s, newest));
        let known = link.rtt_ms.unwrap_or(rtt_ms);
        link.rtt_ms = Some(known + newest * (rtt_ms - known));
        note(&mut link.measured, at_unix_s);
    }
}

/// Corrects a profile by rounds of one aggregator.
struct Learner<'a> {
    profile: &'a mut Profile,
    /// Links by their ends.
    links: HashMap<(usize, usize), usize>,
    hub: usize,
    at_unix_s: u64,
}

/// What a transfer should show.
#[derive(Clone, Copy)]
struct Expected {
    /// What the client and its link are thought to move alone.
    alone: f64,
    /// That, or its fair share of the aggregator's link.
    shared: f64,
    /// The link, if that is what is slowest.
    link: Option<usize>,
}

impl Learner<'_> {
    fn learn(&mut self, round: &Round) {
        let mut seen = HashSet::new();
        for (transfers, up) in [(&round.up, true), (&round.down, false)] {
            let count = transfers.len();
            let expected: Vec<Expected> = transfers
                .iter()
                .map(|transfer| self.expected(transfer.client, count, up))
                .collect();
            let reached = self.learn_shared(transfers, &expected, up);
            for (transfer, expected) in transfers.iter().zip(expected) {
                let expected = Expected { shared: expected.shared * reached, ..expected };
                self.learn_transfer(transfer, expected, up, &mut seen);
            }
        }
        let host = &mut self.profile.hosts[self.hub];
        let newest = newest(host.measured);
        for (known, cpu) in [
            (&mut host.receive_cpu_s_per_gb, round.receive_cpu),
            (&mut host.send_cpu_s_per_gb, round.send_cpu),
        ] {
            *known += newest * (cpu.unwrap_or(*known) - *known);
        }
        note(&mut host.measured, self.at_unix_s);
    }

    /// What a transfer should show if so many begin at once.
    fn expected(&self, client: usize, transfers: usize, up: bool) -> Expected {
        let (hub, host) = (&self.profile.hosts[self.hub], &self.profile.hosts[client]);
        let end = if up { host.up_gbit_s } else { host.down_gbit_s };
        let ends = if up { (client, self.hub) } else { (self.hub, client) };
        let link = self.links.get(&ends).or_else(|| self.links.get(&(ends.1, ends.0))).copied();
        let rate = |link: usize| self.profile.links[link].gbit_s.filter(|&rate| rate > 0.0);
        let link = link.filter(|&link| rate(link).is_some_and(|rate| rate <= end));
        let alone = link.and_then(rate).unwrap_or(end);
        let all = if up { hub.down_gbit_s } else { hub.up_gbit_s };
        Expected { alone, shared: alone.min(all / transfers.max(1) as f64), link }
    }

    /// Corrects the aggregator's own link; gives the part of what they should show that half of all
    /// transfers reached.
    fn learn_shared(&mut self, transfers: &[Transfer], expected: &[Expected], up: bool) -> f64 {
        if transfers.len() < FEW {
            return 1.0;
        }
        let reached =
            transfers.iter().zip(expected).map(|(transfer, e)| transfer.gbit_s / e.shared);
        let mut reached: Vec<f64> = reached.collect();
        reached.sort_by(f64::total_cmp);
        let median = reached[transfers.len() / 2];
        let host = &mut self.profile.hosts[self.hub];
        let newest = newest(host.measured);
        let rate = if up { &mut host.down_gbit_s } else { &mut host.up_gbit_s };
        // More than all were thought to be able to move is an error of the profile, whoever was faster.
        let all: f64 = transfers.iter().map(|transfer| transfer.gbit_s).sum();
        if median < SLOW {
            *rate = blend(*rate, (*rate * median).max(LEAST_GBIT_S), newest);
        } else if reached[0] > 1.0 / SLOW {
            *rate = blend(*rate, all.max(*rate), newest);
        }
        median.min(1.0)
    }

    fn learn_transfer(
        &mut self,
        transfer: &Transfer,
        expected: Expected,
        up: bool,
        seen: &mut HashSet<(usize, bool)>,
    ) {
        let host = &mut self.profile.hosts[transfer.client];
        let (rate, measured) = match expected.link {
            Some(link) => {
                let LinkProfile { gbit_s, measured, .. } = &mut self.profile.links[link];
                (gbit_s.get_or_insert(expected.alone), measured)
            }
            None if up => (&mut host.up_gbit_s, &mut host.measured),
            None => (&mut host.down_gbit_s, &mut host.measured),
        };
        if transfer.gbit_s < expected.shared * SLOW || transfer.gbit_s > expected.alone {
            *rate = blend(*rate, transfer.gbit_s, newest(*measured));
        }
        // Both directions of one round are one measurement.
        let place = expected.link.map_or((transfer.client, false), |link| (link, true));
        if seen.insert(place) {
            note(measured, self.at_unix_s);
        }
    }
}

impl Line {
    fn whose(&self) -> Result<(&str, bool), String> {
        let name = self.client.as_deref().ok_or("a transfer without a client")?;
        match self.direction.as_deref() {
            Some("upload") => Ok((name, true)),
            Some("download") => Ok((name, false)),
            _ => Err("a transfer whose direction is not upload or download".into()),
        }
    }

    /// The rate, if the transfer was long enough to show one.
    fn gbit_s(&self) -> Result<Option<f64>, String> {
        let bytes = self.bytes.ok_or("a transfer without bytes")?;
        let seconds = self.seconds.ok_or("a transfer without seconds")?;
        if !(0.0..1e9).contains(&seconds) {
            return Err(format!("a transfer of {seconds:e} seconds"));
        }
        let rate = bytes as f64 * GBIT_S / seconds;
        Ok((seconds >= SHORTEST_S && rate >= LEAST_GBIT_S).then_some(rate.min(MOST_GBIT_S)))
    }

    /// CPU seconds for 10^9 bytes, if any were moved.
    fn cpu(&self) -> Result<Option<f64>, String> {
        match self.cpu_s_per_gb {
            Some(cpu) if !(0.0..=1e9).contains(&cpu) => {
                Err(format!("{cpu:e} CPU seconds for a GB"))
            }
            cpu => Ok(cpu.filter(|_| self.bytes.is_some_and(|bytes| bytes > 0))),
        }
    }
}

/// The part that a new measurement counts.
fn newest(measured: Option<Measured>) -> f64 {
    let count = measured.map_or(0, |measured| measured.count);
    NEWEST.max(1.0 / (count as f64 + 1.0))
}

/// Rates differ by factors, so their logarithms are weighed.
fn blend(old: f64, new: f64, newest: f64) -> f64 {
    (old.ln() + newest * (new.ln() - old.ln())).exp().clamp(LEAST_GBIT_S, MOST_GBIT_S)
}

fn note(measured: &mut Option<Measured>, at_unix_s: u64) {
    let count = measured.map_or(0, |measured| measured.count).saturating_add(1);
    *measured = Some(Measured { count, at_unix_s });
}
