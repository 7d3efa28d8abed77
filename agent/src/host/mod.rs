//! The host below the agent: its files through one root, its systemd through D-Bus, and what kind of system it is.
//!
//! Everything that the agent reads or writes on the host goes through [`HostRoot`]. Nothing here knows of
//! containerd's configuration or of the coordinator.

mod distribution;
mod root;
mod systemd;

pub use distribution::{CONTAINERD_UNIT, HostFacts, HostRefusal, OsRelease, judge, read_facts};
pub use root::{Held, HostDir, HostRoot};
pub use systemd::{JobResult, Property, ServiceFacts, Systemd, SystemdError};
