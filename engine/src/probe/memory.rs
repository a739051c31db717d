//! Memory, what bounds it, and on which pages a region lands.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use serde::Serialize;

use super::obstacle::Obstacle;
use super::{Fact, Feature, ResourceLimit, State, files};
use crate::error::RegionError;
use crate::region::Region;
use crate::sys::memory::{HUGE_PAGE_BYTES, Mapping, Pages};
use crate::sys::process::{self, CgroupLevel};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// `f_type` of a tmpfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Memory of this host and what bounds its use.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// All of it.
    pub memory_total_bytes: Fact<u64>,
    /// What new processes could take without swapping.
    pub memory_available_bytes: Fact<u64>,
    /// Bounds of the control groups above this process; none when empty.
    pub cgroup_limits: Fact<Vec<MemoryLimit>>,
    /// What this process may still take.
    pub allocatable_bytes: Fact<u64>,
    /// What sets that bound.
    pub allocatable_bound: String,
    /// `RLIMIT_AS`.
    pub address_space_limit_bytes: ResourceLimit,
    /// `RLIMIT_MEMLOCK`.
    pub locked_memory_limit_bytes: ResourceLimit,
    /// What is mounted on `/dev/shm`.
    pub dev_shm: Fact<SharedMemory>,
    /// When private memory gets huge pages.
    pub transparent_huge_pages: Fact<String>,
    /// When memory files get huge pages.
    pub transparent_huge_pages_of_memory_files: Fact<String>,
    /// Reserved huge pages, by size.
    pub reserved_huge_pages: Fact<Vec<HugePool>>,
    /// A region of 2 MiB that was made for this report.
    pub region: RegionReport,
}

/// A memory bound of a control group.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLimit {
    /// The file that sets it.
    pub file: String,
    /// The bound.
    pub limit_bytes: u64,
    /// What the group uses.
    pub used_bytes: Fact<u64>,
}

/// The file system on `/dev/shm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SharedMemory {
    /// Whether it is memory.
    pub tmpfs: bool,
    /// Whether something is mounted there; otherwise it is a directory of `/dev`.
    pub mounted: bool,
    /// Its size.
    pub size_bytes: u64,
    /// What is free of it.
    pub free_bytes: u64,
}

/// Huge pages of one size that the administrator has set apart.
#[derive(Clone, Debug, Serialize)]
pub struct HugePool {
    /// Size of a page.
    pub page_bytes: u64,
    /// Pages set apart.
    pub pages: u64,
    /// Pages not in use.
    pub free_pages: u64,
}

/// How making a region of 2 MiB went.
#[derive(Clone, Debug, Serialize)]
pub struct RegionReport {
    /// The kind of pages that fedlane could ask for: "huge" or "base".
    pub pages: Fact<&'static str>,
    /// Bytes of the region that really are mapped with huge pages.
    pub huge_mapped_bytes: Fact<u64>,
    /// Whether it is on huge pages, and why not.
    #[serde(flatten)]
    pub huge: Feature,
}

pub fn report() -> MemoryReport {
    let meminfo = files::text("/proc/meminfo");
    let field = |name: &str| match &meminfo {
        Ok(text) => files::kib_field(text, name).ok_or(format!("/proc/meminfo has no line {name}")),
        Err(error) => Err(error.clone()),
    };
    let (allocatable, allocatable_bound) = allocatable();
    MemoryReport {
        memory_total_bytes: field("MemTotal:").into(),
        memory_available_bytes: field("MemAvailable:").into(),
        cgroup_limits: process::cgroup_levels("memory")
            .map(|levels| levels.iter().flat_map(limits).collect())
            .map_err(|error| format!("/proc/self/cgroup cannot be read: {error}"))
            .into(),
        allocatable_bytes: allocatable,
        allocatable_bound,
        address_space_limit_bytes: ResourceLimit::of(Resource::As),
        locked_memory_limit_bytes: ResourceLimit::of(Resource::Memlock),
        dev_shm: dev_shm(Path::new("/dev/shm")).into(),
        transparent_huge_pages: files::chosen(format!("{THP}/enabled")).into(),
        transparent_huge_pages_of_memory_files: files::chosen(format!("{THP}/shmem_enabled"))
            .into(),
        reserved_huge_pages: huge_pools().into(),
        region: region(),
    }
}

/// What a region may take, by the same count as regions go by.
fn allocatable() -> (Fact<u64>, String) {
    let (bytes, bound) = process::available_memory();
    if bytes == u64::MAX {
        let unknown = "neither /proc/meminfo nor a control group says".to_string();
        return (Fact::Unknown { unknown }, "unknown".to_string());
    }
    (Fact::Known(bytes), bound)
}

/// Version 1 writes a huge number where there is no limit, version 2 "max".
const NO_LIMIT_BYTES: u64 = 1 << 62;

fn limits(level: &CgroupLevel) -> Vec<MemoryLimit> {
    let (limits, used): (&[&str], _) = match level.unified {
        true => (&["memory.max", "memory.high"], "memory.current"),
        false => (&["memory.limit_in_bytes"], "memory.usage_in_bytes"),
    };
    let limit = |name: &&str| {
        let file = level.directory.join(name);
        let limit_bytes = files::number(&file).ok().filter(|&bytes| bytes < NO_LIMIT_BYTES)?;
        let used_bytes = files::number(level.directory.join(used)).into();
        Some(MemoryLimit { file: file.display().to_string(), limit_bytes, used_bytes })
    };
    limits.iter().filter_map(limit).collect()
}

fn dev_shm(directory: &Path) -> Result<SharedMemory, String> {
    let failed = |error: io::Error| format!("{} cannot be looked at: {error}", directory.display());
    let stat = rustix::fs::statfs(directory).map_err(|error| failed(error.into()))?;
    let device = |path: &Path| fs::metadata(path).map(|data| data.dev()).map_err(failed);
    // The kernel's types differ between architectures, the values are never negative.
    let block_bytes = stat.f_bsize as u64;
    Ok(SharedMemory {
        tmpfs: stat.f_type as u64 == TMPFS_MAGIC,
        mounted: device(directory)? != device(&directory.join(".."))?,
        size_bytes: block_bytes.saturating_mul(stat.f_blocks),
        free_bytes: block_bytes.saturating_mul(stat.f_bavail),
    })
}

fn huge_pools() -> Result<Vec<HugePool>, String> {
    let directory = "/sys/kernel/mm/hugepages";
    let failed = |error: io::Error| format!("{directory} cannot be read: {error}");
    let mut pools = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // Each is named like hugepages-2048kB.
        let kib = name.strip_prefix("hugepages-").and_then(|rest| rest.strip_suffix("kB"));
        let Some(kib) = kib.and_then(|kib| kib.parse::<u64>().ok()) else { continue };
        pools.push(HugePool {
            page_bytes: kib.saturating_mul(1024),
            pages: files::number(path.join("nr_hugepages"))?,
            free_pages: files::number(path.join("free_hugepages"))?,
        });
    }
    pools.sort_by_key(|pool| pool.page_bytes);
    Ok(pools)
}

/// Makes a region and looks at what it got.
fn region() -> RegionReport {
    let region = match Region::new(HUGE_PAGE_BYTES) {
        Ok(region) => region,
        Err(error) => return no_region(&error),
    };
    let mapped = huge_mapped_bytes(region.bytes().as_ptr() as usize);
    let pages = region.pages();
    drop(region);
    let seen = match (&mapped, pages) {
        (Ok(bytes), _) if *bytes >= HUGE_PAGE_BYTES => Ok("a region of 2 MiB is on one huge page"),
        (_, Pages::Base) => Err(why_refused()),
        (Ok(_), Pages::Huge) => Err(why_small()),
        (Err(why), Pages::Huge) => {
            Err((State::Unknown, Obstacle { why: why.clone(), remedy: None }))
        }
    };
    let (state, detail, remedy) = match seen {
        Ok(detail) => (State::Ok, detail.to_string(), None),
        Err((state, Obstacle { why, remedy })) => (state, why, remedy),
    };
    RegionReport {
        pages: Fact::Known(if pages == Pages::Huge { "huge" } else { "base" }),
        huge_mapped_bytes: mapped.into(),
        huge: Feature { name: "huge pages", state, detail, remedy },
    }
}

fn no_region(error: &RegionError) -> RegionReport {
    let Obstacle { why, remedy } = obstacle(error);
    RegionReport {
        pages: Fact::Unknown { unknown: why.clone() },
        huge_mapped_bytes: Fact::Unknown { unknown: why.clone() },
        huge: Feature { name: "huge pages", state: State::Unknown, detail: why, remedy },
    }
}

/// Why there is no region.
pub fn obstacle(error: &RegionError) -> Obstacle {
    match error {
        RegionError::Map { source, .. } => Obstacle::io("a region cannot be mapped", source),
        RegionError::File { source, .. } => Obstacle::io("a region cannot be kept", source),
        RegionError::NoMemory { bound, available, .. } => Obstacle::new(
            format!("no memory for a region: {bound} leaves {} MiB", available >> 20),
            "free memory, or allow more of it",
        ),
    }
}

/// Why a region has small pages although its tmpfs was made for huge ones: the kernel makes such
/// a tmpfs even where it will not fill it so.
fn why_small() -> (State, Obstacle) {
    let denied = files::chosen(format!("{THP}/shmem_enabled")).is_ok_and(|choice| choice == "deny");
    let obstacle = match denied {
        true => Obstacle::new(
            "huge pages of memory files are denied on this host",
            format!("as root: echo never > {THP}/shmem_enabled"),
        ),
        false => Obstacle::new(
            "the kernel gave small pages where huge ones were asked for: it has none free",
            "free memory, or as root: echo 1 > /proc/sys/vm/compact_memory",
        ),
    };
    (State::Off, obstacle)
}

/// Why there is no tmpfs with huge pages. A region does not say, so it is tried again.
fn why_refused() -> (State, Obstacle) {
    match Mapping::new(HUGE_PAGE_BYTES, Pages::Huge) {
        Err(error) => (State::Off, tmpfs_obstacle(&error)),
        Ok(_) => (
            State::Unknown,
            Obstacle::new("huge pages were refused once and granted once", "try again"),
        ),
    }
}

fn tmpfs_obstacle(error: &io::Error) -> Obstacle {
    let why = format!("a tmpfs with huge pages cannot be made: {error}");
    let may_mount = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    match error.raw_os_error() {
        Some(libc::EPERM) if !may_mount => Obstacle::new(
            why,
            format!(
                "give the process CAP_SYS_ADMIN, or start it by `unshare -Urm`, or as root: \
                 echo always > {THP}/shmem_enabled"
            ),
        ),
        Some(libc::ENOSYS) => {
            Obstacle::new(why, "use Linux 5.2 or newer, and a seccomp profile that allows fsopen")
        }
        Some(libc::EINVAL) => Obstacle::new(
            why,
            "use a kernel built with CONFIG_TRANSPARENT_HUGEPAGE, on a CPU that has huge pages",
        ),
        _ => Obstacle::io("a tmpfs with huge pages cannot be made", error),
    }
}

/// How much of the mapping that holds `address` is mapped with huge pages.
fn huge_mapped_bytes(address: usize) -> Result<u64, String> {
    let smaps = files::text("/proc/self/smaps")?;
    huge_mapped_in(&smaps, address)
        .ok_or_else(|| "/proc/self/smaps does not say how the region is mapped".to_string())
}

fn huge_mapped_in(smaps: &str, address: usize) -> Option<u64> {
    let mut lines = smaps.lines().skip_while(|line| !holds(line, address));
    lines.next()?;
    let of_region: Vec<&str> = lines.take_while(|line| range(line).is_none()).collect();
    files::kib_field(&of_region.join("\n"), "ShmemPmdMapped:")
}

fn holds(line: &str, address: usize) -> bool {
    range(line).is_some_and(|(start, end)| (start..end).contains(&address))
}

/// The addresses at the head of a mapping in smaps.
fn range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Fact, dev_shm, huge_mapped_in, limits};
    use crate::sys::process::CgroupLevel;

    const SMAPS: &str = "\
7f0000000000-7f0000200000 rw-s 00000000 00:1b 5 /memfd:a (deleted)
Size:               2048 kB
ShmemPmdMapped:        0 kB
7f0000200000-7f0000400000 rw-s 00000000 00:1c 6 /#6 (deleted)
Size:               2048 kB
ShmemPmdMapped:     2048 kB
7f0000400000-7f0000401000 r--p 00000000 00:00 0
Size:                  4 kB
";

    #[test]
    fn finds_the_mapping_of_an_address() {
        assert_eq!(huge_mapped_in(SMAPS, 0x7f00_0010_0000), Some(0));
        assert_eq!(huge_mapped_in(SMAPS, 0x7f00_0020_0000), Some(2 << 20));
        assert_eq!(huge_mapped_in(SMAPS, 0x7f00_0040_0000), None);
        assert_eq!(huge_mapped_in(SMAPS, 0x1000), None);
        assert_eq!(huge_mapped_in("", 0), None);
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_it() {
        let error = dev_shm(Path::new("/no/such/place")).unwrap_err();
        assert!(error.contains("/no/such/place"), "{error}");
    }

    #[test]
    fn bounds_of_control_groups_of_both_versions() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name, text| std::fs::write(directory.path().join(name), text).unwrap();
        let level = |unified| CgroupLevel { directory: directory.path().to_path_buf(), unified };
        assert!(limits(&level(true)).is_empty() && limits(&level(false)).is_empty());
        write("memory.limit_in_bytes", "9223372036854771712\n");
        write("memory.max", "max\n");
        write("memory.high", "4096\n");
        assert!(limits(&level(false)).is_empty());
        let bounds = limits(&level(true));
        assert_eq!((bounds.len(), bounds[0].limit_bytes), (1, 4096));
        assert!(matches!(bounds[0].used_bytes, Fact::Unknown { .. }));
        write("memory.max", "8192\n");
        write("memory.current", "512\n");
        assert_eq!(limits(&level(true))[0].used_bytes, Fact::Known(512));
    }
}
