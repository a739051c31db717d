//! The command of each host, so that a plan can be carried out.

use std::net::Ipv6Addr;

use fedlane::named::Named;
use fedlane::topology::Topology;
use fedlane::topology::plan::{Layout, Plan};
use fedlane::topology::profile::{HostProfile, Profile};

/// Where aggregators listen if the profile does not say it.
const PORT: u16 = 7733;

/// A command, and the host that it runs on, as a place in the profile.
pub struct HostCommand {
    pub host: usize,
    pub words: Vec<String>,
}

impl HostCommand {
    /// The command as a shell takes it.
    pub fn text(&self) -> String {
        self.words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// All commands, those who listen before those who dial.
pub fn commands(profile: &Profile, plan: &Plan) -> Vec<HostCommand> {
    match &plan.layout {
        Layout::Tree { root, clients } => tree(profile, plan, *root, clients),
        Layout::Row(order) => row(profile, plan, order),
    }
}

fn tree(
    profile: &Profile,
    plan: &Plan,
    root: usize,
    clients: &[(usize, usize)],
) -> Vec<HostCommand> {
    let below = |hub: usize| clients.iter().filter(|&&(_, to)| to == hub).count();
    let edges = plan.edges();
    let count = edges.len() + below(root);
    let mut commands = vec![serve(profile, root, plan.topology, count)];
    for edge in edges {
        let up = address(&profile.hosts[root]);
        let name = profile.hosts[edge].name.clone();
        let clients = below(edge).to_string();
        let mut words = words(["fedlane", "edge", &up, "--listen", &listen(&profile.hosts[edge])]);
        words.extend(["--name".into(), name, "--clients".into(), clients]);
        commands.push(HostCommand { host: edge, words: with_secret(words) });
    }
    commands.extend(clients.iter().map(|&(client, to)| join(profile, client, to)));
    commands
}

fn row(profile: &Profile, plan: &Plan, order: &[usize]) -> Vec<HostCommand> {
    // Somebody has to bring them together; no model passes through it.
    let hub = profile.hosts.iter().position(|host| host.aggregator).unwrap_or(order[0]);
    let mut first = serve(profile, hub, plan.topology, order.len());
    for &client in order {
        first.words.extend(["--rank".to_owned(), profile.hosts[client].name.clone()]);
    }
    let mut commands = vec![first];
    commands.extend(order.iter().map(|&client| join(profile, client, hub)));
    commands
}

fn serve(profile: &Profile, host: usize, shape: Topology, clients: usize) -> HostCommand {
    let mut words = words(["fedlane", "serve", "--listen", &listen(&profile.hosts[host])]);
    words.extend(["--clients".to_owned(), clients.to_string()]);
    if shape != Topology::Star {
        words.extend(["--topology".to_owned(), shape.name().to_owned()]);
    }
    HostCommand { host, words: with_secret(words) }
}

fn join(profile: &Profile, client: usize, to: usize) -> HostCommand {
    let mut words = words(["fedlane", "join", &address(&profile.hosts[to]), "--name"]);
    words.push(profile.hosts[client].name.clone());
    words.extend(["--model".to_owned(), "update.safetensors".to_owned()]);
    HostCommand { host: client, words: with_secret(words) }
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

fn with_secret(mut words: Vec<String>) -> Vec<String> {
    words.extend(["--secret-file".to_owned(), "door.secret".to_owned()]);
    words
}

/// Host and port of an address. A bare IPv6 address has no port, whatever colons it has.
fn parts(host: &HostProfile) -> (String, u16) {
    let text = host.address.as_deref().unwrap_or(&host.name);
    if text.parse::<Ipv6Addr>().is_ok() {
        return (format!("[{text}]"), PORT);
    }
    let split = text.rsplit_once(':').and_then(|(name, port)| Some((name, port.parse().ok()?)));
    split.map_or((text.to_owned(), PORT), |(name, port)| (name.to_owned(), port))
}

fn address(host: &HostProfile) -> String {
    let (name, port) = parts(host);
    format!("{name}:{port}")
}

fn listen(host: &HostProfile) -> String {
    let (name, port) = parts(host);
    let any = if name.starts_with('[') { "[::]" } else { "0.0.0.0" };
    format!("{any}:{port}")
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,[]".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, address: Option<&str>) -> HostProfile {
        let address = address.map(str::to_owned);
        HostProfile { address, ..HostProfile::new(name, 1.0, 1.0) }
    }

    #[test]
    fn addresses_keep_their_ports() {
        let cases = [
            (None, "a:7733", "0.0.0.0:7733"),
            (Some("10.0.0.1"), "10.0.0.1:7733", "0.0.0.0:7733"),
            (Some("b.example:99"), "b.example:99", "0.0.0.0:99"),
            (Some("fd00::1"), "[fd00::1]:7733", "[::]:7733"),
            (Some("[fd00::1]:99"), "[fd00::1]:99", "[::]:99"),
        ];
        for (given, dialled, listened) in cases {
            assert_eq!(address(&host("a", given)), dialled);
            assert_eq!(listen(&host("a", given)), listened);
        }
    }

    #[test]
    fn names_are_quoted_for_a_shell() {
        assert_eq!(quoted("site-1"), "site-1");
        assert_eq!(quoted("it's $HOME; rm"), "'it'\\''s $HOME; rm'");
    }
}
