//! Goes on with a session that was kept.

use std::sync::Arc;
use std::time::Instant;

use super::event::PeerShared;
use super::keep::{self, Kept, LEFT_OUT_BEFORE};
use super::lanes::{Lanes, accumulator_layout};
use super::members::{Link, Members, Peer};
use super::{Admission, Aggregator, Session};
use crate::control::{Heartbeat, Listeners};
use crate::error::{AggregatorError, Fault, StateError};
use crate::manifest::Manifest;
use crate::meter::Meter;
use crate::state::{Record, Stage, StateDir};

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
        let (what, is) = keep::initial(initial.is_some());
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
