//! Keeps a session on disk, and goes on with one that was kept.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::gather::accumulator_layout;
use super::members::{Link, Members, Peer};
use super::round::{Begun, LEFT_OUT_BEFORE, Regions};
use super::{
    Admission, Aggregator, AggregatorConfig, Averaging, Lanes, Model, PeerShared, Session, Sizes,
};
use crate::control::{Heartbeat, Listeners};
use crate::error::{AggregatorError, Fault, SinkError, StateError};
use crate::ledger::{self, LaneLedger, Stream};
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::Meter;
use crate::named::Named;
use crate::pool::RegionPool;
use crate::region::Region;
use crate::state::{ClientRecord, ModelRecord, Record, RegionNames, Stage, StateDir};
use crate::wire::checksum::model_digest;
use crate::wire::hello::SessionId;

/// A session that is kept.
pub(super) struct Kept {
    directory: Arc<StateDir>,
    record: Record,
    /// What has come from whom in this round; in use while updates come.
    pub ledger: Option<Region>,
    /// A round that an earlier process had begun.
    begun: Option<Begun>,
}

/// What a new session is to be kept as.
pub(super) fn new_record(
    config: &AggregatorConfig,
    session: SessionId,
    manifest: &Manifest,
    clients: impl Iterator<Item = (String, SocketAddr, f64)>,
    has_initial: bool,
) -> Record {
    let client = |(name, address, examples)| ClientRecord { name, address, examples, holds: None };
    Record {
        session,
        header: manifest.header().to_vec(),
        settings: settings(config).into_iter().chain([initial(has_initial)]).collect(),
        clients: clients.map(client).collect(),
        round: 0,
        sent: None,
        model: None,
        stage: Stage::Between,
    }
}

/// What must be the same when a session goes on.
fn settings(config: &AggregatorConfig) -> Vec<(String, String)> {
    let clip_norm = config.updates.clip_norm.map_or("none".to_owned(), |norm| norm.to_string());
    let all = [
        ("--clients", config.clients.to_string()),
        ("--rounds", config.rounds.to_string()),
        ("--streams", config.streams.to_string()),
        ("--chunk-bytes", config.chunk_bytes.to_string()),
        ("--order", config.order.name().to_owned()),
        ("--on-nonfinite", config.updates.on_nonfinite.name().to_owned()),
        ("--clip-norm", clip_norm),
    ];
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Whether the session began with a model of the aggregator's; the last of its settings.
fn initial(is_given: bool) -> (String, String) {
    ("--initial".to_owned(), if is_given { "given" } else { "left out" }.to_owned())
}

/// Takes the directory of a session. Gives the session that it holds, if that is one of this kind.
pub(super) fn open(
    path: &Path,
    config: &AggregatorConfig,
) -> Result<(Arc<StateDir>, Option<Record>), StateError> {
    if !matches!(config.averaging, Averaging::Streaming | Averaging::Spool) {
        return Err(StateError::NoMean);
    }
    let (directory, record) = StateDir::open(path)?;
    let of_session = record.iter().flat_map(|record| &record.settings);
    let differs = of_session.zip(settings(config)).find(|(was, is)| **was != *is);
    if let Some(((what, was), (_, is))) = differs {
        let (path, what, was) = (path.to_owned(), what.clone(), was.clone());
        return Err(StateError::Differs { path, what, was, is });
    }
    Ok((Arc::new(directory), record))
}

impl Kept {
    /// Begins to keep a session.
    pub fn begin(
        directory: Arc<StateDir>,
        record: Record,
        chunks: &ChunkTable,
    ) -> Result<Kept, AggregatorError> {
        let bytes = ledger::bytes(chunks.len(), record.clients.len());
        let ledger = Some(directory.make_region(bytes).map_err(SinkError::from)?);
        directory.write(&record)?;
        Ok(Kept { directory, record, ledger, begun: None })
    }

    fn write(&self) -> Result<(), AggregatorError> {
        Ok(self.directory.write(&self.record)?)
    }

    /// A round begins. From now on its regions are not what they were.
    pub fn begin_round(
        &mut self,
        round: u32,
        begun: &Begun,
        needs_model: bool,
        pool: &RegionPool,
    ) -> Result<(), AggregatorError> {
        let Begun { absent, lost, regions, .. } = begun;
        let name = |region: &Region| region.name().unwrap_or_default().to_owned();
        let regions = RegionNames {
            ledger: regions.ledger.as_ref().map(name).unwrap_or_default(),
            accumulator: regions.accumulator.as_ref().map(name),
            model: regions.model.as_ref().map(name),
            spool: regions.spool.iter().map(name).collect(),
        };
        self.record.round = round;
        self.record.model = self.record.model.take().filter(|_| needs_model);
        let (absent, lost) = (absent.clone(), lost.clone());
        self.record.stage = Stage::Uploading { absent, lost, regions };
        self.write()?;
        // A model that somebody still holds was in a region that nobody will use again.
        Ok(self.directory.tidy(Some(&self.record), &pool.free_names())?)
    }

    /// A client is left out of the round.
    pub fn leave_out(&mut self, peer: usize) -> Result<(), AggregatorError> {
        if let Stage::Uploading { lost, .. } = &mut self.record.stage {
            lost[peer] = true;
        }
        self.write()
    }

    /// The mean of the round is in `model`.
    pub fn end_round(
        &mut self,
        counted: &[bool],
        model: ModelRecord,
    ) -> Result<(), AggregatorError> {
        self.record.model = Some(model);
        self.record.stage = Stage::Averaged { counted: counted.to_vec() };
        self.write()
    }

    /// The model of the round is with its clients.
    pub fn note_sent(
        &mut self,
        round: u32,
        peers: &[Peer],
        model: Option<ModelRecord>,
    ) -> Result<(), AggregatorError> {
        self.record.sent = Some(round);
        self.record.model = model;
        for (client, peer) in self.record.clients.iter_mut().zip(peers) {
            client.holds = peer.holds;
        }
        self.record.stage = Stage::Between;
        self.write()
    }

    /// The session is over.
    pub fn end(&self) -> Result<(), AggregatorError> {
        Ok(self.directory.clear()?)
    }

    /// The round that an earlier process had begun.
    pub fn take_begun(&mut self) -> Option<Begun> {
        self.begun.take()
    }

    fn damaged(&self, why: impl Into<String>) -> AggregatorError {
        StateError::Damaged { path: self.directory.path().to_owned(), why: why.into() }.into()
    }
}

impl Aggregator {
    /// Goes on with a session that an earlier process began. Its clients are expected back.
    pub(super) fn resume(
        mut self,
        directory: Arc<StateDir>,
        record: Record,
        initial: Option<&Manifest>,
        (listeners, heartbeat): (Listeners, Heartbeat),
    ) -> Result<Session, AggregatorError> {
        let meter = Meter::start("resume", record.round);
        let (what, is) = self::initial(initial.is_some());
        if let Some((_, was)) = record.settings.last().filter(|(_, was)| *was != is) {
            let (path, was) = (directory.path().to_owned(), was.clone());
            return Err(StateError::Differs { path, what, was, is }.into());
        }
        let mut kept = Kept { directory, record, ledger: None, begun: None };
        let manifest = Manifest::from_header(&kept.record.header)
            .map_err(|error| kept.damaged(error.to_string()))?;
        if let Some(difference) = initial.and_then(|i| manifest.first_difference(i)) {
            return Err(AggregatorError::Initial { difference });
        }
        let layout = accumulator_layout(&self.config, &manifest)?;
        let min_clients = self.config.min_clients.unwrap_or(self.config.clients);
        // Some may never have come.
        self.config.clients = kept.record.clients.len();
        let lanes = Lanes::cut(&self.config, &manifest, layout)?;
        let model = kept.read_model(&manifest, &lanes)?;
        if self.config.updates.clip_norm.is_some() && kept.record.sent.is_some() && model.is_none()
        {
            return Err(kept.damaged("the model that updates are measured from is not there"));
        }
        kept.take_up(&self.config, &manifest, &lanes)?;
        let (members, admission) = self.expect_back(&kept.record, manifest, &lanes, listeners)?;
        tracing::info!(
            "going on with the session in {} in round {}; its clients are expected back",
            kept.directory.path().display(),
            kept.record.round
        );
        let record = kept.record.clone();
        let phase = meter.stop(0);
        let mut session = self.begin(min_clients, lanes, members, phase, heartbeat, admission);
        session.model = model;
        session.sent = record.sent;
        session.round = record.round;
        match record.stage {
            Stage::Between => {}
            Stage::Averaged { counted } => {
                let all = session.members.peers.iter_mut();
                all.for_each(|peer| peer.left_out = LEFT_OUT_BEFORE.into());
                session.counted = counted;
                session.unsent = true;
            }
            // It is begun again.
            Stage::Uploading { .. } => session.round -= 1,
        }
        session.kept = Some(kept);
        Ok(session)
    }

    fn expect_back(
        &mut self,
        record: &Record,
        manifest: Manifest,
        lanes: &Lanes,
        listeners: Listeners,
    ) -> Result<(Members, Admission), AggregatorError> {
        let terms = self.terms(record.session, lanes, manifest);
        let until = Instant::now() + terms.reconnect.max(terms.deadline);
        let (mut members, admission) = self.members(terms, listeners, 1);
        members.peers = record
            .clients
            .iter()
            .map(|client| Peer {
                name: client.name.clone(),
                address: client.address,
                examples: client.examples,
                shared: Arc::new(PeerShared::of(lanes)),
                link: Link::Down { old: None, fault: Fault::NotBack, linger: until, until },
                holds: client.holds,
                left_out: String::new(),
            })
            .collect();
        Ok((members, admission))
    }
}

impl Kept {
    /// The newest whole model.
    fn read_model(
        &self,
        manifest: &Manifest,
        lanes: &Lanes,
    ) -> Result<Option<Model>, AggregatorError> {
        let Some(ModelRecord { region, digest }) = &self.record.model else { return Ok(None) };
        let region = self.directory.open_region(region, manifest.data_bytes())?;
        let sums = lanes.sums_of(manifest, &region);
        let found = model_digest(&manifest.layout_digest(), lanes.chunks.chunk_bytes(), &sums);
        match found == *digest {
            true => Ok(Some(Model { region: Arc::new(region), sums })),
            false => Err(self.damaged("the model of its last round does not match its digest")),
        }
    }

    /// The memory of the round that was begun, if one was.
    fn take_up(
        &mut self,
        config: &AggregatorConfig,
        manifest: &Manifest,
        lanes: &Lanes,
    ) -> Result<(), AggregatorError> {
        let ledger_bytes = ledger::bytes(lanes.chunks.len(), self.record.clients.len());
        let Stage::Uploading { absent, lost, regions } = &self.record.stage else {
            let made = self.directory.make_region(ledger_bytes).map_err(SinkError::from)?;
            self.ledger = Some(made);
            return Ok(());
        };
        let averaging = match regions.spool.is_empty() {
            true => Averaging::Streaming,
            false => Averaging::Spool,
        };
        let sizes = Sizes::new(config, averaging, manifest, lanes.layout.as_ref());
        let open = |name: &Option<String>, bytes: Option<u64>| match (name, bytes) {
            (Some(name), Some(bytes)) => Ok(Some(self.directory.open_region(name, bytes)?)),
            (None, None) => Ok(None),
            _ => Err(self.damaged("its regions are not those of its model")),
        };
        let each = regions.spool.iter().zip(&sizes.spool);
        let each = each.map(|(name, &bytes)| self.directory.open_region(name, bytes));
        let regions = Regions {
            accumulator: open(&regions.accumulator, sizes.accumulator)?,
            model: open(&regions.model, sizes.model)?,
            spool: each.collect::<Result<_, _>>()?,
            ledger: Some(self.directory.open_region(&regions.ledger, ledger_bytes)?),
        };
        let (absent, lost) = (absent.clone(), lost.clone());
        self.begun = Some(Begun { averaging, absent, lost, regions });
        Ok(())
    }
}

/// A ledger for each lane, if the session is kept.
pub(super) fn lane_ledgers<'s>(
    ledger: Option<&'s mut Region>,
    lanes: &'s Lanes,
    shared: &'s [Arc<PeerShared>],
    lost: &[bool],
    round: u32,
) -> std::vec::IntoIter<LaneLedger<'s>> {
    let streams = |lane: usize| {
        let stream = |(shared, &lost): (&'s Arc<PeerShared>, &bool)| {
            let sums = shared.sums.get().expect("set before the session begins").lane(lane);
            Stream { sums, findings: shared.findings.get(), lost }
        };
        shared.iter().zip(lost).map(stream).collect()
    };
    let ledgers = ledger.map(|ledger| {
        ledger::cut(ledger.bytes_mut().0, &lanes.chunks, &lanes.ranges, round, streams)
    });
    ledgers.unwrap_or_default().into_iter()
}
