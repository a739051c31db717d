//! TLS records made and opened by the kernel (kTLS, tls.rst of the kernel's documentation).

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::features::{set_option, set_upper_protocol};

/// Ciphers that the kernel knows and TLS 1.3 has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128 in Galois/counter mode.
    Aes128Gcm,
    /// AES-256 in Galois/counter mode.
    Aes256Gcm,
    /// ChaCha20 with Poly1305.
    Chacha20Poly1305,
}

impl Cipher {
    /// All of them.
    pub const ALL: [Cipher; 3] = [Cipher::Aes256Gcm, Cipher::Aes128Gcm, Cipher::Chacha20Poly1305];

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Cipher::Aes128Gcm => "AES-128-GCM",
            Cipher::Aes256Gcm => "AES-256-GCM",
            Cipher::Chacha20Poly1305 => "ChaCha20-Poly1305",
        }
    }

    /// Bytes of a key.
    pub fn key_bytes(self) -> usize {
        if self == Cipher::Aes128Gcm { 16 } else { 32 }
    }

    fn number(self) -> u16 {
        match self {
            Cipher::Aes128Gcm => libc::TLS_CIPHER_AES_GCM_128,
            Cipher::Aes256Gcm => libc::TLS_CIPHER_AES_GCM_256,
            Cipher::Chacha20Poly1305 => libc::TLS_CIPHER_CHACHA20_POLY1305,
        }
    }

    /// The first bytes of the nonce, which the kernel wants behind the key.
    fn salt_bytes(self) -> usize {
        if self == Cipher::Chacha20Poly1305 { 0 } else { 4 }
    }
}

/// In which direction the kernel takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What is sent.
    Send,
    /// What is received.
    Receive,
}

/// What one direction of a connection is encrypted with.
pub struct Key<'a> {
    /// The cipher.
    pub cipher: Cipher,
    /// As many bytes as it wants.
    pub key: &'a [u8],
    /// The nonce before the number of the record is mixed in.
    pub nonce: [u8; 12],
    /// The number of the next record.
    pub record: u64,
}

/// Puts TLS between a connected socket and its user. Nothing changes before there is a key.
pub fn offer(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_upper_protocol(socket, c"tls")
}

/// From now on the kernel makes, or opens, the records of TLS 1.3 of one direction.
pub fn take_over(socket: BorrowedFd<'_>, direction: Direction, key: &Key<'_>) -> io::Result<()> {
    let option = match direction {
        Direction::Send => libc::TLS_TX,
        Direction::Receive => libc::TLS_RX,
    };
    if key.key.len() != key.cipher.key_bytes() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set_option(socket, libc::SOL_TLS, option, &crypto_info(key))?;
    if direction == Direction::Receive {
        // Neither side pads its records, so they can be opened where they are wanted. One that is
        // padded all the same is only opened twice; older kernels do not know this.
        let _ = set_option(socket, libc::SOL_TLS, libc::TLS_RX_EXPECT_NO_PAD, &1i32.to_ne_bytes());
    }
    Ok(())
}

/// `struct tls12_crypto_info_*` of linux/tls.h: bytes only, without gaps.
fn crypto_info(key: &Key<'_>) -> Vec<u8> {
    let (salt, nonce) = key.nonce.split_at(key.cipher.salt_bytes());
    let mut info = Vec::with_capacity(64);
    info.extend_from_slice(&libc::TLS_1_3_VERSION.to_ne_bytes());
    info.extend_from_slice(&key.cipher.number().to_ne_bytes());
    info.extend_from_slice(nonce);
    info.extend_from_slice(key.key);
    info.extend_from_slice(salt);
    info.extend_from_slice(&key.record.to_be_bytes());
    info
}

/// A control message of one byte, with its head.
const CONTROL_BYTES: usize = 64;

/// Aligned as a control message has to be.
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_BYTES]);

/// Receives what waits, without waiting, with the type of its record; none is said at the end.
pub fn receive_record(socket: BorrowedFd<'_>, out: &mut [u8]) -> io::Result<(Option<u8>, usize)> {
    let mut slices = [IoSliceMut::new(out)];
    let mut control = ControlBuffer([0; CONTROL_BYTES]);
    // SAFETY: `msghdr` is integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // An `IoSliceMut` has the layout of `iovec`.
    message.msg_iov = slices.as_mut_ptr().cast();
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: all that `message` points to is live, and as long as it says; the descriptor is
    // borrowed and so open.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has filled `message` and the control buffer, which is still there.
    let record_type = unsafe { record_type(&message) };
    Ok((record_type, received as usize))
}

/// The type of the record in a message that `recvmsg` has filled.
///
/// # Safety
/// `message` points to a live control buffer that the kernel has filled.
unsafe fn record_type(message: &libc::msghdr) -> Option<u8> {
    // SAFETY: as the caller promises; the macro checks that a whole head is there.
    let head = unsafe { libc::CMSG_FIRSTHDR(message).as_ref() }?;
    let is_type = head.cmsg_level == libc::SOL_TLS && head.cmsg_type == libc::TLS_GET_RECORD_TYPE;
    // SAFETY: the kernel puts one byte behind a head of this kind.
    is_type.then(|| unsafe { *libc::CMSG_DATA(head) })
}
