//! Nodes become able to run Wasm pods, or are left as they were.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use testbed::deployment::{self, Options};

use crate::stage::{CONFIG, NODES, Stage, server_pod, wasm_pod};

pub(crate) fn a_quiet_cluster_gets_no_agent_and_no_write(stage: &Stage) -> Result<()> {
    stage.until_agents_are_gone()?;
    let managers = |node: &str| -> Result<Vec<String>> {
        let object = stage.get(&["node", node, "--show-managed-fields"])?;
        let fields = object["metadata"]["managedFields"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let names = fields
            .iter()
            .filter_map(|f| f["manager"].as_str().map(ToOwned::to_owned));
        Ok(names.filter(|name| name.contains("quartermaster")).collect())
    };
    for node in NODES {
        let ours = managers(node)?;
        ensure!(ours.is_empty(), "{node} was written by {ours:?}");
        ensure!(
            deployment::marks(&stage.cluster, node)?.is_empty(),
            "{node} carries marks"
        );
    }
    Ok(())
}

pub(crate) fn every_containerd_is_provisioned_runs_wasm_and_is_put_back_byte_for_byte(
    stage: &Stage,
) -> Result<()> {
    let mut before = BTreeMap::new();
    for node in NODES {
        before.insert(node, stage.config(node)?);
        stage
            .cluster
            .apply(&server_pod(&format!("stays-{node}"), node, None))?;
    }
    for node in NODES {
        stage.until_phase(&format!("stays-{node}"), "Running")?;
    }

    stage.annotate(&NODES, "kwasm.sh/kwasm-node=true")?;
    for node in NODES {
        stage.until_provisioned(node)?;
        for class in ["wasmedge", "crun"] {
            stage
                .cluster
                .apply(&wasm_pod(&format!("{class}-{node}"), node, class))?;
        }
    }
    for node in NODES {
        for class in ["wasmedge", "crun"] {
            let pod = format!("{class}-{node}");
            stage.until_phase(&pod, "Succeeded")?;
            let log = stage.kubectl(&["logs", &pod])?;
            ensure!(log.contains("hello from WebAssembly"), "{pod} printed {log:?}");
            stage.delete_pods(&[&pod])?;
        }
        ensure!(
            stage.config(node)? != before[node],
            "{node}'s configuration has not changed"
        );
        let events = stage.kubectl(&[
            "get",
            "events",
            "--namespace=default",
            &format!(
                "--field-selector=involvedObject.kind=Node,involvedObject.name={node},reason=Provisioned"
            ),
            "--output=name",
        ])?;
        ensure!(!events.is_empty(), "no Event says that {node} was provisioned");
    }
    stage.until_agents_are_gone()?;

    stage.annotate(&NODES, "kwasm.sh/kwasm-node-")?;
    for node in NODES {
        stage.until_unmarked(node)?;
        let after = stage.config(node)?;
        ensure!(
            after == before[node],
            "{node}'s configuration is not what it was:\n{after}"
        );
        let left = stage.cluster.exec(
            node,
            &["sh", "-c", "ls -d /opt/quartermaster /run/quartermaster 2>/dev/null; systemctl list-units --all --no-legend 'quartermaster*'; ctr -n k8s.io images ls -q | grep -i quartermaster-verif; true"],
        )?;
        ensure!(left.trim().is_empty(), "{node} keeps something of ours:\n{left}");
        let pod = stage.get(&["pod", &format!("stays-{node}")])?;
        ensure!(
            pod["status"]["containerStatuses"][0]["restartCount"] == 0 && pod["status"]["phase"] == "Running",
            "the pod on {node} did not run through: {}",
            pod["status"]
        );
        stage.delete_pods(&[&format!("stays-{node}")])?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn pods_that_use_the_handler_block_its_removal_until_they_are_gone(stage: &Stage) -> Result<()> {
    let node = "worker-21";
    stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned(node)?;
    stage
        .cluster
        .apply(&server_pod("uses-crun", node, Some("crun")))?;
    stage.until_phase("uses-crun", "Running")?;

    stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
    let message = stage.until_condition(node, "True", "RemovalBlocked")?;
    ensure!(
        message.contains("default/uses-crun"),
        "the condition names no pod: {message}"
    );
    stage.until_phase("uses-crun", "Running")?;
    ensure!(
        deployment::marks(&stage.cluster, node)?
            .iter()
            .any(|mark| mark == "kwasm.sh/crun"),
        "the labels are gone while a pod selects on them"
    );

    stage.delete_pods(&["uses-crun"])?;
    stage.until_unmarked(node)?;
    stage.until_agents_are_gone()
}

pub(crate) fn a_containerd_that_does_not_come_back_gets_its_old_configuration_again(
    stage: &Stage,
) -> Result<()> {
    let node = "worker-17";
    let before = stage.config(node)?;
    // A containerd that will not start with our handler, though its rehearsal was fine.
    let drop_in = "mkdir -p /run/systemd/system/containerd.service.d && printf '[Service]\\nExecStartPre=/bin/sh -c \"! grep -q runtimes.crun /etc/containerd/config.toml\"\\n' > /run/systemd/system/containerd.service.d/spite.conf && systemctl daemon-reload";
    stage.cluster.exec(node, &["sh", "-c", drop_in])?;
    stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
    let failed = stage.until_condition(node, "False", "RestartFailed");
    let undo = "rm -r /run/systemd/system/containerd.service.d && systemctl daemon-reload";
    stage.cluster.exec(node, &["sh", "-c", undo])?;
    let message = failed?;
    ensure!(
        message.starts_with("rolled back: "),
        "the condition does not say what was done: {message}"
    );
    ensure!(
        stage.config(node)? == before,
        "the configuration is not what it was"
    );
    ensure!(
        stage
            .cluster
            .exec(node, &["systemctl", "is-active", "containerd"])?
            .trim()
            == "active",
        "containerd does not run"
    );

    // With the obstacle gone it is tried again by itself.
    stage.until_provisioned(node)?;
    stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(node)?;
    ensure!(
        stage.config(node)? == before,
        "the configuration is not what it was"
    );
    stage.until_agents_are_gone()
}

pub(crate) fn a_handler_of_somebody_else_is_refused_and_left_alone(stage: &Stage) -> Result<()> {
    let node = "worker-24";
    let original = stage.config(node)?;
    let foreign = format!(
        "{original}\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun]\n  runtime_type = 'io.containerd.runc.v2'\n  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun.options]\n    BinaryName = '/usr/bin/crun-of-somebody'\n"
    );
    let write = |text: &str| {
        stage.cluster.exec(
            node,
            &[
                "sh",
                "-c",
                "printf %s \"$1\" > /etc/containerd/config.toml",
                "sh",
                text,
            ],
        )
    };
    write(&foreign)?;
    let outcome = (|| {
        stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
        let message = stage.until_condition(node, "False", "HandlerConflict")?;
        ensure!(
            message.contains(CONFIG),
            "the message does not name the file: {message}"
        );
        ensure!(stage.config(node)? == foreign, "the configuration was touched");
        stage.until_agents_are_gone()?;
        stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
        stage.until_unmarked(node)?;
        ensure!(stage.config(node)? == foreign, "the configuration was touched");
        Ok(())
    })();
    write(&original)?;
    outcome?;
    stage.until_agents_are_gone()
}

pub(crate) fn a_rebooted_node_is_verified_again(stage: &Stage) -> Result<()> {
    let node = "worker-24";
    let boot = || -> Result<(String, String)> {
        let object = stage.get(&["node", node])?;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        Ok((
            text(&object["status"]["nodeInfo"]["bootID"]),
            text(&object["metadata"]["annotations"]["kwasm.sh/verified-boot-id"]),
        ))
    };
    stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned(node)?;
    stage.until_agents_are_gone()?;
    let (old, _) = boot()?;
    stage.cluster.stop_node(node)?;
    stage.cluster.start_node(node)?;
    stage.cluster.wait_until_ready(&[node], crate::stage::SOON)?;
    stage.until("the node to be verified in its new boot", || {
        let (now, verified) = boot()?;
        ensure!(
            now != old && now == verified,
            "it booted as {now} and was verified in {verified}"
        );
        Ok(())
    })?;
    stage.cluster.apply(&wasm_pod("after-boot", node, "wasmedge"))?;
    stage.until_phase("after-boot", "Succeeded")?;
    stage.delete_pods(&["after-boot"])?;
    stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(node)?;
    stage.until_agents_are_gone()
}

pub(crate) fn auto_provision_takes_every_node_but_one_at_a_time(stage: &Stage) -> Result<()> {
    let left_out = "worker-16";
    stage.annotate(&[left_out], "kwasm.sh/kwasm-node=false")?;
    let options = |auto_provision| Options {
        auto_provision,
        ..Stage::options()
    };
    deployment::deploy(&stage.cluster, &stage.product, &options(true))?;
    let mut most = 0;
    stage.until("all nodes but one to be provisioned", || {
        let nodes = stage.get(&["nodes"])?;
        let items = nodes["items"].as_array().context("no nodes")?;
        let restarting = items
            .iter()
            .filter(|node| node["metadata"]["annotations"]["kwasm.sh/restart"].is_string())
            .count();
        most = most.max(restarting);
        for node in items {
            let name = node["metadata"]["name"].as_str().unwrap_or_default();
            let ready = node["metadata"]["labels"]["kwasm.sh/crun"] == "ready";
            ensure!(ready != (name == left_out), "{name} has the ready label: {ready}");
        }
        Ok(())
    })?;
    ensure!(most <= 1, "{most} nodes restarted at once");
    ensure!(
        !stage.config(left_out)?.contains("runtimes.crun"),
        "{left_out} was provisioned against its annotation"
    );

    // Switched off, it leaves what carries the annotation and puts the rest back.
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
    deployment::deploy(&stage.cluster, &stage.product, &options(false))?;
    for node in ["worker-17", "worker-21"] {
        stage.until_unmarked(node)?;
    }
    stage.until_provisioned("worker-24")?;
    stage.annotate(&["worker-24", left_out], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()
}
