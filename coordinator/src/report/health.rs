//! The standard gRPC health service, by names that say what they are about.

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

/// Up at all, and signing certificates.
const ALWAYS: [&str; 2] = ["", "quartermaster.v1.Enrollment"];
/// Whether this replica is the one that leads.
const LEADER: &str = "leader";

/// What the health service answers.
#[derive(Debug, Clone)]
pub(crate) struct Health(HealthReporter);

impl Health {
    pub(crate) async fn new(reporter: HealthReporter) -> Self {
        for name in ALWAYS {
            reporter.set_service_status(name, ServingStatus::Serving).await;
        }
        let health = Self(reporter);
        health.leads(false).await;
        health
    }

    /// This replica leads, or does no more.
    pub(crate) async fn leads(&self, leads: bool) {
        let status = if leads {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        self.0.set_service_status(LEADER, status).await;
    }

    /// This replica was told to end: who asks goes to the other one.
    pub(crate) async fn ends(&self) {
        for name in ALWAYS {
            self.0.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}
