//! Images brought into the store that the kubelet sees: by containerd's own pull on the node's own socket, with all
//! that the node has set for it, each one proven by CRI's ImageStatus there.
//!
//! Facts are read once for each order ([`facts`], [`kubelet`]); by which way, with which credential, whether it fits
//! and who holds an image is decided by pure functions. Nothing here knows of Prefetches or of gRPC to the
//! coordinator.

mod arrivals;
mod attempt;
mod cri;
mod disk;
mod event;
mod facts;
mod kubelet;
mod layers;
mod lease;
mod order;
mod patience;
mod pins;
mod provider_config;
mod providers;
mod queue;
mod reason;
mod reference;
mod release;
mod store;
mod transfer;
mod watch;
mod way;

pub use disk::Reserve;
pub use event::{Failed, ImageEvent, Progress, Ready, Sink, Tally};
pub use layers::Layer;
pub use order::{CredentialSet, Order, OrderError, Wanted};
pub use pins::{Pin, Pinned};
pub use queue::{Node, pull};
pub use reason::reason_of;
pub use reference::{InvalidReference, normalise};
pub use release::{Release, Released, release};

pub(crate) use reason::remedy_of;
pub(crate) use reference::registry_of;
