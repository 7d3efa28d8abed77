//! What a Node says of its provisioning or removal. No cluster, no clock.

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use quartermaster_proto::v1::FailureReason;

use crate::status::UNDER_WAY;

/// The annotation that says whether a node is to run WebAssembly.
pub(crate) const WANTED: &str = "kwasm.sh/kwasm-node";
/// The annotation that lets a removal go on over the heads of pods.
pub(crate) const FORCE: &str = "kwasm.sh/force-removal";
const LABELS: [&str; 2] = ["kwasm.sh/kwasm-provisioned", "kwasm.sh/crun"];
const ANNOTATIONS: [&str; 2] = ["kwasm.sh/spec-hash", "kwasm.sh/restart"];
const CONDITION: &str = "WasmRuntimeReady";

/// What a node is to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Able to run WebAssembly.
    Provisioned,
    /// As it was.
    Removed,
}

/// How far a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It has become it.
    Done,
    /// Something is under way, or has not begun.
    Going,
    /// It failed, or something is in the way; it is tried again.
    Hindered {
        /// One word.
        reason: String,
        message: String,
    },
    /// It can't be served: nothing is tried again until somebody changes something.
    Refused {
        /// One word.
        reason: String,
        message: String,
    },
}

/// Judges a node by what it carries.
pub(crate) fn judge(node: &Node, goal: Goal) -> Verdict {
    let condition = condition(node);
    match goal {
        Goal::Provisioned => judge_wanted(node, condition),
        Goal::Removed => judge_unwanted(node, condition),
    }
}

fn judge_wanted(node: &Node, condition: Option<&NodeCondition>) -> Verdict {
    let Some(condition) = condition else {
        return Verdict::Going;
    };
    let (reason, message) = words(condition);
    if condition.status == "True" {
        let labelled = LABELS.iter().all(|key| label(node, key));
        // A removal that was blocked is taken back before it is done.
        return if labelled && reason != "RemovalBlocked" {
            Verdict::Done
        } else {
            Verdict::Going
        };
    }
    if UNDER_WAY.contains(&reason.as_str()) {
        Verdict::Going
    } else if is_refusal(&reason) {
        Verdict::Refused { reason, message }
    } else {
        Verdict::Hindered { reason, message }
    }
}

fn judge_unwanted(node: &Node, condition: Option<&NodeCondition>) -> Verdict {
    let marked =
        LABELS.iter().any(|key| label(node, key)) || ANNOTATIONS.iter().any(|key| annotation(node, key));
    match condition {
        None if !marked => Verdict::Done,
        Some(condition) => {
            let (reason, message) = words(condition);
            let hindered = reason == "RemovalBlocked"
                || (condition.status == "False"
                    && !UNDER_WAY.contains(&reason.as_str())
                    && !is_refusal(&reason));
            if hindered {
                Verdict::Hindered { reason, message }
            } else {
                Verdict::Going
            }
        }
        None => Verdict::Going,
    }
}

/// Whether a reason is one that no other try without a change by an operator would end otherwise.
fn is_refusal(reason: &str) -> bool {
    [
        FailureReason::UnsupportedHost,
        FailureReason::UnsupportedConfiguration,
        FailureReason::HandlerConflict,
    ]
    .iter()
    .any(|refusal| refusal.camel_case() == reason)
}

fn condition(node: &Node) -> Option<&NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == CONDITION)
}

fn words(condition: &NodeCondition) -> (String, String) {
    (
        condition.reason.clone().unwrap_or_default(),
        condition.message.clone().unwrap_or_default(),
    )
}

fn label(node: &Node, key: &str) -> bool {
    node.metadata
        .labels
        .as_ref()
        .is_some_and(|labels| labels.contains_key(key))
}

fn annotation(node: &Node, key: &str) -> bool {
    node.metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(yaml: &str) -> Node {
        serde_yaml_ng::from_str(yaml).expect("a Node")
    }

    fn with(labels: &str, status: &str, reason: &str) -> Node {
        node(&format!(
            "metadata: {{name: a, labels: {{{labels}}}}}\nstatus:\n  conditions:\n    - {{type: WasmRuntimeReady, status: '{status}', reason: {reason}, message: words}}\n"
        ))
    }

    const READY: &str = "kwasm.sh/kwasm-provisioned: a, kwasm.sh/crun: ready";

    fn named(reason: &str) -> (String, String) {
        (reason.to_owned(), "words".to_owned())
    }

    #[test]
    fn a_node_is_provisioned_once_its_condition_and_both_labels_say_so() {
        let judge = |node: Node| judge(&node, Goal::Provisioned);
        assert_eq!(judge(node("metadata: {name: a}")), Verdict::Going);
        assert_eq!(judge(with(READY, "True", "Provisioned")), Verdict::Done);
        assert_eq!(
            judge(with("kwasm.sh/crun: ready", "True", "Provisioned")),
            Verdict::Going
        );
        assert_eq!(judge(with(READY, "True", "RemovalBlocked")), Verdict::Going);
        assert_eq!(judge(with("", "False", "Installing")), Verdict::Going);
    }

    #[test]
    fn what_is_tried_again_is_told_from_what_is_refused() {
        let (reason, message) = named("RehearsalFailed");
        assert_eq!(
            judge(&with("", "False", "RehearsalFailed"), Goal::Provisioned),
            Verdict::Hindered { reason, message }
        );
        let (reason, message) = named("UnsupportedHost");
        assert_eq!(
            judge(&with("", "False", "UnsupportedHost"), Goal::Provisioned),
            Verdict::Refused { reason, message }
        );
        // That it was refused before is no reason why it should not be put back.
        assert_eq!(
            judge(&with("", "False", "UnsupportedHost"), Goal::Removed),
            Verdict::Going
        );
    }

    #[test]
    fn a_node_is_put_back_once_nothing_of_ours_is_on_it() {
        let judge = |node: Node| judge(&node, Goal::Removed);
        assert_eq!(
            judge(node("metadata: {name: a, labels: {kwasm.sh/agent: summoned}}")),
            Verdict::Done
        );
        assert_eq!(
            judge(node("metadata: {name: a, annotations: {kwasm.sh/spec-hash: x}}")),
            Verdict::Going
        );
        assert_eq!(judge(with(READY, "True", "Provisioned")), Verdict::Going);
        let (reason, message) = named("RemovalBlocked");
        assert_eq!(
            judge(with(READY, "True", "RemovalBlocked")),
            Verdict::Hindered { reason, message }
        );
    }
}
