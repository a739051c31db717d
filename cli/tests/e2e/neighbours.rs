//! Clients that average among themselves, in a ring or a chain.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::doors::{Certificates, strs};
use crate::process::{Finished, fedlane, run, serve, start};

const TOPOLOGIES: [&str; 2] = ["--topology=ring", "--topology=chain"];

fn demo(args: &[&str]) -> Finished {
    run(fedlane("demo").arg("--json").args(args)).done()
}

fn verified(ended: &Finished) -> Value {
    let checks: Vec<_> = ended.events().into_iter().filter(|e| e["verified"] == true).collect();
    assert_eq!(checks.len(), 1, "{}", ended.said());
    checks[0].clone()
}

#[test]
fn any_number_of_clients() {
    for topology in TOPOLOGIES {
        for (clients, rounds) in [("2", "3"), ("3", "1"), ("7", "2")] {
            let args = [topology, "--generate=300KiB", "--dtype=bf16", "--rounds", rounds];
            let ended = demo(&[&args[..], &["--clients", clients]].concat());
            let reduced = ended.phases("all-reduce").len();
            let (clients, rounds): (usize, usize) =
                (clients.parse().unwrap(), rounds.parse().unwrap());
            assert_eq!(reduced, clients * rounds, "{}", ended.said());
            assert_eq!(verified(&ended)["elements"], 150 << 10, "{}", ended.said());
        }
    }
}

#[test]
fn every_send_path_with_every_receive_path() {
    for topology in TOPOLOGIES {
        for send in ["write", "sendfile", "vmsplice"] {
            for receive in ["read", "splice"] {
                for memory in [&["--memory=128MiB"][..], &[]] {
                    let paths = ["--send-path", send, "--receive-path", receive];
                    let model = [topology, "--generate=9MB"];
                    verified(&demo(&[&paths[..], &model, memory].concat()));
                }
            }
        }
    }
}

#[test]
fn a_model_larger_than_memory() {
    for topology in TOPOLOGIES {
        let ended = demo(&[topology, "--generate=200MB", "--memory=128MiB", "--rounds=2"]);
        let verified = verified(&ended);
        assert_eq!(verified["sampled"], true);
        // 16 KiB in every 4 MiB, at least.
        assert!(verified["elements"].as_u64().unwrap() > 200_000_000 / (4 << 20) * 4096);
        for event in ended.events() {
            if let Some(bytes) = event["peak_rss_bytes"].as_u64() {
                assert!(bytes < 128 << 20, "{}", ended.said());
            }
        }
    }
}

/// Two clients, with more arguments for the server, for both, and for the second.
fn average(server: &[&str], clients: &[&str], second: &[&str], outputs: [&Path; 2]) {
    let mut server = start(serve(2), server);
    let address = server.address();
    let clients: Vec<_> = ["a", "b"]
        .into_iter()
        .zip(outputs)
        .map(|(name, output)| {
            let mut join = fedlane("join");
            join.args([&address, "--json", "--name", name, "--generate=9MB", "--seed"]);
            join.arg(if name == "a" { "1" } else { "2" }).arg("--output").arg(output);
            join.args(clients).args(if name == "b" { second } else { &[] });
            start(join, [""; 0])
        })
        .collect();
    clients.into_iter().for_each(|client| drop(client.finish().done()));
    server.finish().done();
}

#[test]
fn the_same_file_whether_the_mean_has_room_in_memory_or_not() {
    let directory = tempfile::tempdir().unwrap();
    let (held, passed) = (directory.path().join("held"), directory.path().join("passed"));
    for topology in TOPOLOGIES {
        average(&[topology, "--rounds=2"], &[], &["--memory=128MiB"], [&held, &passed]);
        assert!(fs::read(&held).unwrap() == fs::read(&passed).unwrap());
    }
}

#[test]
fn the_others_go_on_without_a_client_that_is_killed_or_stopped() {
    for topology in TOPOLOGIES {
        for (signal, name) in [(Signal::KILL, "a"), (Signal::STOP, "b"), (Signal::KILL, "c")] {
            let args = [topology, "--rounds=20", "--min-clients=2", "--deadline-ms=3000"];
            let mut server = start(serve(3), args);
            let address = server.address();
            let mut clients: Vec<_> = ["a", "b", "c"]
                .map(|name| {
                    let mut join = fedlane("join");
                    join.args([&address, "--json", "--name", name, "--generate=30MB"]);
                    (name, start(join, ["--memory=128MiB"]))
                })
                .into();
            server.await_event("averaged");
            let lost = clients.remove(clients.iter().position(|client| client.0 == name).unwrap());
            let id = Pid::from_raw(lost.1.id() as i32).unwrap();
            kill_process(id, signal).unwrap();
            clients.into_iter().for_each(|(_, client)| drop(client.finish().done()));
            let ended = server.finish().done();
            let rounds: Vec<_> =
                ended.events().into_iter().filter(|e| e["event"] == "averaged").collect();
            assert_eq!(rounds.len(), 20, "{}", ended.said());
            let last = rounds[19]["clients"].as_array().unwrap();
            assert!(last.len() == 2 && !last.contains(&name.into()), "{}", ended.said());
        }
    }
}

#[test]
fn neighbours_speak_tls_as_all_do() {
    let made = Certificates::new(&["--client", "a", "--client", "b"]);
    let directory = tempfile::tempdir().unwrap();
    let outputs = ["a", "b"].map(|name| directory.path().join(name));
    for topology in TOPOLOGIES {
        let server = [vec![topology.to_owned()], made.server()].concat();
        average(&strs(&server), &strs(&made.client()), &[], [&outputs[0], &outputs[1]]);
        assert!(fs::read(&outputs[0]).unwrap() == fs::read(&outputs[1]).unwrap());
    }
}

#[test]
fn what_only_an_aggregator_can_do_is_refused() {
    for topology in TOPOLOGIES {
        for flag in ["--clip-norm=1", "--state=kept", "--max-model=1GiB", "--on-loss=spool"] {
            let words = run(serve(2).args([topology, flag])).failed();
            let name = flag.split('=').next().unwrap();
            assert!(words.contains(name) && words.contains(&topology[11..]), "{words}");
        }
    }
    let words = run(fedlane("demo").args(["--memory=1GiB"])).failed();
    assert!(words.contains("--topology ring"), "{words}");
    let words = run(fedlane("join").args(["127.0.0.1:1", "--generate=1MB", "--memory=1MiB"]));
    assert!(words.status.code() == Some(2), "{}", words.said());
}
