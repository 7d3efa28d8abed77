//! Where each distribution keeps its containerd: the file that is read, the one that is written, and the socket.

use std::io;

use crate::config::{Version, Written};
use crate::host::{Distribution, HostRoot};

/// Largest file that is read, in bytes.
const LIMIT: usize = 1024 * 1024;
const K3S_BASE: &str = "{{ template \"base\" . }}\n";
const K3S_FOREIGN: &str = "k3s and RKE2 add a handler crun by themselves when they find a program of that name on their PATH. Move that program away (or out of the service's PATH), restart the service, then try again.";
const MICROK8S_FOREIGN: &str =
    "Remove or rename that handler in the template, restart the snap's containerd, then try again.";

/// The files of a distribution's containerd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    distribution: Distribution,
    /// Folder that holds what is written.
    folder: String,
    /// The configuration that containerd reads; `None` where its command line tells.
    pub config: Option<String>,
    /// containerd's socket; `None` where its command line or its configuration tells.
    pub socket: Option<&'static str>,
    /// The program; `None` where the unit tells.
    pub binary: Option<String>,
}

impl Site {
    /// The files of `distribution`; `data_dir` where it was moved from its usual folder.
    pub fn of(distribution: Distribution, data_dir: Option<&str>) -> Self {
        let data = |usual: &str| data_dir.unwrap_or(usual).trim_end_matches('/').to_owned();
        let (folder, config, socket, binary) = match distribution {
            Distribution::Plain => {
                return Self {
                    distribution,
                    folder: String::new(),
                    config: None,
                    socket: None,
                    binary: None,
                };
            }
            Distribution::K3s | Distribution::Rke2 => {
                let data = data(if distribution == Distribution::K3s {
                    "/var/lib/rancher/k3s"
                } else {
                    "/var/lib/rancher/rke2"
                });
                let bin = if distribution == Distribution::K3s {
                    "data/current/bin"
                } else {
                    "bin"
                };
                (
                    format!("{data}/agent/etc/containerd"),
                    "config.toml",
                    "/run/k3s/containerd/containerd.sock",
                    format!("{data}/{bin}/containerd"),
                )
            }
            Distribution::Microk8s => (
                "/var/snap/microk8s/current/args".to_owned(),
                "containerd.toml",
                "/var/snap/microk8s/common/run/containerd.sock",
                "/snap/microk8s/current/bin/containerd".to_owned(),
            ),
            Distribution::K0s => (
                "/etc/k0s".to_owned(),
                "containerd.toml",
                "/run/k0s/containerd.sock",
                format!("{}/bin/containerd", data("/var/lib/k0s")),
            ),
        };
        Self {
            distribution,
            config: Some(format!("{folder}/{config}")),
            folder,
            socket: Some(socket),
            binary: Some(binary),
        }
    }

    /// The file that is written, as the host has it now.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn written(&self, root: &HostRoot, containerd: Version) -> io::Result<Written> {
        let folder = &self.folder;
        let template = |path: String, beginning, foreign| -> io::Result<Written> {
            Ok(Written::Template {
                bytes: read(root, &path)?,
                path,
                beginning,
                foreign,
            })
        };
        match self.distribution {
            Distribution::Plain => Ok(Written::InPlace),
            Distribution::K3s | Distribution::Rke2 => {
                let old = format!("{folder}/config.toml.tmpl");
                let new = format!("{folder}/config-v3.toml.tmpl");
                // With containerd 2 the old name still counts where there is no file of the new one.
                let takes_new = containerd.major >= 2 && (root.exists(&new) || !root.exists(&old));
                template(if takes_new { new } else { old }, K3S_BASE, K3S_FOREIGN)
            }
            Distribution::Microk8s => {
                template(format!("{folder}/containerd-template.toml"), "", MICROK8S_FOREIGN)
            }
            Distribution::K0s => {
                let path = format!("{folder}/containerd.d/quartermaster.toml");
                Ok(Written::DropIn {
                    bytes: read(root, &path)?,
                    path,
                })
            }
        }
    }
}

fn read(root: &HostRoot, path: &str) -> io::Result<Option<Vec<u8>>> {
    match root.read(path, LIMIT) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The data folder that k3s, RKE2 or k0s were given, on the command line or in their configuration.
pub fn data_dir(root: &HostRoot, distribution: Distribution, arguments: &[String]) -> Option<String> {
    let mut flags = arguments.iter().skip(1);
    while let Some(flag) = flags.next() {
        if let Some(value) = flag
            .strip_prefix("--data-dir=")
            .or_else(|| flag.strip_prefix("-d="))
        {
            return Some(value.to_owned());
        }
        if flag == "--data-dir" || flag == "-d" {
            return flags.next().cloned();
        }
    }
    let path = match distribution {
        Distribution::K3s => "/etc/rancher/k3s/config.yaml",
        Distribution::Rke2 => "/etc/rancher/rke2/config.yaml",
        _ => return None,
    };
    let text = root.read(path, LIMIT).ok()?;
    String::from_utf8_lossy(&text)
        .lines()
        .find_map(|line| line.strip_prefix("data-dir:"))
        .map(|value| value.trim().trim_matches(['"', '\'']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_follows_containerds_version_and_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        let site = Site::of(Distribution::K3s, None);
        let path = |version: &str| {
            let written = site.written(&root, Version::parse(version).unwrap()).unwrap();
            written.path().unwrap().to_owned()
        };
        let folder = "/var/lib/rancher/k3s/agent/etc/containerd";
        assert_eq!(path("2.1.5"), format!("{folder}/config-v3.toml.tmpl"));
        assert_eq!(path("1.7.23"), format!("{folder}/config.toml.tmpl"));
        let there = dir.path().join(&folder[1..]);
        std::fs::create_dir_all(&there).unwrap();
        std::fs::write(there.join("config.toml.tmpl"), "").unwrap();
        assert_eq!(path("2.1.5"), format!("{folder}/config.toml.tmpl"));
        std::fs::write(there.join("config-v3.toml.tmpl"), "").unwrap();
        assert_eq!(path("2.1.5"), format!("{folder}/config-v3.toml.tmpl"));
    }

    #[test]
    fn a_moved_data_folder_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        let arguments = |line: &str| -> Vec<String> { line.split(' ').map(str::to_owned).collect() };
        let found = |line: &str| data_dir(&root, Distribution::K3s, &arguments(line));
        assert_eq!(found("k3s server"), None);
        assert_eq!(
            found("k3s server --data-dir /data/k3s").as_deref(),
            Some("/data/k3s")
        );
        assert_eq!(found("k3s agent -d=/data").as_deref(), Some("/data"));
        std::fs::create_dir_all(dir.path().join("etc/rancher/k3s")).unwrap();
        std::fs::write(
            dir.path().join("etc/rancher/k3s/config.yaml"),
            "token: x\ndata-dir: \"/mnt/k3s\"\n",
        )
        .unwrap();
        assert_eq!(found("k3s server").as_deref(), Some("/mnt/k3s"));
        let site = Site::of(Distribution::K3s, Some("/mnt/k3s/"));
        assert_eq!(
            site.config.as_deref(),
            Some("/mnt/k3s/agent/etc/containerd/config.toml")
        );
    }
}
