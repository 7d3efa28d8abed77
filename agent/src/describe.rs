//! What the node is and has, in the protocol's words, as far as it can be read.

use std::sync::Arc;

use quartermaster_proto::v1::{InstallState, NodeDescription};

use crate::containerd::{Daemon, DaemonSettings, read_settings};
use crate::host::{CONTAINERD_UNIT, HostRoot, OsRelease, Systemd};
use crate::install;
use crate::pull::Node;

/// Sockets of containerd where its unit cannot be asked: plain, k3s and rke2, microk8s, k0s.
const SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/k0s/containerd.sock",
];

/// Describes the node. What cannot be read stays empty.
pub(crate) async fn describe(node_name: &str, root: &Arc<HostRoot>) -> NodeDescription {
    let os = root
        .read("/etc/os-release", 64 * 1024)
        .or_else(|_| root.read("/usr/lib/os-release", 64 * 1024))
        .unwrap_or_default();
    let settings = settings(root).await;
    let daemon = Daemon::new(Arc::clone(root), socket(root, settings.as_ref()));
    let installed = install::state(root).ok();
    NodeDescription {
        node_name: node_name.to_owned(),
        boot_id: boot_id(root),
        machine_id: root.read_line("/etc/machine-id").unwrap_or_default(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        os: OsRelease::parse(&String::from_utf8_lossy(&os)).pretty_name,
        containerd_version: daemon.version().await.unwrap_or_default(),
        config_path: settings.map(|settings| settings.config_path).unwrap_or_default(),
        state: installed
            .as_ref()
            .map_or(InstallState::Unspecified, |installed| installed.state)
            .into(),
        payload_version: installed.map(|installed| installed.version).unwrap_or_default(),
    }
}

/// The boot that the node is in.
pub(crate) fn boot_id(root: &HostRoot) -> String {
    root.read_line("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
}

async fn settings(root: &Arc<HostRoot>) -> Option<DaemonSettings> {
    let systemd = Systemd::connect(root).await.ok()?;
    let unit = systemd.service(CONTAINERD_UNIT).await.ok()?;
    let line = root
        .read(&format!("/proc/{}/cmdline", unit.main_pid), 64 * 1024)
        .ok()?;
    let arguments: Vec<String> = line
        .split(|byte| *byte == 0)
        .filter(|argument| !argument.is_empty())
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    read_settings(root, &arguments).ok()
}

/// Where images are pulled: the daemon that the kubelet uses, found by its unit, else by the first socket that is
/// there. Its calls have no deadline of their own.
pub(crate) async fn pulls(root: &Arc<HostRoot>) -> Node {
    let settings = settings(root).await;
    Node {
        daemon: Daemon::patient(Arc::clone(root), socket(root, settings.as_ref())),
        root: Arc::clone(root),
        settings,
    }
}

/// The same daemon, for who needs no more of it.
pub(crate) async fn locate(root: &Arc<HostRoot>) -> Daemon {
    pulls(root).await.daemon
}

fn socket<'a>(root: &HostRoot, settings: Option<&'a DaemonSettings>) -> &'a str {
    match settings {
        Some(settings) => &settings.socket,
        None => SOCKETS
            .iter()
            .find(|socket| root.exists(socket))
            .unwrap_or(&SOCKETS[0]),
    }
}
