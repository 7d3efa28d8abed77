//! Prefetches: which images are wanted on which nodes, what is there, and what a user is told of it.
//!
//! Everything here is facts and pure decisions. It must not know a client, a clock or a socket.

mod cover;
mod crd;
mod facts;
mod limits;
mod pairs;
mod plan;
mod reference;
mod registry;
mod resolve;
mod status;
mod verdict;
mod wanted;
mod workload;

pub use cover::{Cover, covers};
pub use crd::{
    ImageReason, ImageStatus, NodeCounts, PairCounts, Prefetch, PrefetchPhase, PrefetchSpec, PrefetchStatus,
    Retention, StatusCondition, WorkloadKind, yaml as crd_yaml,
};
pub use facts::{Parallelism, PrefetchFacts, PullFacts};
pub use limits::{Excess, Limits};
pub use pairs::{NodePairs, Pair, PairFailure};
pub use plan::{PlanInput, PullPlan, held_until, is_pointless, largest_beside, plan, promise, recheck_at};
pub use reference::normalise;
pub use registry::{Registries, host};
pub use resolve::{Resolved, resolve};
pub use status::{Standing, StatusInput, shorten, status};
pub use verdict::Trouble;
pub use wanted::{
    Claim, Keep, Pin, Want, Wanted, claimants, is_kept_to_the_end, is_removed, over_budget, pin_owner, wanted,
};
pub use workload::{Workload, WorkloadFacts};
