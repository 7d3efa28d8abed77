//! The workloads that Prefetches follow: each kind is watched only while one needs it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::{watcher, watcher as watch};
use serde::de::DeserializeOwned;
use tokio::task::AbortHandle;

use super::feeds::pump;
use super::input::{Change, Input};
use super::{Engine, Key};
use crate::prefetch::{Workload, WorkloadFacts, WorkloadKind};

/// What is known of the workloads of each kind that is watched.
#[derive(Debug, Default)]
pub(super) struct Workloads {
    kinds: HashMap<WorkloadKind, Watched>,
}

#[derive(Debug)]
struct Watched {
    feed: AbortHandle,
    /// `None` while they are being listed.
    known: Option<BTreeMap<Key, WorkloadFacts>>,
}

impl Workloads {
    /// Whether all workloads of a kind are known.
    pub(super) fn knows(&self, kind: WorkloadKind) -> bool {
        self.kinds
            .get(&kind)
            .is_some_and(|watched| watched.known.is_some())
    }

    /// Those of a kind, in the order of namespace and name.
    pub(super) fn of(&self, kind: WorkloadKind) -> impl Iterator<Item = &WorkloadFacts> {
        self.kinds
            .get(&kind)
            .and_then(|watched| watched.known.as_ref())
            .into_iter()
            .flat_map(BTreeMap::values)
    }

    /// Takes a change in; says whether anything differs.
    fn take(&mut self, kind: WorkloadKind, change: Change<Key, WorkloadFacts>) -> bool {
        // What still comes of a feed that was ended a moment ago is not needed any more.
        let Some(watched) = self.kinds.get_mut(&kind) else {
            return false;
        };
        match change {
            Change::Reset(all) => {
                let differs = watched.known.as_ref() != Some(&all);
                watched.known = Some(all);
                differs
            }
            Change::Set(key, facts) => {
                let known = watched.known.get_or_insert_default();
                if known.get(&key) == Some(&facts) {
                    return false;
                }
                known.insert(key, facts);
                true
            }
            Change::Gone(key) => watched
                .known
                .as_mut()
                .is_some_and(|known| known.remove(&key).is_some()),
        }
    }
}

impl Engine {
    pub(super) fn workload_changed(&mut self, kind: WorkloadKind, change: Change<Key, WorkloadFacts>) {
        if !self.workloads.take(kind, change) {
            return;
        }
        let followers: Vec<Key> = self
            .prefetches
            .iter()
            .filter(|(_, prefetch)| prefetch.kinds().any(|followed| followed == kind))
            .map(|(key, _)| key.clone())
            .collect();
        for key in followers {
            self.resolve_anew(&key);
        }
    }

    /// Begins and ends watches as Prefetches need them.
    pub(super) fn keep_workload_feeds(&mut self) {
        let needed: HashSet<WorkloadKind> = self
            .prefetches
            .values()
            .flat_map(|prefetch| prefetch.kinds())
            .collect();
        self.workloads.kinds.retain(|kind, watched| {
            let keep = needed.contains(kind);
            if !keep {
                watched.feed.abort();
            }
            keep
        });
        for kind in needed {
            if !self.workloads.kinds.contains_key(&kind) {
                let feed = self.follow(kind);
                self.workloads.kinds.insert(kind, Watched { feed, known: None });
            }
        }
    }

    fn follow(&mut self, kind: WorkloadKind) -> AbortHandle {
        match kind {
            WorkloadKind::Deployment => self.follow_all::<Deployment>(kind),
            WorkloadKind::StatefulSet => self.follow_all::<StatefulSet>(kind),
            WorkloadKind::DaemonSet => self.follow_all::<DaemonSet>(kind),
            WorkloadKind::ReplicaSet => self.follow_all::<ReplicaSet>(kind),
            WorkloadKind::CronJob => self.follow_all::<CronJob>(kind),
            WorkloadKind::Job => self.follow_all::<Job>(kind),
        }
    }

    fn follow_all<W>(&mut self, kind: WorkloadKind) -> AbortHandle
    where
        W: kube::Resource<DynamicType = ()>
            + Workload
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
    {
        let api: Api<W> = Api::all(self.setup.client.clone());
        self.tasks.spawn(pump(
            watch(api, watcher::Config::default()),
            |workload: &W| {
                let key = (workload.namespace().unwrap_or_default(), workload.name_any());
                (key, WorkloadFacts::read(workload.meta(), workload))
            },
            move |change| Input::Workload(kind, change),
            self.inputs.clone(),
        ))
    }
}
