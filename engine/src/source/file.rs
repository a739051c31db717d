//! A safetensors file as a source.
//!
//! It is read with `pread` and never mapped: where another process truncates a mapped file, the
//! reader dies of SIGBUS; here it gets an error.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Source, check_range};
use crate::error::SourceError;
use crate::limits;
use crate::manifest::Manifest;

/// Bytes of the length that stands before the header.
const LENGTH_BYTES: u64 = 8;

/// An open safetensors file.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: File,
    manifest: Manifest,
    data_start: u64,
}

impl FileSource {
    /// Opens a file and reads its header, but none of its tensors.
    ///
    /// # Errors
    /// If it cannot be read, is no regular file, its header is refused, or its length is not
    /// what the header says.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, SourceError> {
        let path = path.as_ref();
        let io = |action| move |cause| SourceError::Io { action, path: path.to_owned(), cause };
        // Without O_NONBLOCK, opening a FIFO waits for its writer, maybe for ever.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(io("open"))?;
        let metadata = file.metadata().map_err(io("examine"))?;
        if let Some(kind) = other_than_file(metadata.file_type()) {
            return Err(SourceError::NotAFile { path: path.to_owned(), kind });
        }
        let header = read_header(&file, path, metadata.len())?;
        let data_start = LENGTH_BYTES + header.len() as u64;
        let manifest = Manifest::from_header(&header)
            .map_err(|cause| SourceError::Manifest { path: path.to_owned(), cause })?;
        check_length(&manifest, path, data_start, metadata.len())?;
        Ok(Self { path: path.to_owned(), file, manifest, data_start })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Source for FileSource {
    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        check_range(&self.manifest, offset, out.len())?;
        let result = self.file.read_exact_at(out, self.data_start + offset);
        result.map_err(|cause| read_error(&self.path, cause))
    }

    fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.file.as_fd(), self.data_start))
    }
}

/// What stands at a path that is no regular file.
fn other_than_file(kind: FileType) -> Option<&'static str> {
    match kind {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("a directory"),
        kind if kind.is_fifo() => Some("a FIFO"),
        kind if kind.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}

fn read_header(file: &File, path: &Path, file_bytes: u64) -> Result<Vec<u8>, SourceError> {
    if file_bytes < LENGTH_BYTES {
        return Err(SourceError::NoHeader { path: path.to_owned(), file_bytes });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0).map_err(|cause| read_error(path, cause))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > limits::MAX_HEADER_BYTES || header_bytes > file_bytes - LENGTH_BYTES {
        let path = path.to_owned();
        return Err(SourceError::HeaderLength { path, header_bytes, file_bytes });
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, LENGTH_BYTES).map_err(|cause| read_error(path, cause))?;
    Ok(header)
}

fn read_error(path: &Path, cause: io::Error) -> SourceError {
    let path = path.to_owned();
    match cause.kind() {
        io::ErrorKind::UnexpectedEof => SourceError::Truncated { path },
        _ => SourceError::Io { action: "read", path, cause },
    }
}

fn check_length(
    manifest: &Manifest,
    path: &Path,
    data_start: u64,
    file_bytes: u64,
) -> Result<(), SourceError> {
    let data_bytes = file_bytes - data_start;
    let path = || path.to_owned();
    if let Some(tensor) = manifest.tensor_at(data_bytes) {
        let (tensor, expected_bytes) = (tensor.name.clone(), data_start + tensor.range.end);
        return Err(SourceError::TooShort { path: path(), tensor, expected_bytes, file_bytes });
    }
    let expected_bytes = data_start + manifest.data_bytes();
    if file_bytes > expected_bytes {
        return Err(SourceError::TooLong { path: path(), expected_bytes, file_bytes });
    }
    Ok(())
}
