//! `quartermaster.v1`: the commands and reports between the coordinator and its agents.
//!
//! What lives here is only the wire format and the few facts that both ends must agree on.
//! It knows nothing of Kubernetes, containerd or the host.

/// Generated messages, clients and servers of `quartermaster.v1`.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("quartermaster.v1");
}

pub mod credentials;
pub mod identity;
pub mod keyring;
mod reason;
pub mod tls;

/// Port of the agent's commands, over mutual TLS.
pub const COMMAND_PORT: u16 = 7443;
/// Port of the coordinator's enrolment.
pub const ENROLLMENT_PORT: u16 = 7444;
/// Port of the standard gRPC health service, in plaintext, for probes.
pub const HEALTH_PORT: u16 = 7445;
/// Port of Prometheus metrics.
pub const METRICS_PORT: u16 = 7446;

/// Largest message that either end accepts, in bytes.
pub const MAX_MESSAGE: usize = 1024 * 1024;

/// The runtime handler that is installed.
pub const HANDLER: &str = "crun";
