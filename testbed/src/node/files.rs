//! The files that make a Debian root this node of this cluster: a pure function, so that what a node gets can be read and
//! tested without one.

use anyhow::{Context, Result};

use crate::address::{AddressPlan, DNS_SERVICE, POD_RANGE, REGISTRY, REGISTRY_HOST};
use crate::spec::NodeSpec;
use crate::versions::{self, Source};

/// A file on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFile {
    /// Its absolute path on the node.
    pub path: String,
    /// What it holds.
    pub content: Content,
}

/// What a [`NodeFile`] holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A regular file.
    Text {
        /// Its text.
        text: String,
        /// Its permissions.
        mode: u32,
    },
    /// A symbolic link to this path.
    Link(String),
}

/// What must be made before the files can be: all PEM or kubeconfigs.
pub(super) struct Secrets {
    /// The cluster's authority.
    pub(super) authority: String,
    /// The kubelet's way to the API server.
    pub(super) kubelet_kubeconfig: String,
    /// kube-proxy's way to the API server.
    pub(super) proxy_kubeconfig: String,
    /// What the kubelet serves logs and exec with.
    pub(super) server_certificate: String,
    /// Its key.
    pub(super) server_key: String,
}

const UNITS: &str = "/usr/lib/systemd/system";
const OWN_UNITS: &str = "/etc/systemd/system";

/// Units of Debian's that must not run on a node. Those that set kernel settings or binary formats would set the host's;
/// the others have no device to serve, or only cost time at boot.
const MASKED: &[&str] = &[
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "kmod-static-nodes.service",
    "proc-sys-fs-binfmt_misc.automount",
    "proc-sys-fs-binfmt_misc.mount",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-firstboot.service",
    "systemd-logind.service",
    "systemd-modules-load.service",
    "systemd-networkd.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-sysusers.service",
    "systemd-timesyncd.service",
    "systemd-tmpfiles-clean.timer",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udevd.service",
    "systemd-update-done.service",
    "systemd-update-utmp.service",
    "systemd-user-sessions.service",
    "tmp.mount",
];

/// Every file of a node.
///
/// # Errors
/// If the node asks for a containerd that is not known.
pub(super) fn render(
    spec: &NodeSpec,
    plan: AddressPlan,
    position: usize,
    machine_id: &str,
    secrets: &Secrets,
) -> Result<Vec<NodeFile>> {
    let containerd = versions::containerd(&spec.containerd)
        .with_context(|| format!("no containerd {} is known", spec.containerd))?;
    let (name, address) = (&spec.name, plan.node(position).to_string());
    let fill = |template: &str| {
        template
            .replace("@NODE@", name)
            .replace("@ADDRESS@", &address)
            .replace("@PODS@", POD_RANGE)
            .replace("@POD_SUBNET@", &plan.pods(position))
            .replace("@DNS@", &DNS_SERVICE.to_string())
    };
    let fabric = plan.fabric();
    let mut files = vec![
        text("/etc/hostname", format!("{name}\n")),
        text("/etc/machine-id", format!("{machine_id}\n")),
        text(
            "/etc/hosts",
            format!("127.0.0.1 localhost\n::1 localhost\n{address} {name}\n{fabric} {REGISTRY_HOST}\n"),
        ),
        text("/etc/resolv.conf", format!("nameserver {fabric}\n")),
        text(
            "/etc/systemd/journald.conf.d/testbed.conf",
            // The kernel's log is the host's.
            "[Journal]\nStorage=persistent\nReadKMsg=no\nRateLimitBurst=0\nSystemMaxUse=200M\n",
        ),
        text(
            "/etc/crictl.yaml",
            "runtime-endpoint: unix:///run/containerd/containerd.sock\n\
             image-endpoint: unix:///run/containerd/containerd.sock\ntimeout: 10\n",
        ),
        text("/etc/containerd/config.toml", containerd.config),
        text(
            &format!("/etc/containerd/certs.d/{REGISTRY}/hosts.toml"),
            format!(
                "server = \"http://{REGISTRY}\"\n\n[host.\"http://{REGISTRY}\"]\n  \
                 capabilities = [\"pull\", \"resolve\"]\n"
            ),
        ),
        text(
            "/etc/cni/net.d/10-pods.conflist",
            fill(include_str!("../../assets/node/cni.conflist")),
        ),
        text("/etc/kubernetes/pki/ca.crt", &secrets.authority),
        text("/etc/kubernetes/pki/kubelet.crt", &secrets.server_certificate),
        secret("/etc/kubernetes/pki/kubelet.key", &secrets.server_key),
        secret("/etc/kubernetes/kubelet.kubeconfig", &secrets.kubelet_kubeconfig),
        secret("/etc/kubernetes/kube-proxy.kubeconfig", &secrets.proxy_kubeconfig),
        text(
            "/etc/kubernetes/kubelet.yaml",
            fill(include_str!("../../assets/node/kubelet.yaml")),
        ),
        text(
            &format!("{OWN_UNITS}/devices-hierarchy.service"),
            include_str!("../../assets/node/devices-hierarchy.service"),
        ),
        text(
            &format!("{OWN_UNITS}/kubelet.service"),
            fill(include_str!("../../assets/node/kubelet.service")),
        ),
        text(
            &format!("{OWN_UNITS}/kube-proxy.service"),
            fill(include_str!("../../assets/node/kube-proxy.service")),
        ),
        link(
            &format!("{OWN_UNITS}/default.target"),
            &format!("{UNITS}/multi-user.target"),
        ),
    ];
    let containerd_unit = match containerd.source {
        Source::Debian { .. } => format!("{UNITS}/containerd.service"),
        Source::GoModule { .. } => {
            let path = format!("{OWN_UNITS}/containerd.service");
            files.push(text(&path, include_str!("../../assets/node/containerd.service")));
            path
        }
    };
    for (unit, target) in [
        ("containerd.service", containerd_unit),
        ("kubelet.service", format!("{OWN_UNITS}/kubelet.service")),
        (
            "devices-hierarchy.service",
            format!("{OWN_UNITS}/devices-hierarchy.service"),
        ),
        ("kube-proxy.service", format!("{OWN_UNITS}/kube-proxy.service")),
    ] {
        files.push(link(
            &format!("{OWN_UNITS}/multi-user.target.wants/{unit}"),
            &target,
        ));
    }
    for unit in MASKED {
        files.push(link(&format!("{OWN_UNITS}/{unit}"), "/dev/null"));
    }
    Ok(files)
}

fn text(path: &str, text: impl Into<String>) -> NodeFile {
    file(path, text, 0o644)
}

fn secret(path: &str, text: impl Into<String>) -> NodeFile {
    file(path, text, 0o600)
}

fn file(path: &str, text: impl Into<String>, mode: u32) -> NodeFile {
    NodeFile {
        path: path.to_owned(),
        content: Content::Text {
            text: text.into(),
            mode,
        },
    }
}

fn link(path: &str, target: &str) -> NodeFile {
    NodeFile {
        path: path.to_owned(),
        content: Content::Link(target.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(containerd: &str) -> Vec<NodeFile> {
        let spec = NodeSpec {
            name: "worker-2".into(),
            containerd: containerd.into(),
        };
        let secrets = Secrets {
            authority: "CA".into(),
            kubelet_kubeconfig: "KUBELET".into(),
            proxy_kubeconfig: "PROXY".into(),
            server_certificate: "CERTIFICATE".into(),
            server_key: "KEY".into(),
        };
        render(&spec, AddressPlan::new(0), 1, "0123", &secrets).unwrap()
    }

    fn read(files: &[NodeFile], path: &str) -> (String, u32) {
        match &files.iter().find(|file| file.path == path).unwrap().content {
            Content::Text { text, mode } => (text.clone(), *mode),
            Content::Link(target) => panic!("{path} is a link to {target}"),
        }
    }

    #[test]
    fn a_template_leaves_no_gap() {
        for row in versions::CONTAINERD {
            for file in rendered(row.series) {
                if let Content::Text { text, .. } = &file.content {
                    for gap in ["@NODE@", "@ADDRESS@", "@PODS@", "@POD_SUBNET@", "@DNS@"] {
                        assert!(!text.contains(gap), "{gap} in {}", file.path);
                    }
                }
            }
        }
    }

    #[test]
    fn the_kubelet_registers_under_the_name_asked_for_and_at_the_nodes_address() {
        let (unit, _) = read(&rendered("1.7"), "/etc/systemd/system/kubelet.service");
        assert!(
            unit.contains("--hostname-override=worker-2 --node-ip=10.89.0.12"),
            "{unit}"
        );
    }

    #[test]
    fn pods_get_addresses_of_the_nodes_own_range() {
        let (cni, _) = read(&rendered("1.7"), "/etc/cni/net.d/10-pods.conflist");
        assert!(cni.contains(r#""subnet": "10.244.2.0/24""#), "{cni}");
    }

    #[test]
    fn every_containerd_gets_the_configuration_of_its_series() {
        for row in versions::CONTAINERD {
            let (config, _) = read(&rendered(row.series), "/etc/containerd/config.toml");
            let wanted = if row.series.starts_with("1.") {
                "version = 2"
            } else {
                "version = 3"
            };
            assert!(config.contains(wanted), "{}", row.series);
            for must in [
                "registry.testbed:5000/pause:3.10",
                "/etc/containerd/certs.d",
                "/usr/lib/cni",
                "restrict_oom_score_adj = true",
                "SystemdCgroup = true",
            ] {
                assert!(config.contains(must), "{must} in {}", row.series);
            }
        }
    }

    #[test]
    fn keys_are_for_root_alone() {
        let files = rendered("2.4");
        for path in [
            "/etc/kubernetes/pki/kubelet.key",
            "/etc/kubernetes/kubelet.kubeconfig",
            "/etc/kubernetes/kube-proxy.kubeconfig",
        ] {
            assert_eq!(read(&files, path).1, 0o600, "{path}");
        }
    }

    #[test]
    fn no_unit_of_a_node_sets_the_hosts_kernel() {
        let files = rendered("2.1");
        for unit in ["systemd-sysctl.service", "systemd-binfmt.service"] {
            let path = format!("/etc/systemd/system/{unit}");
            let masked = files.iter().find(|file| file.path == path).unwrap();
            assert_eq!(masked.content, Content::Link("/dev/null".into()));
        }
    }

    #[test]
    fn no_path_is_written_twice() {
        let files = rendered("2.4");
        for (at, file) in files.iter().enumerate() {
            assert!(
                files[..at].iter().all(|other| other.path != file.path),
                "{}",
                file.path
            );
        }
    }
}
