//! The engine's dealings with the images of a node: what is to be pulled or let go there, and when it is its turn.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use tracing::{info, warn};

use super::pulls::{ImageReport, OrderedImage, PullOrder, Released};
use super::{Engine, Key, Subject};
use crate::node::Work;
use crate::prefetch::{
    Cover, Pair, PairFailure, PlanInput, PullPlan, Wanted, covers, host, plan, promise, recheck_at,
};

/// After a pull or release whose stream was lost.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);
/// Until it is asked again whether a registry that asks for patience can take one more node.
const REGISTRY_PAUSE: SignedDuration = SignedDuration::from_secs(2);
/// How long a summoned agent may take to come before its node does not count any more.
const ARRIVAL: SignedDuration = SignedDuration::from_secs(120);

impl Engine {
    /// Decides about the images of a node; says whether they need an agent.
    pub(super) fn settle_images(&mut self, name: &str, busy: bool, now: Timestamp) -> bool {
        self.pay_pins(name);
        let Some(wanted) = self.wanted_on(name) else {
            return false;
        };
        let Some(node) = self.nodes.get(name) else {
            return false;
        };
        let known = self
            .pairs
            .entry(name.to_owned())
            .or_default()
            .of_boot(&node.boot_id);
        // What nobody wants is not watched over: an image collector may take it, so it is looked for when it is wanted again.
        known
            .pairs
            .retain(|image, pair| *pair == Pair::Pulling || wanted.images.contains_key(image));
        let planned = plan(PlanInput {
            node,
            wanted: &wanted,
            known,
            registries: &self.registries,
            recheck: self.setup.recheck,
            now,
        });
        let recheck = recheck_at(node, &wanted, self.setup.recheck);
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        if runtime.pulling {
            return true;
        }
        let settled = matches!(&planned, PullPlan::Settled(Some(mark)) if node.marks.images_verified.as_ref() == Some(mark));
        if settled {
            known.rest();
        }
        if runtime.settled != settled {
            runtime.settled = settled;
            self.all_prefetches_dirty();
        }
        if !matches!(planned, PullPlan::Pull(_)) {
            self.disengage(name);
        }
        match planned {
            PullPlan::Settled(mark) => {
                if let Some(at) = recheck.filter(|_| mark.is_some()) {
                    self.wake(at, Subject::Node(name.to_owned()));
                }
                self.mark(name, |marks| marks.images_verified = mark);
                false
            }
            PullPlan::WaitUntil(at) => {
                self.wake(at, Subject::Node(name.to_owned()));
                false
            }
            PullPlan::Release => self.let_go(name, &wanted, busy, now),
            PullPlan::Pull(images) => self.pull_images(name, images, &wanted, busy, now),
        }
    }

    /// Whether the node can be given an order about its images now; summons its agent if it has none.
    fn can_order(&mut self, name: &str, busy: bool, promised: Option<String>, now: Timestamp) -> bool {
        let Some(node) = self.nodes.get(name) else {
            return false;
        };
        let restarting = node.marks.restart.is_some();
        let Some(runtime) = self.runtime.get_mut(name) else {
            return false;
        };
        if runtime.writing {
            return false;
        }
        if let Some(at) = runtime.pull_not_before.filter(|at| *at > now) {
            self.wake(at, Subject::Node(name.to_owned()));
            return false;
        }
        let changing = matches!(runtime.working, Some(Work::Install | Work::Remove { .. }));
        let late = runtime
            .awaited_since
            .is_some_and(|since| now.duration_since(since) >= ARRIVAL);
        if self.channel(name).is_none() {
            if !busy && !self.is_summoned(name) {
                info!(node = name, "an agent is summoned");
                self.mark(name, |marks| {
                    marks.agent = Some(crate::node::SUMMONED.to_owned());
                    marks.pins_held = promised.or_else(|| marks.pins_held.take());
                });
            } else if late {
                self.give_up_waiting(name);
            } else {
                self.wake(now + ARRIVAL, Subject::Node(name.to_owned()));
            }
            return false;
        }
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.unreachable = false;
        }
        // A restart of containerd would break the pulls; they come after it.
        if changing || restarting {
            return false;
        }
        // What the node says of pins must be there before the first of them.
        if let Some(promised) = promised {
            self.mark(name, |marks| marks.pins_held = Some(promised));
            return false;
        }
        true
    }

    /// No agent comes: others get its place, and it does not hold anybody back.
    fn give_up_waiting(&mut self, name: &str) {
        self.disengage(name);
        if let Some(runtime) = self.runtime.get_mut(name)
            && !runtime.unreachable
        {
            runtime.unreachable = true;
            warn!(
                node = name,
                trouble = runtime.agent.trouble,
                "no agent has come to the node; its images wait"
            );
            self.all_prefetches_dirty();
        }
    }

    fn let_go(&mut self, name: &str, wanted: &Wanted, busy: bool, now: Timestamp) -> bool {
        if !self.nodes.get(name).is_some_and(|node| node.ready) {
            return false;
        }
        if self.can_order(name, busy, None, now)
            && let Some(channel) = self.channel(name)
        {
            if let Some(runtime) = self.runtime.get_mut(name) {
                runtime.pulling = true;
            }
            self.order_release(name, channel, wanted.hash().to_owned(), wanted.pins());
        }
        true
    }

    fn pull_images(
        &mut self,
        name: &str,
        images: Vec<Arc<str>>,
        wanted: &Wanted,
        busy: bool,
        now: Timestamp,
    ) -> bool {
        let Some(node) = self.nodes.get(name) else {
            return false;
        };
        let keys: Vec<Key> = self.prefetches.keys().cloned().collect();
        let served = |place: &usize| {
            keys.get(*place)
                .and_then(|key| self.prefetches.get(key))
                .is_some_and(|prefetch| covers(prefetch, node) == Cover::Wanted)
        };
        let images: Vec<Arc<str>> = images
            .into_iter()
            .filter(|image| {
                wanted
                    .images
                    .get(image)
                    .is_some_and(|want| want.by.iter().any(served))
            })
            .collect();
        if images.is_empty() {
            // NotReady or cordoned: an edge of the Node wakes it.
            self.disengage(name);
            return false;
        }
        let images = self.engage(name, images, wanted, &keys);
        if images.is_empty() {
            return false;
        }
        let promised = self.nodes.get(name).and_then(|node| promise(node, wanted, now));
        if !self.can_order(name, busy, promised, now) {
            return true;
        }
        let images = self.admitted_by_registries(name, images, now);
        let Some(channel) = self.channel(name).filter(|_| !images.is_empty()) else {
            return true;
        };
        let order = self.pull_order(&images, wanted, &keys);
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pulling = true;
            runtime.hosts = images.iter().map(|image| host(image).to_owned()).collect();
            for host in &runtime.hosts {
                *self.pulling_from.entry(host.clone()).or_default() += 1;
            }
            runtime.ordered = order
                .images
                .iter()
                .map(|image| (image.image.clone(), image.fingerprint))
                .collect();
            runtime.ordered_by = order.claims.iter().map(|(key, _)| key.clone()).collect();
        }
        if let Some(known) = self.pairs.get_mut(name) {
            for image in images {
                known.pairs.insert(image, Pair::Pulling);
            }
        }
        self.all_prefetches_dirty();
        self.order_pull(name, channel, order);
        true
    }

    /// The images for which one of their Prefetches has a place free for this node, which it takes. A node that gets
    /// none is called when one is free.
    fn engage(&mut self, name: &str, images: Vec<Arc<str>>, wanted: &Wanted, keys: &[Key]) -> Vec<Arc<str>> {
        let claimed: BTreeSet<usize> = images
            .iter()
            .filter_map(|image| wanted.images.get(image))
            .flat_map(|want| want.by.iter().copied())
            .collect();
        let mut open = HashSet::new();
        for place in claimed {
            let Some(prefetch) = keys.get(place).and_then(|key| self.prefetches.get(key)) else {
                continue;
            };
            let key = &keys[place];
            let runtime = self.runtime.entry(name.to_owned()).or_default();
            let state = self.status.entry(key.clone()).or_default();
            let meant = usize::try_from(prefetch.status.nodes.wanted).unwrap_or(0);
            if runtime.engaged.contains(key) {
                open.insert(place);
            } else if state.engaged < prefetch.pull.parallelism.of(meant) {
                state.engaged += 1;
                state.waiting.remove(name);
                runtime.engaged.insert(key.clone());
                open.insert(place);
            } else {
                state.waiting.insert(name.to_owned());
            }
        }
        let mut images = images;
        images.retain(|image| {
            wanted
                .images
                .get(image)
                .is_some_and(|want| want.by.iter().any(|place| open.contains(place)))
        });
        images
    }

    /// Gives back the places that a node has taken, and calls one that waits for each.
    pub(super) fn disengage(&mut self, name: &str) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        for key in std::mem::take(&mut runtime.engaged) {
            if let Some(state) = self.status.get_mut(&key) {
                state.engaged = state.engaged.saturating_sub(1);
                self.dirty_nodes.extend(state.waiting.pop_first());
            }
        }
    }

    /// Without the images of registries that ask for patience and have as many nodes as they take.
    fn admitted_by_registries(
        &mut self,
        name: &str,
        mut images: Vec<Arc<str>>,
        now: Timestamp,
    ) -> Vec<Arc<str>> {
        let before = images.len();
        images.retain(|image| {
            let host = host(image);
            let pulling = self.pulling_from.get(host).copied().unwrap_or(0);
            self.registries.at_once(host).is_none_or(|most| pulling < most)
        });
        if images.len() < before {
            self.wake(now + REGISTRY_PAUSE, Subject::Node(name.to_owned()));
        }
        images
    }

    fn pull_order(&self, images: &[Arc<str>], wanted: &Wanted, keys: &[Key]) -> PullOrder {
        let wants: Vec<_> = images
            .iter()
            .filter_map(|image| Some((image, wanted.images.get(image)?)))
            .collect();
        let mut places: Vec<usize> = wants.iter().flat_map(|(_, want)| want.by.clone()).collect();
        places.sort_unstable();
        places.dedup();
        let claims: Vec<_> = places
            .iter()
            .filter_map(|place| {
                let key = keys.get(*place)?;
                Some((key.clone(), self.prefetches.get(key)?.pull.clone()))
            })
            .collect();
        let per_node = claims.iter().map(|(_, pull)| pull.per_node).max();
        PullOrder {
            images: wants
                .into_iter()
                .map(|(image, want)| OrderedImage {
                    image: image.clone(),
                    always: want.always,
                    pins: want.pins.clone(),
                    fingerprint: want.pins_fingerprint(),
                    by: want
                        .by
                        .iter()
                        .filter_map(|place| places.binary_search(place).ok())
                        .collect(),
                })
                .collect(),
            claims,
            per_node: per_node.unwrap_or(3),
            settings: self.setup.pulls.clone(),
        }
    }

    /// An agent told of an image.
    pub(super) fn image(&mut self, name: &str, report: ImageReport) {
        let ImageReport { image, result, at } = report;
        let (Some(node), Some(runtime)) = (self.nodes.get(name), self.runtime.get_mut(name)) else {
            return;
        };
        // Only what we asked for is ours to count; by its own name here, all nodes share one text.
        let Some((image, pins)) = runtime.ordered.remove_entry(&*image) else {
            return;
        };
        let keys = runtime.ordered_by.clone();
        let fetched = result.as_ref().map_or(0, |ready| ready.fetched);
        match &result {
            Ok(ready) => {
                let came = if ready.was_present { "was there" } else { "pulled" };
                self.reports.line(
                    name,
                    format!("  {image}: {came}, {} bytes fetched", ready.fetched),
                );
            }
            Err(failed) => self.reports.line(
                name,
                format!("  {image}: {}: {}", failed.reason.camel_case(), failed.message),
            ),
        }
        let pair = match result {
            Ok(ready) => {
                info!(
                    node = name,
                    image = &*image,
                    digest = &*ready.digest,
                    fetched = ready.fetched,
                    "image ready"
                );
                if ready.size > 0 && self.sizes.insert(image.clone(), ready.size) != Some(ready.size) {
                    // Smallest first, and the bytes of a Prefetch, depend on it.
                    self.shared_wants.clear();
                    self.over.clear();
                }
                if !ready.was_present || !self.newest.contains_key(&image) {
                    self.registries.served(host(&image), at);
                    if !ready.digest.is_empty() {
                        self.newest.insert(image.clone(), ready.digest.clone());
                    }
                }
                for key in &keys {
                    let resolved = self.resolved.get(key);
                    if ready.fetched > 0 && resolved.is_some_and(|r| r.images.contains_key(&image)) {
                        self.status.entry(key.clone()).or_default().bytes += ready.fetched;
                    }
                }
                Pair::Ready {
                    digest: ready.digest,
                    pins,
                    at,
                }
            }
            Err(failed) if failed.reason == quartermaster_proto::v1::FailureReason::NotForThisNode => {
                info!(node = name, image = &*image, "image is not for this node");
                Pair::NotForNode { at }
            }
            Err(failed) => {
                warn!(
                    node = name,
                    image = &*image,
                    reason = failed.reason.camel_case(),
                    message = failed.message,
                    "image failed"
                );
                if failed.reason.asks_for_patience() {
                    let host = host(&image);
                    let pulling = self.pulling_from.get(host).copied().unwrap_or(1);
                    self.registries.refused(host, failed.retry_after, pulling, at);
                }
                Pair::Failed(Box::new(PairFailure {
                    reason: failed.reason,
                    message: self.words.shared(&failed.message),
                    at,
                }))
            }
        };
        self.setup.metrics.image(&pair, fetched);
        self.pairs
            .entry(name.to_owned())
            .or_default()
            .of_boot(&node.boot_id)
            .pairs
            .insert(image, pair);
        self.dirty_prefetches.extend(keys);
    }

    pub(super) fn pull_ended(&mut self, name: &str, lost: bool) {
        let end = if lost {
            "the agent was lost; what is missing is ordered again"
        } else {
            "done"
        };
        self.reports.end(name, format!("{:.0} {end}", Timestamp::now()));
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.pulling = false;
        runtime.ordered.clear();
        self.leave_registries(name);
        if lost {
            warn!(
                node = name,
                "the stream of a pull was lost; what is missing is ordered again"
            );
            self.order_lost(name);
        }
        if let Some(known) = self.pairs.get_mut(name) {
            known.pairs.retain(|_, pair| *pair != Pair::Pulling);
        }
        self.dirty_nodes.insert(name.to_owned());
        self.all_prefetches_dirty();
    }

    /// A pull of this node is over.
    pub(super) fn leave_registries(&mut self, name: &str) {
        let hosts = self
            .runtime
            .get_mut(name)
            .map(|runtime| std::mem::take(&mut runtime.hosts));
        for host in hosts.into_iter().flatten() {
            if let Some(pulling) = self.pulling_from.get_mut(&host) {
                *pulling = pulling.saturating_sub(1);
            }
        }
        self.pulling_from.retain(|_, pulling| *pulling > 0);
    }

    fn order_lost(&mut self, name: &str) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pull_not_before = Some(Timestamp::now() + PAUSE);
            runtime.agent.channel = None;
        }
    }

    pub(super) fn released(&mut self, name: &str, released: Option<Released>) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pulling = false;
        }
        self.dirty_nodes.insert(name.to_owned());
        let Some(done) = released else {
            self.order_lost(name);
            return;
        };
        info!(
            node = name,
            released = done.released,
            removed = done.removed,
            "pins that nobody wants any more are released"
        );
        if let Some(known) = self.pairs.get_mut(name) {
            known.released = Some(done.hash);
        }
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.owed_pins = Some(done.held_until.map(|until| format!("{until:.0}")));
        }
    }

    /// Writes what is left of pins after a release, which must not get lost while another write is under way.
    fn pay_pins(&mut self, name: &str) {
        let owed = self
            .runtime
            .get_mut(name)
            .filter(|runtime| !runtime.writing)
            .and_then(|runtime| runtime.owed_pins.take());
        if let Some(held) = owed {
            self.mark(name, |marks| marks.pins_held = held);
        }
    }

    fn is_summoned(&self, name: &str) -> bool {
        self.nodes
            .get(name)
            .is_some_and(|node| node.marks.agent.as_deref() == Some(crate::node::SUMMONED))
    }
}
