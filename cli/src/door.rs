//! Who is let in, and who is trusted: secrets and certificates.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
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

fn read_secret(path: &Path) -> anyhow::Result<Secret> {
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
