//! How the model is cut up, and the memory of a round.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::config::{AggregatorConfig, Averaging};
use crate::error::{AggregatorError, SinkError};
use crate::lane::receive::{ChunkBuffers, Order};
use crate::manifest::{ChunkTable, Manifest};
use crate::reducer::{AccumulatorLayout, Weights};
use crate::region::Region;
use crate::signal::Signal;
use crate::sink::mean::{MeanSink, MeanSlices, TileMemory, Wave};
use crate::sink::region::{Part, RegionSink};
use crate::source::region::RegionSource;

/// How the model is cut up, and what is kept warm for each lane.
pub(super) struct Lanes {
    pub chunks: ChunkTable,
    pub ranges: Vec<Range<usize>>,
    pub signals: Vec<Arc<Signal>>,
    /// Of each lane, which holds the lock while it receives.
    pub buffers: Vec<Mutex<ChunkBuffers>>,
    pub tiles: Vec<TileMemory>,
    /// Absent when updates are dropped.
    pub layout: Option<AccumulatorLayout>,
    /// What is cut up, where that is the sums of the model and not the model.
    pub sums: Option<Manifest>,
}

/// Where the sums of this model go, if there is a mean.
pub(super) fn accumulator_layout(
    config: &AggregatorConfig,
    manifest: &Manifest,
) -> Result<Option<AccumulatorLayout>, AggregatorError> {
    if matches!(config.averaging, Averaging::Keep | Averaging::Checksum | Averaging::Discard) {
        return Ok(None);
    }
    Ok(Some(AccumulatorLayout::of(manifest)?))
}

/// Sizes of the regions that rounds need.
pub(super) struct Sizes {
    /// Absent when updates are dropped.
    pub accumulator: Option<u64>,
    /// Absent where the mean takes the place of the sums.
    pub model: Option<u64>,
    /// One for each client, where updates are received whole before they are averaged.
    pub spool: Vec<u64>,
}

impl Sizes {
    pub fn new(
        config: &AggregatorConfig,
        averaging: Averaging,
        manifest: &Manifest,
        layout: Option<&AccumulatorLayout>,
    ) -> Sizes {
        let model_bytes = manifest.data_bytes();
        let copies = match averaging {
            Averaging::Spool | Averaging::Keep => config.clients,
            _ => 0,
        };
        // Chunk after chunk from every client, sums never leave their tile, unless they are kept.
        let in_turn = averaging == Averaging::Streaming
            && config.order == Order::Client
            && config.state.is_none();
        let wave = averaging == Averaging::Wave;
        // What waits for its turn in a tree is added to the sums of others.
        let waits = config.tree && config.order == Order::Client;
        let holds_sums = |layout: &&AccumulatorLayout| {
            // Sums of a tree go on as they are.
            !wave && !waits && (layout.is_in_place() || config.tree || !in_turn)
        };
        Sizes {
            accumulator: layout.filter(holds_sums).map(AccumulatorLayout::bytes),
            model: layout
                .filter(|layout| !wave && !config.tree && !layout.is_in_place())
                .map(|_| model_bytes),
            spool: vec![model_bytes; copies],
        }
    }

    pub fn all(&self) -> impl Iterator<Item = u64> {
        self.accumulator.into_iter().chain(self.model).chain(self.spool.iter().copied())
    }
}

/// A round that has begun.
pub(super) struct Begun {
    pub averaging: Averaging,
    /// Who is not expected from the start.
    pub absent: Vec<bool>,
    /// Those, and who was lost since.
    pub lost: Vec<bool>,
    pub regions: Regions,
}

/// The model of the last round, or the initial one, and the checksums of its chunks.
pub(super) struct Model {
    pub region: Arc<Region>,
    pub sums: Vec<u64>,
}

/// The memory of one round; see [`Sizes`].
pub(super) struct Regions {
    pub accumulator: Option<Region>,
    pub model: Option<Region>,
    pub spool: Vec<Region>,
    /// Where the session is kept: what has come from whom.
    pub ledger: Option<Region>,
}

impl Lanes {
    pub fn cut(
        config: &AggregatorConfig,
        manifest: &Manifest,
        layout: Option<AccumulatorLayout>,
    ) -> Result<Lanes, AggregatorError> {
        let chunks = manifest.chunks(config.chunk_bytes)?.len();
        // More lanes than chunks would leave some without work.
        let streams = config.streams.min(chunks.max(1));
        Lanes::cut_into(config.chunk_bytes, streams, manifest, layout)
    }

    pub fn cut_into(
        chunk_bytes: u64,
        streams: usize,
        manifest: &Manifest,
        layout: Option<AccumulatorLayout>,
    ) -> Result<Lanes, AggregatorError> {
        let chunks = manifest.chunks(chunk_bytes)?;
        let ranges = chunks.lanes(streams);
        let signals: io::Result<_> = ranges.iter().map(|_| Signal::new().map(Arc::new)).collect();
        Ok(Lanes {
            chunks,
            signals: signals?,
            buffers: ranges.iter().map(|_| Mutex::default()).collect(),
            tiles: ranges.iter().map(|_| TileMemory::default()).collect(),
            ranges,
            layout,
            sums: None,
        })
    }

    /// The checksums of a model's chunks.
    pub fn sums_of(&self, manifest: &Manifest, region: &Region) -> Vec<u64> {
        RegionSource::seal(manifest, region, &self.chunks, self.ranges.len()).into_sums()
    }

    pub fn mean_sinks<'s>(
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

    pub fn region_sinks<'s>(&'s self, spool: &'s mut [Region]) -> Vec<RegionSink<'s>> {
        let mut per_lane: Vec<Vec<Part<'_>>> = self.ranges.iter().map(|_| Vec::new()).collect();
        for region in spool {
            let position = region.position();
            let (mut rest, file) = region.bytes_mut();
            for (lane, parts) in self.ranges.iter().zip(&mut per_lane) {
                let range = self.chunks.bytes_of(lane);
                let length = (range.end - range.start) as usize;
                // That of an edge has no parts.
                let (bytes, after) = rest.split_at_mut(length.min(rest.len()));
                rest = after;
                parts.push(Part { bytes, file, position, start: range.start });
            }
        }
        per_lane.into_iter().map(RegionSink::new).collect()
    }
}
