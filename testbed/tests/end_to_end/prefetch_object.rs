//! What a Prefetch can ask for beyond its three old fields: images, workloads, nodes, pins, patience.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::{deployment, images};

use crate::prefetch::SERVER;
use crate::stage::{NODES, Stage};

const INIT: &str = "registry.testbed:5000/server-init:1.0";
const PINS_HELD: &str = "cache.techsquad.rocks/pins-held";
/// Nodes whose containerd can pin.
const PINNING: [&str; 3] = ["worker-17", "worker-21", "worker-24"];

pub(crate) fn prefetch(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {{name: {name}, namespace: default}}\nspec: {spec}\n"
    )
}

impl Stage {
    pub(crate) fn pinned(&self, node: &str, image: &str) -> Result<bool> {
        let listed = self.cluster.exec(
            node,
            &["ctr", "-n", "k8s.io", "images", "ls", &format!("name=={image}")],
        )?;
        Ok(listed.contains("io.cri-containerd.pinned=pinned"))
    }

    pub(crate) fn pins_held(&self, node: &str) -> Result<Option<String>> {
        let node = self.get(&["node", node])?;
        Ok(node["metadata"]["annotations"][PINS_HELD]
            .as_str()
            .map(ToOwned::to_owned))
    }

    pub(crate) fn until_nothing_is_held(&self, node: &str, image: &str) -> Result<()> {
        self.until(&format!("{node} to hold no pin"), || {
            ensure!(!self.pinned(node, image)?, "{image} is pinned");
            let held = self.pins_held(node)?;
            ensure!(held.is_none(), "it says {held:?}");
            Ok(())
        })
    }

    pub(crate) fn lacks_image(&self, node: &str, reference: &str) -> Result<()> {
        ensure!(self.has_image(node, reference).is_err(), "{node} has {reference}");
        Ok(())
    }
}

pub(crate) fn images_of_workloads_are_on_the_nodes_that_are_selected(stage: &Stage) -> Result<()> {
    stage.forget_images(&[SERVER, INIT])?;
    let template = |image: &str| {
        format!(
            "template: {{metadata: {{labels: {{job: x}}}}, spec: {{restartPolicy: Never, containers: [{{name: c, image: \"{image}\"}}]}}}}"
        )
    };
    stage.cluster.apply(&format!(
        "apiVersion: batch/v1\nkind: CronJob\nmetadata: {{name: nightly, namespace: default, labels: {{team: a}}}}\nspec: {{schedule: '0 0 1 1 *', suspend: true, jobTemplate: {{spec: {{{}}}}}}}\n",
        template(INIT)
    ))?;
    stage.kubectl(&["label", "node", "worker-21", "worker-24", "pool=images"])?;
    stage.cluster.apply(&prefetch(
        "selected",
        &format!(
            "{{images: ['{SERVER}'], workloads: [{{kind: CronJob, selector: {{matchLabels: {{team: a}}}}}}], nodes: {{selector: {{matchLabels: {{pool: images}}}}}}}}"
        ),
    ))?;
    let status = stage.until_prefetch("selected", "READY")?;
    ensure!(
        status["nodes"]["wanted"] == 2 && status["pairs"]["ready"] == 4 && status["imagesWanted"] == 2,
        "the counts are off: {status}"
    );
    for node in ["worker-21", "worker-24"] {
        stage.has_image(node, SERVER)?;
        stage.has_image(node, INIT)?;
    }
    for node in ["worker-16", "worker-17"] {
        stage.lacks_image(node, SERVER)?;
    }
    // A node that comes to be selected is served at once, and one that is cordoned counts apart.
    stage.kubectl(&["cordon", "worker-24"])?;
    stage.kubectl(&["label", "node", "worker-17", "pool=images"])?;
    stage.until(
        "the new node to be served and the cordoned one to count apart",
        || {
            let status = stage.status("selected")?;
            ensure!(
                status["nodes"] == serde_json::json!({"wanted": 2, "ready": 2, "failed": 0, "excluded": 1}),
                "{status}"
            );
            Ok(())
        },
    )?;
    stage.has_image("worker-17", SERVER)?;
    stage.kubectl(&["uncordon", "worker-24"])?;
    // An edit of the workload is followed at once.
    stage.cluster.apply(&format!(
        "apiVersion: batch/v1\nkind: CronJob\nmetadata: {{name: nightly, namespace: default, labels: {{team: b}}}}\nspec: {{schedule: '0 0 1 1 *', suspend: true, jobTemplate: {{spec: {{{}}}}}}}\n",
        template(INIT)
    ))?;
    stage.until("the workload's image not to be wanted any more", || {
        let status = stage.status("selected")?;
        ensure!(
            status["imagesWanted"] == 1 && status["pairs"]["ready"] == 3 && status["phase"] == "READY",
            "{status}"
        );
        Ok(())
    })?;
    stage.kubectl(&["delete", "prefetch", "selected"])?;
    stage.kubectl(&["delete", "cronjob", "nightly"])?;
    stage.kubectl(&["label", "node", "worker-17", "worker-21", "worker-24", "pool-"])?;
    for node in NODES {
        stage.until_nothing_is_held(node, SERVER)?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn an_image_stays_pinned_until_the_last_prefetch_lets_go_of_it(stage: &Stage) -> Result<()> {
    let spec = format!("{{images: ['{SERVER}'], pin: {{expiry: 24h}}}}");
    for name in ["first", "second"] {
        stage.cluster.apply(&prefetch(name, &spec))?;
        stage.until_prefetch(name, "READY")?;
    }
    for node in PINNING {
        ensure!(stage.pinned(node, SERVER)?, "{node} did not pin the image");
        ensure!(
            stage.pins_held(node)?.is_some(),
            "{node} does not say that pins are held"
        );
    }
    stage.kubectl(&["delete", "prefetch", "first", "--timeout=10s"])?;
    stage.until("the first Prefetch to be let go of on every node", || {
        let log = deployment::coordinator_log(&stage.cluster);
        let released = log
            .lines()
            .filter(|line| line.contains("pins that nobody wants any more are released"))
            .count();
        ensure!(released >= NODES.len(), "{released} nodes have released");
        Ok(())
    })?;
    for node in PINNING {
        ensure!(
            stage.pinned(node, SERVER)?,
            "{node} let go although one Prefetch is left"
        );
    }
    // One node is away while the last Prefetch goes, and its deletion does not wait for it.
    stage.until_agents_are_gone()?;
    stage.cluster.stop_node("worker-24")?;
    stage.kubectl(&["delete", "prefetch", "second", "--timeout=10s"])?;
    for node in ["worker-17", "worker-21"] {
        stage.until_nothing_is_held(node, SERVER)?;
    }
    stage.cluster.start_node("worker-24")?;
    stage.until_nothing_is_held("worker-24", SERVER)?;
    for node in NODES {
        stage.has_image(node, SERVER)?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn a_tag_that_moved_is_told_and_pulled_again_when_asked_for(stage: &Stage) -> Result<()> {
    let moving = "registry.testbed:5000/moving:1.0";
    let base = images::base_set(testbed::layout::Cache::locate().root())?;
    let archive = |name: &str| {
        base.iter()
            .find(|image| image.name.starts_with(name))
            .map(|image| image.archive.clone())
            .context("no such image")
    };
    stage.forget_images(&[moving])?;
    stage.cluster.push(&archive("server:")?, "moving:1.0")?;
    let spec = |filter: &str, policy: &str| {
        format!("{{images: ['{moving}'], node_filter: '{filter}', pull: {{policy: {policy}}}}}")
    };
    stage
        .cluster
        .apply(&prefetch("moving", &spec("worker-17", "IfNotPresent")))?;
    stage.until_prefetch("moving", "READY")?;
    stage.cluster.push(&archive("server-init:")?, "moving:1.0")?;
    stage
        .cluster
        .apply(&prefetch("moving", &spec("worker", "IfNotPresent")))?;
    let reason = |status: &Value| status["images"][0]["reasons"][0].clone();
    stage.until("the old image to be told of", || {
        let status = stage.status("moving")?;
        let told = reason(&status);
        ensure!(
            status["phase"] == "READY" && told["reason"] == "TagMoved" && told["count"] == 1,
            "{status}"
        );
        ensure!(told["nodes"] == serde_json::json!(["worker-17"]), "{told}");
        Ok(())
    })?;
    stage
        .cluster
        .apply(&prefetch("moving", &spec("worker", "Always")))?;
    stage.until("the new image to be everywhere", || {
        let status = stage.status("moving")?;
        ensure!(
            status["phase"] == "READY" && status["pairs"]["ready"] == 4 && reason(&status).is_null(),
            "{status}"
        );
        Ok(())
    })?;
    stage.kubectl(&["delete", "prefetch", "moving"])?;
    for node in NODES {
        stage.until_nothing_is_held(node, moving)?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn a_suspended_prefetch_pulls_nothing_until_it_goes_on(stage: &Stage) -> Result<()> {
    stage.forget_images(&[SERVER])?;
    let spec =
        |suspend: bool| format!("{{images: ['{SERVER}'], node_filter: worker-21, suspend: {suspend}}}");
    stage.cluster.apply(&prefetch("later", &spec(true)))?;
    stage.until("it to say that it is suspended", || {
        let status = stage.status("later")?;
        ensure!(
            status["phase"] == "PENDING" && status["conditions"][0]["reason"] == "Suspended",
            "{status}"
        );
        Ok(())
    })?;
    ensure!(stage.agent_pods()?.is_empty(), "an agent was summoned");
    stage.cluster.apply(&prefetch("later", &spec(false)))?;
    stage.until_prefetch("later", "READY")?;
    stage.has_image("worker-21", SERVER)?;
    stage.kubectl(&["delete", "prefetch", "later"])?;
    stage.until_nothing_is_held("worker-21", SERVER)?;
    stage.until_agents_are_gone()
}

pub(crate) fn durations_and_numbers_that_make_no_sense_are_refused_in_words(stage: &Stage) -> Result<()> {
    for (spec, words) in [
        ("{pull: {parallelism: 1}}", "2 or more, or a percentage"),
        ("{pull: {deadline: soon}}", "a duration between 10s and 24h"),
        ("{pin: {expiry: 1m}}", "a duration between 1h and 8760h"),
        ("{workloads: [{kind: Pod}]}", "supported values"),
        ("{images: ['']}", "spec.images[0]"),
    ] {
        match stage.cluster.apply(&prefetch("bad", spec)) {
            Ok(_) => anyhow::bail!("{spec} was taken"),
            Err(error) => {
                let said = format!("{error:#}");
                ensure!(said.contains(words), "{spec}: {said}");
            }
        }
    }
    let taught = stage.kubectl(&["explain", "prefetch.spec.pull.parallelism"])?;
    ensure!(taught.contains("Default: 10%"), "{taught}");
    Ok(())
}
