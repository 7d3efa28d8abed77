//! Nodes: what is known of one, and what should happen to it next.
//!
//! Everything here is facts and pure decisions. It must not know a client, a clock or a socket: time and
//! the state of agents come in as arguments, and what comes out is a value that the engine carries out.

mod conclusion;
mod facts;
mod gate;
mod jitter;
mod lifecycle;
mod marks;
mod rollout;
mod window;

pub use conclusion::{Outcome, conclude};
pub use facts::{NodeFacts, Version};
pub use gate::{GateInput, GateStep, gate};
pub use jitter::jittered;
pub use lifecycle::{Attempt, NodeStep, Retry, Situation, Work, decide, wants_provisioning};
pub use marks::{Condition, Marks, Restart, RestartKind, Seen, Writes, label_value, spec_hash};
pub(crate) use marks::{SUMMONED, hex};
pub use rollout::{Admission, Budget, MaxUnavailable, Policy, admit};
pub use window::Window;
