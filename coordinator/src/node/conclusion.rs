//! What the end of an order means: for the marks of its node, and for when to try again.

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::v1::{FailureReason, Stage};

use super::facts::NodeFacts;
use super::lifecycle::{Attempt, RUNS, Retry, Work};
use super::marks::{Marks, RestartKind};
use crate::reason;

/// How often a node whose handler is in use is asked again whether it still is.
const IN_USE_RECHECK: SignedDuration = SignedDuration::from_secs(10);

/// How an order ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// As ordered.
    Done {
        /// Boot in which it was done, as the agent read it.
        boot_id: String,
        /// Machine on which it was done.
        machine_id: String,
    },
    /// Not done; with the agent's own words.
    Failed {
        /// Category.
        reason: FailureReason,
        /// What, where, why, and what to do.
        message: String,
        /// Where it failed.
        stage: Stage,
        /// Something had been changed and was put back.
        rolled_back: bool,
    },
    /// The agent could not be asked, or the answer was lost: nobody knows.
    Lost,
}

/// The marks that a node must carry after `work` ended with `outcome`, and what to remember of the attempt.
pub fn conclude(
    node: &NodeFacts,
    work: Work,
    outcome: &Outcome,
    spec_hash: &str,
    attempt: &Attempt,
    now: Timestamp,
) -> (Marks, Attempt) {
    let mut marks = node.marks.clone();
    match outcome {
        Outcome::Done { boot_id, machine_id } => match work {
            Work::PrepareInstall => (marks, prepared(RestartKind::Install)),
            Work::PrepareRemove => (marks, prepared(RestartKind::Remove)),
            Work::Install | Work::Verify => {
                marks.spec_hash = Some(spec_hash.to_owned());
                marks.verified_boot = Some(boot_id.clone());
                marks.verified_machine = Some(machine_id.clone());
                marks.restart = None;
                marks.set_condition(true, reason::PROVISIONED, RUNS, now);
                marks.confirm(now);
                marks.set_ready_labels(&node.name);
                marks.set_fence(&node.boot_id, &node.machine_id);
                (marks, Attempt::default())
            }
            Work::Remove { .. } => (marks.without_provisioning(), Attempt::default()),
        },
        // The restart stays recorded: the same command is sent again and attaches, or begins anew.
        Outcome::Lost => (
            marks,
            Attempt {
                retry: Some(Retry {
                    failures: attempt.retry.map_or(0, |r| r.failures),
                    not_before: now + SignedDuration::from_millis(500),
                }),
                ..attempt.clone()
            },
        ),
        Outcome::Failed {
            reason,
            message,
            rolled_back,
            ..
        } => {
            let removing = matches!(work, Work::PrepareRemove | Work::Remove { .. });
            if removing && !reason.is_transient() && marks.spec_hash.is_none() {
                // Refused from the first: nothing of ours was ever there.
                return (marks.without_provisioning(), Attempt::default());
            }
            marks.restart = None;
            let mut retry = Retry::after(attempt.retry, now);
            if *reason == FailureReason::HandlerInUse {
                // Running pods select on the labels: a kubelet that restarts would reject them.
                marks.set_ready_labels(&node.name);
                marks.set_condition(true, reason::REMOVAL_BLOCKED, message, now);
                retry = Retry {
                    failures: 0,
                    not_before: now + IN_USE_RECHECK,
                };
            } else if *reason == FailureReason::Busy {
                retry.not_before = now + SignedDuration::from_secs(2);
            } else {
                let message = if *rolled_back {
                    format!("rolled back: {message}")
                } else {
                    message.clone()
                };
                marks.set_condition(false, &reason.camel_case(), &message, now);
            }
            marks.set_fence(&node.boot_id, &node.machine_id);
            let attempt = Attempt {
                prepared: None,
                retry: reason.is_transient().then_some(retry),
            };
            (marks, attempt)
        }
    }
}

fn prepared(kind: RestartKind) -> Attempt {
    Attempt {
        prepared: Some(kind),
        retry: None,
    }
}
