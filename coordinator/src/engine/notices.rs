//! Effect: Events, for who describes a Node or a Prefetch.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tracing::debug;

use crate::node::NodeFacts;
use crate::others::DeploymentFacts;
use crate::prefetch::PrefetchFacts;

/// Events that wait to be written; more are dropped, since an Event is no place for truth.
const QUEUE: usize = 256;
/// The API server's bound on a note.
const NOTE: usize = 1024;

/// Publishes Events in the background.
pub(super) struct Notices {
    queue: mpsc::Sender<(Event, ObjectReference)>,
}

impl Notices {
    pub(super) fn new(client: kube::Client, pod: &str) -> Self {
        let (queue, mut waiting) = mpsc::channel::<(Event, ObjectReference)>(QUEUE);
        let reporter = Reporter {
            controller: "quartermaster".into(),
            instance: Some(pod.to_owned()),
        };
        tokio::spawn(async move {
            let recorder = Recorder::new(client, reporter);
            while let Some((event, object)) = waiting.recv().await {
                if let Err(error) = recorder.publish(&event, &object).await {
                    debug!(%error, "an Event could not be written");
                }
            }
        });
        Self { queue }
    }

    pub(super) fn of_node(&self, node: &NodeFacts, warning: bool, reason: &str, note: &str) {
        let object = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(node.name.clone()),
            // kubectl describe looks for a Node's Events by its name as uid, as kubelets write them.
            uid: Some(node.name.clone()),
            ..ObjectReference::default()
        };
        self.publish(object, warning, reason, "Provision", note);
    }

    pub(super) fn of_prefetch(&self, prefetch: &PrefetchFacts, warning: bool, reason: &str, note: &str) {
        let object = ObjectReference {
            api_version: Some("cache.techsquad.rocks/v1".into()),
            kind: Some("Prefetch".into()),
            name: Some(prefetch.name.clone()),
            namespace: Some(prefetch.namespace.clone()),
            uid: Some(prefetch.uid.clone()),
            ..ObjectReference::default()
        };
        self.publish(object, warning, reason, "Prefetch", note);
    }

    pub(super) fn of_deployment(&self, deployment: &DeploymentFacts, reason: &str, action: &str, note: &str) {
        let object = ObjectReference {
            api_version: Some("apps/v1".into()),
            kind: Some("Deployment".into()),
            name: Some(deployment.name.clone()),
            namespace: Some(deployment.namespace.clone()),
            uid: Some(deployment.uid.clone()),
            ..ObjectReference::default()
        };
        self.publish(object, true, reason, action, note);
    }

    fn publish(&self, object: ObjectReference, warning: bool, reason: &str, action: &str, note: &str) {
        let mut note = note.to_owned();
        while note.len() > NOTE {
            note.pop();
        }
        let event = Event {
            type_: if warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: reason.into(),
            note: Some(note),
            action: action.into(),
            secondary: None,
        };
        let _ = self.queue.try_send((event, object));
    }
}
