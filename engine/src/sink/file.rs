//! A safetensors file that appears whole or not at all.
//!
//! The file has no name while it is written, so that a crash leaves nothing behind. When it is
//! finished it gets a name beside its target and then takes the target's place at once.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::Sink;
use crate::error::SinkError;
use crate::manifest::{Chunk, Manifest};
use crate::receiver::{Landing, Lands};
use crate::region::Region;

/// A model on its way to disk. Dropped without [`ModelFile::finish`], it leaves nothing behind.
#[derive(Debug)]
pub struct ModelFile {
    target: Target,
    file: File,
    data_start: u64,
    data_bytes: u64,
}

impl ModelFile {
    /// Starts the file that shall stand at `path`: reserves all of its space and writes its
    /// header. What stands at `path` stays there until [`ModelFile::finish`]; a symbolic link
    /// is replaced and not followed.
    ///
    /// # Errors
    /// If the directory is missing or refuses, something other than a file stands at `path`, or
    /// the disk is too small.
    pub fn create(path: impl AsRef<Path>, manifest: &Manifest) -> Result<Self, SinkError> {
        let mut target = Target::new(path.as_ref())?;
        let file = target.open_unnamed()?;
        Self::start(target, file, manifest)
    }

    fn start(target: Target, file: File, manifest: &Manifest) -> Result<Self, SinkError> {
        let header = manifest.header();
        let data_start = 8 + header.len() as u64;
        let data_bytes = manifest.data_bytes();
        reserve(&file, data_start + data_bytes, &target)?;
        let length = (header.len() as u64).to_le_bytes();
        file.write_all_at(&length, 0).map_err(|cause| target.error("write", cause))?;
        file.write_all_at(header, 8).map_err(|cause| target.error("write", cause))?;
        Ok(Self { target, file, data_start, data_bytes })
    }

    /// Writes bytes of the data section from `offset` on. Several threads may do so at once.
    ///
    /// # Errors
    /// If the range leaves the data section or the disk refuses.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.data_bytes) {
            let (path, data_bytes) = (self.target.path.clone(), self.data_bytes);
            let bytes = bytes.len() as u64;
            return Err(SinkError::OutOfRange { path, offset, bytes, data_bytes });
        }
        let result = self.file.write_all_at(bytes, self.data_start + offset);
        result.map_err(|cause| self.target.error("write", cause))
    }

    /// Reads back bytes of the data section that were written before.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), SinkError> {
        let result = self.file.read_exact_at(out, self.data_start + offset);
        result.map_err(|cause| self.target.error("read", cause))
    }

    /// The descriptor and the position of the data section in it, for a kernel that writes by
    /// itself.
    pub fn file(&self) -> (BorrowedFd<'_>, u64) {
        (self.file.as_fd(), self.data_start)
    }

    /// Brings the file to the disk and puts it in the place of its target. Bytes that were
    /// never written are zero.
    ///
    /// # Errors
    /// If the disk refuses; the target is then what it was before.
    pub fn finish(mut self) -> Result<(), SinkError> {
        self.file.sync_data().map_err(|cause| self.target.error("write", cause))?;
        self.target.name_file(&self.file)?;
        self.target.replace()
    }
}

/// The place where a file shall stand.
#[derive(Debug)]
struct Target {
    path: PathBuf,
    /// Held open, so that the file goes where it was meant even if the directory is renamed.
    directory: OwnedFd,
    name: OsString,
    /// The name beside the target, while the file has one.
    temporary: Option<OsString>,
}

impl Target {
    fn new(path: &Path) -> Result<Self, SinkError> {
        let bad = |why| SinkError::BadTarget { path: path.to_owned(), why };
        let name = path.file_name().ok_or_else(|| bad("it names no file"))?.to_owned();
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(bad("it names a directory"));
        }
        match path.metadata() {
            Ok(metadata) if metadata.is_dir() => return Err(bad("a directory stands there")),
            Ok(metadata) if !metadata.is_file() => {
                return Err(bad("something other than a file stands there"));
            }
            _ => {}
        }
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, parent, flags, Mode::empty());
        let directory = directory.map_err(|errno| match errno {
            Errno::NOENT => bad("its directory does not exist"),
            Errno::NOTDIR => bad("its directory is a file"),
            errno => SinkError::Io { action: "create", path: path.to_owned(), cause: errno.into() },
        })?;
        Ok(Self { path: path.to_owned(), directory, name, temporary: None })
    }

    fn error(&self, action: &'static str, cause: impl Into<io::Error>) -> SinkError {
        SinkError::Io { action, path: self.path.clone(), cause: cause.into() }
    }

    /// Opens a file without a name, or with a temporary one where the filesystem wants a name.
    fn open_unnamed(&mut self) -> Result<File, SinkError> {
        // Only through /proc can such a file get its name later.
        if !Path::new("/proc/self/fd").exists() {
            return self.open_named();
        }
        match self.open(OsStr::new("."), OFlags::TMPFILE) {
            Ok(file) => Ok(file),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => self.open_named(),
            Err(errno) => Err(self.error("create", errno)),
        }
    }

    fn open_named(&mut self) -> Result<File, SinkError> {
        let name = temporary_name();
        let file = self.open(&name, OFlags::CREATE | OFlags::EXCL);
        let file = file.map_err(|errno| self.error("create", errno))?;
        self.temporary = Some(name);
        Ok(file)
    }

    fn open(&self, name: &OsStr, flags: OFlags) -> Result<File, Errno> {
        // The umask takes away from this what the user wants taken.
        let mode = Mode::from_raw_mode(0o666);
        let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::openat(&self.directory, name, flags, mode).map(File::from)
    }

    /// Gives a file without a name that of the target, or where something stands there one beside it: a
    /// link cannot replace the target, only a rename can.
    fn name_file(&mut self, file: &File) -> Result<(), SinkError> {
        if self.temporary.is_some() {
            return Ok(());
        }
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let link_as = |name: &OsStr| {
            rustix::fs::linkat(CWD, &link, &self.directory, name, AtFlags::SYMLINK_FOLLOW)
        };
        // Where nothing stands there is no moment at which a kill leaves anything behind.
        match link_as(&self.name) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(self.error("create", errno)),
        }
        let name = temporary_name();
        link_as(&name).map_err(|errno| self.error("create", errno))?;
        self.temporary = Some(name);
        Ok(())
    }

    /// Renames the temporary file, if there is one, over the target and brings the name to the disk.
    fn replace(&mut self) -> Result<(), SinkError> {
        if let Some(temporary) = &self.temporary {
            rustix::fs::renameat(&self.directory, temporary, &self.directory, &self.name)
                .map_err(|errno| self.error("replace", errno))?;
            self.temporary = None;
        }
        match rustix::fs::fsync(&self.directory) {
            // Some network filesystems cannot sync a directory.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(self.error("write the directory of", errno)),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(name) = &self.temporary {
            // Nothing better can be done with an error here than to leave the file.
            let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
        }
    }
}

/// Hidden, unguessable and of a length that every filesystem takes.
fn temporary_name() -> OsString {
    let mut random = [0; 16];
    // Short reads and errors leave zeros: creating the file then fails if the name is taken.
    let _ = rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty());
    format!(".fedlane-{:032x}.tmp", u128::from_le_bytes(random)).into()
}

/// Makes the file `bytes` long and takes the space for it, so that a full disk is an error now
/// and not in the middle of a round.
fn reserve(file: &File, bytes: u64, target: &Target) -> Result<(), SinkError> {
    let no_space = || SinkError::NoSpace { path: target.path.clone(), needed_bytes: bytes };
    // Asked first, because a failing fallocate may fill the disk for a while. Filesystems that
    // do not know their size say that they have no blocks.
    let free = rustix::fs::fstatvfs(file).map_err(|errno| target.error("reserve", errno))?;
    if free.f_blocks > 0 && free.f_bavail.saturating_mul(free.f_frsize) < bytes {
        return Err(no_space());
    }
    let fallocate = || rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes);
    match rustix::io::retry_on_intr(fallocate) {
        Ok(()) => Ok(()),
        Err(Errno::NOSPC | Errno::FBIG | Errno::DQUOT) => Err(no_space()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            file.set_len(bytes).map_err(|cause| target.error("reserve", cause))
        }
        Err(errno) => Err(target.error("reserve", errno)),
    }
}

/// One lane's part of a file.
pub struct FileSink<'a> {
    file: &'a ModelFile,
    /// Holds a chunk that landed in the file, to check it.
    landed: Vec<u8>,
}

impl<'a> FileSink<'a> {
    /// Writes chunks to where they belong in `file`.
    pub fn new(file: &'a ModelFile) -> FileSink<'a> {
        FileSink { file, landed: Vec::new() }
    }
}

impl Sink for FileSink<'_> {
    fn landing(
        &mut self,
        _peer: usize,
        chunk: &Chunk,
        filled: usize,
        lands: Lands,
    ) -> Option<Landing<'_>> {
        let (file, start) = self.file.file();
        let position = start + chunk.bytes.start + filled as u64;
        (lands == Lands::File).then_some(Landing {
            length: chunk.length() - filled,
            bytes: None,
            file: Some((file, position)),
        })
    }

    fn landed(&mut self, _peer: usize, chunk: &Chunk) -> Result<&[u8], SinkError> {
        self.landed.resize(chunk.length(), 0);
        self.file.read_at(chunk.bytes.start, &mut self.landed)?;
        Ok(&self.landed)
    }

    fn accept(
        &mut self,
        _peer: usize,
        chunk: &Chunk,
        buffer: &mut Region,
    ) -> Result<(), SinkError> {
        let bytes = &buffer.bytes()[..chunk.length()];
        self.file.write_at(chunk.bytes.start, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Dtype, synthetic};

    /// A file as on a filesystem that knows no files without a name.
    fn named(path: &Path) -> ModelFile {
        let mut target = Target::new(path).unwrap();
        let file = target.open_named().unwrap();
        ModelFile::start(target, file, &synthetic(64, Dtype::F32).unwrap()).unwrap()
    }

    fn count(directory: &Path) -> usize {
        directory.read_dir().unwrap().count()
    }

    #[test]
    fn without_unnamed_files_a_dropped_file_still_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = named(&directory.path().join("out"));
        assert_eq!(count(directory.path()), 1);
        drop(file);
        assert_eq!(count(directory.path()), 0);
    }

    #[test]
    fn without_unnamed_files_a_finished_file_takes_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        named(&path).finish().unwrap();
        assert_eq!(count(directory.path()), 1);
        assert!(crate::source::file::FileSource::open(&path).is_ok());
    }

    #[test]
    fn a_target_that_cannot_be_replaced_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let manifest = synthetic(64, Dtype::F32).unwrap();
        let file = ModelFile::create(&path, &manifest).unwrap();
        std::fs::create_dir(&path).unwrap();
        let text = file.finish().unwrap_err().to_string();
        assert!(text.starts_with("cannot replace"), "{text}");
        assert_eq!(count(directory.path()), 1);
    }
}
