//! Small files of `/proc` and `/sys`, with errors that name the file.

use std::fs;
use std::path::Path;

/// The trimmed text of `file`, or why it cannot be had.
pub fn text(file: impl AsRef<Path>) -> Result<String, String> {
    let file = file.as_ref();
    match fs::read_to_string(file) {
        Ok(text) => Ok(text.trim().to_string()),
        Err(error) => Err(format!("{} cannot be read: {error}", file.display())),
    }
}

/// The one number in `file`.
pub fn number(file: impl AsRef<Path>) -> Result<u64, String> {
    let file = file.as_ref();
    let text = text(file)?;
    text.parse().map_err(|_| format!("{} holds no number: {text:?}", file.display()))
}

/// The words in `file`.
pub fn words(file: impl AsRef<Path>) -> Result<Vec<String>, String> {
    Ok(text(file)?.split_whitespace().map(str::to_string).collect())
}

/// The number in KiB behind `name` in the lines of `text`, in bytes.
pub fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The word in brackets of a file like `always [madvise] never`.
pub fn chosen(file: impl AsRef<Path>) -> Result<String, String> {
    let file = file.as_ref();
    let text = text(file)?;
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map(|(word, _)| word.to_string())
        .ok_or_else(|| format!("{} marks no choice: {text:?}", file.display()))
}
