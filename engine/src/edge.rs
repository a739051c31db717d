//! An edge of a tree: an aggregator for its clients, which is a client of the aggregator above it.
//!
//! It sends up one sum and says whose updates are in it; the mean comes down the same way. Its clients
//! may be edges too. [`crate::aggregator`] has what both levels do.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::aggregator::{Aggregator, AggregatorConfig, Canceller, Session, default_streams};
use crate::client::{self, Client, ClientConfig, EdgeTask, Reported, Target, Task, Uploaded};
use crate::error::{AggregatorError, ClientError, ReducerError};
use crate::limits;
use crate::manifest::Manifest;
use crate::reducer::{AccumulatorLayout, WeightScale};
use crate::region::Region;
use crate::source::region::RegionSource;
use crate::topology::tree::{Leaf, SumsReport};

/// Why updates are not in a mean that their edge has no part in.
const PASSED_OVER: &str = "the aggregator above has gone on without this edge";

/// How an edge works.
#[derive(Clone, Debug)]
pub struct EdgeConfig {
    /// The client of the aggregator above. Its examples are those of all clients below, whatever is
    /// said here.
    pub above: ClientConfig,
    /// The aggregator of the clients below. Its rounds are those of the aggregator above, times the local
    /// ones, whatever is said here.
    pub below: AggregatorConfig,
    /// Rounds that are run below for each one above: before the last of them, clients get the mean of
    /// this edge alone. At least 1.
    pub local_rounds: u32,
}

/// An edge that listens and has joined nobody yet.
pub struct Edge {
    aggregator: Aggregator,
    config: EdgeConfig,
    client: client::Canceller,
}

/// Ends an edge from another thread, whatever it waits for.
#[derive(Clone)]
pub struct EdgeCanceller {
    above: client::Canceller,
    below: Canceller,
}

impl EdgeCanceller {
    /// Makes the call that runs, or else the next one, fail. The aggregator above hears `reason`, and the
    /// clients that the edge was stopped.
    pub fn cancel(&self, reason: &str) {
        self.above.cancel(reason);
        self.below.cancel();
    }
}

/// What an edge has done.
#[derive(Clone, Debug, PartialEq)]
pub enum EdgeStep {
    /// A round below is over whose mean stays below.
    Local {
        /// The round below, counted from 1.
        round: u32,
        /// The clients below.
        leaves: Vec<Leaf>,
    },
    /// A round of the aggregator above is over.
    Round {
        /// That round, counted from 1.
        round: u32,
        /// Whether the sums of this edge are in its mean.
        counted: bool,
        /// The clients below.
        leaves: Vec<Leaf>,
    },
    /// The model of that round is with all clients; 0 is the initial one.
    Model {
        /// The round.
        round: u32,
    },
    /// All rounds are done.
    Done,
}

/// An edge with its clients, in the session of the aggregator above.
pub struct RunningEdge {
    client: Client,
    session: Session,
    canceller: EdgeCanceller,
    local_rounds: u32,
    /// The sums as a model.
    manifest: Manifest,
    /// The newest round for which everything below has come, unless it is over.
    collected: Option<Round>,
    /// The round whose model went down last.
    passed_down: u32,
    /// The newest round of which was said whether this edge has a part in it.
    reported: u32,
    /// What was done besides, and is to be said next.
    said_next: Option<EdgeStep>,
}

/// A round of the aggregator above.
struct Round {
    round: u32,
    /// Local rounds that are done.
    local: u32,
    /// What is below, once it is known.
    report: Option<SumsReport>,
    sums: Option<Sums>,
}

struct Sums {
    region: Region,
    checks: Vec<u64>,
    fold: Option<(WeightScale, Option<[u8; 32]>)>,
}

/// How often an edge that waits for its clients looks whether it is still wanted above.
const LOOK_UP: Duration = Duration::from_millis(50);

impl Edge {
    /// Checks `config` and listens on `address`.
    ///
    /// # Errors
    /// As [`Aggregator::bind`]; and local rounds out of their bounds.
    pub fn bind(
        address: impl ToSocketAddrs + std::fmt::Display,
        mut config: EdgeConfig,
    ) -> Result<Edge, AggregatorError> {
        let (value, most) = (config.local_rounds.into(), limits::MAX_ROUNDS.into());
        if !(1..=most).contains(&value) {
            return Err(AggregatorError::Config { what: "local rounds", value, least: 1, most });
        }
        config.below.tree = true;
        let aggregator = Aggregator::bind(address, config.below.clone())?;
        Ok(Edge { aggregator, config, client: client::Canceller::default() })
    }

    /// Where clients can dial.
    pub fn address(&self) -> SocketAddr {
        self.aggregator.address()
    }

    /// Ends this edge, or what it becomes, from another thread.
    pub fn canceller(&self) -> EdgeCanceller {
        EdgeCanceller { above: self.client.clone(), below: self.aggregator.canceller() }
    }

    /// Waits until all clients have joined, and then joins the aggregator at `above`.
    ///
    /// # Errors
    /// As [`Aggregator::gather`] and [`Client::join`]. Everybody hears why.
    pub fn join(self, above: &str) -> Result<RunningEdge, AggregatorError> {
        let Edge { aggregator, config, client: canceller } = self;
        let ends_session = aggregator.canceller();
        let mut joined = None;
        let agree = |manifest: &Manifest, examples: f64, _: u32| {
            let config_above = ClientConfig { examples, ..config.above.clone() };
            let client = Client::join_as_edge(above, config_above, manifest, &canceller);
            let client = client.map_err(is_above)?;
            let rounds = client.rounds().saturating_mul(config.local_rounds);
            joined = Some(client);
            let (value, most) = (rounds.into(), limits::MAX_ROUNDS.into());
            match rounds <= limits::MAX_ROUNDS {
                true => Ok(rounds),
                false => Err(AggregatorError::Config { what: "rounds", value, least: 1, most }),
            }
        };
        let session = aggregator.gather_and(None, agree);
        let (session, client) = match (session, joined) {
            (Ok(session), Some(client)) => (session, client),
            (Ok(_), None) => return Err(std::io::Error::other("nobody above").into()),
            (Err(error), client) => {
                client.iter().for_each(|client| client.give_up(&error.to_string()));
                return Err(error);
            }
        };
        Ok(RunningEdge {
            manifest: AccumulatorLayout::sums_manifest(session.manifest())?,
            client,
            session,
            canceller: EdgeCanceller { above: canceller, below: ends_session },
            local_rounds: config.local_rounds,
            collected: None,
            passed_down: 0,
            reported: 0,
            said_next: None,
        })
    }
}

fn is_above(error: ClientError) -> AggregatorError {
    AggregatorError::Above { why: error.to_string() }
}

impl RunningEdge {
    /// The clients below, and what they do.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The client of the aggregator above.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Does what the aggregator above wants next, until there is something to say.
    ///
    /// # Errors
    /// Too few clients below, or an aggregator above that ends. Everybody on the other side hears why.
    pub fn step(&mut self) -> Result<EdgeStep, AggregatorError> {
        loop {
            let stepped = self.try_step();
            if let Err(error) = &stepped {
                let reason = error.to_string();
                self.session.give_up(&reason);
                if !matches!(error, AggregatorError::Above { .. }) {
                    self.client.give_up(&reason);
                }
            }
            if let Some(step) = stepped? {
                return Ok(step);
            }
        }
    }

    fn try_step(&mut self) -> Result<Option<EdgeStep>, AggregatorError> {
        if let Some(step) = self.said_next.take() {
            return Ok(Some(step));
        }
        if self.collected.as_ref().is_some_and(|round| round.report.is_none()) {
            return self.next_local_round();
        }
        match self.above(Client::next_edge_task)? {
            EdgeTask::Task(Task::Upload { round }) => self.upload(round),
            EdgeTask::Fold { round, scale, seed } => self.fold(round, (scale, seed)),
            EdgeTask::Task(Task::Download { round, digest }) => self.pass_down(round, digest),
            EdgeTask::Task(Task::Done) => {
                self.finish()?;
                Ok(Some(EdgeStep::Done))
            }
        }
    }

    /// Rounds below before the one whose sums go up.
    fn next_local_round(&mut self) -> Result<Option<EdgeStep>, AggregatorError> {
        let most = self.local_rounds - 1;
        let Some(open) = &mut self.collected else { return Ok(None) };
        if open.local == most {
            return self.collect();
        }
        open.local += 1;
        self.while_wanted(Session::round)?;
        self.while_wanted(Session::broadcast)?;
        let (round, leaves) = (self.session.rounds_done(), self.session.leaves());
        Ok(Some(EdgeStep::Local { round, leaves }))
    }

    /// Receives everything from below, and says above whose it is.
    fn collect(&mut self) -> Result<Option<EdgeStep>, AggregatorError> {
        self.while_wanted(Session::collect_tree)?;
        let report = self.session.sums_report();
        let sums = match report.in_order {
            true => None,
            false => {
                let (region, _) = self.session.take_sums()?;
                Some(self.seal(region, None)?)
            }
        };
        let Some(open) = &mut self.collected else { return Ok(None) };
        (open.sums, open.report) = (sums, Some(report));
        let round = open.round;
        self.upload(round)
    }

    fn upload(&mut self, round: u32) -> Result<Option<EdgeStep>, AggregatorError> {
        if self.collected.as_ref().is_none_or(|open| open.round != round) {
            // Of a round that it was left out of nothing is wanted any more.
            self.release(Some(PASSED_OVER));
            self.collected = Some(Round { round, local: 0, report: None, sums: None });
            return Ok(None);
        }
        let Some(Round { report: Some(report), sums, .. }) = &self.collected else {
            return Ok(None);
        };
        let Some(Sums { region, checks, fold }) = sums else {
            self.client.report(round, report);
            return Ok(None);
        };
        let chunk_bytes = self.client.chunks().chunk_bytes();
        let source = RegionSource::new(&self.manifest, region, chunk_bytes, checks.clone());
        let said = Reported { report, fold: *fold };
        let (client, session) = (&mut self.client, &mut self.session);
        let call = |client: &mut Client| client.upload_sums(round, &source, &said);
        match call_above(client, session, &self.canceller, call)? {
            Uploaded::Again => Ok(None),
            Uploaded::Applied { left_out } => {
                let leaves = self.session.leaves();
                self.release(left_out.as_deref());
                let counted = left_out.is_none();
                self.reported = round;
                Ok(Some(EdgeStep::Round { round, counted, leaves }))
            }
        }
    }

    /// It is this edge's turn to add its clients.
    fn fold(
        &mut self,
        round: u32,
        (scale, seed): (WeightScale, Option<[u8; 32]>),
    ) -> Result<Option<EdgeStep>, AggregatorError> {
        let Some(open) = self.collected.as_mut().filter(|open| open.round == round) else {
            return Ok(None);
        };
        if open.sums.as_ref().is_some_and(|sums| sums.fold == Some((scale, seed))) {
            // Said again after an interruption.
            seed.iter().for_each(|seed| self.client.confirm_sums(round, *seed));
            return Ok(None);
        }
        let last = open.sums.take();
        last.into_iter().for_each(|last| self.session.give_back(last.region));
        let begin = match seed {
            Some(digest) => {
                let mut region = self.session.take_region(self.manifest.data_bytes())?;
                self.above(|client| client.download_sums(round, digest, &mut region))?;
                Some(region)
            }
            None => None,
        };
        let sums = self.while_wanted(|session| session.add_in_order(scale, begin))?;
        let sums = self.seal(sums.ok_or(ReducerError::NoWeight)?, Some((scale, seed)))?;
        let report = self.session.sums_report();
        if let Some(open) = &mut self.collected {
            (open.sums, open.report) = (Some(sums), Some(report));
        }
        Ok(None)
    }

    /// Makes the checksums of sums, as they are cut up above.
    fn seal(
        &self,
        region: Region,
        fold: Option<(WeightScale, Option<[u8; 32]>)>,
    ) -> Result<Sums, AggregatorError> {
        let chunks = self.manifest.chunks(self.client.chunks().chunk_bytes())?;
        let source = RegionSource::seal(&self.manifest, &region, &chunks, default_streams());
        let checks = source.into_sums();
        Ok(Sums { region, checks, fold })
    }

    /// The model comes from above and goes to everyone below.
    fn pass_down(
        &mut self,
        round: u32,
        digest: [u8; 32],
    ) -> Result<Option<EdgeStep>, AggregatorError> {
        if round > self.client.rounds() {
            let why = format!("it sent the model of round {round} of {}", self.client.rounds());
            return Err(AggregatorError::Above { why });
        }
        let left_out = (self.reported < round).then(|| {
            let leaves = self.session.leaves();
            EdgeStep::Round { round, counted: false, leaves }
        });
        self.reported = self.reported.max(round);
        self.release(Some(PASSED_OVER));
        self.session.skip_to(round * self.local_rounds);
        let mut region = self.session.take_region(self.session.manifest().data_bytes())?;
        let target = Target::Region(&mut region);
        self.above(|client| client.download(round, digest, target))?;
        self.client.confirm(round);
        let sums = self.client.received_sums();
        let same_chunks = self.client.chunks().chunk_bytes() == self.session.chunk_bytes();
        let region = Arc::new(region);
        self.while_wanted(|session| match same_chunks {
            true => session.send(region, sums),
            false => {
                let manifest = session.manifest().clone();
                session.send_region(&manifest, region)
            }
        })?;
        self.passed_down = round;
        self.said_next = Some(EdgeStep::Model { round });
        Ok(left_out.or_else(|| self.said_next.take()))
    }

    /// The round is over, if one is open.
    fn release(&mut self, left_out: Option<&str>) {
        let Some(Round { report, sums, .. }) = self.collected.take() else { return };
        sums.into_iter().for_each(|sums| self.session.give_back(sums.region));
        if report.is_some() {
            self.session.release(left_out);
        }
    }

    fn finish(&mut self) -> Result<(), AggregatorError> {
        let (done, rounds) = (self.passed_down, self.client.rounds());
        if done != rounds {
            let why = format!("it ended after {done} of {rounds} rounds");
            return Err(AggregatorError::Above { why });
        }
        self.release(Some(PASSED_OVER));
        self.session.end()
    }

    fn above<T: Send>(
        &mut self,
        call: impl FnOnce(&mut Client) -> Result<T, ClientError> + Send,
    ) -> Result<T, AggregatorError> {
        call_above(&mut self.client, &mut self.session, &self.canceller, call)
    }

    /// Works with the clients below, as long as the aggregator above gives signs of life.
    fn while_wanted<T>(
        &mut self,
        work: impl FnOnce(&mut Session) -> Result<T, AggregatorError>,
    ) -> Result<T, AggregatorError> {
        let (client, session) = (&mut self.client, &mut self.session);
        let canceller = &self.canceller.below;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let look = || {
                while !done.load(Ordering::SeqCst) {
                    if let Err(error) = client.check() {
                        let why = error.to_string();
                        canceller.end(AggregatorError::Above { why: why.clone() });
                        return Some(why);
                    }
                    std::thread::park_timeout(LOOK_UP);
                }
                None
            };
            let thread = std::thread::Builder::new().name("above".into());
            let looking = thread.spawn_scoped(scope, look)?;
            let result = {
                let _done = AtEnd(|| done.store(true, Ordering::SeqCst));
                work(session)
            };
            looking.thread().unpark();
            match looking.join() {
                Ok(Some(why)) => Err(AggregatorError::Above { why }),
                _ => result,
            }
        })
    }
}

/// Calls the aggregator above. Meanwhile clients below may come and go.
fn call_above<T: Send>(
    client: &mut Client,
    session: &mut Session,
    canceller: &EdgeCanceller,
    call: impl FnOnce(&mut Client) -> Result<T, ClientError> + Send,
) -> Result<T, AggregatorError> {
    std::thread::scope(|scope| {
        let work = || {
            let _over = AtEnd(|| canceller.below.end_of_call());
            call(client)
        };
        let calling = std::thread::Builder::new().name("above".into()).spawn_scoped(scope, work)?;
        let idle = session.idle();
        if let Err(error) = &idle {
            canceller.above.cancel(&error.to_string());
        }
        let called = calling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        idle.and(called.map_err(is_above))
    })
}

/// Does something however a block ends.
struct AtEnd<F: Fn()>(F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
