//! containerd's configuration as a file of bytes: what it says, which edit adds our handler, and how that edit
//! is taken out again.
//!
//! Everything here is pure. It knows nothing of a running daemon, of systemd or of where files lie on a host;
//! it gets bytes and gives bytes, or a refusal in an operator's words.

mod block;
mod check;
mod default_runtime;
mod existing;
mod facts;
mod insertion;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod lines;
mod plan;
mod refusal;
mod rehearsable;
mod tree;
mod undo;
mod written;

pub use existing::kwasm_binary;
pub use facts::{ConfigFacts, Family, ImportedFile, Version, reads_version_3};
pub use insertion::{Handler, Piece, PieceKind};
pub use plan::{Adoption, ConfigEdit, Plan, plan};
pub use refusal::{Refusal, RefusalKind};
pub use rehearsable::rehearsable;
pub use undo::{EditRecord, Undo, UndoError, undo};
pub use written::{Written, plan_written, undo_written};

pub(crate) use facts::imports_of;
pub(crate) use tree::Tree;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod undo_tests;
#[cfg(test)]
mod written_tests;
