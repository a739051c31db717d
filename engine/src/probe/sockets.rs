//! Limits of sockets and pipes, and the congestion controls.

use std::net::TcpListener;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::pipe::{self, PipeFlags};
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use serde::Serialize;

use super::obstacle::Obstacle;
use super::{Fact, Feature, ResourceLimit, State, files};
use crate::limits;

const IPV4: &str = "/proc/sys/net/ipv4";
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// What bounds sockets and pipes.
#[derive(Clone, Debug, Serialize)]
pub struct SocketReport {
    /// `RLIMIT_NOFILE`.
    pub open_files_limit: ResourceLimit,
    /// Largest pipe of a user without rights.
    pub pipe_max_bytes: Fact<u64>,
    /// Size of a pipe for which fedlane's usual size was asked.
    pub pipe_granted_bytes: Fact<u64>,
    /// Receive buffers of TCP.
    pub tcp_receive_buffer_bytes: Fact<BufferSizes>,
    /// Send buffers of TCP.
    pub tcp_send_buffer_bytes: Fact<BufferSizes>,
    /// Largest receive buffer that may be asked for.
    pub receive_buffer_max_bytes: Fact<u64>,
    /// Largest send buffer that may be asked for.
    pub send_buffer_max_bytes: Fact<u64>,
    /// Congestion control of new sockets.
    pub congestion_control: Fact<String>,
    /// Those that the kernel has ready.
    pub congestion_controls_available: Fact<Vec<String>>,
    /// Those that a user without rights may choose.
    pub congestion_controls_allowed: Fact<Vec<String>>,
    /// Whether a socket can have CUBIC, which fedlane takes between processes of one host.
    pub cubic: Feature,
}

/// Sizes between which the kernel tunes a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BufferSizes {
    /// Kept even under memory pressure.
    pub min: u64,
    /// To begin with.
    pub default: u64,
    /// At most.
    pub max: u64,
}

pub fn report() -> SocketReport {
    SocketReport {
        open_files_limit: ResourceLimit::of(Resource::Nofile),
        pipe_max_bytes: files::number("/proc/sys/fs/pipe-max-size").into(),
        pipe_granted_bytes: pipe_granted().into(),
        tcp_receive_buffer_bytes: sizes("tcp_rmem").into(),
        tcp_send_buffer_bytes: sizes("tcp_wmem").into(),
        receive_buffer_max_bytes: files::number("/proc/sys/net/core/rmem_max").into(),
        send_buffer_max_bytes: files::number("/proc/sys/net/core/wmem_max").into(),
        congestion_control: files::text(format!("{IPV4}/tcp_congestion_control")).into(),
        congestion_controls_available: files::words(AVAILABLE).into(),
        congestion_controls_allowed: allowed().into(),
        cubic: cubic(),
    }
}

fn allowed() -> Result<Vec<String>, String> {
    files::words(format!("{IPV4}/tcp_allowed_congestion_control"))
}

fn sizes(name: &str) -> Result<BufferSizes, String> {
    let file = format!("{IPV4}/{name}");
    let words = files::words(&file)?;
    let numbers: Vec<u64> = words.iter().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [min, default, max] => Ok(BufferSizes { min, default, max }),
        _ => Err(format!("{file} does not hold three numbers: {words:?}")),
    }
}

fn pipe_granted() -> Result<u64, String> {
    let (_reader, writer) =
        pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|error| format!("no pipe: {error}"))?;
    // What counts is what the pipe has then.
    let _ = pipe::fcntl_setpipe_size(&writer, limits::PIPE_BYTES);
    let bytes = pipe::fcntl_getpipe_size(&writer).map_err(|error| error.to_string())?;
    Ok(bytes as u64)
}

/// Whether `name` may be asked for: whether it is in the kernel's list in `file`. A privileged
/// process that asks for a protocol that is not there makes the kernel load it, and a probe must
/// change nothing.
pub fn may_ask_for(name: &str, file: &str) -> Result<bool, String> {
    let can_load = || {
        rustix::thread::capabilities(None)
            .map_or(true, |sets| sets.effective.contains(CapabilitySet::NET_ADMIN))
    };
    match files::words(file) {
        Ok(names) => Ok(names.iter().any(|known| known == name)),
        Err(why) if can_load() => Err(why),
        Err(_) => Ok(true),
    }
}

fn cubic() -> Feature {
    let (state, detail, remedy) = match try_cubic() {
        Ok(()) => (State::Ok, "a socket can have it".to_string(), None),
        Err((state, Obstacle { why, remedy })) => (state, why, remedy),
    };
    Feature { name: "cubic", state, detail, remedy }
}

fn try_cubic() -> Result<(), (State, Obstacle)> {
    let unknown = |why| (State::Unknown, Obstacle { why, remedy: None });
    let absent = || {
        let why = "the kernel has it not loaded";
        (State::Off, Obstacle::new(why, "as root: modprobe tcp_cubic"))
    };
    if !may_ask_for("cubic", AVAILABLE).map_err(unknown)? {
        return Err(absent());
    }
    let socket = TcpListener::bind("127.0.0.1:0")
        .map_err(|error| (State::Unknown, Obstacle::io("no socket", &error)))?;
    sockopt::set_tcp_congestion(socket.as_fd(), "cubic").map_err(|error| match error {
        Errno::NOENT => absent(),
        Errno::PERM => {
            let wider = format!("sysctl net.ipv4.tcp_allowed_congestion_control=\"{}\"", wider());
            (State::Off, Obstacle::new("this user may not choose it", format!("as root: {wider}")))
        }
        error => (State::Off, Obstacle::io("setting it", &error.into())),
    })
}

/// The allowed congestion controls and CUBIC.
fn wider() -> String {
    let mut names = allowed().unwrap_or_else(|_| vec!["reno".to_string()]);
    names.push("cubic".to_string());
    names.join(" ")
}
