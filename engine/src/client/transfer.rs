//! A client's transfers: its update goes out, the model comes in. Lanes do the work; here their
//! connections come and go.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Client, Event, Lanes, Line, Notice, Target, Uploaded};
use crate::control::{Writer, printable};
use crate::error::{ClientError, LaneError, ProtocolError};
use crate::lane::receive::{
    Incoming, Order, ReceiveOrder, ReceiveReport, Receiving, Shared, receive,
};
use crate::lane::send::{Announce, Outgoing, SendOrder, Sending, send};
use crate::lane::{Inbox, start_lane};
use crate::meter::Meter;
use crate::paths::SendKind;
use crate::reducer::WeightScale;
use crate::region::Region;
use crate::sink::Sink;
use crate::sink::discard::DiscardSink;
use crate::sink::file::FileSink;
use crate::sink::region::{Part, RegionSink};
use crate::source::Source;
use crate::topology::tree::SumsReport;
use crate::wire::checksum::model_digest;
use crate::wire::message::{AggregatorMessage, ChunkRange, ClientMessage, WireSum};

/// Of a round that was over when the connection stood again.
const WENT_ON: &str = "the round went on while the connection was broken";

impl Client {
    /// Sends the update of `round` and waits until the round is over: says why the update is not in
    /// the mean, if it is not. Until then the source's bytes must not change. A connection that breaks
    /// is resumed.
    ///
    /// # Errors
    /// A source of another layout, one that cannot be read, or an aggregator that ends.
    pub fn upload(
        &mut self,
        round: u32,
        source: &dyn Source,
    ) -> Result<Option<String>, ClientError> {
        match self.upload_either(round, source, None)? {
            Uploaded::Applied { left_out } => Ok(left_out),
            Uploaded::Again => Err(self.unexpected("a message")),
        }
    }

    /// Of an edge: says whose updates it has, before it sends their sums.
    pub(crate) fn report(&mut self, round: u32, report: &SumsReport) {
        self.uploaded = round;
        report.messages(round).iter().for_each(|message| self.line.tell(message));
    }

    /// As [`Client::upload`] of an edge, with what it says of its sums.
    pub(crate) fn upload_sums(
        &mut self,
        round: u32,
        source: &dyn Source,
        report: &Reported<'_>,
    ) -> Result<Uploaded, ClientError> {
        self.upload_either(round, source, Some(report))
    }

    fn upload_either(
        &mut self,
        round: u32,
        source: &dyn Source,
        report: Option<&Reported<'_>>,
    ) -> Result<Uploaded, ClientError> {
        let lanes = report.and(self.sums.as_ref()).unwrap_or(&self.lanes);
        if let Some(difference) = lanes.manifest.first_difference(source.manifest()) {
            return Err(ClientError::Model { difference });
        }
        let kind = SendKind::choose(self.config.send_path, source)?;
        let meter = Meter::start("upload", round);
        self.uploaded = round;
        self.line.shared.sent.store(0, Ordering::Relaxed);
        let known = source.checksums(lanes.chunks.chunk_bytes());
        let shared = self.line.shared.clone();
        let line = &mut self.line;
        let inboxes = inboxes(lanes);
        // Whom lanes announce checksums to: the newest connection.
        let writer = Mutex::new(line.link.as_ref().map(|link| link.writer.clone()));
        let uploaded = std::thread::scope(|scope| {
            for inbox in &inboxes {
                let (shared, writer) = (&shared, &writer);
                let (sender, ended) = (line.sender.clone(), line.sender.clone());
                let work = move || {
                    let announce = |first: usize, sums: Vec<u64>| {
                        let now = writer.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        let Some(writer) = now else { return Ok(()) };
                        announce(&writer, first, &sums)
                    };
                    let announce: Option<Announce<'_>> =
                        if known.is_none() { Some(&announce) } else { None };
                    // No deadline: an aggregator that lives may have reasons to read others first.
                    let stream = Outgoing::new(kind, &shared.sent, None);
                    // This client holds the other end while lanes run.
                    let report = |broken| drop(sender.send(Event::SendBroken(broken)));
                    let report = &report;
                    let sending =
                        Sending { source, chunks: &lanes.chunks, announce, inbox, report };
                    send(vec![stream], sending)
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane(result))));
            }
            let running = inboxes.len();
            let mut uploading = Uploading {
                round,
                lanes,
                line,
                inboxes: &inboxes,
                known,
                writer: &writer,
                report,
                running,
            };
            uploading.run()
        })?;
        self.phases.push(meter.stop(lanes.manifest.data_bytes()).sent_by(kind));
        Ok(uploaded)
    }

    /// Receives the model of `round` into `target` and checks every chunk and the digest of the
    /// whole. [`Client::confirm`] tells the aggregator when it is safe. A connection that breaks
    /// is resumed.
    ///
    /// # Errors
    /// Bytes that do not match, a target that fails or is a region of another size than the model,
    /// or an aggregator that ends.
    pub fn download(
        &mut self,
        round: u32,
        digest: [u8; 32],
        target: Target<'_>,
    ) -> Result<(), ClientError> {
        let meter = Meter::start("download", round);
        self.line.shared.came.store(0, Ordering::Relaxed);
        let ranges = self.lanes.ranges.clone();
        match target {
            Target::Check => {
                let sinks = ranges.iter().map(|_| DiscardSink { checks: true }).collect();
                self.receive_model(round, digest, sinks, false)?;
            }
            Target::File(file) => {
                let sinks = ranges.iter().map(|_| FileSink::new(file)).collect();
                self.receive_model(round, digest, sinks, false)?;
            }
            Target::Region(region) => {
                let sinks = region_sinks(&self.lanes, region)?;
                self.receive_model(round, digest, sinks, false)?;
            }
        }
        if self.received_digest() != digest {
            return Err(ClientError::Digest { address: self.line.address.clone() });
        }
        let phase = meter.stop(self.lanes.manifest.data_bytes());
        self.phases.push(phase.received_by(self.config.receive_path));
        Ok(())
    }

    /// Receives the sums that an edge is to begin from into `region`, and confirms them.
    pub(crate) fn download_sums(
        &mut self,
        round: u32,
        digest: [u8; 32],
        region: &mut Region,
    ) -> Result<(), ClientError> {
        let unexpected = |line: &Line| line.unexpected("sums");
        let lanes = self.sums.as_ref().ok_or_else(|| unexpected(&self.line))?;
        let meter = Meter::start("begin from", round);
        self.line.shared.came.store(0, Ordering::Relaxed);
        let sinks = region_sinks(lanes, region)?;
        let (layout, bytes) = (lanes.manifest.layout_digest(), lanes.manifest.data_bytes());
        let chunk_bytes = lanes.chunks.chunk_bytes();
        self.receive_model(round, digest, sinks, true)?;
        let sums = self.line.shared.seed.as_ref().map(|seed| seed.all()).unwrap_or_default();
        if model_digest(&layout, chunk_bytes, &sums) != digest {
            return Err(ClientError::Digest { address: self.line.address.clone() });
        }
        self.confirm_sums(round, digest);
        self.phases.push(meter.stop(bytes).received_by(self.config.receive_path));
        Ok(())
    }

    /// Tells the aggregator that the sums are here.
    pub(crate) fn confirm_sums(&self, round: u32, digest: [u8; 32]) {
        self.line.tell(&ClientMessage::Received { round, digest });
    }

    fn receive_model<S: Sink>(
        &mut self,
        round: u32,
        digest: [u8; 32],
        sinks: Vec<S>,
        is_seed: bool,
    ) -> Result<(), ClientError> {
        let shared = self.line.shared.clone();
        let lanes = self.sums.as_ref().filter(|_| is_seed).unwrap_or(&self.lanes);
        let line = &mut self.line;
        let (kind, inboxes) = (self.config.receive_path, inboxes(lanes));
        let stall = Some(Duration::from_millis(line.plan.deadline_ms) / 2);
        std::thread::scope(|scope| {
            for (lane, mut sink) in sinks.into_iter().enumerate() {
                let (shared, inbox) = (&shared, &inboxes[lane]);
                let (range, buffers) = (lanes.ranges[lane].clone(), &lanes.buffers[lane]);
                let (sender, ended) = (line.sender.clone(), line.sender.clone());
                let work = move || {
                    let seed = shared.seed.as_ref().filter(|_| is_seed);
                    let sums = seed.unwrap_or(&shared.sums).lane(lane);
                    let shared = Shared {
                        sums,
                        began: &shared.began,
                        moved: &shared.came,
                        inspection: None,
                    };
                    let stream = Incoming::new(kind, shared, stall, &range);
                    // This client holds the other end while lanes run.
                    let report = |report| drop(sender.send(Event::Received { lane, report }));
                    let receiving = Receiving {
                        chunks: &lanes.chunks,
                        range: range.clone(),
                        order: Order::Arrival,
                        inbox,
                        report: &report,
                    };
                    let mut buffers = buffers.lock().unwrap_or_else(PoisonError::into_inner);
                    receive(vec![stream], receiving, &mut sink, &mut buffers)
                };
                start_lane(scope, work, move |result| drop(ended.send(Event::Lane(result))));
            }
            let running = inboxes.len();
            let whole = vec![false; running];
            let inboxes = &inboxes;
            Downloading { round, digest, is_seed, line, inboxes, whole, running }.run()
        })
    }

    /// The checksums of the chunks that came, each of which matched.
    pub(crate) fn received_sums(&self) -> Vec<u64> {
        self.line.shared.sums.all()
    }

    pub(super) fn received_digest(&self) -> [u8; 32] {
        let layout = self.lanes.manifest.layout_digest();
        model_digest(&layout, self.lanes.chunks.chunk_bytes(), &self.received_sums())
    }
}

/// What an edge says of the sums that it sends.
pub(crate) struct Reported<'a> {
    /// Whose updates they hold.
    pub report: &'a SumsReport,
    /// Where they were made in turn: the scale of their weights, and the sums that they began from.
    pub fold: Option<(WeightScale, Option<[u8; 32]>)>,
}

/// Sinks of all lanes into a region of the size of what comes.
fn region_sinks<'s>(
    lanes: &Lanes,
    region: &'s mut Region,
) -> Result<Vec<RegionSink<'s>>, ClientError> {
    let bytes = region.bytes().len() as u64;
    let model_bytes = lanes.manifest.data_bytes();
    if bytes != model_bytes {
        return Err(ClientError::Size { bytes, model_bytes });
    }
    let position = region.position();
    let (mut rest, file) = region.bytes_mut();
    let mut sinks = Vec::new();
    for lane in &lanes.ranges {
        let range = lanes.chunks.bytes_of(lane);
        let (bytes, after) = rest.split_at_mut((range.end - range.start) as usize);
        rest = after;
        let part = Part { bytes, file, position, start: range.start };
        sinks.push(RegionSink::new(vec![part]));
    }
    Ok(sinks)
}

fn inboxes<T>(lanes: &Lanes) -> Vec<Inbox<T>> {
    lanes.signals.iter().map(|signal| Inbox::new(signal.clone())).collect()
}

fn announce(writer: &Writer, first: usize, sums: &[u64]) -> std::io::Result<()> {
    let wrap = |first, sums: Vec<WireSum>| ClientMessage::Sums { first, sums };
    let sent = writer.send_sums(first, sums, wrap);
    sent.map_err(|error| std::io::Error::other(error.to_string()))
}

/// Ends lanes after a transfer, and gives the transfer's result, or what a lane failed with.
fn end_lanes<T, R>(
    line: &mut Line,
    mut running: usize,
    inboxes: &[Inbox<T>],
    finish: impl Fn() -> T,
    result: Result<R, ClientError>,
) -> Result<R, ClientError> {
    match &result {
        Ok(_) => inboxes.iter().for_each(|inbox| inbox.put(finish())),
        Err(_) => inboxes.iter().for_each(Inbox::cancel),
    }
    let mut failure = Ok(());
    while running > 0 {
        match line.events.recv() {
            Ok(Event::Lane(ended)) => {
                running -= 1;
                failure = failure.and(ended);
                if failure.is_err() {
                    inboxes.iter().for_each(Inbox::cancel);
                }
            }
            // Of lanes that nobody runs any more.
            Ok(Event::Received { .. } | Event::SendBroken(_)) => {}
            // For whoever waits next.
            Ok(event) => line.put_off.push_back(event),
            Err(_) => break,
        }
    }
    let result = result?;
    failure.map_err(|error| line.lane_error(error))?;
    Ok(result)
}

/// An upload that is under way.
struct Uploading<'a> {
    round: u32,
    lanes: &'a Lanes,
    line: &'a mut Line,
    inboxes: &'a [Inbox<SendOrder>],
    /// The checksums of the source, where it knows them.
    known: Option<&'a [u64]>,
    writer: &'a Mutex<Option<std::sync::Arc<Writer>>>,
    /// Of an edge.
    report: Option<&'a Reported<'a>>,
    running: usize,
}

impl Uploading<'_> {
    fn run(&mut self) -> Result<Uploaded, ClientError> {
        let result = self.until_applied();
        end_lanes(self.line, self.running, self.inboxes, || SendOrder::Finish, result)
    }

    fn until_applied(&mut self) -> Result<Uploaded, ClientError> {
        self.attach();
        while let Some(wanted) = self.line.wanted.pop_front() {
            self.hear(wanted)?;
        }
        loop {
            match self.line.next()? {
                Notice::Message(AggregatorMessage::Applied { round, left_out })
                    if round == self.round =>
                {
                    let left_out = left_out.map(|why| printable(&why));
                    return Ok(Uploaded::Applied { left_out });
                }
                Notice::Message(AggregatorMessage::Fold { round, scale, seed })
                    if round == self.round && self.report.is_some() =>
                {
                    // Said again after an interruption, or because somebody behind this edge is lost.
                    if self.report.is_some_and(|said| said.fold == Some((scale, seed))) {
                        if let Some(digest) = seed {
                            self.line.tell(&ClientMessage::Received { round, digest });
                        }
                        continue;
                    }
                    self.line.early.push_front(AggregatorMessage::Fold { round, scale, seed });
                    return Ok(Uploaded::Again);
                }
                // The round went on while the connection was broken.
                Notice::Message(
                    later @ (AggregatorMessage::Download { .. } | AggregatorMessage::Done),
                ) if self.line.came_back => {
                    self.line.early.push_front(later);
                    return Ok(Uploaded::Applied { left_out: Some(WENT_ON.into()) });
                }
                Notice::Message(AggregatorMessage::Upload { round })
                    if self.line.came_back && round != self.round =>
                {
                    self.line.early.push_front(AggregatorMessage::Upload { round });
                    return Ok(Uploaded::Applied { left_out: Some(WENT_ON.into()) });
                }
                Notice::Message(AggregatorMessage::Applied { .. }) if self.line.came_back => {}
                Notice::Message(message) => self.hear(message)?,
                Notice::Down => {
                    self.inboxes.iter().for_each(|inbox| inbox.put(SendOrder::Detach { peer: 0 }));
                }
                // The aggregator says what it wants.
                Notice::Up => {}
                Notice::Lane(result) => {
                    self.running -= 1;
                    let error = result.err().unwrap_or(LaneError::Cancelled);
                    return Err(self.line.lane_error(error));
                }
                Notice::SendBroken(broken) => {
                    self.line.break_off(broken.connection, broken.error)?;
                }
                Notice::Received { .. } => {}
            }
        }
    }

    fn attach(&mut self) {
        let Some(link) = &self.line.link else { return };
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(link.writer.clone());
        for (inbox, channel) in self.inboxes.iter().zip(&link.streams) {
            let (connection, channel) = (link.id, channel.clone());
            inbox.put(SendOrder::Attach { peer: 0, connection, channel });
        }
        if let Some(said) = self.report {
            said.report.messages(self.round).iter().for_each(|message| self.line.tell(message));
        }
        self.line.tell(&ClientMessage::Uploading { round: self.round });
    }

    fn hear(&mut self, message: AggregatorMessage) -> Result<(), ClientError> {
        match message {
            AggregatorMessage::Upload { round } if round == self.round => {
                self.attach();
                Ok(())
            }
            AggregatorMessage::Want { stream, chunks } => self.send(stream, &chunks, false),
            AggregatorMessage::Prove { stream, chunks } => self.send(stream, &chunks, true),
            _ => Err(self.line.unexpected("a message")),
        }
    }

    fn send(&self, stream: u32, wanted: &[ChunkRange], sums_only: bool) -> Result<(), ClientError> {
        let lane = self.lanes.ranges.get(stream as usize);
        let (Some(lane), Some(inbox)) = (lane, self.inboxes.get(stream as usize)) else {
            return Err(self.line.control_error(ProtocolError::Stream { stream }.into()));
        };
        let ranges = wanted.iter().map(|range| range.within(lane));
        let Some(chunks) = ranges.collect::<Option<Vec<Range<usize>>>>() else {
            return Err(self.line.control_error(ProtocolError::Chunks { stream }.into()));
        };
        if let (Some(sums), Some(link)) = (self.known, &self.line.link) {
            for range in &chunks {
                // A connection that breaks is noticed by its reader.
                let _ = announce(&link.writer, range.start, &sums[range.clone()]);
            }
            if sums_only {
                return Ok(());
            }
        }
        inbox.put(SendOrder::Send { peer: 0, chunks, sums_only });
        Ok(())
    }
}

/// A download that is under way.
struct Downloading<'a> {
    round: u32,
    digest: [u8; 32],
    /// Whether it is no model but the sums that an edge is to begin from.
    is_seed: bool,
    line: &'a mut Line,
    inboxes: &'a [Inbox<ReceiveOrder>],
    whole: Vec<bool>,
    running: usize,
}

impl Downloading<'_> {
    fn run(&mut self) -> Result<(), ClientError> {
        let result = self.until_whole();
        end_lanes(self.line, self.running, self.inboxes, || ReceiveOrder::Finish, result)
    }

    fn until_whole(&mut self) -> Result<(), ClientError> {
        self.attach()?;
        while !self.whole.iter().all(|whole| *whole) {
            match self.line.next()? {
                Notice::Message(AggregatorMessage::Fold { round, seed: Some(seed), .. })
                    if self.is_seed && (round, seed) == (self.round, self.digest) =>
                {
                    self.attach()?;
                }
                Notice::Message(AggregatorMessage::Download { round, digest }) => {
                    if self.is_seed || (round, digest) != (self.round, self.digest) {
                        return Err(self.line.unexpected("another model"));
                    }
                    self.attach()?;
                }
                // Said again after an interruption.
                Notice::Message(AggregatorMessage::Applied { .. }) => {}
                Notice::Message(_) => return Err(self.line.unexpected("a message")),
                // What has come is still taken.
                Notice::Down | Notice::Up | Notice::SendBroken(_) => {}
                Notice::Lane(result) => {
                    self.running -= 1;
                    let error = result.err().unwrap_or(LaneError::Cancelled);
                    return Err(self.line.lane_error(error));
                }
                Notice::Received { lane, report } => self.note(lane, report)?,
            }
        }
        Ok(())
    }

    fn attach(&mut self) -> Result<(), ClientError> {
        let Some(link) = &self.line.link else { return Ok(()) };
        if let Some(error) = link.streams.iter().find_map(|channel| channel.refuse_more().err()) {
            return Err(self.line.transfer_error(error));
        }
        for (inbox, channel) in self.inboxes.iter().zip(&link.streams) {
            let (connection, channel) = (link.id, channel.clone());
            inbox.put(ReceiveOrder::Attach { peer: 0, connection, channel, doubted: false });
        }
        Ok(())
    }

    fn note(&mut self, lane: usize, report: ReceiveReport) -> Result<(), ClientError> {
        match report {
            ReceiveReport::Whole { .. } => self.whole[lane] = true,
            // Nobody looks into the model.
            ReceiveReport::Nonfinite { .. } => {}
            ReceiveReport::Broken { connection, error, .. } => {
                return self.line.break_off(connection, error);
            }
            ReceiveReport::Want { connection, chunks, .. } => {
                let stream = lane as u32;
                if let Some(link) = self.line.link.as_ref().filter(|link| link.id == connection) {
                    let wrap = |chunks| ClientMessage::Want { stream, chunks };
                    // A connection that breaks is noticed by its reader.
                    let _ = link.writer.send_ranges(&chunks, wrap);
                }
            }
            ReceiveReport::Prove { connection, chunks, .. } => {
                let stream = lane as u32;
                if let Some(link) = self.line.link.as_ref().filter(|link| link.id == connection) {
                    let wrap = |chunks| ClientMessage::Prove { stream, chunks };
                    // A connection that breaks is noticed by its reader.
                    let _ = link.writer.send_ranges(&chunks, wrap);
                }
            }
        }
        Ok(())
    }
}
