//! The life of a node: what is wanted of it, what is observed, and the one step that comes next.

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::v1::FailureReason;

use super::facts::NodeFacts;
use super::marks::{Marks, Restart, RestartKind};
use crate::reason;

/// How long a summoned agent may take to come before the node's condition says so.
const ARRIVAL: SignedDuration = SignedDuration::from_secs(120);

/// Everything that a decision about a node rests on.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The Node as it is.
    pub node: &'a NodeFacts,
    /// Every node is wanted, but those annotated `false`.
    pub auto_provision: bool,
    /// What nodes are provisioned with now.
    pub spec_hash: &'a str,
    /// An agent of the node takes commands.
    pub agent_ready: bool,
    /// Since when the agent has been awaited, and what its pod says is wrong.
    pub awaited: Option<(Timestamp, Option<&'a str>)>,
    /// How the last attempt ended, if it was not the end of the matter.
    pub attempt: &'a Attempt,
    /// The rollout lets this node restart its containerd now.
    pub turn: bool,
    /// Everything of ours is being removed from the cluster, whatever annotations say.
    pub removing: bool,
    /// Another operator provisions nodes too; with its name and what to do.
    pub other: Option<&'a str>,
    /// The kubelet has not named our handler for a while.
    pub drifted: bool,
    /// After how long what was verified is verified again.
    pub recheck: SignedDuration,
    /// The time.
    pub now: Timestamp,
}

impl Situation<'_> {
    fn wants_provisioning(&self) -> bool {
        !self.removing && wants_provisioning(self.node.intent.as_deref(), self.auto_provision)
    }
}

/// What is remembered of the attempts at a node in this process. Losing it costs one more look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attempt {
    /// All that disturbs nobody was done for this restart.
    pub prepared: Option<RestartKind>,
    /// When and after how many failures to try again.
    pub retry: Option<Retry>,
}

/// When a failed attempt is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Failures in a row.
    pub failures: u32,
    /// Not before this time.
    pub not_before: Timestamp,
}

impl Retry {
    /// The pause after one more failure: 10 s, doubled each time, 10 min at most.
    pub fn after(previous: Option<Retry>, now: Timestamp) -> Self {
        let failures = previous.map_or(0, |r| r.failures) + 1;
        let seconds = (10_i64 << (failures - 1).min(6)).min(600);
        Self {
            failures,
            not_before: now + SignedDuration::from_secs(seconds),
        }
    }
}

/// The next step of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeStep {
    /// Nobody wants anything of it.
    Nothing,
    /// It is as it should be; it is looked at again then.
    Trusted(Timestamp),
    /// It has work and no agent.
    Summon,
    /// Its agent was summoned and is on its way; with a reason once it is overdue.
    AwaitAgent(Option<String>),
    /// Bring these marks onto the node; decide again when they are there.
    Mark(Box<Marks>),
    /// Order this of its agent.
    Order(Work, String),
    /// All is prepared; its restart waits for the rollout.
    AwaitTurn,
    /// It is not Ready for a reason of its own; an edge wakes it.
    AwaitReady,
    /// It failed, or its handler is in use; try again then.
    WaitUntil(Timestamp),
    /// It cannot be served, and its condition says why.
    Refused,
}

impl NodeStep {
    /// Nothing of the runtime is under way on the node, or waits for its turn; an agent that is overdue counts for nothing.
    pub fn is_rest(&self) -> bool {
        matches!(
            self,
            Self::Nothing
                | Self::Trusted(_)
                | Self::AwaitReady
                | Self::AwaitAgent(Some(_))
                | Self::WaitUntil(_)
                | Self::Refused
        )
    }
}

/// What an agent is ordered to do about the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// All of an installation that disturbs nobody.
    PrepareInstall,
    /// The installation.
    Install,
    /// Run a module, change nothing.
    Verify,
    /// All of a removal that disturbs nobody; it fails while the handler is in use.
    PrepareRemove,
    /// The removal, over the heads of those who use the handler when `force`.
    Remove {
        /// Somebody asked for it by annotation.
        force: bool,
    },
}

impl Work {
    /// One word for a person.
    pub fn word(self) -> &'static str {
        match self {
            Self::PrepareInstall => "Prepare",
            Self::Install => "Install",
            Self::Verify => "Verify",
            Self::PrepareRemove => "PrepareRemoval",
            Self::Remove { .. } => "Remove",
        }
    }
}

/// Whether the node is to be able to run Wasm pods.
pub fn wants_provisioning(intent: Option<&str>, auto_provision: bool) -> bool {
    match intent {
        Some("true") => true,
        Some("false") => false,
        _ => auto_provision,
    }
}

/// The next step of a node on which no command and no write is under way. `new_id` is taken for a new command.
pub fn decide(s: &Situation<'_>, new_id: &str) -> NodeStep {
    let marks = &s.node.marks;
    let step = if s.wants_provisioning() {
        decide_wanted(s, new_id)
    } else if marks.any_of_provisioning() {
        decide_unwanted(s, new_id)
    } else {
        NodeStep::Nothing
    };
    fenced(s, step)
}

/// Sees to the fence before anything else is done.
fn fenced(s: &Situation<'_>, step: NodeStep) -> NodeStep {
    let node = s.node;
    if let NodeStep::Mark(mut marks) = step {
        marks.set_fence(&node.boot_id, &node.machine_id);
        return NodeStep::Mark(marks);
    }
    let mut marks = node.marks.clone();
    if marks.crun.is_some() && (s.drifted || !node.is_verified()) && marks.condition_is_true() {
        // It was so in another boot, or before the handler went: nobody knows now.
        marks.set_condition(
            false,
            reason::VERIFYING,
            "it is being seen whether Wasm still runs",
            s.now,
        );
    }
    marks.set_fence(&node.boot_id, &node.machine_id);
    if marks == node.marks {
        step
    } else {
        NodeStep::Mark(Box::new(marks))
    }
}

fn decide_wanted(s: &Situation<'_>, new_id: &str) -> NodeStep {
    let node = s.node;
    let marks = &node.marks;
    if let Some((reason, message)) = unservable(node) {
        return refuse(s, &reason.camel_case(), &message);
    }
    let ours = marks.spec_hash.as_deref() == Some(s.spec_hash) && marks.restart.is_none();
    let verified = ours && node.is_verified() && !s.drifted;
    if verified && (!marks.has_ready_labels(&node.name) || is_removal_reason(marks)) {
        let mut marks = marks.clone();
        marks.set_ready_labels(&node.name);
        marks.set_condition(true, reason::PROVISIONED, RUNS, s.now);
        return NodeStep::Mark(Box::new(marks));
    }
    let trusted_until = marks.condition.as_ref().map(|c| c.checked + s.recheck);
    if let Some(until) = trusted_until.filter(|until| verified && *until > s.now) {
        return NodeStep::Trusted(until);
    }
    // What is under way goes on to its end; nothing is begun beside another.
    if let Some(other) = s.other.filter(|_| marks.restart.is_none()) {
        let works = marks.condition_is_true() && node.is_verified() && !s.drifted;
        return if works {
            NodeStep::Refused
        } else {
            refuse(s, reason::ANOTHER_OPERATOR, other)
        };
    }
    if s.attempt.retry.is_none() && refused_before(marks) {
        return NodeStep::Refused;
    }
    if let Some(step) = not_now(s) {
        return step;
    }
    if let Some(restart) = &marks.restart {
        return match restart.kind {
            RestartKind::Install => NodeStep::Order(Work::Install, restart.id.clone()),
            // It was wanted again in the middle of its removal: the end of that first, so that one
            // command at a time touches the node.
            RestartKind::Remove => NodeStep::Order(
                Work::Remove {
                    force: node.force_removal,
                },
                restart.id.clone(),
            ),
        };
    }
    let same_machine = marks.verified_machine.as_deref() == Some(&node.machine_id);
    let was_good = marks
        .condition
        .as_ref()
        .is_some_and(|c| c.status || c.reason == reason::VERIFYING);
    if ours && same_machine && was_good {
        return NodeStep::Order(Work::Verify, new_id.to_owned());
    }
    if s.turn {
        let mut marks = marks.clone();
        marks.restart = Some(Restart {
            kind: RestartKind::Install,
            id: new_id.to_owned(),
        });
        if !marks.condition.as_ref().is_some_and(|c| c.status) {
            marks.set_condition(
                false,
                reason::INSTALLING,
                "crun with WasmEdge is being installed",
                s.now,
            );
        }
        return NodeStep::Mark(Box::new(marks));
    }
    if s.attempt.prepared == Some(RestartKind::Install) {
        return NodeStep::AwaitTurn;
    }
    NodeStep::Order(Work::PrepareInstall, new_id.to_owned())
}

fn decide_unwanted(s: &Situation<'_>, new_id: &str) -> NodeStep {
    let node = s.node;
    let marks = &node.marks;
    if node.os != "linux" || node.is_virtual || marks.only_waited() {
        return NodeStep::Mark(Box::new(marks.without_provisioning()));
    }
    if let Some(step) = not_now(s) {
        return step;
    }
    let force = node.force_removal;
    match &marks.restart {
        Some(restart) if restart.kind == RestartKind::Install => {
            // Its installation may be under way: the same command again attaches to it, or ends it.
            NodeStep::Order(Work::Install, restart.id.clone())
        }
        Some(restart) => NodeStep::Order(Work::Remove { force }, restart.id.clone()),
        None if s.attempt.prepared != Some(RestartKind::Remove) => {
            NodeStep::Order(Work::PrepareRemove, new_id.to_owned())
        }
        None if s.turn => {
            // The labels stay until all is done: only the fence keeps new pods away.
            let mut marks = marks.clone();
            marks.restart = Some(Restart {
                kind: RestartKind::Remove,
                id: new_id.to_owned(),
            });
            marks.set_condition(
                false,
                reason::REMOVING,
                "crun with WasmEdge is being removed",
                s.now,
            );
            NodeStep::Mark(Box::new(marks))
        }
        None => NodeStep::AwaitTurn,
    }
}

pub(super) const RUNS: &str = "a WebAssembly module ran through the handler crun";

/// What keeps a node from being served at all, as far as its Node object tells.
fn unservable(node: &NodeFacts) -> Option<(FailureReason, String)> {
    let why = if node.is_virtual {
        "no pod of a DaemonSet can run on a virtual node".to_owned()
    } else if !node.os.is_empty() && node.os != "linux" {
        format!("the node runs {}, and only linux is served", node.os)
    } else if !node.runtime.is_empty() && !node.runtime.starts_with("containerd://") {
        format!(
            "the node's container runtime is {}, and only containerd is served",
            node.runtime
        )
    } else {
        return None;
    };
    Some((FailureReason::UnsupportedHost, why))
}

fn refuse(s: &Situation<'_>, reason: &str, message: &str) -> NodeStep {
    let mut marks = s.node.marks.clone();
    marks.set_condition(false, reason, message, s.now);
    if marks == s.node.marks {
        NodeStep::Refused
    } else {
        NodeStep::Mark(Box::new(marks))
    }
}

/// A refusal of the agent that only a change by an operator can lift. It is read back from the condition,
/// so that a restart of the coordinator wakes no agent for it.
fn refused_before(marks: &Marks) -> bool {
    let Some(condition) = marks.condition.as_ref().filter(|c| !c.status) else {
        return false;
    };
    [
        FailureReason::UnsupportedHost,
        FailureReason::UnsupportedConfiguration,
        FailureReason::HandlerConflict,
    ]
    .iter()
    .any(|reason| reason.camel_case() == condition.reason)
        && marks.restart.is_none()
}

fn is_removal_reason(marks: &Marks) -> bool {
    marks
        .condition
        .as_ref()
        .is_some_and(|c| c.reason == reason::REMOVAL_BLOCKED)
}

/// What stands between a node that has work and an order to its agent.
fn not_now(s: &Situation<'_>) -> Option<NodeStep> {
    if let Some(retry) = s.attempt.retry.filter(|r| r.not_before > s.now) {
        return Some(NodeStep::WaitUntil(retry.not_before));
    }
    // A restart that we ordered may be why it is not Ready; everything else waits for its own end.
    if !s.node.ready && s.node.marks.restart.is_none() {
        return Some(NodeStep::AwaitReady);
    }
    if s.agent_ready {
        return None;
    }
    Some(match s.awaited {
        None => NodeStep::Summon,
        Some((since, trouble)) if s.now.duration_since(since) >= ARRIVAL => {
            NodeStep::AwaitAgent(Some(format!(
                "no agent has come to the node within {} s: {}",
                ARRIVAL.as_secs(),
                trouble.unwrap_or("its pod was not started")
            )))
        }
        Some(_) => NodeStep::AwaitAgent(None),
    })
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
