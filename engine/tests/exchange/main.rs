//! An exchange and its clients, in one process, on ports that the kernel chooses.

mod common;
mod doors;
mod encrypted;
mod ends;
mod faults;
mod means;
mod offers;
mod peer;
mod relay;
mod updates;
