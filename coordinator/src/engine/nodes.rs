//! The engine's dealings with nodes: it asks the decisions what comes next and starts the effects.

use std::net::SocketAddr;

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::COMMAND_PORT;
use quartermaster_proto::v1::FailureReason;
use quartermaster_proto::v1::provision_event::Event as StageEvent;
use tonic::transport::Channel;
use tracing::{debug, error, info, warn};

use super::feeds::AgentPod;
use super::input::Change;
use super::runtime::{NodeRuntime, Owed};
use super::writes::WriteError;
use super::{Engine, Subject};
use crate::identity::Arrival;
use crate::node::{
    Budget, Marks, NodeFacts, NodeStep, Outcome, SUMMONED, Situation, Work, admit, conclude, decide,
};
use crate::prefetch::{Pair, PullPlan, plan, recheck_at};

/// A wait that is shorter than this keeps the agent on its node.
const SHORT_WAIT: SignedDuration = SignedDuration::from_secs(30);
/// After a write that failed.
const WRITE_PAUSE: SignedDuration = SignedDuration::from_secs(2);
/// After a pull whose stream was lost.
const PULL_PAUSE: SignedDuration = SignedDuration::from_secs(1);
/// Nodes that pull at once: a tenth of the fleet, and never fewer than this.
const PULLING_NODES: usize = 10;

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
    fn admitted(&self, now: Timestamp) -> Vec<String> {
        if self.asking.is_empty() {
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
                    restarted_at: runtime.and_then(|runtime| runtime.restarted_at),
                }
            })
            .collect();
        admit(&fleet, self.setup.max_unavailable, now)
            .into_iter()
            .map(ToOwned::to_owned)
            .collect()
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
        let step = if working {
            NodeStep::Nothing
        } else {
            let situation = Situation {
                node,
                auto_provision: self.setup.auto_provision,
                spec_hash: &self.setup.spec_hash,
                agent_ready: runtime.agent.channel.is_some(),
                awaited: runtime
                    .awaited_since
                    .filter(|_| summoned)
                    .map(|since| (since, runtime.agent.trouble.as_deref())),
                attempt: &runtime.attempt,
                turn,
                now,
            };
            decide(&situation, &uuid::Uuid::new_v4().to_string())
        };
        debug!(node = name, ?step, turn, "decided");
        let busy = working || self.act(name, step, turn, now);
        let pulls = self.settle_images(name, busy, now);
        self.keep_agent(name, busy || pulls, now);
    }

    /// Starts what a step asks for; says whether the node has work for an agent.
    fn act(&mut self, name: &str, step: NodeStep, turn: bool, now: Timestamp) -> bool {
        match step {
            NodeStep::Nothing | NodeStep::Refused | NodeStep::AwaitReady => false,
            NodeStep::Summon => {
                self.summon(name);
                true
            }
            NodeStep::AwaitAgent(overdue) => {
                if let Some(message) = overdue {
                    self.mark(name, |marks| {
                        marks.set_condition(false, "AgentUnavailable", &message, now);
                    });
                } else if let Some(since) = self.runtime.get(name).and_then(|r| r.awaited_since) {
                    self.wake(
                        since + SignedDuration::from_secs(120),
                        Subject::Node(name.to_owned()),
                    );
                }
                true
            }
            NodeStep::Mark(marks) => {
                self.write_marks(name, &marks);
                true
            }
            NodeStep::AwaitTurn => {
                self.asking.insert(name.to_owned());
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
                        self.note(name, false, "Installing", "crun with WasmEdge is being installed");
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

    /// Decides about the images of a node; says whether they need an agent.
    fn settle_images(&mut self, name: &str, busy: bool, now: Timestamp) -> bool {
        let Some(wanted) = self.wanted_images(name) else {
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
        let planned = plan(node, &wanted, known, self.setup.recheck, now);
        let recheck = recheck_at(node, self.setup.recheck);
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        if runtime.pulling {
            return true;
        }
        let settled = matches!(&planned, PullPlan::Settled(Some(mark)) if node.marks.images_verified.as_ref() == Some(mark));
        if runtime.settled != settled {
            runtime.settled = settled;
            self.dirty_prefetches.extend(self.prefetches.keys().cloned());
        }
        match planned {
            PullPlan::Settled(mark) => {
                if let Some(at) = recheck.filter(|_| mark.is_some()) {
                    self.wake(at, Subject::Node(name.to_owned()));
                }
                if !self.runtime.get(name).is_some_and(|r| r.writing) {
                    self.mark(name, |marks| marks.images_verified = mark);
                }
                false
            }
            PullPlan::WaitUntil(at) => {
                self.wake(at, Subject::Node(name.to_owned()));
                false
            }
            PullPlan::Pull(images) => {
                if !node.ready {
                    return false;
                }
                self.pull_images(name, images, busy, now);
                true
            }
        }
    }

    fn pull_images(&mut self, name: &str, images: Vec<String>, busy: bool, now: Timestamp) {
        let installing = self
            .runtime
            .get(name)
            .and_then(|runtime| runtime.working)
            .is_some_and(|work| matches!(work, Work::Install | Work::Remove { .. }));
        let rested = self.runtime.get(name).and_then(|r| r.pull_not_before);
        if let Some(at) = rested.filter(|at| *at > now) {
            self.wake(at, Subject::Node(name.to_owned()));
            return;
        }
        let Some(channel) = self.channel(name) else {
            if !busy {
                self.summon(name);
            }
            return;
        };
        // A restart of containerd would break the pulls; they come after it.
        if installing || self.nodes.get(name).is_some_and(|n| n.marks.restart.is_some()) {
            return;
        }
        if self.pulls >= PULLING_NODES.max(self.nodes.len() / 10) {
            self.waiting_to_pull.insert(name.to_owned());
            return;
        }
        self.pulls += 1;
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.pulling = true;
        }
        if let Some(known) = self.pairs.get_mut(name) {
            for image in &images {
                known.pairs.insert(image.clone(), Pair::Pulling);
            }
        }
        self.all_prefetches_dirty();
        self.order_pull(name, channel, images);
    }

    /// Lets an idle agent go, and dials one that has work.
    fn keep_agent(&mut self, name: &str, has_work: bool, now: Timestamp) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let present = node.marks.agent.is_some();
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        if has_work || runtime.pulling || runtime.working.is_some() {
            runtime.idle_since = None;
            if let Some(address) = runtime.agent.wants_dial(now) {
                self.dial(name, address);
            } else if let Some(at) = runtime.agent.not_before.filter(|at| *at > now) {
                self.wake(at, Subject::Node(name.to_owned()));
            }
        } else if present && !runtime.writing {
            let since = *runtime.idle_since.get_or_insert(now);
            let leaves = since + self.setup.linger;
            if leaves > now {
                self.wake(leaves, Subject::Node(name.to_owned()));
            } else {
                info!(node = name, "the agent is dismissed");
                self.mark(name, |marks| marks.agent = None);
            }
        }
    }

    fn summon(&mut self, name: &str) {
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
    fn mark(&mut self, name: &str, change: impl FnOnce(&mut Marks)) {
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

    fn channel(&self, name: &str) -> Option<Channel> {
        self.runtime.get(name)?.agent.channel.clone()
    }

    fn note(&self, name: &str, warning: bool, reason: &str, note: &str) {
        if let Some(node) = self.nodes.get(name) {
            self.notices.of_node(node, warning, reason, note);
        }
    }

    /// An order came to its end. What it means for the node's marks is owed until it is written.
    pub(super) fn finished(&mut self, name: &str, work: Work, outcome: &Outcome) {
        self.setup.metrics.count_order(work, outcome);
        self.dirty_nodes.insert(name.to_owned());
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.working = None;
        let now = Timestamp::now();
        match outcome {
            Outcome::Done { .. } => info!(node = name, ?work, "done"),
            Outcome::Failed {
                reason,
                message,
                stage,
                rolled_back,
            } => warn!(
                node = name,
                ?work,
                reason = reason.camel_case(),
                stage = stage.word(),
                rolled_back,
                message,
                "failed"
            ),
            Outcome::Lost => {
                runtime.agent.channel = None;
                runtime.agent.failed(now);
            }
        }
        if matches!(work, Work::Install | Work::Remove { .. }) && *outcome != Outcome::Lost {
            runtime.restarted_at = Some(now);
        }
        runtime.owed = Some(Owed {
            work,
            outcome: outcome.clone(),
        });
    }

    /// Writes what the end of an order asks for. The attempt is remembered once there is nothing to write.
    fn pay(&mut self, name: &str, owed: &Owed, now: Timestamp) {
        let Some(node) = self.nodes.get(name) else {
            return;
        };
        let spec_hash = self.setup.spec_hash.clone();
        let runtime = self.runtime.entry(name.to_owned()).or_default();
        let (marks, attempt) = conclude(node, owed.work, &owed.outcome, &spec_hash, &runtime.attempt, now);
        let node = node.clone();
        if !self.write_marks(name, &marks) {
            self.paid(name, attempt);
        } else if let Some(runtime) = self.runtime.get_mut(name) {
            // Written with the attempt that was current: it must not grow again when the write is repeated.
            runtime.pending_attempt = Some(attempt);
        }
        if self.runtime.get(name).is_some_and(|r| r.noticed) {
            return;
        }
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.noticed = true;
        }
        self.tell(&node, owed);
    }

    fn paid(&mut self, name: &str, attempt: crate::node::Attempt) {
        if let Some(runtime) = self.runtime.get_mut(name) {
            runtime.owed = None;
            runtime.noticed = false;
            runtime.pending_attempt = None;
            runtime.attempt = attempt;
        }
        self.dirty_nodes.insert(name.to_owned());
        // The budget may have become free for others.
        self.dirty_nodes.extend(self.asking.iter().cloned());
    }

    fn tell(&self, node: &NodeFacts, owed: &Owed) {
        let (warning, reason, note) = match (&owed.outcome, owed.work) {
            (Outcome::Done { .. }, Work::Install) => (
                false,
                "Provisioned".to_owned(),
                "a WebAssembly module ran through the handler crun; the node takes Wasm pods".to_owned(),
            ),
            (Outcome::Done { .. }, Work::Verify) => (
                false,
                "Verified".to_owned(),
                "a WebAssembly module ran through the handler crun".to_owned(),
            ),
            (Outcome::Done { .. }, Work::Remove { .. }) => (
                false,
                "Unprovisioned".to_owned(),
                "crun with WasmEdge was removed; containerd's configuration is as it was".to_owned(),
            ),
            (
                Outcome::Failed {
                    reason: FailureReason::HandlerInUse,
                    message,
                    ..
                },
                _,
            ) => (true, "RemovalBlocked".to_owned(), message.clone()),
            (
                Outcome::Failed {
                    reason,
                    message,
                    rolled_back,
                    ..
                },
                _,
            ) => {
                let prefix = if *rolled_back { "rolled back: " } else { "" };
                (true, reason.camel_case(), format!("{prefix}{message}"))
            }
            (Outcome::Done { .. }, Work::PrepareInstall | Work::PrepareRemove) | (Outcome::Lost, _) => return,
        };
        self.notices.of_node(node, warning, &reason, &note);
    }

    pub(super) fn node_written(&mut self, name: &str, result: Result<NodeFacts, WriteError>) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        runtime.writing = false;
        self.dirty_nodes.insert(name.to_owned());
        match result {
            Ok(facts) => {
                if runtime.owed.is_some() {
                    let attempt = runtime.pending_attempt.take().unwrap_or_default();
                    self.paid(name, attempt);
                }
                // The answer is newer than what the watch has brought so far.
                if self.nodes.contains_key(name) {
                    self.nodes.insert(name.to_owned(), facts);
                }
                self.dirty_nodes.extend(self.asking.iter().cloned());
            }
            // The watch brings what there is now, and the decision is made on that.
            Err(WriteError::Gone) => {
                runtime.write_not_before = Some(Timestamp::now() + SignedDuration::from_millis(200))
            }
            Err(WriteError::Failed(error)) => {
                error!(
                    node = name,
                    error, "marks could not be written; it is tried again"
                );
                runtime.write_not_before = Some(Timestamp::now() + WRITE_PAUSE);
            }
        }
    }

    pub(super) fn agent_changed(&mut self, change: Change<String, AgentPod>) {
        match change {
            Change::Set(name, pod) => {
                if pod.node.is_empty() {
                    return;
                }
                let node = pod.node.clone();
                let runtime = self.runtime.entry(node.clone()).or_default();
                let this = (name, pod.uid.clone());
                let current = runtime.agent.pod.as_ref() == Some(&this);
                if pod.ending {
                    if current {
                        runtime.agent.replace_pod(None);
                    }
                } else {
                    if !current {
                        runtime.agent.replace_pod(Some(this));
                    }
                    runtime.agent.trouble = pod.trouble;
                    if let Some(ip) = pod.ip {
                        runtime.agent.address = Some(SocketAddr::new(ip, COMMAND_PORT));
                    }
                }
                self.dirty_nodes.insert(node);
            }
            Change::Gone(name) => {
                let node = self.runtime.iter().find_map(|(node, runtime)| {
                    let pod = runtime.agent.pod.as_ref()?;
                    (pod.0 == name).then(|| node.clone())
                });
                if let Some(node) = node {
                    self.runtime
                        .entry(node.clone())
                        .or_default()
                        .agent
                        .replace_pod(None);
                    self.dirty_nodes.insert(node);
                }
            }
            Change::Reset(all) => {
                self.synced.agents = true;
                let gone: Vec<String> = self
                    .runtime
                    .values()
                    .filter_map(|runtime| runtime.agent.pod.as_ref().map(|(name, _)| name.clone()))
                    .filter(|name| !all.contains_key(name))
                    .collect();
                for name in gone {
                    self.agent_changed(Change::Gone(name));
                }
                for (name, pod) in all {
                    self.agent_changed(Change::Set(name, pod));
                }
            }
        }
    }

    /// An agent has just enrolled and is about to take commands.
    pub(super) fn arrived(&mut self, arrival: Arrival) {
        let runtime = self.runtime.entry(arrival.node.clone()).or_default();
        let known = runtime
            .agent
            .pod
            .as_ref()
            .is_some_and(|(_, uid)| *uid == arrival.pod_uid);
        if !known {
            // The watch of pods has not told of it yet, and will bring its name.
            runtime.agent.replace_pod(Some((String::new(), arrival.pod_uid)));
        }
        runtime.agent.address = Some(arrival.address);
        runtime.agent.pause = None;
        runtime.agent.not_before = None;
        self.dirty_nodes.insert(arrival.node);
    }

    pub(super) fn linked(&mut self, name: &str, pod_uid: &str, result: Result<Channel, String>) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        let of_this_pod = runtime.agent.pod.as_ref().is_some_and(|(_, uid)| uid == pod_uid);
        if !of_this_pod {
            return;
        }
        runtime.agent.dialling = false;
        match result {
            Ok(channel) => {
                debug!(node = name, "the agent is reached");
                runtime.agent.channel = Some(channel);
                runtime.agent.pause = None;
                runtime.agent.not_before = None;
            }
            Err(error) => {
                debug!(node = name, error, "the agent is not reached yet");
                runtime.agent.failed(Timestamp::now());
            }
        }
        self.dirty_nodes.insert(name.to_owned());
    }

    /// A line in the log for each stage: the agent and its own log are gone when someone asks.
    pub(super) fn stage(&mut self, name: &str, work: Work, event: &StageEvent) {
        match event {
            StageEvent::Finished(stage) => {
                let took = stage.took.and_then(|t| std::time::Duration::try_from(t).ok());
                info!(
                    node = name,
                    ?work,
                    stage = stage.stage().word(),
                    took_ms = took.unwrap_or_default().as_millis(),
                    summary = stage.summary,
                    "stage done"
                );
            }
            StageEvent::Done(done) => {
                let gap = done
                    .socket_gap
                    .and_then(|t| std::time::Duration::try_from(t).ok());
                info!(
                    node = name,
                    ?work,
                    restarted = done.restarted,
                    socket_gap_ms = gap.map(|gap| gap.as_millis()),
                    "reported done"
                );
            }
            StageEvent::Started(_) | StageEvent::Failed(_) => {}
        }
    }

    pub(super) fn pull_ended(&mut self, name: &str, lost: bool) {
        self.pulls = self.pulls.saturating_sub(1);
        let runtime: &mut NodeRuntime = self.runtime.entry(name.to_owned()).or_default();
        runtime.pulling = false;
        if lost {
            warn!(
                node = name,
                "the stream of a pull was lost; what is missing is ordered again"
            );
            runtime.pull_not_before = Some(Timestamp::now() + PULL_PAUSE);
            runtime.agent.channel = None;
        }
        if let Some(known) = self.pairs.get_mut(name) {
            known.pairs.retain(|_, pair| *pair != Pair::Pulling);
        }
        self.dirty_nodes.insert(name.to_owned());
        self.dirty_nodes.extend(std::mem::take(&mut self.waiting_to_pull));
        self.all_prefetches_dirty();
    }
}
