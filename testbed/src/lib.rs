//! A real Kubernetes cluster on one Linux machine, without Docker, virtual machines or a network.

pub mod address;
pub mod cgroups;
pub mod host;
pub mod layout;
pub mod parts;
pub mod process;
pub mod progress;
pub mod spec;
pub mod tool;
pub mod versions;
pub mod wait;
