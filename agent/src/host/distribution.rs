//! What kind of system the host is, and whether it can be served.

use thiserror::Error;

use super::{HostRoot, Systemd, SystemdError};

/// What `/etc/os-release` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OsRelease {
    /// `ID`, such as `debian`.
    pub id: String,
    /// `ID_LIKE`, such as `debian` on Ubuntu.
    pub like: Vec<String>,
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
                "ID_LIKE" => release.like = value.split_whitespace().map(str::to_owned).collect(),
                "PRETTY_NAME" => release.pretty_name = value,
                _ => {}
            }
        }
        release
    }

    /// Reads that of a host; empty where it has none.
    pub fn read(root: &HostRoot) -> Self {
        let text = root
            .read("/etc/os-release", 64 * 1024)
            .or_else(|_| root.read("/usr/lib/os-release", 64 * 1024))
            .unwrap_or_default();
        Self::parse(&String::from_utf8_lossy(&text))
    }
}

/// The host, as far as it decides whether and how it can be served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// The operating system.
    pub os: OsRelease,
    /// Units among [`UNITS`] that are active; where a folder is looked at, those that it holds.
    pub units: Vec<String>,
    /// Paths among `MARKS` that exist.
    pub marks: Vec<&'static str>,
}

/// The unit of plain containerd.
pub const CONTAINERD_UNIT: &str = "containerd.service";

/// Whose containerd it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Distribution {
    /// containerd as a unit of its own
    Plain,
    /// k3s
    K3s,
    /// RKE2
    Rke2,
    /// MicroK8s
    Microk8s,
    /// k0s
    K0s,
}

impl Distribution {
    /// Its name, for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "containerd",
            Self::K3s => "k3s",
            Self::Rke2 => "RKE2",
            Self::Microk8s => "MicroK8s",
            Self::K0s => "k0s",
        }
    }

    /// The unit that restarts its containerd, where nothing tells another one.
    pub const fn default_unit(self) -> &'static str {
        match self {
            Self::Plain => CONTAINERD_UNIT,
            Self::K3s => "k3s.service",
            Self::Rke2 => "rke2-agent.service",
            Self::Microk8s => "snap.microk8s.daemon-containerd.service",
            Self::K0s => "k0sworker.service",
        }
    }
}

/// Units of distributions that bring a containerd of their own.
const OWN: [(&str, Distribution); 7] = [
    ("k3s.service", Distribution::K3s),
    ("k3s-agent.service", Distribution::K3s),
    ("rke2-server.service", Distribution::Rke2),
    ("rke2-agent.service", Distribution::Rke2),
    ("snap.microk8s.daemon-containerd.service", Distribution::Microk8s),
    ("k0scontroller.service", Distribution::K0s),
    ("k0sworker.service", Distribution::K0s),
];

/// All units that tell what kind of node it is.
pub const UNITS: [&str; 10] = [
    "k3s.service",
    "k3s-agent.service",
    "rke2-server.service",
    "rke2-agent.service",
    "snap.microk8s.daemon-containerd.service",
    "k0scontroller.service",
    "k0sworker.service",
    "crio.service",
    CONTAINERD_UNIT,
    "docker.service",
];

/// Paths that tell whose node it is; only its name follows from them.
const MARKS: [&str; 6] = [
    "/kind",
    "/kic.txt",
    "/etc/eks",
    "/etc/kubernetes/azure.json",
    "/home/kubernetes",
    "/etc/containerd/config.toml",
];

/// A host that can be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recognised {
    /// Whose containerd it is.
    pub distribution: Distribution,
    /// The unit that runs it.
    pub unit: String,
    /// What kind of node it is, for people.
    pub name: String,
    /// Folder below which programs may lie and run.
    pub prefix: String,
    /// Whether a restart of the unit restarts a control plane too.
    pub control_plane: bool,
}

/// Why a host cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HostRefusal {
    /// An immutable system whose configuration is generated.
    #[error("the host runs {0}, which generates containerd's configuration and keeps its root read-only")]
    Immutable(String),
    /// Another runtime.
    #[error("the host's container runtime is CRI-O ({0}), not containerd")]
    OtherRuntime(String),
    /// Docker without a containerd unit of its own.
    #[error("the host runs Docker (docker.service), and no containerd.service that a kubelet could use")]
    DockerOnly,
    /// No containerd.
    #[error("containerd.service is not active on the host")]
    NoContainerd,
    /// Nothing that tells of a containerd in a folder.
    #[error(
        "there is no containerd below {0}: neither a unit of it or of a Kubernetes distribution, nor /etc/containerd/config.toml"
    )]
    NothingThere(String),
}

impl HostRefusal {
    /// What an operator can do.
    pub fn remedy(&self) -> String {
        match self {
            Self::Immutable(_) => "Bottlerocket and Talos take runtimes as system extensions; leave the annotation off this node.".into(),
            Self::OtherRuntime(_) => "CRI-O is not served; leave the annotation off this node, or use a crun with Wasm as CRI-O's own runtime.".into(),
            Self::DockerOnly => "Install containerd as the kubelet's runtime, or leave the annotation off this node.".into(),
            Self::NoContainerd => "Start containerd.service (`systemctl status containerd` says why it is down), then try again. A unit of another name is given with --unit.".into(),
            Self::NothingThere(_) => "Copy the host's /etc/containerd, /etc/os-release and unit files into the folder, or say with --distribution and --config what it is.".into(),
        }
    }
}

/// Reads what [`judge`] wants to know from a running host.
///
/// # Errors
/// When systemd does not answer.
pub async fn read_facts(root: &HostRoot, systemd: &Systemd) -> Result<HostFacts, SystemdError> {
    Ok(HostFacts {
        os: OsRelease::read(root),
        units: systemd.active_among(&UNITS).await?,
        marks: marks(root),
    })
}

/// Those of `MARKS` that the host has.
pub(super) fn marks(root: &HostRoot) -> Vec<&'static str> {
    MARKS.into_iter().filter(|path| root.exists(path)).collect()
}

/// Whether a host can be served, and as what.
///
/// # Errors
/// A [`HostRefusal`] where it cannot.
pub fn judge(facts: &HostFacts) -> Result<Recognised, HostRefusal> {
    if ["bottlerocket", "talos"].contains(&facts.os.id.as_str()) {
        return Err(HostRefusal::Immutable(facts.os.pretty_name.clone()));
    }
    let has = |unit: &str| facts.units.iter().any(|name| name == unit);
    if let Some((unit, distribution)) = OWN.iter().find(|(unit, _)| has(unit)) {
        return Ok(recognised(facts, *distribution, unit));
    }
    // Also where containerd is there: OpenShift's nodes and some others keep one that no kubelet uses.
    let openshift = ["rhcos", "scos"].contains(&facts.os.id.as_str());
    if has("crio.service") || openshift {
        let sign = if openshift { "OpenShift" } else { "crio.service" };
        return Err(HostRefusal::OtherRuntime(sign.to_owned()));
    }
    if has(CONTAINERD_UNIT) {
        Ok(recognised(facts, Distribution::Plain, CONTAINERD_UNIT))
    } else if has("docker.service") {
        Err(HostRefusal::DockerOnly)
    } else {
        Err(HostRefusal::NoContainerd)
    }
}

const USUAL_PREFIX: &str = "/opt";
const COS_PREFIX: &str = "/home/kubernetes/bin";
const MICROK8S_PREFIX: &str = "/var/snap/microk8s/common";
/// Every folder below which the install folder may lie without anybody saying so.
pub const PREFIXES: [&str; 3] = [USUAL_PREFIX, COS_PREFIX, MICROK8S_PREFIX];

/// A host whose kind is known, as that kind has it.
pub fn recognised(facts: &HostFacts, distribution: Distribution, unit: &str) -> Recognised {
    let cos = facts.os.id == "cos";
    Recognised {
        distribution,
        unit: unit.to_owned(),
        name: name(facts, distribution),
        prefix: match distribution {
            Distribution::Microk8s => MICROK8S_PREFIX,
            // Everything else there is mounted noexec or read-only.
            _ if cos => COS_PREFIX,
            _ => USUAL_PREFIX,
        }
        .to_owned(),
        control_plane: ["k3s.service", "rke2-server.service"].contains(&unit),
    }
}

fn name(facts: &HostFacts, distribution: Distribution) -> String {
    let system = match facts.os.pretty_name.as_str() {
        "" => "an unknown system",
        name => name,
    };
    let marked = |mark: &str| facts.marks.contains(&mark);
    let whose = match distribution {
        Distribution::Plain if marked("/kind") => "kind",
        Distribution::Plain if marked("/kic.txt") || facts.os.id == "buildroot" => "minikube",
        Distribution::Plain if marked("/home/kubernetes") => "GKE",
        Distribution::Plain if marked("/etc/kubernetes/azure.json") => "AKS",
        Distribution::Plain if marked("/etc/eks") => "EKS",
        Distribution::Plain => return system.to_owned(),
        other => other.name(),
    };
    format!("{whose} on {system}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(id: &str, units: &[&str]) -> HostFacts {
        HostFacts {
            os: OsRelease {
                id: id.into(),
                like: Vec::new(),
                pretty_name: format!("{id} 1"),
            },
            units: units.iter().map(|unit| (*unit).to_owned()).collect(),
            marks: Vec::new(),
        }
    }

    #[test]
    fn os_release_is_read_with_and_without_quotes() {
        let release = OsRelease::parse(
            "PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\nID=debian\n# x\nID_LIKE=\"a b\"\n",
        );
        assert_eq!(release.id, "debian");
        assert_eq!(release.pretty_name, "Debian GNU/Linux 13 (trixie)");
        assert_eq!(release.like, ["a", "b"]);
    }

    #[test]
    fn plain_containerd_is_served_also_beside_docker() {
        for units in [
            vec!["containerd.service"],
            vec!["docker.service", "containerd.service"],
        ] {
            let found = judge(&facts("debian", &units)).unwrap();
            assert_eq!(found.distribution, Distribution::Plain);
            assert_eq!(
                (found.unit.as_str(), found.prefix.as_str()),
                ("containerd.service", "/opt")
            );
            assert!(!found.control_plane);
        }
    }

    #[test]
    fn a_distribution_with_its_own_containerd_goes_before_a_containerd_beside_it() {
        for (units, distribution, unit, control_plane) in [
            (
                vec!["k3s.service", "containerd.service"],
                Distribution::K3s,
                "k3s.service",
                true,
            ),
            (
                vec!["k3s-agent.service"],
                Distribution::K3s,
                "k3s-agent.service",
                false,
            ),
            (
                vec!["rke2-server.service"],
                Distribution::Rke2,
                "rke2-server.service",
                true,
            ),
            (
                vec!["rke2-agent.service"],
                Distribution::Rke2,
                "rke2-agent.service",
                false,
            ),
            (
                vec!["snap.microk8s.daemon-containerd.service"],
                Distribution::Microk8s,
                "snap.microk8s.daemon-containerd.service",
                false,
            ),
            (
                vec!["k0sworker.service"],
                Distribution::K0s,
                "k0sworker.service",
                false,
            ),
        ] {
            let found = judge(&facts("sles", &units)).unwrap();
            assert_eq!(found.distribution, distribution);
            assert_eq!((found.unit.as_str(), found.control_plane), (unit, control_plane));
        }
    }

    #[test]
    fn everything_else_is_refused_by_its_name() {
        for (id, units, word) in [
            ("bottlerocket", vec!["containerd.service"], "bottlerocket"),
            ("talos", vec![], "talos"),
            ("rhcos", vec!["crio.service"], "CRI-O"),
            ("debian", vec!["crio.service", "containerd.service"], "CRI-O"),
            ("debian", vec!["docker.service"], "Docker"),
            ("debian", vec![], "containerd.service is not active"),
        ] {
            let refusal = judge(&facts(id, &units)).unwrap_err();
            assert!(refusal.to_string().contains(word), "{refusal}");
            assert!(!refusal.remedy().is_empty());
        }
    }
}
