//! A data channel: a connection that carries nothing but payload, in both directions.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::net::SendFlags;

use crate::error::{ControlError, TransferError};
use crate::link::{Encryption, Link};
use crate::paths::{ReceiveKind, SendKind};
use crate::receiver::{Landing, Lands, ReceivePath};
use crate::sender::{Needs, Piece, SendPath};
use crate::sys::socket;
use crate::wire::hello::{Answer, Channel, DataAnswer, DataHello, Preamble, Ticket};

/// A connected data channel.
#[derive(Debug)]
pub struct DataChannel {
    link: Arc<Link>,
}

/// Opens a data channel with a hello made by `key`, whose answer must be here at `until`; or says what
/// the aggregator answered instead.
///
/// # Errors
/// A peer that speaks another protocol, or admits the stream and does not have the key.
pub fn open(
    link: Link,
    hello: &DataHello,
    key: &Ticket,
    until: Instant,
) -> Result<Result<DataChannel, Answer>, ControlError> {
    link.write_fixed(&Preamble::new(Channel::Data))?;
    link.write_fixed(hello)?;
    // A peer of another version answers with its preamble alone.
    let preamble: Preamble = link.read_fixed(until)?;
    match preamble.answer_on(Channel::Data)? {
        Answer::Admitted => {}
        answer => return Ok(Err(answer)),
    }
    let answer = DataAnswer::admitted(link.read_fixed(until)?);
    match answer.is_of(hello, key) {
        true => Ok(Ok(DataChannel::new(link)?)),
        false => Err(ControlError::Stranger),
    }
}

impl DataChannel {
    /// Takes over a connection behind its hello and answer.
    ///
    /// # Errors
    /// A socket that cannot be made non-blocking, or whose TLS the kernel begins to take over and
    /// then does not.
    pub fn new(link: Link) -> io::Result<DataChannel> {
        let link = link.hand_over()?;
        link.socket().set_nonblocking(true)?;
        Ok(DataChannel { link: Arc::new(link) })
    }

    /// Opens the receive path `kind` for this channel.
    pub fn receive_path(&self, kind: ReceiveKind) -> io::Result<Box<dyn ReceivePath>> {
        match self.link.encryption() {
            Encryption::None => kind.open(),
            _ => Ok(Box::new(Decrypt { link: self.link.clone() })),
        }
    }

    /// Where the path of [`DataChannel::receive_path`] puts the bytes.
    pub fn lands(&self, kind: ReceiveKind) -> Lands {
        // What is encrypted passes through memory, whatever was wished for.
        if self.is_plain() { kind.lands() } else { Lands::Memory }
    }

    /// Opens the send path `kind` for this channel.
    pub fn send_path(&self, kind: SendKind) -> io::Result<Box<dyn SendPath>> {
        let link = self.link.clone();
        Ok(match self.link.encryption() {
            Encryption::None => kind.open()?,
            Encryption::Process => Box::new(Encrypt { link }),
            Encryption::Kernel => Box::new(Count { path: kind.open()?, link }),
        })
    }

    /// What the path of [`DataChannel::send_path`] needs of a source.
    pub fn needs(&self, kind: SendKind) -> Needs {
        // The kernel encrypts what a path brings it, whichever it is.
        if self.encryption() == Encryption::Process { Needs::Bytes } else { kind.needs() }
    }

    /// Who encrypts what goes over it.
    pub fn encryption(&self) -> Encryption {
        self.link.encryption()
    }

    fn is_plain(&self) -> bool {
        self.encryption() == Encryption::None
    }

    /// Wakes a reader only when so many bytes wait.
    pub fn set_receive_low_water(&self, bytes: usize) -> io::Result<()> {
        // Some of what a record needs may be here already: the rest can be less than was asked for.
        let bytes = if self.is_plain() { bytes } else { 1 };
        socket::set_receive_low_water(self.link.as_fd(), bytes)
    }

    /// Bytes that were sent and that the peer's kernel has not confirmed yet; 0 where that is not
    /// known.
    pub fn unacknowledged_bytes(&self) -> u64 {
        socket::unacknowledged_bytes(self.link.as_fd()).unwrap_or(0)
    }

    /// Bytes that have come and nobody has read; 0 where that is not known.
    pub fn unread_bytes(&self) -> u64 {
        rustix::io::ioctl_fionread(self).unwrap_or(0)
    }

    /// Sends a beginning of a few bytes that more will follow at once, without waiting.
    pub(crate) fn send_head(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_flagged(bytes, SendFlags::MORE)
    }

    /// Sends a beginning of a few bytes, without waiting.
    pub(crate) fn send_small(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_flagged(bytes, SendFlags::empty())
    }

    fn send_flagged(&self, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
        let flags = flags | SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match self.link.tls() {
            Some(tls) => tls.send(self.link.socket(), bytes, flags),
            None => Ok(rustix::net::send(&*self.link, bytes, flags)?),
        }
    }

    /// Receives a few bytes, without waiting.
    pub(crate) fn receive(&self, out: &mut [u8]) -> io::Result<usize> {
        self.link.receive(out, false)
    }

    /// Fails if more bytes came than were agreed: they would be taken for the beginning of the next
    /// model.
    pub fn refuse_more(&self) -> Result<(), TransferError> {
        let more = match self.encryption() {
            Encryption::None => self.link.socket().peek(&mut [0]),
            // The first byte that should not be is lost, with the channel.
            _ => self.link.receive(&mut [0], false),
        };
        match more {
            Ok(1..) => Err(TransferError::TooMuch),
            // A channel that has ended is found by whoever uses it next.
            _ => Ok(()),
        }
    }

    /// Says that nothing more will be sent. What has come, or is on its way, can still be received.
    pub fn hang_up(&self) {
        self.link.hang_up();
    }
}

impl AsFd for DataChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// Receives what TLS decrypts.
struct Decrypt {
    link: Arc<Link>,
}

impl ReceivePath for Decrypt {
    fn receive(&mut self, _: BorrowedFd<'_>, landing: Landing<'_>) -> io::Result<usize> {
        let bytes = landing.bytes.ok_or(io::ErrorKind::InvalidInput)?;
        self.link.receive(bytes, false)
    }
}

/// Sends what TLS has encrypted.
struct Encrypt {
    link: Arc<Link>,
}

impl SendPath for Encrypt {
    fn send(&mut self, _: BorrowedFd<'_>, piece: Piece<'_>) -> io::Result<usize> {
        let bytes = piece.bytes.ok_or(io::ErrorKind::InvalidInput)?;
        match self.link.tls() {
            Some(tls) => tls.send(self.link.socket(), bytes, SendFlags::DONTWAIT),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

/// Sends what the kernel encrypts, until its key has encrypted enough.
struct Count {
    path: Box<dyn SendPath>,
    link: Arc<Link>,
}

impl SendPath for Count {
    fn send(&mut self, socket: BorrowedFd<'_>, piece: Piece<'_>) -> io::Result<usize> {
        let kernel = self.link.kernel().ok_or(io::ErrorKind::InvalidInput)?;
        kernel.check_key()?;
        let sent = self.path.send(socket, piece)?;
        kernel.sealed(sent);
        Ok(sent)
    }
}
