//! Processes that no test can leave behind and for which no test waits for ever.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long a process may live. Only a fault takes that long, also in a debug build on a busy host.
const PATIENCE: Duration = Duration::from_secs(180);

/// `fedlane`, which also ends when this process is killed.
pub fn fedlane(command: &str) -> Command {
    let mut fedlane = Command::new(env!("CARGO_BIN_EXE_fedlane"));
    fedlane.arg(command).env("FEDLANE_END_WITH_PARENT", "1");
    fedlane
}

/// `fedlane serve` on a port that the kernel chooses.
pub fn serve(clients: usize) -> Command {
    let mut serve = fedlane("serve");
    serve.args(["--listen=127.0.0.1:0", "--json"]).arg(format!("--clients={clients}"));
    serve
}

/// `fedlane join` with a name and a model.
pub fn join(address: &str, name: &str, model: &Path) -> Command {
    let mut join = fedlane("join");
    join.args([address, "--json", "--name", name, "--model"]).arg(model);
    join
}

/// Adds arguments and starts it.
pub fn start<A: AsRef<OsStr>>(mut command: Command, args: impl IntoIterator<Item = A>) -> Process {
    Process::start(command.args(args))
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Finished {
    Process::start(command).finish()
}

/// Says why a test cannot test anything here, past the capture of its output.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_string();
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

enum Line {
    Out(String),
    Err(String),
}

/// A running process. When dropped, it and its children are ended.
pub struct Process {
    what: String,
    child: Child,
    lines: Receiver<Line>,
    out: Vec<String>,
    err: Vec<String>,
    until: Instant,
}

/// A process that has ended.
pub struct Finished {
    pub what: String,
    pub status: ExitStatus,
    pub out: Vec<String>,
    pub err: Vec<String>,
}

impl Process {
    pub fn start(command: &mut Command) -> Process {
        let what = format!("{command:?}");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A group of its own, so that what it starts can be ended with it.
        let mut child = command.process_group(0).spawn().unwrap_or_else(|e| panic!("{what}: {e}"));
        let (sender, lines) = mpsc::channel();
        read_lines(child.stdout.take().unwrap(), sender.clone(), Line::Out);
        read_lines(child.stderr.take().unwrap(), sender, Line::Err);
        let until = Instant::now() + PATIENCE;
        Process { what, child, lines, out: Vec::new(), err: Vec::new(), until }
    }

    /// Waits for the next line; false at the end of the output.
    fn hear(&mut self) -> bool {
        match self.lines.recv_timeout(self.until.saturating_duration_since(Instant::now())) {
            Ok(Line::Out(line)) => self.out.push(line),
            Ok(Line::Err(line)) => self.err.push(line),
            Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => panic!("{} did not end:\n{}", self.what, self.said()),
        }
        true
    }

    fn said(&self) -> String {
        format!("{}\n{}", self.out.join("\n"), self.err.join("\n"))
    }

    /// Waits until it prints an event of that name.
    pub fn await_event(&mut self, name: &str) -> Value {
        loop {
            let found = self.out.iter().map(|line| event(line)).find(|e| e["event"] == name);
            if let Some(event) = found {
                return event;
            }
            assert!(self.hear(), "{} never said {name:?}:\n{}", self.what, self.said());
        }
    }

    /// Waits until its standard error has that text.
    pub fn await_note(&mut self, text: &str) {
        while !self.err.iter().any(|line| line.contains(text)) {
            assert!(self.hear(), "{} never said {text:?}:\n{}", self.what, self.said());
        }
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Where a server listens.
    pub fn address(&mut self) -> String {
        self.await_event("listening")["address"].as_str().unwrap().to_string()
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Finished {
        while self.hear() {}
        let status = self.child.wait().unwrap();
        let (out, err) = (std::mem::take(&mut self.out), std::mem::take(&mut self.err));
        Finished { what: self.what.clone(), status, out, err }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Once waited for, its number may belong to another process.
        if let Ok(None) = self.child.try_wait() {
            let group = rustix::process::Pid::from_child(&self.child);
            // It may end by itself just now.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

impl Finished {
    /// Checks that it succeeded.
    pub fn done(self) -> Finished {
        assert_eq!(self.status.code(), Some(0), "{}", self.said());
        self
    }

    /// Checks that it ended with status 1 and one line of error, and gives that line.
    pub fn failed(self) -> String {
        assert_eq!(self.status.code(), Some(1), "{}", self.said());
        let errors: Vec<_> = self.err.iter().filter(|line| line.starts_with("fedlane: ")).collect();
        assert_eq!(errors.len(), 1, "{}", self.said());
        assert_eq!(self.err.last(), Some(errors[0]), "{}", self.said());
        errors[0].clone()
    }

    pub fn said(&self) -> String {
        format!(
            "{} ended with {}\n{}\n{}",
            self.what,
            self.status,
            self.out.join("\n"),
            self.err.join("\n")
        )
    }

    /// What it printed, as JSON.
    pub fn events(&self) -> Vec<Value> {
        self.out.iter().map(|line| event(line)).collect()
    }

    /// Its phases of that name.
    pub fn phases(&self, name: &str) -> Vec<Value> {
        let is_phase = |e: &Value| e["event"] == "phase" && e["phase"] == name;
        self.events().into_iter().filter(is_phase).collect()
    }
}

fn event(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn read_lines(
    pipe: impl Read + Send + 'static,
    sender: Sender<Line>,
    wrap: impl Fn(String) -> Line + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            // A path in a message need not be UTF-8.
            if sender.send(wrap(String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    });
}
