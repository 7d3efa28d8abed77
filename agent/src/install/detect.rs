//! Stage 1: what the node is and runs.

use std::sync::Arc;

use quartermaster_proto::v1::FailureReason;
use thiserror::Error;

use super::layout::{BadPrefix, Layout, USUAL_PREFIX};
use crate::config::{ConfigFacts, Version, Written};
use crate::containerd::{
    Daemon, DaemonError, DaemonSettings, Served, SettingsError, Site, data_dir, read_settings,
};
use crate::failure::Reported;
use crate::host::{
    Distribution, HostFacts, HostRefusal, HostRoot, Overrides, Recognised, ServiceFacts, Systemd,
    SystemdError, judge, read_facts, recognised,
};

/// What was found.
#[derive(Debug)]
pub struct Detected {
    /// What kind of node it is, its unit, and where its programs may lie.
    pub host: Recognised,
    /// Where the install folder lies.
    pub layout: Layout,
    /// Path of the containerd program on the host.
    pub binary: String,
    /// The file that an edit goes to.
    pub written: Written,
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
        "{unit} has KillMode={mode}: a restart would kill the shims and with them every running container"
    )]
    KillMode {
        /// The unit.
        unit: String,
        /// Its `KillMode`.
        mode: String,
    },
    /// A unit whose program is not containerd.
    #[error("{unit} runs {program:?}, which is not containerd")]
    NotContainerd {
        /// The unit.
        unit: String,
        /// The program in its `ExecStart`.
        program: String,
    },
    /// A configuration in the system's image.
    #[error("containerd reads {0}, which lies in the system's read-only image")]
    InImage(String),
    /// A path that cannot be a prefix.
    #[error(transparent)]
    Prefix(#[from] BadPrefix),
    /// A prefix that is not there.
    #[error("the folder {0}, below which programs would be put, is not there")]
    NoPrefix(String),
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
            | Self::KillMode { .. }
            | Self::NotContainerd { .. }
            | Self::InImage(_)
            | Self::Prefix(_)
            | Self::NoPrefix(_)
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
            Self::InImage(_) => "Copy the file to /etc/containerd/config.toml, make the unit read it there (a drop-in in /etc/systemd/system/containerd.service.d; on Flatcar it sets CONTAINERD_CONFIG), restart containerd, then try again.".into(),
            Self::Prefix(_) | Self::NoPrefix(_) => "Give a folder that is there, and from which programs run, with --prefix.".into(),
            Self::KillMode { .. } => "Set KillMode=process in the unit, as containerd's own unit file has it, `systemctl daemon-reload`, then try again.".into(),
            Self::NotContainerd { .. } | Self::Version(_) => {
                "Give the unit that runs containerd with --unit, or its version with --containerd-version.".into()
            }
            Self::TooOld(_) => "Upgrade containerd to 1.6 or later.".into(),
            Self::Daemon(DaemonError::NoCri { .. }) => "Take CRI out of `disabled_plugins` and restart containerd, or provision the runtime that the kubelet really uses.".into(),
            Self::Systemd(_) | Self::Daemon(_) => "`systemctl status containerd` and `journalctl -u containerd` on the node say more.".into(),
            Self::Settings(_) => String::new(),
        }
    }
}

impl Detected {
    /// Path of the file that an edit goes to.
    pub fn written_path(&self) -> &str {
        self.written.path().unwrap_or(&self.config.path)
    }

    /// What is in the file that an edit goes to; `None` where there is none.
    pub fn written_bytes(&self) -> Option<&[u8]> {
        match &self.written {
            Written::InPlace => self.config.file.as_deref(),
            Written::Template { bytes, .. } | Written::DropIn { bytes, .. } => bytes.as_deref(),
        }
    }

    /// The unit to restart; `None` where the distribution restarts containerd by itself.
    pub fn restarted_unit(&self) -> Option<&str> {
        restarted_unit(&self.host)
    }
}

/// What a host is, from what was found and what an operator says instead.
///
/// # Errors
/// A [`HostRefusal`], unless the operator says whose containerd it is.
pub(crate) fn judged(facts: &HostFacts, overrides: &Overrides) -> Result<Recognised, HostRefusal> {
    let found = judge(facts);
    let mut host = match (overrides.distribution, found) {
        (Some(distribution), Ok(found)) if found.distribution == distribution => found,
        (Some(distribution), _) => {
            let unit = overrides.unit.as_deref().unwrap_or(distribution.default_unit());
            recognised(facts, distribution, unit)
        }
        // A unit of another name is not among those that are looked for.
        (None, Err(HostRefusal::NoContainerd | HostRefusal::DockerOnly)) if overrides.unit.is_some() => {
            recognised(
                facts,
                Distribution::Plain,
                overrides.unit.as_deref().unwrap_or_default(),
            )
        }
        (None, found) => found?,
    };
    if let Some(unit) = &overrides.unit {
        host = recognised(facts, host.distribution, unit);
    }
    if let Some(prefix) = &overrides.prefix {
        host.prefix.clone_from(prefix);
    }
    Ok(host)
}

/// The daemon's files, by the distribution's site, its arguments and what an operator says instead.
///
/// # Errors
/// When one of them cannot be read.
pub(crate) fn settings_of(
    root: &HostRoot,
    site: &Site,
    arguments: &[String],
    overrides: &Overrides,
) -> Result<DaemonSettings, SettingsError> {
    let path = overrides.config.as_ref().or(site.config.as_ref());
    let mut arguments = arguments.to_vec();
    if arguments.is_empty() {
        arguments.push("containerd".to_owned());
    }
    if let Some(path) = path {
        arguments.extend(["--config".to_owned(), path.clone()]);
    }
    let mut settings = read_settings(root, &arguments)?;
    if let Some(socket) = overrides.socket.as_deref().or(site.socket) {
        socket.clone_into(&mut settings.socket);
    }
    Ok(settings)
}

/// What the host's systemd and files tell, before containerd is asked.
pub(crate) struct Found {
    pub(crate) host: Recognised,
    pub(crate) unit: ServiceFacts,
    pub(crate) site: Site,
    pub(crate) binary: String,
    pub(crate) settings: DaemonSettings,
}

impl Found {
    /// The unit to restart; `None` where the distribution restarts containerd by itself.
    pub(crate) fn restarted_unit(&self) -> Option<&str> {
        restarted_unit(&self.host)
    }
}

fn restarted_unit(host: &Recognised) -> Option<&str> {
    (host.distribution != Distribution::K0s).then_some(&host.unit)
}

/// Finds containerd's unit and files.
///
/// # Errors
/// [`DetectError`] when the node cannot be served.
pub(crate) async fn find(
    root: &HostRoot,
    systemd: &Systemd,
    overrides: &Overrides,
) -> Result<Found, DetectError> {
    let host = judged(&read_facts(root, systemd).await?, overrides)?;
    let unit = systemd.service(&host.unit).await?;
    let data_dir = overrides
        .data_dir
        .clone()
        .or_else(|| data_dir(root, host.distribution, &arguments(root, &unit)));
    let site = Site::of(host.distribution, data_dir.as_deref());
    // The unit of a distribution runs more than containerd, so only a plain one's arguments are the daemon's.
    let (binary, arguments) = match &site.binary {
        Some(binary) => (binary.clone(), vec![binary.clone()]),
        None => (unit.binary.clone(), arguments(root, &unit)),
    };
    let settings = settings_of(root, &site, &arguments, overrides)?;
    Ok(Found {
        host,
        unit,
        site,
        binary,
        settings,
    })
}

/// Looks at the node. It changes nothing.
///
/// # Errors
/// [`DetectError`] when the node cannot be served or cannot be asked.
pub async fn detect(root: &Arc<HostRoot>, overrides: &Overrides) -> Result<Detected, DetectError> {
    let systemd = Systemd::connect(root).await?;
    let Found {
        host,
        unit,
        site,
        binary,
        settings,
    } = find(root, &systemd, overrides).await?;
    let layout = Layout::below(&host.prefix)?;
    check_unit(&host, &unit)?;
    check_place(&host, &settings.config_path)?;
    let daemon = Daemon::new(Arc::clone(root), &settings.socket);
    let (version_text, served) = tokio::try_join!(daemon.version(), daemon.served())?;
    let version_text = overrides.containerd_version.clone().unwrap_or(version_text);
    let version = known(&version_text)?;
    let written = site
        .written(root, version)
        .map_err(|why| SettingsError::Unreadable {
            path: host.distribution.name().to_owned(),
            why,
        })?;
    Ok(Detected {
        layout,
        binary,
        written,
        version: version_text,
        unit,
        socket: settings.socket,
        config: ConfigFacts {
            containerd: version,
            path: settings.config_path,
            file: settings.file,
            imports: settings.imports,
            missing_imports: settings.missing_imports,
            live_systemd_cgroup: overrides
                .systemd_cgroup
                .or_else(|| served.systemd_cgroup(&served.default_runtime)),
        },
        served,
        daemon,
        systemd,
        host,
    })
}

/// A version that is served.
pub(crate) fn known(text: &str) -> Result<Version, DetectError> {
    let version = Version::parse(text).ok_or_else(|| DetectError::Version(text.to_owned()))?;
    if (version.major, version.minor) < (1, 6) {
        return Err(DetectError::TooOld(version));
    }
    Ok(version)
}

fn check_unit(host: &Recognised, unit: &ServiceFacts) -> Result<(), DetectError> {
    let program = unit.binary.rsplit('/').next().unwrap_or_default();
    if host.distribution == Distribution::Plain && program != "containerd" {
        return Err(DetectError::NotContainerd {
            unit: host.unit.clone(),
            program: unit.binary.clone(),
        });
    }
    check_kill_mode(host, &unit.kill_mode)
}

/// Whether running containers live through a restart of the unit. k0s restarts containerd by itself.
pub(crate) fn check_kill_mode(host: &Recognised, mode: &str) -> Result<(), DetectError> {
    match mode {
        "process" | "none" => Ok(()),
        _ if host.distribution == Distribution::K0s => Ok(()),
        other => Err(DetectError::KillMode {
            unit: host.unit.clone(),
            mode: if other.is_empty() { "control-group" } else { other }.to_owned(),
        }),
    }
}

/// Whether the configuration lies where it can be written. Flatcar's own lies in its read-only image.
pub(crate) fn check_place(host: &Recognised, config: &str) -> Result<(), DetectError> {
    let read_only = config.starts_with("/usr/");
    if host.distribution == Distribution::Plain && read_only {
        return Err(DetectError::InImage(config.to_owned()));
    }
    Ok(())
}

/// Whether the folder is there that the install folder goes into. One that was made for it would be left behind by a
/// removal, or be lost with the file system that was to be mounted there.
pub(crate) fn check_prefix(root: &HostRoot, layout: &Layout) -> Result<(), DetectError> {
    let prefix = layout.prefix();
    if prefix == USUAL_PREFIX || root.dir(prefix).is_ok() {
        Ok(())
    } else {
        Err(DetectError::NoPrefix(prefix.to_owned()))
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

    fn host(distribution: Distribution) -> Recognised {
        recognised(&HostFacts::default(), distribution, distribution.default_unit())
    }

    #[test]
    fn a_unit_whose_restart_would_kill_the_shims_is_refused() {
        let plain = host(Distribution::Plain);
        let mut unit = ServiceFacts {
            binary: "/usr/local/bin/containerd".into(),
            kill_mode: "process".into(),
            ..Default::default()
        };
        assert!(check_unit(&plain, &unit).is_ok());
        for mode in ["control-group", "mixed", ""] {
            unit.kill_mode = mode.into();
            assert!(matches!(
                check_unit(&plain, &unit),
                Err(DetectError::KillMode { .. })
            ));
            assert!(check_unit(&host(Distribution::K0s), &unit).is_ok());
        }
        unit.binary = "/usr/bin/dockerd".into();
        assert!(matches!(
            check_unit(&plain, &unit),
            Err(DetectError::NotContainerd { .. })
        ));
    }

    #[test]
    fn a_prefix_that_is_not_there_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        let layout = Layout::below("/home/kubernetes/bin").unwrap();
        assert!(matches!(
            check_prefix(&root, &layout),
            Err(DetectError::NoPrefix(prefix)) if prefix == "/home/kubernetes/bin"
        ));
        std::fs::create_dir_all(dir.path().join("home/kubernetes/bin")).unwrap();
        assert!(check_prefix(&root, &layout).is_ok());
        assert!(check_prefix(&root, &Layout::default()).is_ok());
    }

    #[test]
    fn what_an_operator_says_goes_before_what_is_found() {
        let facts = HostFacts {
            units: vec!["docker.service".into()],
            ..HostFacts::default()
        };
        assert!(judged(&facts, &Overrides::default()).is_err());
        let said = Overrides {
            unit: Some("my-containerd.service".into()),
            prefix: Some("/srv".into()),
            ..Overrides::default()
        };
        let host = judged(&facts, &said).unwrap();
        assert_eq!(
            (host.distribution, host.unit.as_str()),
            (Distribution::Plain, "my-containerd.service")
        );
        assert_eq!(host.prefix, "/srv");
        let said = Overrides {
            distribution: Some(Distribution::Rke2),
            ..Overrides::default()
        };
        assert_eq!(judged(&facts, &said).unwrap().unit, "rke2-agent.service");
    }
}
