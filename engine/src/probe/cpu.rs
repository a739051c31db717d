//! Cores, what bounds their use, and the instructions that averaging uses.

use serde::Serialize;

use super::{Fact, files};
use crate::sys::process::{self, CgroupLevel};

/// The cores of this host and what this process may use of them.
#[derive(Clone, Debug, Serialize)]
pub struct CpuReport {
    /// Cores that are switched on.
    pub cores_online: Fact<usize>,
    /// Cores that the affinity mask of this process leaves.
    pub cores_in_affinity_mask: Fact<usize>,
    /// CPU quotas of the control groups above this process; none when empty.
    pub cgroup_limits: Fact<Vec<CpuLimit>>,
    /// Cores that are left: so many lanes an aggregator opens by itself.
    pub cores_usable: Fact<usize>,
    /// Instructions that averaging uses where they exist.
    pub features: Vec<CpuFeature>,
}

/// A CPU quota of a control group.
#[derive(Clone, Debug, Serialize)]
pub struct CpuLimit {
    /// The file that sets it.
    pub file: String,
    /// CPU seconds per second.
    pub cores: f64,
}

/// A group of instructions.
#[derive(Clone, Debug, Serialize)]
pub struct CpuFeature {
    /// Its name.
    pub name: &'static str,
    /// Whether this CPU has it.
    pub present: bool,
}

pub fn report() -> CpuReport {
    CpuReport {
        cores_online: files::text("/sys/devices/system/cpu/online")
            .and_then(|list| count(&list).ok_or(format!("not a list of cores: {list:?}")))
            .into(),
        cores_in_affinity_mask: rustix::thread::sched_getaffinity(None)
            .map(|set| set.count() as usize)
            .map_err(|error| format!("sched_getaffinity: {error}"))
            .into(),
        cgroup_limits: process::cgroup_levels("cpu")
            .map(|levels| levels.iter().filter_map(quota).collect())
            .map_err(|error| format!("/proc/self/cgroup cannot be read: {error}"))
            .into(),
        cores_usable: std::thread::available_parallelism().map(usize::from).into(),
        features: features(),
    }
}

/// How many cores a list like `0-3,8` names.
fn count(list: &str) -> Option<usize> {
    let mut cores = 0;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cores += last.checked_sub(first)? + 1;
    }
    Some(cores)
}

fn quota(level: &CgroupLevel) -> Option<CpuLimit> {
    let (file, quota, period) = if level.unified {
        let file = level.directory.join("cpu.max");
        let words = files::words(&file).ok()?;
        let [quota, period] = words.as_slice() else { return None };
        (file, quota.parse().ok()?, period.parse().ok()?)
    } else {
        let file = level.directory.join("cpu.cfs_quota_us");
        let quota = files::text(&file).ok()?.parse().ok()?;
        let period = files::text(level.directory.join("cpu.cfs_period_us")).ok()?;
        (file, quota, period.parse().ok()?)
    };
    let (quota, period): (f64, f64) = (quota, period);
    // Version 1 writes -1, version 2 "max", where there is no quota.
    (quota > 0.0 && period > 0.0)
        .then(|| CpuLimit { file: file.display().to_string(), cores: quota / period })
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<CpuFeature> {
    vec![
        CpuFeature { name: "avx2", present: is_x86_feature_detected!("avx2") },
        CpuFeature { name: "f16c", present: is_x86_feature_detected!("f16c") },
        CpuFeature { name: "avx512f", present: is_x86_feature_detected!("avx512f") },
        CpuFeature { name: "avx512bw", present: is_x86_feature_detected!("avx512bw") },
        CpuFeature { name: "avx512vl", present: is_x86_feature_detected!("avx512vl") },
        CpuFeature { name: "avx512dq", present: is_x86_feature_detected!("avx512dq") },
    ]
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<CpuFeature> {
    vec![CpuFeature { name: "neon", present: std::arch::is_aarch64_feature_detected!("neon") }]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<CpuFeature> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::{count, quota};
    use crate::sys::process::CgroupLevel;

    #[test]
    fn lists_of_cores() {
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-3,8,10-11"), Some(7));
        for bad in ["", "3-1", "a", "0-", "0,,1"] {
            assert_eq!(count(bad), None, "{bad}");
        }
    }

    #[test]
    fn quotas_of_control_groups_of_both_versions() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name, text| std::fs::write(directory.path().join(name), text).unwrap();
        let cores = |unified| {
            let level = CgroupLevel { directory: directory.path().to_path_buf(), unified };
            quota(&level).map(|limit| limit.cores)
        };
        assert_eq!((cores(true), cores(false)), (None, None));
        write("cpu.max", "max 100000\n");
        write("cpu.cfs_quota_us", "-1\n");
        write("cpu.cfs_period_us", "100000\n");
        assert_eq!((cores(true), cores(false)), (None, None));
        write("cpu.max", "150000 100000\n");
        write("cpu.cfs_quota_us", "50000\n");
        assert_eq!((cores(true), cores(false)), (Some(1.5), Some(0.5)));
    }
}
