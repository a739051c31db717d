//! The memory of a round is that of the round before.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::process::{Finished, fedlane, skip, start};

const MODEL_BYTES: u64 = 64 << 20;
/// A round writes at least 16384 pages of 4 KiB.
const FEW_FAULTS: u64 = 2000;

fn write_model(path: &Path) {
    let header = format!(
        r#"{{"w":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{MODEL_BYTES}]}}}}"#,
        MODEL_BYTES / 4
    );
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    // All zeros, and no space on the disk.
    file.set_len(8 + header.len() as u64 + MODEL_BYTES).unwrap();
}

/// Four rounds; gives the page faults of the server when the rounds from the second on begin.
fn faults_by_round(directory: &Path, program: impl Fn(&str) -> Command) -> Vec<u64> {
    let model = directory.join("model");
    write_model(&model);
    let mut command = program("serve");
    command.args(["--listen=127.0.0.1:0", "--json", "--clients=2"]);
    let mut server = start(command, ["--rounds=4"]);
    let address = server.address();
    let join = |name: &str| {
        let mut join = program("join");
        join.args([&address, "--json", "--name", name, "--model"]).arg(&model);
        join
    };
    // A client that is asked to train stands between two rounds. Memory is taken there too.
    let look = format!("cut -d ' ' -f 10 /proc/{}/stat", server.id());
    let (watching, other) = (start(join("a"), ["--train", &look]), start(join("b"), [""; 0]));
    let watching = watching.finish().done();
    other.finish().done();
    check_phases(&server.finish().done());
    let faults: Vec<u64> = watching.err.iter().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(faults.len(), 4, "{}", watching.said());
    faults[1..].to_vec()
}

fn check_phases(server: &Finished) {
    for name in ["upload", "broadcast"] {
        let phases = server.phases(name);
        assert_eq!(phases.len(), 4);
        for phase in &phases[1..] {
            assert!(phase["page_faults"].as_u64().unwrap() < FEW_FAULTS, "{phase}");
        }
    }
}

fn check_rounds(faults: &[u64]) {
    for round in faults.windows(2) {
        assert!(round[1] - round[0] < FEW_FAULTS, "{faults:?}");
    }
}

#[test]
fn later_rounds_touch_no_fresh_memory() {
    let directory = tempfile::tempdir().unwrap();
    check_rounds(&faults_by_round(directory.path(), fedlane));
}

/// Without the right to mount, huge pages cannot be had; then cold memory shows.
#[test]
fn later_rounds_touch_no_fresh_memory_without_huge_pages_either() {
    let directory = tempfile::tempdir().unwrap();
    let Some(nobody) = Nobody::or_skip(directory.path()) else { return };
    check_rounds(&faults_by_round(directory.path(), |command| nobody.fedlane(command)));
}

/// A user without rights.
pub struct Nobody {
    program: std::path::PathBuf,
    as_root: bool,
}

impl Nobody {
    /// Root becomes nobody; anybody else has no rights already. `directory` gets a copy of the
    /// program, because nobody may not be able to reach the original.
    pub fn or_skip(directory: &Path) -> Option<Nobody> {
        let as_root = rustix::process::geteuid().is_root();
        let program = directory.join("fedlane");
        fs::copy(env!("CARGO_BIN_EXE_fedlane"), &program).unwrap();
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        let nobody = Nobody { program, as_root };
        let tried = nobody.fedlane("--version").output();
        if tried.is_ok_and(|output| output.status.success()) {
            return Some(nobody);
        }
        skip("root cannot become nobody here");
        None
    }

    pub fn fedlane(&self, command: &str) -> Command {
        let mut fedlane = match self.as_root {
            true => {
                let mut setpriv = Command::new("setpriv");
                setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
                setpriv.arg(&self.program);
                setpriv
            }
            false => Command::new(&self.program),
        };
        fedlane.arg(command).env("FEDLANE_END_WITH_PARENT", "1");
        fedlane
    }
}
