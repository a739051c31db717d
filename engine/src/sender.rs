//! Stage 2: the ways bytes leave. One file each; `paths.rs` names them.

pub mod sendfile;
pub mod vmsplice;
pub mod write;

use std::io;
use std::os::fd::BorrowedFd;

/// Bytes that are to be sent next, in every form in which they exist.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    /// How many.
    pub length: usize,
    /// In memory.
    pub bytes: Option<&'a [u8]>,
    /// In a file, from this position on.
    pub file: Option<(BorrowedFd<'a>, u64)>,
}

/// What a path needs of a [`Piece`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// The bytes in memory.
    Bytes,
    /// Bytes in memory that stay unchanged until the peer has confirmed them.
    StableBytes,
    /// A file.
    File,
}

/// One way to send.
pub trait SendPath: Send {
    /// Sends a beginning of `piece` without waiting and returns its length. When the socket is
    /// full the error is `WouldBlock`; the caller then comes again with the same piece.
    fn send(&mut self, socket: BorrowedFd<'_>, piece: Piece<'_>) -> io::Result<usize>;
}

/// A piece came in a form that the path cannot use: the choice of the path was wrong.
fn unusable(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("this send path needs {what}"))
}
