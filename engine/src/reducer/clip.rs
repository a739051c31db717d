//! Weights of a mean in which large updates are clipped.
//!
//! An update x of norm N, measured from the model g that was sent before, counts as
//! g + s (x - g) with s = min(1, C / N). In the mean that is x with s times its weight, and g with
//! the rest:
//!
//! ```text
//! mean = (sum of w s x  +  g times the sum of w (1 - s)) / sum of w
//! ```
//!
//! So the model is one more client of the mean, the last one. Where no model was sent g is zero: it
//! has nothing to add, but its weight stays in the denominator. Only floats are clipped; integers
//! and BOOL have the weights they would have without.
//!
//! Given the factors s, the bound of the reducer holds with one more client for the model, with
//! (K + 6) u S in f32, and (4 K + 6) u S in f64: there the products w s are rounded in u, and the
//! model's weight is the sum of K - 1 such products.

use super::{Weight, Weights, checked_sum, exponent, times_power_of_two};
use crate::error::ReducerError;
use crate::limits::MIN_CLIP_FACTOR;

/// What an update is measured from, and clipped towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipBase {
    /// The model that was sent before. It takes part in the mean, as the last client.
    Model,
    /// Zero: no model was sent.
    Zero,
}

/// What an update of that norm is multiplied with, so that its norm is at most `clip_norm`: 1 for
/// one that is small enough, 0 for one of infinite norm. `clip_norm` is positive.
pub fn clip_factor(norm: f64, clip_norm: f64) -> f64 {
    if norm <= clip_norm { 1.0 } else { clip_norm / norm }
}

impl Weights {
    /// As [`Weights::new`], with each client's update multiplied by its factor. If nothing is
    /// clipped these are the weights of [`Weights::new`], and the mean has the same bits. Otherwise
    /// and with [`ClipBase::Model`] there is one more client, the model, after the others.
    ///
    /// # Errors
    /// As [`Weights::new`]; not one factor for each weight; a factor above 1 or below
    /// [`MIN_CLIP_FACTOR`] of a client with a positive weight.
    pub fn clipped(
        weights: &[f64],
        factors: &[f64],
        base: ClipBase,
    ) -> Result<Weights, ReducerError> {
        let plain = Weights::new(weights)?;
        if !is_clipped(weights, factors)? {
            return Ok(plain);
        }
        let shift = -exponent(checked_sum(weights)?) - 2;
        let mut clients = plain.clients.clone();
        let mut rest = 0.0;
        for ((client, &weight), &factor) in clients.iter_mut().zip(weights).zip(factors) {
            let scaled = times_power_of_two(weight, shift);
            // A client without weight may have any factor.
            let kept = if weight > 0.0 { scaled * factor } else { 0.0 };
            rest += if weight > 0.0 { scaled * (1.0 - factor) } else { 0.0 };
            *client = Weight { f32: kept as f32, f64: kept, ..*client };
        }
        clients.push(Weight { f32: rest as f32, f64: rest, whole: 0.0 });
        let denominator = Weight::sum(&clients);
        if base == ClipBase::Zero {
            clients.pop();
        }
        Ok(Weights { clients, denominator, ..plain })
    }
}

/// Whether a client that counts has a factor below 1.
fn is_clipped(weights: &[f64], factors: &[f64]) -> Result<bool, ReducerError> {
    if weights.len() != factors.len() {
        return Err(ReducerError::ClipFactors { weights: weights.len(), factors: factors.len() });
    }
    let counted = || weights.iter().zip(factors).enumerate().filter(|(_, (w, _))| **w > 0.0);
    let wrong = |factor: f64| !(MIN_CLIP_FACTOR..=1.0).contains(&factor);
    match counted().find(|(_, (_, factor))| wrong(**factor)) {
        Some((client, (_, &factor))) => Err(ReducerError::ClipFactor { client, factor }),
        None => Ok(counted().any(|(_, (_, factor))| *factor < 1.0)),
    }
}
