//! The engine's dealings with nodes: it asks the decisions what comes next and starts the effects.

use jiff::{SignedDuration, Timestamp};
use tonic::transport::Channel;
use tracing::{debug, info};

use super::{Engine, Subject};
use crate::node::{
    Budget, Marks, NodeFacts, NodeStep, Policy, SUMMONED, Situation, Work, admit, decide, jittered,
    wants_provisioning,
};
use crate::reason;

/// A wait that is shorter than this keeps the agent on its node.
const SHORT_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// How often a node that waits for its turn is looked at again without any other cause.
const TURN_RECHECK: SignedDuration = SignedDuration::from_secs(30);

impl Engine {
    pub(super) fn settle_nodes(&mut self, now: Timestamp) {
        for name in std::mem::take(&mut self.dirty_nodes) {
            self.settle_node(&name, false, now);
        }
        for name in self.admitted(now) {
            self.settle_node(&name, true, now);
        }
    }

    /// Nodes that may restart now.
    fn admitted(&mut self, now: Timestamp) -> Vec<String> {
        if self.asking.is_empty() || self.control.paused {
            return Vec::new();
        }
        let fleet: Vec<Budget<'_>> = self
            .nodes
            .values()
            .map(|node| {
                let runtime = self.runtime.get(&node.name);
                Budget {
                    node,
                    asks: self.asking.contains(&node.name),
                    granted: runtime.is_some_and(|runtime| runtime.granted),
                    restarted_at: runtime.and_then(|runtime| runtime.restarted_at),
                }
            })
            .collect();
        let policy = Policy {
            halted: self.control.halted.is_some(),
            ..self.setup.policy.clone()
        };
        let admission = admit(&fleet, &policy, now);
        let admitted = admission.nodes.into_iter().map(ToOwned::to_owned).collect();
        if let Some(at) = admission.look_again {
            // One of those that ask is woken; all are asked for then.
            let subject = self.asking.first().cloned().map(Subject::Node);
            self.wakes.extend(subject.map(|subject| (at, subject)));
        }
        admitted
    }

    fn settle_node(&mut self, name: &str, turn: bool, now: Timestamp) {
        self.asking.remove(name);
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        if runtime.writing {
            return;
        }
        if let Some(at) = runtime.write_not_before.filter(|at| *at > now) {
            self.wake(at, Subject::Node(name.to_owned()));
            return;
        }
        // By now the Node itself says whether a restart is in flight.
        runtime.granted = false;
        if let Some(owed) = runtime.owed.clone() {
            self.pay(name, &owed, now);
            return;
        }
        let summoned = node.marks.agent.as_deref() == Some(SUMMONED);
        if !summoned {
            runtime.awaited_since = None;
        } else if runtime.agent.channel.is_some() || runtime.awaited_since.is_none() {
            runtime.awaited_since = Some(now);
        }
        let working = runtime.working.is_some();
        if self.control.paused {
            // What is under way goes on to its end; nothing else is begun.
            return;
        }
        let drifted = runtime.drifted(node, now);
        if let Some(at) = runtime.drift_shows_at().filter(|at| *at > now) {
            self.wakes.insert((at, Subject::Node(name.to_owned())));
        }
        let step = if working {
            NodeStep::Nothing
        } else {
            let situation = Situation {
                node,
                auto_provision: self.setup.auto_provision,
                spec_hash: &self.setup.spec_hash,
                agent_ready: summoned && runtime.agent.channel.is_some(),
                awaited: runtime
                    .awaited_since
                    .filter(|_| summoned)
                    .map(|since| (since, runtime.agent.trouble.as_deref())),
                attempt: &runtime.attempt,
                turn,
                removing: self.control.removing,
                other: self.others.provisioner.as_deref(),
                drifted,
                recheck: jittered(self.setup.recheck, name),
                now,
            };
            decide(&situation, &uuid::Uuid::new_v4().to_string())
        };
        debug!(node = name, ?step, turn, "decided");
        if step.is_rest() && !working {
            self.disengage_from_runtime(name);
        }
        let busy = working || self.act(name, step, turn, now);
        let visited = self.has_guests(name);
        if visited {
            self.summon(name);
        }
        let busy = busy || visited;
        let pulls = self.settle_images(name, busy, now);
        self.settle_gate(name, now);
        self.keep_agent(name, busy || pulls, now);
    }

    /// Starts what a step asks for; says whether the node has work for an agent.
    fn act(&mut self, name: &str, step: NodeStep, turn: bool, now: Timestamp) -> bool {
        match step {
            NodeStep::Nothing | NodeStep::Refused | NodeStep::AwaitReady => false,
            NodeStep::Trusted(until) => {
                self.wake(until, Subject::Node(name.to_owned()));
                false
            }
            NodeStep::Summon => {
                let has_a_place = self.engage_for_runtime(name);
                if has_a_place {
                    self.summon(name);
                }
                has_a_place
            }
            NodeStep::AwaitAgent(overdue) => {
                if let Some(message) = overdue {
                    self.mark(name, |marks| marks.agent_is_unavailable(&message, now));
                } else if let Some(since) = self.runtime.get(name).and_then(|r| r.awaited_since) {
                    self.wake(
                        since + SignedDuration::from_secs(120),
                        Subject::Node(name.to_owned()),
                    );
                }
                true
            }
            NodeStep::Mark(marks) => {
                let granted = turn && marks.restart.is_some();
                self.write_marks(name, &marks);
                if let Some(runtime) = self.runtime.get_mut(name) {
                    runtime.granted = granted;
                }
                true
            }
            NodeStep::AwaitTurn => {
                self.asking.insert(name.to_owned());
                // A node that was held against the budget is forgiven by time alone.
                self.wake(now + TURN_RECHECK, Subject::Node(name.to_owned()));
                true
            }
            // One that needs a restart asks for its turn first, and prepares only if it has to wait.
            NodeStep::Order(Work::PrepareInstall, id) if !turn && self.would_be_admitted(name, now) => {
                debug!(node = name, id, "its turn comes at once");
                self.asking.insert(name.to_owned());
                true
            }
            NodeStep::Order(work, id) => {
                if let Some(channel) = self.channel(name) {
                    if work == Work::Install {
                        self.note(
                            name,
                            false,
                            reason::INSTALLING,
                            "crun with WasmEdge is being installed",
                        );
                    }
                    self.order(name, channel, work, id);
                }
                true
            }
            NodeStep::WaitUntil(at) => {
                self.wake(at, Subject::Node(name.to_owned()));
                at.duration_since(now) < SHORT_WAIT
            }
        }
    }

    fn would_be_admitted(&mut self, name: &str, now: Timestamp) -> bool {
        self.asking.insert(name.to_owned());
        let admitted = self.admitted(now).iter().any(|other| other == name);
        self.asking.remove(name);
        admitted
    }

    /// Lets an idle agent go, and dials one that has work.
    fn keep_agent(&mut self, name: &str, has_work: bool, now: Timestamp) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let present = node.marks.agent.is_some();
        let stays = self.setup.parked && self.is_meant(node);
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        if has_work || runtime.pulling || runtime.working.is_some() {
            runtime.idle_since = None;
            if let Some(address) = runtime.agent.wants_dial(now) {
                self.dial(name, address);
            } else if let Some(at) = runtime.agent.not_before.filter(|at| *at > now) {
                self.wake(at, Subject::Node(name.to_owned()));
            }
        } else if stays {
            runtime.idle_since = None;
            self.summon(name);
        } else if present && !runtime.writing {
            let since = *runtime.idle_since.get_or_insert(now);
            // It is dialled again within milliseconds, and thousands of idle ways to agents would fill the memory.
            runtime.agent.channel = None;
            // Whoever removes everything waits for the last agent, and there will be no more work.
            let linger = if self.control.removing {
                SignedDuration::ZERO
            } else {
                self.setup.linger
            };
            let leaves = since + linger;
            if leaves > now {
                self.wake(leaves, Subject::Node(name.to_owned()));
            } else {
                info!(node = name, "the agent is dismissed");
                self.mark(name, |marks| marks.agent = None);
            }
        }
    }

    /// Whether anything is wanted of a node.
    fn is_meant(&self, node: &NodeFacts) -> bool {
        let servable = node.os == "linux" && !node.is_virtual;
        let wasm = wants_provisioning(node.intent.as_deref(), self.setup.auto_provision);
        servable && !self.control.removing && (wasm || node.marks.images_verified.is_some())
    }

    pub(super) fn summon(&mut self, name: &str) {
        if self
            .nodes
            .get(name)
            .is_some_and(|n| n.marks.agent.as_deref() != Some(SUMMONED))
        {
            info!(node = name, "an agent is summoned");
            self.mark(name, |marks| marks.agent = Some(SUMMONED.to_owned()));
        }
    }

    /// Changes some marks of a node, unless a write is under way there: the end of that decides anew.
    pub(super) fn mark(&mut self, name: &str, change: impl FnOnce(&mut Marks)) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        if self.runtime.get(name).is_some_and(|runtime| runtime.writing) {
            return;
        }
        let mut marks = node.marks.clone();
        change(&mut marks);
        self.write_marks(name, &marks);
    }

    /// The way to a node's agent; none to one that was dismissed and is about to end.
    pub(super) fn channel(&self, name: &str) -> Option<Channel> {
        let node = self.nodes.get(name)?;
        if node.marks.agent.as_deref() != Some(SUMMONED) {
            return None;
        }
        self.runtime.get(name)?.agent.channel.clone()
    }

    fn note(&self, name: &str, warning: bool, reason: &str, note: &str) {
        if let Some(node) = self.nodes.get(name) {
            self.notices.of_node(node, warning, reason, note);
        }
    }
}
