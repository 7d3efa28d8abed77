//! Images brought into the store that the kubelet sees: by CRI's PullImage on the node's own socket, each one proven
//! by CRI's ImageStatus there.
//!
//! Nothing here knows of Prefetches or of gRPC to the coordinator.

mod order;
mod reason;
mod reference;

pub use order::{ImageEvent, Order, OrderError, Ready, Sink, Tally, pull};
pub use reason::reason_of;
pub use reference::{InvalidReference, normalise};
