//! What is to be done about the images of a node.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::pairs::{NodePairs, Pair};
use super::registry::{Registries, host};
use super::wanted::{Want, Wanted};
use crate::node::{NodeFacts, jittered};

/// What should happen about the images of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullPlan {
    /// All that is wanted is there, and the node must carry this mark (none where nothing is wanted).
    Settled(Option<String>),
    /// Pins that nobody wants any more are to be let go.
    Release,
    /// These are to be pulled, or looked for, now, in this order.
    Pull(Vec<Arc<str>>),
    /// Some are missing; nothing is to be done before this time.
    WaitUntil(Timestamp),
}

/// Everything that a plan rests on.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// What is wanted there.
    pub wanted: &'a Wanted,
    /// What is known of it.
    pub known: &'a NodePairs,
    /// Registries that ask for patience.
    pub registries: &'a Registries,
    /// After how long what was there is looked for again.
    pub recheck: SignedDuration,
    /// The time.
    pub now: Timestamp,
}

/// Plans for one node.
pub fn plan(input: PlanInput<'_>) -> PullPlan {
    let PlanInput {
        node, wanted, known, ..
    } = input;
    let marks = &node.marks;
    if wanted.is_empty() && marks.pins_held.is_none() {
        return PullPlan::Settled(None);
    }
    if wanted.images.is_empty() && !wanted.is_empty() {
        // Suspended: nobody is woken, and the mark is still true when it goes on.
        return PullPlan::Settled(marks.images_verified.clone());
    }
    let hash = wanted.hash().to_owned();
    let mark = marks.images_verified.as_deref().and_then(Mark::read);
    let same = mark.as_ref().filter(|mark| mark.hash == hash);
    if wanted.is_empty() {
        // Only pins that are to stay until they expire are left.
        let expired = held_until(node).is_none_or(|until| until <= input.now);
        return match same {
            Some(_) if !expired => PullPlan::Settled(marks.images_verified.clone()),
            _ if !expired && known.released.as_ref() == Some(&hash) => {
                PullPlan::Settled(Some(Mark::new(hash, node, input.now).to_string()))
            }
            _ => PullPlan::Release,
        };
    }
    let trust = trust(node, wanted, input.recheck);
    let trusted = same
        .filter(|mark| mark.boot == node.boot_id)
        .filter(|mark| input.now.duration_since(mark.at) < trust);
    if trusted.is_some() {
        return PullPlan::Settled(marks.images_verified.clone());
    }
    // First, since what is let go may make the room that the others need.
    if marks.pins_held.is_some() && same.is_none() && known.released.as_ref() != Some(&hash) {
        return PullPlan::Release;
    }
    pull_or_wait(input, hash, trust)
}

fn pull_or_wait(input: PlanInput<'_>, hash: String, trust: SignedDuration) -> PullPlan {
    let PlanInput { node, now, .. } = input;
    let known = &input.known.pairs;
    let mut since = now;
    let mut due: Vec<(&Arc<str>, &Want)> = Vec::new();
    let mut later: Option<Timestamp> = None;
    let mut wait = |at: Timestamp| later = Some(later.map_or(at, |earliest| earliest.min(at)));
    for (image, want) in &input.wanted.images {
        let patience = input.registries.not_before(host(image), &node.name, now);
        match known.get(image).filter(|_| input.known.boot_id == node.boot_id) {
            Some(Pair::Ready { at, pins, .. })
                if now.duration_since(*at) < trust && *pins == want.pins_fingerprint() =>
            {
                since = since.min(*at);
            }
            Some(Pair::NotForNode { at }) if now.duration_since(*at) < trust => since = since.min(*at),
            // A registry says itself when it can be asked again; all other failures wait for retry_after.
            Some(Pair::Failed(failure)) if failure.reason.asks_for_patience() && patience.is_some() => {
                patience.into_iter().for_each(&mut wait);
            }
            Some(Pair::Failed(failure))
                if !failure.reason.asks_for_patience() && failure.at + want.retry_after > now =>
            {
                wait(failure.at + want.retry_after);
            }
            _ => match patience {
                Some(until) => wait(until),
                None => due.push((image, want)),
            },
        }
    }
    if !due.is_empty() {
        due.sort_by_key(|(image, want)| (want.place, *image));
        return PullPlan::Pull(due.into_iter().map(|(image, _)| image.clone()).collect());
    }
    match later {
        Some(at) => PullPlan::WaitUntil(at),
        None => PullPlan::Settled(Some(Mark::new(hash, node, since).to_string())),
    }
}

/// The order in which images are begun that come several at once: the largest one beside the small ones, since it takes
/// longest and nothing would come beside it at the end. One by one, and where sizes are not known or not asked for, it is
/// the order of the plan.
pub fn largest_beside(images: &mut [Arc<str>], wanted: &Wanted, at_once: u32) {
    let size = |image: &Arc<str>| wanted.images.get(image).map_or(0, |want| want.place.0);
    let known = |image: &Arc<str>| Some(size(image)).filter(|size| *size > 0 && *size < u64::MAX);
    let largest = (0..images.len())
        .filter_map(|at| Some((known(&images[at])?, at)))
        .max();
    if let Some((_, at)) = largest.filter(|_| at_once > 1) {
        images[..=at].rotate_right(1);
    }
}

/// Whether a pull that is under way is of no use any more: nothing is wanted of what it has not told of yet. While
/// something is, it goes on, since what has begun to come would come again from the beginning.
pub fn is_pointless<'a>(untold: impl IntoIterator<Item = &'a Arc<str>>, wanted: &Wanted) -> bool {
    let mut untold = untold.into_iter().peekable();
    untold.peek().is_some() && untold.all(|image| !wanted.images.contains_key(image))
}

/// When a settled node has to be looked at again: when the trust in its mark ends, or its last pin.
pub fn recheck_at(node: &NodeFacts, wanted: &Wanted, recheck: SignedDuration) -> Option<Timestamp> {
    if wanted.is_empty() {
        return held_until(node);
    }
    let mark = node.marks.images_verified.as_deref().and_then(Mark::read)?;
    Some(mark.at + trust(node, wanted, recheck))
}

/// For how long what was there is taken to be there still: a pin is renewed well before it expires.
fn trust(node: &NodeFacts, wanted: &Wanted, recheck: SignedDuration) -> SignedDuration {
    let pinned = wanted.shortest_pin().map_or(recheck, |shortest| shortest / 2);
    jittered(recheck.min(pinned), &node.name)
}

/// Until when pins of ours may be held on a node.
pub fn held_until(node: &NodeFacts) -> Option<Timestamp> {
    node.marks.pins_held.as_deref()?.parse().ok()
}

/// What `pins-held` must say before a node pulls with pins; `None` where it says enough. A tenth is left to
/// inaccuracy, so that it is not written for every image.
pub fn promise(node: &NodeFacts, wanted: &Wanted, now: Timestamp) -> Option<String> {
    let longest = wanted.longest_pin()?;
    let enough = held_until(node).is_some_and(|until| until >= now + longest - longest / 10);
    (!enough).then(|| format!("{:.0}", now + longest))
}

/// The value of `cache.techsquad.rocks/images-verified`.
struct Mark {
    hash: String,
    boot: String,
    at: Timestamp,
}

impl Mark {
    fn new(hash: String, node: &NodeFacts, at: Timestamp) -> Self {
        let boot = node.boot_id.clone();
        Self { hash, boot, at }
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split(' ');
        let mark = Self {
            hash: parts.next()?.to_owned(),
            boot: parts.next()?.to_owned(),
            at: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(mark)
    }
}

impl std::fmt::Display for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:.0}", self.hash, self.boot, self.at)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
