//! Breaks sessions on purpose: real processes, real sockets, and peers that break the rules.
//!
//! After every fault each honest process must end soon with status 1 and one line that names
//! whoever is to blame, nothing may be half-written, and strangers at the port must end nothing.

mod aggregators;
mod clients;
mod floods;
mod host;
mod hostile;
mod models;
mod processes;
mod session;
mod slow;
mod state;
mod strangers;
mod training;
mod weights;
