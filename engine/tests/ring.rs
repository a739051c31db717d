//! Rings and chains of members in one process, against means that are computed in another way.

#[path = "ring/common.rs"]
mod common;
#[path = "ring/deaths.rs"]
mod deaths;
#[path = "ring/means.rs"]
mod means;
mod models;
#[path = "ring/nonfinite.rs"]
mod nonfinite;
#[path = "ring/passed.rs"]
mod passed;
#[path = "ring/tls.rs"]
mod tls;
