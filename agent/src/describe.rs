//! What the node is and has, in the protocol's words, as far as it can be read.

use std::sync::Arc;

use quartermaster_proto::v1::{InstallState, NodeDescription};

use crate::containerd::{Daemon, DaemonSettings};
use crate::host::{HostRoot, OsRelease, Systemd};
use crate::install::{self, Found, Target};
use crate::pull::Node;

/// Sockets of containerd where its unit cannot be asked: plain, k3s and rke2, microk8s, k0s.
const SOCKETS: [&str; 4] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/k0s/containerd.sock",
];

/// Describes the node. What cannot be read stays empty.
pub(crate) async fn describe(node_name: &str, target: &Target) -> NodeDescription {
    let located = target.located().await;
    let target = located.as_ref().unwrap_or(target);
    let root = &target.root;
    let found = found(target).await;
    let settings = found.as_ref().map(|found| &found.settings);
    let daemon = Daemon::new(Arc::clone(root), socket(root, settings));
    let installed = install::state(root, target.layout()).ok();
    NodeDescription {
        node_name: node_name.to_owned(),
        boot_id: boot_id(root),
        machine_id: root.read_line("/etc/machine-id").unwrap_or_default(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        os: OsRelease::read(root).pretty_name,
        containerd_version: daemon.version().await.unwrap_or_default(),
        config_path: settings
            .map(|settings| settings.config_path.clone())
            .unwrap_or_default(),
        restarted_unit: found
            .as_ref()
            .and_then(Found::restarted_unit)
            .unwrap_or_default()
            .to_owned(),
        restarts_control_plane: found.as_ref().is_some_and(|found| found.host.control_plane),
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

async fn found(target: &Target) -> Option<Found> {
    let systemd = Systemd::connect(&target.root).await.ok()?;
    install::find(&target.root, &systemd, &target.overrides)
        .await
        .ok()
}

/// Where images are pulled: the daemon that the kubelet uses, found by its unit, else by the first socket that is
/// there. Its calls have no deadline of their own.
pub(crate) async fn pulls(target: &Target) -> Node {
    let root = &target.root;
    let settings = found(target).await.map(|found| found.settings);
    Node {
        daemon: Daemon::patient(Arc::clone(root), socket(root, settings.as_ref())),
        root: Arc::clone(root),
        settings,
    }
}

/// The same daemon, for who needs no more of it.
pub(crate) async fn locate(target: &Target) -> Daemon {
    pulls(target).await.daemon
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
