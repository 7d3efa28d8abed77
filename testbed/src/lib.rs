//! A real Kubernetes cluster on one Linux machine, without Docker, virtual machines or a network.
//!
//! ```no_run
//! use testbed::{Cluster, Progress, Spec};
//!
//! # fn main() -> anyhow::Result<()> {
//! let spec = Spec::parse("demo", "worker-1=1.7,worker-2=2.4")?;
//! let cluster = Cluster::up(&spec, &Progress::terminal())?;
//! println!("{}", cluster.kubectl(&["get", "nodes"])?);
//! Cluster::down("demo")?;
//! # Ok(())
//! # }
//! ```
//!
//! Three layers, which know only what lies below: **parts** are programs and root file systems in a cache; **the fabric, the
//! control plane, the registry and the nodes** are processes made of them, all in cgroups and namespaces of one testbed;
//! [`Cluster`] is what users see. `docs/testbed.md` tells the rest.

pub mod address;
pub mod cgroups;
mod cluster;
pub mod control_plane;
pub mod deployment;
pub mod fabric;
pub mod faults;
pub mod fleet;
pub mod forwarder;
pub mod host;
pub mod images;
pub mod layout;
pub mod node;
pub mod parts;
pub mod pki;
pub mod process;
pub mod progress;
pub mod record;
pub mod registry;
pub mod spec;
pub mod teardown;
pub mod tool;
pub mod versions;
pub mod wait;

pub use cluster::Cluster;
pub use progress::Progress;
pub use spec::{NodeSpec, Spec};
pub use wait::wait_for;
