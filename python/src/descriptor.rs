//! File descriptors that Python gave by number.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// A descriptor of our own for the same file.
pub fn duplicate(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: used for one fcntl call only, which answers EBADF for a number that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned()
}
