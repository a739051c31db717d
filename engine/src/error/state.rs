use std::io;
use std::path::PathBuf;

/// Why a session cannot be kept on disk, or gone on with.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another process uses the directory.
    #[error("another aggregator keeps its state in {}; give each its own --state", path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// It is somebody else's.
    #[error("{} is not empty and holds no session; name a directory of its own", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}; the state of a session needs a directory that can be written and room for its model", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The files do not fit together.
    #[error("{} cannot be gone on with: {why}; to begin anew, remove the directory", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It is another session's.
    #[error("{} holds a session with {what} {was}, not {is}; use the options of that session, or remove the directory to begin anew", path.display())]
    Differs {
        /// The directory.
        path: PathBuf,
        /// The setting.
        what: String,
        /// Its value in the session.
        was: String,
        /// Its value now.
        is: String,
    },
    /// Updates that are never in a mean of their own.
    #[error("updates that are not averaged here have no state to keep; leave out --state")]
    NoMean,
}
