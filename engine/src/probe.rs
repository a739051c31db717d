//! What this host can do, what it cannot, and what would change that.
//!
//! [`host`] reads limits and tries single kernel features; [`paths`] really moves bytes over
//! every path of the table in [`crate::paths`]. Nothing of it changes the host, loads a kernel
//! module or leaves anything behind. What cannot be found out is an [`Fact::Unknown`] that says
//! why, so a container that hides half of `/proc` still gets a report.

mod cpu;
mod features;
mod files;
mod memory;
mod obstacle;
mod sockets;
mod trial;

use serde::{Serialize, Serializer};

pub use cpu::{CpuFeature, CpuLimit, CpuReport};
pub use memory::{HugePool, MemoryLimit, MemoryReport, RegionReport, SharedMemory};
pub use sockets::{BufferSizes, SocketReport};
pub use trial::{Defaults, Direction, PathReport, defaults, paths};

/// Something that was looked up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Fact<T> {
    /// What was found.
    Known(T),
    /// It cannot be found out here.
    Unknown {
        /// Why not.
        unknown: String,
    },
}

impl<T> Fact<T> {
    /// What was found, if it was.
    pub fn known(&self) -> Option<&T> {
        match self {
            Fact::Known(value) => Some(value),
            Fact::Unknown { .. } => None,
        }
    }
}

impl<T, E: ToString> From<Result<T, E>> for Fact<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(value) => Fact::Known(value),
            Err(error) => Fact::Unknown { unknown: error.to_string() },
        }
    }
}

/// A bound, or none: a number or the word "unlimited" in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// So much.
    At(u64),
    /// No bound.
    Unlimited,
}

impl From<Option<u64>> for Limit {
    fn from(limit: Option<u64>) -> Self {
        limit.map_or(Limit::Unlimited, Limit::At)
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Limit::At(value) => serializer.serialize_u64(*value),
            Limit::Unlimited => serializer.serialize_str("unlimited"),
        }
    }
}

/// A resource limit of this process (getrlimit(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ResourceLimit {
    /// What holds now.
    pub soft: Limit,
    /// Up to where this user may raise it.
    pub hard: Limit,
}

impl ResourceLimit {
    fn of(resource: rustix::process::Resource) -> ResourceLimit {
        let limit = rustix::process::getrlimit(resource);
        ResourceLimit { soft: limit.current.into(), hard: limit.maximum.into() }
    }
}

/// Whether something can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It was tried and works.
    Ok,
    /// It does not.
    Off,
    /// It could not be tried.
    Unknown,
}

/// A feature of the kernel, tried.
#[derive(Clone, Debug, Serialize)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// Whether it can be used.
    pub state: State,
    /// What was seen: for one that is off or unknown, why.
    pub detail: String,
    /// What would change it, where that is known.
    pub remedy: Option<String>,
}

/// What this host offers.
#[derive(Clone, Debug, Serialize)]
pub struct HostReport {
    /// Name and release of the kernel.
    pub kernel: String,
    /// The machine's architecture, as the kernel names it.
    pub architecture: String,
    /// Cores and what they can do.
    pub cpu: CpuReport,
    /// Memory and its limits.
    pub memory: MemoryReport,
    /// Sockets, pipes and their limits.
    pub sockets: SocketReport,
    /// Single features of the kernel, each tried.
    pub features: Vec<Feature>,
}

/// Looks at this host. Takes some milliseconds.
pub fn host() -> HostReport {
    let name = rustix::system::uname();
    HostReport {
        kernel: format!(
            "{} {}",
            name.sysname().to_string_lossy(),
            name.release().to_string_lossy()
        ),
        architecture: name.machine().to_string_lossy().into_owned(),
        cpu: cpu::report(),
        memory: memory::report(),
        sockets: sockets::report(),
        features: features::all(),
    }
}
