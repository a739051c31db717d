//! Who may come in, and who may come back.

use std::time::{Duration, Instant};

use super::event::Joined;
use crate::control::ControlChannel;
use crate::error::{ControlError, Fault, ReducerError, TransferError, WireError};
use crate::limits;
use crate::manifest::Manifest;
use crate::wire::message::AggregatorMessage;

/// May this client come back? The one rule, before the session and in it: who broke no rule may, if
/// connections are given any time. Gives how long it is waited for.
pub(super) fn patience(fault: &Fault, deadline: Duration, reconnect: Duration) -> Option<Duration> {
    if reconnect.is_zero() || !is_interruption(fault) {
        return None;
    }
    // It was silent for half of the deadline already.
    let half = deadline / 2;
    Some(if was_silent(fault) { reconnect.saturating_sub(half).max(half) } else { reconnect })
}

/// Whether the connection is to blame, and not the client.
fn is_interruption(fault: &Fault) -> bool {
    let closed = matches!(
        fault,
        Fault::Control(
            ControlError::Closed | ControlError::Io(_) | ControlError::Wire(WireError::Seal)
        ) | Fault::Transfer(TransferError::Closed | TransferError::Io(_))
    );
    closed || was_silent(fault) || matches!(fault, Fault::TooLate { .. } | Fault::Streams { .. })
}

/// Whether nothing came: there are no last words then, and the client may not know that its connection
/// is broken.
pub(super) fn was_silent(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Control(ControlError::Silent)
            | Fault::Transfer(TransferError::Stalled { .. } | TransferError::NoChecksum)
    )
}

/// Whether the client's last words may say more.
pub(super) fn is_first_sign(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Transfer(TransferError::Closed | TransferError::Io(_))
            | Fault::Control(ControlError::Io(_))
    )
}

/// May this client come in? For the first time, or again: then with the weight that it had `before`.
/// Gives the manifest behind its header, if it is the session's.
pub(super) fn check(
    joined: &Joined,
    is_taken: bool,
    before: Option<f64>,
    session: Option<&Manifest>,
) -> Result<Manifest, Fault> {
    check_name(&joined.name, is_taken)?;
    check_examples(joined.examples)?;
    let examples = joined.examples;
    if before.is_some_and(|before| before.to_bits() != examples.to_bits()) {
        return Err(Fault::Weight { examples, why: "is another one than before" });
    }
    check_model(session, &joined.header)
}

/// Those who have the name of somebody whose connection may have broken without a sign. They wait a
/// moment, and are then looked at again.
#[derive(Default)]
pub(super) struct Knocking(Vec<(Instant, Joined)>);

impl Knocking {
    pub fn wait(&mut self, joined: Joined) {
        self.0.push((Instant::now() + limits::LAST_WORDS, joined));
    }

    /// One of them may be the one whose connection has ended now.
    pub fn hurry(&mut self) {
        self.0.iter_mut().for_each(|(until, _)| *until = Instant::now());
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.0.iter().map(|(until, _)| *until).min()
    }

    /// Who has waited long enough.
    pub fn due(&mut self) -> Vec<Joined> {
        let now = Instant::now();
        self.0.extract_if(.., |(until, _)| *until <= now).map(|(_, joined)| joined).collect()
    }
}

/// Tells a visitor why he cannot stay.
pub(crate) fn refuse(channel: &ControlChannel, reason: &str) {
    // A visitor that is gone need not hear it.
    let _ = channel.writer.send(&AggregatorMessage::Failed { reason: reason.to_owned() });
}

pub(crate) fn check_name(name: &str, taken: bool) -> Result<(), Fault> {
    match name {
        _ if taken => {
            Err(Fault::Name { why: "is taken by another client; give each its own --name" })
        }
        "" => Err(Fault::Name { why: "is empty" }),
        _ => Ok(()),
    }
}

pub(crate) fn check_examples(examples: f64) -> Result<(), Fault> {
    if examples.is_finite() && examples >= 0.0 { Ok(()) } else { Err(Fault::Examples { examples }) }
}

/// Whose weight cannot be used beside those of the others, and why.
pub(crate) fn bad_weight(error: &ReducerError) -> Option<(usize, &'static str)> {
    match error {
        ReducerError::WeightTooSmall { client, .. } => {
            Some((*client, "is too small beside the others; set it to zero"))
        }
        ReducerError::WeightSum { client, .. } => {
            Some((*client, "makes their sum overflow; scale all of them down"))
        }
        _ => None,
    }
}

/// The manifest behind a client's header, if it is the session's; an empty header asks for that.
pub(crate) fn check_model(session: Option<&Manifest>, header: &[u8]) -> Result<Manifest, Fault> {
    if let (Some(session), true) = (session, header.is_empty()) {
        return Ok(session.clone());
    }
    let client = Manifest::from_header(header)?;
    match session.and_then(|session| session.first_difference(&client)) {
        Some(difference) => Err(Fault::Model { difference }),
        None => Ok(client),
    }
}
