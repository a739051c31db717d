//! The network fails at many points.

use std::collections::BTreeMap;
use std::time::Duration;

use fedlane_testing::{Dice, Direction, Fault, Kind, Plan, Scope, Then, Traffic, Which};

use crate::model::Layout;
use crate::points::sweep;
use crate::session::{Behind, DEADLINE, Outcome, Session, usual_traffic};

/// Points of each sweep.
const POINTS: u64 = 60;

/// Where faults may be: on the victim's control channel and its two data channels, both ways.
pub fn anywhere(dice: &mut Dice) -> (Which, Direction, u64) {
    let usual = usual_traffic();
    let index = dice.below(3) as usize;
    let which = if index == 0 { Which::Control(0) } else { Which::Data(index - 1) };
    let direction = dice.pick(&[Direction::Up, Direction::Down]);
    let moved = bytes(&usual[index], direction);
    // Up to the last byte, and behind it.
    (which, direction, dice.below(moved + 2))
}

pub fn bytes(traffic: &Traffic, direction: Direction) -> u64 {
    match direction {
        Direction::Up => traffic.left_client,
        Direction::Down => traffic.left_aggregator,
    }
}

pub fn layout(seed: u64) -> Layout {
    if seed.is_multiple_of(2) { Layout::Floats } else { Layout::Mixed }
}

/// One fault of this kind, and one of the outcomes that it may have.
fn point(seed: u64, kind: Kind, then: Then, may_be: &[Outcome]) -> Result<Outcome, String> {
    let (which, direction, at_byte) = anywhere(&mut Dice::new(seed));
    let fault = Fault { which, direction, at_byte, kind };
    let what = format!("{fault:?}, then {then:?}");
    let plan = Plan { faults: vec![fault], then };
    let mut session = Session::start(layout(seed), plan, Behind::Victim);
    let outcome = session.conclude().map_err(|wrong| format!("{what}: {wrong}"))?;
    match may_be.contains(&outcome) {
        true => Ok(outcome),
        false => Err(format!("{what}: {outcome:?}\n{}", session.story())),
    }
}

/// The outcome is exact or an error. Says how often it was what.
fn exact_or_error(what: &str, kind: impl Fn(&mut Dice) -> Kind + Sync) {
    let outcomes = sweep(what, POINTS, |seed| {
        // Other numbers than those which choose the place.
        let mut dice = Dice::new(!seed);
        let kind = kind(&mut dice);
        let then = dice.pick(&[Then::Open, Then::Refuse, Then::Silent]);
        point(seed, kind, then, &[Outcome::Mean, Outcome::Partly, Outcome::Error])
    });
    println!("{what}: {outcomes:?}");
}

/// Nothing is lost and nothing is late, so the session succeeds.
fn always_exact(what: &str, kind: Kind) {
    let outcomes =
        sweep(what, POINTS, |seed| point(seed, kind.clone(), Then::Open, &[Outcome::Mean]));
    println!("{what}: {outcomes:?}");
}

#[test]
fn a_connection_that_is_dropped() {
    exact_or_error("drop", |dice| Kind::Drop(dice.pick(&[Scope::Connection, Scope::All])));
}

#[test]
fn a_connection_that_is_reset() {
    exact_or_error("reset", |dice| Kind::Reset(dice.pick(&[Scope::Connection, Scope::All])));
}

#[test]
fn a_connection_that_stalls_longer_than_the_deadline() {
    exact_or_error("long stall", |dice| {
        let scope = dice.pick(&[Scope::Connection, Scope::All]);
        Kind::Stall(scope, dice.pick(&[Some(2 * DEADLINE), None]))
    });
}

#[test]
fn a_bit_that_is_flipped() {
    exact_or_error("flip", |dice| Kind::Flip(dice.below(8) as u8));
}

/// Somewhere there is the length of a message: the reader then waits for half a megabyte that never comes,
/// while signs of life go on to trickle in as parts of it.
fn lengths_that_are_flipped(direction: Direction) {
    let outcomes = sweep("length", 120, |seed| {
        let plan = Plan::one(Which::Control(0), direction, 40 + seed, Kind::Flip(3));
        let mut session = Session::start(layout(seed), plan, Behind::Victim);
        session.conclude().map_err(|wrong| format!("byte {}: {wrong}", 40 + seed))
    });
    println!("length: {outcomes:?}");
}

#[test]
fn a_length_that_is_flipped_on_the_way_down() {
    lengths_that_are_flipped(Direction::Down);
}

#[test]
fn a_length_that_is_flipped_on_the_way_up() {
    lengths_that_are_flipped(Direction::Up);
}

#[test]
fn a_connection_that_is_truncated() {
    exact_or_error("truncate", |_| Kind::Truncate);
}

#[test]
fn a_stall_shorter_than_the_deadline() {
    always_exact("short stall", Kind::Stall(Scope::All, Some(DEADLINE / 4)));
}

#[test]
fn every_piece_is_late() {
    always_exact("delay", Kind::Delay(Duration::from_millis(20)));
}

#[test]
fn a_slow_link() {
    always_exact("throttle", Kind::Throttle { bytes_s: 200_000 });
}

#[test]
fn single_bytes() {
    always_exact("split", Kind::Split(3000));
}

#[test]
fn many_packets_in_one() {
    always_exact("merge", Kind::Merge);
}

#[test]
fn connections_that_overtake_each_other() {
    let outcomes: BTreeMap<Outcome, usize> = sweep("hold", POINTS, |seed| {
        let mut dice = Dice::new(seed);
        let number = dice.below(9) as usize;
        let plan = Plan::one(Which::Nth(number), Direction::Up, 0, Kind::Hold(DEADLINE / 3));
        let mut session = Session::start(layout(seed), plan, Behind::All);
        match session.conclude().map_err(|wrong| format!("connection {number}: {wrong}"))? {
            Outcome::Mean => Ok(Outcome::Mean),
            other => Err(format!("{other:?}, connection {number} held\n{}", session.story())),
        }
    });
    println!("hold: {outcomes:?}");
}
