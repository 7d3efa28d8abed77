//! The watches of the API server, trimmed to facts and turned into inputs.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::net::IpAddr;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::Api;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tracing::warn;

use super::Engine;
use super::input::{Change, Input};
use crate::node::NodeFacts;
use crate::prefetch::{Prefetch, PrefetchFacts};

/// Whole objects that are in memory at once while a list is read: of thousands only the facts are kept.
const PAGE: u32 = 100;
/// Labels of the agents' pods.
const AGENT_PODS: &str = "app.kubernetes.io/name=quartermaster,app.kubernetes.io/component=agent";

/// An agent's pod, trimmed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct AgentPod {
    /// Its node; empty until it is placed.
    pub node: String,
    pub uid: String,
    /// Its address while its container runs.
    pub ip: Option<IpAddr>,
    pub ending: bool,
    /// What keeps it from running.
    pub trouble: Option<String>,
}

impl AgentPod {
    fn read(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let containers = status
            .and_then(|s| s.container_statuses.as_deref())
            .unwrap_or(&[]);
        let running = containers
            .iter()
            .any(|c| c.state.as_ref().is_some_and(|state| state.running.is_some()));
        let waiting = containers.iter().find_map(|c| c.state.as_ref()?.waiting.clone());
        let unplaced = status
            .and_then(|s| s.conditions.as_deref())
            .unwrap_or(&[])
            .iter()
            .find(|c| c.type_ == "PodScheduled" && c.status == "False")
            .and_then(|c| c.message.clone());
        let trouble = waiting
            .map(|w| {
                let message = w.message.map(|m| format!(": {m}")).unwrap_or_default();
                format!("{}{message}", w.reason.unwrap_or_default())
            })
            .or(unplaced)
            .map(|text| format!("pod {}: {text}", pod.name_any()));
        Self {
            node: pod
                .spec
                .as_ref()
                .and_then(|spec| spec.node_name.clone())
                .or_else(|| daemon_node(pod))
                .unwrap_or_default(),
            uid: pod.uid().unwrap_or_default(),
            ip: status
                .and_then(|s| s.pod_ip.as_deref())
                .filter(|_| running)
                .and_then(|ip| ip.parse().ok()),
            ending: pod.metadata.deletion_timestamp.is_some()
                || matches!(
                    status.and_then(|s| s.phase.as_deref()),
                    Some("Succeeded" | "Failed")
                ),
            trouble,
        }
    }
}

/// The node for which a DaemonSet made a pod that the scheduler has not placed.
fn daemon_node(pod: &Pod) -> Option<String> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    required
        .node_selector_terms
        .iter()
        .flat_map(|term| term.match_fields.iter().flatten())
        .find(|field| field.key == "metadata.name")
        .and_then(|field| field.values.as_ref()?.first().cloned())
}

impl Engine {
    pub(super) fn start_feeds(&mut self) {
        self.start_control_feed();
        self.start_feeds_of_others();
        let client = &self.setup.client;
        let pods: Api<Pod> = Api::namespaced(client.clone(), &self.setup.namespace);
        self.tasks.spawn(pump(
            watch(Api::<Node>::all(client.clone()), in_pages()),
            |node| (node.name_any(), NodeFacts::read(node)),
            Input::Node,
            self.inputs.clone(),
        ));
        self.tasks.spawn(pump(
            // One object that can't be read must not end the watch of all the others.
            watch(
                Api::<DeserializeGuard<Prefetch>>::all(client.clone()),
                watcher::Config::default(),
            ),
            |prefetch| {
                let facts = match &prefetch.0 {
                    Ok(prefetch) => PrefetchFacts::read(prefetch),
                    Err(invalid) => PrefetchFacts::broken(&invalid.metadata, &invalid.error),
                };
                ((facts.namespace.clone(), facts.name.clone()), facts)
            },
            Input::Prefetch,
            self.inputs.clone(),
        ));
        self.tasks.spawn(pump(
            watch(pods, in_pages().labels(AGENT_PODS)),
            |pod| (pod.name_any(), AgentPod::read(pod)),
            Input::Agent,
            self.inputs.clone(),
        ));
    }
}

fn in_pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// Carries one watch into the engine until either ends. A watch that is lost is listed anew, after a
/// pause that grows.
pub(super) async fn pump<K, Id, Facts>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
    read: impl Fn(&K) -> (Id, Facts),
    wrap: impl Fn(Change<Id, Facts>) -> Input,
    inputs: mpsc::Sender<Input>,
) where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    Id: Ord + Hash,
{
    let mut listed = BTreeMap::new();
    let mut events = std::pin::pin!(events.default_backoff());
    while let Some(event) = events.next().await {
        let change = match event {
            Ok(Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(Event::InitApply(object)) => {
                let (id, facts) = read(&object);
                listed.insert(id, facts);
                continue;
            }
            Ok(Event::InitDone) => Change::Reset(std::mem::take(&mut listed)),
            Ok(Event::Apply(object)) => {
                let (id, facts) = read(&object);
                Change::Set(id, facts)
            }
            Ok(Event::Delete(object)) => Change::Gone(read(&object).0),
            Err(error) => {
                warn!(%error, "a watch was lost and is being taken up again");
                continue;
            }
        };
        if inputs.send(wrap(change)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(yaml: &str) -> AgentPod {
        AgentPod::read(&serde_yaml_ng::from_str(yaml).expect("a Pod"))
    }

    #[test]
    fn an_address_counts_only_while_the_container_runs() {
        let with = |state: &str| {
            pod(&format!(
                "metadata: {{name: a, uid: u}}\nspec: {{nodeName: n, containers: []}}\nstatus: {{podIP: 10.0.0.1, containerStatuses: [{{name: agent, image: i, imageID: x, ready: false, restartCount: 0, state: {state}}}]}}"
            ))
        };
        assert_eq!(with("{running: {}}").ip, Some([10, 0, 0, 1].into()));
        let waiting = with("{waiting: {reason: ImagePullBackOff, message: no such image}}");
        assert_eq!(waiting.ip, None);
        assert_eq!(
            waiting.trouble.as_deref(),
            Some("pod a: ImagePullBackOff: no such image")
        );
    }

    #[test]
    fn an_unplaced_daemon_pod_belongs_to_the_node_it_was_made_for() {
        let unplaced = pod(
            "metadata: {name: a, uid: u}
spec:
  containers: []
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [worker-1]}]}]}}}
status: {conditions: [{type: PodScheduled, status: 'False', message: Insufficient memory}]}",
        );
        assert_eq!(unplaced.node, "worker-1");
        assert_eq!(unplaced.trouble.as_deref(), Some("pod a: Insufficient memory"));
    }
}
