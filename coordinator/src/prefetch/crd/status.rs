//! The status of a Prefetch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// That are meant but can't be served now: NotReady, cordoned, virtual, of another system, or without an agent.
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
#[serde(rename_all = "camelCase", default)]
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
    /// Nodes for whose platform it has no manifest.
    #[serde(skip_serializing_if = "is_zero")]
    pub not_for_node: i64,
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

fn is_zero(n: &i64) -> bool {
    *n == 0
}
