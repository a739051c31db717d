//! Who is let in, and who is trusted: secrets and certificates.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use fedlane::tls::{ClientTls, ServerTls};
use fedlane::wire::hello::Secret;

/// Bytes of a file of a secret: 64 digits and the end of the line, and a little that is wrong.
const SECRET_FILE_BYTES: u64 = 128;

/// What both sides have to know.
#[derive(Clone, Debug, Args)]
pub struct SharedSecret {
    /// File with the secret that both sides share; `fedlane cert --secret FILE` makes one
    ///
    /// It holds 64 hexadecimal digits, and only its owner may read it. Each side proves to the other that it
    /// knows the secret, without sending it. Without TLS the models themselves are not encrypted.
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
}

impl SharedSecret {
    /// The secret; [`Secret::OPEN`] where there is none.
    pub fn read(&self) -> anyhow::Result<Secret> {
        self.secret_file.as_deref().map_or(Ok(Secret::OPEN), read_secret)
    }
}

/// What an aggregator shows, and whom it lets in.
#[derive(Clone, Debug, Args)]
pub struct ServerCertificates {
    /// Encrypt all connections with TLS 1.3: file with this aggregator's certificate, in PEM
    ///
    /// `fedlane cert DIR` makes certificates for a first try.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// File with the key of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Let in only clients with a certificate of the authority in this file, under a name that is in it
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,

    /// Name of a client that may join; can be given more than once [default: all with a certificate]
    #[arg(long, value_name = "NAME", requires = "tls_client_ca")]
    allow: Vec<String>,

    /// Encrypt in this process also where the kernel could do it (kTLS)
    #[arg(long, requires = "tls_cert")]
    tls_in_process: bool,
}

impl ServerCertificates {
    /// What the files come to.
    pub fn read(&self) -> anyhow::Result<Option<ServerTls>> {
        let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) else {
            return Ok(None);
        };
        let tls = match &self.tls_client_ca {
            None => ServerTls::new(certificate, key)?,
            Some(authority) => {
                let allowed = (!self.allow.is_empty()).then(|| self.allow.clone());
                ServerTls::mutual(certificate, key, authority, allowed)?
            }
        };
        Ok(Some(if self.tls_in_process { tls.in_process() } else { tls }))
    }
}

/// The door of a process that listens.
#[derive(Clone, Debug, Args)]
pub struct Door {
    #[command(flatten)]
    pub secret: SharedSecret,

    #[command(flatten)]
    pub certificates: ServerCertificates,

    /// Listen where other machines can reach it although everyone is let in
    #[arg(long)]
    pub insecure: bool,
}

/// Whom a client trusts, and what it shows.
#[derive(Clone, Debug, Args)]
pub struct ClientCertificates {
    /// Encrypt all connections with TLS 1.3: file with the authority of the aggregator's certificate, in PEM
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,

    /// File with this client's certificate, where the aggregator wants one
    #[arg(long, value_name = "FILE", requires_all = ["tls_ca", "tls_key"])]
    tls_cert: Option<PathBuf>,

    /// File with the key of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Name in the aggregator's certificate, if it is not the host in ADDRESS
    #[arg(long, value_name = "HOST", requires = "tls_ca")]
    tls_name: Option<String>,

    /// Encrypt in this process also where the kernel could do it (kTLS)
    #[arg(long, requires = "tls_ca")]
    tls_in_process: bool,
}

impl ClientCertificates {
    /// What the files come to.
    pub fn read(&self) -> anyhow::Result<Option<ClientTls>> {
        let Some(authority) = &self.tls_ca else { return Ok(None) };
        let own = self.tls_cert.as_deref().zip(self.tls_key.as_deref());
        let tls = ClientTls::new(authority, own, self.tls_name.clone())?;
        Ok(Some(if self.tls_in_process { tls.in_process() } else { tls }))
    }
}

/// As [`ClientCertificates`], of an edge for the aggregator above it.
#[derive(Clone, Debug, Args)]
pub struct AboveCertificates {
    /// Encrypt all connections to the aggregator above with TLS 1.3: file with the authority of its certificate, in PEM
    #[arg(long, value_name = "FILE")]
    above_tls_ca: Option<PathBuf>,

    /// File with this edge's certificate, where the aggregator above wants one
    #[arg(long, value_name = "FILE", requires_all = ["above_tls_ca", "above_tls_key"])]
    above_tls_cert: Option<PathBuf>,

    /// File with the key of --above-tls-cert
    #[arg(long, value_name = "FILE", requires = "above_tls_cert")]
    above_tls_key: Option<PathBuf>,

    /// Name in the certificate of the aggregator above, if it is not the host in ADDRESS
    #[arg(long, value_name = "HOST", requires = "above_tls_ca")]
    above_tls_name: Option<String>,
}

impl AboveCertificates {
    /// What the files come to.
    pub fn read(&self) -> anyhow::Result<Option<ClientTls>> {
        ClientCertificates {
            tls_ca: self.above_tls_ca.clone(),
            tls_cert: self.above_tls_cert.clone(),
            tls_key: self.above_tls_key.clone(),
            tls_name: self.above_tls_name.clone(),
            tls_in_process: false,
        }
        .read()
    }
}

pub fn read_secret(path: &Path) -> anyhow::Result<Secret> {
    let shown = path.display();
    let file = std::fs::File::open(path);
    let file = file.with_context(|| format!("cannot read the secret in {shown}"))?;
    let mode = file.metadata()?.mode();
    if mode & 0o077 != 0 {
        bail!("others than its owner may use the secret in {shown}; say `chmod 600 {shown}`");
    }
    let mut text = String::new();
    let read = file.take(SECRET_FILE_BYTES).read_to_string(&mut text);
    match read.ok().and_then(|_| parse_secret(text.trim())) {
        Some(secret) => Ok(Secret::new(secret)),
        None => bail!(
            "{shown} holds no secret: it must be 64 hexadecimal digits, as `fedlane cert --secret FILE` \
             makes them"
        ),
    }
}

/// Zeros mean that there is no secret, so they are none.
fn parse_secret(text: &str) -> Option<[u8; 32]> {
    let mut secret = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    for (byte, pair) in secret.iter_mut().zip(digits.chunks(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (16 * digit(pair[0])? + digit(pair[1])?) as u8;
    }
    (secret != [0; 32]).then_some(secret)
}
