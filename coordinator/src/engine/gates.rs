//! The engine's dealings with the gates of new nodes.

use jiff::Timestamp;
use tracing::{info, warn};

use super::{Engine, Subject};
use crate::node::{GateInput, GateStep, gate, wants_provisioning};
use crate::prefetch::{Cover, Pair, covers};
use crate::reason;

impl Engine {
    /// Opens the gate of a node when it is time.
    pub(super) fn settle_gate(&mut self, name: &str, now: Timestamp) {
        if !self.nodes.get(name).is_some_and(|node| node.marks.gate) {
            return;
        }
        let images_there = self.gated_images_are_there(name);
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let servable = node.os == "linux" && !node.is_virtual;
        let wanted = servable
            && !self.control.removing
            && wants_provisioning(node.intent.as_deref(), self.setup.auto_provision);
        let step = gate(GateInput {
            node,
            wanted,
            images_there: !servable || images_there,
            deadline: self.setup.gate_deadline,
            now,
        });
        match step {
            GateStep::None => {}
            GateStep::Closed(until) => self.wake(until, Subject::Node(name.to_owned())),
            GateStep::Open => {
                info!(node = name, "the gate is opened");
                self.mark(name, |marks| marks.gate = false);
            }
            GateStep::OpenLate => {
                warn!(node = name, "the gate is opened because its time is over");
                let words =
                    "the taint kwasm.sh/not-ready was taken off although not all is there: its time is over";
                self.notices
                    .of_node(node, true, reason::GATE_DEADLINE_PASSED, words);
                self.mark(name, |marks| marks.gate = false);
            }
        }
    }

    /// Whether all images of the Prefetches that gate a node are there. While that is not known they are not.
    fn gated_images_are_there(&mut self, name: &str) -> bool {
        if self.prefetches.values().all(|prefetch| !prefetch.gate) {
            return true;
        }
        if self.wanted_on(name).is_none() {
            return false;
        }
        let (Some(node), Some(runtime)) = (self.nodes.get(name), self.runtime.get(name)) else {
            return false;
        };
        let known = self.pairs.get(name).filter(|known| known.boot_id == node.boot_id);
        let there = |image: &str| {
            let pair = known.and_then(|known| known.pairs.get(image));
            matches!(pair, Some(Pair::Ready { .. } | Pair::NotForNode { .. }))
        };
        runtime.settled
            || self
                .prefetches
                .iter()
                .filter(|(_, prefetch)| prefetch.gate && !prefetch.suspend)
                .filter(|(_, prefetch)| covers(prefetch, node) != Cover::No)
                .filter_map(|(key, _)| self.resolved.get(key))
                .all(|resolved| resolved.images.keys().all(|image| there(image)))
    }
}
