//! TLS 1.3 on a connection: certificates and keys, the handshake, and records in both directions.

pub(crate) mod kernel;

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::net::{RecvFlags, SendFlags};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, ExtractedSecrets, RootCertStore, ServerConfig,
    ServerConnection,
};
use x509_parser::extensions::GeneralName;

use crate::error::{ControlError, TlsError};
use crate::limits;
use crate::link::{remaining, silence};
use crate::sys::ktls::Cipher;

/// So that nobody can pass one of our connections off as one of another protocol.
const PROTOCOL: &[u8] = b"fedlane";

/// The name in certificates that [`ServerTls::self_signed`] makes. It is nobody's host.
const OWN_NAME: &str = "exchange.fedlane.invalid";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |why: String| TlsError::File { path: path.to_owned(), why };
    let found =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match found.map_err(|error| unreadable(error.to_string()))? {
        none if none.is_empty() => Err(unreadable("it holds no certificate in PEM".into())),
        some => Ok(some),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| TlsError::File { path: path.to_owned(), why: error.to_string() })
}

fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::File { path: path.to_owned(), why: error.to_string() })?;
    }
    Ok(roots)
}

/// What an aggregator shows, and whom it lets in.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    /// Names that may join; absent where all may that have a certificate.
    allowed: Option<Vec<String>>,
    in_process: bool,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl ServerTls {
    /// Reads the server's certificate, with those that lead to its authority, and its key from PEM files.
    ///
    /// # Errors
    /// Files that cannot be read, hold something else, or do not belong together.
    pub fn new(certificate: &Path, key: &Path) -> Result<ServerTls, TlsError> {
        Self::make(certificate, key, None, None)
    }

    /// As [`ServerTls::new`]; clients need a certificate of an authority in `authority`, with their name in
    /// it. With `allowed` it must be one of these names too.
    ///
    /// # Errors
    /// As [`ServerTls::new`].
    pub fn mutual(
        certificate: &Path,
        key: &Path,
        authority: &Path,
        allowed: Option<Vec<String>>,
    ) -> Result<ServerTls, TlsError> {
        Self::make(certificate, key, Some(authority), allowed)
    }

    fn make(
        certificate: &Path,
        key: &Path,
        authority: Option<&Path>,
        allowed: Option<Vec<String>>,
    ) -> Result<ServerTls, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let builder = match authority {
            Some(path) => {
                let roots = Arc::new(authorities(path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                let verifier = verifier.build().map_err(|error| TlsError::File {
                    path: path.to_owned(),
                    why: error.to_string(),
                })?;
                builder.with_client_cert_verifier(verifier)
            }
            None => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(certificates(certificate)?, private_key(key)?)?;
        Ok(ServerTls::of(config, allowed))
    }

    /// A new key with a certificate for it, which clients learn elsewhere: see [`ClientTls::pinned`]. Gives
    /// the certificate (DER) too. The key never leaves this process.
    ///
    /// # Errors
    /// A library of ciphers that fails.
    pub fn self_signed() -> Result<(ServerTls, Vec<u8>), TlsError> {
        let failed = |error: rcgen::Error| TlsError::SelfSigned { why: error.to_string() };
        let key = rcgen::KeyPair::generate().map_err(failed)?;
        let params = rcgen::CertificateParams::new([OWN_NAME.to_owned()]).map_err(failed)?;
        let certificate = params.self_signed(&key).map_err(failed)?.der().clone();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13])?.with_no_client_auth();
        let config = builder.with_single_cert(vec![certificate.clone()], key.into())?;
        Ok((ServerTls::of(config, None), certificate.to_vec()))
    }

    fn of(mut config: ServerConfig, allowed: Option<Vec<String>>) -> ServerTls {
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        // Nobody comes back to a session by ticket, and nothing but payload is on a data channel.
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        ServerTls { config: Arc::new(config), allowed, in_process: false }
    }

    /// Makes and opens all records in this process, also those that the kernel could.
    pub fn in_process(self) -> ServerTls {
        ServerTls { in_process: true, ..self }
    }

    /// Whether a client of this name may join, with the names in its certificate.
    pub(crate) fn admits(&self, name: &str, certified: Option<&[String]>) -> bool {
        let has = |names: &[String]| names.iter().any(|known| known == name);
        certified.is_none_or(has) && self.allowed.as_deref().is_none_or(has)
    }

    pub(crate) fn accept(&self, socket: &TcpStream, until: Instant) -> Result<Tls, ControlError> {
        let session = ServerConnection::new(self.config.clone()).map_err(TlsError::from)?;
        Tls::handshake(session.into(), self.in_process, socket, until)
    }
}

/// Whom a client trusts, and what it shows.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    name: Option<String>,
    in_process: bool,
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientTls for {:?}", self.name)
    }
}

impl ClientTls {
    /// Trusts the authorities in the PEM file `authority`. `own` are the client's certificate and key, for an
    /// aggregator that wants them. `name` is the aggregator's name in its certificate, if that is not the
    /// host that is dialled.
    ///
    /// # Errors
    /// Files that cannot be read, hold something else, or do not belong together.
    pub fn new(
        authority: &Path,
        own: Option<(&Path, &Path)>,
        name: Option<String>,
    ) -> Result<ClientTls, TlsError> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13])?;
        let builder = builder.with_root_certificates(authorities(authority)?);
        let config = match own {
            Some((certificate, key)) => {
                builder.with_client_auth_cert(certificates(certificate)?, private_key(key)?)?
            }
            None => builder.with_no_client_auth(),
        };
        Ok(ClientTls::of(config, name))
    }

    /// Trusts nobody but the one with this certificate (DER), which [`ServerTls::self_signed`] has made.
    ///
    /// # Errors
    /// Something else than a certificate.
    pub fn pinned(certificate: &[u8]) -> Result<ClientTls, TlsError> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(certificate.to_vec()))?;
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13])?.with_root_certificates(roots);
        Ok(ClientTls::of(builder.with_no_client_auth(), Some(OWN_NAME.to_owned())))
    }

    fn of(mut config: ClientConfig, name: Option<String>) -> ClientTls {
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        config.enable_secret_extraction = true;
        ClientTls { config: Arc::new(config), name, in_process: false }
    }

    /// As [`ServerTls::in_process`].
    pub fn in_process(self) -> ClientTls {
        ClientTls { in_process: true, ..self }
    }

    /// The same, for the aggregator at `address`, which is HOST:PORT.
    pub(crate) fn at(&self, address: &str) -> ClientTls {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.name.clone().or_else(|| Some(host.to_owned()));
        ClientTls { name, ..self.clone() }
    }

    pub(crate) fn connect(&self, socket: &TcpStream, until: Instant) -> Result<Tls, ControlError> {
        let name = self.name.clone().unwrap_or_default();
        let server = ServerName::try_from(name.clone()).map_err(|_| TlsError::Name { name })?;
        let session = ClientConnection::new(self.config.clone(), server).map_err(TlsError::from)?;
        Tls::handshake(session.into(), self.in_process, socket, until)
    }
}

/// Most bytes that are taken from the socket at once, and most that are encrypted at once: some records.
const STEP_BYTES: usize = 128 << 10;

/// TLS on a socket after its handshake. One thread may receive while others send: neither waits for the
/// other.
pub(crate) struct Tls {
    session: Mutex<Connection>,
    /// What came and has not been decrypted; of the thread that receives.
    came: Mutex<Came>,
    /// What is encrypted and has not been sent; held by the thread that sends.
    going: Mutex<Going>,
    names: Option<Vec<String>>,
    in_process: bool,
}

#[derive(Default)]
struct Came {
    buffer: Vec<u8>,
    next: usize,
}

#[derive(Default)]
struct Going {
    encrypted: Vec<u8>,
    sent: usize,
    /// Bytes of the piece that the encrypted ones are.
    plain: usize,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    fn handshake(
        mut session: Connection,
        in_process: bool,
        mut socket: &TcpStream,
        until: Instant,
    ) -> Result<Tls, ControlError> {
        // Callers bound what they encrypt at once.
        session.set_buffer_limit(None);
        loop {
            while session.wants_write() {
                session.write_tls(&mut socket).map_err(silence)?;
            }
            if !session.is_handshaking() {
                break;
            }
            socket.set_read_timeout(Some(remaining(until)?))?;
            match session.read_tls(&mut socket) {
                Ok(0) => return Err(ControlError::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(silence(error)),
            }
            if let Err(error) = session.process_new_packets() {
                // The peer hears why.
                let _ = session.write_tls(&mut socket);
                return Err(TlsError::from(error).into());
            }
        }
        let names = session.peer_certificates().and_then(|chain| chain.first()).map(names_in);
        Ok(Tls {
            session: Mutex::new(session),
            came: Mutex::default(),
            going: Mutex::default(),
            names,
            in_process,
        })
    }

    /// The cipher, if all that came has been read and so another could go on with the records.
    fn leaving(&self) -> Option<Cipher> {
        let came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let going = self.going();
        let mut session = self.session();
        // What is wrong with it is found by whoever receives.
        let unread =
            session.process_new_packets().map_or(1, |state| state.plaintext_bytes_to_read());
        let waits = came.next < came.buffer.len()
            || unread > 0
            || session.wants_write()
            || going.sent < going.encrypted.len();
        let suite = session.negotiated_cipher_suite()?.suite();
        if waits || self.in_process { None } else { kernel::cipher_of(suite) }
    }

    /// The keys of both directions.
    fn into_secrets(self) -> Result<ExtractedSecrets, TlsError> {
        let session = self.session.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(session.dangerous_extract_secrets()?)
    }

    /// Names in the peer's certificate, if it showed one.
    pub fn names(&self) -> Option<&[String]> {
        self.names.as_deref()
    }

    fn session(&self) -> MutexGuard<'_, Connection> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn going(&self) -> MutexGuard<'_, Going> {
        self.going.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As `recv(2)`, with what has been decrypted.
    pub fn receive(
        &self,
        socket: &TcpStream,
        out: &mut [u8],
        flags: RecvFlags,
    ) -> io::Result<usize> {
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.session().reader().read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // An end that the peer did not announce is one for whoever counts bytes.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            if came.next == came.buffer.len() {
                came.buffer.resize(STEP_BYTES, 0);
                let received = rustix::net::recv(socket, came.buffer.as_mut_slice(), flags);
                let bytes = received.as_ref().map_or(0, |(_, bytes)| *bytes);
                came.buffer.truncate(bytes);
                came.next = 0;
                received?;
                if bytes == 0 {
                    return Ok(0);
                }
            }
            came.next += self.decrypt(socket, &came.buffer[came.next..])?;
        }
    }

    /// Takes the next bytes that came; they are plain text after that, or wait for the rest of their
    /// record.
    fn decrypt(&self, socket: &TcpStream, mut bytes: &[u8]) -> io::Result<usize> {
        let mut session = self.session();
        let taken = session.read_tls(&mut bytes)?;
        let processed = session.process_new_packets();
        let has_answer = session.wants_write();
        drop(session);
        if has_answer {
            self.answer(socket);
        }
        processed.map_err(|error| io::Error::other(TlsError::from(error)))?;
        Ok(taken)
    }

    /// Sends what TLS itself has to say: a new key, or why it ends. Whoever sends just now, or next,
    /// takes it along.
    fn answer(&self, socket: &TcpStream) {
        let Ok(mut going) = self.going.try_lock() else { return };
        let mut session = self.session();
        while session.wants_write() {
            // A Vec takes everything.
            let _ = session.write_tls(&mut going.encrypted);
        }
        drop(session);
        let _ = going.flush(socket, SendFlags::DONTWAIT);
    }

    /// As `send(2)`, encrypted. An error `WouldBlock` wants the same bytes again, as for
    /// [`crate::sender::SendPath`].
    pub fn send(&self, socket: &TcpStream, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
        let mut going = self.going();
        if going.plain == 0 {
            let part = &bytes[..bytes.len().min(STEP_BYTES)];
            let mut session = self.session();
            session.writer().write_all(part)?;
            while session.wants_write() {
                session.write_tls(&mut going.encrypted)?;
            }
            going.plain = part.len();
        }
        going.flush(socket, flags)?;
        Ok(std::mem::take(&mut going.plain))
    }
}

impl Going {
    fn flush(&mut self, socket: &TcpStream, flags: SendFlags) -> io::Result<()> {
        while self.sent < self.encrypted.len() {
            let rest = &self.encrypted[self.sent..];
            self.sent += rustix::net::send(socket, rest, flags | SendFlags::NOSIGNAL)?;
        }
        self.encrypted.clear();
        self.sent = 0;
        Ok(())
    }
}

/// Common and alternative names; none of a certificate that cannot be read.
fn names_in(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return Vec::new();
    };
    let common = parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut names: Vec<String> = common.map(str::to_owned).collect();
    if let Ok(Some(alternative)) = parsed.subject_alternative_name() {
        names.extend(alternative.value.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        }));
    }
    names
}

/// Waits a moment until a peer that was refused has read why: what it has sent meanwhile would otherwise
/// make the kernel forget it.
pub(crate) fn linger(mut socket: &TcpStream) {
    let until = Instant::now() + limits::LAST_WORDS;
    // Fails only on a socket that the peer has ended already.
    let _ = socket.shutdown(std::net::Shutdown::Write);
    let mut dropped = [0; 4096];
    while let Ok(left) = remaining(until)
        && socket.set_read_timeout(Some(left)).is_ok()
        && matches!(socket.read(&mut dropped), Ok(1..))
    {}
}
