//! Pulling: beside `crictl pull` on the same nodes, when all is there already, and until it stops when it is told to.

use std::fs;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use testbed::deployment;
use testbed::faults::Rules;
use testbed::{Cluster, images, wait_for};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::table::Table;
use crate::{DEADLINE, WORKERS, agent_memory};

/// In megabytes; 667 in all, of bytes that do not compress.
const SIZES: [usize; 20] = [
    200, 100, 80, 60, 40, 30, 25, 20, 15, 15, 12, 10, 10, 10, 8, 8, 7, 7, 7, 6,
];
const ROUNDS: usize = 3;
/// Images that are all there already.
const PRESENT: usize = 100;

pub(crate) fn prefetch(cluster: &Cluster, table: &mut Table) -> Result<()> {
    let large: Vec<(String, usize)> = SIZES
        .into_iter()
        .enumerate()
        .map(|(n, megabytes)| (format!("bench-{n}:1.0"), megabytes * 1_000_000))
        .collect();
    let names = push(cluster, &large)?;
    beside_crictl(cluster, &names, &WORKERS, "at once on three nodes", table)?;
    for node in WORKERS {
        beside_crictl(cluster, &names, &[node], "alone on its node", table)?;
    }
    forget(cluster, &names)?;
    all_present(cluster, table)?;
    until_stopped(cluster, table)
}

/// The same images on the same nodes, by a Prefetch and by `crictl pull` with four at once on each node.
fn beside_crictl(
    cluster: &Cluster,
    names: &[String],
    nodes: &[&str],
    how: &str,
    table: &mut Table,
) -> Result<()> {
    let (mut ours, mut theirs, mut ready, mut memory) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        forget(cluster, names)?;
        theirs.push(crictl(cluster, names, nodes)?);
        forget(cluster, names)?;
        let begun = SystemTime::now();
        ready.push(apply_to_ready(cluster, names, nodes)?);
        ours.push(last_image(cluster, nodes, begun)?);
        for node in nodes {
            memory.extend(agent_memory(cluster, node, "VmHWM")?);
        }
        take_back(cluster)?;
    }
    let slowest: Vec<f64> = theirs
        .iter()
        .map(|nodes| nodes.iter().copied().fold(0.0, f64::max))
        .collect();
    let whole = nodes.len() > 1;
    for (n, node) in nodes.iter().enumerate() {
        let of = |runs: &[Vec<f64>]| -> Vec<f64> { runs.iter().map(|run| run[n]).collect() };
        let (ours, theirs) = (of(&ours), of(&theirs));
        table.compare(
            &format!("20 images of 667 MB, from apply to the last, {node}, {how}"),
            &ours,
            "s",
            "crictl pull, four at once",
            &theirs,
        );
    }
    if whole {
        table.compare(
            &format!("20 images of 667 MB, from apply to READY, {how}"),
            &ready,
            "s",
            "crictl pull, four at once, the slowest node",
            &slowest,
        );
    }
    table.add(
        &format!("agent's memory while it pulled, the most, {how}"),
        &memory,
        "MB",
    );
    Ok(())
}

/// Seconds from `begun` to the moment at which each node's last image was there, by the coordinator's log.
fn last_image(cluster: &Cluster, nodes: &[&str], begun: SystemTime) -> Result<Vec<f64>> {
    let begun = OffsetDateTime::from(begun);
    let since = begun.format(&Rfc3339)?;
    let log = deployment::coordinator_log_since(cluster, &since);
    nodes
        .iter()
        .map(|node| {
            let last = log
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok())
                .filter(|line| line["message"] == "image ready" && line["node"] == *node)
                .filter_map(|line| OffsetDateTime::parse(line["timestamp"].as_str()?, &Rfc3339).ok())
                .max();
            let last = last.with_context(|| format!("the log tells of no image on {node}"))?;
            Ok((last - begun).as_seconds_f64())
        })
        .collect()
}

/// What has to be done when nothing has: images that are all there, of which the coordinator does not know.
fn all_present(cluster: &Cluster, table: &mut Table) -> Result<()> {
    let small: Vec<(String, usize)> = (0..PRESENT)
        .map(|n| (format!("bench-small-{n}:1.0"), 4096))
        .collect();
    let names = push(cluster, &small)?;
    crictl(cluster, &names, &WORKERS)?;
    let (mut took, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let before = requests(cluster)?;
        took.push(apply_to_ready(cluster, &names, &WORKERS)?);
        calls.push(requests(cluster)? - before);
        take_back(cluster)?;
    }
    table.add(
        "100 images all present on three nodes, from apply to READY",
        &took,
        "s",
    );
    table.add(
        "requests to the API server meanwhile, of both replicas",
        &calls,
        "",
    );
    forget(cluster, &names)
}

/// A pull from a slow registry whose Prefetch is deleted in the middle, until the registry has sent its last byte.
fn until_stopped(cluster: &Cluster, table: &mut Table) -> Result<()> {
    let faults = cluster.faults(5001)?;
    let registry = faults.name();
    let image = format!("{registry}/bench-0:1.0");
    for node in WORKERS {
        let folder = format!("/etc/containerd/certs.d/{registry}");
        let hosts = format!("[host.\"http://{registry}\"]\n  capabilities = [\"pull\", \"resolve\"]\n");
        let script = "mkdir -p \"$1\" && printf %s \"$2\" > \"$1/hosts.toml\"";
        cluster.exec(node, &["sh", "-c", script, "sh", &folder, &hosts])?;
        let mut stops = Vec::new();
        for _ in 0..ROUNDS {
            faults.set(Rules {
                rate: Some(4_000_000),
                ..Rules::default()
            });
            apply(cluster, std::slice::from_ref(&image), &[node])?;
            wait_for("the pull to begin", DEADLINE, || {
                ensure!(faults.last_byte().is_some(), "no byte was asked for");
                Ok(Some(()))
            })?;
            let begun = Instant::now();
            cluster.kubectl(&["delete", "prefetch", "bench", "--wait=false"])?;
            let last = wait_for("the pull to end", DEADLINE, || {
                let last = faults.last_byte().context("no byte was asked for")?;
                ensure!(last.elapsed() > Duration::from_secs(1), "bytes are coming");
                Ok(Some(last))
            })?;
            stops.push(last.saturating_duration_since(begun).as_secs_f64());
            take_back(cluster)?;
        }
        table.add(
            &format!("from the end of a Prefetch to the last byte, {node}"),
            &stops,
            "s",
        );
    }
    Ok(())
}

fn push(cluster: &Cluster, sizes: &[(String, usize)]) -> Result<Vec<String>> {
    let folder = tempfile::tempdir()?;
    let archive = folder.path().join("image.tar");
    sizes
        .iter()
        .map(|(name, size)| {
            images::random(&archive, name, *size)?;
            cluster.push(&archive, name)?;
            fs::remove_file(&archive)?;
            Ok(format!("{}/{name}", cluster.registry()))
        })
        .collect()
}

fn forget(cluster: &Cluster, names: &[String]) -> Result<()> {
    for node in WORKERS {
        let mut command = vec!["crictl", "rmi"];
        command.extend(names.iter().map(String::as_str));
        // Those that are not there are no error here.
        let _ = cluster.exec(node, &command);
        let listed = cluster.exec(node, &["crictl", "images"])?;
        ensure!(!listed.contains("/bench-"), "{node} still has images:\n{listed}");
        cluster
            .exec(node, &["ctr", "-n", "k8s.io", "content", "prune", "references"])
            .ok();
    }
    Ok(())
}

/// The seconds that it takes on each node.
fn crictl(cluster: &Cluster, names: &[String], nodes: &[&str]) -> Result<Vec<f64>> {
    let start = Instant::now();
    let list = names.join("\n");
    std::thread::scope(|scope| {
        let pulls: Vec<_> = nodes
            .iter()
            .map(|node| {
                let script = "printf '%s\\n' \"$1\" | xargs -P 4 -n 1 crictl pull >/dev/null";
                let list = list.as_str();
                scope.spawn(move || -> Result<f64> {
                    cluster.exec(node, &["sh", "-c", script, "sh", list])?;
                    Ok(start.elapsed().as_secs_f64())
                })
            })
            .collect();
        pulls
            .into_iter()
            .map(|pull| pull.join().unwrap_or_else(|_| bail!("a thread died")))
            .collect()
    })
}

/// Makes a Prefetch of these images for these nodes.
fn apply(cluster: &Cluster, names: &[String], nodes: &[&str]) -> Result<()> {
    let filter = match nodes {
        [node] => node,
        _ => "worker",
    };
    let object = json!({
        "apiVersion": "cache.techsquad.rocks/v1", "kind": "Prefetch",
        "metadata": {"name": "bench", "namespace": "default"},
        // As many at once as crictl is given.
        "spec": {"images": names, "node_filter": filter, "retry_after": 60, "pull": {"perNode": 4}},
    });
    cluster.apply(&object.to_string()).map(drop)
}

fn apply_to_ready(cluster: &Cluster, names: &[String], nodes: &[&str]) -> Result<f64> {
    let start = Instant::now();
    apply(cluster, names, nodes)?;
    cluster
        .kubectl(&[
            "wait",
            "prefetch/bench",
            "--for=condition=Ready",
            "--timeout=180s",
        ])
        .with_context(|| deployment::coordinator_log(cluster))?;
    Ok(start.elapsed().as_secs_f64())
}

/// Takes the Prefetch back and waits until nothing of it is under way.
fn take_back(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "prefetch", "bench", "--ignore-not-found"])?;
    wait_for("pins to be let go", DEADLINE, || {
        for node in WORKERS {
            let marks = deployment::marks(cluster, node)?;
            ensure!(
                !marks.iter().any(|mark| mark.ends_with("pins-held")),
                "{node} has {marks:?}"
            );
        }
        Ok(Some(()))
    })?;
    deployment::wait_until_agents_are_gone(cluster, DEADLINE)
}

/// Requests to the API server that the coordinator has counted, watches not among them.
fn requests(cluster: &Cluster) -> Result<f64> {
    let addresses = cluster.kubectl(&[
        "get",
        "pods",
        "--namespace=quartermaster",
        "--selector=app.kubernetes.io/component=coordinator",
        "--output=jsonpath={.items[*].status.podIP}",
    ])?;
    let mut sum = 0.0;
    for address in addresses.split_whitespace() {
        let metrics = cluster.in_fabric(&["curl", "-sS", &format!("http://{address}:7446/metrics")])?;
        sum += metrics
            .lines()
            .filter(|line| {
                line.starts_with("quartermaster_api_requests_total") && !line.contains("\"watch\"")
            })
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum::<f64>();
    }
    Ok(sum)
}
