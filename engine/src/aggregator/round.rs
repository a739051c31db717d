//! One round: updates come in and are averaged, the model goes out.

use std::cell::OnceCell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::members::{Members, Notice, unexpected};
use super::{Averaging, Event, Lanes, Model, PeerShared, Session, Sizes};
use crate::error::{AggregatorError, Fault, LaneError, ProtocolError, SinkError, TransferError};
use crate::lane::receive::{
    Incoming, Inspection, ReceiveOrder, ReceiveReport, Receiving, Shared, receive,
};
use crate::lane::send::{Outgoing, SendOrder, Sending, send};
use crate::lane::{Inbox, start_lane};
use crate::limits;
use crate::manifest::{ChunkTable, Manifest};
use crate::meter::{Meter, Phase};
use crate::paths::SendKind;
use crate::reducer::{AccumulatorLayout, ClipBase, Weights, clean};
use crate::region::Region;
use crate::sink::Sink;
use crate::sink::discard::DiscardSink;
use crate::sink::mean::{MeanSink, MeanSlices, Wave};
use crate::sink::region::{Part, RegionSink};
use crate::source::Source;
use crate::source::region::RegionSource;
use crate::verdict::{Rejection, UpdatePolicy, Verdict};
use crate::wire::checksum::model_digest;
use crate::wire::message::{AggregatorMessage, ChunkRange, ClientMessage};

impl Session {
    /// Makes `source` the model and sends it to every client, before the first round.
    ///
    /// # Errors
    /// As [`Session::round`]; and a source that cannot be read.
    pub fn send_initial(&mut self, source: &dyn Source) -> Result<(), AggregatorError> {
        let loaded = self.load(source);
        self.end_on_error(loaded)?;
        self.broadcast()
    }

    /// Makes `region` the model and sends it to every client, without a copy. Until this returns
    /// its bytes must not change: a client would find a checksum that does not match.
    ///
    /// # Errors
    /// As [`Session::round`]; and, before anything is sent, a region of another layout.
    pub fn send_region(
        &mut self,
        manifest: &Manifest,
        region: Arc<Region>,
    ) -> Result<(), AggregatorError> {
        self.check_initial(manifest)?;
        let sums = self.sums_of(&region);
        self.model = Some(Model { region, sums });
        self.broadcast()
    }

    fn check_initial(&self, manifest: &Manifest) -> Result<(), AggregatorError> {
        match self.manifest().first_difference(manifest) {
            Some(difference) => Err(AggregatorError::Initial { difference }),
            None => Ok(()),
        }
    }

    fn sums_of(&self, region: &Region) -> Vec<u64> {
        let (chunks, threads) = (&self.lanes.chunks, self.lanes.ranges.len());
        RegionSource::seal(self.manifest(), region, chunks, threads).into_sums()
    }

    fn load(&mut self, source: &dyn Source) -> Result<(), AggregatorError> {
        self.check_initial(source.manifest())?;
        let mut region = self.pool.take(self.manifest().data_bytes())?;
        for chunk in (0..self.lanes.chunks.len()).map(|index| self.lanes.chunks.get(index)) {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            source.read(chunk.bytes.start, &mut region.bytes_mut().0[place])?;
        }
        let sums = self.sums_of(&region);
        self.model = Some(Model { region: Arc::new(region), sums });
        Ok(())
    }

    /// Makes a region, whose chunks have these checksums, the model, and sends it to every client.
    ///
    /// # Errors
    /// As [`Session::round`].
    pub(crate) fn send(
        &mut self,
        region: Arc<Region>,
        sums: Vec<u64>,
    ) -> Result<(), AggregatorError> {
        self.model = Some(Model { region, sums });
        self.broadcast()
    }

    /// The checksums of the update that came from a client in the last round.
    pub(crate) fn upload_sums(&self, client: usize) -> Vec<u64> {
        let sums = self.members.peers.get(client).and_then(|peer| peer.shared.sums.get());
        sums.map(|sums| sums.all()).unwrap_or_default()
    }

    /// The model, and the checksums of its chunks. The session ends without a word.
    pub(crate) fn into_model(mut self) -> Option<(Arc<Region>, Vec<u64>)> {
        self.model.take().map(|model| (model.region, model.sums))
    }

    /// Runs one round: every client's update is received and averaged, and the mean becomes the
    /// model. [`Session::broadcast`] then sends it back. A client whose connection breaks may come
    /// back and goes on; one that does not is left out, as if it had never sent anything, if
    /// enough others are there. [`Session::counted`] says whose updates are in the mean.
    ///
    /// # Errors
    /// Too few clients left: the error names the one that was lost last. The session ends for all.
    pub fn round(&mut self) -> Result<(), AggregatorError> {
        let staged = self.run_round()?;
        staged.into_iter().for_each(|region| self.pool.give_back(region));
        Ok(())
    }

    /// Runs one round of [`Averaging::Keep`]: every client's update, in client order.
    ///
    /// # Errors
    /// As [`Session::round`].
    pub fn collect(&mut self) -> Result<Vec<Region>, AggregatorError> {
        self.run_round()
    }

    /// Runs one round of [`Averaging::Wave`]: adds every client's update, with these weights, to the
    /// sums in `accumulator`, and gives it back.
    ///
    /// # Errors
    /// As [`Session::round`]; the sums are then lost.
    pub(crate) fn fold(
        &mut self,
        weights: Weights,
        wave: Wave,
        accumulator: Region,
    ) -> Result<Region, AggregatorError> {
        self.wave = Some((weights, wave, accumulator));
        let sums = self.run_round()?.pop();
        sums.ok_or_else(|| std::io::Error::other("the sums are lost").into())
    }

    /// How the model's elements stand in an accumulator, if this session averages.
    pub(crate) fn layout(&self) -> Option<&AccumulatorLayout> {
        self.lanes.layout.as_ref()
    }

    /// The number of the newest round; 0 before the first.
    pub fn rounds_done(&self) -> u32 {
        self.round
    }

    /// Names of the clients whose updates are in the newest mean, in client order.
    pub fn counted(&self) -> impl Iterator<Item = &str> {
        let peers = self.members.peers.iter().zip(&self.counted);
        peers.filter(|(_, counted)| **counted).map(|(peer, _)| peer.name.as_str())
    }

    /// Gives the updates that were received whole.
    fn run_round(&mut self) -> Result<Vec<Region>, AggregatorError> {
        self.round += 1;
        let round = self.round;
        let last = self.model.take().map(|model| model.region);
        // What changes are measured against stays until they are averaged.
        let base = last.clone().filter(|_| self.upload.updates.clip_norm.is_some());
        if base.is_none() {
            // A client has confirmed the last model before it uploads, so its memory is free.
            last.and_then(Arc::into_inner).into_iter().for_each(|r| self.pool.give_back(r));
        } else {
            drop(last);
        }
        let received = self.receive_updates(base.as_ref().map(|region| region.bytes()));
        base.and_then(Arc::into_inner).into_iter().for_each(|region| self.pool.give_back(region));
        let (model, staged) = self.end_on_error(received)?;
        self.model = model;
        for (peer, &counted) in self.counted.iter().enumerate() {
            self.members.tell(peer, &AggregatorMessage::Applied { round, counted });
        }
        Ok(staged)
    }

    fn receive_updates(
        &mut self,
        base: Option<&[u8]>,
    ) -> Result<(Option<Model>, Vec<Region>), AggregatorError> {
        let round = self.round;
        let clock = UploadClock::start(round);
        let mut regions = self.take_regions()?;
        let has_mean = self.lanes.layout.is_some();
        let mut sums = vec![0; if has_mean { self.lanes.chunks.len() } else { 0 }];
        for peer in &self.members.peers {
            peer.shared.start_round(round, self.ready);
        }
        // Who came back too late for the last model cannot have trained on it.
        let lacks = |peer: &super::members::Peer| self.sent.is_some() && peer.holds != self.sent;
        let peers = self.members.peers.iter();
        let lost: Vec<bool> = peers.map(|peer| peer.is_gone() || lacks(peer)).collect();
        let averaging = self.config.averaging;
        let seen = Base::Model(base);
        self.counted = match averaging {
            Averaging::Streaming => {
                let weights = self.weights(&lost)?;
                let sinks =
                    self.lanes.mean_sinks(&weights, &lost, &mut regions, &mut sums, None)?;
                self.upload.run(&self.lanes, &mut self.members, sinks, lost, seen, &clock)?
            }
            Averaging::Wave => {
                let (weights, wave, accumulator) =
                    self.wave.take().ok_or_else(|| std::io::Error::other("no sums"))?;
                regions.accumulator = Some(accumulator);
                let sinks =
                    self.lanes.mean_sinks(&weights, &lost, &mut regions, &mut sums, Some(wave))?;
                let counted = self.upload.run(
                    &self.lanes,
                    &mut self.members,
                    sinks,
                    lost,
                    Base::Unseen,
                    &clock,
                )?;
                regions.staged = regions.accumulator.take().into_iter().collect();
                counted
            }
            Averaging::Staged | Averaging::Keep => {
                let sinks = self.lanes.region_sinks(&mut regions.staged);
                let seen = if averaging == Averaging::Staged { seen } else { Base::Unseen };
                self.upload.run(&self.lanes, &mut self.members, sinks, lost, seen, &clock)?
            }
            Averaging::Checksum | Averaging::Discard => {
                let checks = averaging == Averaging::Checksum;
                let sinks = self.lanes.ranges.iter().map(|_| DiscardSink { checks }).collect();
                self.upload.run(
                    &self.lanes,
                    &mut self.members,
                    sinks,
                    lost,
                    Base::Unseen,
                    &clock,
                )?
            }
        };
        let factors = match averaging {
            Averaging::Streaming | Averaging::Staged => self.judge()?,
            _ => Vec::new(),
        };
        let updates = self.counted.iter().filter(|&&counted| counted).count() as u64;
        let bytes = self.manifest().data_bytes() * updates;
        let (wait, upload) = clock.stop(bytes);
        self.phases.extend([wait, upload.received_by(self.config.receive_path)]);
        if averaging == Averaging::Staged {
            let meter = Meter::start("average", round);
            self.average(&mut regions, &mut sums, &factors, base)?;
            self.phases.push(meter.stop(bytes));
        }
        let Regions { mut accumulator, model, staged } = regions;
        let region = model.or_else(|| accumulator.take());
        accumulator.into_iter().for_each(|region| self.pool.give_back(region));
        Ok((region.map(|region| Model { region: Arc::new(region), sums }), staged))
    }

    /// Says what is done with each update that has come, and leaves out those that are rejected. Gives
    /// the factors that they are clipped with.
    fn judge(&mut self) -> Result<Vec<f64>, AggregatorError> {
        self.updates.clear();
        let mut factors = vec![1.0; self.counted.len()];
        for (index, factor) in factors.iter_mut().enumerate() {
            let peer = &self.members.peers[index];
            let Some(findings) = peer.shared.findings.get().filter(|_| self.counted[index]) else {
                continue;
            };
            let summary = findings.summary(self.manifest(), &self.lanes.chunks)?;
            let name = peer.name.clone();
            let report = self.upload.updates.report(name, self.round, peer.examples, summary);
            let fault = match (&report.verdict, &report.summary.first_nonfinite) {
                (Verdict::Counted { clip_factor, .. }, _) => {
                    *factor = *clip_factor;
                    None
                }
                (Verdict::Rejected(Rejection::Nonfinite), Some(place)) => {
                    Some(Fault::Nonfinite { tensor: place.tensor.clone(), index: place.index })
                }
                (Verdict::Rejected(_), _) => {
                    Some(Fault::TooLarge { norm: report.summary.norm.unwrap_or(f64::INFINITY) })
                }
            };
            self.updates.push(report);
            if let Some(fault) = fault {
                self.counted[index] = false;
                let left = self.counted.iter().filter(|&&counted| counted).count();
                let label = self.members.peers[index].label();
                if left < self.upload.min_clients {
                    return Err(AggregatorError::Client { client: label, error: fault });
                }
                tracing::warn!("{label}: {fault}; the round goes on with {left} clients");
            }
        }
        Ok(factors)
    }

    /// Everybody's weight, but for those who are lost.
    fn weights(&self, lost: &[bool]) -> Result<Weights, AggregatorError> {
        Ok(Weights::new(&self.examples(lost))?)
    }

    fn examples(&self, lost: &[bool]) -> Vec<f64> {
        let peers = self.members.peers.iter().zip(lost);
        let weight = |(peer, lost): (&super::members::Peer, &bool)| match lost {
            true => 0.0,
            false => peer.examples,
        };
        peers.map(weight).collect()
    }

    /// Makes zero what is not finite in updates that were received whole.
    fn clean(&self, staged: &mut [Region]) -> Result<(), AggregatorError> {
        let zeroed = self
            .updates
            .iter()
            .filter(|report| matches!(report.verdict, Verdict::Counted { zeroed: true, .. }));
        for report in zeroed {
            let of = |peer: &super::members::Peer| peer.name == report.client;
            let Some(index) = self.members.peers.iter().position(of) else { continue };
            for chunk in (0..self.lanes.chunks.len()).map(|index| self.lanes.chunks.get(index)) {
                let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                clean(chunk.dtype, &mut staged[index].bytes_mut().0[place])?;
            }
        }
        Ok(())
    }

    /// Averages what was staged, one update after the other, as is usual. `base` is the model that
    /// clipped updates are changes of.
    fn average(
        &mut self,
        regions: &mut Regions,
        sums: &mut [u64],
        factors: &[f64],
        base: Option<&[u8]>,
    ) -> Result<(), AggregatorError> {
        let mut staged = std::mem::take(&mut regions.staged);
        self.clean(&mut staged)?;
        let mut lost: Vec<bool> = self.counted.iter().map(|counted| !counted).collect();
        let clip_base = if base.is_some() { ClipBase::Model } else { ClipBase::Zero };
        let weights = Weights::clipped(&self.examples(&lost), factors, clip_base)?;
        let peers = lost.len();
        // The model is one more client where something is clipped.
        let model = base.filter(|_| weights.clients() > peers);
        lost.extend(model.map(|_| false));
        let Lanes { chunks, ranges, .. } = &self.lanes;
        let sinks = self.lanes.mean_sinks(&weights, &lost, regions, sums, None)?;
        let work = |mut sink: MeanSink<'_>, range: std::ops::Range<usize>| {
            let updates = staged.iter().map(|region| region.bytes()).chain(model);
            let counted = updates.enumerate().filter(|(peer, _)| !lost[*peer]);
            for (peer, update) in counted {
                for chunk in range.clone().map(|index| chunks.get(index)) {
                    let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                    let accepted = sink.add(peer, &chunk, &update[place]);
                    accepted.map_err(|error| LaneError::peer(peer, error))?;
                }
            }
            Ok(())
        };
        let running = sinks.len();
        let (sender, results) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for (sink, range) in sinks.into_iter().zip(ranges) {
                let sender = sender.clone();
                // This thread holds the other end.
                let report = move |result| drop(sender.send(result));
                start_lane(scope, || work(sink, range.clone()), report);
            }
        });
        regions.staged = staged;
        Ok(results.iter().take(running).collect::<Result<(), LaneError>>()?)
    }

    fn take_regions(&self) -> Result<Regions, AggregatorError> {
        let sizes = Sizes::new(&self.config, self.manifest(), self.lanes.layout.as_ref());
        let take = |bytes: u64| self.pool.take(bytes);
        Ok(Regions {
            accumulator: sizes.accumulator.map(take).transpose()?,
            model: sizes.model.map(take).transpose()?,
            staged: sizes.staged.into_iter().map(take).collect::<Result<_, _>>()?,
        })
    }

    /// Sends the model to every client and waits until each has confirmed its digest.
    ///
    /// # Errors
    /// As [`Session::round`]. Without a model this does nothing.
    pub fn broadcast(&mut self) -> Result<(), AggregatorError> {
        let sent = self.send_model();
        self.end_on_error(sent)
    }

    fn send_model(&mut self) -> Result<(), AggregatorError> {
        let Some(model) = &self.model else { return Ok(()) };
        let meter = Meter::start("broadcast", self.round);
        let manifest = &self.members.terms.manifest.clone();
        let chunk_bytes = self.lanes.chunks.chunk_bytes();
        let digest = model_digest(&manifest.layout_digest(), chunk_bytes, &model.sums);
        let source = RegionSource::new(manifest, &model.region, chunk_bytes, model.sums.clone());
        let kind = SendKind::choose(self.config.send_path, &source)?;
        let broadcast = Broadcast {
            counted: self.counted.clone(),
            round: self.round,
            digest,
            kind,
            min_clients: self.upload.min_clients,
        };
        let confirmed = broadcast.run(&self.lanes, &mut self.members, &source, &model.sums)?;
        let phase = meter.stop(self.manifest().data_bytes() * confirmed as u64);
        self.phases.push(phase.sent_by(kind));
        self.sent = Some(self.round);
        Ok(())
    }

    /// When something ends the session, every client hears why.
    fn end_on_error<T>(&self, result: Result<T, AggregatorError>) -> Result<T, AggregatorError> {
        if let Err(error) = &result {
            self.give_up(&error.to_string());
        }
        result
    }
}

/// The memory of one round; see [`Sizes`].
struct Regions {
    accumulator: Option<Region>,
    model: Option<Region>,
    staged: Vec<Region>,
}

impl Lanes {
    fn mean_sinks<'s>(
        &'s self,
        weights: &Weights,
        lost: &[bool],
        regions: &'s mut Regions,
        sums: &'s mut [u64],
        wave: Option<Wave>,
    ) -> Result<Vec<MeanSink<'s>>, AggregatorError> {
        let Some(layout) = &self.layout else { return Ok(Vec::new()) };
        let mut accumulator = regions.accumulator.as_mut().map(|region| region.bytes_mut().0);
        let mut model = regions.model.as_mut().map(|model| model.bytes_mut().0);
        let mut sums = sums;
        let mut position = 0;
        let mut sinks = Vec::new();
        for (lane, tiles) in self.ranges.iter().zip(&self.tiles) {
            let bytes = self.chunks.bytes_of(lane);
            let span = layout.span(bytes.clone()).map_err(SinkError::from)?;
            let cut = |sums: &'s mut [u8]| {
                // The gap that aligns a run belongs to nobody.
                let (_, from) = sums.split_at_mut((span.start - position) as usize);
                from.split_at_mut((span.end - span.start) as usize)
            };
            let (lane_sums, rest) = accumulator.map(cut).unzip();
            (accumulator, position) = (rest, span.end);
            let (lane_model, rest) =
                model.map(|model| model.split_at_mut((bytes.end - bytes.start) as usize)).unzip();
            model = rest;
            let (lane_checks, rest) = sums.split_at_mut(lane.len());
            sums = rest;
            let slices = MeanSlices {
                accumulator: lane_sums,
                model: lane_model,
                sums: lane_checks,
                tiles,
                wave,
            };
            let sink = MeanSink::new(weights, layout, &self.chunks, lane, slices)?;
            sinks.push(sink.without(lost));
        }
        Ok(sinks)
    }

    fn region_sinks<'s>(&'s self, staged: &'s mut [Region]) -> Vec<RegionSink<'s>> {
        let mut per_lane: Vec<Vec<Part<'_>>> = self.ranges.iter().map(|_| Vec::new()).collect();
        for region in staged {
            let position = region.position();
            let (mut rest, file) = region.bytes_mut();
            for (lane, parts) in self.ranges.iter().zip(&mut per_lane) {
                let range = self.chunks.bytes_of(lane);
                let (bytes, after) = rest.split_at_mut((range.end - range.start) as usize);
                rest = after;
                parts.push(Part { bytes, file, position, start: range.start });
            }
        }
        per_lane.into_iter().map(RegionSink::new).collect()
    }
}

/// Tells apart the time until the first client begins, which is for training, and the upload.
struct UploadClock {
    round: u32,
    waiting: Meter,
    upload: OnceCell<(Phase, Meter)>,
}

impl UploadClock {
    fn start(round: u32) -> UploadClock {
        UploadClock { round, waiting: Meter::start("wait", round), upload: OnceCell::new() }
    }

    /// A client has begun.
    fn begin(&self) {
        self.upload.get_or_init(|| (self.waiting.stop(0), Meter::start("upload", self.round)));
    }

    /// The wait and the upload.
    fn stop(self, bytes: u64) -> (Phase, Phase) {
        self.begin();
        let (wait, upload) = self.upload.into_inner().expect("begun above");
        (wait, upload.stop(bytes))
    }
}

/// What updates are looked at for.
#[derive(Clone, Copy)]
enum Base<'a> {
    /// Nothing.
    Unseen,
    /// What is bad in them. With the model that they were trained from, if there is one.
    Model(Option<&'a [u8]>),
}

/// How updates are received.
pub(super) struct Upload {
    pub receive_path: crate::paths::ReceiveKind,
    pub order: crate::lane::receive::Order,
    /// Fewer updates make no mean.
    pub min_clients: usize,
    /// How long a round waits for the last updates.
    pub round_deadline: Option<Duration>,
    /// What is done with bad updates.
    pub updates: UpdatePolicy,
}

impl Upload {
    /// Receives the updates of all clients that are not lost into one sink for each lane. Gives
    /// whose have come whole.
    fn run<S: Sink>(
        &self,
        lanes: &Lanes,
        members: &mut Members,
        sinks: Vec<S>,
        lost: Vec<bool>,
        base: Base<'_>,
        clock: &UploadClock,
    ) -> Result<Vec<bool>, AggregatorError> {
        let shared: Vec<Arc<PeerShared>> =
            members.peers.iter().map(|peer| peer.shared.clone()).collect();
        let inboxes: Vec<Inbox<ReceiveOrder>> =
            lanes.signals.iter().map(|signal| Inbox::new(signal.clone())).collect();
        let running = sinks.len();
        std::thread::scope(|scope| {
            let stall = Some(members.terms.deadline / 2);
            for (lane, mut sink) in sinks.into_iter().enumerate() {
                let range = lanes.ranges[lane].clone();
                let shared = &shared;
                let (inbox, buffers) = (&inboxes[lane], &lanes.buffers[lane]);
                let (lost, kind, order) = (lost.clone(), self.receive_path, self.order);
                let updates = self.updates;
                let (sender, ended) = (members.sender.clone(), members.sender.clone());
                let work = move || {
                    let streams = shared.iter().zip(&lost).map(|(shared, &lost)| {
                        let stream =
                            Incoming::new(kind, shared.lane(lane, updates, base), stall, &range);
                        if lost { stream.lost() } else { stream }
                    });
                    let streams = streams.collect();
                    // The session holds the other end while lanes run.
                    let report = |report| drop(sender.send(Event::Received { lane, report }));
                    let receiving = Receiving {
                        chunks: &lanes.chunks,
                        range: range.clone(),
                        order,
                        inbox,
                        report: &report,
                    };
                    let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
                    receive(streams, receiving, &mut sink, &mut buffers)?;
                    sink.end().map_err(|error| LaneError::peer(0, error))
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane { result })));
            }
            let mut uploading = Uploading {
                upload: self,
                members,
                inboxes: &inboxes,
                chunks: &lanes.chunks,
                clock,
                whole: vec![vec![false; shared.len()]; running],
                losses: vec![lost.iter().filter(|&&lost| lost).count(); running],
                lost,
                running,
            };
            uploading.run()
        })
    }
}

/// An upload that is under way.
struct Uploading<'a> {
    upload: &'a Upload,
    members: &'a mut Members,
    inboxes: &'a [Inbox<ReceiveOrder>],
    chunks: &'a ChunkTable,
    clock: &'a UploadClock,
    /// Of each lane: whose chunks have all come.
    whole: Vec<Vec<bool>>,
    /// Of each lane: how many clients it was told are lost.
    losses: Vec<usize>,
    lost: Vec<bool>,
    /// Lanes.
    running: usize,
}

impl Uploading<'_> {
    fn run(&mut self) -> Result<Vec<bool>, AggregatorError> {
        let result = self.check_quorum(None).and_then(|()| self.await_all());
        match &result {
            Ok(()) => self.inboxes.iter().for_each(|inbox| inbox.put(ReceiveOrder::Finish)),
            Err(_) => self.inboxes.iter().for_each(Inbox::cancel),
        }
        let ended = end_lanes(self.members, self.running, self.inboxes);
        result.and(ended)?;
        Ok(self.lost.iter().map(|lost| !lost).collect())
    }

    fn await_all(&mut self) -> Result<(), AggregatorError> {
        for peer in 0..self.lost.len() {
            self.attach(peer)?;
        }
        let began = Instant::now();
        let mut until = self.upload.round_deadline.map(|deadline| began + deadline);
        let mut came = 0;
        while !self.is_over() {
            let notice = self.members.next(until)?;
            if matches!(notice, Notice::Timeout) {
                let last = std::mem::replace(&mut came, self.bytes_that_came());
                until = self.leave_stragglers(began, last < came)?;
                continue;
            }
            self.react(notice)?;
        }
        Ok(())
    }

    /// Whether the update of everyone who is not lost is here.
    fn is_over(&self) -> bool {
        (0..self.lost.len()).all(|peer| self.lost[peer] || self.is_whole(peer))
    }

    fn is_whole(&self, peer: usize) -> bool {
        // Of a model without bytes only the client's word tells that it uploads.
        let began = self.members.peers[peer].shared.began.load(Ordering::Acquire);
        began && self.whole.iter().all(|whole| whole[peer])
    }

    fn react(&mut self, notice: Notice) -> Result<(), AggregatorError> {
        match notice {
            Notice::Up(peer) => self.attach(peer),
            // What has come of its bytes is still taken.
            Notice::Down(_) => Ok(()),
            Notice::Gone(peer, fault) => self.lose(peer, fault),
            Notice::Message(peer, message) => self.hear(peer, message),
            Notice::Receive(lane, report) => self.note(lane, report),
            Notice::Lane(result) => {
                self.running -= 1;
                Err(result.err().unwrap_or(LaneError::Cancelled).into())
            }
            // Of the broadcast before.
            Notice::Send(_) | Notice::Warm(_) | Notice::Timeout => Ok(()),
        }
    }

    fn order(&self, order: impl Fn() -> ReceiveOrder) {
        self.inboxes.iter().for_each(|inbox| inbox.put(order()));
    }

    /// A client that is connected shall send what is missing.
    fn attach(&mut self, peer: usize) -> Result<(), AggregatorError> {
        let Some(up) = self.members.peers[peer].up() else { return Ok(()) };
        if self.lost[peer] {
            return Ok(());
        }
        let (connection, doubted) = (up.id, up.doubted);
        let channels: Vec<_> = up.streams.iter().flatten().cloned().collect();
        if let Some(error) = channels.iter().find_map(|channel| channel.refuse_more().err()) {
            return self.break_off(peer, connection, error.into());
        }
        let round = self.clock.round;
        self.members.tell(peer, &AggregatorMessage::Upload { round });
        for (inbox, channel) in self.inboxes.iter().zip(channels) {
            inbox.put(ReceiveOrder::Attach { peer, connection, channel, doubted });
        }
        Ok(())
    }

    fn break_off(
        &mut self,
        peer: usize,
        connection: crate::lane::ConnectionId,
        fault: Fault,
    ) -> Result<(), AggregatorError> {
        match self.members.drop_connection(peer, connection, fault) {
            Some(notice) => self.react(notice),
            None => Ok(()),
        }
    }

    fn hear(&mut self, peer: usize, message: ClientMessage) -> Result<(), AggregatorError> {
        match message {
            // Whether it was due has been checked where it was read.
            ClientMessage::Uploading { .. } => {
                self.clock.begin();
                Ok(())
            }
            message => {
                let what = match message {
                    ClientMessage::Received { .. } => "a confirmation",
                    _ => "a message",
                };
                let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
                self.break_off(peer, connection, unexpected(what))
            }
        }
    }

    fn note(&mut self, lane: usize, report: ReceiveReport) -> Result<(), AggregatorError> {
        match report {
            ReceiveReport::Whole { peer, lost } => {
                // Said before the lane knew that others are lost, it may be true no more.
                self.whole[lane][peer] |= lost == self.losses[lane];
                Ok(())
            }
            ReceiveReport::Broken { peer, connection, error } => {
                let fault = self.name_fault(error);
                self.break_off(peer, connection, fault)
            }
            ReceiveReport::Want { peer, connection, chunks } => {
                self.whole[lane][peer] = false;
                let stream = lane as u32;
                self.ask(peer, connection, &chunks, |chunks| AggregatorMessage::Want {
                    stream,
                    chunks,
                });
                match &self.members.peers[peer].link {
                    super::members::Link::Gone { why } if !self.lost[peer] => {
                        let reason = why.clone();
                        self.lose(peer, Fault::GaveUp { reason })
                    }
                    _ => Ok(()),
                }
            }
            ReceiveReport::Prove { peer, connection, chunks } => {
                self.whole[lane][peer] = false;
                let stream = lane as u32;
                self.ask(peer, connection, &chunks, |chunks| AggregatorMessage::Prove {
                    stream,
                    chunks,
                });
                Ok(())
            }
        }
    }

    /// Lanes know chunks; people know tensors.
    fn name_fault(&self, error: TransferError) -> Fault {
        let TransferError::Nonfinite { chunk, index } = error else { return error.into() };
        let chunk = self.chunks.get(chunk);
        let element_bytes = chunk.dtype.bitsize() as u64 / 8;
        let byte = chunk.bytes.start + index * element_bytes;
        let tensor = self.members.terms.manifest.tensor_at(byte);
        let name = tensor.map_or_else(String::new, |tensor| tensor.name.clone());
        let start = tensor.map_or(byte, |tensor| tensor.range.start);
        Fault::Nonfinite { tensor: name, index: (byte - start) / element_bytes }
    }

    fn ask(
        &self,
        peer: usize,
        connection: crate::lane::ConnectionId,
        chunks: &[std::ops::Range<usize>],
        wrap: impl Fn(Vec<ChunkRange>) -> AggregatorMessage,
    ) {
        if let Some(up) = self.members.peers[peer].up()
            && up.id == connection
        {
            // Who cannot be reached is found by the thread that reads from it.
            let _ = up.writer.send_ranges(chunks, wrap);
        }
    }

    /// A client is gone. What it has sent whole counts, as long as nobody needs it again.
    fn lose(&mut self, peer: usize, fault: Fault) -> Result<(), AggregatorError> {
        if self.lost[peer] {
            return Ok(());
        }
        if self.is_whole(peer) {
            tracing::warn!(
                "{}: {fault}; its update had come whole and counts",
                self.members.peers[peer].label()
            );
            return Ok(());
        }
        self.leave_out(peer);
        // What others are asked for again, those who are gone cannot send.
        for other in 0..self.lost.len() {
            if !self.lost[other] && self.members.peers[other].is_gone() {
                self.leave_out(other);
            }
        }
        self.check_quorum(Some((peer, fault)))
    }

    fn leave_out(&mut self, peer: usize) {
        self.lost[peer] = true;
        self.losses.iter_mut().for_each(|losses| *losses += 1);
        self.whole.iter_mut().for_each(|whole| whole.fill(false));
        self.order(|| ReceiveOrder::Lose { peer });
    }

    fn bytes_that_came(&self) -> u64 {
        let peers = self.members.peers.iter();
        peers.map(|peer| peer.shared.came.load(Ordering::Relaxed)).sum()
    }

    /// Goes on without those who are late, if enough others are there. Where clients take turns, those
    /// who wait for a late one are not late themselves: they get time as long as their bytes come,
    /// but not longer than they had. Gives when to look again.
    fn leave_stragglers(
        &mut self,
        began: Instant,
        moves: bool,
    ) -> Result<Option<Instant>, AggregatorError> {
        let deadline = self.upload.round_deadline.unwrap_or_default();
        let seconds = deadline.as_secs_f64();
        let is_late = |peer: &usize| !self.lost[*peer] && !self.is_whole(*peer);
        let mut late: Vec<usize> = (0..self.lost.len()).filter(is_late).collect();
        let takes_turns = self.upload.order == crate::lane::receive::Order::Client;
        if takes_turns && began.elapsed() < 2 * deadline + limits::LAST_WORDS {
            let again = Some(Instant::now() + limits::LAST_WORDS);
            if moves && began.elapsed() > deadline + limits::LAST_WORDS {
                return Ok(again);
            }
            late.retain(|&peer| self.is_awaited(peer));
            self.leave_late(late, seconds)?;
            return Ok(again);
        }
        self.leave_late(late, seconds)?;
        Ok(None)
    }

    /// Whether some lane has nothing of a client's to take.
    fn is_awaited(&self, peer: usize) -> bool {
        let Some(up) = self.members.peers[peer].up() else { return true };
        let lanes = self.whole.iter().zip(up.streams.iter().flatten());
        lanes.filter(|(whole, _)| !whole[peer]).any(|(_, channel)| channel.unread_bytes() == 0)
    }

    fn leave_late(&mut self, late: Vec<usize>, seconds: f64) -> Result<(), AggregatorError> {
        for peer in late {
            let fault = || Fault::TooLate { seconds };
            let label = self.members.peers[peer].label();
            self.leave_out(peer);
            self.check_quorum(Some((peer, fault())))?;
            tracing::warn!("{label}: {}; the round goes on without it", fault());
            let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
            // It may come back for the next round.
            if let Some(Notice::Gone(..)) = self.members.drop_connection(peer, connection, fault())
            {
                self.members.dismiss(peer, &fault());
            }
        }
        Ok(())
    }

    fn check_quorum(&self, last: Option<(usize, Fault)>) -> Result<(), AggregatorError> {
        let left = self.lost.iter().filter(|&&lost| !lost).count();
        if left >= self.upload.min_clients {
            if let Some((peer, fault)) = last {
                let label = self.members.peers[peer].label();
                tracing::warn!("{label}: {fault}; the round goes on with {left} clients");
            }
            return Ok(());
        }
        match last {
            Some((peer, fault)) => Err(self.members.peers[peer].fault(fault)),
            None => Err(AggregatorError::Quorum { left, wanted: self.upload.min_clients }),
        }
    }
}

/// Waits until all lanes have ended; the first error that one ended with.
fn end_lanes<T>(
    members: &mut Members,
    mut running: usize,
    inboxes: &[Inbox<T>],
) -> Result<(), AggregatorError> {
    let mut failure = Ok(());
    while running > 0 {
        // Nobody is dismissed here: what happens to connections is for whoever uses them next.
        match members.events.recv() {
            Ok(Event::Lane { result }) => {
                running -= 1;
                if let Err(error) = result
                    && failure.is_ok()
                {
                    inboxes.iter().for_each(Inbox::cancel);
                    failure = Err(AggregatorError::from(error));
                }
            }
            // Of lanes that nobody runs any more.
            Ok(Event::Received { .. } | Event::SendBroken(_)) => {}
            Ok(event) => members.put_off(event),
            Err(_) => break,
        }
    }
    failure
}

/// How the model is sent.
struct Broadcast {
    /// Whose updates are in the model; nobody's in the initial one.
    counted: Vec<bool>,
    round: u32,
    digest: [u8; 32],
    kind: SendKind,
    min_clients: usize,
}

impl Broadcast {
    /// Sends `source` to all clients. Gives how many have it.
    fn run(
        &self,
        lanes: &Lanes,
        members: &mut Members,
        source: &RegionSource<'_>,
        sums: &[u64],
    ) -> Result<usize, AggregatorError> {
        let shared: Vec<Arc<PeerShared>> =
            members.peers.iter().map(|peer| peer.shared.clone()).collect();
        shared.iter().for_each(|shared| shared.sent.store(0, Ordering::Relaxed));
        let inboxes: Vec<Inbox<SendOrder>> =
            lanes.signals.iter().map(|signal| Inbox::new(signal.clone())).collect();
        std::thread::scope(|scope| {
            let stall = Some(members.terms.deadline / 2);
            for inbox in &inboxes {
                let (shared, kind) = (&shared, self.kind);
                let (sender, ended) = (members.sender.clone(), members.sender.clone());
                let work = move || {
                    let streams = shared.iter().map(|s| Outgoing::new(kind, &s.sent, stall));
                    // The session holds the other end while lanes run.
                    let report = |broken| drop(sender.send(Event::SendBroken(broken)));
                    let sending = Sending {
                        source,
                        chunks: &lanes.chunks,
                        announce: None,
                        inbox,
                        report: &report,
                    };
                    send(streams.collect(), sending)
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane { result })));
            }
            let mut broadcasting = Broadcasting {
                broadcast: self,
                lanes,
                inboxes: &inboxes,
                sums,
                moved: shared.iter().map(|_| Moved::default()).collect(),
                running: inboxes.len(),
                members,
            };
            broadcasting.run()
        })
    }
}

/// How far a client's download is.
#[derive(Default)]
struct Moved {
    /// Bytes that its kernel has taken.
    bytes: u64,
    /// Since when.
    since: Option<Instant>,
}

/// A broadcast that is under way.
struct Broadcasting<'a> {
    broadcast: &'a Broadcast,
    lanes: &'a Lanes,
    inboxes: &'a [Inbox<SendOrder>],
    sums: &'a [u64],
    moved: Vec<Moved>,
    running: usize,
    members: &'a mut Members,
}

impl Broadcasting<'_> {
    fn run(&mut self) -> Result<usize, AggregatorError> {
        let result = self.await_all();
        match &result {
            Ok(()) => self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Finish)),
            Err(_) => self.inboxes.iter().for_each(Inbox::cancel),
        }
        let ended = end_lanes(self.members, self.running, self.inboxes);
        result.and(ended)?;
        Ok(self.members.peers.iter().filter(|peer| self.has_it(peer)).count())
    }

    fn has_it(&self, peer: &super::members::Peer) -> bool {
        peer.holds == Some(self.broadcast.round)
    }

    fn await_all(&mut self) -> Result<(), AggregatorError> {
        for index in 0..self.members.peers.len() {
            let peer = &mut self.members.peers[index];
            peer.holds = None;
            self.attach(index)?;
        }
        while self.members.peers.iter().any(|peer| !peer.is_gone() && !self.has_it(peer)) {
            let notice = self.members.next(Some(Instant::now() + limits::MIN_DEADLINE))?;
            self.react(notice)?;
            self.check_progress()?;
        }
        Ok(())
    }

    fn react(&mut self, notice: Notice) -> Result<(), AggregatorError> {
        match notice {
            Notice::Up(peer) => {
                self.tell_of_round(peer);
                self.attach(peer)
            }
            Notice::Down(peer) => {
                self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Detach { peer }));
                Ok(())
            }
            Notice::Gone(peer, fault) => self.lose(peer, fault),
            Notice::Message(peer, message) => {
                let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
                match self.hear(peer, message) {
                    Ok(()) => Ok(()),
                    Err(fault) => self.break_off(peer, connection, fault),
                }
            }
            Notice::Send(broken) => {
                self.break_off(broken.peer, broken.connection, broken.error.into())
            }
            Notice::Lane(result) => {
                self.running -= 1;
                Err(result.err().unwrap_or(LaneError::Cancelled).into())
            }
            // Of the upload before.
            Notice::Receive(..) | Notice::Warm(_) | Notice::Timeout => Ok(()),
        }
    }

    /// A client that comes back may not have heard that the round is over.
    fn tell_of_round(&self, peer: usize) {
        // A process that began again has asked nothing.
        let asks = self.members.peers[peer].up().is_some_and(|up| !up.doubted);
        if let Some(&counted) = self.broadcast.counted.get(peer).filter(|_| asks) {
            let round = self.broadcast.round;
            self.members.tell(peer, &AggregatorMessage::Applied { round, counted });
        }
    }

    /// A client that is connected hears of the model, and will ask for what it has not.
    fn attach(&mut self, peer: usize) -> Result<(), AggregatorError> {
        let Some(up) = self.members.peers[peer].up() else { return Ok(()) };
        let connection = up.id;
        let channels: Vec<_> = up.streams.iter().flatten().cloned().collect();
        for (inbox, channel) in self.inboxes.iter().zip(channels) {
            inbox.put(SendOrder::Attach { peer, connection, channel });
        }
        let (round, digest) = (self.broadcast.round, self.broadcast.digest);
        self.moved[peer] = Moved { bytes: 0, since: Some(Instant::now()) };
        self.members.tell(peer, &AggregatorMessage::Download { round, digest });
        Ok(())
    }

    fn hear(&mut self, peer: usize, message: ClientMessage) -> Result<(), Fault> {
        match message {
            ClientMessage::Received { round, digest } if round == self.broadcast.round => {
                if digest != self.broadcast.digest {
                    return Err(Fault::Digest);
                }
                self.members.peers[peer].holds = Some(round);
                Ok(())
            }
            ClientMessage::Received { .. } => Err(unexpected("a confirmation")),
            ClientMessage::Want { stream, chunks } => self.send(peer, stream, &chunks, false),
            ClientMessage::Prove { stream, chunks } => self.send(peer, stream, &chunks, true),
            // The last bytes may be here before the word that they come.
            ClientMessage::Uploading { round } if round == self.broadcast.round => Ok(()),
            _ => Err(unexpected("a message")),
        }
    }

    fn send(
        &mut self,
        peer: usize,
        stream: u32,
        wanted: &[ChunkRange],
        sums_only: bool,
    ) -> Result<(), Fault> {
        let lane = self.lanes.ranges.get(stream as usize);
        let (Some(lane), Some(inbox)) = (lane, self.inboxes.get(stream as usize)) else {
            return Err(Fault::Control(ProtocolError::Stream { stream }.into()));
        };
        let ranges = wanted.iter().map(|range| range.within(lane));
        let Some(chunks) = ranges.collect::<Option<Vec<_>>>() else {
            return Err(Fault::Control(ProtocolError::Chunks { stream }.into()));
        };
        if let Some(up) = self.members.peers[peer].up() {
            for range in &chunks {
                let sums = &self.sums[range.clone()];
                let wrap = |first, sums| AggregatorMessage::Sums { first, sums };
                // Who cannot be reached is found by the thread that reads from it.
                let _ = up.writer.send_sums(range.start, sums, wrap);
            }
        }
        if !sums_only {
            inbox.put(SendOrder::Send { peer, chunks, sums_only });
        }
        Ok(())
    }

    fn break_off(
        &mut self,
        peer: usize,
        connection: crate::lane::ConnectionId,
        fault: Fault,
    ) -> Result<(), AggregatorError> {
        match self.members.drop_connection(peer, connection, fault) {
            Some(notice) => self.react(notice),
            None => Ok(()),
        }
    }

    fn lose(&mut self, peer: usize, fault: Fault) -> Result<(), AggregatorError> {
        self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Detach { peer }));
        let left = self.members.peers.iter().filter(|peer| !peer.is_gone()).count();
        if left < self.broadcast.min_clients {
            return Err(self.members.peers[peer].fault(fault));
        }
        let label = self.members.peers[peer].label();
        tracing::warn!("{label}: {fault}; it has not got the model");
        Ok(())
    }

    /// Finds clients that neither take bytes nor confirm, as long as saving them may take on a slow
    /// disk.
    fn check_progress(&mut self) -> Result<(), AggregatorError> {
        let model_bytes = self.members.terms.manifest.data_bytes();
        let saving = Duration::from_secs(model_bytes / limits::SLOWEST_DISK_BYTES_S);
        let patience = self.members.terms.deadline + saving;
        for index in 0..self.members.peers.len() {
            let peer = &self.members.peers[index];
            let Some(up) = peer.up().filter(|_| !self.has_it(peer)) else { continue };
            // The last bytes may be on their way for long after our socket has taken them.
            let held: u64 = up.streams.iter().flatten().map(|c| c.unacknowledged_bytes()).sum();
            let taken = peer.shared.sent.load(Ordering::Relaxed).saturating_sub(held);
            let moved = &mut self.moved[index];
            if taken != moved.bytes || moved.since.is_none() {
                *moved = Moved { bytes: taken, since: Some(Instant::now()) };
            } else if moved.since.is_some_and(|since| since.elapsed() > patience) {
                let (id, seconds) = (up.id, patience.as_secs_f64().ceil() as u64);
                self.break_off(index, id, Fault::Unconfirmed { seconds })?;
            }
        }
        Ok(())
    }
}

impl PeerShared {
    fn lane<'s>(&'s self, lane: usize, updates: UpdatePolicy, base: Base<'s>) -> Shared<'s> {
        let sums = self.sums.get().expect("set before the session begins").lane(lane);
        let inspection = match base {
            Base::Unseen => None,
            Base::Model(model) => Some(model),
        };
        let inspection = inspection.zip(self.findings.get()).map(|(model, findings)| Inspection {
            on_nonfinite: updates.on_nonfinite,
            wants_norm: updates.clip_norm.is_some(),
            model,
            findings,
        });
        Shared { sums, began: &self.began, moved: &self.came, inspection }
    }
}
