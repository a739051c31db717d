//! Certificates, as Python names their files.

use std::path::PathBuf;

use fedlane::tls::{ClientTls, ServerTls};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// What an aggregator shows, and whom it lets in.
pub struct ServerFiles {
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub client_authority: Option<PathBuf>,
    pub allow: Option<Vec<String>>,
}

impl ServerFiles {
    /// What the files come to.
    pub fn read(self) -> PyResult<Option<ServerTls>> {
        if self.allow.is_some() && self.client_authority.is_none() {
            return Err(PyValueError::new_err("allow needs tls_client_ca, which proves the names"));
        }
        match (&self.certificate, &self.key, &self.client_authority) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), None) => {
                ServerTls::new(certificate, key).or_raise().map(Some)
            }
            (Some(certificate), Some(key), Some(authority)) => {
                ServerTls::mutual(certificate, key, authority, self.allow).or_raise().map(Some)
            }
            _ => Err(PyValueError::new_err(
                "TLS takes tls_cert and tls_key; tls_client_ca may be added to both",
            )),
        }
    }
}

/// Whom a client trusts, and what it shows.
pub struct ClientFiles {
    pub authority: Option<PathBuf>,
    pub name: Option<String>,
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

impl ClientFiles {
    /// What the files come to.
    pub fn read(self) -> PyResult<Option<ClientTls>> {
        let own = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some((certificate.as_path(), key.as_path())),
            (None, None) => None,
            _ => return Err(PyValueError::new_err("tls_cert and tls_key belong together")),
        };
        match &self.authority {
            Some(authority) => ClientTls::new(authority, own, self.name).or_raise().map(Some),
            None if own.is_none() && self.name.is_none() => Ok(None),
            None => Err(PyValueError::new_err(
                "TLS takes tls_ca, the authority of the aggregator's certificate",
            )),
        }
    }
}
