//! Real processes, whose words go to files, and which never outlive their test.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A running process. Dropped, it is killed.
pub struct Process {
    pub name: String,
    child: Child,
    log: PathBuf,
}

/// How a process ended.
pub struct Ended {
    pub name: String,
    pub status: ExitStatus,
    pub said: String,
}

impl Process {
    /// Starts `fedlane` with these arguments; its words and its temporary files go to `directory`.
    pub fn start(name: &str, directory: &Path, args: &[String]) -> Process {
        let log = directory.join(format!("{name}.log"));
        let out = File::create(&log).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_fedlane"))
            .args(args)
            .env("FEDLANE_END_WITH_PARENT", "1")
            .env("TMPDIR", directory)
            .stdin(Stdio::null())
            .stdout(out.try_clone().unwrap())
            .stderr(out)
            .spawn()
            .unwrap();
        Process { name: name.into(), child, log }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned()
    }

    /// Waits for a word that follows `text`.
    fn await_word_after(&mut self, text: &str, limit: Duration) -> String {
        let until = Instant::now() + limit;
        loop {
            let said = self.said();
            if let Some((_, rest)) = said.split_once(text)
                && let Some((word, _)) = rest.split_once([' ', ',', '\n'])
            {
                return word.to_string();
            }
            assert!(self.child.try_wait().unwrap().is_none(), "{} ended: {said}", self.name);
            assert!(Instant::now() < until, "{} never said {text:?}: {said}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Where an aggregator listens.
    pub fn address(&mut self) -> SocketAddr {
        let patience = Duration::from_secs(20);
        self.await_word_after("listening on ", patience).parse().expect("an address")
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(self.pid(), signal);
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Its name, if it has not ended.
    pub fn name_if_running(&mut self) -> Option<String> {
        (!self.has_ended()).then(|| self.name.clone())
    }

    /// How it ended.
    pub fn end(&mut self) -> Ended {
        let status = self.child.try_wait().unwrap().expect("a process that has ended");
        Ended { name: self.name.clone(), status, said: self.said() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already cannot be killed and need not be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// To a child that was not waited for yet, so its number is its own.
pub fn send_signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

impl Ended {
    /// It did what it should, or says in one line why not.
    pub fn check(&self) -> Result<(), String> {
        let last = self.said.lines().last().unwrap_or_default();
        let is_clean = match self.status.code() {
            Some(0) => true,
            Some(1) => last.starts_with("fedlane: ") && last.chars().count() < 1500,
            _ => false,
        };
        match is_clean && !self.said.contains("panicked") {
            true => Ok(()),
            false => Err(format!("{}: {}\n{}", self.name, self.status, self.said)),
        }
    }
}
