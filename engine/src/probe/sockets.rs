//! Limits of sockets and pipes, and the congestion controls.

use std::net::TcpListener;
use std::os::fd::AsFd;

use rustix::net::sockopt;
use rustix::pipe::{self, PipeFlags};
use rustix::process::Resource;
use serde::Serialize;

use super::obstacle::Obstacle;
use super::{Fact, Feature, ResourceLimit, State, files};
use crate::limits;

const IPV4: &str = "/proc/sys/net/ipv4";

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
        congestion_controls_available: available().into(),
        congestion_controls_allowed: allowed().into(),
        cubic: cubic(),
    }
}

fn available() -> Result<Vec<String>, String> {
    files::words(format!("{IPV4}/tcp_available_congestion_control"))
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

fn cubic() -> Feature {
    let (state, detail, remedy) = match try_cubic() {
        Ok(()) => (State::Ok, "a socket can have it".to_string(), None),
        Err(Obstacle { why, remedy }) => (State::Off, why, remedy),
    };
    Feature { name: "cubic", state, detail, remedy }
}

fn try_cubic() -> Result<(), Obstacle> {
    let failed = |error| Obstacle::io("no socket", &error);
    let socket = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    // Asking for one that is not there would make the kernel load a module.
    if available().is_ok_and(|names| names.iter().all(|name| name != "cubic")) {
        return Err(Obstacle::new("the kernel has it not loaded", "as root: modprobe tcp_cubic"));
    }
    sockopt::set_tcp_congestion(socket.as_fd(), "cubic").map_err(|error| match error {
        rustix::io::Errno::PERM => Obstacle::new(
            "this user may not choose it",
            format!("as root: sysctl net.ipv4.tcp_allowed_congestion_control=\"{}\"", wider()),
        ),
        error => Obstacle::io("setting it", &error.into()),
    })
}

/// The allowed congestion controls and CUBIC.
fn wider() -> String {
    let mut names = allowed().unwrap_or_else(|_| vec!["reno".to_string()]);
    names.push("cubic".to_string());
    names.join(" ")
}
