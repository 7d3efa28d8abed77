//! What the coordinator tells of itself: metrics, and the answers to probes.
//!
//! What lives here counts and serves, and decides nothing.

mod health;
mod labels;
mod metrics;
mod probes;
mod requests;

pub(crate) use health::Health;
pub use metrics::Metrics;
pub use probes::routes;
pub(crate) use requests::Counting;
