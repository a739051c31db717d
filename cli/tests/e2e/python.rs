//! Checks by NumPy and the official safetensors library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{Finished, run, skip};

/// Scripts, and the interpreter to run them.
pub struct Python {
    interpreter: PathBuf,
}

impl Python {
    /// The interpreter that FEDLANE_PYTHON names; without one the test is reported as skipped.
    pub fn or_skip() -> Option<Python> {
        let interpreter = std::env::var_os("FEDLANE_PYTHON").map(PathBuf::from);
        if interpreter.is_none() {
            skip("FEDLANE_PYTHON names no Python with numpy, safetensors and ml_dtypes");
        }
        interpreter.map(|interpreter| Python { interpreter })
    }

    /// A script of tests/python.
    pub fn script(&self, name: &str) -> Command {
        let mut python = Command::new(&self.interpreter);
        python.arg(Self::path(name)).env("PYTHONDONTWRITEBYTECODE", "1");
        python
    }

    /// Where a script is.
    pub fn path(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/python").join(name)
    }

    /// A shell command that runs a script.
    pub fn shell(&self, name: &str) -> String {
        format!("'{}' '{}'", self.interpreter.display(), Self::path(name).display())
    }

    /// Compares an output with the mean of the clients' files, which are in client order.
    pub fn check_mean(&self, how: &str, output: &Path, clients: &[(PathBuf, &str)]) -> Finished {
        let mut check = self.script("check_mean.py");
        check.arg(how).arg(output);
        for (file, examples) in clients {
            let mut argument = OsString::from(format!("{examples}="));
            argument.push(file);
            check.arg(argument);
        }
        run(&mut check).done()
    }
}
