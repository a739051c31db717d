//! Shared memory: a file that lives in memory, mapped whole and present from the start.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{self, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags};

/// 2 MiB: the huge page of x86-64 and of aarch64 with 4 KiB base pages.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Less than this is populated by one thread.
const POPULATE_BYTES: usize = 64 << 20;

/// What kind of pages hold a [`Mapping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB pages, from a private tmpfs mounted with `huge=always`.
    Huge,
    /// The base page of the host, from a memfd.
    Base,
}

/// A memory file of fixed size, mapped for reading and writing, every page present.
pub struct Mapping {
    start: NonNull<u8>,
    mapped_bytes: usize,
    file: OwnedFd,
    pages: Pages,
}

// SAFETY: the mapping is plain memory owned by this value; `&self` only reads it.
unsafe impl Send for Mapping {}
// SAFETY: as above; writing needs `&mut self`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes and pre-faults `bytes` of zeroed memory on the given kind of pages.
    pub fn new(bytes: u64, pages: Pages) -> io::Result<Mapping> {
        let unit = if pages == Pages::Huge { HUGE_PAGE_BYTES } else { 4096 };
        let rounded =
            bytes.max(1).checked_next_multiple_of(unit).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapped_bytes = usize::try_from(rounded).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let file = match pages {
            Pages::Huge => huge_file(rounded)?,
            Pages::Base => {
                fs::memfd_create("fedlane", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?
            }
        };
        fs::ftruncate(&file, rounded)?;
        if pages == Pages::Base {
            // Who maps the file too may trust its size: touching what is gone would be SIGBUS.
            fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        }
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            mm::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping { start, mapped_bytes, file, pages };
        mapping.populate()?;
        Ok(mapping)
    }

    /// Where a mapping of a file may begin: a multiple of this.
    pub const ALIGN_BYTES: u64 = 4096;

    /// Maps `bytes` bytes of a file that somebody else made, from `position` on. The pages are
    /// there already, or come when they are touched.
    pub fn adopt(file: OwnedFd, position: u64, bytes: u64) -> io::Result<Mapping> {
        let mapped_bytes = usize::try_from(bytes.max(1)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            mm::mmap(std::ptr::null_mut(), mapped_bytes, flags, MapFlags::SHARED, &file, position)?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, mapped_bytes, file, pages: Pages::Base })
    }

    /// Brings every page in, so that a lack of memory is an error here and not SIGBUS later. The
    /// kernel clears pages at the speed of one core, so several share the work.
    fn populate(&self) -> io::Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let parts = cores.min(self.mapped_bytes / POPULATE_BYTES).max(1);
        let part_bytes = (self.mapped_bytes / parts).next_multiple_of(HUGE_PAGE_BYTES as usize);
        if parts == 1 {
            return self.populate_part(0, self.mapped_bytes);
        }
        let starts = (0..self.mapped_bytes).step_by(part_bytes);
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for start in starts {
                let bytes = part_bytes.min(self.mapped_bytes - start);
                let work = move || self.populate_part(start, bytes);
                match std::thread::Builder::new().spawn_scoped(scope, work) {
                    Ok(thread) => threads.push(thread),
                    Err(_) => self.populate_part(start, bytes)?,
                }
            }
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
            })
        })
    }

    fn populate_part(&self, start: usize, bytes: usize) -> io::Result<()> {
        // SAFETY: start + bytes is within the mapping, which this value owns.
        let populated = unsafe {
            let start = self.start.as_ptr().add(start).cast();
            mm::madvise(start, bytes, Advice::LinuxPopulateWrite)
        };
        match populated {
            // Kernels before 5.14 do not know the advice: let the file allocate its pages.
            Err(rustix::io::Errno::INVAL) => {
                let flags = fs::FallocateFlags::empty();
                Ok(fs::fallocate(&self.file, flags, start as u64, bytes as u64)?)
            }
            other => Ok(other?),
        }
    }

    /// Takes the pages out of this process's page table. They stay in the file, and come back when
    /// they are touched.
    pub fn rest(&self) -> io::Result<()> {
        // SAFETY: the mapping is shared, so its content is the file's and stays.
        let start = self.start.as_ptr().cast();
        Ok(unsafe { mm::madvise(start, self.mapped_bytes, Advice::LinuxDontNeed)? })
    }

    /// The whole mapping.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start and length are those of a live mapping; `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.mapped_bytes) }
    }

    /// The whole mapping, for writing, with the file behind it.
    pub fn bytes_mut(&mut self) -> (&mut [u8], BorrowedFd<'_>) {
        // SAFETY: as in `bytes`, and `&mut self` keeps readers out.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.mapped_bytes) };
        (bytes, self.file.as_fd())
    }

    /// Where it starts, for those who share it beyond what a borrow can say.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The memory file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What kind of pages hold it.
    pub fn pages(&self) -> Pages {
        self.pages
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped; no borrow outlives `self`.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// An unnamed file on a tmpfs of its own that is mounted nowhere and ends with the file.
/// `MFD_HUGETLB` would need reserved pages, and `sendfile` from hugetlbfs is refused; a tmpfs
/// with `huge=always` needs only the right to mount.
fn huge_file(bytes: u64) -> io::Result<OwnedFd> {
    let tmpfs = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    mount::fsconfig_set_string(&tmpfs, "huge", "always")?;
    mount::fsconfig_set_string(&tmpfs, "size", bytes.to_string())?;
    mount::fsconfig_create(&tmpfs)?;
    let root = mount::fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    Ok(fs::openat(&root, ".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR)?)
}
