//! The cipher of TLS alone, on one core: what a round with TLS is measured against.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use clap::Args;
use serde_json::json;

use crate::output::Output;

/// Bytes of a TLS record.
const RECORD_BYTES: usize = 16 << 10;

/// How long it encrypts.
const TIME: Duration = Duration::from_secs(1);

/// AES-256-GCM alone: encrypts records on one core, and nothing else
///
/// The library and the cipher are those of TLS here. A round with TLS encrypts every byte once and
/// decrypts it once, in different processes.
#[derive(Args)]
pub struct Seal {
    /// Print one JSON object a line instead of text
    #[arg(long)]
    json: bool,
}

impl Seal {
    /// Runs the measurement.
    pub fn run(self) -> anyhow::Result<()> {
        let key = UnboundKey::new(&AES_256_GCM, &[7; 32]).map_err(|_| anyhow!("no AES here"))?;
        let key = LessSafeKey::new(key);
        let mut record = vec![1; RECORD_BYTES];
        let (began, mut records) = (Instant::now(), 0_u64);
        while began.elapsed() < TIME {
            let mut nonce = [0; 12];
            nonce[4..].copy_from_slice(&records.to_le_bytes());
            let nonce = Nonce::assume_unique_for_key(nonce);
            let sealed = key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut record);
            let _tag = sealed.map_err(|_| anyhow!("a record could not be encrypted"))?;
            records += 1;
        }
        let gb = records as f64 * RECORD_BYTES as f64 * 1e-9;
        let seconds = began.elapsed().as_secs_f64();
        let gbit_s = 8.0 * gb / seconds;
        let text = format!("AES-256-GCM: {gbit_s:.1} Gbit/s, {:.3} CPU s/GB", seconds / gb);
        let fields = json!({ "gbit_s": gbit_s, "cpu_s_per_gb": seconds / gb });
        Output { json: self.json }.event("seal", fields, &text);
        Ok(())
    }
}
