//! A model file of arbitrary bytes: it is refused, or it is as long as it says and reads as it stands.
#![no_main]

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

use fedlane::source::Source;
use fedlane::source::file::FileSource;
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, memfd_create};

/// One file for all inputs: to make one takes longer than to read it.
static FILE: Mutex<Option<File>> = Mutex::new(None);

fuzz_target!(|bytes: &[u8]| {
    let mut file = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let file = file.get_or_insert_with(|| {
        memfd_create("model", MemfdFlags::CLOEXEC).expect("a file in memory").into()
    });
    file.set_len(0).expect("a file of ours");
    file.seek(SeekFrom::Start(0)).expect("a file of ours");
    file.write_all(bytes).expect("room for it");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let Ok(source) = FileSource::open(&path) else { return };
    let manifest = source.manifest();
    let data_bytes = manifest.data_bytes() as usize;
    let start = 8 + manifest.header().len();
    assert_eq!(bytes.len(), start + data_bytes);
    let mut data = vec![0; data_bytes];
    source.read(0, &mut data).expect("a whole file");
    assert!(data == bytes[start..]);
    source.read(1, &mut data).expect_err("bytes behind the end");
});
