//! What this process knows of a node beyond the Node object: its agent, and what is under way there.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::Key;
use crate::node::{Attempt, NodeFacts, Work};
use crate::prefetch::Trouble;

/// Pauses between dials: doubled from the first to the last.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_millis(20);
const LAST_PAUSE: SignedDuration = SignedDuration::from_secs(2);

/// Of one node.
#[derive(Debug, Default)]
pub(super) struct NodeRuntime {
    pub agent: AgentLink,
    pub attempt: Attempt,
    /// The order about the runtime that is under way.
    pub working: Option<Work>,
    /// A pull, or a release of pins, is under way.
    pub pulling: bool,
    /// Stops the pull that is under way.
    pub stop_pull: CancellationToken,
    /// After a pull was lost, not before this time.
    pub pull_not_before: Option<Timestamp>,
    /// A write of marks is under way.
    pub writing: bool,
    /// After a write failed, not before this time.
    pub write_not_before: Option<Timestamp>,
    /// Marks that the end of an order asks for; kept until they are written.
    pub owed: Option<Owed>,
    /// What to remember of the attempt once they are written.
    pub pending_attempt: Option<Attempt>,
    /// It was given its turn, and the Node does not say so yet: it counts against the budget already.
    pub granted: bool,
    /// Since when an agent is awaited.
    pub awaited_since: Option<Timestamp>,
    /// Since when it has had no work.
    pub idle_since: Option<Timestamp>,
    /// When a restart of ours ended there.
    pub restarted_at: Option<Timestamp>,
    /// All images that are wanted on it are there, by its own mark.
    pub settled: bool,
    /// Prefetches among whose pulling nodes it has a place.
    pub engaged: BTreeSet<Key>,
    /// What was ordered and not reported yet, each with the fingerprint of its pins, and for whom.
    pub ordered: HashMap<Arc<str>, u64>,
    pub ordered_by: Vec<Key>,
    /// Registries from which it pulls.
    pub hosts: BTreeSet<String>,
    /// Its agent does not come; it holds nobody back.
    pub unreachable: bool,
    /// Since when the kubelet has not named our handler, and whether that was looked into.
    pub handler_missing: Option<(Timestamp, bool)>,
    /// What the node has to say of pins after a release.
    pub owed_pins: Option<Option<String>>,
}

/// The kubelet tells of handlers some seconds after containerd was restarted.
const HANDLER_GRACE: SignedDuration = SignedDuration::from_secs(40);

impl NodeRuntime {
    /// Whether the handler has been missing from what the kubelet names for longer than a restart explains. It is said
    /// once: a module that runs all the same is the better proof.
    pub(super) fn drifted(&mut self, node: &NodeFacts, now: Timestamp) -> bool {
        if node.serves_handler != Some(false) || !node.is_verified() {
            if node.serves_handler != Some(false) {
                self.handler_missing = None;
            }
            return false;
        }
        let (since, looked_into) = *self.handler_missing.get_or_insert((now, false));
        !looked_into && now.duration_since(since) >= HANDLER_GRACE
    }

    /// When a handler that is missing counts as gone.
    pub(super) fn drift_shows_at(&self) -> Option<Timestamp> {
        let (since, looked_into) = self.handler_missing?;
        (!looked_into).then_some(since + HANDLER_GRACE)
    }
}

/// The end of an order that is not on the Node yet.
#[derive(Debug, Clone)]
pub(super) struct Owed {
    pub work: Work,
    pub outcome: crate::node::Outcome,
    /// An Event has told of it.
    pub told: bool,
}

/// The way to the agent of a node.
#[derive(Debug, Default)]
pub(super) struct AgentLink {
    /// Name and uid of its pod.
    pub pod: Option<(String, String)>,
    /// What is wrong with the pod.
    pub trouble: Option<String>,
    pub address: Option<SocketAddr>,
    pub channel: Option<Channel>,
    pub dialling: bool,
    pub pause: Option<SignedDuration>,
    pub not_before: Option<Timestamp>,
}

impl AgentLink {
    /// The pod is another one, or none: what was known of the way to it is void.
    pub(super) fn replace_pod(&mut self, pod: Option<(String, String)>) {
        *self = Self {
            pod,
            // A dial that is under way reports with the old pod's uid and is not heeded.
            ..Self::default()
        };
    }

    /// Whether it should be dialled now.
    pub(super) fn wants_dial(&self, now: Timestamp) -> Option<SocketAddr> {
        let rested = self.not_before.is_none_or(|at| at <= now);
        self.address
            .filter(|_| self.channel.is_none() && !self.dialling && rested)
    }

    /// A dial failed; returns when to try again.
    pub(super) fn failed(&mut self, now: Timestamp) -> Timestamp {
        let pause = self
            .pause
            .map_or(FIRST_PAUSE, |pause| (pause * 2).min(LAST_PAUSE));
        self.pause = Some(pause);
        self.dialling = false;
        let at = now + pause;
        self.not_before = Some(at);
        at
    }
}

/// Of one Prefetch.
#[derive(Debug, Default)]
pub(super) struct PrefetchRuntime {
    pub writing: bool,
    pub computed_at: Option<Timestamp>,
    pub written_at: Option<Timestamp>,
    pub write_not_before: Option<Timestamp>,
    /// How long computing it took: a status of many nodes is computed less often.
    pub cost: SignedDuration,
    /// Nodes that it is meant for, as last counted: of them a share may pull at once.
    pub meant: Option<usize>,
    /// Nodes that pull for it, or are about to.
    pub engaged: usize,
    /// Nodes that wait for a place among them.
    pub waiting: BTreeSet<String>,
    /// Bytes that were pulled for it by order of this process.
    pub bytes: u64,
    /// What its status said when this process first saw it.
    pub bytes_before: Option<u64>,
    /// What is wrong with its secrets.
    pub trouble: Option<Trouble>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_dials_grow_to_two_seconds() {
        let mut link = AgentLink {
            address: Some(([127, 0, 0, 1], 7443).into()),
            ..AgentLink::default()
        };
        let now = Timestamp::UNIX_EPOCH;
        let pauses: Vec<i128> = (0..9)
            .map(|_| link.failed(now).duration_since(now).as_millis())
            .collect();
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1280, 2000, 2000]);
        assert_eq!(link.wants_dial(now), None);
        assert!(link.wants_dial(now + LAST_PAUSE).is_some());
    }
}
