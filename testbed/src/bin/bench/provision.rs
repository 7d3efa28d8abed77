//! Provisioning: from the annotation to a Wasm pod, stage by stage, and what an agent costs that stays.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testbed::images::Product;
use testbed::{Cluster, deployment, wait_for};

use crate::table::Table;
use crate::{DEADLINE, WORKERS};

/// Of each measurement.
const ROUNDS: usize = 5;

/// What each stage of an installation takes, by hand on the node, from the agent's own lines.
fn stages(cluster: &Cluster, product: &Product, table: &mut Table) -> Result<()> {
    let image = format!("{}/{}", cluster.registry(), product.agent.name);
    let bring = format!(
        "set -e; mkdir -p /root/bench/mnt; cd /root/bench; crictl pull {image} >/dev/null
         ctr -n k8s.io images mount {image} /root/bench/mnt >/dev/null; cp -a mnt/payload mnt/quartermaster-agent .
         ctr -n k8s.io images unmount --rm /root/bench/mnt >/dev/null"
    );
    for node in WORKERS {
        cluster.exec(node, &["sh", "-c", &bring])?;
        let (mut took, mut gaps) = (BTreeMap::<String, Vec<f64>>::new(), Vec::new());
        for _ in 0..ROUNDS {
            let said = cluster.exec(
                node,
                &[
                    "/root/bench/quartermaster-agent",
                    "install",
                    "--json",
                    "--payload=/root/bench/payload",
                ],
            )?;
            for line in said.lines() {
                let line: Value = serde_json::from_str(line)?;
                if let (Some(stage), Some(took_ms)) = (line["stage"].as_str(), line["milliseconds"].as_f64())
                {
                    took.entry(stage.to_owned()).or_default().push(took_ms);
                }
                gaps.extend(line["socketGapMilliseconds"].as_f64());
            }
            cluster.exec(node, &["/root/bench/quartermaster-agent", "uninstall"])?;
        }
        cluster.exec(node, &["rm", "-r", "/root/bench"])?;
        for (stage, took) in took {
            table.add(&format!("by hand: {stage}, {node}"), &took, "ms");
        }
        table.add(
            &format!("by hand: containerd without a socket, {node}"),
            &gaps,
            "ms",
        );
    }
    Ok(())
}

pub(crate) fn provision(cluster: &Cluster, product: &Product, table: &mut Table) -> Result<()> {
    stages(cluster, product, table)?;
    for node in WORKERS {
        let (mut cold, mut warm, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let (mut gaps, mut memory) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            // The first round makes the images of the Wasm pod and of the sandbox be there.
            let absent = round % 2 == 1;
            if absent {
                let image = format!("{}/{}", cluster.registry(), product.agent.name);
                cluster.exec(node, &["crictl", "rmi", &image])?;
            }
            let (line, ended) = annotate_to_running(cluster, node)?;
            if round > 0 {
                if absent { &mut cold } else { &mut warm }.push(line);
                ends.push(ended - line);
            }
            gaps.extend(socket_gap(cluster, node)?);
            memory.extend(agent_memory(cluster, node, "VmRSS")?);
            undo(cluster, node)?;
        }
        table.add(
            &format!("annotate to a Wasm pod's first line, agent image absent, {node}"),
            &cold,
            "s",
        );
        table.add(
            &format!("annotate to a Wasm pod's first line, agent image present, {node}"),
            &warm,
            "s",
        );
        table.add(&format!("from there to the phase Succeeded, {node}"), &ends, "s");
        table.add(&format!("containerd without a socket, {node}"), &gaps, "ms");
        table.add(
            &format!("agent's resident memory after an installation, {node}"),
            &memory,
            "MB",
        );
    }
    parked(cluster, table)
}

/// What an agent costs that stays: resident memory, and how often it wakes, probes of the kubelet included.
fn parked(cluster: &Cluster, table: &mut Table) -> Result<()> {
    const WATCHED: u32 = 60;
    let node = WORKERS[2];
    let add =
        r#"[{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--agents=parked"}]"#;
    let patch = [
        "patch",
        "deployment",
        "quartermaster-coordinator",
        "--namespace=quartermaster",
        "--type=json",
        "--patch",
    ];
    cluster.kubectl(&[&patch[..], &[add]].concat())?;
    deployment::wait_until_up(cluster)?;
    deployment::annotate(cluster, &[node], "kwasm.sh/kwasm-node=true")?;
    deployment::wait_until_provisioned(cluster, node, DEADLINE)?;
    let switches = r#"for p in /proc/[0-9]*; do case "$(tr '\0' ' ' < $p/cmdline 2>/dev/null)" in /quartermaster-agent*) cat $p/task/*/status;; esac; done | awk '/^voluntary_ctxt/ {n+=$2} END {print n}'"#;
    let read = || -> Result<f64> { Ok(cluster.exec(node, &["sh", "-c", switches])?.trim().parse()?) };
    // Everything of the installation has to be over first: its watch of the agent, and the coordinator's way to it.
    cluster.exec(node, &["sleep", "10"])?;
    let before = read()?;
    cluster.exec(node, &["sleep", &WATCHED.to_string()])?;
    table.add(
        "a parked agent's wake-ups in a minute, the kubelet's probes among them",
        &[read()? - before],
        "",
    );
    let memory: Vec<f64> = agent_memory(cluster, node, "VmRSS")?.into_iter().collect();
    table.goal("a parked agent's resident memory", &memory, "MB", 6.0);
    let anonymous: Vec<f64> = agent_memory(cluster, node, "RssAnon")?.into_iter().collect();
    table.add("of that, its own and not its program's file", &anonymous, "MB");
    deployment::annotate(cluster, &[node], "kwasm.sh/kwasm-node-")?;
    let take = add.replace("\"add\"", "\"remove\"").replace("args/-", "args/2");
    cluster.kubectl(&[&patch[..], &[&take]].concat())?;
    deployment::wait_until_up(cluster)?;
    deployment::wait_until_agents_are_gone(cluster, DEADLINE)
}

/// From the annotation to the first line that a Wasm module prints whose pod was there before it and waited for the node,
/// and to the pod's phase Succeeded, which the kubelet notices up to a second after the module's end.
fn annotate_to_running(cluster: &Cluster, node: &str) -> Result<(f64, f64)> {
    cluster.apply(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: bench, annotations: {{module.wasm.image/variant: compat-smart}}}}, spec: {{runtimeClassName: wasmedge, restartPolicy: Never, nodeSelector: {{kubernetes.io/hostname: {node}}}, containers: [{{name: hello, image: \"registry.testbed:5000/hello-wasm:1.0\", command: [/hello.wasm]}}]}}}}"
    ))?;
    let pod = deployment::get(cluster, &["pod", "bench"])?;
    let uid = pod["metadata"]["uid"].as_str().context("the pod has no uid")?;
    let start = Instant::now();
    deployment::annotate(cluster, &[node], "kwasm.sh/kwasm-node=true")?;
    let printed = format!(
        "until grep -qs WebAssembly /var/log/pods/default_bench_{uid}/hello/0.log; do sleep 0.02; done"
    );
    cluster
        .exec(node, &["timeout", "120", "sh", "-c", &printed])
        .with_context(|| deployment::coordinator_log(cluster))?;
    let line = start.elapsed().as_secs_f64();
    cluster.kubectl(&[
        "wait",
        "pod/bench",
        "--for=jsonpath={.status.phase}=Succeeded",
        "--timeout=120s",
    ])?;
    Ok((line, start.elapsed().as_secs_f64()))
}

fn undo(cluster: &Cluster, node: &str) -> Result<()> {
    cluster.kubectl(&["delete", "pod", "bench", "--wait"])?;
    deployment::annotate(cluster, &[node], "kwasm.sh/kwasm-node-")?;
    wait_for("the node to be put back", DEADLINE, || {
        let marks = deployment::marks(cluster, node)?;
        ensure!(marks.is_empty(), "it carries {marks:?}");
        Ok(Some(()))
    })?;
    deployment::wait_until_agents_are_gone(cluster, DEADLINE)
}

/// What the agent reported of the last installation, from the coordinator's log.
fn socket_gap(cluster: &Cluster, node: &str) -> Result<Option<f64>> {
    let log = deployment::coordinator_log(cluster);
    let last = log
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|line| line["message"] == "reported done" && line["node"] == node && line["work"] == "Install");
    let Some(line) = last else {
        bail!("the log tells of no installation on {node}");
    };
    Ok(line["socket_gap_ms"]
        .as_f64()
        .or_else(|| line["socket_gap_ms"].as_str()?.parse().ok()))
}

/// Memory of the agent's process in its pod, in megabytes, by this line of its `/proc/PID/status` (`VmRSS`, `VmHWM`); none
/// if it has gone already.
pub(crate) fn agent_memory(cluster: &Cluster, node: &str, line: &str) -> Result<Option<f64>> {
    let script = "for p in /proc/[0-9]*; do case \"$(tr '\\0' ' ' < $p/cmdline 2>/dev/null)\" in /quartermaster-agent*) awk \"/$1/ {print \\$2}\" $p/status;; esac; done";
    let printed = cluster.exec(node, &["sh", "-c", script, "sh", line])?;
    Ok(printed
        .lines()
        .next()
        .and_then(|kib| kib.parse::<f64>().ok())
        .map(|kib| kib / 1024.0))
}
