//! Quartermaster itself in a testbed, put there as a user puts it into a cluster: images in a registry, and
//! `kubectl apply -k` of an overlay that names them.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::images::{self, Product};
use crate::layout::Cache;
use crate::progress::Progress;
use crate::spec::Spec;
use crate::wait::wait_for;

/// The namespace of coordinator and agents.
pub const NAMESPACE: &str = "quartermaster";
/// Selects the agents' pods.
const AGENTS: &str = "--selector=app.kubernetes.io/component=agent";
/// Selects the coordinator's pods.
const COORDINATORS: &str = "--selector=app.kubernetes.io/component=coordinator";

/// What a deployment differs in from the plain base.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Take the overlay `auto-provision`.
    pub auto_provision: bool,
    /// How long idle agents stay, such as `5s`; the base's own time where it is `None`.
    pub linger: Option<String>,
    /// Flags of the coordinator besides, such as `--prefetch-max-images=2`.
    pub flags: Vec<String>,
}

/// A testbed whose registry holds the base images, and the product's images beside it: what the demo, the end-to-end
/// tests and the benchmarks begin with. With `reuse`, one that is up and was asked for in the same words is taken.
///
/// # Errors
/// If the testbed does not come up, or an image can't be built or pushed.
pub fn set(spec: &Spec, reuse: bool, progress: &Progress) -> Result<(Cluster, Product)> {
    let cluster = match Cluster::open(&spec.name) {
        Ok(cluster) if reuse && cluster.spec() == spec => cluster,
        _ => {
            Cluster::down(&spec.name)?;
            Cluster::up(spec, progress)?
        }
    };
    let cache = Cache::locate();
    let product = images::product(cache.root(), &workspace(), progress)?;
    for image in images::base_set(cache.root())? {
        cluster.push(&image.archive, &image.name)?;
    }
    Ok((cluster, product))
}

/// Pushes the images and applies the manifests; returns when the coordinator answers.
///
/// # Errors
/// If the registry or the API server refuses something, or the coordinator does not come up in time; with
/// its pods and their log.
pub fn deploy(cluster: &Cluster, product: &Product, options: &Options) -> Result<()> {
    for image in [&product.agent, &product.coordinator] {
        cluster.push(&image.archive, &image.name)?;
    }
    let overlay = write_overlay(cluster, product, options)?;
    let folder = overlay.path().display().to_string();
    cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "-k", &folder])?;
    wait_until_up(cluster)
}

/// Waits until the coordinator of the newest generation is the only one, and ready.
///
/// # Errors
/// If it is not so within two minutes; with its pods and their log.
pub fn wait_until_up(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl(&[
            "rollout",
            "status",
            "--namespace=quartermaster",
            "deployment/quartermaster-coordinator",
            "--timeout=120s",
        ])
        .map(drop)
        .with_context(|| {
            let pods = cluster
                .kubectl(&["describe", "pods", "--namespace=quartermaster"])
                .unwrap_or_default();
            format!(
                "the coordinator did not come up:\n{pods}\n{}",
                coordinator_log(cluster)
            )
        })
}

/// The manifests of the workspace.
#[must_use]
pub fn manifests() -> PathBuf {
    workspace().join("manifests")
}

/// The root of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::canonicalize(&root).unwrap_or(root)
}

/// The whole log of the coordinator's replicas, or why there is none.
#[must_use]
pub fn coordinator_log(cluster: &Cluster) -> String {
    coordinator_log_since(cluster, "1970-01-01T00:00:00Z")
}

/// The log of the coordinator's replicas from a time on (RFC 3339), or why there is none.
#[must_use]
pub fn coordinator_log_since(cluster: &Cluster, since: &str) -> String {
    let log = cluster.kubectl(&[
        "logs",
        "--namespace=quartermaster",
        COORDINATORS,
        "--tail=-1",
        &format!("--since-time={since}"),
    ]);
    log.unwrap_or_else(|error| format!("{error:#}"))
}

/// The replica that leads, by the Lease.
///
/// # Errors
/// If nobody holds it.
pub fn leader(cluster: &Cluster) -> Result<String> {
    let lease = get(
        cluster,
        &["lease", "quartermaster-coordinator", "--namespace=quartermaster"],
    )?;
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    anyhow::ensure!(!holder.is_empty(), "nobody holds the Lease: {}", lease["spec"]);
    Ok(holder.to_owned())
}

/// Names of the agents' pods that are there.
///
/// # Errors
/// If the API server can't be asked.
pub fn agent_pods(cluster: &Cluster) -> Result<Vec<String>> {
    let names = cluster.kubectl(&[
        "get",
        "pods",
        "--namespace=quartermaster",
        AGENTS,
        "--output=name",
    ])?;
    Ok(names.lines().map(ToOwned::to_owned).collect())
}

/// Waits until no agent is left.
///
/// # Errors
/// If one is there at the deadline.
pub fn wait_until_agents_are_gone(cluster: &Cluster, deadline: Duration) -> Result<()> {
    wait_for("the agents to go away", deadline, || {
        let left = agent_pods(cluster)?;
        anyhow::ensure!(left.is_empty(), "still there: {}", left.join(", "));
        Ok(Some(()))
    })?;
    Ok(())
}

/// An object of the cluster in JSON.
///
/// # Errors
/// If it is not there.
pub fn get(cluster: &Cluster, what: &[&str]) -> Result<Value> {
    let mut args = vec!["get", "--output=json"];
    args.extend(what);
    Ok(serde_json::from_str(&cluster.kubectl(&args)?)?)
}

/// Sets an annotation on nodes (`kwasm.sh/kwasm-node=true`), or takes it away (`kwasm.sh/kwasm-node-`).
///
/// # Errors
/// If one of the nodes is not there.
pub fn annotate(cluster: &Cluster, nodes: &[&str], annotation: &str) -> Result<()> {
    let mut args = vec!["annotate", "--overwrite", "node"];
    args.extend(nodes);
    args.push(annotation);
    cluster.kubectl(&args).map(drop)
}

/// The condition `WasmRuntimeReady` of a node: status, reason and message.
///
/// # Errors
/// If the node is not there.
pub fn condition(cluster: &Cluster, node: &str) -> Result<Option<(String, String, String)>> {
    let node = get(cluster, &["node", node])?;
    let conditions = node["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(conditions
        .iter()
        .find(|c| c["type"] == "WasmRuntimeReady")
        .map(|c| (text(&c["status"]), text(&c["reason"]), text(&c["message"]))))
}

/// Waits until a node takes Wasm pods by its condition and both labels.
///
/// # Errors
/// If it does not by the deadline; with its condition and the coordinator's log.
pub fn wait_until_provisioned(cluster: &Cluster, node: &str, deadline: Duration) -> Result<()> {
    wait_for(&format!("{node} to be provisioned"), deadline, || {
        let object = get(cluster, &["node", node])?;
        let labels = &object["metadata"]["labels"];
        let condition = condition(cluster, node)?;
        let there = labels["kwasm.sh/kwasm-provisioned"] == node && labels["kwasm.sh/crun"] == "ready";
        let holds = condition.as_ref().is_some_and(|(status, _, _)| status == "True");
        anyhow::ensure!(there && holds, "labels {labels}, condition {condition:?}");
        Ok(Some(()))
    })
    .with_context(|| coordinator_log(cluster))?;
    Ok(())
}

/// Everything of ours that a Node carries: labels, annotations and the condition, by their keys.
///
/// # Errors
/// If the node is not there.
pub fn marks(cluster: &Cluster, node: &str) -> Result<Vec<String>> {
    let object = get(cluster, &["node", node])?;
    let ours = |map: &Value| -> Vec<String> {
        let keys = map.as_object().into_iter().flat_map(|map| map.keys().cloned());
        keys.filter(|key| {
            (key.starts_with("kwasm.sh/") && key != "kwasm.sh/kwasm-node")
                || key.starts_with("cache.techsquad.rocks/")
        })
        .collect()
    };
    let mut marks = ours(&object["metadata"]["labels"]);
    marks.extend(ours(&object["metadata"]["annotations"]));
    if condition(cluster, node)?.is_some() {
        marks.push("WasmRuntimeReady".to_owned());
    }
    Ok(marks)
}

fn write_overlay(cluster: &Cluster, product: &Product, options: &Options) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir().context("a folder for the overlay")?;
    let base = if options.auto_provision {
        manifests().join("overlays/auto-provision")
    } else {
        manifests()
    };
    // kustomize takes no absolute path for a base.
    let base = relative(&fs::canonicalize(folder.path())?, &base);
    let mut text = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [{}]\nimages:\n",
        base.display()
    );
    for (part, image) in [("agent", &product.agent), ("coordinator", &product.coordinator)] {
        let (name, tag) = image.name.split_once(':').context("the image has no tag")?;
        let registry = cluster.registry();
        text += &format!(
            "  - name: ghcr.io/quartermaster-k8s/quartermaster-{part}\n    newName: {registry}/{name}\n    newTag: {tag:?}\n"
        );
    }
    let linger = options.linger.iter().map(|linger| format!("--linger={linger}"));
    let added: Vec<Value> = linger
        .chain(options.flags.iter().cloned())
        .map(|flag| json!({"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": flag}))
        .collect();
    if !added.is_empty() {
        text += &format!(
            "patches:\n  - target: {{kind: Deployment, name: quartermaster-coordinator}}\n    patch: '{}'\n",
            Value::from(added)
        );
    }
    fs::write(folder.path().join("kustomization.yaml"), text)?;
    Ok(folder)
}

/// The path that leads from one folder to another; both absolute and without links.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let from: Vec<Component<'_>> = from.components().collect();
    let to: Vec<Component<'_>> = to.components().collect();
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(Component::ParentDir, from.len() - shared);
    up.chain(to[shared..].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_goes_up_and_down() {
        let path = |from: &str, to: &str| relative(Path::new(from), Path::new(to));
        assert_eq!(path("/tmp/x", "/src/p/m"), Path::new("../../src/p/m"));
        assert_eq!(path("/a/b", "/a/c"), Path::new("../c"));
    }
}
