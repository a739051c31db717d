//! `sendfile(2)`: the socket takes references to the pages of a file or region. From huge pages
//! this costs less than half of the CPU time of `send`.

use std::io;
use std::os::fd::BorrowedFd;

use super::{Piece, SendPath, unusable};

/// Sends pages of a file without a copy.
pub struct Sendfile;

impl SendPath for Sendfile {
    fn send(&mut self, socket: BorrowedFd<'_>, piece: Piece<'_>) -> io::Result<usize> {
        let (file, position) = piece.file.ok_or_else(|| unusable("a file"))?;
        let mut position = position;
        let sent = rustix::fs::sendfile(socket, file, Some(&mut position), piece.length)?;
        if sent == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file became shorter while it was being sent",
            ));
        }
        Ok(sent)
    }
}
