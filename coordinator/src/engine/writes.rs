//! Effect: writes to the API server. Each compares first, in the decision; none can create an object.

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use super::input::Input;
use super::{Engine, Key};
use crate::node::{Marks, NodeFacts, Seen, Version, Writes};
use crate::prefetch::{Prefetch, PrefetchStatus};

/// Why a write was not done.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The object is gone or another; an input of its feed says more.
    Gone,
    /// Anything else; it is tried again.
    Failed(String),
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        match &error {
            // 422 is a JSON patch whose test did not hold.
            kube::Error::Api(status) if matches!(status.code, 404 | 409 | 422) => Self::Gone,
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl Engine {
    /// Brings marks onto a Node; the answer comes back as an input. Returns false when nothing differs.
    pub(super) fn write_marks(&mut self, name: &str, wanted: &Marks) -> bool {
        let Some(node) = self.nodes.get(name) else {
            return false;
        };
        let version = node.version.text();
        let seen = Seen {
            taints: &node.taints,
            version: &version,
        };
        let writes = node.marks.writes_to(wanted, &node.uid, &seen);
        if writes.is_empty() {
            return false;
        }
        self.runtime.entry(name.to_owned()).or_default().writing = true;
        let (client, inputs, name) = (self.setup.client.clone(), self.inputs.clone(), name.to_owned());
        self.setup.metrics.count_write("node");
        self.tasks.spawn(async move {
            let result = write_node(client, &name, writes).await;
            let _ = inputs.send(Input::NodeWritten { node: name, result }).await;
        });
        true
    }

    /// Writes the status of a Prefetch; the answer comes back as an input.
    pub(super) fn write_status(&mut self, key: &Key, status: PrefetchStatus) {
        self.status.entry(key.clone()).or_default().writing = true;
        let api: Api<Prefetch> = Api::namespaced(self.setup.client.clone(), &key.0);
        let (inputs, key) = (self.inputs.clone(), key.clone());
        self.setup.metrics.count_write("prefetch");
        self.tasks.spawn(async move {
            let patch = Patch::Merge(json!({"status": status}));
            let result = api
                .patch_status(&key.1, &PatchParams::default(), &patch)
                .await
                .map(|prefetch| {
                    let version = Version::read(&prefetch.metadata);
                    (prefetch.status.unwrap_or_default(), version)
                })
                .map_err(WriteError::from);
            let _ = inputs.send(Input::StatusWritten { key, result }).await;
        });
    }
}

async fn write_node(client: kube::Client, name: &str, writes: Writes) -> Result<NodeFacts, WriteError> {
    let nodes: Api<Node> = Api::all(client);
    let mut last = None;
    let status = async |last: &mut Option<Node>| -> Result<(), WriteError> {
        if let Some(status) = &writes.status {
            let params = PatchParams {
                field_manager: Some("quartermaster-condition".to_owned()),
                ..PatchParams::default()
            };
            *last = Some(
                nodes
                    .patch_status(name, &params, &Patch::Strategic(status))
                    .await?,
            );
        }
        Ok(())
    };
    let metadata = async |last: &mut Option<Node>| -> Result<(), WriteError> {
        if let Some(metadata) = &writes.metadata {
            let merge = PatchParams::default();
            *last = Some(nodes.patch(name, &merge, &Patch::Merge(metadata)).await?);
        }
        Ok(())
    };
    let taints = async |last: &mut Option<Node>| -> Result<(), WriteError> {
        if let Some(taints) = &writes.taints {
            let patch: json_patch::Patch = serde_json::from_value(taints.clone())
                .map_err(|error| WriteError::Failed(error.to_string()))?;
            let json = PatchParams::default();
            *last = Some(nodes.patch(name, &json, &Patch::Json::<()>(patch)).await?);
        }
        Ok(())
    };
    if writes.taints_first {
        taints(&mut last).await?;
    }
    if writes.status_first {
        status(&mut last).await?;
        metadata(&mut last).await?;
    } else {
        metadata(&mut last).await?;
        status(&mut last).await?;
    }
    if !writes.taints_first {
        taints(&mut last).await?;
    }
    last.as_ref().map(NodeFacts::read).ok_or(WriteError::Gone)
}
