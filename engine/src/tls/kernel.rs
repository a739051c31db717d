//! TLS records in the kernel (kTLS). After the handshake the kernel gets the keys of a data channel;
//! payload then takes the same ways as without TLS, and is encrypted on its way.
//!
//! Whether it does is decided here alone: it was tried once that the kernel knows the cipher, and
//! nothing of the peer waits in this process. Otherwise the records stay here.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::{CipherSuite, ConnectionTrafficSecrets};

use super::Tls;
use crate::error::TlsError;
use crate::limits;
use crate::sys::ktls::{self, Cipher, Direction, Key};

/// Who makes and opens the records of a connection.
#[derive(Debug)]
pub(crate) enum Records {
    /// This process.
    Process(Box<Tls>),
    /// The kernel.
    Kernel(KernelTls),
}

/// Hands the records of a data channel to the kernel, where it can take them.
///
/// # Errors
/// A kernel that does not take what it took before: neither side can go on then.
pub(crate) fn hand_over(tls: Box<Tls>, socket: &TcpStream) -> io::Result<Records> {
    let cipher = match tls.leaving() {
        Some(cipher) if !FAILED.load(Ordering::Relaxed) && is_known(cipher) => cipher,
        _ => return Ok(Records::Process(tls)),
    };
    if ktls::offer(socket.as_fd()).is_err() {
        return Ok(Records::Process(tls));
    }
    tracing::debug!("the kernel makes the records of a data channel ({})", cipher.name());
    let secrets = tls.into_secrets().map_err(io::Error::other)?;
    let taken = set_key(socket, Direction::Send, secrets.tx)
        .and_then(|()| set_key(socket, Direction::Receive, secrets.rx));
    if let Err(error) = &taken {
        tracing::warn!("kTLS failed ({error}); this process encrypts from the next connection on");
        FAILED.store(true, Ordering::Relaxed);
    }
    taken.map(|()| Records::Kernel(KernelTls::default()))
}

/// Set when the kernel did not take a key that it knows the cipher of.
static FAILED: AtomicBool = AtomicBool::new(false);

fn set_key(
    socket: &TcpStream,
    direction: Direction,
    (record, secrets): (u64, ConnectionTrafficSecrets),
) -> io::Result<()> {
    let (cipher, key, iv) = match &secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
        ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
        ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
            (Cipher::Chacha20Poly1305, key, iv)
        }
        _ => return Err(io::ErrorKind::Unsupported.into()),
    };
    let nonce = iv.as_ref().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let key = Key { cipher, key: key.as_ref(), nonce, record };
    ktls::take_over(socket.as_fd(), direction, &key)
}

/// The kernel's word for a cipher suite of TLS 1.3, if it has one.
pub(super) fn cipher_of(suite: CipherSuite) -> Option<Cipher> {
    match suite {
        CipherSuite::TLS13_AES_128_GCM_SHA256 => Some(Cipher::Aes128Gcm),
        CipherSuite::TLS13_AES_256_GCM_SHA384 => Some(Cipher::Aes256Gcm),
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => Some(Cipher::Chacha20Poly1305),
        _ => None,
    }
}

/// Whether the kernel has shown that it knows the cipher. It is tried once: a connection that has
/// given its keys away cannot take them back.
fn is_known(cipher: Cipher) -> bool {
    static KNOWN: [OnceLock<bool>; Cipher::ALL.len()] = [const { OnceLock::new() }; 3];
    let known = Cipher::ALL.iter().zip(&KNOWN).find(|(other, _)| **other == cipher);
    let Some((_, known)) = known else { return false };
    *known.get_or_init(|| match trial(cipher) {
        Ok(()) => {
            tracing::info!("data channels: the kernel encrypts, with {} (kTLS)", cipher.name());
            true
        }
        Err(Refusal { what, error }) => {
            tracing::debug!("data channels: this process encrypts; kTLS: {what}: {error}");
            false
        }
    })
}

/// Why the kernel does not take records over.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// What failed.
    pub what: &'static str,
    /// How.
    pub error: io::Error,
}

/// What [`trial`] calls the step that needs nothing of kTLS.
pub(crate) const TRIAL_SOCKETS: &str = "no connection on loopback";

/// What [`trial`] calls the step that needs the kernel to have kTLS at all.
pub(crate) const TRIAL_OFFER: &str = "TCP_ULP tls";

/// Sends some bytes from one socket to another, both with keys in the kernel.
pub(crate) fn trial(cipher: Cipher) -> Result<(), Refusal> {
    let at = |what| move |error| Refusal { what, error };
    let (mut sender, mut receiver) = connect().map_err(at(TRIAL_SOCKETS))?;
    ktls::offer(sender.as_fd()).map_err(at(TRIAL_OFFER))?;
    ktls::offer(receiver.as_fd()).map_err(at(TRIAL_OFFER))?;
    // It protects nothing.
    let key = Key { cipher, key: &[1; 32][..cipher.key_bytes()], nonce: [2; 12], record: 3 };
    ktls::take_over(sender.as_fd(), Direction::Send, &key).map_err(at("TLS_TX"))?;
    ktls::take_over(receiver.as_fd(), Direction::Receive, &key).map_err(at("TLS_RX"))?;
    let (sent, mut came) = (*b"fedlane", [0; 7]);
    sender.write_all(&sent).map_err(at("sending"))?;
    receiver.read_exact(&mut came).map_err(at("receiving"))?;
    match came == sent {
        true => Ok(()),
        false => Err(at("other bytes came out than went in")(io::ErrorKind::InvalidData.into())),
    }
}

fn connect() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dialled = TcpStream::connect(listener.local_addr()?)?;
    let (accepted, from) = listener.accept()?;
    if from != dialled.local_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    accepted.set_read_timeout(Some(Duration::from_secs(1)))?;
    Ok((dialled, accepted))
}

/// Types of records (RFC 8446, 5.1).
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Number of the alert that nothing more comes.
const CLOSE_NOTIFY: u8 = 0;

/// More than an alert or a message about keys has.
const CONTROL_BYTES: usize = 1 << 10;

/// A data channel whose records the kernel makes and opens.
#[derive(Debug, Default)]
pub(crate) struct KernelTls {
    /// Records that were sent, counted high.
    records: AtomicU64,
}

impl KernelTls {
    /// As `recv(2)`. The end that the peer announces is one as without TLS.
    pub fn receive(
        &self,
        socket: &TcpStream,
        out: &mut [u8],
        flags: RecvFlags,
    ) -> io::Result<usize> {
        match rustix::net::recv(socket, out, flags) {
            Ok((_, bytes)) => Ok(bytes),
            Err(Errno::IO) => control_record(socket),
            Err(Errno::BADMSG) => Err(io::Error::other(TlsError::Damaged)),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether one more piece may be sent. The kernel itself knows no bound.
    pub fn check_key(&self) -> io::Result<()> {
        match self.records.load(Ordering::Relaxed) >= limits::KERNEL_TLS_RECORDS {
            true => Err(io::Error::other(TlsError::KeyUsed)),
            false => Ok(()),
        }
    }

    /// So many bytes were sent at once.
    pub fn sealed(&self, bytes: usize) {
        let records = 1 + (bytes / limits::TLS_RECORD_BYTES) as u64;
        self.records.fetch_add(records, Ordering::Relaxed);
    }
}

/// What came is no payload, and the kernel leaves it to us.
fn control_record(socket: &TcpStream) -> io::Result<usize> {
    let mut record = [0; CONTROL_BYTES];
    let (kind, bytes) = ktls::receive_record(socket.as_fd(), &mut record)?;
    match (kind, &record[..bytes]) {
        (Some(ALERT), &[_, CLOSE_NOTIFY]) | (None, []) => Ok(0),
        (Some(ALERT), &[_, alert]) => Err(io::Error::other(TlsError::Alert { alert })),
        (Some(HANDSHAKE), _) => Err(io::Error::other(TlsError::PeerKey)),
        // Its type was asked for because it was something else.
        _ => Err(io::Error::other(TlsError::Damaged)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustls::Connection;

    use super::super::{ClientTls, ServerTls, provider};
    use super::*;

    /// Type of a record that carries payload.
    const APPLICATION_DATA: u8 = 23;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_key_is_used_for_so_many_records_and_no_more() {
        let kernel = KernelTls::default();
        kernel.sealed((limits::KERNEL_TLS_RECORDS as usize - 3) * limits::TLS_RECORD_BYTES);
        kernel.check_key().unwrap();
        kernel.sealed(1);
        kernel.check_key().unwrap();
        kernel.sealed(1);
        let error = kernel.check_key().unwrap_err().downcast::<TlsError>().unwrap();
        assert_eq!(error, TlsError::KeyUsed);
    }

    #[test]
    fn every_cipher_suite_of_ours_has_a_name_in_the_kernel() {
        let suites = provider().cipher_suites.clone();
        let ours: Vec<_> = suites.iter().filter(|suite| suite.tls13().is_some()).collect();
        assert_eq!(ours.len(), Cipher::ALL.len());
        for suite in ours {
            assert!(cipher_of(suite.suite()).is_some(), "{suite:?}");
        }
    }

    /// Our end with its records in the kernel, and the peer's with them in this process; nothing
    /// where the kernel cannot.
    fn ends() -> Option<((KernelTls, TcpStream), (Tls, TcpStream))> {
        if let Err(Refusal { what, error }) = trial(Cipher::Aes256Gcm) {
            eprintln!("not run: this kernel has no kTLS ({what}: {error})");
            return None;
        }
        let (ours, theirs) = connect().unwrap();
        let (server, certificate) = ServerTls::self_signed().unwrap();
        let client = ClientTls::pinned(&certificate).unwrap();
        let until = Instant::now() + PATIENCE;
        let accepting = std::thread::spawn(move || {
            let tls = server.in_process().accept(&theirs, until).unwrap();
            (tls, theirs)
        });
        let tls = client.connect(&ours, until).unwrap();
        let Records::Kernel(kernel) = hand_over(Box::new(tls), &ours).unwrap() else {
            panic!("the kernel was tried and then not taken");
        };
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        Some(((kernel, ours), accepting.join().unwrap()))
    }

    /// What our end makes of something that the peer's TLS says behind some payload.
    fn heard(say: impl FnOnce(&mut Connection)) -> Option<io::Result<usize>> {
        let ((kernel, ours), (tls, theirs)) = ends()?;
        tls.send(&theirs, b"payload", rustix::net::SendFlags::empty()).unwrap();
        say(&mut tls.session());
        tls.answer(&theirs);
        let mut came = [0; 64];
        assert_eq!(kernel.receive(&ours, &mut came, RecvFlags::empty()).unwrap(), 7);
        assert_eq!(&came[..7], b"payload");
        Some(kernel.receive(&ours, &mut came, RecvFlags::empty()))
    }

    fn reason(heard: io::Result<usize>) -> TlsError {
        heard.unwrap_err().downcast().unwrap()
    }

    #[test]
    fn an_end_that_is_announced_is_one() {
        if let Some(heard) = heard(|tls| tls.send_close_notify()) {
            assert_eq!(heard.unwrap(), 0);
        }
    }

    #[test]
    fn a_new_key_of_the_peer_ends_the_connection_and_says_so() {
        if let Some(heard) = heard(|tls| tls.refresh_traffic_keys().unwrap()) {
            assert_eq!(reason(heard), TlsError::PeerKey);
        }
    }

    #[test]
    fn a_record_that_is_not_of_the_peer_is_found() {
        let Some(((kernel, ours), (_, mut theirs))) = ends() else { return };
        theirs.write_all(&[APPLICATION_DATA, 3, 3, 0, 20]).unwrap();
        theirs.write_all(&[7; 20]).unwrap();
        let heard = kernel.receive(&ours, &mut [0; 64], RecvFlags::empty());
        assert_eq!(reason(heard), TlsError::Damaged);
    }
}
