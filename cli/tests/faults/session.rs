//! An honest aggregator and an honest client, waiting for trouble.

use std::path::Path;
use std::time::Duration;

use super::hostile::{MODEL_BYTES, Process};
use tempfile::TempDir;

/// Milliseconds of silence after which a peer is given up, in most tests.
pub const DEADLINE_MS: u64 = 600;

/// A few deadlines, and what a busy host adds.
pub const SOON: Duration = Duration::from_secs(8);

/// An aggregator and an honest client, with outputs in a directory of their own.
pub struct Session {
    pub directory: TempDir,
    pub serve: Process,
    pub honest: Process,
    pub address: String,
}

impl Session {
    /// Waits for one client more.
    pub fn start() -> Session {
        Session::start_with(&[], MODEL_BYTES, DEADLINE_MS)
    }

    pub fn start_with(args: &[&str], model_bytes: u64, deadline_ms: u64) -> Session {
        let directory = tempfile::tempdir().unwrap();
        let output = |name: &str| directory.path().join(name).to_str().unwrap().to_string();
        let (deadline, mean) = (deadline_ms.to_string(), output("mean"));
        let mut serve = vec!["--output", &mean, "--deadline-ms", &deadline];
        for usual in ["--clients=2", "--streams=2", "--chunk-bytes=64KiB"] {
            let name = usual.split('=').next().unwrap();
            serve.extend((!args.iter().any(|arg| arg.starts_with(name))).then_some(usual));
        }
        serve.extend(args);
        let (serve, address) = Process::serve(&serve);
        let (size, mine) = (model_bytes.to_string(), output("honest"));
        let join = ["--generate", &size, "--output", &mine, "--deadline-ms", &deadline];
        let honest = Process::join(&address, "good", &join);
        serve.await_word("\"good\"");
        Session { directory, serve, honest, address }
    }

    /// Both processes fail and say that the client "bad" is to blame, and how.
    pub fn fails_because_of_bad(self, words: &[&str]) {
        let words = [&["client \"bad\" (127.0.0.1:"], words].concat();
        self.serve.fails(SOON, &words);
        self.honest.fails(SOON, &[&[self.address.as_str()], &words[..]].concat());
        assert_empty(self.directory.path());
    }

    /// The second client comes and the round runs to its end.
    pub fn completes(self) {
        let other = Process::join(&self.address, "other", &["--generate", "1MiB"]);
        let said = self.serve.succeeds(SOON);
        assert!(!said.contains("panicked"), "{said}");
        self.honest.succeeds(SOON);
        other.succeeds(SOON);
    }
}

pub fn assert_empty(directory: &Path) {
    let left: Vec<_> = directory.read_dir().unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// The bytes of a safetensors file with this header and so much data.
pub fn model_file(header: &str, data_bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), &vec![0; data_bytes]].concat()
}

pub fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

/// A model of two tensors, the second of which is `second`.
pub fn two(second: &str) -> Vec<u8> {
    let header = format!("{{{},{second}}}", tensor("first", "F32", "[4]", 0, 16));
    model_file(&header, 32)
}
