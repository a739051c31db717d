//! Plans: their predictions by hand, their quality against the exact optimum, and profiles that are wrong.

use fedlane::error::PlanError;
use fedlane::limits;
use fedlane::topology::Host;
use fedlane::topology::Topology;
use fedlane::topology::cost::{Limit, ModelSize, Network, Tree};
use fedlane::topology::plan::{Layout, Method, Plan, best, plan};
use fedlane::topology::profile::{HostProfile, LinkProfile, Profile};
use fedlane::topology::ring::ranks;
use proptest::prelude::*;

const GB: ModelSize = ModelSize { bytes: 1_000_000_000, sum_bytes: 1_000_000_000 };

/// A host whose cores cost nothing, so that its links decide.
fn host(name: &str, up_gbit_s: f64, down_gbit_s: f64) -> HostProfile {
    HostProfile {
        send_cpu_s_per_gb: 0.0,
        receive_cpu_s_per_gb: 0.0,
        ..HostProfile::new(name, up_gbit_s, down_gbit_s)
    }
}

fn client(name: &str, gbit_s: f64) -> HostProfile {
    HostProfile { client: true, ..host(name, gbit_s, gbit_s) }
}

fn aggregator(name: &str, gbit_s: f64) -> HostProfile {
    HostProfile { aggregator: true, ..host(name, gbit_s, gbit_s) }
}

fn link(from: &str, to: &str, gbit_s: f64) -> LinkProfile {
    let (from, to) = (from.to_owned(), to.to_owned());
    LinkProfile { from, to, gbit_s: Some(gbit_s), rtt_ms: None, measured: None }
}

fn profile(hosts: Vec<HostProfile>, links: Vec<LinkProfile>) -> Profile {
    Profile { hosts, links }
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-9 * expected, "{found} is not {expected}");
}

/// Numbers that are the same in every run (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Of different orders of magnitude alike.
    fn rate(&mut self, least: f64, most: f64) -> f64 {
        let part = self.below(1 << 20) as f64 / f64::from(1 << 20);
        (least.ln() + part * (most.ln() - least.ln())).exp()
    }
}

/// Hosts as they come: fast and slow ones, near and far, some pairs known, some cut off.
fn random_profile(numbers: &mut Numbers, clients: u64, aggregators: u64) -> Profile {
    let mut hosts = Vec::new();
    for index in 0..clients + aggregators {
        let trains = index >= aggregators;
        let name = format!("{}{index}", if trains { "c" } else { "a" });
        let most = if trains { 2.0 } else { 10.0 };
        let mut host = HostProfile::new(&name, numbers.rate(0.05, most), numbers.rate(0.05, most));
        host.aggregator = !trains;
        host.client = trains || numbers.below(8) == 0;
        host.cores = 1.0 + numbers.below(16) as f64;
        host.rtt_ms = numbers.rate(0.1, 200.0);
        if !trains && numbers.below(4) == 0 {
            host.max_clients = Some(clients.div_ceil(2) + 2);
        }
        hosts.push(host);
    }
    let mut links = Vec::new();
    for from in 0..hosts.len() {
        for to in 0..from {
            let gbit_s = match numbers.below(12) {
                0 => 0.0,
                1..5 => numbers.rate(0.01, 5.0),
                _ => continue,
            };
            // Client 0 of these is always reached by all.
            if gbit_s > 0.0 || (hosts[from].client && to > 0 && to < aggregators as usize) {
                links.push(link(&hosts[from].name, &hosts[to].name, gbit_s));
            }
        }
    }
    profile(hosts, links)
}

#[test]
fn a_star_takes_what_its_formula_says() {
    // 2 clients of 1 Gbit/s: 8 s each; the aggregator receives both in 2 s and sends them in 16 s.
    let mut hub = aggregator("hub", 1.0);
    hub.down_gbit_s = 8.0;
    let hosts = profile(vec![hub, client("a", 1.0), client("b", 1.0)], vec![]);
    let plan = plan(&hosts, GB, Topology::Star, Method::Best).unwrap();
    near(plan.seconds(), 8.0 + 16.0);
    let stages = &plan.prediction.stages;
    near(stages.iter().map(|stage| stage.seconds).sum(), plan.seconds());
    assert_eq!(plan.prediction.bottleneck().unwrap().limit, Limit::Uplink(0));
    assert_eq!(plan.prediction.transfers.len(), 4);
    assert!(plan.is_proven);
}

#[test]
fn cores_and_round_trips_count() {
    let mut hosts = profile(vec![aggregator("hub", 8.0), client("a", 8.0)], vec![]);
    let seconds =
        |hosts: &Profile| plan(hosts, GB, Topology::Star, Method::Best).unwrap().seconds();
    near(seconds(&hosts), 2.0);
    hosts.hosts[0].receive_cpu_s_per_gb = 6.0;
    hosts.hosts[0].cores = 2.0;
    near(seconds(&hosts), 3.0 + 1.0);
    hosts.hosts[1].rtt_ms = 100.0;
    // 333 MB/s for 0.1 s on the way up, 1 GB/s on the way down.
    let doublings = |under_way: f64| (1.0 + under_way / 58_400.0).log2();
    let delays = 0.1 * (4.0 + doublings(1e8 / 3.0) + doublings(1e8));
    near(seconds(&hosts), 4.0 + delays);
}

#[test]
fn a_tree_waits_for_its_edges_and_they_share_the_root() {
    // Two edges with two clients each, over a link of 1 Gbit/s to a root of 2 Gbit/s.
    let names = ["root", "x", "y", "a", "b", "c", "d"];
    let mut hosts: Vec<_> = names.iter().map(|name| client(name, 4.0)).collect();
    hosts[..3].iter_mut().for_each(|host| (host.client, host.aggregator) = (false, true));
    hosts[0] = aggregator("root", 2.0);
    let network = Network::new(&profile(hosts, vec![link("x", "root", 1.0)]), GB).unwrap();
    let tree = Tree::new(0, &[(3, 1), (4, 1), (5, 2), (6, 2)]);
    // Up: 4 s to each edge, then 8 s over the slow link, both edges together 8 s. Down the same.
    near(network.tree(&tree).seconds, 2.0 * (4.0 + 8.0));
    let flat = Tree::new(0, &[(3, 0), (4, 0), (5, 0), (6, 0)]);
    near(network.tree(&flat).seconds, 2.0 * 16.0);
    assert_eq!(tree.root(), 0);
}

#[test]
fn rings_and_chains_take_what_their_formulas_say() {
    let hosts = profile(["a", "b", "c", "d"].map(|name| client(name, 1.0)).to_vec(), vec![]);
    let chunks = 2.0 * 524_288.0 * 4.0 / 1.25e8;
    let ring = plan(&hosts, GB, Topology::Ring, Method::Best).unwrap();
    assert!((ring.seconds() - 12.0 - chunks).abs() < 0.1 * chunks, "{}", ring.seconds());
    let bf16 = ModelSize { sum_bytes: 2_000_000_000, ..GB };
    let ring = plan(&hosts, bf16, Topology::Ring, Method::Best).unwrap();
    assert!((ring.seconds() - 18.0 - 0.75 * chunks).abs() < 0.1 * chunks, "{}", ring.seconds());
    let chain = plan(&hosts, GB, Topology::Chain, Method::Best).unwrap();
    near(chain.seconds(), 8.0 + 6.0 * 1_048_576.0 / 1.25e8);
}

#[test]
fn a_ring_goes_around_slow_links() {
    let hosts = ["a", "b", "c", "d", "e"].map(|name| client(name, 10.0)).to_vec();
    // a-b-c-d-e-a would use two of them.
    let slow = vec![link("a", "b", 0.1), link("c", "d", 0.1)];
    let found = plan(&profile(hosts, slow), GB, Topology::Ring, Method::Heuristic).unwrap();
    let Layout::Row(order) = &found.layout else { panic!("{:?}", found.layout) };
    let apart = |x: usize, y: usize| {
        let at = |host| order.iter().position(|&other| other == host).unwrap();
        let steps = at(x).abs_diff(at(y));
        steps != 1 && steps != order.len() - 1
    };
    assert!(apart(0, 1) && apart(2, 3), "{order:?}");
    assert!(found.round_robin_s > 50.0 * found.seconds());
}

#[test]
fn hosts_stand_as_they_are_named() {
    let host = |name: &str| Host { name: name.into(), ip: std::net::IpAddr::from([10, 0, 0, 1]) };
    let hosts = ["d", "a", "c", "b"].map(host);
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    assert_eq!(ranks(&hosts, &[]), [1, 3, 2, 0]);
    assert_eq!(ranks(&hosts, &names(&["c", "nobody", "a"])), [2, 1, 3, 0]);
}

/// The seconds of all placements, by the formulas of a tree alone.
fn least_by_hand(profile: &Profile, network: &Network) -> f64 {
    let places = |is: &dyn Fn(&HostProfile) -> bool| {
        let hosts = profile.hosts.iter().enumerate();
        hosts.filter(|(_, host)| is(host)).map(|(at, _)| at).collect::<Vec<usize>>()
    };
    let (clients, hubs) = (places(&|host| host.client), places(&|host| host.aggregator));
    let mut least = f64::INFINITY;
    for number in 0..hubs.len().pow(clients.len() as u32) {
        let mut digits = number;
        let pairs: Vec<(usize, usize)> = clients
            .iter()
            .map(|&client| {
                let hub = hubs[digits % hubs.len()];
                digits /= hubs.len();
                (client, hub)
            })
            .collect();
        for &root in &hubs {
            let tree = Tree::new(root, &pairs);
            let fits = hubs.iter().all(|&hub| {
                let edges = hubs.iter().filter(|&&edge| {
                    hub == root && edge != root && pairs.iter().any(|&(_, to)| to == edge)
                });
                let below = pairs.iter().filter(|&&(_, to)| to == hub).count() + edges.count();
                profile.hosts[hub].max_clients.is_none_or(|most| below as u64 <= most)
            });
            if fits {
                least = least.min(network.tree(&tree).seconds);
            }
        }
    }
    least
}

#[test]
fn the_exact_method_finds_the_best_of_all_placements() {
    let mut numbers = Numbers(7);
    for _ in 0..40 {
        let (clients, hubs) = (1 + numbers.below(4), 1 + numbers.below(3));
        let profile = random_profile(&mut numbers, clients, hubs);
        let network = Network::new(&profile, GB).unwrap();
        let expected = least_by_hand(&profile, &network);
        match plan(&profile, GB, Topology::Tree, Method::Best) {
            Ok(found) => near(found.seconds(), expected),
            Err(_) => assert_eq!(expected, f64::INFINITY),
        }
    }
}

fn check(found: &Plan) {
    assert!(found.seconds() <= found.round_robin_s * (1.0 + 1e-9), "{found:?}");
    assert!(found.lower_bound_s <= found.seconds() * (1.0 + 1e-9), "{found:?}");
    let sum: f64 = found.prediction.stages.iter().map(|stage| stage.seconds).sum();
    near(sum, found.seconds());
}

#[test]
fn the_heuristic_is_within_5_percent_of_the_optimum() {
    let mut numbers = Numbers(5);
    let (mut worst, mut planned) = (1.0_f64, 0);
    for _ in 0..200 {
        let (clients, hubs) = (1 + numbers.below(10), 1 + numbers.below(3));
        let profile = random_profile(&mut numbers, clients, hubs);
        for shape in Topology::ALL {
            let bytes = 1 << (12 + numbers.below(20));
            let model = ModelSize { bytes, sum_bytes: bytes << numbers.below(2) };
            let exact = plan(&profile, model, shape, Method::Best);
            let found = plan(&profile, model, shape, Method::Heuristic);
            let (Ok(exact), Ok(found)) = (&exact, &found) else {
                assert_eq!(exact.as_ref().err(), found.as_ref().err());
                continue;
            };
            check(exact);
            check(found);
            planned += 1;
            worst = worst.max(found.seconds() / exact.seconds());
        }
    }
    println!("{planned} plans, the worst takes {worst:.4} of the optimum");
    assert!(planned > 400 && worst <= 1.05, "{planned} plans, the worst {worst}");
}

#[test]
fn large_sessions_are_planned_well() {
    let mut numbers = Numbers(11);
    let mut hosts: Vec<HostProfile> = (0..32)
        .map(|hub| HostProfile {
            cores: 32.0,
            ..aggregator(&format!("hub-{hub}"), numbers.rate(5.0, 40.0))
        })
        .collect();
    hosts.extend((0..1000).map(|index| client(&format!("site-{index}"), numbers.rate(0.1, 1.0))));
    let found = plan(&profile(hosts, vec![]), GB, Topology::Tree, Method::Best).unwrap();
    check(&found);
    assert!(!found.is_proven);
    let bound = found.seconds() / found.lower_bound_s;
    println!(
        "{:.1} s, {bound:.3} of the bound, {:.1} s in turn, {:.1} s at random",
        found.seconds(),
        found.round_robin_s,
        found.random_s
    );
    assert!(bound < 1.25 && found.seconds() < found.random_s, "{bound}");
    let row =
        (0..limits::MAX_RANKS).map(|index| client(&format!("{index}"), numbers.rate(0.1, 10.0)));
    check(&plan(&profile(row.collect(), vec![]), GB, Topology::Ring, Method::Best).unwrap());
}

fn refused(text: &str) -> String {
    Profile::from_json(text).expect_err(text).to_string()
}

#[test]
fn wrong_profiles_are_named_with_field_and_line() {
    let good = r#"{"hosts": [{"name": "a", "client": true,
 "up_gbit_s": 1, "down_gbit_s": 1}, {"name": "b", "aggregator": true,
 "up_gbit_s": 1, "down_gbit_s": 1}], "links": [{"from": "a", "to": "b", "gbit_s": 1}]}"#;
    assert!(Profile::from_json(good).is_ok());
    let cases = [
        ("\"up_gbit_s\": 1,", "\"up_gbit_s\": \"fast\",", &["hosts[0].up_gbit_s", "line 2"][..]),
        ("\"up_gbit_s\": 1,", "", &["hosts[0]", "`up_gbit_s`", "line 2"]),
        ("\"up_gbit_s\": 1,", "\"up_gbit_s\": 1e999,", &["hosts[0].up_gbit_s", "line 2"]),
        ("\"up_gbit_s\": 1,", "\"up_gbit_s\": NaN,", &["hosts[0].up_gbit_s", "line 2"]),
        (
            "\"up_gbit_s\": 1,",
            "\"up_gbit_s\": -1,",
            &["hosts[0].up_gbit_s (\"a\")", "-1", "from 1e-9"],
        ),
        ("\"up_gbit_s\": 1,", "\"up_gbit_s\": 0,", &["hosts[0].up_gbit_s", "from 1e-9"]),
        ("\"up_gbit_s\": 1,", "\"up_gbit_s\": 1e300,", &["hosts[0].up_gbit_s", "to 1e9"]),
        ("\"up_gbit_s\": 1,", "\"up_gbit\": 1,", &["hosts[0]", "up_gbit", "line 2"]),
        ("\"name\": \"b\"", "\"name\": \"a\"", &["two hosts named \"a\"", "hosts[1].name"]),
        ("\"name\": \"b\"", "\"name\": \"\"", &["hosts[1].name", "empty"]),
        ("\"name\": \"b\"", "\"name\": \"\\u0007\"", &["hosts[1].name", "control"]),
        ("\"name\": \"b\"", "\"name\": \"\\u202e\"", &["hosts[1].name", "control"]),
        ("\"to\": \"b\"", "\"to\": \"c\"", &["links[0].to", "\"c\""]),
        ("\"to\": \"b\"", "\"to\": \"a\"", &["links[0].to", "itself"]),
        ("\"gbit_s\": 1}", "\"gbit_s\": -1}", &["links[0].gbit_s", "-1"]),
        ("\"gbit_s\": 1}", "\"rtt_ms\": -1}", &["links[0].rtt_ms", "-1"]),
        (
            "\"gbit_s\": 1}",
            "\"gbit_s\": 1}, {\"from\": \"a\", \"to\": \"b\"}",
            &["two links", "links[1]"],
        ),
        ("\"links\"", "\"lines\"", &["lines", "line 3"]),
        ("1}]}", "1}]} more", &["its end", "line 3"]),
        ("{\"hosts\": [", "[", &["line 1"]),
    ];
    for (part, other, words) in cases {
        assert!(good.contains(part), "{part}");
        let error = refused(&good.replacen(part, other, 1));
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
    let names: Vec<String> = (0..=limits::MAX_PLAN_HOSTS)
        .map(|host| format!("{{\"name\":\"{host}\",\"up_gbit_s\":1,\"down_gbit_s\":1}}"))
        .collect();
    assert!(refused(&format!("{{\"hosts\":[{}]}}", names.join(","))).contains("above the limit"));
}

#[test]
fn what_cannot_be_planned_says_why() {
    let plan =
        |hosts, links, shape| plan(&profile(hosts, links), GB, shape, Method::Best).unwrap_err();
    let hub = || aggregator("hub", 1.0);
    let site = || client("site", 1.0);
    assert_eq!(plan(vec![], vec![], Topology::Star), PlanError::NoClients);
    assert_eq!(plan(vec![site()], vec![], Topology::Tree), PlanError::NoAggregators);
    assert_eq!(plan(vec![hub()], vec![], Topology::Tree), PlanError::NoClients);
    let cut = plan(vec![hub(), site()], vec![link("site", "hub", 0.0)], Topology::Star);
    assert_eq!(cut, PlanError::CutOff { name: "site".into() });
    let full = HostProfile { max_clients: Some(1), ..hub() };
    let two = vec![full, site(), client("more", 1.0)];
    assert_eq!(
        plan(two, vec![], Topology::Tree),
        PlanError::NoPlace { topology: "tree", clients: 2 }
    );
    let small = HostProfile { memory_bytes: Some(1 << 20), ..hub() };
    assert!(matches!(plan(vec![small, site()], vec![], Topology::Star), PlanError::Memory { .. }));
    let alone = plan(vec![hub(), site()], vec![], Topology::Ring);
    assert!(matches!(alone, PlanError::Size { clients: 1, .. }));
    let apart = plan(vec![site(), client("b", 1.0)], vec![link("site", "b", 0.0)], Topology::Chain);
    assert_eq!(apart, PlanError::NoOrder { topology: "chain" });
    let small = HostProfile { memory_bytes: Some(1 << 30), ..site() };
    let row = plan(vec![small, client("b", 1.0)], vec![], Topology::Ring);
    assert!(matches!(row, PlanError::RowMemory { .. }));
    let hosts = profile(vec![hub(), site()], vec![]);
    let nothing = ModelSize::own_sums(0);
    assert!(matches!(best(&hosts, nothing, Method::Best), Err(PlanError::Model { .. })));
}

/// Rounds of three clients as an aggregator prints them, the last one with this rate.
fn rounds(gbit_s: f64) -> String {
    let mut lines = String::from("{\"event\":\"listening\",\"address\":\"127.0.0.1:1\"}\n");
    for (client, rate) in [("a", 1.0), ("b", 1.0), ("c", gbit_s)] {
        for direction in ["upload", "download"] {
            lines += &format!(
                "{{\"event\":\"transfer\",\"round\":1,\"client\":\"{client}\",\"direction\":\"{direction}\",\
                 \"bytes\":1000000000,\"seconds\":{}}}\n",
                8.0 / rate
            );
        }
    }
    lines
        + "{\"event\":\"phase\",\"phase\":\"upload\",\"round\":1,\"bytes\":3,\"cpu_s_per_gb\":0.5}\n"
}

#[test]
fn a_host_that_becomes_slow_changes_the_next_plan() {
    let hosts = ["a", "b", "c", "d"].map(|name| client(name, 1.0));
    // From far away everything takes the same time, so the aggregator with the best client of its own wins.
    let mut hosts = hosts.to_vec();
    hosts.push(aggregator("hub", 100.0));
    hosts.push(aggregator("other", 100.0));
    let links = vec![link("c", "other", 0.5)];
    let mut profile = profile(hosts, links);
    let root =
        |profile: &Profile| match plan(profile, GB, Topology::Star, Method::Best).unwrap().layout {
            Layout::Tree { root, .. } => profile.hosts[root].name.clone(),
            row => panic!("{row:?}"),
        };
    profile.links.push(link("c", "hub", 1.0));
    assert_eq!(root(&profile), "hub");
    let before = profile.clone();
    assert_eq!(profile.learn("hub", &rounds(1.0), 100), Ok(1));
    let rates = |profile: &Profile| {
        let hosts = profile.hosts.iter().map(|host| (host.up_gbit_s, host.down_gbit_s));
        let links = profile.links.iter().map(|link| (link.gbit_s.unwrap(), 0.0));
        hosts.chain(links).collect::<Vec<_>>()
    };
    assert_eq!(rates(&profile), rates(&before), "a round as predicted changes no rate");
    assert_eq!(profile.hosts[4].receive_cpu_s_per_gb, 0.5);
    assert_eq!(profile.hosts[0].measured.unwrap().count, 1);
    assert_eq!(profile.hosts[0].measured.unwrap().at_unix_s, 100);
    // The link between c and the hub becomes slow: the others keep what they have.
    for at in 101..109 {
        assert_eq!(profile.learn("hub", &rounds(0.1), at), Ok(1));
    }
    let slow = profile.links[1].gbit_s.unwrap();
    assert!((0.1..0.2).contains(&slow), "{slow}");
    assert_eq!(profile.links[1].measured.unwrap().count, 9);
    assert_eq!(profile.links[0].gbit_s, Some(0.5));
    assert_eq!(profile.hosts[0].up_gbit_s, 1.0);
    assert_eq!(root(&profile), "other");
    let read = Profile::from_json(&profile.to_json()).unwrap();
    for (read, written) in rates(&read).iter().zip(rates(&profile)) {
        near(read.0, written.0);
    }
    assert_eq!(read.links[1].measured, profile.links[1].measured);
}

#[test]
fn wrong_measurements_change_nothing() {
    let mut hosts = profile(vec![aggregator("hub", 1.0), client("a", 1.0)], vec![]);
    let before = hosts.clone();
    let line = |client: &str, seconds: &str| {
        format!(
            "\n{{\"event\":\"transfer\",\"round\":1,\"client\":\"{client}\",\"direction\":\"upload\",\
             \"bytes\":1000,\"seconds\":{seconds}}}\n"
        )
    };
    let cases = [
        ("hub", line("b", "1"), "line 2 of the measurements names the host \"b\""),
        ("hub", line("a", "-1"), "line 2"),
        ("hub", line("a", "1e300"), "line 2"),
        ("hub", line("a", "1") + &line("a", "1"), "a second transfer of \"a\""),
        ("hub", "no JSON".into(), "line 1"),
        ("nobody", line("a", "1"), "names the host \"nobody\""),
    ];
    for (hub, lines, words) in cases {
        let error = hosts.learn(hub, &lines, 1).unwrap_err().to_string();
        assert!(error.contains(words), "{words:?} in {error:?}");
        assert_eq!(hosts, before);
    }
    assert_eq!(hosts.learn("hub", "", 1), Ok(0));
    assert_eq!(hosts.learn("hub", &line("a", "0"), 1), Ok(0), "too short to show a rate");
}

fn any_number() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => 1e-3..1e3_f64,
        1 => Just(0.0),
        1 => Just(1e-9),
        1 => Just(1e9),
        1 => any::<f64>(),
    ]
}

fn any_host() -> impl Strategy<Value = HostProfile> {
    let numbers =
        (any_number(), any_number(), any_number(), any_number(), any_number(), any_number());
    let flags = (any::<bool>(), any::<bool>(), "[a-f]", any::<Option<u64>>(), any::<Option<u64>>());
    (numbers, flags).prop_map(|((up, down, cores, rtt_ms, send, receive), flags)| {
        let (client, aggregator, name, max_clients, memory_bytes) = flags;
        let host = HostProfile::new(&name, up, down);
        let (send_cpu_s_per_gb, receive_cpu_s_per_gb) = (send, receive);
        HostProfile {
            client,
            aggregator,
            cores,
            rtt_ms,
            max_clients,
            memory_bytes,
            send_cpu_s_per_gb,
            receive_cpu_s_per_gb,
            ..host
        }
    })
}

fn any_link() -> impl Strategy<Value = LinkProfile> {
    let numbers = (proptest::option::of(any_number()), proptest::option::of(any_number()));
    ("[a-g]", "[a-g]", numbers).prop_map(|(from, to, (gbit_s, rtt_ms))| LinkProfile {
        from,
        to,
        gbit_s,
        rtt_ms,
        measured: None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_profile_is_planned_or_refused(
        hosts in proptest::collection::vec(any_host(), 0..7),
        links in proptest::collection::vec(any_link(), 0..4),
        bytes in any::<u64>(),
        sums in any::<u64>(),
    ) {
        let profile = profile(hosts, links);
        let model =
            ModelSize { bytes: bytes >> (bytes % 64), sum_bytes: sums >> (sums % 64) };
        for shape in Topology::ALL {
            for method in [Method::Best, Method::Heuristic] {
                match plan(&profile, model, shape, method) {
                    Ok(found) => {
                        prop_assert!(found.seconds().is_finite() && found.seconds() >= 0.0);
                        prop_assert!(found.seconds() <= found.round_robin_s * (1.0 + 1e-9));
                        prop_assert!(found.lower_bound_s <= found.seconds() * (1.0 + 1e-6));
                    }
                    Err(error) => prop_assert!(!error.to_string().is_empty()),
                }
            }
        }
        if profile.check().is_ok() {
            let read = Profile::from_json(&profile.to_json()).unwrap();
            prop_assert_eq!(read.hosts.len(), profile.hosts.len());
            prop_assert_eq!(read.links.len(), profile.links.len());
        }
    }

    #[test]
    fn any_text_is_a_profile_or_refused(text in ".{0,200}", cut in 0_usize..200) {
        let _ = Profile::from_json(&text);
        let good = profile(vec![aggregator("hub", 1.0)], vec![]).to_json();
        let cut = cut.min(good.len() - 2);
        prop_assert!(Profile::from_json(&good[..cut]).is_err());
        let mut hosts = profile(vec![aggregator("hub", 1.0)], vec![]);
        let _ = hosts.learn("hub", &text, 1);
        prop_assert!(hosts.check().is_ok());
    }
}
