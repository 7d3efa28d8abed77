//! The engine: what the leader does. Inputs change what is known, decisions are made from that, and
//! effects carry them out and report back as inputs.
//!
//! An edge wakes it and the level decides: every input only marks what has to be decided anew. It holds
//! nothing that can't be read back from the cluster; losing it costs time and no truth.

mod agents;
mod answers;
mod control;
mod feeds;
mod gates;
mod image_reports;
mod images;
mod input;
mod nodes;
mod notices;
mod orders;
mod others;
mod outcomes;
mod prefetches;
mod pulls;
mod releases;
mod reports;
mod runtime;
mod secrets;
mod turns;
mod words;
mod workloads;
mod writes;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::v1::WatchEvent;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::control::Control;
use crate::identity::{Arrival, Dialer};
use crate::node::{NodeFacts, Policy};
use crate::prefetch::{Limits, NodePairs, PrefetchFacts, Registries, Resolved, Wanted};
use crate::report::Metrics;

pub(crate) use answers::Question;
use input::{Change, Input};
use notices::Notices;
use others::Others;
pub(crate) use pulls::PullSettings;
use reports::Reports;
pub(crate) use reports::{SHARDS, key_of, name as report_map, shard_of};
use runtime::{NodeRuntime, PrefetchRuntime};
use secrets::PullSecrets;
use words::Shared;
use workloads::Workloads;

/// Inputs that wait; a feed that is ahead of the engine is held back.
const QUEUE: usize = 4096;

/// What the engine is given.
pub(crate) struct Setup {
    /// The cluster.
    pub client: kube::Client,
    /// Where coordinator and agents run.
    pub namespace: String,
    /// Name of this pod, for Events.
    pub reporter: String,
    /// Dials agents.
    pub dialer: Arc<Dialer>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// How often the Lease has changed hands.
    pub term: u64,
    /// Provision every node but those annotated `false`.
    pub auto_provision: bool,
    /// By what rules restarts are rationed.
    pub policy: Policy,
    /// Failures in a row after which restarts stop.
    pub halt_after: u32,
    /// Agents stay where anything is wanted.
    pub parked: bool,
    /// How long a new node is kept out of service at most.
    pub gate_deadline: SignedDuration,
    /// How long an idle agent stays.
    pub linger: SignedDuration,
    /// After how long what was there is looked for again.
    pub recheck: SignedDuration,
    /// What nodes are provisioned with.
    pub spec_hash: String,
    /// Who watches what happens.
    pub watchers: broadcast::Sender<WatchEvent>,
    /// Bounds of every Prefetch.
    pub limits: Limits,
    /// Namespaces whose pull secrets may be read.
    pub secret_namespaces: Vec<String>,
    /// What holds for every pull.
    pub pulls: PullSettings,
}

/// Namespace and name.
type Key = (String, String);

/// What has to be looked at again at some time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Node(String),
    Prefetch(Key),
    /// Those who were here before.
    Others,
    /// Only the loop itself.
    Metrics,
}

/// The state of a leader.
pub(crate) struct Engine {
    setup: Setup,
    inputs: mpsc::Sender<Input>,
    tasks: JoinSet<()>,
    notices: Notices,

    nodes: BTreeMap<String, NodeFacts>,
    prefetches: BTreeMap<Key, PrefetchFacts>,
    workloads: Workloads,
    secrets: Arc<PullSecrets>,
    synced: Synced,
    control: Control,
    others: Others,
    /// People who wait for the agent of a node.
    guests: HashMap<String, Vec<oneshot::Sender<Result<Channel, String>>>>,
    reports: Reports,
    /// Failed restarts since the last one that succeeded.
    failures: u32,

    runtime: HashMap<String, NodeRuntime>,
    pairs: HashMap<String, NodePairs>,
    resolved: BTreeMap<Key, Resolved>,
    /// Images of each Prefetch beyond the bytes it may use.
    over: HashMap<Key, HashSet<Arc<str>>>,
    /// What is wanted by the same Prefetches is the same on every node.
    shared_wants: HashMap<Vec<usize>, Arc<Wanted>>,
    status: HashMap<Key, PrefetchRuntime>,
    /// What CRI reports for an image, in bytes.
    sizes: HashMap<Arc<str>, u64>,
    /// What each tag stood for when it was last resolved.
    newest: HashMap<Arc<str>, Arc<str>>,
    registries: Registries,
    /// Nodes that have an agent for the sake of the runtime, and those that wait for a place among them.
    attended: BTreeSet<String>,
    waiting_for_attendance: BTreeSet<String>,
    /// Nodes that let go of pins where nothing is wanted any more, and those that wait for it.
    releasing: BTreeSet<String>,
    waiting_to_release: BTreeSet<String>,
    /// Nodes that pull from each registry.
    pulling_from: HashMap<String, usize>,
    words: Shared<str>,
    /// Nodes that are at rest hold the same images.
    digests: Shared<[(Arc<str>, Arc<str>)]>,

    dirty_nodes: BTreeSet<String>,
    dirty_prefetches: BTreeSet<Key>,
    wakes: BTreeSet<(Timestamp, Subject)>,
    /// Nodes of which only the restart is left.
    asking: BTreeSet<String>,
    observed_at: Timestamp,
}

#[derive(Debug, Default)]
struct Synced {
    nodes: bool,
    prefetches: bool,
    agents: bool,
    control: bool,
}

/// Leads until `stop` is cancelled or a feed can't go on. `arrivals` are agents that have just enrolled.
pub(crate) async fn lead(
    setup: Setup,
    arrivals: &mut mpsc::Receiver<Arrival>,
    mut questions: mpsc::Receiver<Question>,
    stop: &CancellationToken,
) {
    let (sender, mut inputs) = mpsc::channel(QUEUE);
    let notices = Notices::new(setup.client.clone(), &setup.reporter);
    let mut engine = Engine {
        inputs: sender,
        tasks: JoinSet::new(),
        notices,
        nodes: BTreeMap::new(),
        prefetches: BTreeMap::new(),
        workloads: Workloads::default(),
        secrets: Arc::new(PullSecrets::new(
            setup.client.clone(),
            setup.secret_namespaces.clone(),
        )),
        synced: Synced::default(),
        control: Control::default(),
        others: Others::default(),
        guests: HashMap::new(),
        reports: Reports::default(),
        failures: 0,
        runtime: HashMap::new(),
        pairs: HashMap::new(),
        resolved: BTreeMap::new(),
        over: HashMap::new(),
        shared_wants: HashMap::new(),
        status: HashMap::new(),
        sizes: HashMap::new(),
        newest: HashMap::new(),
        registries: Registries::default(),
        attended: BTreeSet::new(),
        waiting_for_attendance: BTreeSet::new(),
        releasing: BTreeSet::new(),
        waiting_to_release: BTreeSet::new(),
        pulling_from: HashMap::new(),
        words: Shared::default(),
        digests: Shared::default(),
        dirty_nodes: BTreeSet::new(),
        dirty_prefetches: BTreeSet::new(),
        wakes: BTreeSet::new(),
        asking: BTreeSet::new(),
        observed_at: Timestamp::UNIX_EPOCH,
        setup,
    };
    engine.start_feeds();
    loop {
        let wait = engine.next_wake();
        tokio::select! {
            () = stop.cancelled() => return,
            Some(input) = inputs.recv() => engine.take(input),
            Some(arrival) = arrivals.recv() => engine.arrived(arrival),
            Some(question) = questions.recv() => engine.asked(question),
            Some(_) = engine.tasks.join_next(), if !engine.tasks.is_empty() => continue,
            () = tokio::time::sleep(wait) => {}
        }
        engine.setup.metrics.queue(inputs.len());
        // What has come meanwhile is decided on together.
        while let Ok(input) = inputs.try_recv() {
            engine.take(input);
        }
        engine.settle(Timestamp::now());
    }
}

impl Engine {
    fn take(&mut self, input: Input) {
        match input {
            Input::Node(change) => self.node_changed(change),
            Input::Prefetch(change) => self.prefetch_changed(change),
            Input::Control(change) => self.control_changed(change),
            Input::Operator(place, change) => self.operator_changed(place, change),
            Input::Seen { reason, words } => self.say_of_others(reason, "LookAround", &words),
            Input::Workload(kind, change) => self.workload_changed(kind, change),
            Input::Agent(change) => self.agent_changed(change),
            Input::Linked {
                node,
                pod_uid,
                result,
            } => self.linked(&node, &pod_uid, result),
            Input::Stage { node, work, event } => self.stage(&node, work, &event),
            Input::Finished {
                node,
                work,
                outcome,
                took,
            } => self.finished(&node, work, &outcome, took),
            Input::Image { node, report } => self.image(&node, report),
            Input::PullEnded { node, lost } => self.pull_ended(&node, lost),
            Input::Released { node, released } => self.released(&node, released),
            Input::Secrets { key, trouble } => self.secrets_read(&key, trouble),
            Input::NodeWritten { node, result } => self.node_written(&node, result),
            Input::StatusWritten { key, result } => self.status_written(&key, result),
        }
    }

    /// Decides everything that has changed.
    fn settle(&mut self, now: Timestamp) {
        while let Some((at, _)) = self.wakes.first() {
            if *at > now {
                break;
            }
            if let Some((_, subject)) = self.wakes.pop_first() {
                match subject {
                    Subject::Node(name) => self.dirty_nodes.insert(name),
                    Subject::Prefetch(key) => self.dirty_prefetches.insert(key),
                    Subject::Others => {
                        self.look_around();
                        continue;
                    }
                    Subject::Metrics => continue,
                };
            }
        }
        if !self.is_synced() {
            return;
        }
        self.keep_workload_feeds();
        self.settle_nodes(now);
        self.settle_prefetches(now);
        self.write_reports(now);
        self.observe(now);
    }

    fn write_reports(&mut self, now: Timestamp) {
        match self.reports.due() {
            None => {}
            Some(at) if at > now => self.wake(at, Subject::Metrics),
            Some(_) => {
                let patches = self.reports.take(now);
                let namespace = self.setup.namespace.clone();
                self.tasks
                    .spawn(reports::write(self.setup.client.clone(), namespace, patches));
            }
        }
    }

    /// Counting thousands of nodes for every input would cost more than all decisions.
    fn observe(&mut self, now: Timestamp) {
        const EVERY: SignedDuration = SignedDuration::from_secs(1);
        if now.duration_since(self.observed_at) < EVERY {
            self.wake(self.observed_at + EVERY, Subject::Metrics);
            return;
        }
        self.observed_at = now;
        self.setup
            .metrics
            .observe(self.nodes.values(), self.prefetches.values());
    }

    fn is_synced(&self) -> bool {
        let synced = &self.synced;
        synced.nodes && synced.prefetches && synced.agents && synced.control && self.others.synced()
    }

    fn wake(&mut self, at: Timestamp, subject: Subject) {
        self.wakes.insert((at, subject));
    }

    fn next_wake(&self) -> Duration {
        const LONGEST: Duration = Duration::from_secs(3600);
        // A decision may have made another one necessary.
        if self.is_synced() && !self.dirty_nodes.is_empty() {
            return Duration::ZERO;
        }
        self.wakes.first().map_or(LONGEST, |(at, _)| {
            let wait = at.duration_since(Timestamp::now());
            Duration::try_from(wait).unwrap_or(Duration::ZERO).min(LONGEST)
        })
    }

    fn all_nodes_dirty(&mut self) {
        self.dirty_nodes.extend(self.nodes.keys().cloned());
    }

    fn all_prefetches_dirty(&mut self) {
        self.dirty_prefetches.extend(self.prefetches.keys().cloned());
    }

    fn node_changed(&mut self, change: Change<String, NodeFacts>) {
        match change {
            Change::Set(name, facts) => {
                if let Some(known) = self.nodes.get_mut(&name) {
                    if facts.uid == known.uid && facts.version.is_stale_beside(known.version) {
                        return;
                    }
                    if *known == facts {
                        *known = facts;
                        return;
                    }
                }
                if self.setup.limits.nodes > 0 {
                    self.all_resolved_anew();
                }
                let made_anew = self.nodes.get(&name).is_some_and(|old| old.uid != facts.uid);
                if made_anew {
                    self.forget_node(&name);
                }
                self.nodes.insert(name.clone(), facts);
                self.dirty_nodes.insert(name);
            }
            Change::Gone(name) => {
                self.nodes.remove(&name);
                self.forget_node(&name);
            }
            Change::Reset(all) => {
                self.synced.nodes = true;
                let gone: Vec<String> = self
                    .nodes
                    .keys()
                    .filter(|name| !all.contains_key(*name))
                    .cloned()
                    .collect();
                for name in gone {
                    self.node_changed(Change::Gone(name));
                }
                for (name, facts) in all {
                    self.node_changed(Change::Set(name, facts));
                }
            }
        }
        self.all_prefetches_dirty();
    }

    fn forget_node(&mut self, name: &str) {
        self.disengage(name);
        self.disengage_from_runtime(name);
        self.leave_registries(name);
        self.runtime.remove(name);
        self.pairs.remove(name);
        self.reports.forget(name);
        self.guests.remove(name);
        self.asking.remove(name);
        self.waiting_to_release.remove(name);
        for state in self.status.values_mut() {
            state.waiting.remove(name);
        }
    }
}
