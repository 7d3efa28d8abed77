//! What a fleet is made of in the API server: its Nodes, the workloads whose images are wanted, and what the coordinator
//! needs to be one of the cluster's own.

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use super::machine::Machine;
use crate::cluster::Cluster;
use crate::deployment::{NAMESPACE, manifests};

/// Requests at once.
const AT_ONCE: usize = 48;

/// The address of the machine of this number: 127.1.0.1 and upwards.
pub(super) fn address(number: usize) -> Ipv4Addr {
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 1, 0, 1)) + number)
}

/// The name of the machine of this number, in the order of names; the first `control_planes` hold a control plane.
pub(super) fn name(number: usize, control_planes: usize) -> String {
    if number < control_planes {
        format!("control-{number}")
    } else {
        format!("worker-{number:05}")
    }
}

/// Applies what a coordinator needs: namespace, definitions, accounts and rights, and no workload.
///
/// # Errors
/// If the API server refuses something.
pub(super) fn apply_base(cluster: &Cluster) -> Result<()> {
    for file in [
        "base/namespace.yaml",
        "chart/files/crd.yaml",
        "chart/files/rbac.yaml",
    ] {
        let path = manifests().join(file);
        // A definition is too large for the annotation of a client-side apply.
        let path = path.display().to_string();
        cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", &path])?;
    }
    cluster
        .kubectl(&[
            "wait",
            "--for=condition=Established",
            "crd",
            "--all",
            "--timeout=30s",
        ])
        .map(drop)
}

/// Writes a kubeconfig with the coordinator's own account and its rights; returns its path.
///
/// # Errors
/// If the API server gives no token.
pub(super) async fn coordinator_kubeconfig(client: &kube::Client, cluster: &Cluster) -> Result<PathBuf> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let request = TokenRequest {
        spec: TokenRequestSpec {
            expiration_seconds: Some(24 * 3600),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let token = accounts
        .create_token_request("quartermaster-coordinator", &PostParams::default(), &request)
        .await?
        .status
        .context("the API server gave no token")?
        .token;
    let admin: Value = serde_json::from_slice(&fs::read(cluster.kubeconfig_in_fabric())?)?;
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "fleet",
        "clusters": admin["clusters"],
        "users": [{"name": "coordinator", "user": {"token": token}}],
        "contexts": [{"name": "fleet", "context": {
            "cluster": admin["clusters"][0]["name"], "user": "coordinator", "namespace": NAMESPACE,
        }}],
    });
    let path = cluster.state().join("coordinator.kubeconfig");
    crate::pki::write(&path, &config.to_string(), 0o600)?;
    Ok(path)
}

/// A Node as a kubelet registers it.
pub(super) fn node(machine: &Machine, number: usize, control_plane: bool) -> Result<Node> {
    let zone = ["a", "b", "c"][number % 3];
    let mut labels = json!({
        "kubernetes.io/hostname": machine.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": "m6i.2xlarge",
        "topology.kubernetes.io/region": "simulated-1",
        "topology.kubernetes.io/zone": format!("simulated-1{zone}"),
        "nodepool.example.com/name": format!("pool-{}", number % 7),
    });
    let mut taints = json!([]);
    if control_plane {
        labels["node-role.kubernetes.io/control-plane"] = json!("");
        taints = json!([{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]);
    }
    let capacity = json!({
        "cpu": "8", "memory": "32617296Ki", "pods": "110", "ephemeral-storage": "83873772Ki", "hugepages-2Mi": "0",
    });
    let images: Vec<Value> = (0..20)
        .map(|n| {
            json!({
                "names": [
                    format!("registry.example.com/platform/component-{n}@sha256:{n:064x}"),
                    format!("registry.example.com/platform/component-{n}:v1.{n}.0"),
                ],
                "sizeBytes": 300_000_000 / (n + 1),
            })
        })
        .collect();
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": machine.name, "labels": labels, "annotations": {
            "node.alpha.kubernetes.io/ttl": "0",
            "volumes.kubernetes.io/controller-managed-attach-detach": "true",
        }},
        "spec": {"podCIDR": "10.244.0.0/24", "providerID": format!("simulated:///{}", machine.name), "taints": taints},
        "status": {
            "capacity": capacity, "allocatable": capacity,
            "addresses": [
                {"type": "InternalIP", "address": machine.address.to_string()},
                {"type": "Hostname", "address": machine.name},
            ],
            "conditions": conditions(true),
            "images": images,
            "nodeInfo": {
                "machineID": machine.machine_id(), "systemUUID": machine.machine_id(), "bootID": machine.boot_id(),
                "kernelVersion": "6.12.0", "osImage": "Debian GNU/Linux 13 (trixie)",
                "containerRuntimeVersion": "containerd://2.1.4", "kubeletVersion": "v1.34.4",
                "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
            },
        },
    });
    Ok(serde_json::from_value(node)?)
}

/// The conditions that a kubelet reports.
pub(super) fn conditions(ready: bool) -> Value {
    let now = time::OffsetDateTime::now_utc()
        .replace_nanosecond(0)
        .ok()
        .and_then(|now| now.format(&time::format_description::well_known::Rfc3339).ok());
    let condition = |type_: &str, holds: bool, reason: &str| {
        json!({
            "type": type_, "status": if holds { "True" } else { "False" }, "reason": reason, "message": "simulated",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        })
    };
    json!([
        condition("MemoryPressure", false, "KubeletHasSufficientMemory"),
        condition("DiskPressure", false, "KubeletHasNoDiskPressure"),
        condition("PIDPressure", false, "KubeletHasSufficientPID"),
        condition(
            "Ready",
            ready,
            if ready { "KubeletReady" } else { "KubeletNotReady" }
        ),
    ])
}

/// Makes the Nodes of all machines.
///
/// # Errors
/// If the API server refuses one.
pub(super) async fn make_nodes(
    client: &kube::Client,
    machines: &[Arc<Machine>],
    control_planes: usize,
) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    futures::stream::iter(machines.iter().enumerate())
        .map(async |(number, machine)| {
            let node = node(machine, number, number < control_planes)?;
            nodes
                .create(&PostParams::default(), &node)
                .await
                .with_context(|| format!("making the Node {}", machine.name))
        })
        .buffer_unordered(AT_ONCE)
        .try_for_each(async |_| Ok(()))
        .await
}

/// Sets the annotation `kwasm.sh/kwasm-node` of Nodes, or takes it away.
///
/// # Errors
/// If the API server refuses one.
pub(super) async fn annotate(client: &kube::Client, names: &[String], value: Option<&str>) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = json!({"metadata": {"annotations": {"kwasm.sh/kwasm-node": value}}});
    futures::stream::iter(names)
        .map(async |name| {
            nodes
                .patch(name, &PatchParams::default(), &Patch::Merge(&patch))
                .await
                .with_context(|| format!("annotating {name}"))
        })
        .buffer_unordered(AT_ONCE)
        .try_for_each(async |_| Ok(()))
        .await
}

/// The images of a set: references of one workload.
pub(super) fn images(set: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|n| format!("registry.fleet/{set}/{n:03}:1.0"))
        .collect()
}

/// A Deployment that names these images, under a label of its own name; or its new images, in one go.
///
/// # Errors
/// If the API server refuses it.
pub(super) async fn make_workload(client: &kube::Client, name: &str, images: &[String]) -> Result<()> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("apps", "v1", "Deployment"));
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &kind);
    let labels = json!({"fleet": name});
    let containers: Vec<Value> = images
        .iter()
        .enumerate()
        .map(|(n, image)| json!({"name": format!("c{n}"), "image": image}))
        .collect();
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}}},
    });
    let apply = PatchParams::apply("fleet").force();
    api.patch(name, &apply, &Patch::Apply(&deployment)).await?;
    Ok(())
}

/// The API of Prefetches.
pub(super) fn prefetches(client: &kube::Client) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("cache.techsquad.rocks", "v1", "Prefetch"));
    Api::namespaced_with(client.clone(), "default", &kind)
}

/// Makes a Prefetch of the images of a workload, or changes one.
///
/// # Errors
/// If the API server refuses it.
pub(super) async fn make_prefetch(
    client: &kube::Client,
    name: &str,
    workload: &str,
    node_filter: &str,
    retry_after: u32,
) -> Result<()> {
    let prefetch = json!({
        "apiVersion": "cache.techsquad.rocks/v1", "kind": "Prefetch",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"filter_by_labels": {"fleet": workload}, "node_filter": node_filter, "retry_after": retry_after},
    });
    prefetches(client)
        .patch(
            name,
            &PatchParams::apply("fleet").force(),
            &Patch::Apply(&prefetch),
        )
        .await?;
    Ok(())
}

/// Deletes a Prefetch; one that is gone is no error.
///
/// # Errors
/// If the API server refuses.
pub(super) async fn delete_prefetch(client: &kube::Client, name: &str) -> Result<()> {
    match prefetches(client).delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// The status of a Prefetch.
///
/// # Errors
/// If it is not there.
pub(super) async fn prefetch_status(client: &kube::Client, name: &str) -> Result<Value> {
    Ok(prefetches(client).get(name).await?.data["status"].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_thousand_machines_have_addresses_and_names_of_their_own() {
        assert_eq!(address(0), Ipv4Addr::new(127, 1, 0, 1));
        assert_eq!(address(4999), Ipv4Addr::new(127, 1, 19, 136));
        assert_eq!(name(2, 3), "control-2");
        assert_eq!(name(3, 3), "worker-00003");
    }
}
