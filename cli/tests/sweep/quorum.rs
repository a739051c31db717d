//! With `--min-clients` a session goes on without a client that is lost: the mean is exactly that of
//! those who are said to be in it.

use fedlane_testing::{Dice, Fault, Kind, Plan, Scope, Then};

use crate::faults::{anywhere, layout};
use crate::model::EVERYONE;
use crate::points::sweep;
use crate::session::{Behind, Outcome, Session, VICTIM};

const POINTS: u64 = 60;

/// The victim is lost at many points. Everyone else succeeds.
fn goes_on(what: &str, args: &[&str], kind: Kind, then: Then) {
    let args: Vec<String> = args.iter().map(|arg| arg.to_string()).collect();
    let outcomes = sweep(what, POINTS, |seed| {
        let (which, direction, at_byte) = anywhere(&mut Dice::new(seed));
        let fault = Fault { which, direction, at_byte, kind: kind.clone() };
        let told = |wrong| format!("{which:?} {direction:?} byte {at_byte}: {wrong}");
        let plan = Plan { faults: vec![fault], then };
        let mut session = Session::start_with(layout(seed), plan, Behind::Victim, &args);
        session.may_lack_victim = true;
        let outcome = session.conclude().map_err(told)?;
        if !session.serve.end().status.success() || outcome == Outcome::Error {
            return Err(told(format!("{outcome:?}\n{}", session.story())));
        }
        let said = session.serve.said();
        let members = session.members_of("serve");
        let lacks = members == Some(EVERYONE & !(1 << VICTIM));
        // One that came too late to take part is no member.
        let told_so =
            said.contains("the mean of a, c, without b") || said.contains("the mean of 2 clients");
        if told_so != lacks {
            return Err(told(format!("{members:?} is not what was said\n{}", session.story())));
        }
        Ok((outcome, lacks))
    });
    println!("{what}: {outcomes:?}");
    let lacking: usize = outcomes.iter().filter(|((_, lacks), _)| *lacks).map(|(_, n)| n).sum();
    assert!(lacking > 0, "the victim was never lost before its update was whole");
}

#[test]
fn without_a_client_that_is_lost() {
    goes_on("lost", &["--min-clients=2"], Kind::Drop(Scope::All), Then::Refuse);
}

#[test]
fn without_a_client_that_vanishes() {
    goes_on("vanished", &["--min-clients=2"], Kind::Stall(Scope::All, None), Then::Silent);
}

#[test]
fn without_a_client_that_is_late() {
    let args = ["--min-clients=2", "--round-deadline=0.3"];
    goes_on("late", &args, Kind::Stall(Scope::All, None), Then::Silent);
}

#[test]
fn without_a_client_that_is_lost_of_spooled_updates() {
    let args = ["--min-clients=2", "--on-loss=spool"];
    goes_on("lost from a spool", &args, Kind::Drop(Scope::All), Then::Refuse);
}
