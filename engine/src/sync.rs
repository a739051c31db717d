//! The atomics of what threads hand each other without a lock. A file of its own, so that models of
//! their interleavings (`engine/tests/interleavings.rs`) can put others in their place.

pub(crate) use std::sync::atomic;
