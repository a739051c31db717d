//! Why something does not work, and what would change that.

use std::io;

/// A reason and its remedy.
#[derive(Debug)]
pub struct Obstacle {
    pub why: String,
    pub remedy: Option<String>,
}

impl Obstacle {
    pub fn new(why: impl Into<String>, remedy: impl Into<String>) -> Obstacle {
        Obstacle { why: why.into(), remedy: Some(remedy.into()) }
    }

    /// What the kernel's answer to `what` means.
    pub fn io(what: &str, error: &io::Error) -> Obstacle {
        let remedy = remedy(error).map(str::to_string);
        Obstacle { why: format!("{what}: {error}"), remedy }
    }
}

/// What helps against an error of the kernel, whichever call it was.
fn remedy(error: &io::Error) -> Option<&'static str> {
    Some(match error.raw_os_error()? {
        libc::EMFILE => "raise the limit of open files: `ulimit -n 4096`",
        libc::ENFILE => "as root: sysctl fs.file-max=1000000",
        libc::ENOMEM => "allow more memory: `ulimit -v unlimited`, or a larger cgroup limit",
        libc::EAGAIN => "allow more threads: `ulimit -u`, or the pids limit of the cgroup",
        libc::EPERM | libc::EACCES => {
            "a seccomp filter or security module refuses the call: allow it in the profile of \
             the container or service"
        }
        libc::ENOSYS => "use a kernel that has the call, or a seccomp profile that allows it",
        libc::ENOENT => "mount what is missing: paths and rings need the usual /proc and /dev",
        libc::ENETUNREACH | libc::EADDRNOTAVAIL => "bring loopback up, as root: ip link set lo up",
        _ => return None,
    })
}
