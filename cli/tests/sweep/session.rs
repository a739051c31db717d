//! One aggregator and three clients, one of which has the network that fails.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fedlane_testing::{Plan, Proxy, Traffic};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::model::{CHUNK_BYTES, EVERYONE, EXAMPLES, Layout, Members, Models, NAMES};
use crate::process::{Ended, Process};

/// Milliseconds without progress after which a peer is given up.
pub const DEADLINE_MS: u64 = 800;

pub const DEADLINE: Duration = Duration::from_millis(DEADLINE_MS);

/// A session with a fault has ended by then: some deadlines one after the other, what an honest
/// session takes, and what a busy host adds.
pub const SOON: Duration = Duration::from_secs(15);

/// The client behind the proxy. Neither the first nor the last in the order of names.
pub const VICTIM: usize = 1;

/// Who dials the proxy; the others dial the aggregator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    Victim,
    All,
}

/// Processes in a session.
pub struct Session {
    pub directory: TempDir,
    pub serve: Process,
    pub clients: Vec<Process>,
    pub proxy: Proxy,
    /// Whether a mean without the victim is right too.
    pub may_lack_victim: bool,
    serve_address: SocketAddr,
    models: &'static Models,
}

/// How a session came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Everyone succeeded and has the mean.
    Mean,
    /// Some failed; whoever succeeded has the mean.
    Partly,
    /// Everyone failed.
    Error,
}

impl Session {
    pub fn start(layout: Layout, plan: Plan, behind: Behind) -> Session {
        Session::start_with(layout, plan, behind, &[])
    }

    /// The aggregator gets these arguments too.
    pub fn start_with(layout: Layout, plan: Plan, behind: Behind, args: &[String]) -> Session {
        let directory = tempfile::tempdir().unwrap();
        let models = Models::of(layout);
        let mut serve = start_serve(directory.path(), args);
        let address = serve.address();
        let proxy = Proxy::start(address, plan);
        let clients = (0..NAMES.len()).map(|client| {
            let is_behind = behind == Behind::All || client == VICTIM;
            let dialled = if is_behind { proxy.address() } else { address };
            start_join(NAMES[client], directory.path(), models, dialled)
        });
        let clients = clients.collect();
        let (may_lack_victim, serve_address) = (false, address);
        Session { directory, serve, clients, proxy, may_lack_victim, serve_address, models }
    }

    pub fn victim(&self) -> &Process {
        &self.clients[VICTIM]
    }

    /// The victim's process is killed and begins again, with the same model and name.
    pub fn restart_victim(&mut self) {
        let address = self.proxy.address();
        self.clients[VICTIM].signal(Signal::KILL);
        self.clients[VICTIM] =
            start_join(NAMES[VICTIM], self.directory.path(), self.models, address);
    }

    /// The aggregator is killed and begins again, with the same arguments and another port. In between
    /// something may happen to its files.
    pub fn restart_serve(&mut self, args: &[String], between: impl FnOnce()) {
        self.serve.signal(Signal::KILL);
        let until = Instant::now() + SOON;
        while !self.serve.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        between();
        self.serve = start_serve(self.directory.path(), args);
        let address = self.serve.address();
        self.proxy.set_target(address);
        self.serve_address = address;
    }

    fn output(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.mean"))
    }

    /// All processes, but for the one with that name.
    pub fn all_but(&mut self, name: &str) -> impl Iterator<Item = &mut Process> {
        let all = std::iter::once(&mut self.serve).chain(&mut self.clients);
        all.filter(move |process| process.name != name)
    }

    /// The one with that name.
    pub fn process(&mut self, name: &str) -> &mut Process {
        let mut all = std::iter::once(&mut self.serve).chain(&mut self.clients);
        all.find(|process| process.name == name).expect("a process of the session")
    }

    /// Waits until all have ended, and checks what each has left. An error is a promise that was
    /// broken, not a session that has failed.
    pub fn conclude(&mut self) -> Result<Outcome, String> {
        let ended = self.end_all_but("")?;
        self.check(&ended)
    }

    /// Waits until all but one have ended. A victim that never joined is replaced: an aggregator waits
    /// for its clients as long as it takes, and what strangers do must not harm the session.
    pub fn end_all_but(&mut self, name: &str) -> Result<Vec<Ended>, String> {
        let began = Instant::now();
        loop {
            let running = self.all_but(name).find_map(Process::name_if_running);
            let Some(running) = running else { break };
            if began.elapsed() > SOON {
                return Err(format!("{running} still runs\n{}", self.story()));
            }
            if self.clients.len() == NAMES.len() && self.is_victim_lost(name, began) {
                let replaced = self.serve_address;
                self.clients.push(start_join("d", self.directory.path(), self.models, replaced));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(self.all_but(name).map(Process::end).collect())
    }

    /// Waits until this one has ended.
    pub fn await_end(&mut self, name: &str) -> Result<(), String> {
        let until = Instant::now() + SOON;
        while !self.process(name).has_ended() {
            if Instant::now() > until {
                return Err(format!("{name} still runs\n{}", self.story()));
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(())
    }

    /// Whether the aggregator has never heard of the victim, and will not any more.
    fn is_victim_lost(&mut self, not_awaited: &str, began: Instant) -> bool {
        let victim = &mut self.clients[VICTIM];
        let is_over = match victim.name == not_awaited {
            true => began.elapsed() > 2 * DEADLINE,
            false => victim.has_ended(),
        };
        let is_known = self.serve.said().contains(&format!("client \"{}\"", NAMES[VICTIM]));
        is_over && !is_known && !self.serve.has_ended()
    }

    /// Checks how these ended, and that nothing but the mean is left.
    pub fn check(&self, ended: &[Ended]) -> Result<Outcome, String> {
        for one in ended {
            one.check().map_err(|wrong| format!("{wrong}\n{}", self.story()))?;
            let output = self.output(&one.name);
            if one.status.success() && !output.exists() {
                return Err(format!("{} succeeded without a mean\n{}", one.name, self.story()));
            }
        }
        self.check_files().map_err(|wrong| format!("{wrong}\n{}", self.story()))?;
        let succeeded = ended.iter().filter(|one| one.status.success()).count();
        Ok(match succeeded {
            0 => Outcome::Error,
            some if some == ended.len() => Outcome::Mean,
            _ => Outcome::Partly,
        })
    }

    /// In the directory are logs and whole means, and nothing else.
    fn check_files(&self) -> Result<(), String> {
        for entry in self.directory.path().read_dir().unwrap() {
            let path = entry.unwrap().path();
            let extension = path.extension().unwrap_or_default();
            let members = (extension == "mean").then(|| self.models.members(&path));
            // A mean of some would be wrong too where nobody said that it may be.
            let is_right = |members: Option<Members>| match members {
                Some(EVERYONE) => true,
                members => self.may_lack_victim && members == Some(EVERYONE & !(1 << VICTIM)),
            };
            if members.is_some_and(|members| !is_right(members)) {
                return Err(format!("{} is the mean of {members:?}", path.display()));
            }
            if extension != "mean" && extension != "log" {
                return Err(format!("{} was left behind", path.display()));
            }
        }
        let ours = |text: &str| text.contains(self.directory.path().to_str().unwrap());
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        if mounts.lines().any(ours) {
            return Err(format!("still mounted:\n{mounts}"));
        }
        let shared = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let left = shared
            .map(|entry| entry.file_name())
            .find(|name| name.to_string_lossy().contains("fedlane"));
        left.map_or(Ok(()), |name| Err(format!("left in /dev/shm: {name:?}")))
    }

    /// Whose mean the process of that name has.
    pub fn members_of(&self, name: &str) -> Option<Members> {
        self.models.members(&self.output(name))
    }

    /// What everyone said.
    pub fn story(&self) -> String {
        let all = std::iter::once(&self.serve).chain(&self.clients);
        let said = all.map(|process| format!("--- {}\n{}", process.name, process.said()));
        format!("{}--- traffic {:?}", said.collect::<String>(), self.proxy.traffic())
    }
}

fn start_serve(directory: &Path, more: &[String]) -> Process {
    let args = [
        "serve".into(),
        "--listen=127.0.0.1:0".into(),
        format!("--clients={}", NAMES.len()),
        "--streams=2".into(),
        format!("--chunk-bytes={CHUNK_BYTES}"),
        format!("--deadline-ms={DEADLINE_MS}"),
        format!("--output={}", directory.join("serve.mean").display()),
    ];
    let is_order = |arg: &String| arg.starts_with("--order");
    let usual = if more.iter().any(is_order) { vec![] } else { vec!["--order=client".into()] };
    Process::start("serve", directory, &[&args[..], &usual, more].concat())
}

/// Who has another name brings what the victim would have.
fn start_join(name: &str, directory: &Path, models: &Models, address: SocketAddr) -> Process {
    let client = NAMES.iter().position(|known| *known == name).unwrap_or(VICTIM);
    let args = [
        "join".into(),
        address.to_string(),
        format!("--name={name}"),
        format!("--examples={}", EXAMPLES[client]),
        format!("--model={}", models.path(client).display()),
        format!("--deadline-ms={DEADLINE_MS}"),
        format!("--output={}", directory.join(format!("{name}.mean")).display()),
    ];
    Process::start(name, directory, &args)
}

/// What an honest session moves on the victim's control channel and on its two data channels.
pub fn usual_traffic() -> &'static [Traffic] {
    static USUAL: OnceLock<Vec<Traffic>> = OnceLock::new();
    USUAL.get_or_init(|| {
        let mut session = Session::start(Layout::Floats, Plan::honest(), Behind::Victim);
        assert_eq!(session.conclude().unwrap(), Outcome::Mean);
        session.proxy.traffic()
    })
}
