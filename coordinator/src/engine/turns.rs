//! Which nodes may pull now: the places that each Prefetch has, and what registries bear.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};

use super::{Engine, Key, Subject};
use crate::prefetch::{Wanted, host};

/// Until it is asked again whether a registry that asks for patience can take one more node.
const REGISTRY_PAUSE: SignedDuration = SignedDuration::from_secs(2);

/// Nodes that let go of the pins of deleted Prefetches at once: each needs an agent for it.
const RELEASES_AT_ONCE: usize = 50;
/// Nodes that are prepared for their restart beyond those that may restart at once.
const PREPARED: usize = 50;

impl Engine {
    /// The images for which one of their Prefetches has a place free for this node, which it takes. A node that gets
    /// none is called when one is free.
    pub(super) fn engage(
        &mut self,
        name: &str,
        images: Vec<Arc<str>>,
        wanted: &Wanted,
        keys: &[Key],
    ) -> Vec<Arc<str>> {
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
            // Until they are counted, as many as its status said.
            let told = usize::try_from(prefetch.status.nodes.wanted).unwrap_or(0);
            let meant = state.meant.unwrap_or(told);
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

    /// A place among the nodes that have an agent for the sake of the runtime: as many as may restart and some that are
    /// prepared meanwhile, so that thousands of agents do not all come at once to wait. New nodes wait for nobody. A node
    /// that gets none is called when one is free.
    pub(super) fn engage_for_runtime(&mut self, name: &str) -> bool {
        let is_new = self.nodes.get(name).is_some_and(|node| node.marks.gate);
        if is_new || self.attended.contains(name) {
            return true;
        }
        let most = self.setup.policy.max_unavailable.of(self.nodes.len()) + PREPARED;
        if self.attended.len() >= most {
            self.waiting_for_attendance.insert(name.to_owned());
            return false;
        }
        self.waiting_for_attendance.remove(name);
        self.attended.insert(name.to_owned())
    }

    /// The node has no need of that place now.
    pub(super) fn disengage_from_runtime(&mut self, name: &str) {
        self.waiting_for_attendance.remove(name);
        if self.attended.remove(name) {
            self.dirty_nodes.extend(self.waiting_for_attendance.pop_first());
        }
    }

    /// A place among the nodes that let go of pins where nothing is wanted any more; a node that gets none is called
    /// when one is free.
    pub(super) fn engage_for_release(&mut self, name: &str) -> bool {
        if self.releasing.contains(name) {
            return true;
        }
        if self.releasing.len() >= RELEASES_AT_ONCE {
            self.waiting_to_release.insert(name.to_owned());
            return false;
        }
        self.waiting_to_release.remove(name);
        self.releasing.insert(name.to_owned())
    }

    /// Gives back the places that a node has taken, and calls one that waits for each.
    pub(super) fn disengage(&mut self, name: &str) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        if self.releasing.remove(name) {
            self.dirty_nodes.extend(self.waiting_to_release.pop_first());
        }
        for key in std::mem::take(&mut runtime.engaged) {
            if let Some(state) = self.status.get_mut(&key) {
                state.engaged = state.engaged.saturating_sub(1);
                self.dirty_nodes.extend(state.waiting.pop_first());
            }
        }
    }

    /// Without the images of registries that ask for patience and have as many nodes as they take.
    pub(super) fn admitted_by_registries(
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
}
