//! Socket calls that rustix has no safe function for.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::pipe::{self, IoSliceRaw, SpliceFlags};

/// Wakes readers of `socket` only when at least `bytes` wait (`SO_RCVLOWAT`, socket(7)).
pub fn set_receive_low_water(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: passes one int and its size; the descriptor is borrowed and so open.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that the peer's kernel has not acknowledged yet (`SIOCOUTQ`, tcp(7)).
pub fn unacknowledged_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int; the descriptor is borrowed and so open.
    let status = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if status == 0 { Ok(bytes.max(0) as u64) } else { Err(io::Error::last_os_error()) }
}

/// Puts references to the pages of `bytes` into `pipe`, without waiting and without a copy.
///
/// The pages are read later, by whoever reads the pipe or the socket it is spliced to: the caller
/// keeps `bytes` unchanged until the peer has confirmed. Breaking that sends other bytes, which
/// the chunk checksum finds; it does not break memory safety of this process.
pub fn vmsplice(pipe: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    let slices = [IoSliceRaw::from_slice(bytes)];
    // SAFETY: the slice is live during the call and the kernel only reads the pages behind it.
    Ok(unsafe { pipe::vmsplice(pipe, &slices, SpliceFlags::NONBLOCK)? })
}
