//! A connection that breaks is dialled again, and the session goes on to the exact mean; nobody fails,
//! and what was verified is not sent again.

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use fedlane_testing::{Channel, Dice, Direction, Kind, Plan, Proxy, Scope, Which};

use crate::faults::{bytes, layout};
use crate::model::{CHUNK_BYTES, DATA_BYTES};
use crate::points::sweep;
use crate::session::{Behind, DEADLINE, Outcome, SOON, Session, usual_traffic};

/// Points of each test.
const POINTS: u64 = 20;

/// Bytes of preamble and hello: a data channel carries nothing else beside the model.
const HELLO_BYTES: u64 = 12 + 56;

/// Bytes at the start of a control channel, up and down: preamble and `Join`, preamble and plan. A bit
/// that is flipped there may make another client of this one, which is refused.
const GREETING_BYTES: [u64; 2] = [180, 80];

/// Places where a fault may be.
#[derive(Clone, Copy)]
struct Place {
    channel: Channel,
    direction: Direction,
    from_byte: u64,
}

impl Place {
    const fn of(channel: Channel, direction: Direction) -> Place {
        Place { channel, direction, from_byte: 0 }
    }

    fn choose(self, dice: &mut Dice) -> (Which, u64) {
        let index = dice.below(2) as usize;
        let (which, usual) = match self.channel {
            Channel::Control => (Which::Control(0), &usual_traffic()[0]),
            _ => (Which::Data(index), &usual_traffic()[1 + index]),
        };
        let moved = bytes(usual, self.direction).max(self.from_byte + 1);
        (which, self.from_byte + dice.below(moved - self.from_byte))
    }
}

/// One fault of this kind at each of many bytes of a place.
fn must_resume(what: &str, place: Place, kind: Kind) {
    let answers = sweep(what, POINTS, |seed| {
        let (which, at_byte) = place.choose(&mut Dice::new(seed));
        let plan = Plan::one(which, place.direction, at_byte, kind.clone());
        let mut session = Session::start(layout(seed), plan, Behind::Victim);
        let told = |wrong| format!("{which:?} {:?} byte {at_byte}: {wrong}", place.direction);
        match session.conclude().map_err(told)? {
            Outcome::Mean => at_most_one_chunk_twice(&session.proxy).map_err(told)?,
            other => return Err(told(format!("{other:?}\n{}", session.story()))),
        }
        Ok(session.proxy.fired() > 0)
    });
    // A fault behind the last byte of a session shows nothing.
    let missed = answers.get(&false).copied().unwrap_or(0);
    assert!(2 * missed <= answers.values().sum(), "{what}: {missed} faults did not happen");
}

/// Each stream may have passed one chunk on in vain, in each direction.
fn at_most_one_chunk_twice(proxy: &Proxy) -> Result<(), String> {
    let data = proxy.traffic().iter().filter(|one| one.channel == Channel::Data).count() as u64;
    let most = DATA_BYTES + 2 * CHUNK_BYTES + data * HELLO_BYTES;
    for direction in [Direction::Up, Direction::Down] {
        let passed = proxy.passed(Channel::Data, direction);
        if passed > most {
            return Err(format!("{passed} bytes passed {direction:?}, at most {most} may"));
        }
    }
    Ok(())
}

/// Moves up to some byte of the victim's uploads, and tells the test, which then restarts something
/// while nothing moves.
fn restart(
    what: &str,
    args: impl Fn(&Path) -> Vec<String> + Sync,
    act: fn(&mut Session, &[String]),
) {
    sweep(what, POINTS, |seed| {
        let mut dice = Dice::new(seed);
        let place = Place::of(Channel::Data, dice.pick(&[Direction::Up, Direction::Down]));
        let (which, at_byte) = place.choose(&mut dice);
        let (reached, signal) = mpsc::channel();
        let reached = Mutex::new(reached);
        // Held until the test goes on, or has ended.
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.clone();
        let call = move || {
            let _ = reached.lock().unwrap().send(());
            drop(closed.lock());
        };
        let plan = Plan::one(which, place.direction, at_byte, Kind::Call(Arc::new(call)));
        let state = tempfile::tempdir().unwrap();
        let args = args(state.path());
        let held = gate.lock().unwrap();
        let mut session = Session::start_with(layout(seed), plan, Behind::All, &args);
        let told = |wrong| format!("{which:?} {:?} byte {at_byte}: {wrong}", place.direction);
        // A connection that came in another order than the others may never be the one that was meant.
        if signal.recv_timeout(SOON / 5).is_ok() {
            act(&mut session, &args);
        }
        drop(held);
        match session.conclude().map_err(told)? {
            Outcome::Mean => Ok(()),
            other => Err(told(format!("{other:?}\n{}", session.story()))),
        }
    });
}

#[test]
fn a_client_that_begins_again() {
    restart("client restarts", |_| Vec::new(), |session, _| session.restart_victim());
}

#[test]
#[ignore = "needs a ledger"]
fn an_aggregator_that_begins_again() {
    restart(
        "aggregator restarts",
        |state| vec![format!("--state={}", state.display())],
        Session::restart_serve,
    );
}

/// A test for each channel and direction.
macro_rules! must_resume {
    ($module:ident, $kind:expr, $greeting:expr) => {
        mod $module {
            use super::*;

            #[test]
            fn of_control_up() {
                let place = Place::of(Channel::Control, Direction::Up);
                must_resume("control up", Place { from_byte: $greeting[0], ..place }, $kind);
            }

            #[test]
            fn of_control_down() {
                let place = Place::of(Channel::Control, Direction::Down);
                must_resume("control down", Place { from_byte: $greeting[1], ..place }, $kind);
            }

            #[test]
            fn of_data_up() {
                let place = Place::of(Channel::Data, Direction::Up);
                // A hello that is changed is refused, and dialled again like any other.
                must_resume("data up", place, $kind);
            }

            #[test]
            fn of_data_down() {
                must_resume("data down", Place::of(Channel::Data, Direction::Down), $kind);
            }
        }
    };
}

must_resume!(a_drop, Kind::Drop(Scope::Connection), [0, 0]);
must_resume!(a_drop_of_all_connections, Kind::Drop(Scope::All), [0, 0]);
must_resume!(a_reset, Kind::Reset(Scope::Connection), [0, 0]);
must_resume!(a_reset_of_all_connections, Kind::Reset(Scope::All), [0, 0]);
must_resume!(a_truncation, Kind::Truncate, [0, 0]);
must_resume!(
    a_stall_within_the_deadline,
    Kind::Stall(Scope::Connection, Some(DEADLINE / 4)),
    [0, 0]
);
must_resume!(
    a_stall_beyond_the_deadline,
    Kind::Stall(Scope::Connection, Some(2 * DEADLINE)),
    [0, 0]
);
must_resume!(a_connection_that_dies_silently, Kind::Stall(Scope::Connection, None), [0, 0]);
must_resume!(a_flipped_bit, Kind::Flip(5), GREETING_BYTES);
