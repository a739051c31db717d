//! One aggregator and its clients as processes of their own, for the demo and the benchmarks.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::{Context, bail};
use serde_json::Value;

/// A running process of the group.
struct Member {
    name: String,
    child: Child,
}

/// Processes that end together.
pub struct Group {
    members: Vec<Member>,
    sender: Sender<Heard>,
    heard: Receiver<Heard>,
}

enum Heard {
    Event { member: usize, event: Value },
    Ended { member: usize, last_words: String },
}

/// What a process of the group reported.
#[derive(Clone, Debug)]
pub struct Report {
    /// The process.
    pub name: String,
    /// Its events, in order.
    pub events: Vec<Value>,
}

impl Report {
    /// The phases of that name, in order of their rounds.
    pub fn phases<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["event"] == "phase" && event["phase"] == name)
    }

    /// The first event of that name.
    pub fn event(&self, name: &str) -> Option<&Value> {
        self.events.iter().find(|event| event["event"] == name)
    }

    /// Most memory it ever held, in bytes.
    pub fn peak_rss_bytes(&self) -> u64 {
        self.event("done").and_then(|done| done["peak_rss_bytes"].as_u64()).unwrap_or(0)
    }
}

impl Group {
    /// A group without members.
    pub fn new() -> Group {
        let (sender, heard) = mpsc::channel();
        Group { members: Vec::new(), sender, heard }
    }

    /// Starts this program again, with `args`, as a member that prints JSON lines.
    pub fn start(&mut self, name: &str, args: &[impl AsRef<OsStr>]) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .args(args)
            .arg("--json")
            .env("FEDLANE_END_WITH_PARENT", "1")
            .env("FEDLANE_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{name} could not be started"))?;
        let member = self.members.len();
        let (out, mut err) = (child.stdout.take(), child.stderr.take());
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            let last_words = std::thread::spawn(move || {
                let mut text = String::new();
                if let Some(err) = &mut err {
                    // What is not text is no error message.
                    let _ = err.read_to_string(&mut text);
                }
                text
            });
            for line in out.into_iter().flat_map(|out| BufReader::new(out).lines()).flatten() {
                if let Ok(event) = serde_json::from_str(&line) {
                    let _ = sender.send(Heard::Event { member, event });
                }
            }
            let last_words = last_words.join().unwrap_or_default();
            let _ = sender.send(Heard::Ended { member, last_words });
        });
        self.members.push(Member { name: name.to_string(), child });
        Ok(())
    }

    /// Waits for an event of the last member started.
    pub fn await_event(&mut self, name: &str) -> anyhow::Result<Value> {
        loop {
            match self.heard.recv()? {
                Heard::Event { event, .. } if event["event"] == name => return Ok(event),
                Heard::Event { .. } => {}
                Heard::Ended { member, last_words } => self.check_end(member, &last_words)?,
            }
        }
    }

    /// Waits until all members have ended well, and gives what each reported.
    pub fn finish(mut self, on_event: &mut dyn FnMut(&str, &Value)) -> anyhow::Result<Vec<Report>> {
        let mut reports: Vec<Report> = self
            .members
            .iter()
            .map(|member| Report { name: member.name.clone(), events: Vec::new() })
            .collect();
        let mut running = self.members.len();
        while running > 0 {
            match self.heard.recv()? {
                Heard::Event { member, event } => {
                    on_event(&self.members[member].name, &event);
                    reports[member].events.push(event);
                }
                Heard::Ended { member, last_words } => {
                    self.check_end(member, &last_words)?;
                    running -= 1;
                }
            }
        }
        Ok(reports)
    }

    fn check_end(&mut self, member: usize, last_words: &str) -> anyhow::Result<()> {
        let member = &mut self.members[member];
        let status = member.child.wait()?;
        if !status.success() {
            let words = last_words.trim().trim_start_matches("fedlane: ");
            let words = words.lines().last().unwrap_or("it said nothing");
            bail!("{} failed ({status}): {words}", member.name);
        }
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for member in &mut self.members {
            // A member that has ended already cannot be killed and need not be.
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}

/// A member does not outlive the process that started it.
pub fn end_with_parent() {
    if std::env::var_os("FEDLANE_END_WITH_PARENT").is_some() {
        let signal = rustix::process::Signal::KILL;
        // Where this is refused, the parent still ends its members itself.
        let _ = rustix::process::set_parent_process_death_signal(Some(signal));
    }
}
