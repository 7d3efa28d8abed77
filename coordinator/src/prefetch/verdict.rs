//! The phase and the conditions of a Prefetch.

use jiff::Timestamp;

use super::crd::{NodeCounts, PrefetchPhase, PrefetchStatus, StatusCondition};
use super::facts::PrefetchFacts;
use super::resolve::Resolved;
use super::status::StatusInput;
use crate::reason;

/// Something that is wrong with a Prefetch beside its images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// One word.
    pub reason: &'static str,
    /// For a person.
    pub message: String,
}

/// The phase, and what the conditions say.
pub(super) struct Verdict {
    pub(super) phase: PrefetchPhase,
    degraded: bool,
    progressing: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    pub(super) fn of(input: &StatusInput<'_>, counted: &PrefetchStatus, begun: bool) -> Self {
        let (prefetch, resolved) = (input.prefetch, input.resolved);
        let pairs = &counted.pairs;
        let refused = !resolved.refused.is_empty() || !input.over.is_empty();
        let phase = phase(prefetch, counted, refused || resolved.excess.is_some(), begun);
        let here = format!("{} of {} images are on their nodes", pairs.ready, pairs.wanted);
        let (reason, message) = if let Some(why) = &prefetch.broken {
            (reason::INVALID_SPEC, format!("the object can't be read: {why}"))
        } else if prefetch.suspend {
            (
                reason::SUSPENDED,
                "nothing is pulled until spec.suspend is taken back".to_owned(),
            )
        } else if let Some(excess) = &resolved.excess {
            (excess.reason(), excess.to_string())
        } else {
            match phase {
                PrefetchPhase::Ready => (reason::ALL_IMAGES_READY, here),
                PrefetchPhase::Running => (reason::PULLING, here),
                PrefetchPhase::Failed if pairs.wanted == 0 && refused => (
                    reason::IMAGES_REFUSED,
                    "none of the images can be pulled; see status.images for the reasons".to_owned(),
                ),
                PrefetchPhase::Failed => (
                    reason::IMAGES_MISSING,
                    format!("{here}; see status.images for the reasons"),
                ),
                PrefetchPhase::Pending => pending(prefetch, resolved, &counted.nodes, here),
            }
        };
        let mut verdict = Self {
            phase,
            degraded: pairs.failed > 0 || refused || resolved.excess.is_some() || prefetch.broken.is_some(),
            progressing: !prefetch.suspend
                && (phase == PrefetchPhase::Running || (phase == PrefetchPhase::Pending && pairs.wanted > 0)),
            reason,
            message,
        };
        if let Some(trouble) = input.trouble.filter(|_| !prefetch.suspend) {
            verdict.degraded = true;
            if phase != PrefetchPhase::Ready {
                verdict.reason = trouble.reason;
                verdict.message = format!("{}; {}", verdict.message, trouble.message);
            }
        }
        verdict
    }

    pub(super) fn conditions(
        &self,
        previous: &PrefetchStatus,
        generation: i64,
        now: Timestamp,
    ) -> Vec<StatusCondition> {
        [
            ("Ready", self.phase == PrefetchPhase::Ready),
            ("Progressing", self.progressing),
            ("Degraded", self.degraded),
        ]
        .map(|(type_, holds)| {
            let status = if holds { "True" } else { "False" };
            let last_transition_time = previous
                .conditions
                .iter()
                .find(|old| old.type_ == type_ && old.status == status)
                .map_or_else(|| format!("{now:.0}"), |old| old.last_transition_time.clone());
            StatusCondition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                reason: self.reason.to_owned(),
                message: self.message.clone(),
                last_transition_time,
                observed_generation: generation,
            }
        })
        .into()
    }
}

fn phase(prefetch: &PrefetchFacts, counted: &PrefetchStatus, refused: bool, begun: bool) -> PrefetchPhase {
    let pairs = &counted.pairs;
    if prefetch.suspend {
        return match prefetch.status.phase {
            None | Some(PrefetchPhase::Running) => PrefetchPhase::Pending,
            Some(phase) => phase,
        };
    }
    // All of its images may be "not for this node" on all of its nodes: nothing is missing then.
    let nothing_missing =
        pairs.ready == pairs.wanted && counted.nodes.wanted > 0 && !counted.images.is_empty();
    if prefetch.status.phase.is_none() {
        // Whoever watches a new object sees it begin, however quick it is.
        PrefetchPhase::Pending
    } else if pairs.wanted == 0 && refused {
        PrefetchPhase::Failed
    } else if nothing_missing && !refused {
        PrefetchPhase::Ready
    } else if pairs.wanted == 0 {
        PrefetchPhase::Pending
    } else if pairs.ready + pairs.failed == pairs.wanted {
        PrefetchPhase::Failed
    } else if begun {
        PrefetchPhase::Running
    } else {
        PrefetchPhase::Pending
    }
}

fn pending(
    prefetch: &PrefetchFacts,
    resolved: &Resolved,
    nodes: &NodeCounts,
    here: String,
) -> (&'static str, String) {
    if resolved.images.is_empty() {
        let message = if prefetch.images.is_empty() && prefetch.workloads.is_empty() {
            if prefetch.labels.is_empty() {
                "the specification names no image: set images, workloads or filter_by_labels"
            } else {
                "no Deployment carries all labels of filter_by_labels"
            }
        } else {
            "no workload is selected, and no image is named"
        };
        (reason::NO_IMAGES, message.to_owned())
    } else if nodes.wanted == 0 && nodes.excluded > 0 {
        (
            reason::NO_NODES,
            format!(
                "{} nodes are meant and none of them can be served now",
                nodes.excluded
            ),
        )
    } else if nodes.wanted == 0 {
        (
            reason::NO_NODES,
            "no node matches node_filter and nodes".to_owned(),
        )
    } else {
        (reason::WAITING, here)
    }
}
