//! What a user is told of a Prefetch.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::cover::{Cover, covers};
use super::crd::{ImageReason, ImageStatus, NodeCounts, PairCounts, PrefetchStatus};
use super::facts::PrefetchFacts;
use super::pairs::{NOT_FOR_NODE, NodePairs, Pair};
use super::resolve::Resolved;
use super::verdict::{Trouble, Verdict};
use crate::node::NodeFacts;
use crate::reason;

/// Reasons that are named for each image, and nodes for each reason: what bounds the size of a status.
const REASONS: usize = 3;
const SAMPLES: usize = 3;
/// Images that are refused and named one by one.
const REFUSED: usize = 100;
/// Longest message of a reason, in bytes.
const MESSAGE: usize = 256;

/// How far what is known of a node goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// By its own mark all that is wanted there is there.
    Settled,
    /// As far as its pairs tell.
    Open,
    /// No agent comes to it.
    Unreachable,
}

/// Everything that a status is made from.
#[derive(Clone, Copy)]
pub struct StatusInput<'a> {
    /// The Prefetch, with the status that is there.
    pub prefetch: &'a PrefetchFacts,
    /// What it wants.
    pub resolved: &'a Resolved,
    /// Images of it that would exceed its bytes.
    pub over: &'a HashSet<Arc<str>>,
    /// Something that is wrong with all of it.
    pub trouble: Option<&'a Trouble>,
    /// All nodes.
    pub nodes: &'a BTreeMap<String, NodeFacts>,
    /// What is known of their images.
    pub pairs: &'a HashMap<String, NodePairs>,
    /// How far that goes.
    pub standing: &'a dyn Fn(&NodeFacts) -> Standing,
    /// What each tag stood for when it was last resolved.
    pub newest: &'a HashMap<Arc<str>, Arc<str>>,
    /// Bytes that were pulled for it.
    pub bytes: u64,
    /// The time.
    pub now: Timestamp,
}

/// The status that a Prefetch should have.
pub fn status(input: StatusInput<'_>) -> PrefetchStatus {
    let previous = &input.prefetch.status;
    let verdict = |counted: &PrefetchStatus, begun| Verdict::of(&input, counted, begun);
    if input.prefetch.suspend {
        // What is not looked for is not counted anew.
        let mut kept = previous.clone();
        let verdict = verdict(&kept, false);
        kept.phase = Some(verdict.phase);
        kept.conditions = verdict.conditions(previous, input.prefetch.generation, input.now);
        kept.observed_generation = input.prefetch.generation;
        return kept;
    }
    let (mut counted, begun) = count_all(&input);
    counted.images_wanted = count(input.resolved.images.len() + input.resolved.refused.len());
    counted.observed_generation = input.prefetch.generation;
    counted.bytes_pulled = i64::try_from(input.bytes).unwrap_or(i64::MAX);
    let verdict = verdict(&counted, begun);
    counted.phase = Some(verdict.phase);
    counted.conditions = verdict.conditions(previous, input.prefetch.generation, input.now);
    counted
}

/// Counts, and whether anything has begun.
fn count_all(input: &StatusInput<'_>) -> (PrefetchStatus, bool) {
    let mut nodes = NodeCounts::default();
    let mut pairs = PairCounts::default();
    let mut begun = false;
    let images: Vec<&Arc<str>> = input
        .resolved
        .images
        .keys()
        .filter(|image| !input.over.contains(*image))
        .collect();
    let mut tallies: Vec<Tally<'_>> = images
        .iter()
        .map(|image| Tally {
            newest: input.newest.get(*image).map(|digest| &**digest),
            ..Tally::default()
        })
        .collect();
    for node in input.nodes.values() {
        let standing = match covers(input.prefetch, node) {
            Cover::No => continue,
            Cover::Excluded => Standing::Unreachable,
            Cover::Wanted => (input.standing)(node),
        };
        if standing == Standing::Unreachable || input.resolved.excess.is_some() {
            nodes.excluded += 1;
            continue;
        }
        nodes.wanted += 1;
        let known = input
            .pairs
            .get(&node.name)
            .filter(|known| known.boot_id == node.boot_id);
        // Both are in the order of the images' names.
        let mut resting = known
            .filter(|_| standing == Standing::Settled)
            .map_or(&[][..], |known| &known.digests)
            .iter()
            .peekable();
        let (mut there, mut failed) = (0, false);
        for (image, tally) in images.iter().zip(&mut tallies) {
            let seen = match known.and_then(|known| known.pairs.get(*image)) {
                Some(pair) => Seen::from(pair),
                None if standing == Standing::Settled => {
                    while resting.next_if(|(other, _)| other < *image).is_some() {}
                    match resting.next_if(|(other, _)| other == *image) {
                        Some((_, mark)) if &**mark == NOT_FOR_NODE => Seen::NotForNode,
                        Some((_, digest)) => Seen::Ready(digest),
                        None => Seen::Ready(""),
                    }
                }
                None => Seen::Nothing,
            };
            pairs.wanted += i64::from(!matches!(seen, Seen::NotForNode));
            match seen {
                Seen::Ready(digest) => {
                    there += 1;
                    pairs.ready += 1;
                    tally.ready(digest, &node.name);
                }
                Seen::NotForNode => {
                    there += 1;
                    tally.not_for_node += 1;
                }
                Seen::Failed(failure) => {
                    failed = true;
                    begun = true;
                    pairs.failed += 1;
                    tally.failed(&failure.reason.camel_case(), &failure.message, &node.name);
                }
                Seen::Pulling => {
                    begun = true;
                    pairs.pulling += 1;
                }
                Seen::Nothing => {}
            }
        }
        nodes.failed += i64::from(failed);
        nodes.ready += i64::from(there == images.len());
    }
    begun |= pairs.ready > 0;
    let digests: HashMap<&str, &str> = input
        .prefetch
        .status
        .images
        .iter()
        .filter_map(|image| Some((image.image.as_str(), image.digest.as_deref()?)))
        .collect();
    let mut listed: Vec<ImageStatus> = images
        .into_iter()
        .zip(tallies)
        .map(|(image, tally)| tally.finish(image, digests.get(&**image).copied()))
        .collect();
    listed.extend(refused(input, nodes.wanted));
    let counted = PrefetchStatus {
        nodes,
        pairs,
        images: listed,
        ..PrefetchStatus::default()
    };
    (counted, begun)
}

/// Images that are not pulled at all, with why.
fn refused<'a>(input: &StatusInput<'a>, nodes: i64) -> impl Iterator<Item = ImageStatus> + use<'a> {
    let over = input.over.iter().map(|image| {
        let message = "the images before it use up the bytes that this cluster allows one Prefetch on a node; \
                       order them otherwise, or divide them among several";
        (&**image, reason::TOO_MANY_BYTES, message)
    });
    let refused = input
        .resolved
        .refused
        .iter()
        .map(|(image, why)| (image.as_str(), why.reason, why.message.as_str()));
    let mut all: Vec<_> = over.chain(refused).collect();
    all.sort_unstable();
    all.truncate(REFUSED);
    all.into_iter().map(move |(image, reason, message)| ImageStatus {
        image: image.to_owned(),
        failed: nodes,
        reasons: vec![ImageReason {
            reason: reason.to_owned(),
            count: nodes,
            message: shorten(message),
            nodes: Vec::new(),
        }],
        ..ImageStatus::default()
    })
}

enum Seen<'a> {
    Nothing,
    Pulling,
    Ready(&'a str),
    NotForNode,
    Failed(&'a super::pairs::PairFailure),
}

impl<'a> From<&'a Pair> for Seen<'a> {
    fn from(pair: &'a Pair) -> Self {
        match pair {
            Pair::Pulling => Self::Pulling,
            Pair::Ready { digest, .. } => Self::Ready(digest),
            Pair::NotForNode { .. } => Self::NotForNode,
            Pair::Failed(failure) => Self::Failed(failure),
        }
    }
}

#[derive(Default)]
struct Tally<'a> {
    newest: Option<&'a str>,
    ready: i64,
    failed: i64,
    not_for_node: i64,
    digest: Option<&'a str>,
    reasons: BTreeMap<String, ImageReason>,
}

impl<'a> Tally<'a> {
    fn ready(&mut self, digest: &'a str, node: &str) {
        self.ready += 1;
        if digest.is_empty() {
            return;
        }
        match self.newest {
            // There, so no failure; but whoever asked for the tag should know.
            Some(newest) if newest != digest => self.count(
                reason::TAG_MOVED,
                &format!(
                    "{digest} is there, and the tag stands for {newest} now; pull.policy Always brings it"
                ),
                node,
            ),
            _ => self.digest = Some(digest),
        }
    }

    fn failed(&mut self, reason: &str, message: &str, node: &str) {
        self.failed += 1;
        self.count(reason, message, node);
    }

    fn count(&mut self, reason: &str, message: &str, node: &str) {
        if !self.reasons.contains_key(reason) {
            let first = ImageReason {
                message: shorten(message),
                ..ImageReason::default()
            };
            self.reasons.insert(reason.to_owned(), first);
        }
        if let Some(counted) = self.reasons.get_mut(reason) {
            counted.count += 1;
            if counted.nodes.len() < SAMPLES {
                counted.nodes.push(node.to_owned());
            }
        }
    }

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
            digest: self
                .digest
                .or(self.newest)
                .or(previous_digest)
                .map(ToOwned::to_owned),
            ready: self.ready,
            failed: self.failed,
            not_for_node: self.not_for_node,
            reasons,
        }
    }
}

pub(super) fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Cuts a message to what a status may hold, at a character.
pub fn shorten(message: &str) -> String {
    if message.len() <= MESSAGE {
        return message.to_owned();
    }
    let mut end = MESSAGE;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &message[..end])
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
