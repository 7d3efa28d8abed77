//! The specification of a Prefetch.

// The derive makes the type anew in a module of its own, where rustc takes it for unreachable.
#![allow(unreachable_pub)]
// Every column has a type of its own.
#![allow(clippy::duplicated_attributes)]

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::status::PrefetchStatus;

/// Which images are to be on which nodes before they are needed there.
#[derive(CustomResource, KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cache.techsquad.rocks",
    version = "v1",
    kind = "Prefetch",
    plural = "prefetches",
    singular = "prefetch",
    namespaced,
    status = "PrefetchStatus",
    doc = "Prefetch asks for images to be on nodes before the workloads that use them are.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Images",
        type_ = "integer",
        json_path = ".status.imagesWanted",
        description = "Images that are wanted"
    ),
    printcolumn(
        name = "Nodes",
        type_ = "integer",
        json_path = ".status.nodes.wanted",
        description = "Nodes on which they are wanted"
    ),
    printcolumn(
        name = "Ready",
        type_ = "integer",
        json_path = ".status.pairs.ready",
        description = "Images that are there, counted on each node"
    ),
    printcolumn(
        name = "Failed",
        type_ = "integer",
        json_path = ".status.pairs.failed",
        description = "Images that could not be pulled, counted on each node"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct PrefetchSpec {
    /// Deployments of all namespaces that carry all of these labels: the images of their containers and
    /// init containers are wanted. Without any label, no Deployment is meant.
    #[serde(default, rename = "filter_by_labels", skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 64))]
    pub filter_by_labels: Option<BTreeMap<String, String>>,

    /// The images are wanted on every node whose name contains this text. Empty or absent: on every node.
    #[serde(default, rename = "node_filter", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node_filter: Option<String>,

    /// Seconds after which an image that could not be pulled is tried again. Absent or 0: 300.
    #[serde(default, rename = "retry_after", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub retry_after: Option<i64>,

    /// Images that are wanted by their reference, as a Pod would name them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 500), inner(length(min = 1, max = 512)))]
    pub images: Vec<String>,

    /// Workloads whose images are wanted: those of their containers, init containers and sidecars. What is changed in
    /// a workload is followed at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub workloads: Vec<WorkloadSpec>,

    /// The nodes that are meant, beside node_filter: both must match. When it is set, control-plane nodes and nodes
    /// with taints that are not tolerated are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodesSpec>,

    /// How images are pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<PullSpec>,

    /// Whether images are kept from the kubelet's image collector, and for how long. Without a pin, an image that no
    /// container has used yet is the first one that the collector removes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin: Option<PinSpec>,

    /// Which images come first. Default: SmallestFirst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Order>,

    /// What becomes of an image on a node when this Prefetch does not want it there any more. Default: Unpin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,

    /// Keep new nodes that register with the taint kwasm.sh/not-ready:NoSchedule out of service until these images are
    /// there. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<bool>,

    /// Pull nothing for this Prefetch until it is taken back. What is there stays. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend: Option<bool>,
}

/// Workloads of one kind.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSpec {
    /// Their kind.
    pub kind: WorkloadKind,
    /// Selects them by their own labels. Empty or absent: all of this kind in the namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// Their namespaces; "*" stands for all. Empty or absent: the namespace of the Prefetch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(regex(pattern = r"^(\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)$"))
    )]
    pub namespaces: Vec<String>,
}

/// The kinds of workloads whose images can be followed.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum WorkloadKind {
    /// apps/v1
    #[default]
    Deployment,
    /// apps/v1
    StatefulSet,
    /// apps/v1
    DaemonSet,
    /// apps/v1. Those that a Deployment has scaled to nothing do not count.
    ReplicaSet,
    /// batch/v1
    CronJob,
    /// batch/v1. Those that have ended do not count.
    Job,
}

/// The nodes that are meant, beside node_filter: both must match. When it is set, control-plane nodes and nodes with
/// taints that are not tolerated are left out.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodesSpec {
    /// Selects nodes by their labels. Empty or absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// Taints that are tolerated, as in a Pod; PreferNoSchedule needs no toleration. Those that Kubernetes and
    /// Quartermaster put on a node for a time are tolerated anyway.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub tolerations: Vec<Toleration>,
    /// Whether control-plane nodes are meant too. Their usual taint is tolerated then. Default: false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_control_plane: Option<bool>,
}

/// How images are pulled.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullSpec {
    /// IfNotPresent pulls what is missing; Always also resolves tags again at every recheck. Default: IfNotPresent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PullPolicy>,
    /// Nodes that pull at once for this Prefetch: a number, at least 2, or a percentage of the nodes that are meant,
    /// which stands for 10 nodes at least. Default: 10%.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("type(self) == int ? self >= 2 : self.matches('^(100|[1-9]?[0-9])%$')")
            .message("parallelism must be a number of nodes, 2 or more, or a percentage such as 25%")
    )]
    pub parallelism: Option<IntOrString>,
    /// Images at once on one node. Default: 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 20))]
    pub per_node: Option<u32>,
    /// How long one attempt at one image may take, such as 10m. Default: 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("self.matches('^([0-9]+(s|m|h))+$') && duration(self) >= duration('10s') && duration(self) <= duration('24h')")
            .message("deadline must be a duration between 10s and 24h, such as 10m")
    )]
    pub deadline: Option<String>,
    /// Attempts at one image before it counts as failed until retry_after. Default: 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10))]
    pub attempts: Option<u32>,
    /// Names of pull secrets in the namespace of the Prefetch, of the type kubernetes.io/dockerconfigjson or
    /// kubernetes.io/dockercfg.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 253)))]
    pub secrets: Vec<String>,
    /// The service account in the namespace of the Prefetch whose imagePullSecrets are used as well. Default: default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub service_account_name: Option<String>,
}

/// IfNotPresent pulls what is missing; Always also resolves tags again at every recheck. Default: IfNotPresent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PullPolicy {
    /// When it is missing.
    #[default]
    IfNotPresent,
    /// When it is missing, and at every recheck.
    Always,
}

/// Whether images are kept from the kubelet's image collector, and for how long. Without a pin, an image that no
/// container has used yet is the first one that the collector removes.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PinSpec {
    /// Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// How long a pin lasts that is not renewed, such as 168h. It is renewed at every recheck. Default: 168h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("self.matches('^([0-9]+(s|m|h))+$') && duration(self) >= duration('1h') && duration(self) <= duration('8760h')")
            .message("expiry must be a duration between 1h and 8760h, such as 168h")
    )]
    pub expiry: Option<String>,
}

/// Which images come first: SmallestFirst, as far as sizes are known, or AsGiven. Default: SmallestFirst.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Order {
    /// The smallest, as far as sizes are known, so that many images are there soon.
    #[default]
    SmallestFirst,
    /// As the specification lists them: first the images, then the workloads.
    AsGiven,
}

/// What becomes of an image on a node when this Prefetch does not want it there any more: Unpin leaves it to the
/// kubelet's image collector, Keep leaves it pinned until the pin expires, RemoveUnused removes it at once where nobody
/// uses it. Default: Unpin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Retention {
    /// The pin is taken off at once; the kubelet's image collector takes the image when it needs room.
    #[default]
    Unpin,
    /// The pin stays until it expires.
    Keep,
    /// The image is removed at once, where no container uses it and no other Prefetch wants it.
    RemoveUnused,
}
