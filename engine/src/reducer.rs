//! (filled by the next commits)
