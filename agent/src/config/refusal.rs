//! Why a configuration is left alone.

use thiserror::Error;

/// Why a configuration is left alone, in an operator's words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    /// The category.
    pub kind: RefusalKind,
    /// The file that is to blame, as a path on the host.
    pub path: String,
    /// Its line that is to blame, counted from 1; `None` where it is not one line.
    pub line: Option<usize>,
    /// File, line, what stands there, and why it stops us.
    pub message: String,
    /// What an operator can do.
    pub remedy: String,
}

/// The category of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// No edit of this file would be safe.
    Configuration,
    /// A handler of our name is there and is not ours.
    Conflict,
}
