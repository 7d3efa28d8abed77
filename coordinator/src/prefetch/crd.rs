//! The custom resource `Prefetch` of `cache.techsquad.rocks/v1`.

// The derive makes the type anew in a module of its own, where rustc takes it for unreachable.
#![allow(unreachable_pub)]
// Every column has a type of its own.
#![allow(clippy::duplicated_attributes)]

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
pub struct PrefetchSpec {
    /// Deployments of all namespaces that carry all of these labels: the images of their containers and
    /// init containers are wanted. Without any label, no Deployment is meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 64))]
    pub filter_by_labels: Option<BTreeMap<String, String>>,

    /// The images are wanted on every node whose name contains this text. Empty or absent: on every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node_filter: Option<String>,

    /// Seconds after which an image that could not be pulled is tried again. Absent or 0: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub retry_after: Option<i64>,
}

/// What became of a Prefetch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PrefetchStatus {
    /// Where it stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<PrefetchPhase>,
    /// The generation of the specification that this status speaks of.
    pub observed_generation: i64,
    /// Ready, Progressing and Degraded.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<StatusCondition>,
    /// How many images are wanted.
    pub images_wanted: i64,
    /// Nodes, counted.
    pub nodes: NodeCounts,
    /// Images on nodes, counted: one pair is one image on one node.
    pub pairs: PairCounts,
    /// Bytes of the images that were pulled for it.
    pub bytes_pulled: i64,
    /// Each image, with what kept it from nodes.
    pub images: Vec<ImageStatus>,
}

/// Where a Prefetch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum PrefetchPhase {
    /// Nothing has begun, or nothing is wanted.
    Pending,
    /// Images are being pulled.
    Running,
    /// Something is missing after its attempts; it is tried again after `retry_after`.
    Failed,
    /// Every image is on every node.
    Ready,
}

/// A condition as the API conventions have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StatusCondition {
    /// Ready, Progressing or Degraded.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True` or `False`.
    pub status: String,
    /// One word.
    pub reason: String,
    /// For a person.
    pub message: String,
    /// When the status last changed, in RFC 3339.
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: String,
    /// The generation that it speaks of.
    pub observed_generation: i64,
}

/// Nodes, counted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeCounts {
    /// On which images are wanted and can be pulled.
    pub wanted: i64,
    /// That have all images.
    pub ready: i64,
    /// That lack one after its attempts.
    pub failed: i64,
    /// That are meant but can't be served now: NotReady, virtual, or of another system.
    pub excluded: i64,
}

/// Images on nodes, counted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PairCounts {
    /// Images times nodes.
    pub wanted: i64,
    /// There.
    pub ready: i64,
    /// Missing after their attempts.
    pub failed: i64,
    /// Being pulled.
    pub pulling: i64,
}

/// One image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ImageStatus {
    /// The normalised reference.
    pub image: String,
    /// Its digest, once a node has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Nodes that have it.
    pub ready: i64,
    /// Nodes that lack it after its attempts.
    pub failed: i64,
    /// Why, most frequent first, three at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<ImageReason>,
}

/// Why an image is missing on nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ImageReason {
    /// One word, such as ImageNotFound.
    pub reason: String,
    /// On how many nodes.
    pub count: i64,
    /// The words of the registry or of containerd, from one of the nodes.
    pub message: String,
    /// Three of the nodes at most.
    pub nodes: Vec<String>,
}

/// The CustomResourceDefinition in YAML, as `manifests/base/crd.yaml` holds it.
pub fn yaml() -> anyhow::Result<String> {
    use kube::CustomResourceExt;
    Ok(serde_yaml_ng::to_string(&Prefetch::crd())?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_crd_in_the_manifests_is_the_one_in_the_code() {
        let kept = include_str!("../../../manifests/base/crd.yaml");
        assert_eq!(
            kept,
            super::yaml().expect("a CRD"),
            "run `make generate` and commit manifests/base/crd.yaml"
        );
    }
}
