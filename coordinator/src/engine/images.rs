//! The engine's dealings with the images of a node: what is to be pulled or let go there, and with which orders.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use tracing::{info, warn};

use super::pulls::{OrderedImage, PullOrder};
use super::{Engine, Key, Subject};
use crate::node::Work;
use crate::prefetch::{
    Cover, Pair, PlanInput, PullPlan, Wanted, covers, host, is_pointless, largest_beside, plan, promise,
    recheck_at,
};

/// How long a summoned agent may take to come before its node does not count any more.
const ARRIVAL: SignedDuration = SignedDuration::from_secs(120);

impl Engine {
    /// Decides about the images of a node; says whether they need an agent.
    pub(super) fn settle_images(&mut self, name: &str, busy: bool, now: Timestamp) -> bool {
        let Some(wanted) = self.wanted_on(name) else {
            return false;
        };
        if wanted.is_empty() {
            self.pay_pins(name);
        }
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
            if is_pointless(runtime.ordered.keys(), &wanted) && !runtime.stop_pull.is_cancelled() {
                info!(
                    node = name,
                    "a pull of which nothing is wanted any more is stopped"
                );
                runtime.stop_pull.cancel();
            }
            return true;
        }
        let settled = matches!(&planned, PullPlan::Settled(Some(mark)) if node.marks.images_verified.as_ref() == Some(mark));
        if settled {
            known.rest(|digests| self.digests.of(digests));
        }
        if runtime.settled != settled {
            runtime.settled = settled;
            self.all_prefetches_dirty();
        }
        if !matches!(planned, PullPlan::Pull(_) | PullPlan::Release) {
            self.disengage(name);
        }
        match planned {
            PullPlan::Settled(mark) => {
                if let Some(at) = recheck.filter(|_| mark.is_some()) {
                    self.wake(at, Subject::Node(name.to_owned()));
                }
                // What is left of pins goes with it: one write, and none for pins alone while something is wanted.
                let pinned = wanted.longest_pin().is_some();
                let owed = self.owed_pins(name).filter(|held| held.is_some() || !pinned);
                self.mark(name, |marks| {
                    marks.images_verified = mark;
                    if let Some(held) = owed {
                        marks.pins_held = held;
                    }
                });
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
            self.disengage(name);
            return false;
        }
        // What is to be pulled afterwards is pulled from the same place; agents do not all come at once either way.
        let has_a_place = if wanted.is_empty() {
            self.engage_for_release(name)
        } else {
            let keys: Vec<Key> = self.prefetches.keys().cloned().collect();
            let images = wanted.images.keys().cloned().collect();
            !self.engage(name, images, wanted, &keys).is_empty()
        };
        if !has_a_place {
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
        if promised.is_some()
            && self
                .nodes
                .get(name)
                .is_some_and(|node| node.marks.pins_held.is_none())
            && let Some(known) = self.pairs.get_mut(name)
        {
            // There is nothing to let go on a node that holds no pin.
            known.released = Some(wanted.hash().to_owned());
        }
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
            if order.images.iter().any(|image| !image.pins.is_empty()) {
                // What was left after the last release is not all that is there from now on.
                runtime.owed_pins = None;
            }
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

    fn pull_order(&self, images: &[Arc<str>], wanted: &Wanted, keys: &[Key]) -> PullOrder {
        let mut places: Vec<usize> = images
            .iter()
            .filter_map(|image| wanted.images.get(image))
            .flat_map(|want| want.by.iter().copied())
            .collect();
        places.sort_unstable();
        places.dedup();
        let claims: Vec<_> = places
            .iter()
            .filter_map(|place| {
                let key = keys.get(*place)?;
                Some((key.clone(), self.prefetches.get(key)?.pull.clone()))
            })
            .collect();
        let per_node = claims.iter().map(|(_, pull)| pull.per_node).max().unwrap_or(3);
        let mut images = images.to_vec();
        largest_beside(&mut images, wanted, per_node);
        PullOrder {
            images: images
                .iter()
                .filter_map(|image| Some((image, wanted.images.get(image)?)))
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
            per_node,
            settings: self.setup.pulls.clone(),
        }
    }

    fn is_summoned(&self, name: &str) -> bool {
        self.nodes
            .get(name)
            .is_some_and(|node| node.marks.agent.as_deref() == Some(crate::node::SUMMONED))
    }
}
