//! What kind of system the host is, and whether it can be served.

use thiserror::Error;

use super::{HostRoot, Systemd, SystemdError};

/// What `/etc/os-release` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OsRelease {
    /// `ID`, such as `debian`.
    pub id: String,
    /// `PRETTY_NAME`, for people.
    pub pretty_name: String,
}

impl OsRelease {
    /// Reads the shell-like lines of an os-release file; what is not there stays empty.
    pub fn parse(text: &str) -> Self {
        let mut release = Self::default();
        for line in text.lines() {
            let Some((key, value)) = line.trim().split_once('=') else {
                continue;
            };
            let value = value.trim_matches(['"', '\'']).to_owned();
            match key {
                "ID" => release.id = value,
                "PRETTY_NAME" => release.pretty_name = value,
                _ => {}
            }
        }
        release
    }
}

/// The host, as far as it decides whether it can be served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// The operating system.
    pub os: OsRelease,
    /// Units among those that matter that are active.
    pub active_units: Vec<String>,
}

/// The unit of plain containerd.
pub const CONTAINERD_UNIT: &str = "containerd.service";

/// Units whose presence tells what kind of node it is, and what it is.
const OTHERS: [(&str, &str); 9] = [
    ("k3s.service", "k3s"),
    ("k3s-agent.service", "k3s"),
    ("rke2-server.service", "rke2"),
    ("rke2-agent.service", "rke2"),
    ("snap.microk8s.daemon-containerd.service", "microk8s"),
    ("snap.microk8s.daemon-kubelite.service", "microk8s"),
    ("k0scontroller.service", "k0s"),
    ("k0sworker.service", "k0s"),
    ("crio.service", "CRI-O"),
];

/// Why a host cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HostRefusal {
    /// An immutable system whose configuration is generated.
    #[error("the host runs {0}, which generates containerd's configuration and keeps its root read-only")]
    Immutable(String),
    /// A distribution with a containerd of its own.
    #[error(
        "the host runs {name} ({unit} is active), whose containerd is its own and is configured through templates"
    )]
    Distribution {
        /// Of the distribution.
        name: String,
        /// That is active.
        unit: String,
    },
    /// Another runtime.
    #[error("the host's container runtime is CRI-O (crio.service is active), not containerd")]
    OtherRuntime,
    /// Docker without a containerd unit of its own.
    #[error("the host runs Docker, and no containerd.service that a kubelet could use is active")]
    DockerOnly,
    /// No containerd.
    #[error("containerd.service is not active on the host")]
    NoContainerd,
}

impl HostRefusal {
    /// What an operator can do.
    pub fn remedy(&self) -> String {
        match self {
            Self::Immutable(_) => "Bottlerocket and Talos take runtimes as system extensions; leave the annotation off this node.".into(),
            Self::Distribution { name, .. } => format!("{name} is not served yet; leave the annotation off this node."),
            Self::OtherRuntime => "CRI-O is not served; leave the annotation off this node, or use a crun with Wasm as CRI-O's own runtime.".into(),
            Self::DockerOnly => "Install containerd as the kubelet's runtime, or leave the annotation off this node.".into(),
            Self::NoContainerd => "Start containerd.service (`systemctl status containerd` says why it is down), then try again.".into(),
        }
    }
}

/// Reads what [`judge`] wants to know.
///
/// # Errors
/// When systemd does not answer.
pub async fn read_facts(root: &HostRoot, systemd: &Systemd) -> Result<HostFacts, SystemdError> {
    let text = root
        .read("/etc/os-release", 64 * 1024)
        .or_else(|_| root.read("/usr/lib/os-release", 64 * 1024))
        .unwrap_or_default();
    let names: Vec<&str> = OTHERS
        .iter()
        .map(|(unit, _)| *unit)
        .chain([CONTAINERD_UNIT, "docker.service"])
        .collect();
    Ok(HostFacts {
        os: OsRelease::parse(&String::from_utf8_lossy(&text)),
        active_units: systemd.active_among(&names).await?,
    })
}

/// Whether a host can be served.
///
/// # Errors
/// A [`HostRefusal`] where it cannot.
pub fn judge(facts: &HostFacts) -> Result<(), HostRefusal> {
    if ["bottlerocket", "talos"].contains(&facts.os.id.as_str()) {
        return Err(HostRefusal::Immutable(facts.os.pretty_name.clone()));
    }
    let active = |unit: &str| facts.active_units.iter().any(|name| name == unit);
    for (unit, name) in OTHERS {
        if active(unit) && name != "CRI-O" {
            return Err(HostRefusal::Distribution {
                name: name.to_owned(),
                unit: unit.to_owned(),
            });
        }
    }
    if active(CONTAINERD_UNIT) {
        Ok(())
    } else if active("crio.service") {
        Err(HostRefusal::OtherRuntime)
    } else if active("docker.service") {
        Err(HostRefusal::DockerOnly)
    } else {
        Err(HostRefusal::NoContainerd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(id: &str, units: &[&str]) -> HostFacts {
        HostFacts {
            os: OsRelease {
                id: id.into(),
                pretty_name: format!("{id} 1"),
            },
            active_units: units.iter().map(|unit| (*unit).to_owned()).collect(),
        }
    }

    #[test]
    fn os_release_is_read_with_and_without_quotes() {
        let release = OsRelease::parse("PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\nID=debian\n# x\n");
        assert_eq!(release.id, "debian");
        assert_eq!(release.pretty_name, "Debian GNU/Linux 13 (trixie)");
    }

    #[test]
    fn plain_containerd_is_served_also_beside_docker() {
        assert_eq!(judge(&facts("debian", &["containerd.service"])), Ok(()));
        assert_eq!(
            judge(&facts("ubuntu", &["docker.service", "containerd.service"])),
            Ok(())
        );
    }

    #[test]
    fn everything_else_is_refused_by_its_name() {
        for (id, units, word) in [
            ("bottlerocket", vec!["containerd.service"], "bottlerocket"),
            ("talos", vec![], "talos"),
            ("sles", vec!["rke2-agent.service"], "rke2"),
            ("debian", vec!["k3s.service", "containerd.service"], "k3s"),
            (
                "ubuntu",
                vec!["snap.microk8s.daemon-containerd.service"],
                "microk8s",
            ),
            ("debian", vec!["k0sworker.service"], "k0s"),
            ("rhcos", vec!["crio.service"], "CRI-O"),
            ("debian", vec!["docker.service"], "Docker"),
            ("debian", vec![], "containerd.service is not active"),
        ] {
            let refusal = judge(&facts(id, &units)).unwrap_err();
            assert!(refusal.to_string().contains(word), "{refusal}");
            assert!(!refusal.remedy().is_empty());
        }
    }
}
