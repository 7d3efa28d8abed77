//! What the coordinator keeps of a Prefetch: every default filled in, every text parsed once.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Span};
use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ObjectMeta;
use kube::core::Selector;

use super::crd::{
    NodesSpec, Order, Prefetch, PrefetchSpec, PrefetchStatus, PullPolicy, PullSpec, Retention, WorkloadKind,
};
use crate::node::Version;

/// A percentage of the nodes stands for at least this many: a small cluster pulls everywhere at once.
const PARALLEL_NODES: usize = 10;

/// A Prefetch, trimmed to what decisions need.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PrefetchFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`, by which its pins are known.
    pub uid: String,
    /// How new this is.
    pub version: Version,
    /// `metadata.generation`.
    pub generation: i64,
    /// `spec.filter_by_labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.node_filter`.
    pub node_filter: String,
    /// `spec.retry_after`.
    pub retry_after: SignedDuration,
    /// `spec.images`, as written.
    pub images: Vec<String>,
    /// `spec.workloads`.
    pub workloads: Vec<WorkloadQuery>,
    /// `spec.nodes`.
    pub nodes: Option<NodeQuery>,
    /// `spec.pull`.
    pub pull: PullFacts,
    /// How long a pin lasts; `None` where images are not pinned.
    pub pin: Option<SignedDuration>,
    /// `spec.order`.
    pub order: Order,
    /// `spec.retention`.
    pub retention: Retention,
    /// `spec.gate`.
    pub gate: bool,
    /// `spec.suspend`.
    pub suspend: bool,
    /// The status that is there.
    pub status: PrefetchStatus,
    /// Why the object can't be read, if it was stored under a definition that allowed what ours does not.
    pub broken: Option<String>,
}

/// Which workloads are meant.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkloadQuery {
    /// Their kind.
    pub kind: WorkloadKind,
    /// By their labels.
    pub selector: Selector,
    /// Their namespaces; empty is the Prefetch's own.
    pub namespaces: Vec<String>,
}

/// Which nodes are meant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeQuery {
    /// By their labels.
    pub selector: Selector,
    /// Taints that they may have.
    pub tolerations: Vec<Toleration>,
    /// Control-plane nodes too.
    pub control_plane: bool,
}

/// How images are pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullFacts {
    /// Tags are resolved again at every recheck.
    pub always: bool,
    /// Nodes at once.
    pub parallelism: Parallelism,
    /// Images at once on a node.
    pub per_node: u32,
    /// For one attempt at one image.
    pub deadline: SignedDuration,
    /// At one image.
    pub attempts: u32,
    /// Names of secrets.
    pub secrets: Vec<String>,
    /// Whose secrets are used as well.
    pub service_account: String,
}

impl Default for PullFacts {
    fn default() -> Self {
        Self {
            always: false,
            parallelism: Parallelism::Percent(10),
            per_node: 3,
            deadline: SignedDuration::from_mins(10),
            attempts: 3,
            secrets: Vec::new(),
            service_account: "default".into(),
        }
    }
}

/// How many nodes pull at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parallelism {
    /// So many.
    Nodes(usize),
    /// So many of a hundred of those that are meant.
    Percent(usize),
}

impl Parallelism {
    /// The number of nodes at once among `nodes`.
    pub fn of(self, nodes: usize) -> usize {
        match self {
            Self::Nodes(n) => n.max(2),
            Self::Percent(p) => (nodes * p).div_ceil(100).max(PARALLEL_NODES),
        }
    }
}

impl PrefetchFacts {
    /// Reads the facts of a Prefetch. What the API server's validation would have refused, in an object that was
    /// stored before there was any, makes it a broken one.
    pub fn read(prefetch: &Prefetch) -> Self {
        match Self::parse(&prefetch.spec) {
            Ok(facts) => Self {
                status: prefetch.status.clone().unwrap_or_default(),
                ..facts.named(&prefetch.metadata)
            },
            Err(why) => Self {
                status: prefetch.status.clone().unwrap_or_default(),
                ..Self::broken(&prefetch.metadata, &why)
            },
        }
    }

    /// An object that can't be read: it wants nothing, and its status says why.
    pub fn broken(metadata: &ObjectMeta, why: &str) -> Self {
        Self {
            broken: Some(why.to_owned()),
            ..Self::default().named(metadata)
        }
    }

    fn named(self, metadata: &ObjectMeta) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            version: Version::read(metadata),
            generation: metadata.generation.unwrap_or_default(),
            ..self
        }
    }

    fn parse(spec: &PrefetchSpec) -> Result<Self, String> {
        let retry_after = match spec.retry_after.unwrap_or(0) {
            seconds if seconds > 0 => seconds,
            _ => 300,
        };
        let mut workloads = Vec::with_capacity(spec.workloads.len());
        for workload in &spec.workloads {
            workloads.push(WorkloadQuery {
                kind: workload.kind,
                selector: selector(workload.selector.as_ref(), "workloads")?,
                namespaces: workload.namespaces.clone(),
            });
        }
        let pin = spec.pin.clone().unwrap_or_default();
        let expiry = duration(
            pin.expiry.as_deref(),
            SignedDuration::from_hours(168),
            "pin.expiry",
        )?;
        Ok(Self {
            labels: spec.filter_by_labels.clone().unwrap_or_default(),
            node_filter: spec.node_filter.clone().unwrap_or_default(),
            retry_after: SignedDuration::from_secs(retry_after),
            images: spec.images.clone(),
            workloads,
            nodes: spec.nodes.as_ref().map(node_query).transpose()?,
            pull: pull(&spec.pull.clone().unwrap_or_default())?,
            pin: pin.enabled.unwrap_or(true).then_some(expiry),
            order: spec.order.unwrap_or_default(),
            retention: spec.retention.unwrap_or_default(),
            gate: spec.gate.unwrap_or_default(),
            suspend: spec.suspend.unwrap_or_default(),
            ..Self::default()
        })
    }

    /// The kinds of workloads that have to be known to resolve it.
    pub fn kinds(&self) -> impl Iterator<Item = WorkloadKind> {
        let deployments = (!self.labels.is_empty()).then_some(WorkloadKind::Deployment);
        self.workloads.iter().map(|query| query.kind).chain(deployments)
    }
}

fn node_query(spec: &NodesSpec) -> Result<NodeQuery, String> {
    Ok(NodeQuery {
        selector: selector(spec.selector.as_ref(), "nodes")?,
        tolerations: spec.tolerations.clone(),
        control_plane: spec.include_control_plane.unwrap_or_default(),
    })
}

fn pull(spec: &PullSpec) -> Result<PullFacts, String> {
    let defaults = PullFacts::default();
    let parallelism = match &spec.parallelism {
        None => defaults.parallelism,
        Some(IntOrString::Int(n)) => Parallelism::Nodes(usize::try_from(*n).unwrap_or(0)),
        Some(IntOrString::String(text)) => {
            let percent = text.strip_suffix('%').and_then(|number| number.parse().ok());
            Parallelism::Percent(percent.ok_or_else(|| {
                format!("pull.parallelism is {text:?}, which is neither a number nor a percentage")
            })?)
        }
    };
    Ok(PullFacts {
        always: spec.policy == Some(PullPolicy::Always),
        parallelism,
        per_node: spec.per_node.unwrap_or(defaults.per_node),
        deadline: duration(spec.deadline.as_deref(), defaults.deadline, "pull.deadline")?,
        attempts: spec.attempts.unwrap_or(defaults.attempts),
        secrets: spec.secrets.clone(),
        service_account: spec
            .service_account_name
            .clone()
            .filter(|name| !name.is_empty())
            .unwrap_or(defaults.service_account),
    })
}

fn selector(selector: Option<&LabelSelector>, field: &str) -> Result<Selector, String> {
    selector
        .cloned()
        .unwrap_or_default()
        .try_into()
        .map_err(|error| format!("the selector of {field} can't be used: {error}"))
}

fn duration(text: Option<&str>, default: SignedDuration, field: &str) -> Result<SignedDuration, String> {
    let Some(text) = text else {
        return Ok(default);
    };
    let parsed = text
        .parse::<Span>()
        .and_then(SignedDuration::try_from)
        .map_err(|error| format!("{field} is {text:?}, which is no duration: {error}"))?;
    if parsed <= SignedDuration::ZERO {
        return Err(format!("{field} is {text:?}, which is not more than nothing"));
    }
    Ok(parsed)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn prefetch(spec: &str) -> PrefetchFacts {
        PrefetchFacts::read(
            &serde_yaml_ng::from_str(&format!("apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {{name: p, namespace: n}}\nspec: {spec}"))
                .expect("a Prefetch"),
        )
    }

    #[test]
    fn what_is_absent_has_the_defaults_that_the_documents_name() {
        let facts = prefetch("{}");
        assert_eq!(facts.retry_after, SignedDuration::from_secs(300));
        assert_eq!(facts.pull.parallelism, Parallelism::Percent(10));
        assert_eq!((facts.pull.per_node, facts.pull.attempts), (3, 3));
        assert_eq!(facts.pull.deadline, SignedDuration::from_mins(10));
        assert_eq!(facts.pull.service_account, "default");
        assert_eq!(facts.pin, Some(SignedDuration::from_hours(168)));
        assert_eq!(facts.order, Order::SmallestFirst);
        assert_eq!(facts.retention, Retention::Unpin);
        assert!(!facts.gate && !facts.suspend && facts.nodes.is_none());
    }

    #[test]
    fn absent_or_zero_retry_after_means_300_seconds() {
        assert_eq!(
            prefetch("{retry_after: 0}").retry_after,
            SignedDuration::from_secs(300)
        );
        assert_eq!(
            prefetch("{retry_after: 60}").retry_after,
            SignedDuration::from_secs(60)
        );
    }

    #[test]
    fn a_percentage_stands_for_ten_nodes_at_least_and_a_number_for_two() {
        assert_eq!(Parallelism::Percent(10).of(3), 10);
        assert_eq!(Parallelism::Percent(10).of(5000), 500);
        assert_eq!(Parallelism::Percent(1).of(1050), 11);
        assert_eq!(Parallelism::Nodes(1).of(5000), 2);
        assert_eq!(Parallelism::Nodes(40).of(5000), 40);
    }

    #[test]
    fn durations_are_read_as_kubernetes_writes_them() {
        let facts = prefetch("{pull: {deadline: 1m30s}, pin: {expiry: 24h}}");
        assert_eq!(facts.pull.deadline, SignedDuration::from_secs(90));
        assert_eq!(facts.pin, Some(SignedDuration::from_hours(24)));
        assert_eq!(prefetch("{pin: {enabled: false}}").pin, None);
    }

    #[test]
    fn what_was_stored_unchecked_is_named_and_wants_nothing() {
        for (spec, word) in [
            ("{pull: {deadline: soon}}", "pull.deadline"),
            ("{pull: {parallelism: many}}", "pull.parallelism"),
            (
                "{nodes: {selector: {matchExpressions: [{key: a, operator: Like}]}}}",
                "nodes",
            ),
        ] {
            let facts = prefetch(spec);
            assert!(
                facts.broken.as_deref().is_some_and(|why| why.contains(word)),
                "{spec}: {:?}",
                facts.broken
            );
            assert!(facts.images.is_empty() && facts.name == "p");
        }
    }

    #[test]
    fn only_the_kinds_that_are_asked_for_have_to_be_known() {
        let kinds = |spec| prefetch(spec).kinds().collect::<Vec<_>>();
        assert!(kinds("{images: [a]}").is_empty());
        assert_eq!(kinds("{filter_by_labels: {a: b}}"), [WorkloadKind::Deployment]);
        assert_eq!(kinds("{workloads: [{kind: CronJob}]}"), [WorkloadKind::CronJob]);
    }
}
