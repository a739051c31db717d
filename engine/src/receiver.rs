//! Stage 4: the ways bytes come in. One file each; `paths.rs` names them.

pub mod read;
pub mod splice;

use std::io;
use std::os::fd::BorrowedFd;

/// Room for the bytes that are to be received next, in every form in which it exists.
pub struct Landing<'a> {
    /// How many bytes are wanted.
    pub length: usize,
    /// Room in memory, `length` bytes of it.
    pub bytes: Option<&'a mut [u8]>,
    /// Room in a file, from this position on.
    pub file: Option<(BorrowedFd<'a>, u64)>,
}

/// What a path needs of a [`Landing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lands {
    /// Room in memory.
    Memory,
    /// Room in a file.
    File,
    /// Nothing: the path drops the bytes. For benchmarks only.
    Nowhere,
}

/// One way to receive.
pub trait ReceivePath: Send {
    /// Receives up to `landing.length` bytes without waiting and returns how many; 0 is the end
    /// of the stream. When nothing waits the error is `WouldBlock`.
    fn receive(&mut self, socket: BorrowedFd<'_>, landing: Landing<'_>) -> io::Result<usize>;
}

/// The landing came in a form that the path cannot use: the choice of the path was wrong.
fn unusable(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("this receive path needs {what}"))
}
