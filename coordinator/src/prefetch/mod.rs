//! Prefetches: which images are wanted on which nodes, what is there, and what a user is told of it.
//!
//! Everything here is facts and pure decisions. It must not know a client, a clock or a socket.

mod crd;
mod pairs;
mod plan;
mod reference;
mod resolve;
mod status;

pub use crd::{
    ImageReason, ImageStatus, NodeCounts, PairCounts, Prefetch, PrefetchPhase, PrefetchSpec, PrefetchStatus,
    StatusCondition, yaml as crd_yaml,
};
pub use pairs::{NodePairs, Pair, PairFailure};
pub use plan::{PullPlan, plan, recheck_at};
pub use reference::normalise;
pub use resolve::{Cover, DeploymentFacts, PrefetchFacts, Resolved, covers, resolve};
pub use status::{StatusInput, status};
