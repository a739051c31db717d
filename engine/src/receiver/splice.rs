//! `splice(2)` through a pipe. From the socket to the pipe only references to pages move; from
//! the pipe into a region or file the kernel copies. The form that ends in `/dev/null` drops the
//! bytes: it bounds what receiving can cost and is no way to receive.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{self, PipeFlags, SpliceFlags};

use super::{Landing, ReceivePath, unusable};
use crate::limits;

struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Pipe {
    fn new() -> io::Result<Pipe> {
        let (reader, writer) = pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // A smaller pipe works too, with more calls.
        let _ = pipe::fcntl_setpipe_size(&writer, limits::PIPE_BYTES);
        Ok(Pipe { reader, writer })
    }

    /// Takes up to `length` bytes from the socket and moves all of them on.
    fn pass(
        &self,
        socket: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        mut position: Option<u64>,
        length: usize,
    ) -> io::Result<usize> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        let taken = match pipe::splice(socket, None, &self.writer, None, length, flags) {
            Ok(taken) => taken,
            Err(Errno::AGAIN) => return Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => return Err(error.into()),
        };
        let mut left = taken;
        while left > 0 {
            let moved = pipe::splice(
                &self.reader,
                None,
                target,
                position.as_mut(),
                left,
                SpliceFlags::MOVE,
            )?;
            if moved == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            left -= moved;
        }
        Ok(taken)
    }
}

/// Receives into a region or a file.
pub struct Splice(Pipe);

impl Splice {
    /// Opens the pipe.
    pub fn new() -> io::Result<Splice> {
        Pipe::new().map(Splice)
    }
}

impl ReceivePath for Splice {
    fn receive(&mut self, socket: BorrowedFd<'_>, landing: Landing<'_>) -> io::Result<usize> {
        let (file, position) = landing.file.ok_or_else(|| unusable("a region or a file"))?;
        self.0.pass(socket, file, Some(position), landing.length)
    }
}

/// Receives and drops. For benchmarks only.
pub struct SpliceNull {
    pipe: Pipe,
    null: File,
}

impl SpliceNull {
    /// Opens the pipe and `/dev/null`.
    pub fn new() -> io::Result<SpliceNull> {
        Ok(SpliceNull { pipe: Pipe::new()?, null: File::options().write(true).open("/dev/null")? })
    }
}

impl ReceivePath for SpliceNull {
    fn receive(&mut self, socket: BorrowedFd<'_>, landing: Landing<'_>) -> io::Result<usize> {
        self.pipe.pass(socket, self.null.as_fd(), None, landing.length)
    }
}
