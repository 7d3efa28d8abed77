//! The plan for a host whose files lie in a folder: nothing of it runs, so its files alone tell.

use quartermaster_proto::v1::{FailureReason, Stage};
use thiserror::Error;

use super::command::at;
use super::detect::{DetectError, check_kill_mode, check_place, judged, known, settings_of};
use super::layout::Layout;
use crate::config::{ConfigFacts, Handler, Plan, Refusal, Version, Written, plan_written, reads_version_3};
use crate::containerd::{DEFAULT_CONFIG, DaemonSettings, SettingsError, Site, data_dir};
use crate::failure::{Failure, Reported};
use crate::host::{
    Distribution, HostFacts, HostRefusal, HostRoot, Overrides, Recognised, UnitFile, facts_of_folder,
    recognised,
};

/// What a folder tells of its host.
#[derive(Debug, Clone)]
pub struct FolderHost {
    /// What kind of node it is, its unit, and where its programs may lie.
    pub host: Recognised,
    /// The version planned for.
    pub version: Version,
    /// Where that version comes from, when nobody gave it.
    pub version_from: Option<&'static str>,
    /// containerd's socket on the host.
    pub socket: String,
    /// What containerd reads.
    pub config: ConfigFacts,
    /// The file that an edit goes to.
    pub written: Written,
    /// The handler to be added.
    pub handler: Handler,
}

impl FolderHost {
    /// Path of the file that an edit goes to.
    pub fn written_path(&self) -> &str {
        self.written.path().unwrap_or(&self.config.path)
    }
}

#[derive(Debug, Error)]
#[error("{0:?} is no version of containerd")]
struct BadVersion(String);

impl Reported for BadVersion {
    fn reason(&self) -> FailureReason {
        FailureReason::UnsupportedHost
    }

    fn remedy(&self) -> String {
        "Give it as in --containerd-version 1.7.24.".into()
    }
}

/// Reads the host in a folder and plans. What is found of the host is given also where its configuration is refused.
///
/// # Errors
/// A [`Failure`] when the host is refused.
pub fn plan_folder(
    root: &HostRoot,
    overrides: &Overrides,
) -> Result<(FolderHost, Result<Plan, Refusal>), Failure> {
    let node = look(root, overrides)?;
    let planned = plan_written(&node.config, &node.written, &node.handler);
    Ok((node, planned))
}

fn look(root: &HostRoot, overrides: &Overrides) -> Result<FolderHost, Failure> {
    let failed = at::<DetectError>(Stage::Detect);
    let facts = facts_of_folder(root);
    let host = whose(root, &facts, overrides).map_err(|error| failed(error.into()))?;
    let unit = UnitFile::read(root, &host.unit);
    let arguments = unit.as_ref().map(|unit| unit.exec.clone()).unwrap_or_default();
    if let Some(unit) = &unit {
        check_kill_mode(&host, &unit.kill_mode).map_err(&failed)?;
    }
    let data_dir = overrides
        .data_dir
        .clone()
        .or_else(|| data_dir(root, host.distribution, &arguments));
    let site = Site::of(host.distribution, data_dir.as_deref());
    let arguments = match host.distribution {
        Distribution::Plain => arguments,
        _ => Vec::new(),
    };
    let settings = settings_of(root, &site, &arguments, overrides).map_err(|error| failed(error.into()))?;
    check_place(&host, &settings.config_path).map_err(&failed)?;
    let (version, version_from) = version(root, &settings, overrides)?;
    let written = site.written(root, version).map_err(|why| {
        failed(
            SettingsError::Unreadable {
                path: host.distribution.name().to_owned(),
                why,
            }
            .into(),
        )
    })?;
    let layout = Layout::below(&host.prefix).map_err(|error| failed(error.into()))?;
    Ok(FolderHost {
        version,
        version_from,
        socket: settings.socket,
        config: ConfigFacts {
            containerd: version,
            path: settings.config_path,
            file: settings.file,
            imports: settings.imports,
            missing_imports: settings.missing_imports,
            live_systemd_cgroup: overrides.systemd_cgroup,
        },
        written,
        handler: layout.handler(),
        host,
    })
}

/// Whose host it is. A configuration alone is enough: most who ask have only that.
fn whose(root: &HostRoot, facts: &HostFacts, overrides: &Overrides) -> Result<Recognised, HostRefusal> {
    match judged(facts, overrides) {
        Err(HostRefusal::NoContainerd | HostRefusal::DockerOnly)
            if overrides.config.is_some() || root.exists(DEFAULT_CONFIG) && !docker_alone(facts) =>
        {
            let unit = Distribution::Plain.default_unit();
            Ok(recognised(facts, Distribution::Plain, unit))
        }
        Err(HostRefusal::NoContainerd) => {
            let folders = [
                Distribution::K3s,
                Distribution::Rke2,
                Distribution::Microk8s,
                Distribution::K0s,
            ];
            folders
                .into_iter()
                .find(|distribution| {
                    let site = Site::of(*distribution, overrides.data_dir.as_deref());
                    site.config.is_some_and(|path| root.exists(&path))
                })
                .map(|distribution| recognised(facts, distribution, distribution.default_unit()))
                .ok_or_else(|| HostRefusal::NothingThere(root.path().display().to_string()))
        }
        other => other,
    }
}

fn docker_alone(facts: &HostFacts) -> bool {
    facts.units.iter().any(|unit| unit == "docker.service")
}

/// The version that was given, that of the package, or the oldest that would read such a file.
fn version(
    root: &HostRoot,
    settings: &DaemonSettings,
    overrides: &Overrides,
) -> Result<(Version, Option<&'static str>), Failure> {
    if let Some(text) = &overrides.containerd_version {
        return match known(text) {
            Ok(version) => Ok((version, None)),
            Err(DetectError::Version(text)) => Err(at(Stage::Detect)(BadVersion(text))),
            Err(error) => Err(at(Stage::Detect)(error)),
        };
    }
    if let Some(version) = packaged(root) {
        return Ok((version, Some("the package's, as dpkg has it")));
    }
    let needs_2 = settings
        .file
        .iter()
        .chain(settings.imports.iter().map(|import| &import.bytes))
        .any(|bytes| reads_version_3(bytes));
    let (major, minor) = if needs_2 { (2, 0) } else { (1, 7) };
    let version = Version {
        major,
        minor,
        patch: 0,
    };
    Ok((
        version,
        Some("assumed from the file; --containerd-version says better"),
    ))
}

/// The version of containerd's package in dpkg's list.
fn packaged(root: &HostRoot) -> Option<Version> {
    let bytes = root.read("/var/lib/dpkg/status", 64 * 1024 * 1024).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    text.split("\n\n").find_map(|package| {
        let field = |name: &str| {
            package
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        let wanted = ["containerd", "containerd.io"].contains(&field("Package")?);
        let installed = field("Status")?.ends_with(" installed");
        (wanted && installed).then(|| Version::parse(field("Version")?))?
    })
}
