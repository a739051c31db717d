//! What the probe says about this host, held against what can be found out otherwise.

use std::collections::BTreeSet;
use std::fs;

use fedlane::paths::{ReceiveKind, SendKind};
use fedlane::probe::{self, Direction, Fact, Limit, PathReport, State};
use fedlane::receiver::Lands;

#[test]
fn every_path_of_the_table_is_reported_once() {
    let table = SendKind::all()
        .map(|kind| (Direction::Send, kind.name()))
        .chain(ReceiveKind::all().map(|kind| (Direction::Receive, kind.name())));
    let reported: Vec<_> = probe::paths().iter().map(|path| (path.direction, path.name)).collect();
    assert_eq!(reported, table.collect::<Vec<_>>());
}

#[test]
fn the_plain_paths_work_everywhere() {
    let paths = probe::paths();
    for (direction, name) in [(Direction::Send, "write"), (Direction::Receive, "read")] {
        let path =
            paths.iter().find(|path| path.direction == direction && path.name == name).unwrap();
        assert!(path.works && path.verified, "{path:?}");
    }
}

#[test]
fn a_path_that_works_has_moved_and_verified_its_bytes() {
    for path in probe::paths() {
        assert_eq!(path.works, path.moved_bytes > 0, "{path:?}");
        assert_eq!(path.verified, path.works && !path.drops_bytes, "{path:?}");
        assert!(!path.detail.is_empty() && !path.summary.is_empty(), "{path:?}");
        assert!(path.remedy != Some(String::new()), "{path:?}");
    }
}

#[test]
fn paths_that_drop_bytes_are_named() {
    let droppers = |paths: Vec<PathReport>| -> BTreeSet<&str> {
        paths.iter().filter(|path| path.drops_bytes).map(|path| path.name).collect()
    };
    let table = ReceiveKind::all().filter(|kind| kind.lands() == Lands::Nowhere);
    assert_eq!(droppers(probe::paths()), table.map(ReceiveKind::name).collect());
}

#[test]
fn the_defaults_are_paths_of_the_table() {
    let defaults = probe::defaults();
    defaults.send_path.known().unwrap().parse::<SendKind>().unwrap();
    defaults.receive_path.parse::<ReceiveKind>().unwrap();
}

#[test]
fn memory_and_cores_agree_with_proc() {
    let host = probe::host();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let total_kib: u64 = total.trim().trim_end_matches(" kB").parse().unwrap();
    assert_eq!(host.memory.memory_total_bytes, Fact::Known(total_kib << 10));
    assert!(host.memory.memory_available_bytes.known().unwrap() <= &(total_kib << 10));
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:")).unwrap();
    let allowed: u32 =
        mask.chars().filter_map(|digit| digit.to_digit(16)).map(u32::count_ones).sum();
    assert_eq!(host.cpu.cores_in_affinity_mask, Fact::Known(allowed as usize));
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(host.kernel.ends_with(release.trim()), "{}", host.kernel);
}

#[test]
fn limits_agree_with_proc() {
    let host = probe::host();
    let table = fs::read_to_string("/proc/self/limits").unwrap();
    let limits = |name: &str| -> (Limit, Limit) {
        let line = table.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let limit = |word: &str| word.parse().map_or(Limit::Unlimited, Limit::At);
        (limit(words[0]), limit(words[1]))
    };
    for (name, limit) in [
        ("Max open files", host.sockets.open_files_limit),
        ("Max locked memory", host.memory.locked_memory_limit_bytes),
        ("Max address space", host.memory.address_space_limit_bytes),
    ] {
        assert_eq!((limit.soft, limit.hard), limits(name), "{name}");
    }
}

#[test]
fn a_region_is_called_huge_only_when_it_is() {
    let region = probe::host().memory.region;
    let mapped = region.huge_mapped_bytes.known().copied().unwrap();
    assert_eq!(region.huge.state == State::Ok, mapped == 2 << 20, "{region:?}");
}

#[test]
fn whatever_is_off_says_why() {
    let host = probe::host();
    for feature in host.features.iter().chain([&host.sockets.cubic, &host.memory.region.huge]) {
        assert!(!feature.detail.is_empty(), "{feature:?}");
        assert!(feature.remedy != Some(String::new()), "{feature:?}");
    }
}
