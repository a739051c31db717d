//! Keeps a session on disk.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use super::config::{AggregatorConfig, Averaging};
use super::event::PeerShared;
use super::lanes::{Begun, Lanes, Model, Regions, Sizes};
use super::members::Peer;
use crate::error::{AggregatorError, SinkError, StateError};
use crate::ledger::{self, LaneLedger, Stream};
use crate::manifest::{ChunkTable, Manifest};
use crate::named::Named;
use crate::pool::RegionPool;
use crate::region::Region;
use crate::state::{ClientRecord, ModelRecord, Record, RegionNames, Stage, StateDir};
use crate::wire::checksum::model_digest;
use crate::wire::hello::SessionId;

/// Of a client that an earlier process has left out of the round.
pub(super) const LEFT_OUT_BEFORE: &str = "it was left out before the aggregator was started again";

/// A session that is kept.
pub(super) struct Kept {
    pub directory: Arc<StateDir>,
    pub record: Record,
    /// What has come from whom in this round; in use while updates come.
    pub ledger: Option<Region>,
    /// A round that an earlier process had begun.
    pub begun: Option<Begun>,
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
pub(super) fn initial(is_given: bool) -> (String, String) {
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

    pub fn damaged(&self, why: impl Into<String>) -> AggregatorError {
        StateError::Damaged { path: self.directory.path().to_owned(), why: why.into() }.into()
    }
}

impl Kept {
    /// The newest whole model.
    pub fn read_model(
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
    pub fn take_up(
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
