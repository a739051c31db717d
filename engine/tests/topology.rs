//! The plan of a ring, played through without a socket.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use fedlane::topology::Host;
use fedlane::topology::ring::{Item, Schedule, chunk_bytes, order, streams};
use proptest::prelude::*;

/// Plays a ring in which every rank sends in order and takes in order; gives for each rank and chunk
/// whose parts are in what it has at the end.
fn play(ranks: usize, chunks: usize) -> Vec<BTreeMap<usize, BTreeSet<usize>>> {
    let schedule = Schedule::new(ranks, 0..chunks);
    let mut to_go: Vec<VecDeque<Item>> =
        (0..ranks).map(|rank| schedule.sent_by(rank).collect()).collect();
    let mut to_come: Vec<VecDeque<Item>> =
        (0..ranks).map(|rank| schedule.received_by(rank).collect()).collect();
    // What a rank holds of a chunk after having received it in a step, by (chunk, step to send).
    let mut held: Vec<BTreeMap<(usize, usize), BTreeSet<usize>>> = vec![BTreeMap::new(); ranks];
    let mut done = vec![BTreeMap::new(); ranks];
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..ranks {
            let Some(item) = to_go[rank].front().copied() else { continue };
            let parts = match item.step {
                0 => Some(BTreeSet::from([rank])),
                step => held[rank].remove(&(item.chunk, step)),
            };
            let Some(mut parts) = parts else { continue };
            to_go[rank].pop_front();
            let right = (rank + 1) % ranks;
            assert_eq!(to_come[right].pop_front(), Some(item), "both sides agree on the order");
            if item.step < schedule.first_mean() {
                assert!(parts.insert(right), "nobody is added twice");
            }
            if item.step + 1 >= schedule.first_mean() {
                assert_eq!(parts.len(), ranks, "what is sent as the mean is whole");
                done[right].insert(item.chunk, parts.clone());
            }
            held[right].insert((item.chunk, item.step + 1), parts);
            moved = true;
        }
    }
    assert!(to_go.iter().chain(&to_come).all(VecDeque::is_empty), "nobody waits for ever");
    done
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_gets_the_mean_of_every_chunk(ranks in 2_usize..=64, chunks in 0_usize..300) {
        let done = play(ranks, chunks);
        for mean in done {
            prop_assert_eq!(mean.len(), chunks);
        }
    }

    #[test]
    fn ranks_send_alike(ranks in 2_usize..=64, groups in 1_usize..20) {
        let chunks = ranks * groups;
        let schedule = Schedule::new(ranks, 0..chunks);
        for rank in 0..ranks {
            prop_assert_eq!(schedule.sent_by(rank).count(), 2 * (ranks - 1) * groups);
        }
    }

    #[test]
    fn chunks_are_whole_groups(bytes in 0_u64..1 << 40, ranks in 2_usize..=64, streams in 1_usize..8) {
        let chunk = chunk_bytes(bytes, ranks, streams, 512 << 10);
        prop_assert!(chunk.is_multiple_of(64) && (4096..=(512 << 10) + 64).contains(&chunk), "{}", chunk);
        let chunks = bytes.div_ceil(chunk);
        let parts = (ranks * streams) as u64;
        // Groups lack no more than rounding to cache lines takes.
        let lack = chunks.next_multiple_of(parts) * chunk - bytes;
        prop_assert!(chunk == 4096 || lack <= 70 * (chunks + parts), "{}", lack);
    }
}

fn host(name: &str, ip: [u8; 4]) -> Host {
    Host { name: name.into(), ip: IpAddr::from(ip) }
}

#[test]
fn hosts_of_one_machine_stand_side_by_side() {
    let hosts = [
        host("d", [10, 0, 0, 1]),
        host("a", [10, 0, 0, 2]),
        host("b", [10, 0, 0, 1]),
        host("c", [10, 0, 0, 2]),
    ];
    assert_eq!(order(&hosts), [2, 0, 1, 3]);
    assert_eq!(streams(&hosts, 8), 4);
    assert_eq!(streams(&hosts, 1), 2);
}
