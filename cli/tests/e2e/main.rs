//! The real program, in real processes, on ports that the kernel chooses.

mod addresses;
mod awkward_models;
mod bad_updates;
mod client_order;
mod command_line;
mod demo;
mod doors;
mod memory;
mod models;
mod neighbours;
mod outputs;
mod plan;
mod process;
mod python;
mod real_model;
mod rounds;
mod session;
mod training;
mod trees;
