//! `send(2)`: the kernel copies the bytes. Works for every source and on every host.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::{self, SendFlags};

use super::{Piece, SendPath, unusable};

/// Sends by copying.
pub struct Write;

impl SendPath for Write {
    fn send(&mut self, socket: BorrowedFd<'_>, piece: Piece<'_>) -> io::Result<usize> {
        let bytes = piece.bytes.ok_or_else(|| unusable("bytes in memory"))?;
        Ok(net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }
}
