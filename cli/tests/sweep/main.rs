//! Breaks whole sessions at many points, each from a seed: the outcome is exact, or it is an error, and
//! it comes soon. Real processes, and a network that fails where the plan says.
//!
//! `FEDLANE_SWEEP_POINTS` sets how many points each sweep has, `FEDLANE_SWEEP_SEED` runs one of them.

mod faults;
mod kills;
mod model;
mod points;
mod process;
mod quorum;
mod resume;
mod session;
