//! A node: a tree of processes under systemd, with namespaces and a disk of its own. Knows the fabric it is plugged into and
//! nothing of the cluster's objects.

mod files;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::address::AddressPlan;
use crate::cgroups::{Cgroups, Hierarchies};
use crate::fabric::Fabric;
use crate::layout::State;
use crate::parts::Parts;
use crate::pki::{Authority, Subject};
use crate::process::{Launch, Process, end_all_in};
use crate::spec::NodeSpec;
use crate::tool::{Tool, tail_of};
use crate::wait::wait_for;

pub use files::{Content, NodeFile};

/// A node of a testbed, by what it was asked to be and where it stands in the address plan.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    /// Its name and containerd.
    pub spec: &'a NodeSpec,
    /// Its position, which gives its addresses.
    pub position: usize,
    /// The testbed's addresses.
    pub plan: AddressPlan,
    /// Where its disk lies.
    pub state: &'a State,
    /// The cgroups it lives in.
    pub cgroups: &'a Cgroups,
}

/// What the boot script is told, in its order.
const BOOT: &str = include_str!("../../assets/boot-node.sh");
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

impl Node<'_> {
    /// Writes a new disk: certificates, configuration and units.
    ///
    /// # Errors
    /// If a file can't be written.
    pub fn make_disk(&self, authority: &Authority) -> Result<()> {
        let name = &self.spec.name;
        let user = format!("system:node:{name}");
        let client = authority.kubeconfig(
            &Subject {
                file: &format!("node-{name}"),
                user: &user,
                group: Some("system:nodes"),
                names: &[],
                addresses: &[],
            },
            &self.plan.api_server(),
        )?;
        let server = authority.issue(&Subject {
            file: &format!("node-{name}-server"),
            user: &user,
            group: Some("system:nodes"),
            names: &[name],
            addresses: &[self.plan.node(self.position)],
        })?;
        let secrets = files::Secrets {
            authority: authority.certificate().to_owned(),
            kubelet_kubeconfig: fs::read_to_string(client)?,
            proxy_kubeconfig: fs::read_to_string(self.state.pki().join("proxy.kubeconfig"))?,
            server_certificate: server.certificate,
            server_key: server.key,
        };
        let machine_id = fs::read_to_string("/proc/sys/kernel/random/uuid")?
            .trim()
            .replace('-', "");
        let upper = self.dir().join("upper");
        for dir in ["upper", "work", "root", "containerd", "kubelet", "logs"] {
            fs::create_dir_all(self.dir().join(dir))?;
        }
        for file in files::render(self.spec, self.plan, self.position, &machine_id, &secrets)? {
            write(&upper, &file)?;
        }
        Ok(())
    }

    /// Boots it from its disk, plugged into the fabric; does not wait for its kubelet.
    ///
    /// # Errors
    /// If it does not get as far as starting systemd; with its console's end.
    pub fn boot(&self, fabric: &Fabric, parts: &Parts) -> Result<()> {
        if self.init().is_some() {
            bail!("node {} is running already", self.spec.name);
        }
        let (dir, name) = (self.dir(), &self.spec.name);
        let _ = fs::remove_file(self.init_file());
        let joins: Vec<String> = self
            .cgroups
            .make_node(&self.spec.name)?
            .iter()
            .map(|join| format!("{}\n", join.display()))
            .collect();
        fs::write(dir.join("cgroups"), joins.concat())?;
        let layers: Vec<String> = parts
            .layers(&self.spec.containerd)
            .iter()
            .map(|layer| layer.display().to_string())
            .collect();
        let hierarchies = match self.cgroups.hierarchies() {
            Hierarchies::V2(_) => "v2".to_owned(),
            Hierarchies::V1(all) => all
                .iter()
                .map(|one| one.options.as_str())
                .collect::<Vec<_>>()
                .join(" "),
        };
        let script = dir.join("boot.sh");
        fs::write(&script, BOOT)?;
        let mut args: Vec<OsString> = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--net",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            "--",
            "sh",
        ]
        .map(Into::into)
        .to_vec();
        args.push(script.into());
        args.push(dir.clone().into());
        args.extend(
            [
                name.clone(),
                layers.join(":"),
                fabric.network().display().to_string(),
                format!("node{}", self.position),
                format!("{}/24", self.plan.node(self.position)),
                self.plan.fabric().to_string(),
                hierarchies,
            ]
            .map(OsString::from),
        );
        let booting = Launch {
            role: "boot",
            args,
            env: Vec::new(),
            cgroups: &self.cgroups.make_control_plane()?,
            run: &dir,
            logs: &dir.join("logs"),
        }
        .start()?;
        booting.wait_until("to start systemd", Duration::from_secs(20), || {
            Ok(self.init().is_some_and(|init| is_systemd(init.pid)))
        })?;
        fabric.route_pods(self.plan, self.position)
    }

    /// Cuts its power: every process of it ends at once. Its disk stays.
    ///
    /// # Errors
    /// If a process does not end.
    pub fn cut_power(&self) -> Result<()> {
        end_all_in(&self.cgroups.node(&self.spec.name)?)?;
        // Cgroups empty a moment after their processes have ended.
        wait_for(
            &format!("the cgroups of node {} to be empty", self.spec.name),
            Duration::from_secs(10),
            || self.cgroups.remove_node(&self.spec.name).map(Some),
        )?;
        Ok(())
    }

    /// The first process of the node, if it runs.
    #[must_use]
    pub fn init(&self) -> Option<Process> {
        let pid = fs::read_to_string(self.init_file()).ok()?.trim().parse().ok()?;
        let process = Process::now(pid)?;
        // The record is only good while that process is one of this node's own.
        let group = self.cgroups.node(&self.spec.name).ok()?;
        crate::process::members(&group)
            .is_ok_and(|all| all.contains(&pid))
            .then_some(process)
    }

    /// A program to be run on the node as its root user would.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn run<I, S>(&self, command: I) -> Result<Tool>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<std::ffi::OsStr>,
    {
        Ok(Tool::new("sh").args(self.enter(false)?).args(command))
    }

    /// The arguments of `sh` that enter the node; with `terminal`, the caller's terminal type goes along.
    ///
    /// # Errors
    /// If the node is not running.
    pub fn enter(&self, terminal: bool) -> Result<Vec<OsString>> {
        // In the node's cgroup too: else its processes would see paths outside of theirs, and `down` would not see them.
        const ENTER: &str = r#"while [ "$1" != -- ]; do echo 0 > "$1"; shift; done; pid=$2; shift 2
exec nsenter --target "$pid" --mount --uts --ipc --net --pid --cgroup --root --wd -- env -i "$@""#;
        let Some(init) = self.init() else {
            bail!("node {} is not running", self.spec.name);
        };
        let mut args: Vec<OsString> = ["-ec", ENTER, "sh"].map(Into::into).to_vec();
        let joins = self.cgroups.join_running_node(&self.spec.name)?;
        args.extend(joins.into_iter().map(OsString::from));
        args.push("--".into());
        args.push(init.pid.to_string().into());
        args.push(format!("PATH={PATH}").into());
        args.push("HOME=/root".into());
        args.push("container=testbed".into());
        if terminal && let Some(term) = std::env::var_os("TERM") {
            let mut variable = OsString::from("TERM=");
            variable.push(term);
            args.push(variable);
        }
        Ok(args)
    }

    /// What its journal and console last said, for an error.
    #[must_use]
    pub fn last_words(&self) -> String {
        let journal = self
            .run([
                "journalctl",
                "--no-pager",
                "--output=cat",
                "--lines=12",
                "--unit=kubelet",
                "--unit=containerd",
            ])
            .and_then(|tool| Ok(tool.output()?))
            .unwrap_or_default();
        let console = tail_of(&self.dir().join("logs/boot.log"), 8);
        format!("{console}\n{journal}").trim().to_owned()
    }

    fn dir(&self) -> PathBuf {
        self.state.node(&self.spec.name)
    }

    fn init_file(&self) -> PathBuf {
        self.dir().join("init.pid")
    }
}

fn is_systemd(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "systemd")
}

fn write(upper: &Path, file: &NodeFile) -> Result<()> {
    let path = upper.join(file.path.trim_start_matches('/'));
    let result = || -> std::io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        match &file.content {
            Content::Text { text, mode } => {
                fs::write(&path, text)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(*mode))
            }
            Content::Link(target) => symlink(target, &path),
        }
    };
    result().with_context(|| format!("can't write {}", path.display()))
}
