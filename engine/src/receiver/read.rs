//! `recv(2)`: one copy, into memory that is still in the cache when the reducer reads it.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::{self, RecvFlags};

use super::{Landing, ReceivePath, unusable};

/// Receives by copying.
pub struct Read;

impl ReceivePath for Read {
    fn receive(&mut self, socket: BorrowedFd<'_>, landing: Landing<'_>) -> io::Result<usize> {
        let bytes = landing.bytes.ok_or_else(|| unusable("room in memory"))?;
        let (received, _) = net::recv(socket, bytes, RecvFlags::DONTWAIT)?;
        Ok(received)
    }
}
