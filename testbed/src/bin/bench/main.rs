//! The numbers that are published: measured on the testbed, printed as a table, and written to
//! `target/bench.json` as an array of name, value and unit. What it is compared with runs beside it.

mod prefetch;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use testbed::deployment::{self, Options, workspace};
use testbed::fleet::{self, Scenario, Temper};
use testbed::images::Product;
use testbed::{Cluster, Progress, Spec, wait_for};

use prefetch::prefetch;
use table::{Table, megabytes};

const NAME: &str = "bench";
const NODES: &str = "worker-1=1.7,worker-2=2.1,worker-3=2.4";
const WORKERS: [&str; 3] = ["worker-1", "worker-2", "worker-3"];
const ROUNDS: usize = 5;
const DEADLINE: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    for part in &parts {
        ensure!(
            ["provision", "prefetch", "fleet"].contains(&part.as_str()),
            "there is no part {part}; the parts are provision, prefetch and fleet"
        );
    }
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);

    let mut table = Table::default();
    if wanted("provision") || wanted("prefetch") {
        on_three_nodes(&wanted, &mut table)?;
    }
    if wanted("fleet") {
        fleets(&mut table)?;
    }
    table.print();
    let file = workspace().join("target/bench.json");
    fs::write(&file, serde_json::to_string_pretty(&table.rows)?).context("target/bench.json")?;
    println!("\nAlso in target/bench.json.");
    Ok(())
}

fn on_three_nodes(wanted: &impl Fn(&str) -> bool, table: &mut Table) -> Result<()> {
    let spec = Spec::parse(NAME, NODES)?;
    Cluster::down(NAME)?;
    let start = Instant::now();
    Cluster::up(&spec, &Progress::terminal())?;
    table.add(
        "testbed up with caches, three nodes",
        &[start.elapsed().as_secs_f64()],
        "s",
    );
    let (cluster, product) = deployment::set(&spec, true, &Progress::terminal())?;
    deployment::deploy(
        &cluster,
        &product,
        &Options {
            linger: Some("2s".to_owned()),
            ..Options::default()
        },
    )?;
    for image in [&product.agent, &product.coordinator] {
        let size = fs::metadata(&image.archive)?.len();
        let name = image.name.split(':').next().unwrap_or_default();
        table.add(&format!("image {name}, compressed"), &[megabytes(size)], "MB");
    }
    if wanted("provision") {
        provision(&cluster, &product, table)?;
    }
    if wanted("prefetch") {
        prefetch(&cluster, table)?;
    }
    Cluster::down(NAME)
}

/// Simulated fleets of growing size, or of the sizes in `FLEET_NODES`: also a table of their own and a picture.
fn fleets(table: &mut Table) -> Result<()> {
    let sizes = std::env::var("FLEET_NODES").unwrap_or_else(|_| "100,500,1000,2500,5000".to_owned());
    let mut measured = Vec::new();
    for size in sizes.split(',') {
        let options = fleet::Options {
            name: "bench-fleet".to_owned(),
            nodes: size.trim().parse().context("FLEET_NODES")?,
            images: 100,
            seed: 1,
            scenarios: Scenario::all(),
            temper: Temper {
                image: Duration::from_millis(150),
                ..Temper::default()
            },
        };
        let these = fleet::run(options, &Progress::terminal())?;
        for m in &these {
            table.add(&format!("{} nodes, {}", m.nodes, m.what), &[m.value], m.unit);
        }
        measured.extend(these);
    }
    let text = fleet::table(&measured);
    println!("\n{text}");
    fs::write(workspace().join("target/fleet.md"), text).context("target/fleet.md")?;
    fs::write(workspace().join("target/fleet.svg"), fleet::growth(&measured)?).context("target/fleet.svg")?;
    println!("Also in target/fleet.md, and as a picture in target/fleet.svg.");
    Ok(())
}

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

fn provision(cluster: &Cluster, product: &Product, table: &mut Table) -> Result<()> {
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
    Ok(())
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
fn agent_memory(cluster: &Cluster, node: &str, line: &str) -> Result<Option<f64>> {
    let script = "for p in /proc/[0-9]*; do case \"$(tr '\\0' ' ' < $p/cmdline 2>/dev/null)\" in /quartermaster-agent*) awk \"/$1/ {print \\$2}\" $p/status;; esac; done";
    let printed = cluster.exec(node, &["sh", "-c", script, "sh", line])?;
    Ok(printed
        .lines()
        .next()
        .and_then(|kib| kib.parse::<f64>().ok())
        .map(|kib| kib / 1024.0))
}
