//! Stage 1: what the node is and runs.

use std::sync::Arc;

use quartermaster_proto::v1::FailureReason;
use thiserror::Error;

use crate::config::{ConfigFacts, Version};
use crate::containerd::{Daemon, DaemonError, Served, SettingsError, read_settings};
use crate::failure::Reported;
use crate::host::{
    CONTAINERD_UNIT, HostRefusal, HostRoot, ServiceFacts, Systemd, SystemdError, judge, read_facts,
};

/// What was found.
#[derive(Debug)]
pub struct Detected {
    /// PRETTY_NAME of the host.
    pub os: String,
    /// containerd's version as it says it.
    pub version: String,
    /// The unit that runs containerd.
    pub unit: ServiceFacts,
    /// Path of its socket on the host.
    pub socket: String,
    /// What its files say.
    pub config: ConfigFacts,
    /// What its CRI serves now.
    pub served: Served,
    /// The daemon.
    pub daemon: Daemon,
    /// The host's systemd.
    pub systemd: Systemd,
}

/// Why a node cannot be described or served.
#[derive(Debug, Error)]
pub enum DetectError {
    /// A host of a kind that is not served.
    #[error(transparent)]
    Host(#[from] HostRefusal),
    /// systemd cannot be asked.
    #[error(transparent)]
    Systemd(#[from] SystemdError),
    /// A restart would end running containers.
    #[error(
        "containerd.service has KillMode={0}: a restart would kill the shims and with them every running container"
    )]
    KillMode(String),
    /// A unit whose program is not containerd.
    #[error("containerd.service runs {0:?}, which is not containerd")]
    NotContainerd(String),
    /// The daemon's files cannot be read.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The daemon does not answer.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// A version that nobody knows.
    #[error("containerd says its version is {0:?}, which cannot be understood")]
    Version(String),
    /// A version too old.
    #[error("containerd {0} is older than 1.6, the oldest that speaks the CRI of today's kubelets")]
    TooOld(Version),
}

impl Reported for DetectError {
    fn reason(&self) -> FailureReason {
        match self {
            // It may be on its way up: worth another try, unlike what a host is.
            Self::Host(HostRefusal::NoContainerd) => FailureReason::ContainerdUnreachable,
            Self::Host(_)
            | Self::KillMode(_)
            | Self::NotContainerd(_)
            | Self::Version(_)
            | Self::TooOld(_)
            | Self::Daemon(DaemonError::NoCri { .. }) => FailureReason::UnsupportedHost,
            Self::Settings(_) => FailureReason::UnsupportedConfiguration,
            Self::Systemd(_) | Self::Daemon(_) => FailureReason::ContainerdUnreachable,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::Host(refusal) => refusal.remedy(),
            Self::KillMode(_) => "Set KillMode=process in the unit, as containerd's own unit file has it, `systemctl daemon-reload`, then try again.".into(),
            Self::NotContainerd(_) | Self::Version(_) => {
                "Only a plain containerd.service is served.".into()
            }
            Self::TooOld(_) => "Upgrade containerd to 1.6 or later.".into(),
            Self::Daemon(DaemonError::NoCri { .. }) => "Take CRI out of `disabled_plugins` and restart containerd, or provision the runtime that the kubelet really uses.".into(),
            Self::Systemd(_) | Self::Daemon(_) => "`systemctl status containerd` and `journalctl -u containerd` on the node say more.".into(),
            Self::Settings(_) => String::new(),
        }
    }
}

/// Looks at the node. It changes nothing.
///
/// # Errors
/// [`DetectError`] when the node cannot be served or cannot be asked.
pub async fn detect(root: &Arc<HostRoot>) -> Result<Detected, DetectError> {
    let systemd = Systemd::connect(root).await?;
    let host = read_facts(root, &systemd).await?;
    judge(&host)?;
    let unit = systemd.service(CONTAINERD_UNIT).await?;
    check_unit(&unit)?;
    let settings = read_settings(root, &arguments(root, &unit))?;
    let daemon = Daemon::new(Arc::clone(root), &settings.socket);
    let (version_text, served) = tokio::try_join!(daemon.version(), daemon.served())?;
    let version = Version::parse(&version_text).ok_or_else(|| DetectError::Version(version_text.clone()))?;
    if (version.major, version.minor) < (1, 6) {
        return Err(DetectError::TooOld(version));
    }
    Ok(Detected {
        os: host.os.pretty_name,
        version: version_text,
        unit,
        socket: settings.socket,
        config: ConfigFacts {
            containerd: version,
            path: settings.config_path,
            file: settings.file,
            imports: settings.imports,
            missing_imports: settings.missing_imports,
            live_systemd_cgroup: served.systemd_cgroup(&served.default_runtime),
        },
        served,
        daemon,
        systemd,
    })
}

fn check_unit(unit: &ServiceFacts) -> Result<(), DetectError> {
    let program = unit.binary.rsplit('/').next().unwrap_or_default();
    if program != "containerd" {
        return Err(DetectError::NotContainerd(unit.binary.clone()));
    }
    match unit.kill_mode.as_str() {
        "process" | "none" => Ok(()),
        other => Err(DetectError::KillMode(other.to_owned())),
    }
}

/// The running process's own command line: in the unit's there may be variables that only systemd resolves.
fn arguments(root: &HostRoot, unit: &ServiceFacts) -> Vec<String> {
    let line = root
        .read(&format!("/proc/{}/cmdline", unit.main_pid), 64 * 1024)
        .unwrap_or_default();
    let arguments: Vec<String> = line
        .split(|byte| *byte == 0)
        .filter(|argument| !argument.is_empty())
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    if arguments.is_empty() {
        unit.exec.clone()
    } else {
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_whose_restart_would_kill_the_shims_is_refused() {
        let mut unit = ServiceFacts {
            binary: "/usr/local/bin/containerd".into(),
            kill_mode: "process".into(),
            ..Default::default()
        };
        assert!(check_unit(&unit).is_ok());
        for mode in ["control-group", "mixed", ""] {
            unit.kill_mode = mode.into();
            assert!(matches!(check_unit(&unit), Err(DetectError::KillMode(_))));
        }
        unit.binary = "/usr/bin/dockerd".into();
        assert!(matches!(check_unit(&unit), Err(DetectError::NotContainerd(_))));
    }
}
