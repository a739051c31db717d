//! Probing leaves nothing behind. A process of its own, because it counts what is open in it.

use std::fs;

use fedlane::probe;

fn entries(directory: &str) -> usize {
    fs::read_dir(directory).unwrap().count()
}

fn mounts() -> String {
    fs::read_to_string("/proc/self/mountinfo").unwrap()
}

#[test]
fn no_descriptor_mapping_thread_or_mount_stays() {
    let all = || {
        probe::host();
        probe::paths();
        probe::defaults();
    };
    // The first time the standard library and the allocator take what they keep.
    all();
    let before = (entries("/proc/self/fd"), entries("/proc/self/task"), mounts());
    all();
    let after = (entries("/proc/self/fd"), entries("/proc/self/task"), mounts());
    assert_eq!(before, after);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("fedlane (deleted)") && !maps.contains("/#"), "{maps}");
}
