//! The real `fedlane doctor`, as text and as JSON, also where the host gives little.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn doctor(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_fedlane")).arg("doctor").args(arguments).output();
    succeeded(output.unwrap())
}

fn succeeded(output: Output) -> Output {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(output: Output) -> String {
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the doctor under a limit that `ulimit` sets.
fn limited(limit: &str, arguments: &str) -> String {
    let doctor = env!("CARGO_BIN_EXE_fedlane");
    let script = format!("ulimit {limit} && exec \"$0\" doctor {arguments}");
    text(succeeded(Command::new("sh").args(["-c", &script, doctor]).output().unwrap()))
}

#[test]
fn the_report_has_its_headings_and_fits_80_columns() {
    let report = text(doctor(&[]));
    let headings =
        ["Host", "Memory", "Sockets", "Ways to send", "Ways to receive", "Other kernel features"];
    for heading in headings {
        assert!(report.lines().any(|line| line == heading), "{heading} in\n{report}");
    }
    for line in report.lines() {
        // A word that is longer than a line cannot be broken.
        assert!(line.len() <= 80 || line.split_whitespace().count() == 1, "{line}");
    }
    assert!(report.lines().rev().take(3).any(|line| line.starts_with("By default fedlane sends")));
}

#[test]
fn a_pipe_gets_no_colours() {
    assert!(!text(doctor(&[])).contains('\x1b'));
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_fedlane"))
        .arg("doctor")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(doctor.stdout.take());
    succeeded(doctor.wait_with_output().unwrap());
}

#[test]
fn json_is_one_object_on_one_line_with_units_in_its_keys() {
    let line = text(doctor(&["--json"]));
    assert_eq!(line.lines().count(), 1);
    let report: Value = serde_json::from_str(&line).unwrap();
    for pointer in [
        "/kernel",
        "/architecture",
        "/cpu/cores_online",
        "/cpu/cores_usable",
        "/memory/memory_total_bytes",
        "/memory/memory_available_bytes",
        "/memory/dev_shm",
        "/memory/region/huge_mapped_bytes",
        "/memory/locked_memory_limit_bytes/soft",
        "/sockets/open_files_limit/soft",
        "/sockets/pipe_max_bytes",
        "/sockets/tcp_receive_buffer_bytes",
        "/sockets/cubic/state",
        "/features/0/state",
        "/paths/0/works",
        "/paths/0/moved_bytes",
        "/defaults/send_path",
        "/defaults/receive_path",
    ] {
        let value = report.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {line}"));
        assert!(!value.is_null() && value != "", "{pointer} in {line}");
    }
}

#[test]
fn sixteen_open_files_are_enough() {
    let report: Value = serde_json::from_str(&limited("-n 16", "--json")).unwrap();
    assert_eq!(report["sockets"]["open_files_limit"]["soft"], 16);
    for path in report["paths"].as_array().unwrap() {
        assert_eq!(path["works"], true, "{path}");
    }
}

#[test]
fn too_few_open_files_are_named_as_the_reason() {
    let report = limited("-n 5", "");
    assert!(report.contains("Too many open files"), "{report}");
    assert!(report.contains("helps: raise the limit of open files"), "{report}");
}

#[test]
fn help_explains_the_marks() {
    let help = text(doctor(&["--help"]));
    for word in ["\"off\"", "helps:", "--json", "loopback"] {
        assert!(help.contains(word), "{word} in\n{help}");
    }
}
