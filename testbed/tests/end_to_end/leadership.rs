//! Of two replicas one leads, and nothing is lost or done twice when it ends, is paused, or the API server goes away.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::{deployment, wait_for};

use crate::stage::{SOON, Stage};

const NAMESPACE: &str = "--namespace=quartermaster";

/// A pod of the coordinator.
struct Replica {
    name: String,
    node: String,
    address: String,
    restarts: u64,
}

impl Stage {
    fn replicas(&self) -> Result<Vec<Replica>> {
        let pods = self.get(&[
            "pods",
            NAMESPACE,
            "--selector=app.kubernetes.io/component=coordinator",
        ])?;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        Ok(pods["items"]
            .as_array()
            .context("no list")?
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
            .map(|pod| Replica {
                name: text(&pod["metadata"]["name"]),
                node: text(&pod["spec"]["nodeName"]),
                address: text(&pod["status"]["podIP"]),
                restarts: pod["status"]["containerStatuses"][0]["restartCount"]
                    .as_u64()
                    .unwrap_or(0),
            })
            .collect())
    }

    fn replica(&self, name: &str) -> Result<Replica> {
        let mut all = self.replicas()?;
        let at = all.iter().position(|replica| replica.name == name);
        Ok(all.swap_remove(at.with_context(|| format!("{name} is not there"))?))
    }

    /// Waits until another than `old` leads; returns it, and how long that took.
    fn until_another_leads(&self, old: &str) -> Result<(String, Duration)> {
        let begun = Instant::now();
        let leader = wait_for("another replica to lead", SOON, || {
            let leader = deployment::leader(&self.cluster)?;
            ensure!(leader != old, "{old} still does");
            Ok(Some(leader))
        })?;
        Ok((leader, begun.elapsed()))
    }

    fn until_two_replicas(&self) -> Result<()> {
        deployment::wait_until_up(&self.cluster)?;
        self.until("two replicas, one of them leading", || {
            let replicas = self.replicas()?;
            let leader = deployment::leader(&self.cluster)?;
            ensure!(replicas.len() == 2, "there are {}", replicas.len());
            ensure!(
                replicas.iter().any(|replica| replica.name == leader),
                "{leader} leads, which is gone"
            );
            Ok(())
        })
    }

    /// Sends a signal to the coordinator's process on a node, as the node's root user.
    fn signal(&self, replica: &Replica, signal: &str) -> Result<()> {
        let script = format!(
            "id=$(crictl ps -q --label io.kubernetes.pod.name={}) && kill -{signal} $(crictl inspect -o go-template --template '{{{{.info.pid}}}}' $id)",
            replica.name
        );
        self.cluster.exec(&replica.node, &["sh", "-c", &script]).map(drop)
    }

    /// A metric of a replica by its whole name with labels. It is asked for without the API server.
    fn metric(&self, replica: &Replica, name: &str) -> Result<f64> {
        let text = self.metrics(&replica.address)?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .with_context(|| format!("{name} is not in\n{text}"))?;
        Ok(line.trim().parse()?)
    }

    pub(crate) fn metrics(&self, address: &str) -> Result<String> {
        self.cluster.within_fabric(|| {
            let mut stream = TcpStream::connect_timeout(&format!("{address}:7446").parse()?, TIMEOUT)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    }
}

const TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) fn a_leader_that_ends_is_followed_at_once_and_one_that_is_cut_off_soon(
    stage: &Stage,
) -> Result<()> {
    stage.until_two_replicas()?;
    let first = deployment::leader(&stage.cluster)?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
    stage.kubectl(&["delete", "pod", &first, NAMESPACE, "--wait=false"])?;
    let (second, took) = stage.until_another_leads(&first)?;
    eprintln!(
        "a leader that was told to end was followed after {} ms",
        took.as_millis()
    );
    stage.until_provisioned("worker-24")?;
    stage.until_two_replicas()?;

    // No farewell: its node is gone from one moment to the next.
    let node = stage.replica(&second)?.node;
    stage.cluster.stop_node(&node)?;
    let (third, took) = stage.until_another_leads(&second)?;
    eprintln!(
        "a leader whose node lost power was followed after {} ms",
        took.as_millis()
    );
    let leader = stage.replica(&third)?;
    ensure!(leader.node != node, "both replicas were on {node}");
    stage.cluster.start_node(&node)?;
    stage.cluster.wait_until_ready(&[&node], SOON)?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked("worker-24")?;
    stage.until_two_replicas()?;
    stage.until_agents_are_gone()
}

pub(crate) fn a_leader_that_is_paused_past_its_lease_does_nothing_afterwards(stage: &Stage) -> Result<()> {
    stage.until_two_replicas()?;
    let paused = stage.replica(&deployment::leader(&stage.cluster)?)?;
    // It is paused with work before it: what it would do next is to restart a containerd.
    stage.annotate(&["worker-24", "worker-21"], "kwasm.sh/kwasm-node=true")?;
    stage.signal(&paused, "STOP")?;
    let (next, _) = stage.until_another_leads(&paused.name)?;
    let next = stage.replica(&next)?;
    let terms = (
        stage.metric(&next, "quartermaster_leader_term")?,
        stage.metric(&next, "quartermaster_leader")?,
    );
    ensure!(terms.1 == 1.0, "the next one does not lead by its metrics");
    stage.signal(&paused, "CONT")?;
    stage.until("the paused one to know that it leads no more", || {
        let leads = stage.metric(&paused, "quartermaster_leader")?;
        ensure!(leads == 0.0, "it believes that it leads");
        Ok(())
    })?;
    for node in ["worker-24", "worker-21"] {
        stage.until_provisioned(node)?;
    }
    ensure!(
        deployment::leader(&stage.cluster)? == next.name,
        "the Lease has changed hands again"
    );
    ensure!(
        stage.metric(&next, "quartermaster_leader_term")? == terms.0,
        "the term has changed"
    );
    stage.annotate(&["worker-24", "worker-21"], "kwasm.sh/kwasm-node-")?;
    for node in ["worker-24", "worker-21"] {
        stage.until_unmarked(node)?;
    }
    stage.until_agents_are_gone()
}

pub(crate) fn an_api_server_that_goes_away_in_the_middle_is_waited_for(stage: &Stage) -> Result<()> {
    stage.until_two_replicas()?;
    let before = stage.replicas()?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
    stage.until("the node to be taken on", || {
        let marks = deployment::marks(&stage.cluster, "worker-24")?;
        ensure!(
            marks.iter().any(|mark| mark == "kwasm.sh/agent"),
            "it carries {marks:?}"
        );
        Ok(())
    })?;
    stage.cluster.stop_api_server()?;
    let gone = stage.until("nobody to lead, since the Lease can't be renewed", || {
        for replica in &before {
            let leads = stage.metric(replica, "quartermaster_leader")?;
            ensure!(leads == 0.0, "{} leads", replica.name);
        }
        Ok(())
    });
    // Whatever came of that: the next scenario needs it.
    stage.cluster.start_api_server()?;
    gone?;
    stage.until_provisioned("worker-24")?;
    for replica in &before {
        let now = stage.replica(&replica.name)?;
        ensure!(now.restarts == replica.restarts, "{} was started again", now.name);
    }
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()
}
