//! What scenarios share: the cluster, and the words in which they ask it.

use std::io::Read;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::deployment::{self, Options};
use testbed::images::Product;
use testbed::{Cluster, wait_for};

/// Generous: what is measured in seconds here is measured, not tested, by the benchmarks.
pub(crate) const SOON: Duration = Duration::from_secs(120);

pub(crate) const NODES: [&str; 4] = ["worker-16", "worker-17", "worker-21", "worker-24"];
pub(crate) const CONFIG: &str = "/etc/containerd/config.toml";

pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    pub(crate) product: Product,
}

impl Stage {
    /// Runs a scenario; one that fails tells with what the coordinator logged.
    pub(crate) fn run(&self, scenario: fn(&Self) -> Result<()>) -> Result<()> {
        self.reset()
            .context("what an earlier scenario left can't be cleared away")?;
        let since = now();
        scenario(self).with_context(|| {
            let log = deployment::coordinator_log_since(&self.cluster, &since);
            format!("the coordinator's log of this scenario:\n{log}\n")
        })
    }

    /// How the coordinator runs in all scenarios that ask for nothing else.
    pub(crate) fn options() -> Options {
        Options {
            linger: Some("3s".to_owned()),
            ..Options::default()
        }
    }

    /// Runs a part of a scenario with these flags of the coordinator besides.
    pub(crate) fn with_flags(&self, flags: &[&str], part: impl FnOnce() -> Result<()>) -> Result<()> {
        let options = Options {
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            ..Self::options()
        };
        deployment::deploy(&self.cluster, &self.product, &options)?;
        let outcome = part();
        let log = outcome
            .is_err()
            .then(|| deployment::coordinator_log(&self.cluster));
        deployment::deploy(&self.cluster, &self.product, &Self::options())?;
        // The log of these flags ends with their coordinator.
        outcome.with_context(|| log.unwrap_or_default())
    }

    /// Clears away what a scenario that failed has left; where there is nothing it does nothing.
    fn reset(&self) -> Result<()> {
        self.kubectl(&[
            "delete",
            "prefetch,deployment,pod",
            "--all",
            "--namespace=default",
            "--timeout=60s",
        ])?;
        self.forget_what_was_told()?;
        self.annotate(&NODES, "kwasm.sh/kwasm-node-")?;
        for node in NODES {
            self.until_unmarked(node)?;
            // What was installed by hand.
            let script = "cd /root/hand 2>/dev/null && ls -d /opt/quartermaster /home/kubernetes/bin/quartermaster 2>/dev/null | grep -q . && ./quartermaster-agent uninstall --payload payload; true";
            self.cluster.exec(node, &["sh", "-c", script])?;
        }
        Ok(())
    }

    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.cluster.kubectl(args)
    }

    pub(crate) fn get(&self, what: &[&str]) -> Result<Value> {
        deployment::get(&self.cluster, what)
    }

    pub(crate) fn annotate(&self, nodes: &[&str], annotation: &str) -> Result<()> {
        deployment::annotate(&self.cluster, nodes, annotation)
    }

    pub(crate) fn config(&self, node: &str) -> Result<String> {
        self.cluster.exec(node, &["cat", CONFIG])
    }

    /// Waits until a condition holds that is told in words when it does not.
    pub(crate) fn until(&self, what: &str, mut look: impl FnMut() -> Result<()>) -> Result<()> {
        wait_for(what, SOON, || look().map(Some))?;
        Ok(())
    }

    pub(crate) fn until_provisioned(&self, node: &str) -> Result<()> {
        deployment::wait_until_provisioned(&self.cluster, node, SOON)
    }

    pub(crate) fn until_condition(&self, node: &str, status: &str, reason: &str) -> Result<String> {
        let mut message = String::new();
        self.until(&format!("{node} to have the condition {status}/{reason}"), || {
            let condition = deployment::condition(&self.cluster, node)?;
            let (is, because, words) = condition.clone().context("it has no condition")?;
            ensure!(is == status && because == reason, "it has {condition:?}");
            message = words;
            Ok(())
        })?;
        Ok(message)
    }

    /// Waits until nothing of ours is on a node but the annotation of its images and its agent.
    pub(crate) fn until_unmarked(&self, node: &str) -> Result<()> {
        self.until(&format!("{node} to carry no mark"), || {
            let marks = deployment::marks(&self.cluster, node)?;
            let left: Vec<_> = marks
                .iter()
                .filter(|mark| mark.as_str() != "kwasm.sh/agent" && !mark.starts_with("cache."))
                .collect();
            ensure!(left.is_empty(), "it carries {left:?}");
            Ok(())
        })
    }

    pub(crate) fn until_agents_are_gone(&self) -> Result<()> {
        deployment::wait_until_agents_are_gone(&self.cluster, SOON)
    }

    /// Deletes pods and waits until they are gone.
    pub(crate) fn delete_pods(&self, names: &[&str]) -> Result<()> {
        let mut args = vec!["delete", "pod", "--ignore-not-found", "--wait", "--timeout=60s"];
        args.extend(names);
        self.kubectl(&args).map(drop)
    }

    pub(crate) fn until_phase(&self, pod: &str, phase: &str) -> Result<()> {
        self.until(&format!("pod {pod} to be {phase}"), || {
            let object = self.get(&["pod", pod])?;
            ensure!(object["status"]["phase"] == phase, "it is {}", object["status"]);
            Ok(())
        })
    }

    /// How many agents' pods the DaemonSet has made so far, by its Events.
    pub(crate) fn daemon_events(&self) -> Result<usize> {
        let events = self.get(&[
            "events",
            "--namespace=quartermaster",
            "--field-selector=involvedObject.kind=DaemonSet,reason=SuccessfulCreate",
        ])?;
        let items = events["items"].as_array().context("no list")?;
        let count = |event: &Value| usize::try_from(event["count"].as_u64().unwrap_or(1)).unwrap_or(0);
        Ok(items.iter().map(count).sum())
    }

    /// Starts a kubectl that goes on until it is stopped.
    pub(crate) fn kubectl_in_background(&self, args: &[&str]) -> Result<Background> {
        let child = std::process::Command::new(self.cluster.program("kubectl"))
            .arg("--kubeconfig")
            .arg(self.cluster.kubeconfig())
            .args(args)
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .context("kubectl can't be started")?;
        Ok(Background(child))
    }

    pub(crate) fn agent_pods(&self) -> Result<Vec<String>> {
        deployment::agent_pods(&self.cluster)
    }
}

/// A kubectl that goes on until it is stopped.
pub(crate) struct Background(std::process::Child);

impl Background {
    /// Ends it; returns what it printed.
    pub(crate) fn stop(mut self) -> Result<String> {
        self.0.kill()?;
        let mut printed = String::new();
        if let Some(output) = self.0.stdout.as_mut() {
            output.read_to_string(&mut printed)?;
        }
        self.0.wait()?;
        Ok(printed)
    }
}

/// A pod that runs the WASI module on a node by a RuntimeClass.
pub(crate) fn wasm_pod(name: &str, node: &str, class: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, annotations: {{module.wasm.image/variant: compat-smart}}}}
spec:
  runtimeClassName: {class}
  restartPolicy: Never
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  containers:
    - {{name: hello, image: "registry.testbed:5000/hello-wasm:1.0", command: [/hello.wasm]}}
"#
    )
}

/// A pod that runs the small server on a node; by a RuntimeClass if one is named.
pub(crate) fn server_pod(name: &str, node: &str, class: Option<&str>) -> String {
    let class = class
        .map(|class| format!("  runtimeClassName: {class}\n"))
        .unwrap_or_default();
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
{class}  terminationGracePeriodSeconds: 1
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  containers:
    - {{name: server, image: "registry.testbed:5000/server:1.0"}}
"#
    )
}

fn now() -> String {
    time::OffsetDateTime::now_utc()
        .format(&time::format_description::well_known::Rfc3339)
        .unwrap_or_default()
}
