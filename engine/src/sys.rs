//! Every unsafe system call, behind safe functions. Nothing here knows about models.
#![allow(unsafe_code)]

pub mod features;
pub mod ktls;
pub mod memory;
pub mod process;
pub mod simd;
pub mod socket;
