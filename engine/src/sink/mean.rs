//! Averages chunks as they come. The sums of the chunks that clients are working on stay in
//! tiles, small enough for a cache; with the last client's chunk the mean goes straight to the model.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::Sink;
use crate::error::{ReducerError, SinkError};
use crate::ledger::{Entry, Kind, LaneLedger};
use crate::limits;
use crate::manifest::{Chunk, ChunkTable, Dtype};
use crate::reducer::{self, AccumulatorLayout, Weight, Weights, store_past_cache};
use crate::region::Region;
use crate::wire::checksum::{ChunkSum, chunk_sum};

/// Bytes of payload that are completed at once: with their sums and their mean they stay in the L1
/// cache. A multiple of every element's size.
const BLOCK_BYTES: usize = 8 << 10;

/// The weighted mean of one lane.
pub struct MeanSink<'a> {
    weights: Weights,
    layout: &'a AccumulatorLayout,
    /// The lane's slice of the accumulator, and the accumulator byte at which it starts. Holds the
    /// sums that have no tile; without one no more than [`limits::MEAN_TILES`] may be begun.
    accumulator: Option<&'a mut [u8]>,
    accumulator_start: u64,
    /// The lane's slice of the new model, and the model byte at which it starts. Without one the
    /// mean takes the place of the sums.
    model: Option<&'a mut [u8]>,
    model_start: u64,
    /// Checksums of the new model's chunks in this lane.
    sums: &'a mut [u64],
    first_chunk: usize,
    /// For each chunk: from how many clients it came.
    arrived: Vec<usize>,
    /// From how many it has to come.
    clients: usize,
    /// For each chunk: whether its mean is written.
    completed: Vec<bool>,
    /// Clients that are lost, or were from the start.
    lost: Vec<bool>,
    /// Longest unused first.
    tiles: VecDeque<Tile>,
    /// Memory of tiles whose chunks are complete.
    spare: Vec<Region>,
    kept: &'a TileMemory,
    wave: Option<Wave>,
    /// Where sums and model outlive the process: what is in them.
    ledger: Option<LaneLedger<'a>>,
}

/// Clients who are some of those in a mean: their sums are added to the accumulator's and stay
/// there.
#[derive(Clone, Copy)]
pub struct Wave {
    /// What the sums so far are multiplied with; without it there are none.
    pub carry: Option<Weight>,
}

/// Warm memory for the tiles of one lane, kept for the next round.
#[derive(Default)]
pub struct TileMemory(Mutex<Vec<Region>>);

/// The sums of one chunk.
struct Tile {
    /// Number of the chunk, and the place of its sums in the lane's accumulator.
    chunk: usize,
    place: Range<usize>,
    /// Page-aligned, and so aligned for every type of sum.
    memory: Region,
    /// While the memory holds the first client's payload instead: that client's weight.
    held: Option<(Dtype, Weight)>,
}

impl Tile {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut().0[..self.place.len()]
    }

    /// Turns a held payload into sums.
    fn settle(&mut self) -> Result<(), ReducerError> {
        match self.held.take() {
            Some((dtype, weight)) => reducer::settle(dtype, weight, self.bytes()),
            None => Ok(()),
        }
    }
}

/// Slices of one lane, cut from the accumulator, the model and its checksums.
pub struct MeanSlices<'a> {
    /// Bytes of the accumulator, unless every chunk comes from all clients before the next one.
    pub accumulator: Option<&'a mut [u8]>,
    /// Bytes of the model, unless it takes the accumulator's place.
    pub model: Option<&'a mut [u8]>,
    /// One for each chunk.
    pub sums: &'a mut [u64],
    /// Memory for tiles.
    pub tiles: &'a TileMemory,
    /// Where other clients came before, or will come.
    pub wave: Option<Wave>,
}

impl<'a> MeanSink<'a> {
    /// The sink of the lane that owns the chunks `range`.
    pub fn new(
        weights: &Weights,
        layout: &'a AccumulatorLayout,
        chunks: &ChunkTable,
        range: &Range<usize>,
        slices: MeanSlices<'a>,
    ) -> Result<MeanSink<'a>, SinkError> {
        let bytes = chunks.bytes_of(range);
        let span = layout.span(bytes.clone())?;
        Ok(MeanSink {
            weights: weights.clone(),
            layout,
            accumulator: slices.accumulator,
            accumulator_start: span.start,
            model: slices.model,
            model_start: bytes.start,
            sums: slices.sums,
            first_chunk: range.start,
            arrived: vec![0; range.len()],
            completed: vec![false; range.len()],
            clients: weights.clients(),
            lost: vec![false; weights.clients()],
            tiles: VecDeque::new(),
            spare: std::mem::take(
                &mut *slices.tiles.0.lock().unwrap_or_else(PoisonError::into_inner),
            ),
            kept: slices.tiles,
            wave: slices.wave,
            ledger: None,
        })
    }

    /// Notes what has come.
    pub fn noting(mut self, ledger: Option<LaneLedger<'a>>) -> MeanSink<'a> {
        self.ledger = ledger;
        self
    }

    /// Some clients are not expected; their weights are zero.
    pub fn without(mut self, lost: &[bool]) -> MeanSink<'a> {
        self.lost = lost.to_vec();
        self.clients = lost.iter().filter(|&&lost| !lost).count();
        self
    }

    /// Every client's chunks are in the sums already.
    pub fn summed(mut self) -> MeanSink<'a> {
        self.arrived.fill(self.clients);
        self
    }

    /// Folds in the next client's chunk.
    pub fn add(&mut self, peer: usize, chunk: &Chunk, payload: &[u8]) -> Result<(), SinkError> {
        let weight = self.weights.get(peer).ok_or(ReducerError::NoWeight)?;
        let arrived = &mut self.arrived[chunk.index - self.first_chunk];
        *arrived += 1;
        let (begins, last) = (*arrived == 1, *arrived == self.clients);
        let (carry, last) = (self.wave.and_then(|wave| wave.carry), last && self.wave.is_none());
        let first = begins && carry.is_none();
        let mut tile = self.take_tile(chunk, first)?;
        if let (true, Some(factor)) = (begins, carry) {
            reducer::rescale(chunk.dtype, factor, tile.bytes())?;
        }
        if last {
            self.add_last(chunk, first, weight, payload, &mut tile)?;
            self.completed[chunk.index - self.first_chunk] = true;
            self.spare.push(tile.memory);
            return Ok(());
        }
        match tile.held {
            Some((dtype, held)) if weight.is_positive() => {
                reducer::accumulate_held(dtype, held, weight, payload, tile.bytes())?;
                tile.held = None;
            }
            _ => {
                tile.settle()?;
                reducer::accumulate(chunk.dtype, first, weight, payload, tile.bytes())?;
            }
        }
        self.tiles.push_back(tile);
        Ok(())
    }

    /// Keeps the first client's payload itself for its sums, until the second client's comes: one
    /// pass over the chunk less. Says whether that was possible.
    fn hold(&mut self, peer: usize, chunk: &Chunk, buffer: &mut Region) -> Result<bool, SinkError> {
        let weight = self.weights.get(peer).ok_or(ReducerError::NoWeight)?;
        let arrived = self.arrived[chunk.index - self.first_chunk];
        let first = arrived == 0 && self.wave.is_none_or(|wave| wave.carry.is_none());
        let last = arrived + 1 == self.clients;
        if !first || last || !weight.is_positive() || !reducer::is_own_sum(chunk.dtype) {
            return Ok(false);
        }
        let mut memory = self.memory(buffer.bytes().len())?;
        std::mem::swap(&mut memory, buffer);
        self.arrived[chunk.index - self.first_chunk] = 1;
        let held = Some((chunk.dtype, weight));
        let place = self.place(chunk)?;
        self.tiles.push_back(Tile { chunk: chunk.index, place, memory, held });
        Ok(true)
    }

    /// The tile of a chunk, filled with the sums so far unless it is the chunk's first.
    fn take_tile(&mut self, chunk: &Chunk, first: bool) -> Result<Tile, SinkError> {
        if let Some(index) = self.tiles.iter().position(|tile| tile.chunk == chunk.index) {
            return Ok(self.tiles.remove(index).expect("found above"));
        }
        let place = self.place(chunk)?;
        let memory = self.memory(place.len())?;
        let mut tile = Tile { chunk: chunk.index, place: place.clone(), memory, held: None };
        if !first {
            let sums = self.accumulator.as_deref().ok_or(SinkError::NoSums)?;
            tile.bytes().copy_from_slice(&sums[place]);
        }
        Ok(tile)
    }

    /// Where the lane's accumulator has room for the sums of a chunk.
    fn place(&self, chunk: &Chunk) -> Result<Range<usize>, SinkError> {
        let range = self.layout.range(chunk.bytes.clone(), chunk.dtype)?;
        let start = (range.start - self.accumulator_start) as usize;
        Ok(start..start + (range.end - range.start) as usize)
    }

    /// Memory for one more tile of at least that size.
    fn memory(&mut self, bytes: usize) -> Result<Region, SinkError> {
        if self.tiles.len() >= limits::MEAN_TILES {
            self.put_away()?;
        }
        let fitting = self.spare.iter().rposition(|region| region.bytes().len() >= bytes);
        match fitting {
            Some(index) => Ok(self.spare.swap_remove(index)),
            None => {
                // What is too small now would pile up.
                self.spare.clear();
                Ok(Region::new(bytes as u64)?)
            }
        }
    }

    /// Moves the sums of the tile that was longest unused to their place in the accumulator.
    fn put_away(&mut self) -> Result<(), SinkError> {
        let Some(mut tile) = self.tiles.pop_front() else { return Ok(()) };
        tile.settle()?;
        let place = tile.place.clone();
        let sums = self.accumulator.as_deref_mut().ok_or(SinkError::NoSums)?;
        store_past_cache(&mut sums[place], tile.bytes());
        self.spare.push(tile.memory);
        Ok(())
    }

    /// Folds in the last client's chunk and writes the mean, block by block, so that its checksum
    /// finds it in the innermost cache. Nobody reads the mean before the round is over.
    fn add_last(
        &mut self,
        chunk: &Chunk,
        first: bool,
        weight: Weight,
        payload: &[u8],
        tile: &mut Tile,
    ) -> Result<(), SinkError> {
        tile.settle()?;
        // Whole blocks of the payload have whole blocks of sums.
        let sums_bytes = BLOCK_BYTES * tile.place.len() / payload.len().max(1);
        let mut sum = ChunkSum::new();
        let mut scratch = [0; BLOCK_BYTES];
        let (weights, dtype, place) = (&self.weights, chunk.dtype, tile.place.clone());
        let (model, sums) = (&mut self.model, &mut self.accumulator);
        let mean = mean_of(model, sums, chunk, self.model_start, place)?;
        let blocks = payload.chunks(BLOCK_BYTES).zip(tile.bytes().chunks_mut(sums_bytes.max(1)));
        for ((payload, sums), mean) in blocks.zip(mean.chunks_mut(BLOCK_BYTES)) {
            let out = &mut scratch[..payload.len()];
            reducer::complete(dtype, first, weight, weights, payload, sums, out)?;
            sum.update(out);
            store_past_cache(mean, out);
        }
        self.sums[chunk.index - self.first_chunk] = sum.finish();
        Ok(())
    }

    /// Writes the mean of sums that have come from everyone already.
    fn finish_chunk(&mut self, chunk: &Chunk) -> Result<(), SinkError> {
        let mut tile = self.take_tile(chunk, false)?;
        tile.settle()?;
        let (place, mut sum) = (tile.place.clone(), ChunkSum::new());
        let (model, sums) = (&mut self.model, &mut self.accumulator);
        let mean = mean_of(model, sums, chunk, self.model_start, place)?;
        reducer::finish(chunk.dtype, &self.weights, tile.bytes(), mean)?;
        sum.update(mean);
        self.sums[chunk.index - self.first_chunk] = sum.finish();
        self.spare.push(tile.memory);
        Ok(())
    }
}

/// For a ledger: what stands where.
impl MeanSink<'_> {
    /// The sums of a chunk also go to their place in the accumulator, where they outlive the process.
    fn note_sums(&mut self, peer: usize, chunk: &Chunk) -> Result<(), SinkError> {
        let mut tile = self.take_tile(chunk, false)?;
        tile.settle()?;
        let place = tile.place.clone();
        let sums = self.accumulator.as_deref_mut().ok_or(SinkError::NoSums)?;
        store_past_cache(&mut sums[place], tile.bytes());
        let content = chunk_sum(tile.bytes());
        self.tiles.push_back(tile);
        if let Some(ledger) = &mut self.ledger {
            ledger.add(chunk.index, peer);
            let weights = self.weights.digest(ledger.came(chunk.index), false);
            ledger.seal(chunk.index, Kind::Sums, content, weights);
        }
        Ok(())
    }

    fn note_mean(&mut self, peer: Option<usize>, chunk: &Chunk) {
        let content = self.sums[chunk.index - self.first_chunk];
        if let Some(ledger) = &mut self.ledger {
            peer.iter().for_each(|&peer| ledger.add(chunk.index, peer));
            let weights = self.weights.digest(ledger.came(chunk.index), true);
            ledger.seal(chunk.index, Kind::Mean, content, weights);
        }
    }

    /// Whether an entry says what stands in its place, made with the weights of now.
    fn is_true(&mut self, chunk: &Chunk, entry: &Entry) -> Result<bool, SinkError> {
        let peers = entry.came.iter().map(|&(peer, _)| peer);
        let is_mean = entry.kind == Kind::Mean;
        let all = entry.came.len() == self.clients;
        if entry.kind == Kind::Updates
            || is_mean && !all
            || entry.weights != self.weights.digest(peers, is_mean)
        {
            return Ok(false);
        }
        let place = self.place(chunk)?;
        let content = match is_mean {
            true => {
                let (model, sums) = (&mut self.model, &mut self.accumulator);
                chunk_sum(mean_of(model, sums, chunk, self.model_start, place)?)
            }
            false => chunk_sum(&self.accumulator.as_deref().ok_or(SinkError::NoSums)?[place]),
        };
        Ok(content == entry.content)
    }
}

/// Where the mean of a chunk goes: into the model, or in the place of its sums.
fn mean_of<'m>(
    model: &'m mut Option<&mut [u8]>,
    sums: &'m mut Option<&mut [u8]>,
    chunk: &Chunk,
    model_start: u64,
    place: Range<usize>,
) -> Result<&'m mut [u8], SinkError> {
    let start = (chunk.bytes.start - model_start) as usize;
    match (model, sums) {
        (Some(model), _) => Ok(&mut model[start..start + chunk.length()]),
        (None, Some(sums)) => Ok(&mut sums[place]),
        (None, None) => Err(SinkError::NoSums),
    }
}

impl Drop for MeanSink<'_> {
    fn drop(&mut self) {
        let tiles = self.tiles.drain(..).map(|tile| tile.memory);
        let mut kept = self.kept.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(self.spare.drain(..).chain(tiles));
    }
}

impl Sink for MeanSink<'_> {
    fn restore(&mut self) -> Result<Vec<Vec<bool>>, SinkError> {
        let Some(ledger) = &self.ledger else { return Ok(Vec::new()) };
        let lane: Vec<Chunk> = ledger.lane().collect();
        let mut here = vec![vec![false; lane.len()]; ledger.clients()];
        for (place, chunk) in lane.iter().enumerate() {
            let entry = self.ledger.as_ref().and_then(|ledger| ledger.entry(chunk.index));
            let is_true = match &entry {
                Some(entry) => self.is_true(chunk, entry)?,
                None => false,
            };
            let Some(ledger) = &mut self.ledger else { break };
            let Some(entry) = entry.filter(|_| is_true) else {
                ledger.clear(chunk.index);
                continue;
            };
            ledger.recall(chunk.index, &entry);
            entry.came.iter().for_each(|&(peer, _)| here[peer][place] = true);
            self.arrived[place] = entry.came.len();
            if entry.kind == Kind::Mean {
                (self.completed[place], self.sums[place]) = (true, entry.content);
            }
            self.complete(chunk)?;
        }
        Ok(here)
    }

    fn note(&mut self, peer: usize, chunk: &Chunk) -> Result<(), SinkError> {
        if self.ledger.is_none() {
            return Ok(());
        }
        if !self.completed[chunk.index - self.first_chunk] {
            return self.note_sums(peer, chunk);
        }
        self.note_mean(Some(peer), chunk);
        Ok(())
    }

    fn mixes(&self) -> bool {
        true
    }

    fn lose(&mut self, peer: usize) -> Result<bool, SinkError> {
        if std::mem::replace(&mut self.lost[peer], true) {
            return Ok(false);
        }
        self.clients -= 1;
        Ok(self.weights.lose(peer)?)
    }

    fn forget(&mut self, chunk: &Chunk) {
        let index = chunk.index - self.first_chunk;
        (self.arrived[index], self.completed[index]) = (0, false);
        self.ledger.iter_mut().for_each(|ledger| ledger.clear(chunk.index));
        if let Some(index) = self.tiles.iter().position(|tile| tile.chunk == chunk.index) {
            self.spare.extend(self.tiles.remove(index).map(|tile| tile.memory));
        }
    }

    fn complete(&mut self, chunk: &Chunk) -> Result<(), SinkError> {
        let index = chunk.index - self.first_chunk;
        let all = self.clients > 0 && self.arrived[index] == self.clients;
        if !all || self.completed[index] || self.wave.is_some() {
            return Ok(());
        }
        self.completed[index] = true;
        self.finish_chunk(chunk)?;
        self.note_mean(None, chunk);
        Ok(())
    }

    fn end(&mut self) -> Result<(), SinkError> {
        // Of a whole mean none is left.
        while !self.tiles.is_empty() {
            self.put_away()?;
        }
        // Where a chunk was not written stands what was there before: another session's model, perhaps.
        let missing = match self.wave {
            Some(_) => self.arrived.iter().position(|&arrived| arrived < self.clients),
            None => self.completed.iter().position(|completed| !completed),
        };
        match missing {
            Some(index) => Err(SinkError::NotWhole { chunk: self.first_chunk + index }),
            None => Ok(()),
        }
    }

    fn accept(&mut self, peer: usize, chunk: &Chunk, buffer: &mut Region) -> Result<(), SinkError> {
        match self.hold(peer, chunk, buffer)? {
            true => Ok(()),
            false => self.add(peer, chunk, &buffer.bytes()[..chunk.length()]),
        }
    }
}
