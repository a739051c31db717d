//! A model that people use: all-MiniLM-L6-v2.

use std::path::PathBuf;

use crate::process::{fedlane, run, skip};
use crate::python::Python;
use crate::rounds::perturbed;
use crate::session::average;

const BYTES: u64 = 90_868_376;

/// The file that FEDLANE_MINILM names; without one the test is reported as skipped.
fn minilm_or_skip() -> Option<PathBuf> {
    let Some(path) = std::env::var_os("FEDLANE_MINILM").map(PathBuf::from) else {
        skip("FEDLANE_MINILM names no model.safetensors of all-MiniLM-L6-v2");
        return None;
    };
    assert_eq!(std::fs::metadata(&path).unwrap().len(), BYTES, "{}", path.display());
    Some(path)
}

#[test]
fn the_demo_averages_it() {
    let Some(model) = minilm_or_skip() else { return };
    let demo = run(fedlane("demo").arg("--model").arg(model).args(["--json", "--rounds=2"])).done();
    let events = demo.events();
    // 11408 bytes of header, and the 8 of its length.
    assert_eq!(events[0]["bytes"], BYTES - 11_408 - 8);
    assert_eq!(events[0]["tensors"], 104);
    assert!(events.iter().any(|event| event["verified"] == true), "{}", demo.said());
}

#[test]
fn three_variants_of_it_have_the_mean_that_numpy_computes() {
    let (Some(model), Some(python)) = (minilm_or_skip(), Python::or_skip()) else { return };
    let directory = tempfile::tempdir().unwrap();
    let members = perturbed(&python, directory.path(), &model, &["120", "4000", "33"]);
    let files: Vec<_> = members.iter().map(|m| (m.model.clone(), m.examples.as_str())).collect();
    let initial = model.to_str().unwrap();
    let args = ["--order=client", "--rounds=2", "--initial", initial];
    let ended = average(directory.path(), &members, &args, &[]);
    python.check_mean("bits", &ended.model, &files);
}
