//! Models and updates that tests of several shapes share.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use fedlane::client::Canceller;
use fedlane::error::SourceError;
use fedlane::manifest::{Dtype, Manifest};
use fedlane::source::Source;
use proptest::prelude::*;

pub fn manifest(tensors: &[(&str, Dtype, &[u64])]) -> Manifest {
    let tensors =
        tensors.iter().map(|(name, dtype, shape)| ((*name).into(), *dtype, shape.to_vec()));
    Manifest::from_tensors(tensors, &BTreeMap::new()).unwrap()
}

/// An update whose host dies when so many bytes of it have been read.
pub struct Mortal<S> {
    update: S,
    read: AtomicU64,
    dies_at: u64,
    canceller: Mutex<Option<Canceller>>,
}

impl<S> Mortal<S> {
    pub fn new(update: S, dies_at: u64, canceller: Canceller) -> Mortal<S> {
        let (read, canceller) = (AtomicU64::new(0), Mutex::new(Some(canceller)));
        Mortal { update, read, dies_at, canceller }
    }
}

impl<S: Source> Source for Mortal<S> {
    fn manifest(&self) -> &Manifest {
        self.update.manifest()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), SourceError> {
        let read = self.read.fetch_add(out.len() as u64, Ordering::SeqCst) + out.len() as u64;
        if read >= self.dies_at
            && let Some(canceller) = self.canceller.lock().unwrap().take()
        {
            canceller.cancel("");
        }
        self.update.read(offset, out)
    }
}

const DTYPES: [Dtype; 13] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F64,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::U8,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
    Dtype::BOOL,
];

/// Models of a few tensors with fewer than so many elements each, of all dtypes that are averaged.
pub fn models(most: u64) -> impl Strategy<Value = Manifest> {
    let tensor = (prop::sample::select(&DTYPES[..]), prop_oneof![0_u64..5, 0..most]);
    prop::collection::vec(tensor, 0..6).prop_map(|tensors| {
        let tensors = tensors
            .into_iter()
            .enumerate()
            .map(|(index, (dtype, elements))| (format!("t{index}"), dtype, vec![elements]));
        Manifest::from_tensors(tensors, &Default::default()).unwrap()
    })
}
