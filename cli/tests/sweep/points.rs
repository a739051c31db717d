//! Runs many points, some at a time, and says which failed.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sessions wait more than they compute, so there are more of them than cores.
const AT_ONCE: usize = 6;

/// Runs `point` with the seeds below `usual`, or as the environment says, and gives how often each
/// answer came.
pub fn sweep<T: Ord + Send>(
    what: &str,
    usual: u64,
    point: impl Fn(u64) -> Result<T, String> + Sync,
) -> BTreeMap<T, usize> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seeds = match number("FEDLANE_SWEEP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FEDLANE_SWEEP_POINTS").unwrap_or(usual),
    };
    let next = AtomicU64::new(seeds.start);
    let (answers, failures) = (Mutex::new(BTreeMap::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= seeds.end {
                        return;
                    }
                    match point(seed) {
                        Ok(answer) => *answers.lock().unwrap().entry(answer).or_default() += 1,
                        Err(failure) => {
                            let line = format!("{what}, FEDLANE_SWEEP_SEED={seed}: {failure}");
                            failures.lock().unwrap().push(line);
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    let (count, all) = (failures.len(), seeds.end - seeds.start);
    assert!(count == 0, "{count} of {all} points failed:\n{}", failures.join("\n\n"));
    answers.into_inner().unwrap()
}
