//! One error enum for each stage of the flow. Every text says what happened, to which file,
//! tensor or peer, and what to do.

mod model;
mod peer;
mod plan;
mod state;
mod tls;

pub use model::*;
pub use peer::*;
pub use plan::*;
pub use state::*;
pub use tls::*;
