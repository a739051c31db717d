//! A connection below its channel: bytes in both directions, for any thread.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::{self, RecvFlags, SendFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::ControlError;

/// A connected socket, and what lies on it.
#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
}

impl Link {
    /// A connection with nothing on the socket.
    pub fn plain(socket: TcpStream) -> Link {
        Link { socket }
    }

    /// Receives some bytes; 0 is the end. Without `wait` the error is `WouldBlock` where there are
    /// none yet.
    pub(crate) fn receive(&self, out: &mut [u8], wait: bool) -> io::Result<usize> {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        Ok(net::recv(&self.socket, out, flags)?.0)
    }

    /// Sends all of it. One thread at a time.
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        (&self.socket).write_all(bytes)
    }

    /// Sends all of it without waiting, or fails. One thread at a time.
    pub(crate) fn send_now(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match net::send(&self.socket, bytes, flags)? {
            sent if sent == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Sends first bytes.
    pub fn write_fixed(&self, value: &(impl IntoBytes + Immutable)) -> io::Result<()> {
        self.send(value.as_bytes())
    }

    /// Reads first bytes, all of which must be there at `until`: a peer that sends them one by one wins no
    /// time.
    pub fn read_fixed<T: FromBytes + IntoBytes>(&self, until: Instant) -> Result<T, ControlError> {
        let mut value = T::new_zeroed();
        let mut rest = value.as_mut_bytes();
        while !rest.is_empty() {
            self.set_read_deadline(remaining(until)?)?;
            match self.receive(rest, true) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(came) => rest = &mut rest[came..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(silence(error)),
            }
        }
        Ok(value)
    }

    /// How long a receiver waits from now on.
    pub(crate) fn set_read_deadline(&self, deadline: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(deadline))
    }

    /// How long a sender waits from now on.
    pub(crate) fn set_write_deadline(&self, deadline: Duration) -> io::Result<()> {
        self.socket.set_write_timeout(Some(deadline))
    }

    /// The other side.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Ends the connection in both directions; whoever waits for it stops.
    pub fn shut_down(&self) {
        // Fails only on a socket that the peer has ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// How much time there is; none left is silence.
pub(crate) fn remaining(until: Instant) -> Result<Duration, ControlError> {
    match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ControlError::Silent),
        left => Ok(left),
    }
}

/// What a failed read means.
pub(crate) fn silence(error: io::Error) -> ControlError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::Silent,
        io::ErrorKind::UnexpectedEof => ControlError::Closed,
        _ => ControlError::Io(error),
    }
}
