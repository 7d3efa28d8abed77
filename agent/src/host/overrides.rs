//! What an operator knows better than what can be found on a host.

use clap::Args;

use super::Distribution;

/// Values that are otherwise found on the host. Each stands for itself: what is not given is found as ever.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Instead of what is found on the host")]
pub struct Overrides {
    /// Whose containerd it is
    #[arg(long, value_enum, env = "QUARTERMASTER_DISTRIBUTION")]
    pub distribution: Option<Distribution>,
    /// Path of the configuration that containerd reads
    #[arg(long, value_name = "PATH", env = "QUARTERMASTER_CONFIG")]
    pub config: Option<String>,
    /// Version of containerd, such as 1.7.24
    #[arg(long, value_name = "VERSION", env = "QUARTERMASTER_CONTAINERD_VERSION")]
    pub containerd_version: Option<String>,
    /// Path of containerd's socket
    #[arg(long, value_name = "PATH", env = "QUARTERMASTER_SOCKET")]
    pub socket: Option<String>,
    /// The systemd unit that is restarted
    #[arg(long, value_name = "NAME", env = "QUARTERMASTER_UNIT")]
    pub unit: Option<String>,
    /// Folder below which the install folder lies
    #[arg(long, value_name = "DIR", env = "QUARTERMASTER_PREFIX")]
    pub prefix: Option<String>,
    /// Folder of k3s, RKE2 or k0s, where it is not the usual one
    #[arg(long, value_name = "DIR", env = "QUARTERMASTER_DATA_DIR")]
    pub data_dir: Option<String>,
    /// Whether the default runtime uses systemd's cgroups, where the files leave it open
    #[arg(long, value_name = "BOOL", env = "QUARTERMASTER_SYSTEMD_CGROUP")]
    pub systemd_cgroup: Option<bool>,
}
