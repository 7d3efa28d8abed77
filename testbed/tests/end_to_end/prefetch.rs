//! Images are on nodes before they are needed, and what keeps them away is told.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::{deployment, images};

use crate::stage::{NODES, Stage};

pub(crate) const SERVER: &str = "registry.testbed:5000/server:1.0";
const INIT: &str = "registry.testbed:5000/server-init:1.0";

fn prefetch(name: &str, label: &str, retry_after: i64) -> String {
    format!(
        "apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {{name: {name}, namespace: default}}\nspec: {{filter_by_labels: {{app: {label}}}, retry_after: {retry_after}, node_filter: worker}}\n"
    )
}

/// A Deployment that no node has room for.
fn deployment_of(label: &str, images: &[&str], init: Option<&str>) -> String {
    let container = |(n, image): (usize, &&str)| {
        format!("{{name: c{n}, image: \"{image}\", resources: {{requests: {{memory: 4Ti}}}}}}")
    };
    let containers: Vec<String> = images.iter().enumerate().map(container).collect();
    let init = init
        .map(|image| format!("      initContainers: [{{name: init, image: \"{image}\"}}]\n"))
        .unwrap_or_default();
    format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {label}, namespace: default, labels: {{app: {label}}}}}\nspec:\n  replicas: 2\n  selector: {{matchLabels: {{app: {label}}}}}\n  template:\n    metadata: {{labels: {{app: {label}}}}}\n    spec:\n{init}      containers: [{}]\n",
        containers.join(", ")
    )
}

impl Stage {
    pub(crate) fn status(&self, name: &str) -> Result<Value> {
        Ok(self.get(&["prefetch", name])?["status"].clone())
    }

    pub(crate) fn until_prefetch(&self, name: &str, phase: &str) -> Result<Value> {
        let mut last = Value::Null;
        self.until(&format!("Prefetch {name} to be {phase}"), || {
            last = self.status(name)?;
            ensure!(last["phase"] == phase, "it is {last}");
            Ok(())
        })?;
        Ok(last)
    }

    /// Takes images off every node, so that a pull is a pull.
    pub(crate) fn forget_images(&self, references: &[&str]) -> Result<()> {
        for node in NODES {
            for reference in references {
                let remove = format!(
                    "crictl rmi {reference} >/dev/null 2>&1; ! crictl inspecti -q {reference} >/dev/null 2>&1"
                );
                self.cluster.exec(node, &["sh", "-c", &remove])?;
            }
        }
        Ok(())
    }

    pub(crate) fn has_image(&self, node: &str, reference: &str) -> Result<()> {
        self.cluster
            .exec(node, &["crictl", "inspecti", "--quiet", reference])
            .with_context(|| format!("{node} lacks {reference}"))
            .map(drop)
    }
}

pub(crate) fn images_of_a_deployment_that_cant_be_placed_are_on_every_node(stage: &Stage) -> Result<()> {
    stage.forget_images(&[SERVER, INIT])?;
    stage
        .cluster
        .apply(&deployment_of("nginx", &[SERVER], Some(INIT)))?;
    // kubectl's own watch sees every phase, however short.
    let phases = stage.kubectl_in_background(&[
        "get",
        "prefetch",
        "--watch",
        "--output=jsonpath={.status.phase}{\"\\n\"}",
    ])?;
    stage.cluster.apply(&prefetch("sample", "nginx", 60))?;
    let status = stage.until_prefetch("sample", "READY")?;
    let seen = phases.stop()?;
    let mut order: Vec<&str> = seen.lines().filter(|line| !line.is_empty()).collect();
    order.dedup();
    ensure!(
        order == ["PENDING", "RUNNING", "READY"],
        "the phases were {order:?}"
    );
    ensure!(
        status["pairs"]["ready"] == 8 && status["nodes"]["ready"] == 4,
        "the counts are off: {status}"
    );
    stage.kubectl(&[
        "wait",
        "--for=condition=Ready",
        "prefetch/sample",
        "--timeout=10s",
    ])?;

    for node in NODES {
        for image in [SERVER, INIT] {
            stage.has_image(node, image)?;
        }
        let listed = stage
            .cluster
            .exec(node, &["ctr", "-n", "k8s.io", "images", "ls", "-q"])?;
        ensure!(listed.lines().any(|line| line == SERVER), "{node} lists {listed}");
        let pod = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: never-{node}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  nodeSelector: {{kubernetes.io/hostname: {node}}}\n  initContainers: [{{name: i, image: \"{INIT}\", imagePullPolicy: Never}}]\n  containers: [{{name: c, image: \"{SERVER}\", imagePullPolicy: Never}}]\n"
        );
        stage.cluster.apply(&pod)?;
    }
    for node in NODES {
        let pod = format!("never-{node}");
        stage.until_phase(&pod, "Running")?;
        stage.delete_pods(&[&pod])?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn a_restarted_coordinator_wakes_no_agent(stage: &Stage) -> Result<()> {
    stage
        .cluster
        .apply(&deployment_of("nginx", &[SERVER], Some(INIT)))?;
    stage.cluster.apply(&prefetch("sample", "nginx", 60))?;
    stage.until_prefetch("sample", "READY")?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned("worker-24")?;
    stage.until_agents_are_gone()?;

    let made = stage.daemon_events()?;
    stage.kubectl(&[
        "rollout",
        "restart",
        "--namespace=quartermaster",
        "deployment/quartermaster-coordinator",
    ])?;
    deployment::wait_until_up(&stage.cluster)?;
    stage.until("the new coordinator to lead", || {
        let log = deployment::coordinator_log(&stage.cluster);
        ensure!(log.contains("this replica leads"), "{log}");
        Ok(())
    })?;
    // It has decided about everything once it has answered to a change that came last.
    stage.cluster.apply(&prefetch("probe", "nothing-has-this", 60))?;
    let status = stage.until_prefetch("probe", "PENDING")?;
    ensure!(
        status["conditions"][0]["reason"] == "NoImages",
        "a selector that matches nothing does not say so: {status}"
    );
    ensure!(
        stage.status("sample")?["phase"] == "READY",
        "the Prefetch is not READY any more"
    );
    ensure!(stage.daemon_events()? == made, "an agent was woken");
    ensure!(stage.agent_pods()?.is_empty(), "an agent is there");

    stage.kubectl(&["delete", "prefetch", "probe", "sample"])?;
    stage.kubectl(&["delete", "deployment", "nginx"])?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()
}

pub(crate) fn an_image_that_does_not_exist_is_named_and_comes_once_it_does(stage: &Stage) -> Result<()> {
    let late = "registry.testbed:5000/late:1.0";
    stage.forget_images(&[SERVER])?;
    stage
        .cluster
        .apply(&deployment_of("late", &[SERVER, late], None))?;
    stage.cluster.apply(&prefetch("late", "late", 5))?;
    let status = stage.until_prefetch("late", "FAILED")?;
    let entry = |status: &Value, name: &str| -> Result<Value> {
        let images = status["images"].as_array().context("no images")?;
        images
            .iter()
            .find(|image| image["image"] == name)
            .cloned()
            .context("the image is not listed")
    };
    let missing = entry(&status, late)?;
    let reason = &missing["reasons"][0];
    ensure!(
        missing["failed"] == 4 && reason["count"] == 4,
        "the counts are off: {status}"
    );
    ensure!(reason["reason"] == "ImageNotFound", "the reason is {reason}");
    let words = reason["message"].as_str().unwrap_or_default();
    ensure!(
        words.contains("not found"),
        "these are not the registry's words: {words}"
    );
    ensure!(
        entry(&status, SERVER)?["ready"] == 4,
        "the other image is not there: {status}"
    );
    for node in NODES {
        stage.has_image(node, SERVER)?;
    }

    let base = images::base_set(testbed::layout::Cache::locate().root())?;
    let any = base
        .iter()
        .find(|image| image.name.starts_with("server-init"))
        .context("no image")?;
    stage.cluster.push(&any.archive, "late:1.0")?;
    stage.until_prefetch("late", "READY")?;
    for node in NODES {
        stage.has_image(node, late)?;
    }
    stage.kubectl(&["delete", "prefetch", "late"])?;
    stage.kubectl(&["delete", "deployment", "late"])?;
    stage.until_agents_are_gone()
}

pub(crate) fn bad_prefetches_are_refused_by_the_api_server(stage: &Stage) -> Result<()> {
    let refused = |spec: &str| -> Result<String> {
        let yaml = format!(
            "apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {{name: bad, namespace: default}}\nspec: {spec}\n"
        );
        match stage.cluster.apply(&yaml) {
            Ok(_) => anyhow::bail!("{spec} was taken"),
            Err(error) => Ok(format!("{error:#}")),
        }
    };
    let words = refused("{retry_after: -1}")?;
    ensure!(
        words.contains("spec.retry_after") && words.contains("greater than or equal to 0"),
        "{words}"
    );
    let words = refused("{nodefilter: x}")?;
    ensure!(
        words.contains("unknown field") && words.contains("spec.nodefilter"),
        "{words}"
    );
    refused("{filter_by_labels: [a]}")?;
    // All three fields are optional.
    stage.cluster.apply("apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {name: empty, namespace: default}\nspec: {}\n")?;
    stage.until_prefetch("empty", "PENDING")?;
    stage.kubectl(&["delete", "prefetch", "empty"]).map(drop)
}
