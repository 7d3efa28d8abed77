//! What is wanted on one node by all Prefetches together.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use jiff::SignedDuration;
use sha2::{Digest as _, Sha256};

use super::cover::{Cover, covers};
use super::crd::{Order, Retention};
use super::facts::PrefetchFacts;
use super::resolve::Resolved;
use crate::node::NodeFacts;

/// A Prefetch with what it was resolved to.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The Prefetch.
    pub prefetch: &'a PrefetchFacts,
    /// What it wants.
    pub resolved: &'a Resolved,
    /// Images of it that would exceed its bytes.
    pub over: &'a HashSet<Arc<str>>,
}

/// Everything that is wanted on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// By normalised reference.
    pub images: BTreeMap<Arc<str>, Want>,
    /// Pins that stay as they are though nothing is pulled for them: those of suspended Prefetches.
    pub held: BTreeMap<Arc<str>, Vec<Pin>>,
    hash: String,
}

/// An image that is wanted on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// The shortest that is asked for it.
    pub retry_after: SignedDuration,
    /// Its tag is resolved again at every recheck.
    pub always: bool,
    /// Its place among the others: known size, and place in its specification.
    pub place: (u64, u32),
    /// Who pins it, in the order of their uids.
    pub pins: Vec<Pin>,
    /// Places of the Prefetches that want it in the list of claims.
    pub by: Vec<usize>,
}

/// A pin that a Prefetch asks for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pin {
    /// The Prefetch, as [`pin_owner`] names it.
    pub owner: String,
    /// How long it lasts without being renewed.
    pub expiry: SignedDuration,
}

/// Pins that are to stay: by owner, the images.
pub type Keep = BTreeMap<String, Vec<String>>;

/// How a Prefetch is named as the owner of a pin. It says what is to become of the image, since nobody else can when
/// the Prefetch is gone.
pub fn pin_owner(uid: &str, retention: Retention) -> String {
    match retention {
        Retention::Unpin => uid.to_owned(),
        Retention::Keep => format!("{uid}/keep"),
        Retention::RemoveUnused => format!("{uid}/remove"),
    }
}

/// Whether a pin of this owner stays until it expires, whoever wants the image.
pub fn is_kept_to_the_end(owner: &str) -> bool {
    owner.ends_with("/keep")
}

/// Whether an image that this owner lets go is to be removed.
pub fn is_removed(owner: &str) -> bool {
    owner.ends_with("/remove")
}

impl Want {
    /// A fingerprint of the pins, 0 where nobody pins.
    pub fn pins_fingerprint(&self) -> u64 {
        if self.pins.is_empty() {
            return 0;
        }
        let mut hasher = DefaultHasher::new();
        self.pins.hash(&mut hasher);
        hasher.finish() | 1
    }
}

impl Wanted {
    /// Nothing is wanted, and nothing is to stay.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty() && self.held.is_empty()
    }

    /// The longest that a pin of it may last; `None` where nothing is pinned.
    pub fn longest_pin(&self) -> Option<SignedDuration> {
        self.expiries().max()
    }

    /// The shortest that a pin of it may last; `None` where nothing is pinned.
    pub fn shortest_pin(&self) -> Option<SignedDuration> {
        self.expiries().min()
    }

    fn expiries(&self) -> impl Iterator<Item = SignedDuration> {
        self.images
            .values()
            .flat_map(|want| &want.pins)
            .map(|pin| pin.expiry)
    }

    /// All pins that are wanted, or are to stay as they are.
    pub fn pins(&self) -> Keep {
        let mut keep = Keep::new();
        let wanted = self.images.iter().map(|(image, want)| (image, &want.pins));
        for (image, pins) in wanted.chain(&self.held) {
            for pin in pins {
                keep.entry(pin.owner.clone()).or_default().push(image.to_string());
            }
        }
        keep
    }

    /// A hash over the images and their pins: what a node's mark stands for.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    fn hashed(mut self) -> Self {
        let mut hasher = Sha256::new();
        for (image, want) in &self.images {
            hasher.update(&**image);
            if want.always {
                hasher.update(" always");
            }
            for pin in &want.pins {
                hasher.update(format!(" {} {}", pin.owner, pin.expiry.as_secs()));
            }
            hasher.update("\n");
        }
        crate::node::hex(&hasher.finalize())[..16].clone_into(&mut self.hash);
        self
    }
}

/// The places of the claims that are made on a node. One that is not Ready is claimed too and keeps its mark: it is
/// trusted again when it is back in the same boot.
pub fn claimants<'a>(node: &NodeFacts, claims: impl IntoIterator<Item = Claim<'a>>) -> Vec<usize> {
    claims
        .into_iter()
        .enumerate()
        .filter(|(_, claim)| claim.resolved.excess.is_none() && covers(claim.prefetch, node) != Cover::No)
        .map(|(place, _)| place)
        .collect()
}

/// What these claims together want, each given with its place.
pub fn wanted<'a>(
    claims: impl IntoIterator<Item = (usize, Claim<'a>)>,
    sizes: &HashMap<Arc<str>, u64>,
) -> Wanted {
    let mut wanted = Wanted::default();
    for (by, claim) in claims {
        let prefetch = claim.prefetch;
        let pin = prefetch.pin.map(|expiry| Pin {
            owner: pin_owner(&prefetch.uid, prefetch.retention),
            expiry,
        });
        for (image, place) in &claim.resolved.images {
            if claim.over.contains(image) {
                continue;
            }
            if prefetch.suspend {
                wanted.held.entry(image.clone()).or_default().extend(pin.clone());
                continue;
            }
            let size = match prefetch.order {
                Order::AsGiven => 0,
                Order::SmallestFirst => sizes.get(image).copied().unwrap_or(u64::MAX),
            };
            let want = wanted.images.entry(image.clone()).or_insert_with(|| Want {
                retry_after: prefetch.retry_after,
                always: false,
                place: (size, *place),
                pins: Vec::new(),
                by: Vec::new(),
            });
            want.retry_after = want.retry_after.min(prefetch.retry_after);
            want.always |= prefetch.pull.always;
            want.place = want.place.min((size, *place));
            want.pins.extend(pin.clone());
            want.by.push(by);
        }
    }
    for want in wanted.images.values_mut() {
        want.pins.sort_unstable();
    }
    for pins in wanted.held.values_mut() {
        pins.sort_unstable();
    }
    wanted.hashed()
}

/// The images that do not fit into the bytes that a Prefetch may use, as far as sizes are known: in the order in
/// which they are given, the first that would exceed them and all that come after. 0 is without bound.
pub fn over_budget(resolved: &Resolved, sizes: &HashMap<Arc<str>, u64>, bytes: u64) -> HashSet<Arc<str>> {
    if bytes == 0 {
        return HashSet::new();
    }
    let mut ordered: Vec<_> = resolved.images.iter().collect();
    ordered.sort_by_key(|(_, place)| **place);
    let mut used = 0_u64;
    ordered
        .into_iter()
        .filter(|(image, _)| {
            used = used.saturating_add(sizes.get(*image).copied().unwrap_or(0));
            used > bytes
        })
        .map(|(image, _)| image.clone())
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::facts::tests::prefetch;
    use super::super::limits::Limits;
    use super::super::resolve::resolve;
    use super::*;

    pub(crate) fn on(node: &NodeFacts, specs: &[&str]) -> Wanted {
        let prefetches: Vec<PrefetchFacts> = specs
            .iter()
            .enumerate()
            .map(|(i, spec)| PrefetchFacts {
                uid: format!("uid-{i}"),
                ..prefetch(spec)
            })
            .collect();
        let resolved: Vec<Resolved> = prefetches
            .iter()
            .map(|prefetch| resolve(prefetch, |_| [], &Limits::default()))
            .collect();
        let none = HashSet::new();
        let claims: Vec<Claim<'_>> = prefetches
            .iter()
            .zip(&resolved)
            .map(|(prefetch, resolved)| Claim {
                prefetch,
                resolved,
                over: &none,
            })
            .collect();
        let places = claimants(node, claims.iter().copied());
        wanted(
            places.into_iter().map(|place| (place, claims[place])),
            &HashMap::new(),
        )
    }

    fn node() -> NodeFacts {
        NodeFacts {
            name: "worker-1".into(),
            os: "linux".into(),
            ready: true,
            ..NodeFacts::default()
        }
    }

    const NGINX: &str = "docker.io/library/nginx:latest";

    #[test]
    fn two_prefetches_share_an_image_and_each_pins_it() {
        let both = on(
            &node(),
            &[
                "{images: [nginx], retry_after: 60, pull: {policy: Always}}",
                "{images: [nginx], pin: {expiry: 24h}, retention: Keep}",
            ],
        );
        let want = &both.images[NGINX];
        assert_eq!(want.retry_after, SignedDuration::from_secs(60));
        assert!(want.always);
        assert_eq!(want.by, [0, 1]);
        let owners: Vec<_> = want
            .pins
            .iter()
            .map(|pin| (pin.owner.as_str(), pin.expiry.as_hours()))
            .collect();
        assert_eq!(owners, [("uid-0", 168), ("uid-1/keep", 24)]);
        assert_eq!(both.longest_pin(), Some(SignedDuration::from_hours(168)));
    }

    #[test]
    fn what_a_node_carries_is_void_when_images_or_pins_change() {
        let hash = |specs: &[&str]| on(&node(), specs).hash().to_owned();
        let base = hash(&["{images: [nginx]}"]);
        assert_eq!(base, hash(&["{images: [nginx], retry_after: 5}"]));
        assert_ne!(base, hash(&["{images: [nginx, a]}"]));
        assert_ne!(base, hash(&["{images: [nginx], pull: {policy: Always}}"]));
        assert_ne!(base, hash(&["{images: [nginx], pin: {enabled: false}}"]));
        assert_ne!(base, hash(&["{images: [nginx]}", "{images: [nginx]}"]));
    }

    #[test]
    fn a_suspended_prefetch_wants_nothing_and_keeps_its_pins() {
        let suspended = on(&node(), &["{images: [nginx], suspend: true}"]);
        assert!(suspended.images.is_empty());
        assert_eq!(suspended.held[NGINX].len(), 1);
        assert!(!suspended.is_empty());
    }

    #[test]
    fn images_beyond_the_bytes_that_are_allowed_are_left_out_in_their_order() {
        let resolved = resolve(&prefetch("{images: [c, a, b]}"), |_| [], &Limits::default());
        let sizes: HashMap<Arc<str>, u64> = [("c", 60), ("a", 50), ("b", 1)]
            .into_iter()
            .map(|(name, size)| (format!("docker.io/library/{name}:latest").into(), size))
            .collect();
        let over = over_budget(&resolved, &sizes, 100);
        let mut names: Vec<_> = over.iter().map(|image| &**image).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["docker.io/library/a:latest", "docker.io/library/b:latest"]
        );
        assert!(over_budget(&resolved, &sizes, 0).is_empty());
        assert!(over_budget(&resolved, &HashMap::new(), 1).is_empty());
    }

    #[test]
    fn no_pins_have_the_fingerprint_nought() {
        let want = |spec: &str| on(&node(), &[spec]).images[NGINX].pins_fingerprint();
        assert_eq!(want("{images: [nginx], pin: {enabled: false}}"), 0);
        assert_ne!(want("{images: [nginx]}"), 0);
        assert_ne!(
            want("{images: [nginx]}"),
            want("{images: [nginx], pin: {expiry: 1h}}")
        );
    }
}
