//! What can be wrong with certificates, keys and TLS connections.

use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// Why there is no TLS.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TlsError {
    /// A file of certificates or keys.
    #[error("{}: {why}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A name that no certificate can have.
    #[error(
        "\"{name}\" is no host name; give the name in the aggregator's certificate with --tls-name"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The handshake, or a record.
    #[error("TLS: {source}{}", hint(source))]
    Tls {
        /// What rustls says.
        #[from]
        source: Error,
    },
    /// A certificate of our own.
    #[error("TLS: no certificate could be made: {why}")]
    SelfSigned {
        /// Why not.
        why: String,
    },
    /// The kernel could not open a record.
    #[error("TLS: what came was changed on its way")]
    Damaged,
    /// The peer ends the connection.
    #[error("TLS: the other side ended the connection with alert {alert}")]
    Alert {
        /// The alert's number (RFC 8446, 6).
        alert: u8,
    },
    /// The peer has encrypted as much as its key may, and the kernel knows no other.
    #[error("TLS: the other side has used up its key; another connection has a new one")]
    PeerKey,
    /// We have.
    #[error(
        "TLS: this connection's key has encrypted as much as it may; another one has a new key"
    )]
    KeyUsed,
}

/// What may be the cause, where TLS's own words do not say it.
fn hint(error: &Error) -> &'static str {
    match error {
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "; the other side does not speak TLS: give both sides TLS options, or none"
        }
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "; it is not from the authority that was given (--tls-ca, --tls-client-ca)"
        }
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; it is of another host: dial one that it names, or say --tls-name",
        Error::NoCertificatesPresented
        | Error::AlertReceived(AlertDescription::CertificateRequired) => {
            "; clients need a certificate here: --tls-cert and --tls-key"
        }
        Error::AlertReceived(AlertDescription::UnknownCA) => {
            "; our certificate is not from the authority that the other side knows"
        }
        _ => "",
    }
}
