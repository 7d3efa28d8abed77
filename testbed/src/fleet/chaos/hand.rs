//! What happens to one node at a time.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::PATIENCE;
use crate::fleet::machine::Machine;
use crate::fleet::objects;

/// What lays hands on one node.
pub(super) struct Hand {
    pub(super) nodes: Api<Node>,
    pub(super) machine: Arc<Machine>,
    pub(super) number: usize,
    pub(super) control_plane: bool,
}

impl Hand {
    /// Does something until the API server has taken it.
    async fn until_taken<T, W>(&self, work: impl Fn() -> W)
    where
        W: Future<Output = kube::Result<T>>,
    {
        loop {
            match tokio::time::timeout(PATIENCE, work()).await {
                Ok(Ok(_)) => return,
                // It was taken, and the answer was lost.
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => return,
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    async fn patch(&self, patch: serde_json::Value) {
        let (patch, params) = (Patch::Merge(patch), PatchParams::default());
        self.until_taken(|| self.nodes.patch(&self.machine.name, &params, &patch))
            .await;
    }

    async fn patch_status(&self, patch: serde_json::Value) {
        // By type: a merge of the list would take away the conditions of others.
        let (patch, params) = (Patch::Strategic(patch), PatchParams::default());
        self.until_taken(|| self.nodes.patch_status(&self.machine.name, &params, &patch))
            .await;
    }

    pub(super) async fn annotate(&self, value: Option<&str>) {
        self.patch(json!({"metadata": {"annotations": {"kwasm.sh/kwasm-node": value}}}))
            .await;
    }

    pub(super) async fn cordon(&self, time: Duration) {
        self.patch(json!({"spec": {"unschedulable": true}})).await;
        tokio::time::sleep(time).await;
        self.patch(json!({"spec": {"unschedulable": false}})).await;
    }

    pub(super) async fn not_ready(&self, time: Duration) {
        self.patch_status(json!({"status": {"conditions": objects::conditions(false)}}))
            .await;
        tokio::time::sleep(time).await;
        self.patch_status(json!({"status": {"conditions": objects::conditions(true)}}))
            .await;
    }

    pub(super) async fn reboot(&self, time: Duration) {
        self.machine.reboot();
        tokio::time::sleep(time).await;
        self.report_boot().await;
    }

    pub(super) async fn report_boot(&self) {
        let info = json!({"bootID": self.machine.boot_id(), "machineID": self.machine.machine_id()});
        self.patch_status(json!({"status": {"nodeInfo": info}})).await;
    }

    pub(super) async fn remake(&self, time: Duration) {
        let (now, params) = (DeleteParams::default(), PostParams::default());
        self.until_taken(|| self.nodes.delete(&self.machine.name, &now))
            .await;
        self.machine.reimage();
        tokio::time::sleep(time).await;
        let Ok(node) = objects::node(&self.machine, self.number, self.control_plane) else {
            return;
        };
        self.until_taken(|| self.nodes.create(&params, &node)).await;
    }
}
