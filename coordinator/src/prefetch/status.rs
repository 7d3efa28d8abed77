//! What a user is told of a Prefetch.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;

use super::crd::{
    ImageReason, ImageStatus, NodeCounts, PairCounts, PrefetchPhase, PrefetchStatus, StatusCondition,
};
use super::pairs::{NodePairs, Pair};
use super::resolve::{Cover, PrefetchFacts, Resolved, covers};
use crate::node::NodeFacts;

/// Reasons that are named for each image, and nodes for each reason: what bounds the size of a status.
const REASONS: usize = 3;
const SAMPLES: usize = 3;
/// Longest message of a reason, in bytes.
const MESSAGE: usize = 256;

/// Everything that a status is made from.
#[derive(Clone, Copy)]
pub struct StatusInput<'a> {
    /// The Prefetch, with the status that is there.
    pub prefetch: &'a PrefetchFacts,
    /// What it wants.
    pub resolved: &'a Resolved,
    /// All nodes.
    pub nodes: &'a BTreeMap<String, NodeFacts>,
    /// What is known of their images.
    pub pairs: &'a HashMap<String, NodePairs>,
    /// Whether a node's own mark says that all that is wanted there is there.
    pub trusted: &'a dyn Fn(&NodeFacts) -> bool,
    /// The time.
    pub now: Timestamp,
}

/// The status that a Prefetch should have.
pub fn status(input: StatusInput<'_>) -> PrefetchStatus {
    let previous = &input.prefetch.status;
    let mut nodes = NodeCounts::default();
    let mut pairs = PairCounts::default();
    let mut bytes = 0_u64;
    let mut begun = false;
    let mut images: BTreeMap<&str, Tally<'_>> = input
        .resolved
        .images
        .iter()
        .map(|image| (image.as_str(), Tally::default()))
        .collect();

    for node in input.nodes.values() {
        match covers(input.prefetch, node) {
            Cover::No => continue,
            Cover::Excluded => {
                nodes.excluded += 1;
                continue;
            }
            Cover::Wanted => nodes.wanted += 1,
        }
        let known = input
            .pairs
            .get(&node.name)
            .filter(|known| known.boot_id == node.boot_id);
        let trusted = (input.trusted)(node);
        let (mut ready, mut failed) = (0, false);
        for (image, tally) in &mut images {
            pairs.wanted += 1;
            match known.and_then(|known| known.pairs.get(*image)) {
                Some(Pair::Ready { digest, pulled, .. }) => {
                    ready += 1;
                    tally.ready += 1;
                    bytes += pulled;
                    if !digest.is_empty() {
                        tally.digest = Some(digest);
                    }
                }
                None if trusted => {
                    ready += 1;
                    tally.ready += 1;
                }
                Some(Pair::Failed(failure)) => {
                    failed = true;
                    begun = true;
                    pairs.failed += 1;
                    tally.failed += 1;
                    let reason = tally
                        .reasons
                        .entry(failure.reason.camel_case())
                        .or_insert_with(|| ImageReason {
                            message: shorten(&failure.message),
                            ..ImageReason::default()
                        });
                    reason.count += 1;
                    if reason.nodes.len() < SAMPLES {
                        reason.nodes.push(node.name.clone());
                    }
                }
                Some(Pair::Pulling) => {
                    begun = true;
                    pairs.pulling += 1;
                }
                None => {}
            }
        }
        pairs.ready += ready;
        if failed {
            nodes.failed += 1;
        } else if ready == i64::try_from(images.len()).unwrap_or(i64::MAX) {
            nodes.ready += 1;
        }
    }
    begun |= pairs.ready > 0;

    let invalid = !input.resolved.invalid.is_empty();
    let phase = if previous.phase.is_none() {
        // Whoever watches a new object sees it begin, however quick it is.
        PrefetchPhase::Pending
    } else if pairs.wanted == 0 && invalid {
        PrefetchPhase::Failed
    } else if pairs.wanted == 0 {
        PrefetchPhase::Pending
    } else if pairs.ready == pairs.wanted && !invalid {
        PrefetchPhase::Ready
    } else if pairs.ready + pairs.failed == pairs.wanted {
        PrefetchPhase::Failed
    } else if begun {
        PrefetchPhase::Running
    } else {
        PrefetchPhase::Pending
    };

    let digests: HashMap<&str, &str> = previous
        .images
        .iter()
        .filter_map(|image| Some((image.image.as_str(), image.digest.as_deref()?)))
        .collect();
    let mut listed: Vec<ImageStatus> = images
        .into_iter()
        .map(|(image, tally)| tally.finish(image, digests.get(image).copied()))
        .collect();
    listed.extend(
        input
            .resolved
            .invalid
            .iter()
            .take(100)
            .map(|(image, why)| ImageStatus {
                image: image.clone(),
                failed: nodes.wanted,
                reasons: vec![ImageReason {
                    reason: "InvalidReference".into(),
                    count: nodes.wanted,
                    message: shorten(why),
                    nodes: Vec::new(),
                }],
                ..ImageStatus::default()
            }),
    );

    let mut verdict = Verdict::of(phase, &nodes, &pairs, input.resolved);
    if let Some(why) = &input.prefetch.broken {
        verdict.reason = "InvalidSpec";
        verdict.message = format!("the object can't be read: {why}");
        verdict.degraded = true;
    }
    let conditions = verdict.conditions(previous, input.prefetch.generation, input.now);
    PrefetchStatus {
        phase: Some(phase),
        observed_generation: input.prefetch.generation,
        conditions,
        images_wanted: count(input.resolved.images.len() + input.resolved.invalid.len()),
        nodes,
        pairs,
        bytes_pulled: i64::try_from(bytes)
            .unwrap_or(i64::MAX)
            .max(previous.bytes_pulled),
        images: listed,
    }
}

#[derive(Default)]
struct Tally<'a> {
    ready: i64,
    failed: i64,
    digest: Option<&'a str>,
    reasons: BTreeMap<String, ImageReason>,
}

impl Tally<'_> {
    fn finish(self, image: &str, previous_digest: Option<&str>) -> ImageStatus {
        let mut reasons: Vec<ImageReason> = self
            .reasons
            .into_iter()
            .map(|(name, reason)| ImageReason {
                reason: name,
                ..reason
            })
            .collect();
        reasons.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.reason.cmp(&b.reason)));
        reasons.truncate(REASONS);
        ImageStatus {
            image: image.to_owned(),
            digest: self.digest.or(previous_digest).map(ToOwned::to_owned),
            ready: self.ready,
            failed: self.failed,
            reasons,
        }
    }
}

/// What the conditions say.
struct Verdict {
    ready: bool,
    progressing: bool,
    degraded: bool,
    reason: &'static str,
    message: String,
}

impl Verdict {
    fn of(phase: PrefetchPhase, nodes: &NodeCounts, pairs: &PairCounts, resolved: &Resolved) -> Self {
        let here = format!("{} of {} images are on their nodes", pairs.ready, pairs.wanted);
        let (reason, message) = match phase {
            PrefetchPhase::Ready => ("AllImagesReady", here),
            PrefetchPhase::Running => ("Pulling", here),
            PrefetchPhase::Failed if pairs.wanted == 0 => (
                "InvalidReferences",
                "none of the images has a valid reference".to_owned(),
            ),
            PrefetchPhase::Failed => (
                "ImagesMissing",
                format!("{here}; see status.images for the reasons"),
            ),
            PrefetchPhase::Pending if resolved.images.is_empty() => (
                "NoImages",
                "no Deployment carries all labels of filter_by_labels".to_owned(),
            ),
            PrefetchPhase::Pending if nodes.wanted == 0 && nodes.excluded > 0 => (
                "NoNodes",
                format!(
                    "{} nodes are meant and none of them can be served now",
                    nodes.excluded
                ),
            ),
            PrefetchPhase::Pending if nodes.wanted == 0 => (
                "NoNodes",
                "no node's name contains the text of node_filter".to_owned(),
            ),
            PrefetchPhase::Pending => ("Waiting", here),
        };
        Self {
            ready: phase == PrefetchPhase::Ready,
            progressing: phase == PrefetchPhase::Running
                || (phase == PrefetchPhase::Pending && pairs.wanted > 0),
            degraded: pairs.failed > 0 || !resolved.invalid.is_empty(),
            reason,
            message,
        }
    }

    fn conditions(&self, previous: &PrefetchStatus, generation: i64, now: Timestamp) -> Vec<StatusCondition> {
        [
            ("Ready", self.ready),
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

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn shorten(message: &str) -> String {
    match message
        .char_indices()
        .map(|(at, _)| at)
        .take_while(|at| *at < MESSAGE)
        .last()
    {
        Some(_) if message.len() <= MESSAGE => message.to_owned(),
        Some(end) => format!("{}…", &message[..end]),
        None => String::new(),
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
