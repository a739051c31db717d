//! `fedlane cert`: a secret, or a small authority and its certificates, for a first try.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustix::rand::{GetRandomFlags, getrandom};

/// How long certificates are good for.
const VALID: Duration = Duration::from_secs(365 * 24 * 3600);

/// How far clocks may be behind.
const EARLIER: Duration = Duration::from_secs(24 * 3600);

/// Make certificates, or a shared secret, for a first try
///
/// DIR gets an authority (ca.pem), a certificate of the aggregator (server.pem) and one for each client
/// (NAME.pem), each with its key (.key), good for a year. Nothing that exists is overwritten. Keys and
/// secrets can be read by their owner only.
#[derive(Args)]
#[group(id = "what", required = true, multiple = true)]
pub struct Cert {
    /// Directory for the certificates
    #[arg(value_name = "DIR", required_unless_present = "secret", conflicts_with = "secret")]
    directory: Option<PathBuf>,

    /// Host name or IP address of the aggregator, as clients dial it [default: this host itself]
    #[arg(long, value_name = "NAME_OR_IP", requires = "directory")]
    host: Vec<String>,

    /// Name of a client that gets a certificate: its --name when it joins
    #[arg(long, value_name = "NAME", requires = "directory")]
    client: Vec<String>,

    /// Write a new shared secret for --secret-file here
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
}

impl Cert {
    /// Writes the files.
    pub fn run(self) -> anyhow::Result<()> {
        if let Some(path) = &self.secret {
            write_new(path, &format!("{}\n", secret()?), 0o600)?;
            println!("wrote {}: give it to both sides with --secret-file", path.display());
        }
        match &self.directory {
            Some(directory) => {
                write_certificates(directory, &self.host, &self.client)?;
                self.explain(directory);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn explain(&self, directory: &Path) {
        let shown = directory.display();
        println!(
            "wrote {} certificates to {shown}\n\
             aggregator: --tls-cert {shown}/server.pem --tls-key {shown}/server.key \
             --tls-client-ca {shown}/ca.pem\n\
             client:     --tls-ca {shown}/ca.pem --tls-cert {shown}/NAME.pem --tls-key {shown}/NAME.key \
             --name NAME\n\
             keep {shown}/ca.key to yourself: whoever has it can be anyone",
            2 + self.client.len()
        );
    }
}

/// Makes an authority, and certificates of the aggregator at these hosts and of these clients.
pub fn write_certificates(
    directory: &Path,
    hosts: &[String],
    clients: &[String],
) -> anyhow::Result<()> {
    for name in clients {
        let is_file_name = !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        ensure!(is_file_name, "a certificate for \"{name}\" needs a name that a file can have");
        let ours = ["ca", "server"].contains(&name.as_str());
        ensure!(!ours, "a client cannot be named \"{name}\" here: that is a file of its own");
    }
    let (authority, authority_certificate) = authority()?;
    let mut files = vec![("ca".to_owned(), authority_certificate, authority.key().serialize_pem())];
    let (certificate, key) = server(hosts, &authority)?;
    files.push(("server".into(), certificate, key));
    for name in clients {
        let (certificate, key) = client(name, &authority)?;
        files.push((name.clone(), certificate, key));
    }
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    let path = |name: &str, kind: &str| directory.join(format!("{name}.{kind}"));
    let all = files.iter().flat_map(|(name, ..)| [path(name, "pem"), path(name, "key")]);
    if let Some(existing) = all.into_iter().find(|path| path.exists()) {
        bail!("{} exists; choose another directory, or remove it", existing.display());
    }
    for (name, certificate, key) in &files {
        write_new(&path(name, "key"), key, 0o600)?;
        write_new(&path(name, "pem"), certificate, 0o644)?;
    }
    Ok(())
}

fn server(hosts: &[String], authority: &Issuer<'_, KeyPair>) -> anyhow::Result<(String, String)> {
    let own = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).to_vec();
    let hosts = if hosts.is_empty() { own } else { hosts.to_vec() };
    let name = hosts[0].clone();
    let params = CertificateParams::new(hosts)
        .context("a --host is neither a host name nor an IP address")?;
    leaf(params, &name, ExtendedKeyUsagePurpose::ServerAuth, authority)
}

fn secret() -> anyhow::Result<String> {
    let mut secret = [0_u8; 32];
    if getrandom(secret.as_mut_slice(), GetRandomFlags::empty())? < secret.len() {
        bail!("the kernel has no random numbers yet; try again");
    }
    Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn named(mut params: CertificateParams, name: &str) -> CertificateParams {
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (SystemTime::now() - EARLIER).into();
    params.not_after = (SystemTime::now() + VALID).into();
    params
}

fn authority() -> anyhow::Result<(Issuer<'static, KeyPair>, String)> {
    // A name of its own: else one authority could be taken for another, and the error would be odd.
    let number = &secret()?[..8];
    let mut params = named(CertificateParams::default(), &format!("fedlane authority {number}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?.pem();
    Ok((Issuer::new(params, key), certificate))
}

fn client(name: &str, authority: &Issuer<'_, KeyPair>) -> anyhow::Result<(String, String)> {
    let params = CertificateParams::default();
    leaf(params, name, ExtendedKeyUsagePurpose::ClientAuth, authority)
}

fn leaf(
    params: CertificateParams,
    name: &str,
    purpose: ExtendedKeyUsagePurpose,
    authority: &Issuer<'_, KeyPair>,
) -> anyhow::Result<(String, String)> {
    let mut params = named(params, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, authority)?.pem(), key.serialize_pem()))
}

fn write_new(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
