//! `fedlane edge`: trees of processes, their doors, and what is left when one is killed.

use std::fs;
use std::path::Path;

use crate::models::{Layout, every_dtype};
use crate::process::{Finished, Process, fedlane, join, run, serve, start};
use crate::session::{same_bytes, two_members};

fn edge(above: &str, name: &str, clients: usize) -> std::process::Command {
    let mut edge = fedlane("edge");
    edge.args([above, "--json", "--name", name, "--listen=127.0.0.1:0"]);
    edge.arg(format!("--clients={clients}"));
    edge
}

/// A tree of two edges with one client each, from files to files. Gives what the top and the edges said.
fn average(
    layout: &Layout,
    top: &[String],
    edges: &[String],
    clients: &[String],
) -> (Finished, Vec<Finished>) {
    let directory = tempfile::tempdir().unwrap();
    let members = two_members(layout, directory.path());
    let model = directory.path().join("mean.safetensors");
    let mut command = serve(2);
    command.arg("--topology=tree").arg("--output").arg(&model);
    let mut server = start(command, top);
    let address = server.address();
    let (mut middle, mut leaves, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
    for member in &members {
        let mut edge = start(edge(&address, &format!("edge-{}", member.name), 1), edges);
        let output = directory.path().join(format!("{}.mean", member.name));
        let mut command = join(&edge.address(), &member.name, &member.model);
        command.args(["--examples", &member.examples]).arg("--output").arg(&output);
        leaves.push(start(command, clients));
        outputs.push(output);
        middle.push(edge);
    }
    leaves.into_iter().for_each(|leaf| drop(leaf.finish().done()));
    let middle = middle.into_iter().map(|edge| edge.finish().done()).collect();
    let server = server.finish().done();
    outputs.iter().for_each(|output| assert!(same_bytes(output, &model)));
    assert!(fs::read(&model).unwrap() == layout.mean(), "the mean is exact");
    (server, middle)
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

#[test]
fn the_result_names_all_clients() {
    for order in ["--order=arrival", "--order=client"] {
        let args = strings(&[order]);
        let (server, edges) = average(&every_dtype(), &args, &args, &[]);
        let averaged = server.events().into_iter().find(|e| e["event"] == "averaged").unwrap();
        assert_eq!(averaged["clients"], serde_json::json!(["edge-a/a", "edge-b/b"]));
        let averaged = edges[1].events().into_iter().find(|e| e["event"] == "averaged").unwrap();
        assert_eq!(averaged["clients"], serde_json::json!(["b"]));
    }
}

#[test]
fn rounds_below_are_reported() {
    let local = strings(&["--local-rounds=3"]);
    let (_, edges) = average(&every_dtype(), &strings(&["--rounds=2"]), &local, &[]);
    for edge in edges {
        let events = edge.events();
        let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
        assert_eq!((count("averaged_locally"), count("averaged")), (4, 2), "{}", edge.said());
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_secret_on_each_side() {
    let directory = tempfile::tempdir().unwrap();
    let [above, below] = ["above", "below"].map(|name| {
        let path = directory.path().join(name);
        run(fedlane("cert").arg("--secret").arg(&path)).done();
        text(&path)
    });
    let [top, client] = [&above, &below].map(|path| strings(&["--secret-file", path]));
    let edge = strings(&["--secret-file", &below, "--above-secret-file", &above]);
    average(&every_dtype(), &top, &edge, &client);
    average(&every_dtype(), &top, &top, &top);
}

#[test]
fn tls_on_each_side() {
    let directory = tempfile::tempdir().unwrap();
    let [above, below] = ["above", "below"].map(|name| {
        let path = directory.path().join(name);
        run(fedlane("cert").arg(&path)).done();
        move |file: &str| text(&path.join(file))
    });
    let server = |of: &dyn Fn(&str) -> String| {
        strings(&["--tls-cert", &of("server.pem"), "--tls-key", &of("server.key")])
    };
    let above_ca = above("ca.pem");
    let edge = [server(&below), strings(&["--above-tls-ca", &above_ca])].concat();
    average(&every_dtype(), &server(&above), &edge, &strings(&["--tls-ca", &below("ca.pem")]));
    // Encrypted below, in the clear above.
    average(&every_dtype(), &[], &server(&below), &strings(&["--tls-ca", &below("ca.pem")]));
}

#[test]
fn a_demo_of_any_shape() {
    for (clients, edges, dtype) in [("4", "2", "f32"), ("5", "3", "bf16"), ("2", "7", "i8")] {
        for order in ["arrival", "client"] {
            let ended =
                run(fedlane("demo").args(["--json", "--topology=tree", "--generate=300KiB"]).args(
                    ["--clients", clients, "--edges", edges, "--dtype", dtype, "--order", order],
                ))
                .done();
            let events = ended.events();
            let verified = events.iter().filter(|event| event["verified"] == true).count();
            assert_eq!(verified, 1, "{}", ended.said());
            let averaged = |event: &&serde_json::Value| {
                event["event"] == "averaged" && event["process"] == "aggregator"
            };
            let averaged = events.iter().find(averaged).unwrap();
            let named = averaged["clients"].as_array().unwrap().len();
            assert_eq!(named, clients.parse::<usize>().unwrap(), "{}", ended.said());
        }
    }
}

/// A top that needs one of two edges, whose first edge is killed when its client trains in round 2.
#[test]
fn an_edge_that_is_killed() {
    for order in ["--order=arrival", "--order=client"] {
        let directory = tempfile::tempdir().unwrap();
        let members = two_members(&every_dtype(), directory.path());
        let mut command = serve(2);
        command.args([
            "--topology=tree",
            "--min-clients=1",
            "--rounds=3",
            "--reconnect-ms=0",
            order,
        ]);
        let mut server = start(command, [] as [&str; 0]);
        let address = server.address();
        let mut edges: Vec<Process> = ["edge-a", "edge-b"]
            .iter()
            .map(|name| start(edge(&address, name, 1), [order]))
            .collect();
        let waits = directory.path().join("in-training");
        let train =
            format!("if [ $FEDLANE_ROUND = 2 ]; then touch {}; exec sleep 60; fi", waits.display());
        let leaves: Vec<Process> = members
            .iter()
            .zip(&mut edges)
            .map(|(member, edge)| {
                let mut command = join(&edge.address(), &member.name, &member.model);
                command.args(["--examples", &member.examples, "--reconnect-ms=0"]);
                match member.name.as_str() {
                    "a" => start(command, ["--train", &train]),
                    _ => start(command, [] as [&str; 0]),
                }
            })
            .collect();
        while !waits.exists() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        // Dropped, it is killed.
        drop(edges.remove(0));
        let ended = server.finish().done();
        let events = ended.events();
        let of = |round: u64| {
            let is_round = |e: &&serde_json::Value| e["event"] == "averaged" && e["round"] == round;
            events.iter().find(is_round).unwrap_or_else(|| panic!("{}", ended.said()))
        };
        assert_eq!(of(1)["clients"], serde_json::json!(["edge-a/a", "edge-b/b"]));
        for round in [2, 3] {
            assert_eq!(of(round)["clients"], serde_json::json!(["edge-b/b"]), "{}", ended.said());
            assert!(of(round)["left_out"][0].as_str().unwrap().starts_with("edge-a"));
        }
        let mut leaves = leaves.into_iter();
        leaves.next().unwrap().finish().failed();
        leaves.next().unwrap().finish().done();
        edges.remove(0).finish().done();
    }
}

#[test]
fn what_does_not_work_in_a_tree_is_said() {
    for (args, what) in [(["--clip-norm=1"], "--clip-norm"), (["--state=s"], "--state")] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = serve(1);
        command.arg("--topology=tree").args(args).current_dir(directory.path());
        let words = run(&mut command).failed();
        assert!(words.contains(&format!("{what} does not work in a tree")), "{words}");
    }
}
