//! Trees: the mean of edges is that of a star.

#[path = "tree/common.rs"]
mod common;
#[path = "tree/deaths.rs"]
mod deaths;
#[path = "tree/means.rs"]
mod means;
mod models;
