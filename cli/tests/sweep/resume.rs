//! A connection that breaks is dialled again, and the session goes on to the exact mean; nobody fails,
//! and what was verified is not sent again.

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use fedlane_testing::{Channel, Dice, Direction, Kind, Plan, Proxy, Scope, Which};

use crate::faults::{bytes, layout};
use crate::model::{CHUNK_BYTES, DATA_BYTES, NAMES};
use crate::points::sweep;
use crate::session::{Behind, DEADLINE, Outcome, SOON, Session, usual_traffic};

/// Points of each test.
const POINTS: u64 = 20;

/// Until what has come has been taken.
const SETTLED: Duration = Duration::from_millis(100);

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
            Outcome::Mean => at_most_one_chunk_twice(&session.proxy, 1).map_err(told)?,
            other => return Err(told(format!("{other:?}\n{}", session.story()))),
        }
        Ok(session.proxy.fired() > 0)
    });
    // A fault behind the last byte of a session shows nothing.
    let missed = answers.get(&false).copied().unwrap_or(0);
    assert!(2 * missed <= answers.values().sum(), "{what}: {missed} faults did not happen");
}

/// Each stream of the clients behind it may have passed one chunk on in vain, in each direction.
fn at_most_one_chunk_twice(proxy: &Proxy, clients: u64) -> Result<(), String> {
    let data = proxy.traffic().iter().filter(|one| one.channel == Channel::Data).count() as u64;
    let most = clients * (DATA_BYTES + 2 * CHUNK_BYTES) + data * HELLO_BYTES;
    for direction in [Direction::Up, Direction::Down] {
        let passed = proxy.passed(Channel::Data, direction);
        if passed > most {
            return Err(format!("{passed} bytes passed {direction:?}, at most {most} may"));
        }
    }
    Ok(())
}

/// Restarts something at many points of a session, which must come to its mean without much being sent
/// twice.
fn restart(
    what: &str,
    args: impl Fn(&Path) -> Vec<String> + Sync,
    act: impl Fn(&mut Session, &[String]) + Sync,
) {
    let answers = sweep(what, POINTS, |seed| {
        let (session, outcome) = restart_once(seed, &args, &act)?;
        match outcome {
            Outcome::Mean => {
                Ok(at_most_one_chunk_twice(&session.proxy, NAMES.len() as u64).is_ok())
            }
            other => Err(format!("{other:?}\n{}", session.story())),
        }
    });
    let saved = answers.get(&true).copied().unwrap_or(0);
    assert!(2 * saved > answers.values().sum(), "{what}: much was sent again: {answers:?}");
}

/// Moves up to some byte of the victim's transfers, and then restarts something while nothing moves.
fn restart_once(
    seed: u64,
    args: &impl Fn(&Path) -> Vec<String>,
    act: &impl Fn(&mut Session, &[String]),
) -> Result<(Session, Outcome), String> {
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
    // A connection that came in another order than the others may never be the one that was meant.
    if signal.recv_timeout(SOON / 5).is_ok() {
        act(&mut session, &args);
    }
    drop(held);
    let told = |wrong| format!("{which:?} {:?} byte {at_byte}: {wrong}", place.direction);
    let outcome = session.conclude().map_err(told)?;
    Ok((session, outcome))
}

#[test]
fn a_client_that_begins_again() {
    restart("client restarts", |_| Vec::new(), |session, _| session.restart_victim());
}

/// The aggregator is killed and begins again, with its state and these arguments.
fn restart_aggregator(what: &str, more: &[&str]) {
    let args = |state: &Path| {
        let more = more.iter().map(ToString::to_string);
        more.chain([format!("--state={}", state.display())]).collect()
    };
    restart(what, args, |session, args| {
        // What has come is taken meanwhile, as far as this machine has the time.
        std::thread::sleep(SETTLED);
        session.restart_serve(args, || ());
    });
}

#[test]
fn an_aggregator_that_begins_again() {
    restart_aggregator("aggregator restarts", &[]);
}

#[test]
fn an_aggregator_that_begins_again_and_takes_no_turns() {
    restart_aggregator("aggregator restarts", &["--order=arrival"]);
}

#[test]
fn an_aggregator_that_begins_again_with_whole_updates() {
    restart_aggregator("aggregator restarts with whole updates", &["--clip-norm=1e30"]);
}

/// What stands on the disk when the aggregator begins again is not what it wrote.
#[test]
fn an_aggregator_that_finds_flipped_bits() {
    let flip = |session: &mut Session, args: &[String]| {
        let state = args.iter().find_map(|arg| arg.strip_prefix("--state=")).unwrap();
        session.restart_serve(args, || flip_bits(Path::new(state)));
    };
    let args = |state: &Path| vec![format!("--state={}", state.display())];
    let answers = sweep("flipped bits on disk", 2 * POINTS, |seed| {
        let (_, outcome) = restart_once(seed, &args, &flip)?;
        Ok(format!("{outcome:?}"))
    });
    assert!(answers.contains_key("Mean"), "no session went on: {answers:?}");
}

/// One bit in each KiB of every region.
fn flip_bits(state: &Path) {
    let regions = std::fs::read_dir(state).unwrap().map(|entry| entry.unwrap().path());
    let is_region = |path: &std::path::PathBuf| path.to_string_lossy().contains("region-");
    for path in regions.filter(is_region) {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.iter_mut().step_by(1024).for_each(|byte| *byte ^= 16);
        // In its place: the region keeps its size.
        std::fs::write(&path, bytes).unwrap();
    }
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
