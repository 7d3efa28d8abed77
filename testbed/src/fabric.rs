//! The network that joins a testbed: one namespace with a bridge, the control plane and the registry, which every node is
//! plugged into. No packet of it ever crosses a device of the host.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};

use crate::address::{AddressPlan, REGISTRY_HOST, SERVICE_RANGE};
use crate::cgroups::Cgroups;
use crate::layout::State;
use crate::process::{Launch, Process, record_path};
use crate::tool::Tool;

const ROLE: &str = "fabric";

/// The fabric of a testbed that is up.
#[derive(Debug, Clone)]
pub struct Fabric {
    holder: Process,
    state: State,
}

impl Fabric {
    /// Makes the namespace, its bridge, and a process that holds it.
    ///
    /// # Errors
    /// If the kernel or `ip` refuses.
    pub fn make(state: &State, cgroups: &Cgroups, plan: AddressPlan) -> Result<Self> {
        // A process rather than a named namespace: a name is a mount, which a crash would leave behind.
        let holder = Launch {
            role: ROLE,
            args: ["unshare", "--net", "sleep", "infinity"].map(Into::into).to_vec(),
            env: Vec::new(),
            cgroups: &cgroups.make_control_plane()?,
            run: &state.run(),
            logs: &state.logs(),
        }
        .start()?;
        let fabric = Self {
            holder: holder.process,
            state: state.clone(),
        };
        let own = fs::read_link("/proc/self/ns/net")?;
        holder.wait_until("to have a network of its own", Duration::from_secs(5), || {
            Ok(fs::read_link(fabric.network())? != own)
        })?;
        fabric
            .run("ip")
            .args(["-batch", "-"])
            .input(format!(
                "link set lo up\n\
                 link add br0 type bridge\n\
                 addr add {}/24 dev br0\n\
                 link set br0 up\n",
                plan.fabric()
            ))
            .called("making the testbed's bridge")
            .output()?;
        fabric
            .run("sh")
            .args(["-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
            .output()?;
        fs::write(
            fabric.hosts_file(),
            format!(
                "127.0.0.1 localhost\n::1 localhost\n{} {REGISTRY_HOST}\n",
                plan.fabric()
            ),
        )?;
        fs::write(
            fabric.resolver_file(),
            format!(
                "nameserver {}\nsearch svc.cluster.local cluster.local\n",
                plan.fabric()
            ),
        )?;
        Ok(fabric)
    }

    /// The fabric of a testbed that was made earlier.
    ///
    /// # Errors
    /// If it does not stand any more.
    pub fn open(state: &State) -> Result<Self> {
        let holder = Process::recorded(&record_path(&state.run(), ROLE))
            .filter(Process::is_alive)
            .ok_or_else(|| anyhow!("its network is gone; take it down and up again"))?;
        Ok(Self {
            holder,
            state: state.clone(),
        })
    }

    /// The path of its network namespace.
    #[must_use]
    pub fn network(&self) -> PathBuf {
        self.holder.network()
    }

    /// Runs `work` on a thread that has entered the fabric's network.
    ///
    /// # Errors
    /// If the network is gone, or whatever `work` fails with.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let network = fs::File::open(self.network()).context("the fabric's network is gone")?;
        std::thread::scope(|scope| {
            // A thread of its own: entering a namespace can't be undone by a thread that others use.
            scope
                .spawn(move || {
                    setns(network, CloneFlags::CLONE_NEWNET)?;
                    work()
                })
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a thread in the fabric died")))
        })
    }

    /// The words before a command that make it run in the fabric's network, with the host's files as they are.
    #[must_use]
    pub fn enter(&self) -> Vec<std::ffi::OsString> {
        let mut net = std::ffi::OsString::from("--net=");
        net.push(self.network());
        vec!["nsenter".into(), net, "--".into()]
    }

    /// A program to be run in the fabric's network.
    #[must_use]
    pub fn run(&self, program: impl AsRef<OsStr>) -> Tool {
        let enter = self.enter();
        Tool::new(&enter[0]).args(&enter[1..]).arg(program)
    }

    /// A program to be run in the fabric's network and with its names: those of the cluster's services, and the registry's.
    #[must_use]
    pub fn run_with_names(&self, program: impl AsRef<OsStr>) -> Tool {
        const NAMES: &str = r#"mount --bind "$1" /etc/hosts
mount --bind "$2" /etc/resolv.conf 2>/dev/null || true
shift 2; exec "$@""#;
        self.run("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "--",
                "sh",
                "-c",
                NAMES,
                "sh",
            ])
            .arg(self.hosts_file())
            .arg(self.resolver_file())
            .arg(program)
    }

    fn hosts_file(&self) -> PathBuf {
        self.state.root().join("hosts")
    }

    fn resolver_file(&self) -> PathBuf {
        self.state.root().join("resolv.conf")
    }

    /// Gives a node's pods their way, once the node is plugged in; and services theirs, by the first node: its kube-proxy
    /// answers for them, as the fabric has none.
    ///
    /// # Errors
    /// If `ip` refuses.
    pub fn route_pods(&self, plan: AddressPlan, position: usize) -> Result<()> {
        let node = plan.node(position);
        let mut routes = format!("route replace {} via {node}\n", plan.pods(position));
        if position == 0 {
            routes.push_str(&format!("route replace {SERVICE_RANGE} via {node}\n"));
        }
        self.run("ip")
            .args(["-batch", "-"])
            .input(routes)
            .called("routing a node's pods")
            .output()?;
        Ok(())
    }
}
