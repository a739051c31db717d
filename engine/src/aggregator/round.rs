//! One round: updates come in and are averaged, the model goes out.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Session;
use super::broadcast::Broadcast;
use super::config::Averaging;
use super::keep::{Kept, LEFT_OUT_BEFORE, lane_ledgers};
use super::lanes::{Begun, Lanes, Model, Regions, Sizes};
use super::loss::{OnLoss, Prospect};
use super::members::Peer;
use super::upload::{Base, UploadClock};
use crate::error::{AggregatorError, Fault, LaneError};
use crate::lane::start_lane;
use crate::manifest::Manifest;
use crate::meter::{Meter, Phase};
use crate::named::Named;
use crate::paths::SendKind;
use crate::reducer::{AccumulatorLayout, ClipBase, Norm, Weights, clean, inspect};
use crate::region::Region;
use crate::sink::Sink;
use crate::sink::discard::DiscardSink;
use crate::sink::mean::{MeanSink, Wave};
use crate::source::Source;
use crate::source::region::RegionSource;
use crate::state::ModelRecord;
use crate::verdict::{Findings, OnNonfinite, Place, Rejection, UpdateReport, Verdict};
use crate::wire::checksum::model_digest;

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
        self.check_model(manifest, region.bytes())?;
        let sums = self.sums_of(&region);
        self.model = Some(Model { region, sums });
        self.broadcast()
    }

    /// Whether a model of these bytes can be sent: it has the session's layout and, where updates are
    /// clipped, no element that is NaN or infinite. No norm can be measured from that, and a mean
    /// with a clipped update in it would not be finite either.
    ///
    /// # Errors
    /// [`AggregatorError::Initial`] and [`AggregatorError::Nonfinite`].
    pub fn check_model(&self, manifest: &Manifest, model: &[u8]) -> Result<(), AggregatorError> {
        self.check_initial(manifest)?;
        match self.upload.updates.clip_norm {
            Some(_) => self.check_finite(model),
            None => Ok(()),
        }
    }

    fn check_finite(&self, model: &[u8]) -> Result<(), AggregatorError> {
        let chunks = &self.lanes.chunks;
        let findings = Findings::new(chunks.len());
        for chunk in (0..chunks.len()).map(|index| chunks.get(index)) {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            findings.note(chunk.index, &inspect(chunk.dtype, &model[place], Norm::Skip)?);
        }
        match findings.so_far(self.manifest(), chunks).first_nonfinite {
            Some(Place { tensor, index }) => Err(AggregatorError::Nonfinite { tensor, index }),
            None => Ok(()),
        }
    }

    fn check_initial(&self, manifest: &Manifest) -> Result<(), AggregatorError> {
        match self.manifest().first_difference(manifest) {
            Some(difference) => Err(AggregatorError::Initial { difference }),
            None => Ok(()),
        }
    }

    fn sums_of(&self, region: &Region) -> Vec<u64> {
        self.lanes.sums_of(self.manifest(), region)
    }

    fn load(&mut self, source: &dyn Source) -> Result<(), AggregatorError> {
        self.check_initial(source.manifest())?;
        let mut region = self.pool.take(self.manifest().data_bytes())?;
        for chunk in (0..self.lanes.chunks.len()).map(|index| self.lanes.chunks.get(index)) {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            source.read(chunk.bytes.start, &mut region.bytes_mut().0[place])?;
        }
        self.check_model(source.manifest(), region.bytes())?;
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
        let spool = self.run_round()?;
        spool.into_iter().for_each(|region| self.pool.give_back(region));
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

    /// Names of the clients whose updates are not in the newest mean, and why each is not, in client order.
    pub fn left_out(&self) -> impl Iterator<Item = (&str, &str)> {
        let peers = self.members.peers.iter().zip(&self.counted);
        let left_out = peers.filter(|(_, counted)| !**counted);
        left_out.map(|(peer, _)| (peer.name.as_str(), peer.left_out.as_str()))
    }

    /// Gives the updates that were received whole.
    fn run_round(&mut self) -> Result<Vec<Region>, AggregatorError> {
        if self.tree.is_some() {
            let averaged = self.average_tree();
            return self.end_on_error(averaged).map(|()| Vec::new());
        }
        self.round += 1;
        let round = self.round;
        self.updates.clear();
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
        if received.is_err() {
            self.note_rejected();
        }
        let (model, spool) = self.end_on_error(received)?;
        self.model = model;
        let kept = self.keep_model();
        self.end_on_error(kept)?;
        base.and_then(Arc::into_inner).into_iter().for_each(|region| self.pool.give_back(region));
        for (peer, &counted) in self.counted.iter().enumerate() {
            self.members.tell_of_round(peer, round, counted);
        }
        Ok(spool)
    }

    /// A process that begins again shall find the mean.
    fn keep_model(&mut self) -> Result<(), AggregatorError> {
        let record = self.model_record();
        match (&mut self.kept, record) {
            (Some(kept), Some(record)) => kept.end_round(&self.counted, record),
            _ => Ok(()),
        }
    }

    /// Where the model is kept, if it is.
    fn model_record(&self) -> Option<ModelRecord> {
        let model = self.model.as_ref()?;
        let region = model.region.name()?.to_owned();
        Some(ModelRecord { region, digest: self.digest(model) })
    }

    fn digest(&self, model: &Model) -> [u8; 32] {
        let layout = self.manifest().layout_digest();
        model_digest(&layout, self.lanes.chunks.chunk_bytes(), &model.sums)
    }

    /// Whose updates are not expected from the start.
    pub(super) fn absent(&self) -> Vec<bool> {
        // Who came back too late for the last model cannot have trained on it.
        let lacks = |peer: &Peer| self.sent.is_some() && peer.holds != self.sent;
        let peers = self.members.peers.iter();
        peers.map(|peer| peer.is_gone() || lacks(peer)).collect()
    }

    pub(super) fn receive_updates(
        &mut self,
        base: Option<&[u8]>,
    ) -> Result<(Option<Model>, Vec<Region>), AggregatorError> {
        let round = self.round;
        // A mean may have elements that are not finite where they are kept.
        if let Some(base) = base.filter(|_| self.upload.updates.on_nonfinite == OnNonfinite::Keep) {
            self.check_finite(base)?;
        }
        let clock = UploadClock::start(round);
        let begun = self.begin_round()?;
        if let Some(kept) = &mut self.kept {
            kept.begin_round(round, &begun, base.is_some(), &self.pool)?;
        }
        let Begun { averaging, absent, lost, mut regions } = begun;
        self.averaging = averaging;
        let has_mean = self.lanes.layout.is_some();
        let mut sums = vec![0; if has_mean { self.lanes.chunks.len() } else { 0 }];
        self.start_peers();
        for (index, peer) in self.members.peers.iter_mut().enumerate() {
            if lost[index] && !absent[index] {
                peer.left_out = LEFT_OUT_BEFORE.into();
            }
        }
        let mut ledger = regions.ledger.take();
        let expected = lost.iter().filter(|&&lost| !lost).count();
        let place = (&mut regions, sums.as_mut_slice(), ledger.as_mut());
        self.counted = self.upload(averaging, (absent, lost), place, base, &clock)?;
        if let Some(kept) = &mut self.kept {
            kept.ledger = ledger;
        }
        let whole = self.counted.iter().filter(|&&counted| counted).count() as u64;
        let (wait, upload) = clock.stop(self.manifest().data_bytes() * whole);
        self.learn(expected, &upload);
        let factors = match averaging {
            Averaging::Streaming | Averaging::Spool => self.judge()?,
            _ => Vec::new(),
        };
        self.phases.extend([wait, upload.received_by(self.config.receive_path)]);
        if averaging == Averaging::Spool && !self.keeps_updates() {
            let meter = Meter::start("average", round);
            self.average(&mut regions, &mut sums, &factors, base)?;
            let updates = self.counted.iter().filter(|&&counted| counted).count() as u64;
            let phase = meter.stop(self.manifest().data_bytes() * updates);
            self.experience.average_bytes_s = phase.bytes as f64 / phase.seconds.max(1e-9);
            self.phases.push(phase);
        }
        let Regions { mut accumulator, model, spool, .. } = regions;
        let region = model.or_else(|| accumulator.take());
        accumulator.into_iter().for_each(|region| self.pool.give_back(region));
        Ok((region.map(|region| Model { region: Arc::new(region), sums }), spool))
    }

    /// Nothing has come from anybody in this round.
    pub(super) fn start_peers(&mut self) {
        for peer in &mut self.members.peers {
            peer.shared.start_round(self.round, self.ready);
            peer.begin_round();
        }
        self.ask_edges();
    }

    /// Begins a round, or goes on with the one that an earlier process began.
    fn begin_round(&mut self) -> Result<Begun, AggregatorError> {
        if let Some(begun) = self.kept.as_mut().and_then(Kept::take_begun) {
            return Ok(begun);
        }
        let edges = self.members.peers.iter().map(|peer| peer.shared.is_edge());
        // Edges send later.
        let absent = self.absent().into_iter().zip(edges).map(|(absent, edge)| absent || edge);
        let absent: Vec<bool> = absent.collect();
        let averaging = self.choose_averaging(&absent)?;
        let regions = self.take_regions(averaging)?;
        Ok(Begun { averaging, lost: absent.clone(), absent, regions })
    }

    /// Whether updates are averaged while they arrive, or when they are whole.
    fn choose_averaging(&mut self, lost: &[bool]) -> Result<Averaging, AggregatorError> {
        let Averaging::Streaming = self.config.averaging else { return Ok(self.config.averaging) };
        if self.keeps_updates() {
            return Ok(Averaging::Spool);
        }
        if self.ready {
            // Of an exchange, which has no rounds to learn from.
            return Ok(Averaging::Streaming);
        }
        if self.experience.lost > 0 {
            self.experience.measure()?;
        }
        let round = Prospect {
            clients: lost.iter().filter(|&&lost| !lost).count() as u64,
            model_bytes: self.manifest().data_bytes(),
            free_bytes: self.pool.available_bytes().saturating_add(self.pool.free_bytes()),
        };
        let choice = self.experience.choose(self.config.on_loss, round);
        let way = if choice.spools { OnLoss::Spool } else { OnLoss::Redo }.name();
        tracing::info!("round {}: on a loss {way}: {}", self.round, choice.why);
        if choice.spools {
            return Ok(Averaging::Spool);
        }
        if self.averaging == Averaging::Spool {
            // Others can use what the updates took.
            self.pool.trim();
        }
        Ok(Averaging::Streaming)
    }

    /// Remembers what the round has shown of losses and of speeds.
    fn learn(&mut self, expected: usize, upload: &Phase) {
        let lost = expected.saturating_sub(self.counted.iter().filter(|&&came| came).count());
        self.experience.expected += expected as u64;
        self.experience.lost += lost as u64;
        self.experience.upload_bytes_s = upload.bytes as f64 / upload.seconds.max(1e-9);
        let came = |peer: &Peer| peer.shared.came.load(Ordering::Relaxed);
        let came: u64 = self.members.peers.iter().map(came).sum();
        if lost > 0 && came > upload.bytes {
            let (round, again) = (self.round, came - upload.bytes);
            tracing::info!(
                "round {round}: {again} bytes came in vain: of {lost} lost clients, and what others sent again"
            );
        }
    }

    /// Receives everyone's update into the regions. Gives whose have come whole.
    fn upload(
        &mut self,
        averaging: Averaging,
        (absent, lost): (Vec<bool>, Vec<bool>),
        (regions, sums, ledger): (&mut Regions, &mut [u64], Option<&mut Region>),
        base: Option<&[u8]>,
        clock: &UploadClock,
    ) -> Result<Vec<bool>, AggregatorError> {
        let shared: Vec<_> = self.members.peers.iter().map(|peer| peer.shared.clone()).collect();
        let mut ledgers = lane_ledgers(ledger, &self.lanes, &shared, &lost, self.round);
        let (upload, lanes) = (&self.upload, &self.lanes);
        let seen = Base::Model(base);
        let people = (&mut self.members, &mut self.kept);
        match averaging {
            Averaging::Streaming => {
                let mut weights = Weights::new(&people.0.examples(&absent))?;
                // As an earlier process did it: its sums have these weights.
                for peer in (0..lost.len()).filter(|&peer| lost[peer] && !absent[peer]) {
                    weights.lose(peer)?;
                }
                // In a tree sums stay sums.
                let wave = self.tree.as_ref().map(|_| Wave { carry: None });
                let sinks = lanes.mean_sinks(&weights, &lost, regions, sums, wave)?;
                let sinks = sinks.into_iter().map(|sink| sink.noting(ledgers.next())).collect();
                upload.run(lanes, people, sinks, lost, seen, clock)
            }
            Averaging::Spool => {
                let sinks = lanes.region_sinks(&mut regions.spool).into_iter();
                let sinks = sinks.map(|sink| sink.noting(ledgers.next())).collect();
                upload.run(lanes, people, sinks, lost, seen, clock)
            }
            Averaging::Wave => {
                let (weights, wave, accumulator) =
                    self.wave.take().ok_or_else(|| std::io::Error::other("no sums"))?;
                regions.accumulator = Some(accumulator);
                let sinks = lanes.mean_sinks(&weights, &lost, regions, sums, Some(wave))?;
                let counted = upload.run(lanes, people, sinks, lost, Base::Unseen, clock)?;
                regions.spool = regions.accumulator.take().into_iter().collect();
                Ok(counted)
            }
            Averaging::Keep => {
                let sinks = lanes.region_sinks(&mut regions.spool);
                upload.run(lanes, people, sinks, lost, Base::Unseen, clock)
            }
            Averaging::Checksum | Averaging::Discard => {
                let checks = averaging == Averaging::Checksum;
                let sinks = lanes.ranges.iter().map(|_| DiscardSink { checks }).collect();
                upload.run(lanes, people, sinks, lost, Base::Unseen, clock)
            }
        }
    }

    /// Says what is done with each update that has come, and leaves out those that are rejected. Gives
    /// the factors that they are clipped with.
    fn judge(&mut self) -> Result<Vec<f64>, AggregatorError> {
        let mut factors = vec![1.0; self.counted.len()];
        for (index, factor) in factors.iter_mut().enumerate() {
            self.updates.extend(self.rejected_early(index));
            let peer = &self.members.peers[index];
            let is_judged = self.counted[index] && !peer.shared.is_edge();
            let Some(findings) = peer.shared.findings.get().filter(|_| is_judged) else {
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
                self.members.peers[index].left_out = fault.to_string();
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

    /// A round that ends with an error still says what was found in the updates.
    pub(super) fn note_rejected(&mut self) {
        if self.updates.is_empty() {
            let peers = 0..self.members.peers.len();
            self.updates = peers.filter_map(|index| self.rejected_early(index)).collect();
        }
    }

    /// The report of an update that is not in the mean because it was rejected while it came.
    fn rejected_early(&self, index: usize) -> Option<UpdateReport> {
        let policy = &self.upload.updates;
        let rejects = policy.on_nonfinite == OnNonfinite::Reject;
        if !rejects || self.averaging != Averaging::Streaming {
            return None;
        }
        let peer = &self.members.peers[index];
        let summary = peer.shared.findings.get()?.so_far(self.manifest(), &self.lanes.chunks);
        let name = peer.name.clone();
        (summary.nonfinite > 0).then(|| policy.report(name, self.round, peer.examples, summary))
    }

    /// Makes zero what is not finite in updates that were received whole.
    pub(super) fn clean(&self, spool: &mut [Region]) -> Result<(), AggregatorError> {
        let zeroed = self
            .updates
            .iter()
            .filter(|report| matches!(report.verdict, Verdict::Counted { zeroed: true, .. }));
        for report in zeroed {
            let of = |peer: &Peer| peer.name == report.client;
            let Some(index) = self.members.peers.iter().position(of) else { continue };
            for chunk in (0..self.lanes.chunks.len()).map(|index| self.lanes.chunks.get(index)) {
                let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                clean(chunk.dtype, &mut spool[index].bytes_mut().0[place])?;
            }
        }
        Ok(())
    }

    /// Averages what was spooled, one update after the other, as is usual. `base` is the model that
    /// clipped updates are changes of.
    fn average(
        &mut self,
        regions: &mut Regions,
        sums: &mut [u64],
        factors: &[f64],
        base: Option<&[u8]>,
    ) -> Result<(), AggregatorError> {
        let mut spool = std::mem::take(&mut regions.spool);
        self.clean(&mut spool)?;
        let mut lost: Vec<bool> = self.counted.iter().map(|counted| !counted).collect();
        let clip_base = if base.is_some() { ClipBase::Model } else { ClipBase::Zero };
        let weights = Weights::clipped(&self.members.examples(&lost), factors, clip_base)?;
        let peers = lost.len();
        // The model is one more client where something is clipped.
        let model = base.filter(|_| weights.clients() > peers);
        lost.extend(model.map(|_| false));
        let Lanes { chunks, ranges, .. } = &self.lanes;
        let wave = self.tree.as_ref().map(|_| Wave { carry: None });
        let sinks = self.lanes.mean_sinks(&weights, &lost, regions, sums, wave)?;
        let work = |mut sink: MeanSink<'_>, range: Range<usize>| {
            let updates = spool.iter().map(|region| region.bytes()).chain(model);
            let counted = updates.enumerate().filter(|(peer, _)| !lost[*peer]);
            for (peer, update) in counted {
                for chunk in range.clone().map(|index| chunks.get(index)) {
                    let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                    let accepted = sink.add(peer, &chunk, &update[place]);
                    accepted.map_err(|error| LaneError::peer(peer, error))?;
                }
            }
            sink.end().map_err(|error| LaneError::peer(0, error))
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
        regions.spool = spool;
        Ok(results.iter().take(running).collect::<Result<(), LaneError>>()?)
    }

    fn take_regions(&mut self, averaging: Averaging) -> Result<Regions, AggregatorError> {
        let layout = self.lanes.layout.as_ref();
        let sizes = Sizes::new(&self.config, averaging, self.manifest(), layout);
        let take = |bytes: u64| self.pool.take(bytes);
        Ok(Regions {
            accumulator: sizes.accumulator.map(take).transpose()?,
            model: sizes.model.map(take).transpose()?,
            // Nothing whole comes from an edge.
            spool: sizes
                .spool
                .into_iter()
                .zip(&self.members.peers)
                .map(|(bytes, peer)| take(if peer.shared.is_edge() { 1 } else { bytes }))
                .collect::<Result<_, _>>()?,
            ledger: self.kept.as_mut().and_then(|kept| kept.ledger.take()),
        })
    }

    /// Sends the model to every client and waits until each has confirmed its digest.
    ///
    /// # Errors
    /// As [`Session::round`]. Without a model this does nothing.
    pub fn broadcast(&mut self) -> Result<(), AggregatorError> {
        let sent = self.send_model(self.upload.min_clients);
        self.end_on_error(sent)
    }

    /// Sends the model to those who have it not; at least `min_clients` must be left.
    pub(super) fn send_model(&mut self, min_clients: usize) -> Result<(), AggregatorError> {
        let Some(model) = &self.model else { return Ok(()) };
        let meter = Meter::start("broadcast", self.round);
        let manifest = &self.members.terms.manifest.clone();
        let chunk_bytes = self.lanes.chunks.chunk_bytes();
        let digest = self.digest(model);
        let source = RegionSource::new(manifest, &model.region, chunk_bytes, model.sums.clone());
        let kind = SendKind::choose(self.config.send_path, &source)?;
        let broadcast = Broadcast {
            counted: self.counted.clone(),
            round: self.round,
            digest,
            kind,
            min_clients,
            fold: None,
        };
        let confirmed = broadcast.run(&self.lanes, &mut self.members, &source, &model.sums)?;
        let phase = meter.stop(self.manifest().data_bytes() * confirmed as u64);
        self.phases.push(phase.sent_by(kind));
        (self.sent, self.unsent) = (Some(self.round), false);
        let record = self.model_record();
        match &mut self.kept {
            Some(kept) => kept.note_sent(self.round, &self.members.peers, record),
            None => Ok(()),
        }
    }

    /// When something ends the session, every client hears why.
    fn end_on_error<T>(&self, result: Result<T, AggregatorError>) -> Result<T, AggregatorError> {
        if let Err(error) = &result {
            self.give_up(&error.to_string());
        }
        result
    }
}
