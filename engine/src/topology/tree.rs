//! What an edge says of the sums that it sends: whose updates they hold, and how they are scaled.

use crate::error::ProtocolError;
use crate::limits;
use crate::reducer::WeightScale;
use crate::wire::message::ClientMessage;

pub use crate::wire::message::Leaf;

/// Whose updates are in the sums of one round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SumsReport {
    /// What the weights of these sums are scaled with.
    pub scale: WeightScale,
    /// Whether there are no sums yet: they are made when it is the edge's turn.
    pub in_order: bool,
    /// The clients below, in the order in which they are averaged.
    pub leaves: Vec<Leaf>,
}

impl SumsReport {
    /// Everyone's weight, zero for those who are left out.
    pub fn weights(&self) -> Vec<f64> {
        self.leaves.iter().map(Leaf::weight).collect()
    }

    /// What is said of it, in messages that are not too long.
    pub fn messages(&self, round: u32) -> Vec<ClientMessage> {
        let mut messages = Vec::new();
        let mut first = 0;
        while first < self.leaves.len() || messages.is_empty() {
            let mut bytes = 0;
            let fits = |leaf: &&Leaf| {
                bytes += leaf.name.len() + leaf.left_out.as_ref().map_or(0, String::len) + 32;
                bytes < limits::LEAVES_BYTES
            };
            let rest = &self.leaves[first..];
            // Names and reasons are short enough for one to fit in any case.
            let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
            let leaves = rest[..count].to_vec();
            let last = count == rest.len();
            let (scale, in_order) = (self.scale, self.in_order);
            let begin = first as u32;
            messages.push(ClientMessage::Leaves {
                round,
                scale,
                in_order,
                first: begin,
                leaves,
                last,
            });
            first += count;
        }
        messages
    }
}

impl Leaf {
    /// Its weight in the mean.
    pub fn weight(&self) -> f64 {
        if self.left_out.is_none() { self.examples } else { 0.0 }
    }
}

/// Puts a report together as it comes.
#[derive(Default)]
pub struct Hearing {
    pending: Vec<Leaf>,
    report: Option<SumsReport>,
}

impl Hearing {
    /// The newest report that is whole.
    pub fn report(&self) -> Option<&SumsReport> {
        self.report.as_ref()
    }

    /// Takes one message of a report; true if it is whole now.
    ///
    /// # Errors
    /// Leaves that do not follow each other, too many of them, and weights that are none.
    pub fn hear(
        &mut self,
        (scale, in_order): (WeightScale, bool),
        first: u32,
        leaves: Vec<Leaf>,
        last: bool,
    ) -> Result<bool, ProtocolError> {
        if first == 0 {
            self.pending.clear();
        }
        let is_weight = |leaf: &Leaf| leaf.examples.is_finite() && leaf.examples >= 0.0;
        let follows = first as usize == self.pending.len();
        let most = limits::MAX_LEAVES;
        // No weights need another: f64 has no powers of two beyond that.
        let is_scale = scale.is_none_or(|scale| (-1100..=1100).contains(&scale));
        if !is_scale
            || !follows
            || self.pending.len() + leaves.len() > most
            || !leaves.iter().all(is_weight)
        {
            return Err(ProtocolError::Unexpected { what: "a list of clients" });
        }
        self.pending.extend(leaves.into_iter().map(Leaf::printable));
        if last {
            let leaves = std::mem::take(&mut self.pending);
            self.report = Some(SumsReport { scale, in_order, leaves });
        }
        Ok(last)
    }
}

impl Leaf {
    fn printable(self) -> Leaf {
        let left_out = self.left_out.map(|why| crate::control::printable(&why));
        Leaf { name: crate::control::printable(&self.name), left_out, ..self }
    }
}
