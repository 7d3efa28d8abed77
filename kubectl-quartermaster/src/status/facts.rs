//! What is known of nodes and Prefetches, in the form in which `-o json` shows it.

use anyhow::{Result, bail};
use quartermaster_proto::v1::{NodeStatus, PrefetchSummary, StatusResponse};
use serde::Serialize;

/// The state of everything.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    /// The pod that leads, and its version.
    pub leader: String,
    pub version: String,
    /// False for the first seconds of a leader, while it is still listing.
    pub synced: bool,
    /// Every node is wanted but those annotated `false`.
    pub auto_provision: bool,
    pub paused: bool,
    /// Why restarts have stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halted: Option<String>,
    pub removing: bool,
    pub nodes: Vec<Node>,
    pub prefetches: Vec<Prefetch>,
}

/// One node.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Node {
    pub name: String,
    pub state: NodeState,
    /// It is to be able to run WebAssembly.
    pub wanted: bool,
    /// Of the condition WasmRuntimeReady.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// What its agent does: Install, Pull, …
    #[serde(skip_serializing_if = "String::is_empty")]
    pub work: String,
    /// As the kubelet says.
    pub ready: bool,
    pub runtime: String,
    /// None, Summoned or Ready.
    pub agent: &'static str,
    /// It carries kwasm.sh/repairing.
    pub fenced: bool,
    /// It carries kwasm.sh/not-ready.
    pub gated: bool,
    /// All images that are wanted there are there.
    pub images_settled: bool,
}

/// Where a node stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum NodeState {
    /// Not done, and its condition says why.
    Failed,
    /// It is not Ready by its kubelet, and something is wanted of it.
    NotReady,
    /// Pods still use the handler that is to go.
    RemovalBlocked,
    /// Something is under way.
    Working,
    /// All is prepared; it waits for its turn to restart.
    Waiting,
    /// Wanted, and nothing has been heard yet.
    Pending,
    /// A WebAssembly module has run there.
    Provisioned,
    /// Nobody wants it.
    #[default]
    Off,
}

/// One Prefetch.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Prefetch {
    pub namespace: String,
    pub name: String,
    pub phase: String,
    pub images: i64,
    pub nodes: i64,
    /// Images on nodes: one pair is one image on one node.
    pub pairs: i64,
    pub ready: i64,
    pub pulling: i64,
    pub failed: i64,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl Status {
    /// Reads the leader's answer.
    pub(crate) fn read(answer: &StatusResponse) -> Self {
        let control = answer.control.clone().unwrap_or_default();
        Self {
            leader: answer.leader.clone(),
            version: answer.version.clone(),
            synced: answer.synced,
            auto_provision: answer.auto_provision,
            paused: control.paused,
            halted: Some(control.halted).filter(|why| !why.is_empty()),
            removing: control.removing,
            nodes: answer.nodes.iter().map(Node::read).collect(),
            prefetches: answer.prefetches.iter().map(Prefetch::read).collect(),
        }
    }

    /// Leaves these nodes only.
    ///
    /// # Errors
    /// When one of them is not there.
    pub(crate) fn keep(&mut self, names: &[String]) -> Result<()> {
        for name in names {
            if !self.nodes.iter().any(|node| node.name == *name) {
                bail!("there is no node {name}");
            }
        }
        self.nodes.retain(|node| names.contains(&node.name));
        self.prefetches.clear();
        Ok(())
    }
}

impl Node {
    fn read(node: &NodeStatus) -> Self {
        Self {
            name: node.name.clone(),
            state: state_of(node),
            wanted: node.wanted,
            reason: node.reason.clone(),
            message: node.message.clone(),
            work: node.work.clone(),
            ready: node.ready,
            runtime: node.runtime.clone(),
            agent: match (node.agent_ready, node.summoned) {
                (true, _) => "Ready",
                (false, true) => "Summoned",
                (false, false) => "None",
            },
            fenced: node.fenced,
            gated: node.gated,
            images_settled: node.images_settled,
        }
    }
}

fn state_of(node: &NodeStatus) -> NodeState {
    let works = !node.work.is_empty() && node.work != "Pull";
    let concerned = node.wanted || !node.condition.is_empty();
    if node.condition == "True" && node.reason == "RemovalBlocked" {
        NodeState::RemovalBlocked
    } else if works {
        NodeState::Working
    } else if concerned && !node.ready {
        NodeState::NotReady
    } else if node.waits {
        NodeState::Waiting
    } else if node.condition == "True" {
        NodeState::Provisioned
    } else if node.condition == "False" && !UNDER_WAY.contains(&node.reason.as_str()) {
        NodeState::Failed
    } else if node.wanted || !node.condition.is_empty() {
        NodeState::Pending
    } else {
        NodeState::Off
    }
}

/// Reasons of the condition that are no failure.
pub(crate) const UNDER_WAY: [&str; 3] = ["Installing", "Removing", "Verifying"];

impl Prefetch {
    fn read(prefetch: &PrefetchSummary) -> Self {
        Self {
            namespace: prefetch.namespace.clone(),
            name: prefetch.name.clone(),
            phase: prefetch.phase.clone(),
            images: prefetch.images,
            nodes: prefetch.nodes,
            pairs: prefetch.pairs,
            ready: prefetch.ready,
            pulling: prefetch.pulling,
            failed: prefetch.failed,
            message: prefetch.message.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(set: impl FnOnce(&mut NodeStatus)) -> NodeState {
        let mut node = NodeStatus {
            ready: true,
            ..NodeStatus::default()
        };
        set(&mut node);
        state_of(&node)
    }

    #[test]
    fn a_nodes_state_is_what_a_person_has_to_know_first() {
        assert_eq!(node(|_| {}), NodeState::Off);
        assert_eq!(node(|n| n.wanted = true), NodeState::Pending);
        assert_eq!(
            node(|n| (n.wanted, n.work) = (true, "Install".into())),
            NodeState::Working
        );
        assert_eq!(node(|n| (n.wanted, n.waits) = (true, true)), NodeState::Waiting);
        let provisioned = |n: &mut NodeStatus| {
            n.wanted = true;
            n.condition = "True".into();
            n.reason = "Provisioned".into();
        };
        assert_eq!(node(provisioned), NodeState::Provisioned);
        assert_eq!(
            node(|n| {
                provisioned(n);
                n.work = "Pull".into();
            }),
            NodeState::Provisioned
        );
        assert_eq!(
            node(|n| {
                provisioned(n);
                n.reason = "RemovalBlocked".into();
            }),
            NodeState::RemovalBlocked
        );
        assert_eq!(
            node(|n| {
                provisioned(n);
                n.ready = false;
            }),
            NodeState::NotReady
        );
        assert_eq!(
            node(|n| (n.condition, n.reason) = ("False".into(), "UnsupportedHost".into())),
            NodeState::Failed
        );
        assert_eq!(
            node(|n| (n.condition, n.reason) = ("False".into(), "Verifying".into())),
            NodeState::Pending
        );
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let mut status = Status::default();
        let error = status.keep(&["x".to_owned()]).expect_err("no such node");
        assert_eq!(error.to_string(), "there is no node x");
    }
}
