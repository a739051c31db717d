//! One round: updates come in and are averaged, the model goes out.

use std::cell::OnceCell;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::gather::{refuse_late, unexpected};
use super::{AggregatorConfig, Averaging, Event, Model, Peer, Session, Sizes};
use crate::channel::DataChannel;
use crate::control::printable;
use crate::error::{AggregatorError, ControlError, Fault, LaneError, SinkError, TransferError};
use crate::lane::receive::{Incoming, Shared, receive};
use crate::lane::send::{Outgoing, send};
use crate::lane::start_lane;
use crate::limits;
use crate::manifest::Manifest;
use crate::meter::{Meter, Phase};
use crate::paths::SendKind;
use crate::reducer::{AccumulatorLayout, Weights};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::Sink;
use crate::sink::discard::DiscardSink;
use crate::sink::mean::{MeanSink, MeanSlices, Wave};
use crate::sink::region::{Part, RegionSink};
use crate::source::Source;
use crate::source::region::RegionSource;
use crate::wire::checksum::model_digest;
use crate::wire::message::{AggregatorMessage, ClientMessage};

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
        if let Some(difference) = self.manifest.first_difference(manifest) {
            return Err(AggregatorError::Initial { difference });
        }
        let sealed = RegionSource::seal(&self.manifest, &region, &self.chunks, self.lanes.len());
        let sums = sealed.into_sums();
        self.model = Some(Model { region, sums });
        self.broadcast()
    }

    fn load(&mut self, source: &dyn Source) -> Result<(), AggregatorError> {
        if let Some(difference) = self.manifest.first_difference(source.manifest()) {
            return Err(AggregatorError::Initial { difference });
        }
        let mut region = self.pool.take(self.manifest.data_bytes())?;
        for chunk in (0..self.chunks.len()).map(|index| self.chunks.get(index)) {
            let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
            source.read(chunk.bytes.start, &mut region.bytes_mut().0[place])?;
        }
        let sealed = RegionSource::seal(&self.manifest, &region, &self.chunks, self.lanes.len());
        let sums = sealed.into_sums();
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
        let sums = self.peers.get(client).and_then(|peer| peer.shared.sums.get());
        sums.map(|sums| sums.all(&self.lanes)).unwrap_or_default()
    }

    /// The model, and the checksums of its chunks. The session ends without a word.
    pub(crate) fn into_model(mut self) -> Option<(Arc<Region>, Vec<u64>)> {
        self.model.take().map(|model| (model.region, model.sums))
    }

    /// Runs one round: every client's update is received and averaged, and the mean becomes the
    /// model. [`Session::broadcast`] then sends it back.
    ///
    /// # Errors
    /// A client that dies, stalls or lies ends the session for all; the error names it.
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
        self.weights = weights;
        self.wave = Some((wave, accumulator));
        let sums = self.run_round()?.pop();
        sums.ok_or_else(|| std::io::Error::other("the sums are lost").into())
    }

    /// How the model's elements stand in an accumulator, if this session averages.
    pub(crate) fn layout(&self) -> Option<&AccumulatorLayout> {
        self.layout.as_ref()
    }

    /// Gives the updates that were received whole.
    fn run_round(&mut self) -> Result<Vec<Region>, AggregatorError> {
        self.round += 1;
        let round = self.round;
        // A client has confirmed the last model before it uploads, so its memory is free.
        let last = self.model.take();
        if let Some(region) = last.and_then(|model| Arc::into_inner(model.region)) {
            self.pool.give_back(region);
        }
        let received = self.receive_updates();
        let (model, staged) = self.end_on_error(received)?;
        self.model = model;
        let applied = self.tell_each(|_| AggregatorMessage::Applied { round });
        self.end_on_error(applied)?;
        Ok(staged)
    }

    fn receive_updates(&mut self) -> Result<(Option<Model>, Vec<Region>), AggregatorError> {
        let round = self.round;
        let clock = UploadClock::start(round);
        let mut regions = self.take_regions()?;
        let mut sums = vec![0; if self.layout.is_some() { self.chunks.len() } else { 0 }];
        for peer in &self.peers {
            peer.shared.start_round(round, self.ready);
        }
        self.tell_each(|_| AggregatorMessage::Upload { round })?;
        match self.config.averaging {
            Averaging::Streaming => self.stream(&mut regions, &mut sums, None, &clock)?,
            Averaging::Wave => {
                let (wave, accumulator) =
                    self.wave.take().ok_or_else(|| std::io::Error::other("no sums"))?;
                regions.accumulator = Some(accumulator);
                self.stream(&mut regions, &mut sums, Some(wave), &clock)?;
                regions.staged = regions.accumulator.take().into_iter().collect();
            }
            Averaging::Staged | Averaging::Keep => self.stage(&mut regions, &clock)?,
            Averaging::Checksum | Averaging::Discard => self.drop_updates(&clock)?,
        }
        self.watch(Some(&clock)).await_uploads()?;
        self.refuse_more()?;
        let bytes = self.manifest.data_bytes() * self.peers.len() as u64;
        let (wait, upload) = clock.stop(bytes);
        self.phases.extend([wait, upload.received_by(self.config.receive_path)]);
        if self.config.averaging == Averaging::Staged {
            let meter = Meter::start("average", round);
            self.average(&mut regions, &mut sums)?;
            self.phases.push(meter.stop(bytes));
        }
        let Regions { mut accumulator, model, staged } = regions;
        let region = model.or_else(|| accumulator.take());
        accumulator.into_iter().for_each(|region| self.pool.give_back(region));
        Ok((region.map(|region| Model { region: Arc::new(region), sums }), staged))
    }

    /// Averages while the bytes arrive.
    fn stream(
        &self,
        regions: &mut Regions,
        sums: &mut [u64],
        wave: Option<Wave>,
        clock: &UploadClock,
    ) -> Result<(), AggregatorError> {
        let sinks = self.mean_sinks(regions, sums, wave)?;
        let lanes = self.incoming_lanes(sinks)?;
        self.watch(Some(clock)).run(lanes)
    }

    /// Between transfers every data channel is empty.
    fn refuse_more(&self) -> Result<(), AggregatorError> {
        for peer in &self.peers {
            for channel in &peer.streams {
                channel.refuse_more().map_err(|error| peer.fault(error))?;
            }
        }
        Ok(())
    }

    /// Receives everything, every client's update into a region of its own.
    fn stage(&self, regions: &mut Regions, clock: &UploadClock) -> Result<(), AggregatorError> {
        let mut per_lane: Vec<Vec<Part<'_>>> = self.lanes.iter().map(|_| Vec::new()).collect();
        for region in &mut regions.staged {
            let position = region.position();
            let (mut rest, file) = region.bytes_mut();
            for (lane, parts) in self.lanes.iter().zip(&mut per_lane) {
                let range = self.chunks.bytes_of(lane);
                let (bytes, after) = rest.split_at_mut((range.end - range.start) as usize);
                rest = after;
                parts.push(Part { bytes, file, position, start: range.start });
            }
        }
        let sinks = per_lane.into_iter().map(RegionSink::new).collect();
        let lanes = self.incoming_lanes(sinks)?;
        self.watch(Some(clock)).run(lanes)
    }

    /// Averages what was staged, one update after the other, as is usual.
    fn average(&mut self, regions: &mut Regions, sums: &mut [u64]) -> Result<(), AggregatorError> {
        let staged = std::mem::take(&mut regions.staged);
        let chunks = &self.chunks;
        let sinks = self.mean_sinks(regions, sums, None)?;
        let lanes = sinks.into_iter().zip(&self.lanes).map(|(mut sink, range)| {
            let staged = &staged;
            move || {
                for (peer, region) in staged.iter().enumerate() {
                    for chunk in range.clone().map(|index| chunks.get(index)) {
                        let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                        let accepted = sink.add(peer, &chunk, &region.bytes()[place]);
                        accepted.map_err(|error| LaneError::peer(peer, error))?;
                    }
                }
                Ok(())
            }
        });
        let result = self.watch(None).run(lanes.collect());
        regions.staged = staged;
        result
    }

    /// Receives and drops.
    fn drop_updates(&self, clock: &UploadClock) -> Result<(), AggregatorError> {
        let checks = self.config.averaging == Averaging::Checksum;
        let sinks = self.lanes.iter().map(|_| DiscardSink { checks }).collect();
        let lanes = self.incoming_lanes(sinks)?;
        self.watch(Some(clock)).run(lanes)
    }

    fn mean_sinks<'s>(
        &'s self,
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
        for (lane, tiles) in self.lanes.iter().zip(&self.tiles) {
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
            sinks.push(MeanSink::new(&self.weights, layout, &self.chunks, lane, slices)?);
        }
        Ok(sinks)
    }

    fn incoming_lanes<'s, S: Sink + 's>(
        &'s self,
        sinks: Vec<S>,
    ) -> Result<Vec<impl FnOnce() -> Result<(), LaneError> + Send + 's>, LaneError> {
        let config = &self.config;
        let mut lanes = Vec::new();
        for (lane, mut sink) in sinks.into_iter().enumerate() {
            let mut streams = Vec::new();
            for (index, peer) in self.peers.iter().enumerate() {
                let shared = peer.shared.stream(lane);
                let channel = &peer.streams[lane];
                let deadline = Some(config.deadline);
                streams.push(Incoming::new(index, channel, config.receive_path, shared, deadline)?);
            }
            let (chunks, range, signal) =
                (&self.chunks, self.lanes[lane].clone(), &self.signals[lane]);
            let buffers = &self.buffers[lane];
            lanes.push(move || {
                let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
                receive(streams, chunks, range, config.order, &mut sink, &mut buffers, signal)?;
                sink.end().map_err(|error| LaneError::peer(0, error))
            });
        }
        Ok(lanes)
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
        let (round, chunk_bytes) = (self.round, self.chunks.chunk_bytes());
        let digest = model_digest(&self.manifest.layout_digest(), chunk_bytes, &model.sums);
        self.tell_each(|_| AggregatorMessage::Download { round, digest })?;
        for peer in &self.peers {
            peer.shared.sent.store(0, Ordering::Relaxed);
            for (stream, lane) in self.lanes.iter().enumerate() {
                let stream = stream as u32;
                let wrap = |sums| AggregatorMessage::Sums { stream, sums };
                let sent = peer.writer.send_sums(&model.sums[lane.clone()], wrap);
                sent.map_err(|error| peer.fault(error))?;
            }
        }
        let source =
            RegionSource::new(&self.manifest, &model.region, chunk_bytes, model.sums.clone());
        let kind = SendKind::choose(self.config.send_path, &source)?;
        let lanes = self.outgoing_lanes(&source, kind)?;
        let mut watch = self.watch(None);
        watch.confirmed = Some((round, digest, vec![false; self.peers.len()]));
        watch.run(lanes)?;
        watch.await_confirmations(self.manifest.data_bytes())?;
        self.refuse_more()?;
        let phase = meter.stop(self.manifest.data_bytes() * self.peers.len() as u64);
        self.phases.push(phase.sent_by(kind));
        Ok(())
    }

    fn outgoing_lanes<'s>(
        &'s self,
        source: &'s RegionSource<'s>,
        kind: SendKind,
    ) -> Result<Vec<impl FnOnce() -> Result<(), LaneError> + Send + 's>, LaneError> {
        let mut lanes = Vec::new();
        for (lane, range) in self.lanes.iter().enumerate() {
            let mut streams = Vec::new();
            for (index, peer) in self.peers.iter().enumerate() {
                let deadline = Some(self.config.deadline);
                let channel: &DataChannel = &peer.streams[lane];
                streams.push(Outgoing::new(index, channel, kind, &peer.shared.sent, deadline)?);
            }
            let (chunks, range, signal) = (&self.chunks, range.clone(), &self.signals[lane]);
            lanes.push(move || send(streams, source, chunks, range, None, signal));
        }
        Ok(lanes)
    }

    fn tell_each(
        &self,
        message: impl Fn(&Peer) -> AggregatorMessage,
    ) -> Result<(), AggregatorError> {
        for peer in &self.peers {
            peer.writer.send(&message(peer)).map_err(|error| peer.fault(error))?;
        }
        Ok(())
    }

    /// When something ends the session, every client hears why.
    fn end_on_error<T>(&self, result: Result<T, AggregatorError>) -> Result<T, AggregatorError> {
        let result = result.map_err(|error| self.watch(None).explain(error));
        if let Err(error) = &result {
            self.give_up(&error.to_string());
        }
        result
    }

    fn take_regions(&self) -> Result<Regions, AggregatorError> {
        let sizes = Sizes::new(&self.config, &self.manifest, self.layout.as_ref());
        let take = |bytes: u64| self.pool.take(bytes);
        Ok(Regions {
            accumulator: sizes.accumulator.map(take).transpose()?,
            model: sizes.model.map(take).transpose()?,
            staged: sizes.staged.into_iter().map(take).collect::<Result<_, _>>()?,
        })
    }

    fn watch<'s>(&'s self, clock: Option<&'s UploadClock>) -> Watch<'s> {
        Watch {
            config: &self.config,
            peers: &self.peers,
            signals: &self.signals,
            events: &self.events,
            sender: &self.sender,
            confirmed: None,
            clock,
        }
    }
}

/// The memory of one round; see [`Sizes`].
struct Regions {
    accumulator: Option<Region>,
    model: Option<Region>,
    staged: Vec<Region>,
}

/// Runs lanes, and meanwhile hears what the clients say.
struct Watch<'a> {
    config: &'a AggregatorConfig,
    peers: &'a [Peer],
    signals: &'a [Arc<Signal>],
    events: &'a Receiver<Event>,
    sender: &'a Sender<Event>,
    /// During a broadcast: its round and digest, and who has confirmed it.
    confirmed: Option<(u32, [u8; 32], Vec<bool>)>,
    /// During an upload.
    clock: Option<&'a UploadClock>,
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

impl Watch<'_> {
    fn run<L>(&mut self, lanes: Vec<L>) -> Result<(), AggregatorError>
    where
        L: FnOnce() -> Result<(), LaneError> + Send,
    {
        let mut running = lanes.len();
        let mut failure: Option<AggregatorError> = None;
        let mut cancelled = false;
        std::thread::scope(|scope| {
            for lane in lanes {
                let sender = self.sender.clone();
                start_lane(scope, lane, move |result| {
                    // The session holds the other end while lanes run.
                    let _ = sender.send(Event::Lane { result });
                });
            }
            while running > 0 {
                let Ok(event) = self.events.recv() else { break };
                running -= usize::from(matches!(event, Event::Lane { .. }));
                cancelled |= matches!(event, Event::Lane { result: Err(LaneError::Cancelled) });
                if let Err(error) = self.hear(event) {
                    self.signals.iter().for_each(|signal| signal.cancel());
                    failure = Some(match failure.take() {
                        Some(first) => first.or_its_reason(error),
                        None => error,
                    });
                }
            }
        });
        match failure {
            Some(error) => Err(error),
            // Only a session that has failed before has lanes that end at once.
            None if cancelled => Err(LaneError::Cancelled.into()),
            None => Ok(()),
        }
    }

    /// Waits until every client has said that it uploads: of a model without bytes nothing else tells.
    fn await_uploads(&mut self) -> Result<(), AggregatorError> {
        let began = |peer: &Peer| peer.shared.began.load(Ordering::Acquire);
        while !self.peers.iter().all(began) {
            let Ok(event) = self.events.recv() else { break };
            self.hear(event)?;
        }
        Ok(())
    }

    /// Waits until every client has saved the model, as long as that may take on a slow disk.
    fn await_confirmations(&mut self, model_bytes: u64) -> Result<(), AggregatorError> {
        let saving = Duration::from_secs(model_bytes / limits::SLOWEST_DISK_BYTES_S);
        let patience = self.config.deadline + saving;
        let mut until = Instant::now() + patience;
        let mut held = u64::MAX;
        while let Some(silent) = self.unconfirmed() {
            // The last bytes may be on their way for long after our socket has taken them.
            let still_held = self.held_bytes();
            if still_held < held {
                until = Instant::now() + patience;
            }
            held = still_held;
            match self.events.recv_timeout(limits::MIN_DEADLINE) {
                Ok(event) => self.hear(event)?,
                Err(_) if Instant::now() < until => {}
                Err(_) => {
                    let seconds = patience.as_secs_f64().ceil() as u64;
                    return Err(self.peers[silent].fault(Fault::Unconfirmed { seconds }));
                }
            }
        }
        Ok(())
    }

    /// Bytes of the model that our sockets still hold.
    fn held_bytes(&self) -> u64 {
        let channels = self.peers.iter().flat_map(|peer| &peer.streams);
        channels.map(DataChannel::unacknowledged_bytes).sum()
    }

    fn unconfirmed(&self) -> Option<usize> {
        let (_, _, who) = self.confirmed.as_ref()?;
        who.iter().position(|confirmed| !confirmed)
    }

    fn hear(&mut self, event: Event) -> Result<(), AggregatorError> {
        let (token, fault) = match event {
            Event::Lane { result: Ok(()) | Err(LaneError::Cancelled) } => return Ok(()),
            Event::Lane { result: Err(LaneError::Peer { peer, error }) } => {
                return Err(match error {
                    // Our memory and our disk are no client's fault.
                    TransferError::Region(error) => error.into(),
                    TransferError::Sink(error) => error.into(),
                    error => self.peers[peer].fault(error),
                });
            }
            Event::Lane { result: Err(error) } => return Err(error.into()),
            Event::Joined(joined) => {
                refuse_late(&joined.channel, joined.address, self.config.clients);
                return Ok(());
            }
            // Its ticket admits each stream once, and all are connected.
            Event::Stream { .. } => return Ok(()),
            Event::Warm { result } => return result.map(drop),
            Event::Lost { client, error } => (client, Fault::from(error)),
            Event::Message { client, message } => match self.understand(client, message) {
                Ok(()) => return Ok(()),
                Err(fault) => (client, fault),
            },
        };
        match self.peers.iter().find(|peer| peer.token == token) {
            Some(peer) => Err(peer.fault(fault)),
            None => Ok(()),
        }
    }

    fn understand(&mut self, token: usize, message: ClientMessage) -> Result<(), Fault> {
        match message {
            ClientMessage::Failed { reason } => Err(Fault::GaveUp { reason: printable(&reason) }),
            // Whether it was due has been checked where it was read.
            ClientMessage::Uploading { .. } => {
                self.clock.inspect(|clock| clock.begin());
                Ok(())
            }
            ClientMessage::Received { round, digest } => {
                let place = self.peers.iter().position(|peer| peer.token == token);
                match (&mut self.confirmed, place) {
                    (Some((expected, sent, who)), Some(place)) if *expected == round => {
                        who[place] = true;
                        if *sent == digest { Ok(()) } else { Err(Fault::Digest) }
                    }
                    _ => Err(unexpected("a confirmation")),
                }
            }
            _ => Err(unexpected("a message")),
        }
    }

    /// A connection that breaks is often only the first sign: the client's last words, or the end
    /// of its control channel, say more.
    fn explain(&mut self, error: AggregatorError) -> AggregatorError {
        let Some(client) = error.broken_client() else { return error };
        let patience = Instant::now() + limits::LAST_WORDS;
        while let Some(left) = patience.checked_duration_since(Instant::now()) {
            match self.events.recv_timeout(left.max(Duration::from_millis(1))) {
                Ok(event) => match self.hear(event) {
                    Err(AggregatorError::Client { client: who, error }) if who == client => {
                        return AggregatorError::Client { client: who, error };
                    }
                    _ => {}
                },
                Err(_) => break,
            }
        }
        error
    }
}

impl AggregatorError {
    /// The client whose connection broke, if that is all that is known.
    fn broken_client(&self) -> Option<&str> {
        match self {
            AggregatorError::Client {
                client,
                error:
                    Fault::Transfer(TransferError::Closed | TransferError::Io(_))
                    | Fault::Control(ControlError::Io(_)),
            } => Some(client),
            _ => None,
        }
    }

    /// What came later, if it says why this happened.
    fn or_its_reason(self, later: AggregatorError) -> AggregatorError {
        match (self.broken_client(), &later) {
            (Some(broken), AggregatorError::Client { client, .. })
                if client == broken && later.broken_client().is_none() =>
            {
                later
            }
            _ => self,
        }
    }
}

impl super::PeerShared {
    fn start_round(&self, round: u32, ready: bool) {
        if let Some(sums) = self.sums.get() {
            sums.clear();
        }
        self.began.store(ready, Ordering::SeqCst);
        self.came.store(0, Ordering::Relaxed);
        self.round.store(round, Ordering::SeqCst);
    }

    fn stream(&self, lane: usize) -> Shared<'_> {
        let sums = self.sums.get().expect("set before the session begins").stream(lane);
        Shared { sums, began: &self.began, moved: &self.came }
    }
}
