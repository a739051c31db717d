//! The protocol as pure bytes: no sockets, no clock. `docs/WIRE.md` draws every one of them.

pub mod checksum;
pub mod frame;
pub mod hello;
pub mod keys;
pub mod message;
