//! What this process has used, and what the host still has.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// CPU seconds and page faults of this process since it started (getrusage(2)).
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Seconds in user mode.
    pub cpu_user_s: f64,
    /// Seconds in the kernel.
    pub cpu_kernel_s: f64,
    /// Page faults, minor and major.
    pub page_faults: u64,
}

/// Reads the counters of this process.
pub fn usage() -> Usage {
    // SAFETY: `rusage` is plain integers, for which zero is a value.
    let mut raw: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage`.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut raw) } != 0 {
        return Usage::default();
    }
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    Usage {
        cpu_user_s: seconds(raw.ru_utime),
        cpu_kernel_s: seconds(raw.ru_stime),
        page_faults: (raw.ru_minflt + raw.ru_majflt) as u64,
    }
}

/// Most memory this process ever held, in bytes (`VmHWM`; `ru_maxrss` would also count what the
/// parent held when it forked us).
pub fn peak_rss_bytes() -> u64 {
    field_kib("/proc/self/status", "VmHWM:").unwrap_or(0) << 10
}

/// Lets this process have `wanted` open files, as far as its hard limit allows; gives the limit
/// that it then has.
pub fn allow_open_files(wanted: u64) -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // Without a number there is no limit.
    let (now, most) = (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX));
    let raised = wanted.min(most);
    if raised <= now {
        return now;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit }) {
        Ok(()) => raised,
        Err(_) => now,
    }
}

/// From now on a file that would grow beyond `ulimit -f` is an error of the write, and not the end of
/// this process. Programs that it starts do not inherit that.
pub fn survive_file_size_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler = nothing as extern "C" fn(libc::c_int);
    // SAFETY: a handler that does nothing is safe wherever it interrupts the process.
    unsafe { libc::signal(libc::SIGXFSZ, handler as libc::sighandler_t) };
}

/// Bytes that may still be allocated, and what sets that bound.
pub fn available_memory() -> (u64, String) {
    let host = field_kib("/proc/meminfo", "MemAvailable:").map_or(u64::MAX, |kib| kib << 10);
    let mut least = (host, "MemAvailable of the host".to_string());
    for (left, file) in cgroup_left() {
        if left < least.0 {
            least = (left, format!("the cgroup limit in {}", file.display()));
        }
    }
    least
}

/// One directory of a control group that bounds this process.
pub struct CgroupLevel {
    /// Where its files are.
    pub directory: PathBuf,
    /// Whether it is of version 2, whose files have other names.
    pub unified: bool,
}

/// The levels of `controller` above this process, versions 1 and 2, innermost first.
pub fn cgroup_levels(controller: &str) -> io::Result<Vec<CgroupLevel>> {
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    Ok(groups.lines().flat_map(|line| levels_of(line, controller)).collect())
}

fn levels_of(line: &str, controller: &str) -> Vec<CgroupLevel> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
    else {
        return Vec::new();
    };
    let unified = controllers.is_empty();
    if !unified && !controllers.split(',').any(|c| c == controller) {
        return Vec::new();
    }
    let root = Path::new("/sys/fs/cgroup");
    let root = if unified { root.to_path_buf() } else { root.join(controller) };
    // A container sees its own group at the root: every level up to it may carry a limit.
    root.join(path.trim_start_matches('/'))
        .ancestors()
        .take_while(|level| level.starts_with(&root))
        .map(|level| CgroupLevel { directory: level.to_path_buf(), unified })
        .collect()
}

/// What each memory cgroup above this process leaves.
fn cgroup_left() -> Vec<(u64, PathBuf)> {
    cgroup_levels("memory").unwrap_or_default().iter().filter_map(level_left).collect()
}

fn level_left(level: &CgroupLevel) -> Option<(u64, PathBuf)> {
    let (limit, used) = match level.unified {
        true => ("memory.max", "memory.current"),
        false => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    };
    let file = level.directory.join(limit);
    let bound = number(&file)?;
    let used = number(&level.directory.join(used))?;
    let cache = field(&level.directory.join("memory.stat"), "inactive_file").unwrap_or(0);
    Some((bound.saturating_sub(used).saturating_add(cache), file))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn field_kib(file: &str, name: &str) -> Option<u64> {
    field(Path::new(file), name)
}
