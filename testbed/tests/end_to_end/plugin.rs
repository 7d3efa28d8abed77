//! `kubectl-quartermaster` as a person runs it: the real program against the real cluster.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::deployment;

use crate::prefetch::SERVER;
use crate::stage::{NODES, Stage, server_pod};

/// How it ended and what it printed, on both of its outputs.
struct Said {
    code: i32,
    out: String,
}

impl Stage {
    /// Runs the plugin as the administrator.
    fn plugin(&self, line: &str) -> Result<Said> {
        let output = Command::new(program()?)
            .arg("--kubeconfig")
            .arg(self.cluster.kubeconfig())
            .args(line.split(' '))
            .stdin(std::process::Stdio::null())
            .output()
            .context("the plugin can't be run")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Said {
            code: output.status.code().unwrap_or(-1),
            out: text(&output.stdout) + &text(&output.stderr),
        })
    }

    /// Runs it; it must end with this exit code.
    fn plugin_ends(&self, code: i32, line: &str) -> Result<String> {
        let said = self.plugin(line)?;
        ensure!(
            said.code == code,
            "kubectl quartermaster {line} ended with {} and not {code}:\n{}",
            said.code,
            said.out
        );
        Ok(said.out)
    }

    /// Runs it; what it prints must hold all of these.
    fn plugin_says(&self, line: &str, words: &[&str]) -> Result<String> {
        let out = self.plugin_ends(0, line)?;
        for word in words {
            ensure!(
                out.contains(word),
                "kubectl quartermaster {line} does not say {word:?}:\n{out}"
            );
        }
        Ok(out)
    }
}

/// The program, built as the tests are.
fn program() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let root = deployment::workspace();
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .current_dir(&root)
            .args([
                "build",
                "--quiet",
                "--locked",
                "--package",
                "kubectl-quartermaster",
            ])
            .status()
            .map_err(|error| format!("cargo can't be run: {error}"))?;
        if !status.success() {
            return Err(format!("the plugin does not build ({status})"));
        }
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        Ok(target.join("debug/kubectl-quartermaster"))
    });
    built.clone().map_err(anyhow::Error::msg)
}

pub(crate) fn the_plugin_shows_plans_provisions_and_puts_back(stage: &Stage) -> Result<()> {
    stage.plugin_says("status", &["0 of 4 nodes run Wasm", "worker-16", "worker-24"])?;
    let status: Value = serde_json::from_str(&stage.plugin_ends(0, "status -o json")?)?;
    let names: Vec<&str> = status["nodes"]
        .as_array()
        .context("no nodes")?
        .iter()
        .filter_map(|node| node["name"].as_str())
        .collect();
    ensure!(names == NODES, "{names:?}");
    let before = stage.config("worker-24")?;
    stage.plugin_says("plan worker-24", &["containerd v2.4.2", "+++ ", "BinaryName"])?;
    // Their configurations differ, so there are as many outcomes.
    let groups: Value = serde_json::from_str(&stage.plugin_ends(0, "plan --all -o json")?)?;
    let outcomes: Vec<&str> = groups
        .as_array()
        .context("no groups")?
        .iter()
        .filter_map(|group| group["outcome"].as_str())
        .collect();
    ensure!(outcomes == ["Change"; 4], "{outcomes:?}");
    ensure!(
        stage.config("worker-24")? == before,
        "planning has changed the node"
    );

    let said = stage.plugin_says(
        "provision worker-21 worker-24 --wait --timeout 2m",
        &["worker-21  runs WebAssembly", "worker-24  runs WebAssembly"],
    )?;
    ensure!(
        said.contains("the preparation begins"),
        "nothing was told as it happened:\n{said}"
    );
    stage.until_provisioned("worker-24")?;
    stage.plugin_says("status -o wide", &["2 of 4 nodes run Wasm", "containerd 2.4.2"])?;
    stage.plugin_says("plan worker-24", &["Nothing would change."])?;
    stage.until("the report of the node", || {
        stage
            .plugin_says("logs worker-24", &["worker-24", "Install", "rehearse", " done"])
            .map(drop)
    })?;
    stage.plugin_says(
        "unprovision worker-21 worker-24 --wait --timeout 2m",
        &["worker-21  is as it was", "worker-24  is as it was"],
    )?;
    ensure!(
        stage.config("worker-24")? == before,
        "the configuration is not what it was"
    );
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()?;
    // The agent is gone, and what it reported last is not.
    stage.plugin_says("logs worker-24", &["Remove", "commit"])?;
    stage.plugin_says("pause", &["Paused."])?;
    stage.until("the leader to be paused", || {
        stage.plugin_says("status", &["Paused:"]).map(drop)
    })?;
    stage.plugin_says("resume", &["Resumed."])?;
    Ok(())
}

pub(crate) fn the_plugin_says_what_is_in_the_way(stage: &Stage) -> Result<()> {
    // A name that is misspelt changes nothing, not even the others.
    let said = stage.plugin_ends(1, "provision worker-17 worker-x")?;
    ensure!(said.contains("worker-x"), "{said}");
    let node = stage.get(&["node", "worker-17"])?;
    ensure!(
        node["metadata"]["annotations"]["kwasm.sh/kwasm-node"].is_null(),
        "it was annotated"
    );
    let said = stage.plugin_ends(1, "status --namespace nowhere")?;
    ensure!(
        said.contains("Quartermaster was not found in the namespace nowhere"),
        "{said}"
    );

    // Somebody who may read nodes and the Lease, and may not exec.
    stage.kubectl(&[
        "create",
        "clusterrolebinding",
        "nobody-reads",
        "--clusterrole=view",
        "--user=nobody",
    ])?;
    stage.kubectl(&[
        "create",
        "role",
        "nobody-leases",
        "--namespace=quartermaster",
        "--verb=get",
        "--resource=leases",
    ])?;
    stage.kubectl(&[
        "create",
        "rolebinding",
        "nobody-leases",
        "--namespace=quartermaster",
        "--role=nobody-leases",
        "--user=nobody",
    ])?;
    let said = stage.plugin_ends(1, "--as nobody status");
    let doctor = stage.plugin_ends(1, "--as nobody doctor");
    stage.kubectl(&["delete", "clusterrolebinding", "nobody-reads"])?;
    stage.kubectl(&[
        "delete",
        "role,rolebinding",
        "nobody-leases",
        "--namespace=quartermaster",
    ])?;
    let said = said?;
    ensure!(
        said.contains("You may not exec into pods of the namespace quartermaster")
            && said.contains("people.yaml"),
        "{said}"
    );
    let doctor = doctor?;
    ensure!(doctor.contains("you may not: get pods/exec"), "{doctor}");

    // Pods that use the handler hold a removal up: that is said, and at the limit it is said that it goes on.
    stage.plugin_ends(0, "provision worker-24 --wait --timeout 2m")?;
    stage
        .cluster
        .apply(&server_pod("user", "worker-24", Some("crun")))?;
    stage.until_phase("user", "Running")?;
    let said = stage.plugin_ends(1, "unprovision worker-24 --wait --timeout 10s")?;
    ensure!(
        said.contains("RemovalBlocked") && said.contains("default/user") && said.contains("goes on with it"),
        "{said}"
    );
    stage.plugin_says("status", &["in use"])?;
    stage.delete_pods(&["user"])?;
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()
}

pub(crate) fn the_plugin_brings_images_and_says_which_are_missing(stage: &Stage) -> Result<()> {
    stage.forget_images(&[SERVER])?;
    let said = stage.plugin_ends(
        0,
        &format!("prefetch {SERVER} --name plugin --into default --wait --timeout 2m"),
    )?;
    ensure!(
        said.contains(&format!("{SERVER} is there"))
            && said.contains("default/plugin is READY: 1 image on 4 nodes"),
        "{said}"
    );
    for node in NODES {
        stage.has_image(node, SERVER)?;
    }
    stage.plugin_says("status", &["1 of 1 Prefetch ready", "default/plugin", "4 of 4"])?;
    // The same name again, for some nodes only: it is the same object, with another specification.
    let only = "--nodes kubernetes.io/hostname=worker-24";
    stage.plugin_says(
        &format!("prefetch {SERVER} --name plugin --into default {only} --wait --timeout 2m"),
        &["READY: 1 image on 1 node"],
    )?;
    let missing = "registry.testbed:5000/no-such-thing:1.0";
    let said = stage.plugin_ends(
        1,
        &format!("prefetch {missing} --name missing --into default {only} --wait --timeout 2m"),
    )?;
    ensure!(
        said.contains(&format!("{missing}: ImageNotFound on worker-24"))
            && said.contains("default/missing is FAILED"),
        "{said}"
    );
    let doctor = stage.plugin_ends(1, "doctor")?;
    ensure!(
        doctor.contains("the Prefetch default/missing is FAILED"),
        "{doctor}"
    );
    stage.kubectl(&["delete", "prefetch", "plugin", "missing"])?;
    stage.until_agents_are_gone()
}

/// The KWasm operator and the Prefetch operator as they are on a cluster that has used them, as far as anybody looks.
pub(crate) const PREDECESSORS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: before}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: kwasm-operator
  namespace: before
  labels: {app.kubernetes.io/name: kwasm-operator}
  annotations: {meta.helm.sh/release-name: kwasm-operator}
spec:
  replicas: 1
  selector: {matchLabels: {app.kubernetes.io/name: kwasm-operator}}
  template:
    metadata: {labels: {app.kubernetes.io/name: kwasm-operator}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: kwasm-operator, image: "registry.testbed:5000/server:1.0"}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: kubernetes-prefetch-operator-controller-manager, namespace: before, labels: {control-plane: controller-manager}}
spec:
  replicas: 1
  selector: {matchLabels: {control-plane: controller-manager}}
  template:
    metadata: {labels: {control-plane: controller-manager}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: manager, image: "registry.testbed:5000/server:1.0"}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: worker-17-provision-kwasm, namespace: before, labels: {kwasm.sh/job: "true"}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      containers: [{name: kwasm-provision, image: "registry.testbed:5000/server:1.0"}]
---
apiVersion: v1
kind: Pod
metadata: {name: prefetch-pod-1-worker-17, namespace: default, labels: {app: prefetch-pod}}
spec:
  nodeSelector: {kubernetes.io/hostname: worker-17}
  terminationGracePeriodSeconds: 1
  containers: [{name: prefetch, image: "registry.testbed:5000/server:1.0"}]
"#;

pub(crate) fn the_plugin_takes_over_from_the_operators_before(stage: &Stage) -> Result<()> {
    stage.plugin_says(
        "doctor",
        &["no other operator works on the same nodes", "Nothing is wrong."],
    )?;
    let outcome = stage.cluster.apply(PREDECESSORS).and_then(|_| take_over(stage));
    stage.kubectl(&["delete", "namespace", "before", "--timeout=120s"])?;
    outcome
}

fn take_over(stage: &Stage) -> Result<()> {
    let doctor = stage.plugin_ends(1, "doctor")?;
    for operator in [
        "the KWasm operator still runs (before/",
        "the Prefetch operator still runs (before/",
    ] {
        ensure!(doctor.contains(operator), "{doctor}");
    }
    let dry = stage.plugin_ends(0, "migrate --dry-run")?;
    ensure!(
        dry.contains("scale the KWasm operator to 0: Deployment before/kwasm-operator"),
        "{dry}"
    );
    // Nobody is there to be asked.
    let said = stage.plugin_ends(1, "migrate")?;
    ensure!(said.contains("say --yes"), "{said}");
    let replicas = |name: &str| -> Result<Value> {
        Ok(stage.get(&["deployment", name, "--namespace=before"])?["spec"]["replicas"].clone())
    };
    ensure!(replicas("kwasm-operator")? == 1, "it was touched");

    stage.plugin_says(
        "migrate --yes",
        &[
            "✓ scale the KWasm operator to 0",
            "✓ scale the Prefetch operator to 0",
            "✓ delete the Job before/worker-17-provision-kwasm",
            "✓ delete the pod default/prefetch-pod-1-worker-17",
            "helm uninstall kwasm-operator -n before",
            "every Prefetch would go with it",
        ],
    )?;
    for name in [
        "kwasm-operator",
        "kubernetes-prefetch-operator-controller-manager",
    ] {
        ensure!(replicas(name)? == 0, "{name} still runs");
    }
    stage.until("what was left to be gone", || {
        let left = stage.kubectl(&["get", "jobs", "--namespace=before", "--output=name"])?;
        ensure!(left.is_empty(), "{left}");
        let left = stage.kubectl(&["get", "pods", "--selector=app=prefetch-pod", "--output=name"])?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    })?;
    stage.plugin_says("doctor", &["no other operator works on the same nodes"])?;
    stage.plugin_says("migrate --yes", &["What remains"]).map(drop)
}

pub(crate) fn the_plugin_removes_everything(stage: &Stage) -> Result<()> {
    stage.plugin_ends(0, "provision worker-17 worker-24 --wait --timeout 2m")?;
    let said = stage.plugin_ends(1, "remove-all")?;
    ensure!(said.contains("say --yes"), "{said}");
    stage.plugin_says(
        "remove-all --yes --wait --timeout 2m",
        &["Nothing of Quartermaster is left on any node."],
    )?;
    for node in ["worker-17", "worker-24"] {
        stage.until_unmarked(node)?;
    }
    stage.plugin_says("status", &["Everything is being removed"])?;
    stage.annotate(&["worker-17", "worker-24"], "kwasm.sh/kwasm-node-")?;
    stage.forget_what_was_told()?;
    stage.until_agents_are_gone()
}
