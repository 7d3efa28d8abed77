//! What to pull on a node next.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use super::pairs::{NodePairs, Pair};
use crate::node::NodeFacts;

/// What should happen about the images of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullPlan {
    /// All that is wanted is there, and the node must carry this mark (none where nothing is wanted).
    Settled(Option<String>),
    /// These are to be pulled, or looked for, now.
    Pull(Vec<String>),
    /// Some are missing; nothing is to be done before this time.
    WaitUntil(Timestamp),
}

/// Plans for one node. `wanted` holds the images of all Prefetches that cover it, each with the shortest
/// `retry_after` that is asked for it.
pub fn plan(
    node: &NodeFacts,
    wanted: &BTreeMap<String, SignedDuration>,
    known: &NodePairs,
    recheck: SignedDuration,
    now: Timestamp,
) -> PullPlan {
    if wanted.is_empty() {
        return PullPlan::Settled(None);
    }
    let hash = hash(wanted.keys());
    let mark = node.marks.images_verified.as_deref().and_then(Mark::read);
    let trusted = mark
        .as_ref()
        .filter(|mark| mark.hash == hash && mark.boot == node.boot_id)
        .filter(|mark| now.duration_since(mark.at) < jittered(recheck, &node.name));
    if trusted.is_some() {
        return PullPlan::Settled(node.marks.images_verified.clone());
    }
    let trust = jittered(recheck, &node.name);
    let mut since = now;
    let mut due = Vec::new();
    let mut later: Option<Timestamp> = None;
    for (image, retry_after) in wanted {
        match known.pairs.get(image).filter(|_| known.boot_id == node.boot_id) {
            Some(Pair::Ready { at, .. }) if now.duration_since(*at) < trust => since = since.min(*at),
            Some(Pair::Failed(failure)) if failure.at + *retry_after > now => {
                let at = failure.at + *retry_after;
                later = Some(later.map_or(at, |earliest| earliest.min(at)));
            }
            _ => due.push(image.clone()),
        }
    }
    match (due.is_empty(), later) {
        (false, _) => PullPlan::Pull(due),
        (true, Some(at)) => PullPlan::WaitUntil(at),
        (true, None) => PullPlan::Settled(Some(
            Mark {
                hash,
                boot: node.boot_id.clone(),
                at: since,
            }
            .to_string(),
        )),
    }
}

/// When the trust in a node's mark ends, if it carries one.
pub fn recheck_at(node: &NodeFacts, recheck: SignedDuration) -> Option<Timestamp> {
    let mark = node.marks.images_verified.as_deref().and_then(Mark::read)?;
    Some(mark.at + jittered(recheck, &node.name))
}

/// The value of `cache.techsquad.rocks/images-verified`.
struct Mark {
    hash: String,
    boot: String,
    at: Timestamp,
}

impl Mark {
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

fn hash<'a>(images: impl Iterator<Item = &'a String>) -> String {
    let mut hasher = Sha256::new();
    for image in images {
        hasher.update(image);
        hasher.update("\n");
    }
    crate::node::hex(&hasher.finalize())[..16].to_owned()
}

/// 90 to 110 percent of a duration, ever the same for the same node, so that a fleet that was provisioned
/// in one go is not checked again in one go.
fn jittered(duration: SignedDuration, node: &str) -> SignedDuration {
    let byte = i64::from(Sha256::digest(node)[0]);
    SignedDuration::from_millis(
        i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 256) / 1000 * (900 + byte * 200 / 255),
    )
}

#[cfg(test)]
mod tests {
    use super::super::pairs::PairFailure;
    use super::*;
    use quartermaster_proto::v1::FailureReason;

    const RECHECK: SignedDuration = SignedDuration::from_hours(6);

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn node() -> NodeFacts {
        NodeFacts {
            name: "worker-1".into(),
            boot_id: "boot-1".into(),
            ..NodeFacts::default()
        }
    }

    fn wanted(images: &[&str]) -> BTreeMap<String, SignedDuration> {
        images
            .iter()
            .map(|image| ((*image).to_owned(), SignedDuration::from_secs(60)))
            .collect()
    }

    fn known(pairs: &[(&str, Pair)]) -> NodePairs {
        NodePairs {
            boot_id: "boot-1".into(),
            pairs: pairs
                .iter()
                .map(|(image, pair)| ((*image).to_owned(), pair.clone()))
                .collect(),
        }
    }

    fn ready() -> Pair {
        Pair::Ready {
            digest: String::new(),
            pulled: 0,
            at: at(0),
        }
    }

    fn failed(second: i64) -> Pair {
        Pair::Failed(PairFailure {
            reason: FailureReason::ImageNotFound,
            message: String::new(),
            at: at(second),
        })
    }

    fn settled(images: &[&str], second: i64) -> String {
        let pairs: Vec<_> = images.iter().map(|image| (*image, ready())).collect();
        match plan(&node(), &wanted(images), &known(&pairs), RECHECK, at(second)) {
            PullPlan::Settled(Some(mark)) => mark,
            other => panic!("expected a mark, got {other:?}"),
        }
    }

    #[test]
    fn what_is_not_known_is_pulled() {
        let plan = plan(
            &node(),
            &wanted(&["a", "b"]),
            &known(&[("a", ready())]),
            RECHECK,
            at(0),
        );
        assert_eq!(plan, PullPlan::Pull(vec!["b".into()]));
    }

    #[test]
    fn a_node_that_has_all_gets_a_mark_and_is_trusted_by_it_afterwards() {
        let mut node = node();
        node.marks.images_verified = Some(settled(&["a", "b"], 0));
        let later = plan(
            &node,
            &wanted(&["a", "b"]),
            &NodePairs::default(),
            RECHECK,
            at(3600),
        );
        assert_eq!(later, PullPlan::Settled(node.marks.images_verified.clone()));
    }

    #[test]
    fn another_boot_or_another_set_of_images_is_not_trusted() {
        let mut node = node();
        node.marks.images_verified = Some(settled(&["a"], 0));
        let nothing = NodePairs::default();
        assert_eq!(
            plan(&node, &wanted(&["a", "b"]), &nothing, RECHECK, at(1)),
            PullPlan::Pull(vec!["a".into(), "b".into()])
        );
        node.boot_id = "boot-2".into();
        assert_eq!(
            plan(&node, &wanted(&["a"]), &known(&[("a", ready())]), RECHECK, at(1)),
            PullPlan::Pull(vec!["a".into()])
        );
    }

    #[test]
    fn what_was_there_is_checked_again_after_the_recheck_interval() {
        let mut node = node();
        node.marks.images_verified = Some(settled(&["a"], 0));
        let again = plan(
            &node,
            &wanted(&["a"]),
            &known(&[("a", ready())]),
            RECHECK,
            at(7 * 3600),
        );
        assert_eq!(again, PullPlan::Pull(vec!["a".into()]));
        let at_time = recheck_at(&node, RECHECK).expect("a time").as_second();
        assert!((19_440..=23_760).contains(&at_time), "{at_time}");
    }

    #[test]
    fn what_failed_waits_for_its_retry_and_the_others_do_not() {
        let known = known(&[("a", failed(0))]);
        assert_eq!(
            plan(&node(), &wanted(&["a", "b"]), &known, RECHECK, at(59)),
            PullPlan::Pull(vec!["b".into()])
        );
        assert_eq!(
            plan(&node(), &wanted(&["a"]), &known, RECHECK, at(59)),
            PullPlan::WaitUntil(at(60))
        );
        assert_eq!(
            plan(&node(), &wanted(&["a"]), &known, RECHECK, at(60)),
            PullPlan::Pull(vec!["a".into()])
        );
    }

    #[test]
    fn a_node_on_which_nothing_is_wanted_carries_no_mark() {
        assert_eq!(
            plan(&node(), &wanted(&[]), &NodePairs::default(), RECHECK, at(0)),
            PullPlan::Settled(None)
        );
    }
}
