//! What a client sends: a file, or parameters that are generated on the fly.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use fedlane::manifest::{self, Dtype, Manifest, PRESETS};
use fedlane::source::Source;
use fedlane::source::file::FileSource;
use fedlane::source::generator::Generator;
use fedlane::source::scaled::Scaled;
use serde::{Deserialize, Serialize};

use crate::args::{parse_bytes, parse_dtype, parse_preset};

/// Where the parameters of a client come from.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub struct Update {
    /// A safetensors file to send; it is opened anew in every round
    #[arg(long, value_name = "FILE", required_unless_present_any = ["generate", "preset"])]
    #[arg(conflicts_with_all = ["generate", "preset"])]
    #[serde(with = "path_bytes")]
    pub model: Option<PathBuf>,

    /// Send generated parameters of this size, e.g. 1GiB or 500MB: no disk, no memory
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "preset")]
    pub generate: Option<u64>,

    #[arg(long, value_name = "NAME", value_parser = parse_preset, help = preset_help())]
    pub preset: Option<String>,

    /// Dtype of --generate: f32, f16, bf16, f64, i64, ...
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    #[serde(with = "dtype_name")]
    pub dtype: Dtype,

    /// Seed of generated parameters: the same seed gives the same parameters
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Multiply every floating-point parameter by 2 to this power
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, hide = true)]
    pub scale_exponent: i32,
}

fn preset_help() -> String {
    format!("Send generated parameters in the shape of a known model: {}", PRESETS.join(", "))
}

impl Update {
    /// Opens the parameters.
    pub fn open(&self) -> anyhow::Result<Box<dyn Source>> {
        let source: Box<dyn Source> = match &self.model {
            Some(path) => Box::new(FileSource::open(path)?),
            None => Box::new(Generator::new(self.generated()?, self.seed)),
        };
        match self.scale_exponent {
            0 => Ok(source),
            exponent => Ok(Box::new(Scaled::new(source, exponent)?)),
        }
    }

    fn generated(&self) -> anyhow::Result<Manifest> {
        if let Some(name) = &self.preset {
            return manifest::preset(name).with_context(|| format!("there is no preset {name}"));
        }
        let Some(bytes) = self.generate else { bail!("name --model, --generate or --preset") };
        Ok(manifest::synthetic(bytes, self.dtype)?)
    }

    /// The command-line argument that names the file. It need not be text.
    pub fn model_arg(&self) -> Option<OsString> {
        self.model.as_ref().map(|path| {
            let mut arg = OsString::from("--model=");
            arg.push(path);
            arg
        })
    }

    /// The command-line arguments that say all but the file.
    pub fn to_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut push = |flag: &str, value: String| args.extend([flag.to_string(), value]);
        if let Some(bytes) = self.generate {
            push("--generate", bytes.to_string());
            push("--dtype", format!("{:?}", self.dtype).to_lowercase());
        }
        if let Some(name) = &self.preset {
            push("--preset", name.clone());
        }
        push("--seed", self.seed.to_string());
        push("--scale-exponent", self.scale_exponent.to_string());
        args
    }
}

/// A path need not be text, so it is a list of bytes.
mod path_bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::PathBuf;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| path.as_os_str().as_bytes()).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
        let bytes = Option::<Vec<u8>>::deserialize(from)?;
        Ok(bytes.map(|bytes| PathBuf::from(OsString::from_vec(bytes))))
    }
}

mod dtype_name {
    use super::{Dtype, parse_dtype};
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{dtype:?}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
        let name = String::deserialize(deserializer)?;
        parse_dtype(&name).map_err(serde::de::Error::custom)
    }
}
