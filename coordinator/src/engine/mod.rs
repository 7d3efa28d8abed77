//! The engine: what the leader does. Inputs change what is known, decisions are made from that, and
//! effects carry them out and report back as inputs.
//!
//! An edge wakes it and the level decides: every input only marks what has to be decided anew. It holds
//! nothing that can't be read back from the cluster; losing it costs time and no truth.

mod agents;
mod feeds;
mod input;
mod nodes;
mod notices;
mod orders;
mod outcomes;
mod prefetches;
mod runtime;
mod writes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::identity::{Arrival, Dialer};
use crate::node::NodeFacts;
use crate::prefetch::{DeploymentFacts, NodePairs, PrefetchFacts, Resolved};
use crate::report::Metrics;

use input::{Change, Input};
use notices::Notices;
use runtime::{NodeRuntime, PrefetchRuntime};

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
    /// Restarts at once.
    pub max_unavailable: usize,
    /// How long an idle agent stays.
    pub linger: SignedDuration,
    /// After how long what was there is looked for again.
    pub recheck: SignedDuration,
    /// What nodes are provisioned with.
    pub spec_hash: String,
}

/// Namespace and name.
type Key = (String, String);

/// What has to be looked at again at some time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Node(String),
    Prefetch(Key),
}

/// The state of a leader.
pub(crate) struct Engine {
    setup: Setup,
    inputs: mpsc::Sender<Input>,
    tasks: JoinSet<()>,
    notices: Notices,

    nodes: BTreeMap<String, NodeFacts>,
    prefetches: BTreeMap<Key, PrefetchFacts>,
    /// `None` while nobody needs them or they are still being listed.
    deployments: Option<BTreeMap<Key, DeploymentFacts>>,
    deployments_feed: Option<tokio::task::AbortHandle>,
    synced: Synced,

    runtime: HashMap<String, NodeRuntime>,
    pairs: HashMap<String, NodePairs>,
    resolved: BTreeMap<Key, Resolved>,
    status: HashMap<Key, PrefetchRuntime>,

    dirty_nodes: BTreeSet<String>,
    dirty_prefetches: BTreeSet<Key>,
    wakes: BTreeSet<(Timestamp, Subject)>,
    /// Nodes of which only the restart is left, and nodes that wait for a place among those that pull.
    asking: BTreeSet<String>,
    waiting_to_pull: BTreeSet<String>,
    pulls: usize,
}

#[derive(Debug, Default)]
struct Synced {
    nodes: bool,
    prefetches: bool,
    agents: bool,
}

/// Leads until `stop` is cancelled or a feed can't go on. `arrivals` are agents that have just enrolled.
pub(crate) async fn lead(setup: Setup, arrivals: &mut mpsc::Receiver<Arrival>, stop: &CancellationToken) {
    let (sender, mut inputs) = mpsc::channel(QUEUE);
    let notices = Notices::new(setup.client.clone(), &setup.reporter);
    let mut engine = Engine {
        inputs: sender,
        tasks: JoinSet::new(),
        notices,
        nodes: BTreeMap::new(),
        prefetches: BTreeMap::new(),
        deployments: None,
        deployments_feed: None,
        synced: Synced::default(),
        runtime: HashMap::new(),
        pairs: HashMap::new(),
        resolved: BTreeMap::new(),
        status: HashMap::new(),
        dirty_nodes: BTreeSet::new(),
        dirty_prefetches: BTreeSet::new(),
        wakes: BTreeSet::new(),
        asking: BTreeSet::new(),
        waiting_to_pull: BTreeSet::new(),
        pulls: 0,
        setup,
    };
    engine.start_feeds();
    loop {
        let wait = engine.next_wake();
        tokio::select! {
            () = stop.cancelled() => return,
            Some(input) = inputs.recv() => engine.take(input),
            Some(arrival) = arrivals.recv() => engine.arrived(arrival),
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
            Input::Deployment(change) => self.deployment_changed(change),
            Input::Agent(change) => self.agent_changed(change),
            Input::Linked {
                node,
                pod_uid,
                result,
            } => self.linked(&node, &pod_uid, result),
            Input::Stage { node, work, event } => self.stage(&node, work, &event),
            Input::Finished { node, work, outcome } => self.finished(&node, work, &outcome),
            Input::Image { node, image, pair } => self.image(&node, &image, pair),
            Input::PullEnded { node, lost } => self.pull_ended(&node, lost),
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
                };
            }
        }
        if !(self.synced.nodes && self.synced.prefetches && self.synced.agents) {
            return;
        }
        self.keep_deployments_feed();
        self.settle_nodes(now);
        self.settle_prefetches(now);
        self.setup
            .metrics
            .observe(self.nodes.values(), self.prefetches.values());
    }

    fn wake(&mut self, at: Timestamp, subject: Subject) {
        self.wakes.insert((at, subject));
    }

    fn next_wake(&self) -> Duration {
        const LONGEST: Duration = Duration::from_secs(3600);
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
        if self.runtime.remove(name).is_some_and(|runtime| runtime.pulling) {
            self.pulls = self.pulls.saturating_sub(1);
        }
        self.pairs.remove(name);
        self.asking.remove(name);
        self.waiting_to_pull.remove(name);
    }
}
