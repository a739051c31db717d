//! Single features of the kernel, each tried by its smallest real use.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::net::SendFlags;
use rustix::pipe::{self, PipeFlags, SpliceFlags};

use super::obstacle::Obstacle;
use super::sockets::may_ask_for;
use super::trial::Pair;
use super::{Feature, State, files};
use crate::sys::ktls::Cipher;
use crate::sys::{features as sys, socket};
use crate::tls::kernel::{self, Refusal};

const ULPS: &str = "/proc/sys/net/ipv4/tcp_available_ulp";

pub fn all() -> Vec<Feature> {
    vec![
        feature("memfd", memfd()),
        feature("sendfile", sendfile()),
        feature("splice", splice()),
        feature("vmsplice", vmsplice()),
        feature("io_uring", io_uring()),
        feature("MSG_ZEROCOPY", zerocopy_send()),
        feature("TCP_ZEROCOPY_RECEIVE", zerocopy_receive()),
        feature("kTLS", ktls()),
    ]
}

/// Why something is not known to work.
enum Lack {
    Off(Obstacle),
    Unknown(Obstacle),
}

/// What was seen of a feature that works.
type Tried = Result<String, Lack>;

fn feature(name: &'static str, tried: Tried) -> Feature {
    let (state, detail, remedy) = match tried {
        Ok(detail) => (State::Ok, detail, None),
        Err(Lack::Off(Obstacle { why, remedy })) => (State::Off, why, remedy),
        Err(Lack::Unknown(Obstacle { why, remedy })) => (State::Unknown, why, remedy),
    };
    Feature { name, state, detail, remedy }
}

/// The call under test failed.
fn off(what: &'static str) -> impl Fn(io::Error) -> Lack {
    move |error| Lack::Off(Obstacle::io(what, &error))
}

/// Something that the test needs failed.
fn untried(what: &'static str) -> impl Fn(io::Error) -> Lack {
    move |error| Lack::Unknown(Obstacle::io(what, &error))
}

fn memory_file() -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("fedlane-probe", MemfdFlags::CLOEXEC)?;
    rustix::io::write(&file, b"fedlane")?;
    Ok(file)
}

fn new_pipe() -> Result<(OwnedFd, OwnedFd), Lack> {
    pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|error| untried("no pipe")(error.into()))
}

fn memfd() -> Tried {
    memory_file().map_err(off("memfd_create"))?;
    Ok("files in memory can be made".to_string())
}

fn sendfile() -> Tried {
    let file = memory_file().map_err(untried("no memory file"))?;
    let (_reader, writer) = new_pipe()?;
    let sent = rustix::fs::sendfile(&writer, &file, Some(&mut 0), 7);
    sent.map_err(|error| off("sendfile")(error.into()))?;
    Ok("moves bytes from a file into a pipe".to_string())
}

fn splice() -> Tried {
    let (reader, filled) = new_pipe()?;
    let (_other_reader, writer) = new_pipe()?;
    rustix::io::write(&filled, b"fedlane")
        .map_err(|error| untried("writing to a pipe")(error.into()))?;
    pipe::splice(&reader, None, &writer, None, 7, SpliceFlags::NONBLOCK)
        .map_err(|error| off("splice")(error.into()))?;
    Ok("moves bytes from a pipe into a pipe".to_string())
}

fn vmsplice() -> Tried {
    let (_reader, writer) = new_pipe()?;
    socket::vmsplice(&writer, b"fedlane").map_err(off("vmsplice"))?;
    Ok("moves bytes from memory into a pipe".to_string())
}

fn io_uring() -> Tried {
    match sys::open_ring() {
        Ok(_) => Ok("a ring can be opened".to_string()),
        Err(error) => Err(Lack::Off(ring_obstacle(&error))),
    }
}

/// More than one hand may have refused.
fn ring_obstacle(error: &io::Error) -> Obstacle {
    let switch = files::number("/proc/sys/kernel/io_uring_disabled").ok();
    match (error.raw_os_error(), switch) {
        (Some(libc::EPERM), Some(2)) => Obstacle::new(
            "kernel.io_uring_disabled is 2: off for everyone",
            "as root: sysctl kernel.io_uring_disabled=0",
        ),
        (Some(libc::EPERM), Some(1)) => Obstacle::new(
            "kernel.io_uring_disabled is 1: only for its group",
            "join the group kernel.io_uring_group, or as root: sysctl kernel.io_uring_disabled=0",
        ),
        (Some(libc::ENOMEM), _) => Obstacle::new(
            "a ring finds no memory that may be locked",
            "raise the limit of locked memory: `ulimit -l unlimited`, or LimitMEMLOCK= of a \
             service",
        ),
        _ => Obstacle::io("io_uring_setup", error),
    }
}

fn pair() -> Result<Pair, Lack> {
    Pair::new().map_err(Lack::Unknown)
}

fn zerocopy_send() -> Tried {
    let pair = pair()?;
    sys::allow_zerocopy_send(pair.sender.as_fd()).map_err(off("SO_ZEROCOPY"))?;
    // The option alone says little: each page sent counts against the limit of locked memory.
    let page = [0; 4096];
    let flags = SendFlags::from_bits_retain(libc::MSG_ZEROCOPY as u32) | SendFlags::DONTWAIT;
    match rustix::net::send(&pair.sender, &page, flags) {
        Ok(_) => Ok("a socket takes it; on loopback the kernel copies all the same".to_string()),
        Err(rustix::io::Errno::NOBUFS) => Err(Lack::Off(Obstacle::new(
            "the limit of locked memory leaves no room to send",
            "raise it: `ulimit -l unlimited`, or LimitMEMLOCK= of a service",
        ))),
        Err(error) => Err(off("sending")(error.into())),
    }
}

fn zerocopy_receive() -> Tried {
    let pair = pair()?;
    sys::try_zerocopy_receive(pair.receiver.as_fd()).map_err(off("TCP_ZEROCOPY_RECEIVE"))?;
    Ok("a socket can be mapped".to_string())
}

fn ktls() -> Tried {
    let absent = || {
        let remedy = "as root: modprobe tls (needs a kernel built with CONFIG_TLS)";
        Lack::Off(Obstacle::new("the kernel has no tls module loaded", remedy))
    };
    let unknown = |why| Lack::Unknown(Obstacle::new(why, "look on the host itself"));
    if !may_ask_for("tls", ULPS).map_err(unknown)? {
        return Err(absent());
    }
    let mut known = Vec::new();
    let mut refused = None;
    for cipher in Cipher::ALL {
        match kernel::trial(cipher) {
            Ok(()) => known.push(cipher.name()),
            Err(refusal) => refused = refused.or(Some(refusal)),
        }
    }
    match refused {
        Some(Refusal { what: kernel::TRIAL_SOCKETS, error }) => {
            Err(untried(kernel::TRIAL_SOCKETS)(error))
        }
        Some(Refusal { what: kernel::TRIAL_OFFER, error })
            if error.raw_os_error() == Some(libc::ENOENT) =>
        {
            Err(absent())
        }
        Some(Refusal { what, error }) if known.is_empty() => Err(off(what)(error)),
        _ => Ok(format!("the kernel encrypted and decrypted with {}", known.join(", "))),
    }
}
