//! Sandboxes of containerd, as far as they concern us: who uses the handler, and what verifications left behind.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use k8s_cri::v1::{
    ListPodSandboxRequest, PodSandboxFilter, PodSandboxState, RemovePodSandboxRequest, StopPodSandboxRequest,
};
use tonic::Status;

use super::image;
use super::layout::RUN_DIR;
use crate::checkpoint::checkpoint;
use crate::containerd::Daemon;
use crate::host::HostRoot;

/// The label of everything that a verification makes.
const LABEL: &str = "quartermaster.internal/verify";

/// Removes sandboxes, images, leases and scratch folders that an earlier verification left behind.
pub(crate) async fn sweep(root: &HostRoot, daemon: &Daemon) {
    let filter = PodSandboxFilter {
        label_selector: labels(),
        ..Default::default()
    };
    let listed = daemon
        .runtime()
        .list_pod_sandbox(ListPodSandboxRequest { filter: Some(filter) })
        .await;
    for sandbox in listed.map(|list| list.into_inner().items).unwrap_or_default() {
        remove_sandbox(daemon, &sandbox.id).await;
    }
    image::sweep(daemon.channel()).await;
    if let Ok(run) = root.dir(RUN_DIR) {
        for name in root.list(RUN_DIR).unwrap_or_default() {
            if name.starts_with("v-") {
                let _ = run.remove_tree(&name);
            }
        }
    }
}

/// A pod that uses a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    /// `namespace/name`
    pub(crate) pod: String,
    /// Of its sandbox.
    pub(crate) sandbox: String,
    /// When its sandbox was made.
    pub(crate) created: SystemTime,
}

/// Pods whose sandbox runs under `handler`, our own verifications left out.
pub(crate) async fn users(daemon: &Daemon, handler: &str) -> Result<Vec<User>, Status> {
    let listed = daemon
        .runtime()
        .list_pod_sandbox(ListPodSandboxRequest::default())
        .await?;
    let mut users: Vec<User> = listed
        .into_inner()
        .items
        .into_iter()
        .filter(|sandbox| {
            sandbox.runtime_handler == handler
                && sandbox.state == i32::from(PodSandboxState::SandboxReady)
                && !sandbox.labels.contains_key(LABEL)
        })
        .map(|sandbox| {
            let metadata = sandbox.metadata.unwrap_or_default();
            User {
                pod: format!("{}/{}", metadata.namespace, metadata.name),
                sandbox: sandbox.id,
                created: SystemTime::UNIX_EPOCH
                    + Duration::from_nanos(u64::try_from(sandbox.created_at).unwrap_or_default()),
            }
        })
        .collect();
    users.sort_by(|left, right| left.pod.cmp(&right.pod));
    Ok(users)
}

/// Stops and removes a sandbox; one that is gone is removed.
pub(crate) async fn remove_sandbox(daemon: &Daemon, id: &str) {
    let mut runtime = daemon.runtime();
    checkpoint("stop a sandbox");
    let _ = runtime
        .stop_pod_sandbox(StopPodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        })
        .await;
    checkpoint("remove a sandbox");
    let removed = runtime
        .remove_pod_sandbox(RemovePodSandboxRequest {
            pod_sandbox_id: id.to_owned(),
        })
        .await;
    if let Err(status) = removed {
        tracing::warn!(sandbox = id, %status, "a sandbox could not be removed");
    }
}

pub(crate) fn labels() -> HashMap<String, String> {
    [(LABEL.to_owned(), "true".to_owned())].into()
}
