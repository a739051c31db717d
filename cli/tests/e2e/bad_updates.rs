//! Updates with elements that are not finite, and updates that are too large.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::models::Layout;
use crate::process::{Finished, Process, join, serve, start};

const ELEMENTS: u64 = 60_000;

/// Tensors "w" and "x" with elements of one value each client; of client "c" element 5 of "x" is NaN.
fn model(value: f32, bad: bool) -> Vec<u8> {
    let layout = Layout::new(&[("w", "F32", &[100]), ("x", "F32", &[ELEMENTS - 100])], None);
    let mut file = (layout.header.len() as u64).to_le_bytes().to_vec();
    file.extend(&layout.header);
    for index in 0..ELEMENTS {
        let element = if bad && index == 105 { f32::NAN } else { value };
        file.extend(element.to_le_bytes());
    }
    file
}

fn elements(path: &Path) -> Vec<f32> {
    let file = fs::read(path).unwrap();
    let data = &file[file.len() - 4 * ELEMENTS as usize..];
    data.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Clients a, b and c bring 1, 3 and 8, and c a NaN. Gives what serve and they came to, and the mean.
fn session(args: &[&str]) -> (Finished, Vec<Finished>, Option<Vec<f32>>) {
    let directory = tempfile::tempdir().unwrap();
    let output = directory.path().join("mean");
    let mut command = serve(3);
    command.arg("--output").arg(&output).arg("--chunk-bytes=16KiB");
    let mut server = start(command, args);
    let address = server.address();
    let client = |(name, value): (&str, f32)| {
        let path = directory.path().join(name);
        fs::write(&path, model(value, name == "c")).unwrap();
        Process::start(&mut join(&address, name, &path))
    };
    let clients: Vec<_> = [("a", 1.0), ("b", 3.0), ("c", 8.0)].into_iter().map(client).collect();
    let clients = clients.into_iter().map(Process::finish).collect();
    let served = server.finish();
    (served, clients, output.exists().then(|| elements(&output)))
}

fn reports(served: &Finished) -> Vec<Value> {
    let events = served.events().into_iter();
    events.filter(|event| event["event"] == "update").collect()
}

/// It was rejected while it came.
fn assert_report_of_c(report: &Value) {
    assert_eq!(report["client"], "c");
    assert_eq!(report["counted"], false);
    assert_eq!(report["rejected"], "nonfinite");
    assert_eq!(report["nonfinite"], 1);
    assert_eq!(report["first_nonfinite"], serde_json::json!({ "tensor": "x", "index": 5 }));
    assert!(report["bytes"].as_u64().unwrap() <= 4 * ELEMENTS);
}

/// No norm can be measured from it, and with a clipped update the mean would not be finite either.
#[test]
fn a_model_that_is_not_finite_is_not_sent_where_updates_are_clipped() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("initial");
    fs::write(&path, model(1.0, true)).unwrap();
    let mut command = serve(1);
    command.arg("--initial").arg(&path);
    let mut server = start(command, ["--clip-norm=1"]);
    let address = server.address();
    let client = Process::start(&mut join(&address, "a", &path));
    let text = "element 5 of tensor \"x\" of the model is NaN or infinite";
    assert!(server.finish().failed().contains(text));
    assert!(client.finish().failed().contains(text));
}

#[test]
fn an_update_that_is_not_finite_ends_a_session_that_needs_everyone() {
    for order in ["--order=client", "--order=arrival"] {
        let (served, clients, mean) = session(&[order]);
        assert_report_of_c(&reports(&served)[0]);
        let said = served.failed();
        assert!(said.contains("client \"c\""), "{said}");
        assert!(said.contains("element 5 of tensor \"x\" is NaN or infinite"), "{said}");
        for client in clients {
            assert!(client.failed().contains("element 5 of tensor \"x\""));
        }
        assert!(mean.is_none());
    }
}

#[test]
fn an_update_that_is_not_finite_is_left_out() {
    for args in [["--min-clients=2", "--order=client"], ["--min-clients=2", "--order=arrival"]] {
        let (served, clients, mean) = session(&args);
        let served = served.done();
        clients.into_iter().for_each(|client| drop(client.done()));
        assert!(mean.unwrap().iter().all(|&element| element == 2.0));
        let averaged: Vec<Value> =
            served.events().into_iter().filter(|event| event["event"] == "averaged").collect();
        assert_eq!(averaged[0]["left_out"], serde_json::json!(["c"]));
        let why = averaged[0]["why"]["c"].as_str().unwrap();
        assert!(why.contains("element 5 of tensor \"x\" is NaN or infinite"), "{why}");
        let reports = reports(&served);
        let clients: Vec<&str> = reports.iter().map(|r| r["client"].as_str().unwrap()).collect();
        assert_eq!(clients, ["a", "b", "c"]);
        assert_report_of_c(&reports[2]);
    }
}

/// Three rounds, in whose first and last the client `bad` of a, b and c brings a NaN; all in all the
/// values 1, 3 and 8. Checks that only those rounds are without it.
fn rounds_with(bad: &str, args: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut command = serve(3);
    command.arg("--output").arg(path("mean")).args(["--chunk-bytes=16KiB", "--rounds=3"]);
    command.args(["--min-clients=2"]).args(args);
    let mut server = start(command, [""; 0]);
    let address = server.address();
    let values = [("a", 1.0), ("b", 3.0), ("c", 8.0)];
    let client = |(name, value): (&str, f32)| {
        fs::write(path(name), model(value, name == bad)).unwrap();
        fs::write(path("good"), model(value, false)).unwrap();
        fs::copy(path("good"), path(&format!("{name}.2"))).unwrap();
        fs::copy(path(name), path(&format!("{name}.3"))).unwrap();
        let mut join = join(&address, name, &path(name));
        join.arg("--output").arg(path(&format!("{name}.mean")));
        // The mean of round 2 is kept when the third one begins.
        let train = "test $FEDLANE_ROUND = 1 || cp $FEDLANE_MODEL.$FEDLANE_ROUND $FEDLANE_MODEL
            test $FEDLANE_ROUND = 1 || cp $FEDLANE_OUTPUT $FEDLANE_OUTPUT.$FEDLANE_ROUND";
        start(join, ["--train", train])
    };
    let clients: Vec<_> = values.into_iter().map(client).collect();
    let clients: Vec<_> = clients.into_iter().map(|client| client.finish().done()).collect();
    let served = server.finish().done();
    let others = values.iter().filter(|(name, _)| *name != bad).map(|(_, value)| value);
    let (without, with) = (others.sum::<f32>() / 2.0, 4.0);
    for (name, _) in values {
        for (mean, expected) in [("mean.2", without), ("mean.3", with), ("mean", without)] {
            let elements = elements(&path(&format!("{name}.{mean}")));
            assert!(elements.iter().all(|&e| e == expected), "{bad} {args:?}: {name}.{mean}");
        }
    }
    let events = served.events();
    let averaged = events.iter().filter(|event| event["event"] == "averaged");
    let left_out: Vec<_> = averaged.map(|event| event["left_out"].clone()).collect();
    assert_eq!(left_out, [json!([bad]), json!([]), json!([bad])], "{args:?}");
    let rejected: Vec<_> = reports(&served)
        .into_iter()
        .filter(|report| report["rejected"] == "nonfinite")
        .map(|report| (report["round"].clone(), report["client"].clone()))
        .collect();
    assert_eq!(rejected, [(json!(1), json!(bad)), (json!(3), json!(bad))], "{args:?}");
    assert_eq!(reports(&served).len(), 9, "{args:?}");
    for ((name, _), client) in values.iter().zip(&clients) {
        let events = client.events().into_iter().filter(|event| event["event"] == "left_out");
        let told: Vec<_> =
            events.map(|event| (event["round"].clone(), event["why"].clone())).collect();
        let rounds: Vec<_> = told.iter().map(|(round, _)| round.as_u64().unwrap()).collect();
        assert_eq!(rounds, if *name == bad { vec![1, 3] } else { vec![] });
        for (_, why) in told {
            let why = why.as_str().unwrap();
            assert!(why.contains("element 5 of tensor \"x\" is NaN or infinite"), "{why}");
        }
    }
}

#[test]
fn a_client_whose_update_is_rejected_is_out_for_the_round_only() {
    for order in ["--order=client", "--order=arrival"] {
        for on_loss in ["--on-loss=redo", "--on-loss=spool", "--on-loss=auto"] {
            for bad in ["a", "c"] {
                rounds_with(bad, &[order, on_loss]);
            }
            let state = tempfile::tempdir().unwrap();
            let state = format!("--state={}", state.path().display());
            rounds_with("b", &[order, on_loss, &state]);
        }
    }
}

/// As long as enough are left, the mean is that of the others; then the session ends.
#[test]
fn updates_that_are_all_not_finite_end_the_session() {
    for on_loss in ["--on-loss=redo", "--on-loss=spool"] {
        for order in ["--order=client", "--order=arrival"] {
            let mut server = start(serve(3), ["--min-clients=1", on_loss, order]);
            let (address, directory) = (server.address(), tempfile::tempdir().unwrap());
            let client = |name: &str| {
                let path = directory.path().join(name);
                fs::write(&path, model(1.0, true)).unwrap();
                Process::start(&mut join(&address, name, &path))
            };
            let clients: Vec<_> = ["a", "b", "c"].into_iter().map(client).collect();
            let served = server.finish();
            assert_eq!(reports(&served).len(), 3, "{}", served.said());
            let why = "element 5 of tensor \"x\" is NaN or infinite";
            assert!(served.failed().contains(why));
            for client in clients {
                assert!(client.finish().failed().contains(why));
            }
        }
    }
}

/// The mean of one is its update, unscaled.
#[test]
fn one_update_that_is_finite_is_the_mean() {
    for on_loss in ["--on-loss=redo", "--on-loss=spool"] {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let mut command = serve(3);
        command.arg("--output").arg(path("mean")).args(["--min-clients=1", on_loss]);
        let mut server = start(command, ["--chunk-bytes=16KiB"]);
        let address = server.address();
        let client = |name: &str| {
            fs::write(path(name), model(0.1, name != "b")).unwrap();
            let mut join = join(&address, name, &path(name));
            Process::start(join.arg("--examples=3"))
        };
        let clients: Vec<_> = ["a", "b", "c"].into_iter().map(client).collect();
        clients.into_iter().for_each(|client| drop(client.finish().done()));
        server.finish().done();
        assert!(elements(&path("mean")).iter().all(|&element| element == 0.1));
    }
}

#[test]
fn elements_that_are_not_finite_count_as_zero() {
    for averaging in ["--averaging=streaming", "--averaging=spool"] {
        let (served, clients, mean) = session(&["--on-nonfinite=zero", averaging]);
        let served = served.done();
        clients.into_iter().for_each(|client| drop(client.done()));
        for (index, &element) in mean.unwrap().iter().enumerate() {
            let expected = if index == 105 { 4.0 / 3.0 } else { 4.0 };
            assert_eq!(element, expected, "{index}");
        }
        let reports = reports(&served);
        assert_eq!(reports.len(), 3);
        assert_eq!(reports[2]["nonfinite"], 1, "{}", reports[2]);
    }
}

#[test]
fn elements_that_are_not_finite_are_kept_if_asked_for() {
    let (served, _, mean) = session(&["--on-nonfinite=keep"]);
    served.done();
    for (index, element) in mean.unwrap().into_iter().enumerate() {
        assert!(if index == 105 { element.is_nan() } else { element == 4.0 }, "{index}");
    }
}

#[test]
fn an_update_that_is_too_large_is_clipped() {
    // b's norm is 3 times the square root of the number of elements: that of a after it is clipped.
    let norm = (ELEMENTS as f64).sqrt();
    let args = ["--on-nonfinite=reject", "--min-clients=2", &format!("--clip-norm={norm}")];
    let (served, _, mean) = session(&args);
    let served = served.done();
    for element in mean.unwrap() {
        assert!((element - 1.0).abs() < 1e-6, "{element}");
    }
    let reports = reports(&served);
    let factor = reports[1]["clip_factor"].as_f64().unwrap();
    assert!((factor - 1.0 / 3.0).abs() < 1e-12, "{factor}");
    assert_eq!(reports[0]["clip_factor"], 1.0);
}
