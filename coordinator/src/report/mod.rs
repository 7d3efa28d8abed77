//! What the coordinator tells of itself: metrics, and the answers to probes.
//!
//! What lives here counts and serves, and decides nothing.

mod labels;
mod metrics;
mod probes;
mod requests;

pub use metrics::Metrics;
pub use probes::routes;
pub(crate) use requests::Counting;
