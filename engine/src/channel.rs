//! A data channel: a connection that carries nothing but payload, in both directions.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use crate::error::TransferError;
use crate::paths::{ReceiveKind, SendKind};
use crate::receiver::{Lands, ReceivePath};
use crate::sender::{Needs, SendPath};
use crate::sys::socket;

/// A connected data channel.
#[derive(Debug)]
pub struct DataChannel {
    socket: TcpStream,
}

impl DataChannel {
    /// Takes over a socket behind its hello and answer.
    ///
    /// # Errors
    /// A socket that cannot be made non-blocking.
    pub fn new(socket: TcpStream) -> io::Result<DataChannel> {
        socket.set_nonblocking(true)?;
        Ok(DataChannel { socket })
    }

    /// Opens the receive path `kind` for this channel.
    pub fn receive_path(&self, kind: ReceiveKind) -> io::Result<Box<dyn ReceivePath>> {
        kind.open()
    }

    /// Where the path of [`DataChannel::receive_path`] puts the bytes.
    pub fn lands(&self, kind: ReceiveKind) -> Lands {
        kind.lands()
    }

    /// Opens the send path `kind` for this channel.
    pub fn send_path(&self, kind: SendKind) -> io::Result<Box<dyn SendPath>> {
        kind.open()
    }

    /// What the path of [`DataChannel::send_path`] needs of a source.
    pub fn needs(&self, kind: SendKind) -> Needs {
        kind.needs()
    }

    /// Wakes a reader only when so many bytes wait.
    pub fn set_receive_low_water(&self, bytes: usize) -> io::Result<()> {
        socket::set_receive_low_water(self.socket.as_fd(), bytes)
    }

    /// Bytes that were sent and that the peer's kernel has not confirmed yet; 0 where that is not
    /// known.
    pub fn unacknowledged_bytes(&self) -> u64 {
        socket::unacknowledged_bytes(self.socket.as_fd()).unwrap_or(0)
    }

    /// Fails if more bytes came than were agreed: they would be taken for the beginning of the next
    /// model.
    pub fn refuse_more(&self) -> Result<(), TransferError> {
        match self.socket.peek(&mut [0]) {
            Ok(1..) => Err(TransferError::TooMuch),
            // A channel that has ended is found by whoever uses it next.
            _ => Ok(()),
        }
    }

    /// Says that nothing more will be sent. What has come, or is on its way, can still be received.
    pub fn hang_up(&self) {
        // Fails only on a socket that the peer has ended already.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl AsFd for DataChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
