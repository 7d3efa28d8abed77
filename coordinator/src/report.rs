//! Metrics, and the answers to probes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::node::{NodeFacts, Outcome, Work};
use crate::prefetch::{PrefetchFacts, PrefetchPhase};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State_ {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Order {
    work: &'static str,
    outcome: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// What the coordinator counts. No label has values without bound.
pub struct Metrics {
    registry: Registry,
    nodes: Family<State_, Gauge<i64, AtomicI64>>,
    prefetches: Family<State_, Gauge<i64, AtomicI64>>,
    orders: Family<Order, Counter>,
    writes: Family<Kind, Counter>,
    leader: Gauge<i64, AtomicI64>,
    ready: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("quartermaster");
        let nodes = Family::default();
        let prefetches = Family::default();
        let orders = Family::default();
        let writes = Family::default();
        let leader = Gauge::default();
        registry.register("nodes", "Nodes by what they are as to WebAssembly", nodes.clone());
        registry.register("prefetches", "Prefetches by phase", prefetches.clone());
        registry.register("orders", "Orders to agents that came to an end", orders.clone());
        registry.register(
            "api_writes",
            "Writes to the API server by kind of object",
            writes.clone(),
        );
        registry.register("leader", "Whether this replica leads", leader.clone());
        Self {
            registry,
            nodes,
            prefetches,
            orders,
            writes,
            leader,
            ready: AtomicBool::new(false),
        }
    }
}

impl Metrics {
    /// Counts what there is.
    pub fn observe<'a>(
        &self,
        nodes: impl Iterator<Item = &'a NodeFacts>,
        prefetches: impl Iterator<Item = &'a PrefetchFacts>,
    ) {
        let (mut provisioned, mut failing, mut restarting, mut summoned) = (0, 0, 0, 0);
        for node in nodes {
            let condition = node.marks.condition.as_ref();
            provisioned += i64::from(condition.is_some_and(|c| c.status));
            failing += i64::from(condition.is_some_and(|c| !c.status));
            restarting += i64::from(node.marks.restart.is_some());
            summoned += i64::from(node.marks.agent.is_some());
        }
        for (state, count) in [
            ("provisioned", provisioned),
            ("not_provisioned", failing),
            ("restarting", restarting),
            ("summoned", summoned),
        ] {
            self.nodes.get_or_create(&State_ { state }).set(count);
        }
        let mut phases = [0; 4];
        for prefetch in prefetches {
            let at = match prefetch.status.phase {
                Some(PrefetchPhase::Pending) | None => 0,
                Some(PrefetchPhase::Running) => 1,
                Some(PrefetchPhase::Failed) => 2,
                Some(PrefetchPhase::Ready) => 3,
            };
            phases[at] += 1;
        }
        for (state, count) in ["pending", "running", "failed", "ready"].into_iter().zip(phases) {
            self.prefetches.get_or_create(&State_ { state }).set(count);
        }
    }

    /// Counts an order that came to its end.
    pub fn count_order(&self, work: Work, outcome: &Outcome) {
        let work = match work {
            Work::PrepareInstall => "prepare_install",
            Work::Install => "install",
            Work::Verify => "verify",
            Work::PrepareRemove => "prepare_remove",
            Work::Remove { .. } => "remove",
        };
        let outcome = match outcome {
            Outcome::Done { .. } => "Done".to_owned(),
            Outcome::Failed { reason, .. } => reason.camel_case(),
            Outcome::Lost => "Lost".to_owned(),
        };
        self.orders.get_or_create(&Order { work, outcome }).inc();
    }

    /// Counts a write to the API server.
    pub fn count_write(&self, kind: &'static str) {
        self.writes.get_or_create(&Kind { kind }).inc();
    }

    /// This replica leads, or does no more.
    pub fn set_leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// Everything that a replica does before it leads is up.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }
}

/// `/metrics`, `/healthz` and `/readyz`.
pub fn routes(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/metrics", get(text))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state(metrics)
}

async fn text(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    let mut body = String::new();
    let kind = [(
        header::CONTENT_TYPE,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
    )];
    match encode(&mut body, &metrics.registry) {
        Ok(()) => (StatusCode::OK, kind, body),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, kind, error.to_string()),
    }
}

async fn ready(State(metrics): State<Arc<Metrics>>) -> impl IntoResponse {
    if metrics.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting")
    }
}
