//! `fedlane plan`: profiles in, plans and commands out; rounds that were run correct them.

use std::path::Path;

use serde_json::Value;

use crate::process::{Finished, Process, fedlane, run, serve, start};

const PROFILE: &str = r#"{"hosts": [
  {"name": "root", "address": "10.0.0.1", "aggregator": true, "up_gbit_s": 1, "down_gbit_s": 1, "cores": 8},
  {"name": "west", "address": "west.example:99", "aggregator": true, "up_gbit_s": 10, "down_gbit_s": 10, "cores": 8},
  {"name": "east", "aggregator": true, "up_gbit_s": 10, "down_gbit_s": 10, "cores": 8},
  {"name": "w1", "client": true, "up_gbit_s": 10, "down_gbit_s": 10},
  {"name": "w2", "client": true, "up_gbit_s": 10, "down_gbit_s": 10},
  {"name": "w3", "client": true, "up_gbit_s": 10, "down_gbit_s": 10},
  {"name": "e 1", "client": true, "up_gbit_s": 10, "down_gbit_s": 10},
  {"name": "e2", "client": true, "up_gbit_s": 10, "down_gbit_s": 10},
  {"name": "e3", "client": true, "up_gbit_s": 10, "down_gbit_s": 10}],
 "links": [
  {"from": "w1", "to": "east", "gbit_s": 0.1}, {"from": "w2", "to": "east", "gbit_s": 0.1},
  {"from": "w3", "to": "east", "gbit_s": 0.1}, {"from": "e 1", "to": "west", "gbit_s": 0.1},
  {"from": "e2", "to": "west", "gbit_s": 0.1}, {"from": "e3", "to": "west", "gbit_s": 0.1},
  {"from": "west", "to": "east", "gbit_s": 0.3}]}"#;

fn plan(profile: &Path, args: &[&str]) -> Finished {
    run(fedlane("plan").arg("--profile").arg(profile).args(args))
}

fn event(finished: &Finished, name: &str) -> Value {
    let found = finished.events().into_iter().find(|event| event["event"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {}", finished.said()))
}

#[test]
fn a_plan_names_the_command_of_each_host() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("profile.json");
    std::fs::write(&file, PROFILE).unwrap();
    let args = ["--generate=1GB", "--topology=tree", "--json", "--explain"];
    let found = plan(&file, &args).done();
    let tree = event(&found, "plan");
    assert_eq!(tree["topology"], "tree");
    assert_eq!(tree["root"], "root");
    assert_eq!(tree["proven"], true);
    for (client, edge) in [("w1", "west"), ("e 1", "east")] {
        assert_eq!(tree["clients"][client], edge, "{tree}");
    }
    let number = |field: &str| tree[field].as_f64().unwrap();
    assert!(number("lower_bound_s") <= number("seconds"), "{tree}");
    assert!(number("seconds") < number("round_robin_s"), "{tree}");
    let of = |name: &str| found.events().into_iter().filter(|e| e["event"] == name).count();
    assert_eq!(of("command"), 9);
    // Every client and edge sends and receives.
    assert_eq!(of("predicted"), 2 * (6 + 2));
    let waits: f64 = found
        .events()
        .iter()
        .filter(|event| event["event"] == "waits")
        .map(|event| event["seconds"].as_f64().unwrap())
        .sum();
    assert!((waits - number("seconds")).abs() < 1e-9, "{waits}");
    let text =
        plan(&file, &["--generate=1GB", "--topology=tree", "--explain"]).done().out.join("\n");
    for line in [
        "root: fedlane serve --listen 0.0.0.0:7733 --clients 2 --topology tree --secret-file door.secret",
        "west: fedlane edge 10.0.0.1:7733 --listen 0.0.0.0:99 --name west --clients 3 --secret-file door.secret",
        "w1: fedlane join west.example:99 --name w1 --model update.safetensors --secret-file door.secret",
        "e 1: fedlane join east:7733 --name 'e 1' --model",
        "bottleneck: ",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
}

#[test]
fn the_fastest_shape_is_taken_and_the_others_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("profile.json");
    std::fs::write(&file, PROFILE).unwrap();
    let found = plan(&file, &["--generate=1GB", "--dtype=bf16", "--json", "--explain"]).done();
    let best = event(&found, "plan");
    assert_eq!(best["sum_bytes"], 2_000_000_000_u64);
    let events = found.events();
    let others: Vec<&Value> = events.iter().filter(|event| event["event"] == "other").collect();
    assert_eq!(others.len(), 3, "{}", found.said());
    for other in others.iter().filter_map(|other| other["seconds"].as_f64()) {
        assert!(other >= best["seconds"].as_f64().unwrap());
    }
    let ring = plan(&file, &["--generate=1GB", "--topology=ring", "--json"]).done();
    let order = event(&ring, "plan")["order"].clone();
    assert_eq!(order.as_array().unwrap().len(), 6);
    let served: Vec<Value> = event(&ring, "command")["arguments"].as_array().unwrap().clone();
    let named = served.windows(2).filter(|pair| pair[0] == "--rank").map(|pair| pair[1].clone());
    assert_eq!(Value::from_iter(named), order);
    let one = PROFILE.replace("\"client\": true", "\"client\": false");
    std::fs::write(&file, one).unwrap();
    assert!(
        plan(&file, &["--generate=1GB"]).failed().contains("no host of the profile is a client")
    );
}

#[test]
fn wrong_profiles_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("profile.json");
    let cases = [
        (PROFILE.replace("\"cores\": 8", "\"cores\": -8"), "hosts[0].cores (\"root\")"),
        (PROFILE.replace("\"aggregator\": true", "\"aggregator\": 1"), "hosts[0].aggregator"),
        (PROFILE.replace("\"to\": \"west\"", "\"to\": \"south\""), "\"south\""),
        (PROFILE[..300].to_owned(), "at hosts[2]: EOF while parsing a string at line 4"),
        (String::new(), "line 1"),
    ];
    for (text, words) in cases {
        std::fs::write(&file, text).unwrap();
        let error = plan(&file, &["--generate=1GB"]).failed();
        assert!(error.contains(words) && error.contains("profile.json"), "{words:?} in {error:?}");
    }
    std::fs::write(&file, b"\xff\xfe").unwrap();
    assert!(plan(&file, &["--generate=1GB"]).failed().contains("is not text"));
    let gone = plan(&directory.path().join("gone"), &["--generate=1GB"]).failed();
    assert!(gone.contains("cannot read"), "{gone}");
    std::fs::write(&file, PROFILE).unwrap();
    assert_eq!(plan(&file, &[]).status.code(), Some(2));
    assert_eq!(plan(&file, &["--measured=x"]).status.code(), Some(2));
}

#[test]
fn rounds_that_were_run_correct_the_profile() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("profile.json");
    let host = |name: &str, part: &str| {
        format!(
            "{{\"name\": \"{name}\", \"{part}\": true, \"up_gbit_s\": 1e9, \"down_gbit_s\": 1e9}}"
        )
    };
    let hosts = [host("hub", "aggregator"), host("a", "client"), host("b", "client")];
    std::fs::write(&file, format!("{{\"hosts\": [{}]}}", hosts.join(","))).unwrap();
    let mut hub = start(serve(2), ["--rounds=2", "--streams=1"]);
    let address = hub.address();
    let clients = ["a", "b"].map(|name| {
        let mut join = fedlane("join");
        Process::start(join.args([&address, "--name", name, "--generate=256MiB"]))
    });
    let rounds = hub.finish().done();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    let seen: Vec<Value> =
        rounds.events().into_iter().filter(|event| event["event"] == "transfer").collect();
    let ups = seen.iter().filter(|event| event["direction"] == "upload").count();
    // A transfer that is over between two looks may be missed, but not the first ones.
    assert!((2..=4).contains(&ups), "{}", rounds.said());
    for transfer in &seen {
        assert_eq!(transfer["bytes"], 256 << 20, "{transfer}");
    }
    let printed = directory.path().join("rounds.json");
    std::fs::write(&printed, rounds.out.join("\n")).unwrap();
    let measured = format!("--measured=hub={}", printed.display());
    let found = plan(&file, &[&measured, "--generate=256MiB", "--json"]).done();
    assert_eq!(event(&found, "measured")["rounds"], 2);
    let profile: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(profile["hosts"][0]["measured"]["count"], 2, "{profile}");
    assert_ne!(profile["hosts"][0]["receive_cpu_s_per_gb"], 0.12, "{profile}");
    // Nobody sends 10^18 bit a second.
    for host in &profile["hosts"].as_array().unwrap()[1..] {
        let long =
            seen.iter().any(|t| t["client"] == host["name"] && t["seconds"].as_f64() > Some(0.2));
        assert!(!long || host["up_gbit_s"].as_f64() < Some(1e6), "{profile}");
    }
    let before = std::fs::read(&file).unwrap();
    std::fs::write(&printed, "{\"event\": \"transfer\", \"round\": 1}").unwrap();
    let error = plan(&file, &[&measured]).failed();
    assert!(
        error.contains("line 1 of the measurements") && error.contains("rounds.json"),
        "{error}"
    );
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

#[test]
fn a_ring_stands_in_the_order_of_its_plan() {
    let mut hub = start(serve(3), ["--topology=ring", "--rank=b", "--rank=c", "--rank=a"]);
    let address = hub.address();
    let clients = ["a", "b", "c"].map(|name| {
        let mut join = fedlane("join");
        Process::start(join.args([&address, "--name", name, "--generate=1MiB"]))
    });
    let rounds = hub.finish().done();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    assert_eq!(event(&rounds, "averaged")["clients"], serde_json::json!(["b", "c", "a"]));
}

#[test]
fn profiles_are_measured() {
    let directory = tempfile::tempdir().unwrap();
    let (hub_file, file) = (directory.path().join("hub.json"), directory.path().join("site.json"));
    let secret = directory.path().join("door.secret");
    run(fedlane("cert").arg("--secret").arg(&secret)).done();
    let mut listen = fedlane("plan");
    listen.args(["listen", "127.0.0.1:0", "--name=hub", "--json", "--profile"]).arg(&hub_file);
    let mut hub = start(listen, [std::ffi::OsStr::new("--secret-file"), secret.as_os_str()]);
    let address = hub.address();
    let probe = || {
        let mut probe = fedlane("plan");
        probe.args(["probe", &address, "--name=site"]).arg("--profile").arg(&file);
        probe
    };
    let refused = run(&mut probe()).failed();
    assert!(
        refused.contains("was not measured") && refused.contains("secrets differ"),
        "{refused}"
    );
    assert!(!file.exists());
    run(probe().arg("--secret-file").arg(&secret)).done();
    let speed = hub.await_event("speed");
    assert_eq!((&speed["from"], &speed["to"]), (&Value::from("site"), &Value::from("hub")));
    for file in [&file, &hub_file] {
        let found = plan(file, &["--generate=1GB", "--topology=star", "--json"]);
        assert_eq!(event(&found.done(), "plan")["root"], "hub");
    }
    let nobody = run(fedlane("plan").args(["probe", "127.0.0.1:1"])).failed();
    assert!(nobody.contains("127.0.0.1:1 was not measured"), "{nobody}");
    let open = run(fedlane("plan").args(["listen", "0.0.0.0:0"])).failed();
    assert!(open.contains("--insecure"), "{open}");
}
