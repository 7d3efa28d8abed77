//! What is counted.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use quartermaster_proto::v1::FailureReason;

use super::labels::{OfCertificate, OfKind, OfOrder, OfOutcome, OfRequest, OfStage, OfState, OfVerb, OfWork};
use crate::node::{NodeFacts, Outcome, Work};
use crate::prefetch::{Pair, PrefetchFacts, PrefetchPhase};

type Number = Gauge<i64, AtomicI64>;

/// Seconds: a stage takes from a millisecond to the minutes of a bad restart.
const STAGE_BUCKETS: [f64; 12] = [0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0];
/// Seconds, as other clients of an API server have them.
const REQUEST_BUCKETS: [f64; 10] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 15.0, 60.0];

/// What the coordinator counts. No label has values without bound.
pub struct Metrics {
    registry: Registry,
    nodes: Family<OfState, Number>,
    prefetches: Family<OfState, Number>,
    orders: Family<OfOrder, Counter>,
    failures: Family<OfWork, Counter>,
    order_times: Family<OfWork, Histogram, fn() -> Histogram>,
    stages: Family<OfStage, Histogram, fn() -> Histogram>,
    images: Family<OfOutcome, Counter>,
    pulled_bytes: Counter,
    writes: Family<OfKind, Counter>,
    requests: Family<OfRequest, Counter>,
    request_times: Family<OfVerb, Histogram, fn() -> Histogram>,
    enrolments: Family<OfOutcome, Counter>,
    certificates: Family<OfCertificate, Number>,
    queue: Number,
    leader: Number,
    term: Number,
    ready: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let stages: fn() -> Histogram = || Histogram::new(STAGE_BUCKETS);
        let requests: fn() -> Histogram = || Histogram::new(REQUEST_BUCKETS);
        let mut metrics = Self {
            registry: Registry::with_prefix("quartermaster"),
            nodes: Family::default(),
            prefetches: Family::default(),
            orders: Family::default(),
            failures: Family::default(),
            order_times: Family::new_with_constructor(stages),
            stages: Family::new_with_constructor(stages),
            images: Family::default(),
            pulled_bytes: Counter::default(),
            writes: Family::default(),
            requests: Family::default(),
            request_times: Family::new_with_constructor(requests),
            enrolments: Family::default(),
            certificates: Family::default(),
            queue: Gauge::default(),
            leader: Gauge::default(),
            term: Gauge::default(),
            ready: AtomicBool::new(false),
        };
        metrics.register();
        metrics.begin_at_zero();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The version that runs", build);
        registry.register(
            "nodes",
            "Nodes by what they are as to WebAssembly",
            self.nodes.clone(),
        );
        registry.register("prefetches", "Prefetches by phase", self.prefetches.clone());
        registry.register(
            "orders",
            "Orders to agents that came to an end, by work and outcome",
            self.orders.clone(),
        );
        registry.register(
            "order_failures",
            "Orders that failed and did not merely have to wait, by work",
            self.failures.clone(),
        );
        registry.register(
            "order_duration_seconds",
            "From an order until its agent told of its end; one that was lost is not timed",
            self.order_times.clone(),
        );
        registry.register(
            "stage_duration_seconds",
            "How long the stages of an agent's work took",
            self.stages.clone(),
        );
        registry.register(
            "images",
            "Images that agents reported, by outcome",
            self.images.clone(),
        );
        registry.register(
            "pulled_bytes",
            "Bytes of the images that were pulled",
            self.pulled_bytes.clone(),
        );
        registry.register(
            "api_writes",
            "Writes that were decided on, by kind of object",
            self.writes.clone(),
        );
        registry.register(
            "api_requests",
            "Requests to the API server, by verb and code of the answer",
            self.requests.clone(),
        );
        registry.register(
            "api_request_duration_seconds",
            "Until the API server answered; a watch is not timed",
            self.request_times.clone(),
        );
        registry.register(
            "enrolments",
            "Requests of agents for a certificate, by outcome",
            self.enrolments.clone(),
        );
        registry.register(
            "certificate_expiry_timestamp_seconds",
            "When a certificate ends, in seconds since 1970",
            self.certificates.clone(),
        );
        registry.register(
            "queue_depth",
            "Inputs that wait for the leader",
            self.queue.clone(),
        );
        registry.register("leader", "Whether this replica leads", self.leader.clone());
        registry.register(
            "leader_term",
            "The Lease's transition count while this replica leads, else 0",
            self.term.clone(),
        );
    }

    /// A counter that is not there until something fails can't be alerted on at its first failure.
    fn begin_at_zero(&self) {
        for outcome in ["signed", "refused", "unavailable"] {
            drop(self.enrolments.get_or_create(&OfOutcome { outcome }));
        }
        for outcome in ["ready", "failed"] {
            drop(self.images.get_or_create(&OfOutcome { outcome }));
        }
        for work in ["install", "verify", "remove"] {
            let outcome = "Done".to_owned();
            drop(self.orders.get_or_create(&OfOrder { work, outcome }));
            drop(self.failures.get_or_create(&OfWork { work }));
        }
        for kind in ["node", "prefetch"] {
            drop(self.writes.get_or_create(&OfKind { kind }));
        }
        for state in ["provisioned", "not_provisioned", "restarting", "summoned"] {
            drop(self.nodes.get_or_create(&OfState { state }));
        }
        for state in ["pending", "running", "failed", "ready"] {
            drop(self.prefetches.get_or_create(&OfState { state }));
        }
    }

    pub(super) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }

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
            self.nodes.get_or_create(&OfState { state }).set(count);
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
            self.prefetches.get_or_create(&OfState { state }).set(count);
        }
    }

    /// Counts an order that came to its end.
    pub fn count_order(&self, work: Work, outcome: &Outcome, took: Duration) {
        let work = word(work);
        if *outcome != Outcome::Lost {
            self.order_times
                .get_or_create(&OfWork { work })
                .observe(took.as_secs_f64());
        }
        if let Outcome::Failed { reason, .. } = outcome
            && !matches!(reason, FailureReason::Busy | FailureReason::HandlerInUse)
        {
            self.failures.get_or_create(&OfWork { work }).inc();
        }
        let outcome = match outcome {
            Outcome::Done { .. } => "Done".to_owned(),
            Outcome::Failed { reason, .. } => reason.camel_case(),
            Outcome::Lost => "Lost".to_owned(),
        };
        self.orders.get_or_create(&OfOrder { work, outcome }).inc();
    }

    /// A stage of an agent's work ended.
    pub(crate) fn stage(&self, work: Work, stage: String, took: Duration) {
        let work = word(work);
        self.stages
            .get_or_create(&OfStage { work, stage })
            .observe(took.as_secs_f64());
    }

    /// An agent told of an image.
    pub(crate) fn image(&self, pair: &Pair, fetched: u64) {
        self.pulled_bytes.inc_by(fetched);
        let outcome = match pair {
            Pair::Ready { .. } => "ready",
            Pair::NotForNode { .. } => "not_for_node",
            Pair::Failed(_) => "failed",
            Pair::Pulling => return,
        };
        self.images.get_or_create(&OfOutcome { outcome }).inc();
    }

    /// Counts a write to the API server.
    pub fn count_write(&self, kind: &'static str) {
        self.writes.get_or_create(&OfKind { kind }).inc();
    }

    pub(super) fn count_request(&self, verb: &'static str, code: Option<u16>, took: Duration) {
        // The code that client-go's metrics have for a request without an answer.
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        self.requests.get_or_create(&OfRequest { verb, code }).inc();
        if verb != "watch" {
            self.request_times
                .get_or_create(&OfVerb { verb })
                .observe(took.as_secs_f64());
        }
    }

    /// An agent asked for a certificate: it was `signed`, `refused`, or the API server was `unavailable`.
    pub(crate) fn enrolment(&self, outcome: &'static str) {
        self.enrolments.get_or_create(&OfOutcome { outcome }).inc();
    }

    /// When a certificate ends, in seconds since 1970.
    pub(crate) fn expiry(&self, certificate: &'static str, at: i64) {
        self.certificates
            .get_or_create(&OfCertificate { certificate })
            .set(at);
    }

    /// So many inputs wait for the leader.
    pub(crate) fn queue(&self, depth: usize) {
        self.queue.set(i64::try_from(depth).unwrap_or(i64::MAX));
    }

    /// This replica leads in this term, or does no more.
    pub fn leads(&self, term: Option<u64>) {
        self.leader.set(i64::from(term.is_some()));
        let term = term.and_then(|term| i64::try_from(term).ok());
        self.term.set(term.unwrap_or(0));
        if term.is_none() {
            // What another leads is counted there; twice would be wrong in every sum.
            self.queue.set(0);
            self.observe(std::iter::empty(), std::iter::empty());
        }
    }

    /// Everything that a replica does before it leads is up.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }
}

fn word(work: Work) -> &'static str {
    match work {
        Work::PrepareInstall => "prepare_install",
        Work::Install => "install",
        Work::Verify => "verify",
        Work::PrepareRemove => "prepare_remove",
        Work::Remove { .. } => "remove",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_and_units_that_the_conventions_ask_for() {
        let metrics = Metrics::default();
        metrics.stage(Work::Install, "rehearse".to_owned(), Duration::from_millis(150));
        metrics.count_request("patch", Some(429), Duration::from_millis(3));
        metrics.count_request("watch", None, Duration::from_secs(300));
        metrics.leads(Some(7));
        let text = metrics.text().expect("text");
        for line in [
            concat!(
                "quartermaster_build_info{version=\"",
                env!("CARGO_PKG_VERSION"),
                "\"} 1"
            ),
            "quartermaster_leader 1",
            "quartermaster_leader_term 7",
            "quartermaster_stage_duration_seconds_bucket{le=\"0.2\",work=\"install\",stage=\"rehearse\"} 1",
            "quartermaster_api_requests_total{verb=\"patch\",code=\"429\"} 1",
            "quartermaster_api_requests_total{verb=\"watch\",code=\"<error>\"} 1",
            "quartermaster_enrolments_total{outcome=\"refused\"} 0",
            "quartermaster_pulled_bytes_total 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("duration_seconds_count{verb=\"watch\"}"), "{text}");
    }

    #[test]
    fn a_replica_that_leads_no_more_counts_nothing_of_what_another_counts() {
        let metrics = Metrics::default();
        metrics.leads(Some(7));
        metrics.queue(5);
        metrics
            .nodes
            .get_or_create(&OfState { state: "provisioned" })
            .set(3);
        metrics.leads(None);
        let text = metrics.text().expect("text");
        for line in [
            "quartermaster_leader 0",
            "quartermaster_queue_depth 0",
            "quartermaster_nodes{state=\"provisioned\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    /// Every metric of alerts and dashboard is one that is served, with labels that it has.
    #[test]
    fn alerts_and_dashboard_ask_for_nothing_that_is_not_there() {
        let metrics = Metrics::default();
        metrics.stage(Work::Install, "swap".to_owned(), Duration::from_millis(1));
        metrics.count_request("get", Some(200), Duration::from_millis(1));
        metrics.expiry("authority", 1);
        metrics.expiry("coordinator", 1);
        let text = metrics.text().expect("text");
        let served = |name: &str| {
            text.lines()
                .any(|line| line.split(['{', ' ']).next() == Some(name))
        };
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/chart/files/monitoring");
        let mut asked = 0;
        for file in ["alerts.yaml", "dashboard.json"] {
            let words = std::fs::read_to_string(folder.join(file)).expect(file);
            let expressions = words
                .lines()
                .filter(|line| line.contains("expr"))
                .flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'))
                .filter(|word| word.starts_with("quartermaster_"));
            for name in expressions {
                assert!(served(name), "{name} of {file} is not in\n{text}");
                asked += 1;
            }
        }
        assert!(asked > 25, "only {asked} names were found");
    }
}
