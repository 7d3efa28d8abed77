//! The engine's dealings with those who were here before: it sees them, says so, and leaves nodes to them while they
//! run.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::api::{Api, ListParams, PartialObjectMeta};
use kube::runtime::{watcher, watcher as watch};
use tracing::{info, warn};

use super::feeds::pump;
use super::input::{Change, Input};
use super::{Engine, Key, Subject};
use crate::others::{
    DeploymentFacts, KWASM_JOBS, RUNTIME_CLASSES, another_prefetcher, another_provisioner,
    foreign_runtime_class, leftover_jobs,
};
use crate::reason;

/// How often what can't be watched cheaply is looked at.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_hours(1);
/// Jobs in one answer of the API server.
const PAGE: u32 = 500;
/// Where operators are looked for, ours among them. An operator of kubebuilder's scaffold has the second label.
const PLACES: [&str; 2] = [
    "app.kubernetes.io/name in (kwasm-operator, quartermaster)",
    "control-plane=controller-manager",
];

/// What is known of them.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// Operators found in each of the places; `None` while they are being listed.
    deployments: [Option<BTreeMap<Key, DeploymentFacts>>; PLACES.len()],
    /// Why nothing is provisioned.
    pub(super) provisioner: Option<String>,
    prefetcher: Option<String>,
}

impl Others {
    fn all(&self) -> impl Iterator<Item = &DeploymentFacts> {
        self.deployments.iter().flatten().flat_map(BTreeMap::values)
    }

    /// Whether they were looked for everywhere once.
    pub(super) fn synced(&self) -> bool {
        self.deployments.iter().all(Option::is_some)
    }

    fn take(&mut self, place: usize, change: Change<Key, DeploymentFacts>) {
        let Some(known) = self.deployments.get_mut(place) else {
            return;
        };
        match change {
            Change::Reset(all) => *known = Some(all),
            Change::Set(key, facts) => {
                known.get_or_insert_default().insert(key, facts);
            }
            Change::Gone(key) => {
                known.get_or_insert_default().remove(&key);
            }
        }
    }
}

impl Engine {
    pub(super) fn start_feeds_of_others(&mut self) {
        let api: Api<Deployment> = Api::all(self.setup.client.clone());
        for (place, labels) in PLACES.into_iter().enumerate() {
            self.tasks.spawn(pump(
                watch(api.clone(), watcher::Config::default().labels(labels)),
                |deployment: &Deployment| {
                    let facts = DeploymentFacts::read(deployment);
                    ((facts.namespace.clone(), facts.name.clone()), facts)
                },
                move |change| Input::Operator(place, change),
                self.inputs.clone(),
            ));
        }
    }

    pub(super) fn operator_changed(&mut self, place: usize, change: Change<Key, DeploymentFacts>) {
        let knew = self.others.synced();
        self.others.take(place, change);
        if !self.others.synced() {
            return;
        }
        if !knew {
            self.look_around();
        }
        let provisioner = another_provisioner(self.others.all());
        if provisioner != self.others.provisioner {
            match &provisioner {
                Some(words) => self.say_of_others(reason::ANOTHER_OPERATOR, "Provision", words),
                None => {
                    info!("no other operator provisions nodes any more");
                    self.look_around();
                }
            }
            self.others.provisioner = provisioner;
            self.all_nodes_dirty();
        }
        let prefetcher = another_prefetcher(self.others.all());
        if prefetcher != self.others.prefetcher {
            if let Some(words) = &prefetcher {
                self.say_of_others(reason::ANOTHER_OPERATOR, "Prefetch", words);
            }
            self.others.prefetcher = prefetcher;
        }
    }

    /// Looks for what is asked for seldom: leftovers, and RuntimeClasses of our names.
    pub(super) fn look_around(&mut self) {
        self.wake(Timestamp::now() + LOOK_AGAIN, Subject::Others);
        let (client, inputs) = (self.setup.client.clone(), self.inputs.clone());
        self.tasks.spawn(async move {
            for (reason, words) in look(client).await {
                if inputs.send(Input::Seen { reason, words }).await.is_err() {
                    return;
                }
            }
        });
    }

    /// Says something of the cluster: in the log, and as an Event of the coordinator's own Deployment. Events that differ in
    /// nothing but their words are taken for one: `action` tells apart what may be said at once.
    pub(super) fn say_of_others(&self, reason: &str, action: &str, words: &str) {
        warn!("{words}");
        let namespace = &self.setup.namespace;
        let ours = self
            .others
            .all()
            .find(|deployment| deployment.app == "quartermaster" && deployment.namespace == *namespace);
        if let Some(ours) = ours {
            self.notices.of_deployment(ours, reason, action, words);
        }
    }
}

async fn look(client: kube::Client) -> Vec<(&'static str, String)> {
    let mut seen = Vec::new();
    let mut foreign = Vec::new();
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    for name in RUNTIME_CLASSES {
        match classes.get_opt(name).await {
            Ok(class) => foreign.extend(class.as_ref().and_then(foreign_runtime_class)),
            Err(error) => warn!(%error, "RuntimeClass {name} can't be read"),
        }
    }
    if !foreign.is_empty() {
        seen.push((reason::FOREIGN_RUNTIME_CLASS, foreign.join("; ")));
    }
    match jobs(client).await {
        Ok(jobs) => seen.extend(leftover_jobs(&jobs).map(|words| (reason::LEFTOVERS, words))),
        Err(error) => warn!(%error, "Jobs of the KWasm operator can't be looked for"),
    }
    seen
}

/// The Jobs of the KWasm operator: it makes one for each node, thousands maybe, so that only their names are asked for.
async fn jobs(client: kube::Client) -> kube::Result<Vec<Key>> {
    let api: Api<Job> = Api::all(client);
    let mut params = ListParams::default().labels(KWASM_JOBS).limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list_metadata(&params).await?;
        let key = |job: &PartialObjectMeta<Job>| (job.namespace().unwrap_or_default(), job.name_any());
        all.extend(page.items.iter().map(key));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(all),
        }
    }
}
