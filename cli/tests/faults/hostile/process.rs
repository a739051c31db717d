//! The real command as a child that never outlives its test.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long a test waits for a line that must come, on a host that does other things too.
const PATIENCE: Duration = Duration::from_secs(20);

/// The real command, not started yet.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fedlane"));
    command.args(args);
    command
}

/// A running process. Dropped, it is killed.
pub struct Process {
    child: Child,
    out: Receiver<String>,
    said: Said,
    listener: Option<JoinHandle<()>>,
}

/// The lines on the standard error so far.
type Said = Arc<Mutex<Vec<String>>>;

impl Process {
    /// Starts the real command with these arguments.
    pub fn start(args: &[&str]) -> Process {
        Process::spawn(&mut command(args))
    }

    /// Starts a prepared command.
    pub fn spawn(command: &mut Command) -> Process {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, out) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The test may have ended.
                let _ = sender.send(line);
            }
        });
        let said = Said::default();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let heard = said.clone();
        let listener = std::thread::spawn(move || {
            for line in lines {
                heard.lock().unwrap().push(line.expect("errors are text"));
            }
        });
        Process { child, out, said, listener: Some(listener) }
    }

    /// Starts `fedlane serve` on a port of the kernel's choice; gives its address too.
    pub fn serve(args: &[&str]) -> (Process, String) {
        let process = Process::start(&[&["serve", "--listen", "127.0.0.1:0"], args].concat());
        let line = process.await_line("listening on ");
        let address = line.split([' ', ',']).nth(2).unwrap().to_string();
        (process, address)
    }

    /// Starts `fedlane join`.
    pub fn join(address: &str, name: &str, args: &[&str]) -> Process {
        Process::start(&[&["join", address, "--name", name], args].concat())
    }

    /// Waits for a line on the standard output that contains `text`.
    pub fn await_line(&self, text: &str) -> String {
        self.try_line(text).unwrap_or_else(|| panic!("no line with {text:?}: {:?}", self.said))
    }

    /// As [`Process::await_line`], where the process may end before it.
    pub fn try_line(&self, text: &str) -> Option<String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let line = self.out.recv_timeout(until.saturating_duration_since(Instant::now()));
            match line {
                Ok(line) if line.contains(text) => return Some(line),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }

    /// Whether a line on the standard error contains `text`.
    pub fn has_said(&self, text: &str) -> bool {
        self.said.lock().unwrap().iter().any(|line| line.contains(text))
    }

    /// Waits for a line on the standard error that contains `text`.
    pub fn await_word(&self, text: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.has_said(text) {
            assert!(Instant::now() < until, "{text:?} was not said: {:?}", self.said);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// Waits until it ends, at most `limit`, and gives what it said on the standard error.
    pub fn end(mut self, limit: Duration) -> (ExitStatus, String) {
        let until = Instant::now() + limit;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.all_said());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        panic!("still running after {limit:?}; it said:\n{}", self.all_said());
    }

    fn all_said(&mut self) -> String {
        self.listener.take().unwrap().join().unwrap();
        self.said.lock().unwrap().join("\n")
    }

    /// Waits until it ends well.
    pub fn succeeds(self, limit: Duration) -> String {
        let (status, said) = self.end(limit);
        assert!(status.success(), "{status}:\n{said}");
        said
    }

    /// Waits until it fails as it should: status 1, no panic, and a last line that is one clean
    /// line and contains all of `words`. Gives that line.
    pub fn fails(self, limit: Duration, words: &[&str]) -> String {
        let (status, said) = self.end(limit);
        assert_eq!(status.signal(), None, "{status}:\n{said}");
        assert_eq!(status.code(), Some(1), "{status}:\n{said}");
        assert!(!said.contains("panicked"), "{said}");
        let last = said.lines().last().unwrap_or_default().to_string();
        assert!(last.starts_with("fedlane: "), "the last line is no error:\n{said}");
        assert!(last.chars().count() < 1500, "an endless line:\n{last}");
        for word in words {
            assert!(last.contains(word), "no {word:?} in: {last}");
        }
        let dirt = said.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(dirt, None, "{said:?}");
        last
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already cannot be killed and need not be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
