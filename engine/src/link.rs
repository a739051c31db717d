//! A connection below its channel: bytes in both directions, for any thread.

use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::{self, RecvFlags, SendFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::{ControlError, TlsError, WireError};
use crate::tls::kernel::{self, KernelTls, Records};
use crate::tls::{self, ClientTls, ServerTls, Tls};
use crate::wire::hello::{Answer, Channel, MAGIC, Preamble};

/// A connected socket, and what lies on it.
#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
    records: Option<Records>,
}

/// Who encrypts what goes over a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// Nobody.
    None,
    /// This process, with TLS.
    Process,
    /// The kernel, with TLS.
    Kernel,
}

impl Link {
    /// A connection with nothing on the socket.
    pub fn plain(socket: TcpStream) -> Link {
        Link { socket, records: None }
    }

    /// The dialling end, with TLS if there is any; its handshake must be over at `until`.
    ///
    /// # Errors
    /// An aggregator that does not speak TLS, or is not to be trusted.
    pub fn dialled(
        socket: TcpStream,
        tls: Option<&ClientTls>,
        until: Instant,
    ) -> Result<Link, ControlError> {
        let tls = tls.map(|tls| tls.connect(&socket, until)).transpose()?;
        Ok(Link { socket, records: tls.map(|tls| Records::Process(tls.into())) })
    }

    /// The listening end, with TLS if there is any; its handshake must be over at `until`.
    ///
    /// # Errors
    /// A client that does not speak TLS, or has no certificate where it needs one.
    pub fn accepted(
        socket: TcpStream,
        tls: Option<&ServerTls>,
        until: Instant,
    ) -> Result<Link, ControlError> {
        let Some(tls) = tls else { return Ok(Link::plain(socket)) };
        let accepted = refuse_plain(&socket, until).and_then(|()| tls.accept(&socket, until));
        match accepted {
            Ok(tls) => Ok(Link { socket, records: Some(Records::Process(tls.into())) }),
            Err(error) => {
                tls::linger(&socket);
                Err(error)
            }
        }
    }

    /// Lets the kernel encrypt from now on, where it can: for a connection that carries payload only.
    ///
    /// # Errors
    /// A kernel that can, and then does not.
    pub(crate) fn hand_over(self) -> io::Result<Link> {
        let records = match self.records {
            Some(Records::Process(tls)) => Some(kernel::hand_over(tls, &self.socket)?),
            records => records,
        };
        Ok(Link { records, ..self })
    }

    /// Who encrypts.
    pub(crate) fn encryption(&self) -> Encryption {
        match self.records {
            None => Encryption::None,
            Some(Records::Process(_)) => Encryption::Process,
            Some(Records::Kernel(_)) => Encryption::Kernel,
        }
    }

    /// TLS of this process on this connection.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        match &self.records {
            Some(Records::Process(tls)) => Some(tls),
            _ => None,
        }
    }

    /// TLS of the kernel on this connection.
    pub(crate) fn kernel(&self) -> Option<&KernelTls> {
        match &self.records {
            Some(Records::Kernel(kernel)) => Some(kernel),
            _ => None,
        }
    }

    /// Receives some bytes; 0 is the end. Without `wait` the error is `WouldBlock` where there are
    /// none yet.
    pub(crate) fn receive(&self, out: &mut [u8], wait: bool) -> io::Result<usize> {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        match &self.records {
            Some(Records::Process(tls)) => tls.receive(&self.socket, out, flags),
            Some(Records::Kernel(kernel)) => kernel.receive(&self.socket, out, flags),
            None => Ok(net::recv(&self.socket, out, flags)?.0),
        }
    }

    /// Sends all of it. One thread at a time.
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = self.tls() else { return (&self.socket).write_all(bytes) };
        let mut sent = 0;
        while sent < bytes.len() {
            match tls.send(&self.socket, &bytes[sent..], SendFlags::empty()) {
                Ok(more) => sent += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends all of it without waiting, or fails. One thread at a time.
    pub(crate) fn send_now(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match self.tls() {
            Some(tls) => tls.send(&self.socket, bytes, flags)?,
            None => net::send(&self.socket, bytes, flags)?,
        };
        match sent {
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

    /// Says that nothing more will be sent.
    pub fn hang_up(&self) {
        // Fails only on a socket that the peer has ended already.
        let _ = self.socket.shutdown(Shutdown::Write);
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

/// Tells a client without TLS in its own words that it needs it.
fn refuse_plain(mut socket: &TcpStream, until: Instant) -> Result<(), ControlError> {
    socket.set_read_timeout(Some(remaining(until)?))?;
    let mut first = [0];
    if socket.peek(&mut first).map_err(silence)? == 0 || first[0] != MAGIC[0] {
        return Ok(());
    }
    let answer = Preamble::answering(Channel::Control, Answer::TlsWanted);
    socket.write_all(answer.as_bytes())?;
    Err(WireError::TlsWanted.into())
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
    let error = match error.downcast::<TlsError>() {
        Ok(error) => return error.into(),
        Err(error) => error,
    };
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::Silent,
        io::ErrorKind::UnexpectedEof => ControlError::Closed,
        _ => ControlError::Io(error),
    }
}
