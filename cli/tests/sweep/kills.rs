//! Processes are killed and stopped at many points of a session.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fedlane_testing::{Dice, Kind, Plan};
use rustix::process::Signal;

use crate::faults::{anywhere, layout};
use crate::points::sweep;
use crate::process::send_signal;
use crate::session::{Behind, Outcome, SOON, Session};

/// Who is hit, and by what.
const BLOWS: [(Whom, Signal); 4] = [
    (Whom::Client, Signal::KILL),
    (Whom::Client, Signal::STOP),
    (Whom::Aggregator, Signal::KILL),
    (Whom::Aggregator, Signal::STOP),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Whom {
    Client,
    Aggregator,
}

/// What is to be hit.
#[derive(PartialEq)]
enum Target {
    /// It connects before this test has noted its number.
    Unknown,
    Process(u32),
    /// It was hit, or need not be any more.
    Over,
}

impl Target {
    fn is_hit_by(&mut self, signal: Signal) -> bool {
        if let Target::Process(pid) = *self {
            send_signal(pid, signal);
            *self = Target::Over;
        }
        *self == Target::Over
    }
}

fn strike(target: &Mutex<Target>, signal: Signal) {
    let until = Instant::now() + SOON;
    while !target.lock().unwrap().is_hit_by(signal) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a point came to: who was hit, by which signal, and how the others fared; whom nobody hit had
/// finished before.
type Answer = (Whom, i32, bool, Outcome);

/// Hits a process when the victim's network has moved some byte, and up to 15 ms later.
fn point(seed: u64) -> Result<Answer, String> {
    let mut dice = Dice::new(seed);
    let (whom, signal) = BLOWS[(seed % 4) as usize];
    let (which, direction, at_byte) = anywhere(&mut dice);
    // Half of them while the byte waits, the others when it and more have gone.
    let late = Duration::from_millis(dice.below(16).saturating_sub(8));
    let target = Arc::new(Mutex::new(Target::Unknown));
    let aimed = target.clone();
    let call = move || {
        let aimed = aimed.clone();
        match late.is_zero() {
            true => strike(&aimed, signal),
            false => drop(std::thread::spawn(move || {
                std::thread::sleep(late);
                strike(&aimed, signal);
            })),
        }
    };
    let plan = Plan::one(which, direction, at_byte, Kind::Call(Arc::new(call)));
    let mut session = Session::start(layout(seed), plan, Behind::Victim);
    let process = match whom {
        Whom::Client => session.victim(),
        Whom::Aggregator => &session.serve,
    };
    let (name, pid) = (process.name.clone(), process.pid());
    *target.lock().unwrap() = Target::Process(pid);
    let what = format!("{whom:?} {signal:?} at {which:?} {direction:?} byte {at_byte} + {late:?}");
    let told = |wrong| format!("{what}: {wrong}");
    let mut ended = session.end_all_but(&name).map_err(told)?;
    // From now on it may be waited for, and its number may become that of another process.
    let is_hit = std::mem::replace(&mut *target.lock().unwrap(), Target::Over) == Target::Over;
    if is_hit && signal == Signal::STOP {
        // It finds out when it wakes.
        send_signal(pid, Signal::CONT);
    }
    session.await_end(&name).map_err(told)?;
    if !(is_hit && signal == Signal::KILL) {
        ended.push(session.process(&name).end());
    }
    let outcome = session.check(&ended).map_err(told)?;
    match is_hit || outcome == Outcome::Mean {
        true => Ok((whom, signal.as_raw(), is_hit, outcome)),
        false => Err(told(format!("{outcome:?}, and nobody was hit"))),
    }
}

fn kill_sweep(points: u64) {
    let answers = sweep("kill sweep", points, point);
    println!("who was hit, by which signal, whether in time, how it ended: {answers:#?}");
    let count = |is_hit| {
        let counted = answers.iter().filter(|((_, _, hit, _), _)| *hit == is_hit);
        counted.map(|(_, count)| count).sum::<usize>()
    };
    // A sweep that mostly misses shows nothing.
    assert!(count(true) >= 2 * count(false), "{answers:?}");
}

#[test]
fn kill_sweep_100() {
    kill_sweep(100);
}

/// `./test --sweep` runs it.
#[test]
#[ignore = "long"]
fn kill_sweep_300() {
    kill_sweep(300);
}
