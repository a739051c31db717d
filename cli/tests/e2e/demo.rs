//! `fedlane demo`: every way to run it moves and verifies what it says.

use serde_json::Value;

use crate::process::{Finished, fedlane, join, run, serve, start};

fn demo(args: &[&str]) -> Finished {
    run(fedlane("demo").args(args)).done()
}

/// Runs the demo and checks that it was the one that was asked for, and verified.
fn verified(args: &[&str], clients: usize, rounds: usize, elements: u64) -> Vec<Value> {
    let mut all = vec!["--json"];
    all.extend(args);
    let ended = demo(&all);
    let events = ended.events();
    assert_eq!(events[0]["event"], "demo", "{}", ended.said());
    assert_eq!(events[0]["clients"], clients, "{}", ended.said());
    let of_processes: Vec<&Value> = events.iter().filter(|e| e["process"].is_string()).collect();
    let count = |what: &dyn Fn(&Value) -> bool| of_processes.iter().filter(|e| what(e)).count();
    // One for each client in each round, and one for the aggregator.
    let phases = |phase: &str| count(&|e| e["phase"] == phase);
    assert_eq!(phases("upload"), (clients + 1) * rounds, "{}", ended.said());
    assert_eq!(phases("broadcast"), rounds, "{}", ended.said());
    assert_eq!(phases("download"), clients * rounds, "{}", ended.said());
    let checks: Vec<_> = of_processes.iter().filter(|e| e["verified"] == true).collect();
    assert_eq!(checks.len(), 1, "{}", ended.said());
    assert_eq!(checks[0]["elements"], elements, "{}", ended.said());
    events
}

#[test]
fn a_table_says_that_the_result_was_verified() {
    let ended = demo(&["--generate=1MiB"]);
    let text = ended.out.join("\n");
    for part in ["process", "peak RSS", "aggregator", "client-1", "client-3", "upload", "broadcast"]
    {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(text.contains("verified: all 262144 elements are the weighted mean"), "{text}");
    assert!(!text.contains('\x1b'), "a pipe gets no colours: {text}");
}

#[test]
fn any_number_of_clients() {
    for clients in [1, 3, 16] {
        let count = clients.to_string();
        let args = ["--generate=256KiB", "--clients", &count];
        verified(&args, clients, 1, 65_536);
    }
}

#[test]
fn every_dtype() {
    let bytes = 280_u64 << 10;
    for (dtype, size) in
        [("f32", 4), ("bf16", 2), ("f16", 2), ("f64", 8), ("i64", 8), ("u8", 1), ("bool", 1)]
    {
        let args = ["--generate=280KiB", "--dtype", dtype];
        verified(&args, 3, 1, bytes / size);
    }
}

#[test]
fn every_number_of_streams_and_size_of_chunks_in_both_orders() {
    for (streams, chunk, order) in
        [("1", "4KiB", "client"), ("2", "1MiB", "arrival"), ("5", "4KiB", "arrival")]
    {
        let args = [
            "--generate=1300KiB",
            "--streams",
            streams,
            "--chunk-bytes",
            chunk,
            "--order",
            order,
            "--rounds=2",
        ];
        verified(&args, 3, 2, 332_800);
    }
}

#[test]
fn order_client_with_chunks_larger_than_a_lane() {
    let args = ["--generate=1300KiB", "--streams=5", "--chunk-bytes=1MiB", "--order=client"];
    verified(&args, 3, 1, 332_800);
}

#[test]
fn every_send_path_with_every_receive_path() {
    for send in ["write", "sendfile", "vmsplice"] {
        for receive in ["read", "splice"] {
            let args =
                ["--generate=3MiB", "--send-path", send, "--receive-path", receive, "--rounds=2"];
            let events = verified(&args, 3, 2, 786_432);
            let used = |key: &str, wanted: &str| {
                events.iter().filter(|e| !e[key].is_null()).all(|e| e[key] == wanted)
            };
            assert!(used("send_path", send) && used("receive_path", receive), "{events:?}");
        }
    }
}

#[test]
fn a_preset_has_the_shape_of_the_known_model() {
    let directory = tempfile::tempdir().unwrap();
    let small = directory.path().join("small.safetensors");
    crate::models::every_dtype().write_client(0, &small);
    let mut command = serve(2);
    command.arg("--initial").arg(&small);
    let mut server = start(command, [""; 0]);
    let address = server.address();
    // Their headers are compared before a byte of its 5.2 GB is made.
    let client = run(fedlane("join").args([&address, "--json", "--preset=gemma-2-2b"]));
    assert_eq!(client.events()[0]["bytes"], 5_228_683_776_u64);
    let words = client.failed();
    assert!(words.contains("its model differs") && words.contains("\"bytes\""), "{words}");
    server.finish().failed();
}

#[test]
fn clients_of_a_generated_model_can_join_those_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("generated.safetensors");
    let mut server = start(serve(1), ["--output", file.to_str().unwrap()]);
    let generate = ["--generate=1MiB", "--seed=5"];
    let address = server.address();
    run(fedlane("join").arg(&address).args(generate)).done();
    server.finish().done();
    let mut server = start(serve(2), ["--order=client"]);
    let address = server.address();
    let first = start(join(&address, "file", &file), [""; 0]);
    run(fedlane("join").arg(&address).args(generate)).done();
    first.finish().done();
    server.finish().done();
}
