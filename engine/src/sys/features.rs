//! Calls that only ask whether the kernel offers something. None of them changes the host.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::mm::{self, MapFlags, ProtFlags};

/// Size of `struct io_uring_params` (io_uring_setup(2)).
const RING_PARAMS_BYTES: usize = 120;

/// Opens an io_uring of one entry.
pub fn open_ring() -> io::Result<OwnedFd> {
    let mut params = [0u64; RING_PARAMS_BYTES / 8];
    // SAFETY: the kernel reads and writes one `io_uring_params`, whose size and alignment the
    // array has and for which all zero means no wishes.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us; it fits a C int.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// Allows `MSG_ZEROCOPY` on `socket` (`SO_ZEROCOPY`, socket(7)).
pub fn allow_zerocopy_send(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &1i32.to_ne_bytes())
}

/// Puts the protocol `name` between `socket` and its user (`TCP_ULP`), for example `tls`.
pub fn set_upper_protocol(socket: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_ULP, name.to_bytes())
}

pub(super) fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    // An option is a few bytes long.
    let length = value.len() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `value`; the descriptor is borrowed and so open.
    let status = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, value.as_ptr().cast(), length)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The beginning of `struct tcp_zerocopy_receive` of linux/tcp.h, all that is needed to map.
#[repr(C)]
#[derive(Default)]
struct ZerocopyReceive {
    address: u64,
    length: u32,
    recv_skip_hint: u32,
}

/// Maps pages of a connected TCP socket and asks for bytes to be put there
/// (`TCP_ZEROCOPY_RECEIVE`); none need to wait.
pub fn try_zerocopy_receive(socket: BorrowedFd<'_>) -> io::Result<()> {
    let bytes = rustix::param::page_size();
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
    let start = unsafe {
        mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, socket, 0)?
    };
    let mut request =
        ZerocopyReceive { address: start as u64, length: bytes as u32, recv_skip_hint: 0 };
    let mut size = size_of::<ZerocopyReceive>() as libc::socklen_t;
    // SAFETY: the kernel reads and writes at most `size` bytes of `request`, and may put pages
    // into the mapping made above, to which no reference exists.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_ZEROCOPY_RECEIVE,
            (&raw mut request).cast(),
            &raw mut size,
        )
    };
    let answer = if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: unmaps exactly what was mapped above.
    unsafe { mm::munmap(start, bytes)? };
    answer
}
