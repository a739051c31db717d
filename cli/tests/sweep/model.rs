//! Models of three clients, whose mean is known exactly: small whole numbers.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

/// The clients, in the order of their names.
pub const NAMES: [&str; 3] = ["a", "b", "c"];

/// Their weights. Every element is a multiple of 12, so the mean of any of them has no fraction.
pub const EXAMPLES: [u64; 3] = [1, 1, 2];

/// Bytes of a chunk; the models have five for each of two streams. That is less than the window with which
/// TCP opens: what a kernel still has to send when a connection is reset is lost, though it was sent.
pub const CHUNK_BYTES: u64 = 8 << 10;

/// Bytes of a model's data.
pub const DATA_BYTES: u64 = 10 * CHUNK_BYTES;

/// What the tensors are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// f32: the mean takes the place of the sums.
    Floats,
    /// bf16 too: the sums are kept beside the mean.
    Mixed,
}

/// The files of all clients, and the mean of every set of them.
pub struct Models {
    directory: TempDir,
    means: Vec<(Members, Vec<u8>)>,
}

/// Which clients are in a mean: a bit for each.
pub type Members = u8;

pub const EVERYONE: Members = 0b111;

impl Models {
    /// The same for all tests.
    pub fn of(layout: Layout) -> &'static Models {
        static FLOATS: OnceLock<Models> = OnceLock::new();
        static MIXED: OnceLock<Models> = OnceLock::new();
        let models = match layout {
            Layout::Floats => &FLOATS,
            Layout::Mixed => &MIXED,
        };
        models.get_or_init(|| Models::write(layout))
    }

    pub fn path(&self, client: usize) -> PathBuf {
        self.directory.path().join(NAMES[client])
    }

    fn write(layout: Layout) -> Models {
        let directory = tempfile::tempdir().unwrap();
        for (client, name) in NAMES.iter().enumerate() {
            let file = file(layout, |index| element(index, client));
            std::fs::write(directory.path().join(name), file).unwrap();
        }
        let mean_of = |members: Members| {
            let clients = || (0..NAMES.len()).filter(move |client| members >> client & 1 == 1);
            let total: u64 = clients().map(|client| EXAMPLES[client]).sum();
            let sum = |index| -> u64 {
                clients().map(|client| EXAMPLES[client] * element(index, client)).sum()
            };
            (members, file(layout, |index| sum(index) / total))
        };
        Models { directory, means: (1..=EVERYONE).map(mean_of).collect() }
    }

    /// Whose mean the file at `path` is.
    pub fn members(&self, path: &Path) -> Option<Members> {
        let bytes = std::fs::read(path).unwrap();
        self.means.iter().find(|(_, mean)| *mean == bytes).map(|(members, _)| *members)
    }
}

/// Below 256, so exact in bf16, and no chunk is like another.
fn element(index: u64, client: usize) -> u64 {
    12 * ((index * 7 + index / 61 + 13 * client as u64) % 21)
}

fn file(layout: Layout, element: impl Fn(u64) -> u64) -> Vec<u8> {
    let halves = match layout {
        Layout::Floats => DATA_BYTES,
        Layout::Mixed => 6 * CHUNK_BYTES,
    };
    let tensors = [("first", "F32", 4, 0..halves), ("second", "BF16", 2, halves..DATA_BYTES)];
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, size, bytes) in tensors.into_iter().filter(|(.., bytes)| !bytes.is_empty()) {
        let (begin, end) = (bytes.start, bytes.end);
        let elements = (end - begin) / size;
        entries.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":[{elements}],"data_offsets":[{begin},{end}]}}"#
        ));
        for index in 0..elements {
            let bits = (element(index) as f32).to_le_bytes();
            // The upper half of an f32 is the bf16 of it.
            data.extend(&bits[4 - size as usize..]);
        }
    }
    let header = format!("{{{}}}", entries.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}
