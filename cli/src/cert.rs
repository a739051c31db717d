//! `fedlane cert`: a secret, or a small authority and its certificates, for a first try.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use rustix::rand::{GetRandomFlags, getrandom};

/// Make a shared secret, or certificates, for a first try
///
/// Nothing that exists is overwritten. Keys and secrets can be read by their owner only.
#[derive(Args)]
pub struct Cert {
    /// Write a new shared secret for --secret-file here
    #[arg(long, value_name = "FILE")]
    secret: PathBuf,
}

impl Cert {
    /// Writes the files.
    pub fn run(self) -> anyhow::Result<()> {
        let mut secret = [0_u8; 32];
        if getrandom(secret.as_mut_slice(), GetRandomFlags::empty())? < secret.len() {
            bail!("the kernel has no random numbers yet; try again");
        }
        let digits: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        write_new(&self.secret, &format!("{digits}\n"), 0o600)?;
        println!("wrote {}: give it to both sides with --secret-file", self.secret.display());
        Ok(())
    }
}

fn write_new(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
