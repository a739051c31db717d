//! The plans of rings and chains, played through without a socket.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use fedlane::topology::ring::{Item, Schedule, chunk_bytes, order, streams};
use fedlane::topology::{Host, Shape};
use proptest::prelude::*;

/// Plays a plan in which every rank sends in order and takes in order; gives for each rank and chunk
/// whose parts are in what it has at the end.
fn play(shape: Shape, ranks: usize, chunks: usize) -> Vec<BTreeMap<usize, BTreeSet<usize>>> {
    let schedule = Schedule::new(shape, ranks, 0..chunks);
    // For each connection, from rank and to rank: what its ends think goes over it.
    let mut connections: Vec<(usize, usize, VecDeque<Item>, VecDeque<Item>)> = Vec::new();
    for rank in 0..ranks {
        let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let (goes, comes) = (schedule.to_right(rank), schedule.from_left(right));
        connections.push((rank, right, goes.collect(), comes.collect()));
        let (goes, comes) = (schedule.to_left(rank), schedule.from_right(left));
        connections.push((rank, left, goes.collect(), comes.collect()));
    }
    // What a rank holds of a chunk, by (chunk, step to send).
    let mut held: Vec<BTreeMap<(usize, usize), BTreeSet<usize>>> = vec![BTreeMap::new(); ranks];
    let mut done = vec![BTreeMap::new(); ranks];
    let mut moved = true;
    while moved {
        moved = false;
        for (from, to, to_go, to_come) in &mut connections {
            let Some(item) = to_go.front().copied() else { continue };
            let parts = match item.step {
                0 => Some(BTreeSet::from([*from])),
                step => held[*from].remove(&(item.chunk, step)),
            };
            let Some(mut parts) = parts else { continue };
            to_go.pop_front();
            assert_eq!(to_come.pop_front(), Some(item), "both sides agree on the order");
            if item.step < schedule.first_mean() {
                assert!(parts.insert(*to), "nobody is added twice");
            }
            if item.step + 1 >= schedule.first_mean() {
                assert_eq!(parts.len(), ranks, "what is sent as the mean is whole");
                done[*to].insert(item.chunk, parts.clone());
            }
            held[*to].insert((item.chunk, item.step + 1), parts);
            moved = true;
        }
    }
    for (_, _, to_go, to_come) in connections {
        assert!(to_go.is_empty() && to_come.is_empty(), "nobody waits for ever");
    }
    done
}

fn shapes() -> impl Strategy<Value = Shape> {
    prop_oneof![Just(Shape::Ring), Just(Shape::Chain)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_gets_the_mean_of_every_chunk(
        shape in shapes(),
        ranks in 2_usize..=64,
        chunks in 0_usize..300,
    ) {
        let done = play(shape, ranks, chunks);
        for mean in done {
            prop_assert_eq!(mean.len(), chunks);
        }
    }

    #[test]
    fn ranks_of_a_ring_send_alike(ranks in 2_usize..=64, groups in 1_usize..20) {
        let chunks = ranks * groups;
        let schedule = Schedule::new(Shape::Ring, ranks, 0..chunks);
        for rank in 0..ranks {
            prop_assert_eq!(schedule.to_right(rank).count(), 2 * (ranks - 1) * groups);
        }
    }

    #[test]
    fn a_chain_uses_both_ways_of_its_connections_alike(
        ranks in 2_usize..=64,
        chunks in 0_usize..100,
    ) {
        let schedule = Schedule::new(Shape::Chain, ranks, 0..chunks);
        for rank in 0..ranks {
            let (left, right) = (schedule.has_left(rank), schedule.has_right(rank));
            prop_assert_eq!((left, right), (rank > 0, rank + 1 < ranks));
            prop_assert_eq!(schedule.to_left(rank).count(), if left { chunks } else { 0 });
            prop_assert_eq!(schedule.to_right(rank).count(), if right { chunks } else { 0 });
        }
    }

    #[test]
    fn chunks_are_whole_groups(bytes in 0_u64..1 << 40, ranks in 2_usize..=64, streams in 1_usize..8) {
        let chunk = chunk_bytes(bytes, ranks, streams, 512 << 10, 1);
        prop_assert!(chunk.is_multiple_of(64) && (4096..=(512 << 10) + 64).contains(&chunk), "{}", chunk);
        let chunks = bytes.div_ceil(chunk);
        let parts = (ranks * streams) as u64;
        // Groups lack no more than rounding to cache lines takes.
        let lack = chunks.next_multiple_of(parts) * chunk - bytes;
        prop_assert!(chunk == 4096 || lack <= 70 * (chunks + parts), "{}", lack);
    }
}

#[test]
fn a_host_of_any_ring_needs_little_memory_beside_its_models() {
    for shape in [Shape::Ring, Shape::Chain] {
        for (ranks, streams) in [(2, 1), (3, 2), (16, 8), (64, 2), (64, 8), (64, 64)] {
            for widening in [1, 2, 8] {
                let chunk = chunk_bytes(50 << 30, ranks, streams, 512 << 10, widening);
                let slots = Schedule::new(shape, ranks, 0..1).slots(1, false).all() as u64;
                let held = slots * streams as u64 * chunk * widening;
                // Of 64 ranks with 64 lanes each chunk has the least bytes.
                let most = if ranks * streams < 4096 { 130 << 20 } else { 600 << 20 };
                assert!(held <= most, "{ranks} ranks, {streams} lanes: {held}");
            }
        }
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
