//! A stream is admitted once, however many come for it at the same time.

use std::sync::Barrier;

use fedlane::wire::hello::Answer;

use crate::common::{floats, patient, secret};
use crate::peer::Peer;

/// Who comes at once, and how often.
const VISITORS: usize = 8;
const REPEATS: u8 = 20;

#[test]
fn of_many_who_come_for_one_stream_one_is_admitted() {
    let exchange = patient();
    for number in 0..REPEATS {
        let secret = secret(number + 1);
        exchange.expect(secret);
        let mut peer = Peer::join(&exchange, "site", &floats(), secret);
        std::thread::scope(|scope| {
            let wanted = [crate::common::wanted(number + 1, 1.0)];
            let exchange = &exchange;
            let averaged = scope.spawn(move || exchange.average(&wanted, crate::common::PATIENCE));
            peer.await_plan();
            let start = Barrier::new(VISITORS);
            let answers: Vec<Answer> = std::thread::scope(|scope| {
                let visitors: Vec<_> = (0..VISITORS)
                    .map(|_| {
                        let (dial, start) = (peer.dialler(0), &start);
                        scope.spawn(move || {
                            start.wait();
                            dial().1
                        })
                    })
                    .collect();
                visitors.into_iter().map(|visitor| visitor.join().unwrap()).collect()
            });
            let count = |answer| answers.iter().filter(|other| **other == answer).count();
            assert_eq!((count(Answer::Admitted), count(Answer::Taken)), (1, VISITORS - 1));
            drop(peer);
            averaged.join().unwrap().err().unwrap();
        });
    }
}
