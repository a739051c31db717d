//! fedlane moves the parameters of a model between an aggregator and its clients and averages
//! them while they arrive.
//!
//! The files follow the bytes: [`source`] -> [`sender`] -> [`wire`] -> [`receiver`] ->
//! [`reducer`] -> [`sink`]. [`manifest`] says what the bytes mean, [`limits`] bounds everything
//! a peer or a file can make us hold.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod error;
pub mod limits;
pub mod manifest;
pub mod reducer;
pub mod reference;
pub mod source;
