//! The real program, in real processes, on ports that the kernel chooses.

mod awkward_models;
mod demo;
mod models;
mod process;
mod python;
mod rounds;
mod session;
