//! Rings of members in one process, against means that are computed in another way.

#[path = "ring/common.rs"]
mod common;
#[path = "ring/deaths.rs"]
mod deaths;
#[path = "ring/means.rs"]
mod means;
