//! Where parameters end: the last stage of the flow.

pub mod file;
