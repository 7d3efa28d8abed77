//! A testbed as its users see it: bring it up, talk to it, run things in it, cut a node's power, take it down.

mod api_server;
mod up;

use std::ffi::OsString;
use std::fs;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::address::{AddressPlan, REGISTRY};
use crate::cgroups::Cgroups;
use crate::fabric::Fabric;
use crate::faults::Faults;
use crate::host;
use crate::layout::State;
use crate::node::Node;
use crate::parts::Parts;
use crate::process::{Background, Launch, Process, record_path};
use crate::progress::Progress;
use crate::record::Record;
use crate::spec::{NodeSpec, Spec};
use crate::tool::Tool;
use crate::wait::wait_for;
use crate::{registry, teardown};

/// A testbed that is up.
pub struct Cluster {
    spec: Spec,
    plan: AddressPlan,
    state: State,
    cgroups: Cgroups,
    parts: Parts,
    fabric: Fabric,
}

impl Cluster {
    /// The testbed of this name, which an earlier run brought up.
    ///
    /// # Errors
    /// If there is none, or it is not whole.
    pub fn open(name: &str) -> Result<Self> {
        crate::spec::check_testbed_name(name)?;
        host::check()?;
        let state = State::of(name);
        if !state.root().exists() {
            bail!("no testbed {name} is up; bring one up with: testbed up --name {name}");
        }
        let whole = || -> Result<Self> {
            let record = Record::read(&state)?;
            record.parts().check_present()?;
            Ok(Self {
                spec: record.spec(name),
                plan: record.plan(),
                cgroups: Cgroups::of(name)?,
                parts: record.parts().clone(),
                fabric: Fabric::open(&state)?,
                state: state.clone(),
            })
        };
        whole().with_context(|| format!("testbed {name}"))
    }

    /// Takes the testbed of this name down, whatever state it is in; none is no error.
    ///
    /// # Errors
    /// If something of it can't be ended or removed.
    pub fn down(name: &str) -> Result<()> {
        teardown::down(name, &Progress::silent())
    }

    /// What it was asked to be.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The kubeconfig of its administrator, for any client on this host.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.state.kubeconfig()
    }

    /// The registry's name, as image references in pods begin: `registry.testbed:5000`.
    #[must_use]
    pub fn registry(&self) -> &'static str {
        REGISTRY
    }

    /// The path of a program of the testbed's own: `kubectl`, `helm`, `grpc-health-probe`.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.parts.program(name)
    }

    /// The folder of logs of the control plane, the registry and the name server.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.state.logs()
    }

    /// Runs kubectl as the administrator; returns what it printed.
    ///
    /// # Errors
    /// If it fails; with its standard error.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        Ok(self
            .kubectl_tool()
            .args(args)
            .called(format!("kubectl {}", args.join(" ")))
            .output()?)
    }

    /// Runs helm as the administrator, with settings and caches of the testbed's own; returns what it printed.
    ///
    /// # Errors
    /// If it fails; with its standard error.
    pub fn helm(&self, args: &[&str]) -> Result<String> {
        let mut tool = Tool::new(self.parts.program("helm")).args(args);
        for (name, value) in self.helm_env() {
            tool = tool.env(name, value);
        }
        Ok(tool.called(format!("helm {}", args.join(" "))).output()?)
    }

    /// What helm finds its cluster by, and where it keeps what it keeps.
    #[must_use]
    pub fn helm_env(&self) -> [(&'static str, PathBuf); 4] {
        let home = self.state.root().join("helm");
        [
            ("KUBECONFIG", self.kubeconfig()),
            ("HELM_CACHE_HOME", home.join("cache")),
            ("HELM_CONFIG_HOME", home.join("config")),
            ("HELM_DATA_HOME", home.join("data")),
        ]
    }

    /// Applies a manifest with kubectl; returns what it printed.
    ///
    /// # Errors
    /// If the API server refuses it; with kubectl's words.
    pub fn apply(&self, manifest: &str) -> Result<String> {
        Ok(self
            .kubectl_tool()
            .args(["apply", "--filename=-"])
            .input(manifest)
            .called("kubectl apply")
            .output()?)
    }

    /// Runs a program on a node, as its root user; returns what it printed.
    ///
    /// # Errors
    /// If the node does not run, or the program fails; with its standard error.
    pub fn exec(&self, node: &str, command: &[&str]) -> Result<String> {
        Ok(self
            .node(node)?
            .run(command)?
            .called(format!("on {node}: {}", command.join(" ")))
            .output()?)
    }

    /// The command line that enters a node, for a person at a terminal: the command to run there is still to be added.
    ///
    /// # Errors
    /// If the node does not run.
    pub fn enter_node(&self, node: &str) -> Result<Vec<OsString>> {
        let mut line = vec![OsString::from("sh")];
        line.extend(self.node(node)?.enter(true)?);
        Ok(line)
    }

    /// Runs a program of the host in the fabric's network, where pods, services' names and the registry are within reach;
    /// returns what it printed. `kubectl` and `grpc-health-probe` are found without a path.
    ///
    /// # Errors
    /// If it fails; with its standard error.
    pub fn in_fabric(&self, command: &[&str]) -> Result<String> {
        let (program, args) = command.split_first().context("no command to run")?;
        let mut path = std::env::join_paths(self.parts.tools())?;
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        Ok(self
            .fabric
            .run_with_names(program)
            .args(args)
            .env("PATH", path)
            .env("KUBECONFIG", self.state.pki().join("admin.kubeconfig"))
            .called(format!("in the fabric: {}", command.join(" ")))
            .output()?)
    }

    /// Puts an image into the registry as `name` (`server:1.0`): the path of an OCI or Docker archive or an OCI layout, or
    /// the name of an image that Docker or buildah has on this host.
    ///
    /// # Errors
    /// If there is no such image, or the registry refuses it.
    pub fn push(&self, image: impl AsRef<std::path::Path>, name: &str) -> Result<()> {
        registry::push(&self.fabric, &image.as_ref().display().to_string(), name)
    }

    /// Starts a program of the host as a process of the testbed in the fabric's network; its log is named by its role, and
    /// [`Cluster::down`] ends it.
    ///
    /// # Errors
    /// If it can't be started, or ends at once; with its log's last lines.
    pub fn start_in_fabric(
        &self,
        role: &str,
        command: Vec<OsString>,
        env: Vec<(&str, OsString)>,
    ) -> Result<Background> {
        let mut args = self.fabric.enter();
        args.extend(command);
        Launch {
            role,
            args,
            env,
            cgroups: &self.cgroups.make_control_plane()?,
            run: &self.state.run(),
            logs: &self.state.logs(),
        }
        .start()
    }

    /// A process of the control plane, such as `kube-apiserver`; none if it does not run.
    #[must_use]
    pub fn process(&self, role: &str) -> Option<Process> {
        Process::recorded(&record_path(&self.state.run(), role)).filter(Process::is_alive)
    }

    /// The kubeconfig of its administrator for clients in the fabric, which need no forwarder.
    #[must_use]
    pub fn kubeconfig_in_fabric(&self) -> PathBuf {
        self.state.pki().join("admin.kubeconfig")
    }

    /// The folder that goes with the testbed.
    #[must_use]
    pub fn state(&self) -> &std::path::Path {
        self.state.root()
    }

    /// A registry that misbehaves as it is told, at this port of `registry.testbed`, before the one at port 5000.
    ///
    /// # Errors
    /// If the port is taken.
    pub fn faults(&self, port: u16) -> Result<Faults> {
        let address = SocketAddrV4::new(self.plan.fabric(), port);
        Faults::start(Fabric::open(&self.state)?, address)
    }

    /// Cuts a node's power: everything on it ends at once, its disk stays as it is.
    ///
    /// # Errors
    /// If there is no such node, or it does not end.
    pub fn stop_node(&self, name: &str) -> Result<()> {
        self.node(name)?.cut_power()
    }

    /// Boots a node from its disk, with a new boot id; does not wait for it to be Ready ([`Cluster::wait_until_ready`]).
    ///
    /// # Errors
    /// If there is no such node, or it does not boot.
    pub fn start_node(&self, name: &str) -> Result<()> {
        self.node(name)?.boot(&self.fabric, &self.parts)
    }

    /// Whether a node's processes run.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn is_running(&self, name: &str) -> Result<bool> {
        Ok(self.node(name)?.init().is_some())
    }

    /// Waits until these nodes are Ready **in their present boot**: the word of a kubelet before the power was cut does not
    /// count.
    ///
    /// # Errors
    /// If the deadline passes; with the last words of the nodes that are not.
    pub fn wait_until_ready(&self, nodes: &[&str], deadline: Duration) -> Result<()> {
        let mut missing: Vec<&str> = nodes.to_vec();
        wait_for(&format!("{} to be Ready", nodes.join(", ")), deadline, || {
            let ready = ready_nodes(&self.kubectl(&["get", "nodes", "--output=json"])?)?;
            missing = nodes
                .iter()
                .copied()
                .filter(|name| {
                    let boot = self.boot_id(name);
                    !ready.iter().any(|(n, id)| n == name && *id == boot)
                })
                .collect();
            if missing.is_empty() {
                // Pods are refused until their namespace has its account.
                self.kubectl(&["get", "serviceaccount", "default"])?;
                return Ok(Some(()));
            }
            bail!("not yet: {}", missing.join(", "))
        })
        .with_context(|| {
            let words: Vec<String> = missing
                .iter()
                .filter_map(|name| Some(format!("{name} said:\n{}", self.node(name).ok()?.last_words())))
                .collect();
            words.join("\n")
        })
    }

    fn boot_id(&self, node: &str) -> String {
        fs::read_to_string(self.state.node(node).join("boot-id"))
            .unwrap_or_default()
            .trim()
            .to_owned()
    }

    fn kubectl_tool(&self) -> Tool {
        Tool::new(self.parts.program("kubectl"))
            .env("KUBECONFIG", self.kubeconfig())
            // Else it writes into the home of whoever runs us.
            .env("KUBECACHEDIR", self.state.root().join("kubectl-cache"))
    }

    fn node(&self, name: &str) -> Result<Node<'_>> {
        let position = self.spec.nodes.iter().position(|node| node.name == name);
        let position = position.with_context(|| {
            let known: Vec<&str> = self.spec.nodes.iter().map(|n| n.name.as_str()).collect();
            format!(
                "testbed {} has no node {name}; it has {}",
                self.spec.name,
                known.join(", ")
            )
        })?;
        Ok(self.node_at(&self.spec.nodes[position], position))
    }

    fn node_at<'a>(&'a self, spec: &'a NodeSpec, position: usize) -> Node<'a> {
        Node {
            spec,
            position,
            plan: self.plan,
            state: &self.state,
            cgroups: &self.cgroups,
        }
    }
}

/// Names and boot ids of the nodes that are Ready, from `kubectl get nodes --output=json`.
fn ready_nodes(json: &str) -> Result<Vec<(String, String)>> {
    let list: serde_json::Value = serde_json::from_str(json).context("kubectl said no JSON")?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|node| {
            node["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        })
        .map(|node| {
            (
                text(&node["metadata"]["name"]),
                text(&node["status"]["nodeInfo"]["bootID"]),
            )
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_whose_condition_is_true_is_ready() {
        let json = r#"{"items": [
            {"metadata": {"name": "a"}, "status": {"nodeInfo": {"bootID": "1"},
             "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "True"}]}},
            {"metadata": {"name": "b"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
            {"metadata": {"name": "c"}, "status": {}}]}"#;
        assert_eq!(ready_nodes(json).unwrap(), [("a".to_owned(), "1".to_owned())]);
    }
}
