//! A round in a tree: clients bring updates, edges the sums of clients of their own.
//!
//! Updates are averaged as they arrive, and edges send their sums at the same time; or, with
//! [`Order::Client`], all updates wait where they came, and one running sum goes through the edges, each
//! adding its clients to it, one after the other: the operations of a flat average, in its order.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::broadcast::{Broadcast, Fold};
use super::entry::bad_weight;
use super::event::unexpected;
use super::lanes::{Lanes, Model, Regions};
use super::members::{Link, Notice, Peer};
use super::upload::{Base, Upload, UploadClock};
use super::{AggregatorConfig, Averaging, Session};
use crate::error::{AggregatorError, Fault, LaneError, ReducerError};
use crate::lane::receive::Order;
use crate::lane::start_lane;
use crate::manifest::Manifest;
use crate::meter::Meter;
use crate::paths::SendKind;
use crate::reducer::{AccumulatorLayout, Weight, WeightScale, Weights};
use crate::region::Region;
use crate::sink::Sink;
use crate::sink::mean::{MeanSink, Wave};
use crate::sink::region::{Part, RegionSink};
use crate::source::region::RegionSource;
use crate::topology::tree::{Leaf, SumsReport};
use crate::verdict::OnNonfinite;
use crate::wire::checksum::model_digest;
use crate::wire::message::{AggregatorMessage, ClientMessage};

/// What a session needs besides, where clients may be edges.
pub(super) struct Tree {
    /// The sums as a model, and how it is cut up.
    manifest: Manifest,
    lanes: Lanes,
    /// What came in the newest round, until it is over.
    collected: Option<Collected>,
}

/// What has come from the clients of a round.
struct Collected {
    /// Updates that wait for their turn, one for each client.
    updates: Vec<Region>,
    /// What was summed already.
    sums: Option<Region>,
    scale: WeightScale,
}

impl Tree {
    pub fn new(
        config: &AggregatorConfig,
        manifest: &Manifest,
        streams: usize,
    ) -> Result<Tree, AggregatorError> {
        let manifest = AccumulatorLayout::sums_manifest(manifest)?;
        let layout = AccumulatorLayout::of(&manifest)?;
        let mut lanes = Lanes::cut_into(config.chunk_bytes, streams, &manifest, Some(layout))?;
        lanes.sums = Some(manifest.clone());
        Ok(Tree { manifest, lanes, collected: None })
    }

    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }
}

impl Session {
    /// Everyone at the leaves of the tree, in the order in which they are averaged, and why an update is
    /// not in the newest mean, if it is not. In a star these are the clients.
    pub fn leaves(&self) -> Vec<Leaf> {
        let mut leaves = Vec::new();
        for (peer, &counted) in self.members.peers.iter().zip(&self.counted) {
            let left_out = (!counted).then(|| peer.left_out.clone());
            match peer.shared.report() {
                Some(report) => leaves.extend(report.leaves.into_iter().map(|leaf| Leaf {
                    name: format!("{}/{}", peer.name, leaf.name),
                    left_out: leaf.left_out.or_else(|| left_out.clone()),
                    ..leaf
                })),
                None => {
                    let (name, examples) = (peer.name.clone(), peer.examples);
                    leaves.push(Leaf { name, examples, left_out });
                }
            }
        }
        leaves
    }

    /// Runs a round whose mean becomes the model.
    pub(super) fn average_tree(&mut self) -> Result<(), AggregatorError> {
        self.collect_tree()?;
        let (sums, scale) = match self.is_in_order() {
            false => self.take_sums()?,
            true => self.fold_until_all_agree()?,
        };
        self.conclude(sums, scale)?;
        self.release(None);
        Ok(())
    }

    /// Whether one running sum goes through the tree.
    pub(super) fn is_in_order(&self) -> bool {
        self.tree.is_some() && self.upload.order == Order::Client
    }

    fn has_edges(&self) -> bool {
        self.members.peers.iter().any(|peer| peer.shared.is_edge())
    }

    /// Whether updates wait until it is known who is in the mean.
    pub(super) fn keeps_updates(&self) -> bool {
        self.is_in_order() || self.tree.is_some() && self.has_edges()
    }

    /// Begins a round, and receives what comes from clients; and from edges, unless they wait for their
    /// turn.
    pub(crate) fn collect_tree(&mut self) -> Result<(), AggregatorError> {
        self.round += 1;
        self.updates.clear();
        self.release_updates();
        let last = self.model.take().and_then(|model| Arc::into_inner(model.region));
        last.into_iter().for_each(|region| self.pool.give_back(region));
        let began = Instant::now();
        let absent = self.absent();
        let expected = |peer: &usize| !absent[*peer];
        let peers = 0..self.members.peers.len();
        let (edges, clients): (Vec<usize>, Vec<usize>) =
            peers.filter(expected).partition(|&peer| self.members.peers[peer].shared.is_edge());
        let collected = match clients.is_empty() {
            true => {
                self.start_peers();
                self.counted = vec![false; self.members.peers.len()];
                Collected { updates: Vec::new(), sums: None, scale: None }
            }
            false => self.collect_updates(&absent, edges.len())?,
        };
        edges.iter().for_each(|&edge| self.counted[edge] = true);
        self.await_reports(&edges, began)?;
        self.tree().collected = Some(collected);
        if self.has_edges() && !self.is_in_order() {
            self.collect_sums()?;
        }
        Ok(())
    }

    fn tree(&mut self) -> &mut Tree {
        self.tree.as_mut().expect("called in a tree only")
    }

    /// The updates of clients, or their sums.
    fn collect_updates(
        &mut self,
        absent: &[bool],
        edges: usize,
    ) -> Result<Collected, AggregatorError> {
        let min_clients = self.upload.min_clients;
        self.upload.min_clients = min_clients.saturating_sub(edges);
        let received = self.receive_updates(None);
        self.upload.min_clients = min_clients;
        if received.is_err() {
            self.note_rejected();
        }
        let (sums, mut updates) = received?;
        let sums = sums.and_then(|sums| Arc::into_inner(sums.region));
        if self.keeps_updates() {
            self.clean(&mut updates)?;
            sums.into_iter().for_each(|region| self.pool.give_back(region));
            return Ok(Collected { updates, sums: None, scale: None });
        }
        updates.into_iter().for_each(|region| self.pool.give_back(region));
        let lost: Vec<bool> = self.counted.iter().map(|counted| !counted).collect();
        let counted = self.members.examples(&lost);
        let scale = match (self.averaging, Weights::scale(&counted)?) {
            // Who was lost while sums were made has left its trace in their scale.
            (Averaging::Streaming, Some(_)) => Weights::scale(&self.members.examples(absent))?,
            (_, scale) => scale,
        };
        Ok(Collected { updates: Vec::new(), sums, scale })
    }

    /// To begin a round: edges need not wait until clients have sent.
    pub(super) fn ask_edges(&self) {
        let upload = AggregatorMessage::Upload { round: self.round };
        let absent = self.absent();
        let edges = self.members.peers.iter().map(|peer| peer.shared.is_edge());
        for (index, is_edge) in edges.enumerate() {
            if is_edge && !absent[index] {
                self.members.tell(index, &upload);
            }
        }
    }

    /// Waits until every edge has said whose updates it has.
    fn await_reports(&mut self, edges: &[usize], began: Instant) -> Result<(), AggregatorError> {
        let round = self.round;
        let upload = AggregatorMessage::Upload { round };
        for &edge in edges {
            // Its connection may have broken before it heard.
            if self.members.peers[edge].shared.report().is_none() {
                self.members.tell(edge, &upload);
            }
            if self.members.peers[edge].is_gone() {
                self.lose_gone(edge)?;
            }
        }
        let deadline = self.upload.round_deadline;
        loop {
            let awaited = edges.iter().copied().filter(|&edge| {
                self.counted[edge] && self.members.peers[edge].shared.report().is_none()
            });
            let awaited: Vec<usize> = awaited.collect();
            if awaited.is_empty() {
                return self.check_orders(edges);
            }
            match self.members.next(deadline.map(|deadline| began + deadline))? {
                Notice::Up(peer) if awaited.contains(&peer) => self.members.tell(peer, &upload),
                Notice::Gone(peer, fault) if edges.contains(&peer) => {
                    self.lose_edge(peer, fault)?;
                }
                Notice::Message(
                    _,
                    ClientMessage::Leaves { .. } | ClientMessage::Uploading { .. },
                ) => {}
                Notice::Message(peer, _) => {
                    let connection = self.members.peers[peer].up().map_or(0, |up| up.id);
                    self.members.drop_connection(peer, connection, unexpected("a message"));
                }
                Notice::Timeout => {
                    let seconds = deadline.unwrap_or_default().as_secs_f64();
                    for edge in awaited {
                        self.lose_edge(edge, Fault::TooLate { seconds })?;
                        let connection = self.members.peers[edge].up().map_or(0, |up| up.id);
                        let fault = Fault::TooLate { seconds };
                        self.members.drop_connection(edge, connection, fault);
                    }
                }
                _ => {}
            }
        }
    }

    /// One running sum can go through all of the tree or none.
    fn check_orders(&mut self, edges: &[usize]) -> Result<(), AggregatorError> {
        for &edge in edges {
            let peer = &self.members.peers[edge];
            let in_order = peer.shared.report().is_none_or(|r| r.in_order == self.is_in_order());
            if self.counted[edge] && !in_order {
                let connection = peer.up().map_or(0, |up| up.id);
                self.lose_edge(edge, Fault::Order)?;
                self.members.drop_connection(edge, connection, Fault::Order);
            }
        }
        Ok(())
    }

    /// Takes an edge, and so all of its clients, out of the round, if enough others are left.
    fn lose_edge(&mut self, edge: usize, fault: Fault) -> Result<(), AggregatorError> {
        if !std::mem::replace(&mut self.counted[edge], false) {
            return Ok(());
        }
        self.members.peers[edge].left_out = fault.to_string();
        self.check_left(edge, fault)
    }

    fn check_left(&self, edge: usize, fault: Fault) -> Result<(), AggregatorError> {
        let left = self.counted.iter().filter(|&&counted| counted).count();
        let peer = &self.members.peers[edge];
        if left < self.upload.min_clients {
            return Err(peer.fault(fault));
        }
        tracing::warn!("{}: {fault}; the round goes on with {left} clients", peer.label());
        Ok(())
    }

    /// Weights of everyone below one client: of an edge's clients, or its own.
    fn weights_of(&self, peer: usize) -> Vec<f64> {
        let Peer { shared, examples, .. } = &self.members.peers[peer];
        match (self.counted[peer], shared.report()) {
            (true, Some(report)) => report.weights(),
            (true, None) => vec![*examples],
            (false, Some(report)) => vec![0.0; report.leaves.len()],
            (false, None) => vec![0.0],
        }
    }

    /// Weights of all leaves, in their order; zero for those who are left out.
    fn weights(&self) -> Vec<f64> {
        (0..self.members.peers.len()).flat_map(|peer| self.weights_of(peer)).collect()
    }

    /// What the weights of all leaves are scaled with.
    fn scale(&self, weights: &[f64]) -> Result<WeightScale, AggregatorError> {
        Weights::scale(weights).map_err(|error| {
            let leaf = bad_weight(&error).and_then(|(leaf, why)| {
                self.leaves().into_iter().nth(leaf).map(|leaf| (leaf, why))
            });
            let Some((Leaf { name, examples, .. }, why)) = leaf else { return error.into() };
            let (client, error) = (format!("client \"{name}\""), Fault::Weight { examples, why });
            AggregatorError::Client { client, error }
        })
    }

    /// Receives the sums of all edges at once, and adds up everything.
    fn collect_sums(&mut self) -> Result<(), AggregatorError> {
        let edges: Vec<bool> =
            self.members.peers.iter().map(|peer| peer.shared.is_edge()).collect();
        let part = |peer: usize| {
            let of = self.members.peers[peer].shared.report().and_then(|report| report.scale);
            (if edges[peer] { self.weights_of(peer) } else { vec![0.0] }, of)
        };
        let parts: Vec<_> = (0..edges.len()).map(part).collect();
        // Of one who is alone now, but was not when he was added up, the sums have a scale.
        let of_counted = |(weights, of): &(Vec<f64>, WeightScale)| {
            weights.iter().any(|&weight| weight > 0.0).then_some(*of)
        };
        let scale = self.scale(&self.weights())?;
        let scale = scale.or_else(|| parts.iter().find_map(of_counted).flatten());
        let factors = Weights::factors(&parts, scale);
        let lost: Vec<bool> =
            edges.iter().zip(&self.counted).map(|(edge, counted)| !(edge & counted)).collect();
        let clients = lost.iter().zip(&self.counted).filter(|(lost, c)| **lost && **c).count();
        let least = self.upload.min_clients.saturating_sub(clients);
        let accumulator = self.take_accumulator()?;
        let (came, accumulator) = self.receive_sums(&factors, lost, least, accumulator)?;
        for (peer, came) in came.iter().enumerate().filter(|(peer, _)| edges[*peer]) {
            self.counted[peer] &= came;
        }
        let mut sums = match came.contains(&true) {
            true => Some(accumulator),
            false => {
                self.pool.give_back(accumulator);
                None
            }
        };
        let clients: Vec<bool> =
            edges.iter().zip(&self.counted).map(|(edge, counted)| !edge & counted).collect();
        if clients.contains(&true) {
            sums = Some(self.add_updates(scale, &clients, sums)?);
        }
        self.release_updates();
        self.tree().collected = Some(Collected { updates: Vec::new(), sums, scale });
        Ok(())
    }

    /// Adds up what edges send, as it comes.
    fn receive_sums(
        &mut self,
        factors: &Weights,
        lost: Vec<bool>,
        min_clients: usize,
        accumulator: Region,
    ) -> Result<(Vec<bool>, Region), AggregatorError> {
        let Some(tree) = &self.tree else { return Ok((lost, accumulator)) };
        let upload = Upload { min_clients, order: Order::Arrival, before: None, ..self.upload };
        let clock = UploadClock::start(self.round);
        let mut checks = vec![0; tree.lanes.chunks.len()];
        let mut regions = Regions::of(accumulator);
        let wave = Some(Wave { carry: None });
        let sinks = tree.lanes.mean_sinks(factors, &lost, &mut regions, &mut checks, wave)?;
        let people = (&mut self.members, &mut self.kept);
        let came = upload.run(&tree.lanes, people, sinks, lost, Base::Model(None), &clock)?;
        let edges = came.iter().filter(|&&came| came).count() as u64;
        let (_, phase) = clock.stop(tree.manifest.data_bytes() * edges);
        self.phases.push(phase.received_by(self.config.receive_path));
        Ok((came, regions.into_accumulator()?))
    }

    fn take_accumulator(&mut self) -> Result<Region, AggregatorError> {
        let bytes = self.tree().manifest.data_bytes();
        Ok(self.pool.take(bytes)?)
    }

    /// Adds the updates of some clients, in their order, to sums that were made before, if there are any.
    fn add_updates(
        &mut self,
        scale: WeightScale,
        clients: &[bool],
        sums: Option<Region>,
    ) -> Result<Region, AggregatorError> {
        let lost: Vec<bool> = clients.iter().map(|is_one| !is_one).collect();
        let weights = Weights::part(&self.members.examples(&lost), scale);
        let carry = sums.as_ref().map(|_| Weight::ONE);
        let accumulator = match sums {
            Some(sums) => sums,
            None => self.take_accumulator()?,
        };
        let updates = match self.tree.as_ref().and_then(|tree| tree.collected.as_ref()) {
            Some(collected) => collected.updates.as_slice(),
            None => &[],
        };
        let mut checks = vec![0; self.lanes.chunks.len()];
        let mut regions = Regions::of(accumulator);
        let wave = Some(Wave { carry });
        let sinks = self.lanes.mean_sinks(&weights, &lost, &mut regions, &mut checks, wave)?;
        let chunks = &self.lanes.chunks;
        self.lanes.work(sinks, |sink: &mut MeanSink<'_>, range| {
            for chunk in range.map(|index| chunks.get(index)) {
                let place = chunk.bytes.start as usize..chunk.bytes.end as usize;
                for peer in (0..lost.len()).filter(|&peer| !lost[peer]) {
                    let update = &updates[peer].bytes()[place.clone()];
                    sink.add(peer, &chunk, update).map_err(|error| LaneError::peer(peer, error))?;
                }
            }
            Ok(())
        })?;
        regions.into_accumulator()
    }

    /// Leads the running sum through the tree. Who is lost on the way is not in it; but the weights were
    /// scaled as if he were, so it goes through once more, and the mean is that of the others to the bit.
    fn fold_until_all_agree(&mut self) -> Result<(Region, WeightScale), AggregatorError> {
        loop {
            let weights = self.weights();
            let scale = self.scale(&weights)?;
            let sums = self.add_in_order(scale, None)?;
            match sums.filter(|_| self.weights() == weights) {
                Some(sums) => return Ok((sums, scale)),
                None => self.check_any()?,
            }
        }
    }

    fn check_any(&self) -> Result<(), AggregatorError> {
        match self.counted.contains(&true) {
            true => Ok(()),
            false => Err(ReducerError::NoWeight.into()),
        }
    }

    /// Adds everyone below, in order, to the sums of those who come before, if there are any. Gives those
    /// sums as they were if nobody is left here.
    pub(crate) fn add_in_order(
        &mut self,
        scale: WeightScale,
        seed: Option<Region>,
    ) -> Result<Option<Region>, AggregatorError> {
        let peers = self.members.peers.len();
        let is_edge: Vec<bool> =
            self.members.peers.iter().map(|peer| peer.shared.is_edge()).collect();
        let (mut sums, mut next) = (seed, 0);
        while next < peers {
            if is_edge[next] {
                sums = self.fold_edge(next, scale, sums)?;
                next += 1;
                continue;
            }
            let end = (next..peers).find(|&peer| is_edge[peer]).unwrap_or(peers);
            let group: Vec<bool> =
                (0..peers).map(|peer| (next..end).contains(&peer) && self.counted[peer]).collect();
            if group.contains(&true) {
                sums = Some(self.add_updates(scale, &group, sums)?);
            }
            next = end;
        }
        Ok(sums)
    }

    /// Lets an edge add its clients to the sums.
    fn fold_edge(
        &mut self,
        edge: usize,
        scale: WeightScale,
        sums: Option<Region>,
    ) -> Result<Option<Region>, AggregatorError> {
        if !self.counted[edge] {
            return Ok(sums);
        }
        if self.members.peers[edge].is_gone() {
            self.lose_gone(edge)?;
            return Ok(sums);
        }
        let seed = match &sums {
            Some(sums) => Some(self.send_sums(edge, scale, sums)?),
            None => None,
        };
        if seed == Some(None) {
            self.lose_gone(edge)?;
            return Ok(sums);
        }
        match self.receive_from(edge, scale, seed.flatten())? {
            Some(new) => {
                sums.into_iter().for_each(|region| self.pool.give_back(region));
                Ok(Some(new))
            }
            None => {
                self.lose_gone(edge)?;
                Ok(sums)
            }
        }
    }

    /// Takes out an edge whose connection, or whose sums, have shown why.
    fn lose_gone(&mut self, edge: usize) -> Result<(), AggregatorError> {
        let peer = &mut self.members.peers[edge];
        if let Link::Gone { why } = &peer.link {
            peer.left_out.clone_from(why);
        }
        let reason = peer.left_out.clone();
        match std::mem::replace(&mut self.counted[edge], false) {
            true => self.check_left(edge, Fault::GaveUp { reason }),
            false => Ok(()),
        }
    }

    /// Sends sums to one edge. Gives their digest, if it has them.
    fn send_sums(
        &mut self,
        edge: usize,
        scale: WeightScale,
        sums: &Region,
    ) -> Result<Option<[u8; 32]>, AggregatorError> {
        let Some(tree) = &self.tree else { return Ok(None) };
        let meter = Meter::start("pass on", self.round);
        let chunk_bytes = tree.lanes.chunks.chunk_bytes();
        let checks = tree.lanes.sums_of(&tree.manifest, sums);
        let digest = model_digest(&tree.manifest.layout_digest(), chunk_bytes, &checks);
        let source = RegionSource::new(&tree.manifest, sums, chunk_bytes, checks.clone());
        let kind = SendKind::choose(self.config.send_path, &source)?;
        let broadcast = Broadcast {
            counted: Vec::new(),
            round: self.round,
            digest,
            kind,
            min_clients: 0,
            fold: Some(Fold { peer: edge, scale }),
        };
        let has_it = broadcast.run(&tree.lanes, &mut self.members, &source, &checks)? > 0;
        self.phases.push(meter.stop(tree.manifest.data_bytes()).sent_by(kind));
        Ok(has_it.then_some(digest))
    }

    /// Receives the sums of one edge, if it lives.
    fn receive_from(
        &mut self,
        edge: usize,
        scale: WeightScale,
        seed: Option<[u8; 32]>,
    ) -> Result<Option<Region>, AggregatorError> {
        let mut region = self.take_accumulator()?;
        let Some(tree) = &self.tree else { return Ok(None) };
        self.members.peers[edge].shared.await_sums();
        let round = self.round;
        // Who has sums to begin from has heard it with them.
        let before = seed.is_none().then_some(AggregatorMessage::Fold { round, scale, seed });
        let upload = Upload { min_clients: 0, before, ..self.upload };
        let clock = UploadClock::start(round);
        let lost: Vec<bool> = (0..self.members.peers.len()).map(|peer| peer != edge).collect();
        let sinks = tree.lanes.sinks_of_one(&mut region, edge, lost.len());
        let people = (&mut self.members, &mut self.kept);
        let came = upload.run(&tree.lanes, people, sinks, lost, Base::Model(None), &clock)?[edge];
        let (_, phase) = clock.stop(if came { tree.manifest.data_bytes() } else { 0 });
        self.phases.push(phase.received_by(self.config.receive_path));
        if came && self.is_sound(edge)? {
            return Ok(Some(region));
        }
        self.pool.give_back(region);
        Ok(None)
    }

    /// Whether all that an edge sent are numbers, where they must be.
    fn is_sound(&mut self, edge: usize) -> Result<bool, AggregatorError> {
        let Some(tree) = &self.tree else { return Ok(true) };
        let peer = &mut self.members.peers[edge];
        let Some(findings) = peer.shared.findings.get() else { return Ok(true) };
        let summary = findings.summary(&tree.manifest, &tree.lanes.chunks)?;
        match summary.first_nonfinite {
            Some(place) if self.upload.updates.on_nonfinite == OnNonfinite::Reject => {
                let fault = Fault::Nonfinite { tensor: place.tensor, index: place.index };
                peer.left_out = fault.to_string();
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// The sums of everyone below, made while they came, and what their weights are scaled with.
    pub(crate) fn take_sums(&mut self) -> Result<(Region, WeightScale), AggregatorError> {
        let collected = self.tree().collected.as_mut();
        let taken = collected.and_then(|c| Some((c.sums.take()?, c.scale)));
        taken.ok_or_else(|| ReducerError::NoWeight.into())
    }

    /// What an edge says of its sums to the aggregator above it.
    pub(crate) fn sums_report(&self) -> SumsReport {
        let in_order = self.is_in_order();
        let collected = self.tree.as_ref().and_then(|tree| tree.collected.as_ref());
        let scale = collected.filter(|_| !in_order).and_then(|collected| collected.scale);
        SumsReport { scale, in_order, leaves: self.leaves() }
    }

    /// Makes the mean of sums the model.
    fn conclude(&mut self, sums: Region, scale: WeightScale) -> Result<(), AggregatorError> {
        let weights = Weights::part(&self.weights(), scale);
        let Some(layout) = &self.lanes.layout else { return Ok(()) };
        let meter = Meter::start("average", self.round);
        let mut regions = Regions::of(sums);
        if !layout.is_in_place() {
            regions.model = Some(self.pool.take(self.manifest().data_bytes())?);
        }
        let mut checks = vec![0; self.lanes.chunks.len()];
        let lost = vec![false; weights.clients()];
        let sinks = self.lanes.mean_sinks(&weights, &lost, &mut regions, &mut checks, None)?;
        let sinks = sinks.into_iter().map(MeanSink::summed).collect();
        let chunks = &self.lanes.chunks;
        self.lanes.work(sinks, |sink: &mut MeanSink<'_>, range| {
            for chunk in range.map(|index| chunks.get(index)) {
                sink.complete(&chunk).map_err(|error| LaneError::peer(0, error))?;
            }
            Ok(())
        })?;
        let region = match regions.model.take() {
            Some(model) => {
                self.pool.give_back(regions.into_accumulator()?);
                model
            }
            None => regions.into_accumulator()?,
        };
        self.model = Some(Model { region: Arc::new(region), sums: checks });
        self.phases.push(meter.stop(self.manifest().data_bytes()));
        Ok(())
    }

    /// While nothing is wanted of clients they may come and go, until the call above is over.
    pub(crate) fn idle(&mut self) -> Result<(), AggregatorError> {
        // Whoever begins something with them looks at their links.
        while !matches!(self.members.next(None)?, Notice::Above) {}
        Ok(())
    }

    /// Rounds below are numbered as those above, also if this edge had no part in some.
    pub(crate) fn skip_to(&mut self, round: u32) {
        self.round = self.round.max(round);
    }

    /// Tells everyone below that the round is over, and why their updates are not in the mean, if they
    /// are `left_out`.
    pub(crate) fn release(&mut self, left_out: Option<&str>) {
        for (index, &came) in self.counted.iter().enumerate() {
            if let (true, Some(why)) = (came, left_out) {
                self.members.peers[index].left_out = why.into();
            }
            self.members.tell_of_round(index, self.round, came && left_out.is_none());
        }
        self.release_updates();
    }

    fn release_updates(&mut self) {
        let collected = self.tree.as_mut().and_then(|tree| tree.collected.take());
        let regions = collected.into_iter().flat_map(|c| c.updates.into_iter().chain(c.sums));
        regions.for_each(|region| self.pool.give_back(region));
    }

    /// Most bytes of a chunk.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.lanes.chunks.chunk_bytes()
    }

    /// Memory for sums, or for a model.
    pub(crate) fn take_region(&self, bytes: u64) -> Result<Region, AggregatorError> {
        Ok(self.pool.take(bytes)?)
    }

    /// Memory of sums that are of no use any more.
    pub(crate) fn give_back(&self, region: Region) {
        self.pool.give_back(region);
    }
}

impl Regions {
    /// Of sums alone.
    fn of(accumulator: Region) -> Regions {
        Regions { accumulator: Some(accumulator), model: None, spool: Vec::new(), ledger: None }
    }

    fn into_accumulator(self) -> Result<Region, AggregatorError> {
        self.accumulator.ok_or_else(|| std::io::Error::other("the sums are lost").into())
    }
}

impl Lanes {
    /// Works on every lane's sink on a thread of its own, and ends it.
    fn work<S: Sink>(
        &self,
        sinks: Vec<S>,
        work: impl Fn(&mut S, Range<usize>) -> Result<(), LaneError> + Sync,
    ) -> Result<(), AggregatorError> {
        let running = sinks.len();
        let (sender, results) = std::sync::mpsc::channel();
        let work = &work;
        std::thread::scope(|scope| {
            for (mut sink, range) in sinks.into_iter().zip(&self.ranges) {
                let sender = sender.clone();
                let lane = move || {
                    work(&mut sink, range.clone())?;
                    sink.end().map_err(|error| LaneError::peer(0, error))
                };
                // This thread holds the other end.
                start_lane(scope, lane, move |result| drop(sender.send(result)));
            }
        });
        Ok(results.iter().take(running).collect::<Result<(), LaneError>>()?)
    }

    /// Sinks for the sums of one edge.
    fn sinks_of_one<'s>(
        &'s self,
        region: &'s mut Region,
        edge: usize,
        peers: usize,
    ) -> Vec<RegionSink<'s>> {
        let position = region.position();
        let (mut rest, file) = region.bytes_mut();
        let mut sinks = Vec::new();
        for lane in &self.ranges {
            let range = self.chunks.bytes_of(lane);
            let (bytes, after) = rest.split_at_mut((range.end - range.start) as usize);
            rest = after;
            let mut bytes = Some(bytes);
            let parts = (0..peers).map(|peer| {
                let bytes = if peer == edge { bytes.take() } else { None };
                Part { bytes: bytes.unwrap_or_default(), file, position, start: range.start }
            });
            sinks.push(RegionSink::new(parts.collect()));
        }
        sinks
    }
}
