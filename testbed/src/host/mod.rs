//! What the host must be and have, and the few things changed on it. Knows nothing of clusters.

pub mod packages;
pub mod settings;

use std::fs;
use std::path::Path;

/// Why this machine can't carry a testbed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Not Linux.
    #[error("a testbed needs Linux: it is made of namespaces and cgroups")]
    NotLinux,
    /// Not root.
    #[error("a testbed needs root, to make namespaces, cgroups and mounts: run it as root or with sudo -E")]
    NotRoot,
    /// Neither Debian nor Ubuntu, and something is missing that apt would have brought.
    #[error(
        "missing on this host: {missing}. It is not Debian or Ubuntu, so it can't be installed from here; install it and try again"
    )]
    CantInstall {
        /// Programs or files that are not there.
        missing: String,
    },
    /// A processor that the parts were never built for.
    #[error("a testbed needs an amd64 or arm64 machine, not {0}")]
    Architecture(String),
}

/// Checks what no package can bring.
///
/// # Errors
/// [`HostError`].
pub fn check() -> Result<(), HostError> {
    if !cfg!(target_os = "linux") {
        return Err(HostError::NotLinux);
    }
    if !nix::unistd::Uid::effective().is_root() {
        return Err(HostError::NotRoot);
    }
    architecture().map(drop)
}

/// Go's and Debian's name of this processor.
///
/// # Errors
/// [`HostError::Architecture`].
pub fn architecture() -> Result<&'static str, HostError> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => Err(HostError::Architecture(other.to_owned())),
    }
}

/// Whether apt installs software here.
#[must_use]
pub fn has_apt() -> bool {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    is_debian_like(&release) && find("apt-get").is_some()
}

fn is_debian_like(os_release: &str) -> bool {
    os_release
        .lines()
        .filter_map(|line| line.strip_prefix("ID=").or(line.strip_prefix("ID_LIKE=")))
        .flat_map(|value| value.trim_matches('"').split(' '))
        .any(|id| id == "debian" || id == "ubuntu")
}

/// The path of a program. `/usr/sbin` and `/sbin` are searched too: they are missing from many users' `PATH`.
#[must_use]
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(Into::into))
        .map(|dir| dir.join(program))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_debian_and_what_is_made_of_it() {
        assert!(is_debian_like("NAME=x\nID=debian\n"));
        assert!(is_debian_like("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"));
        assert!(!is_debian_like("ID=\"rhel\"\nID_LIKE=\"fedora\"\n"));
    }

    #[test]
    fn finds_a_program_that_every_linux_has() {
        assert!(find("sh").is_some());
        assert_eq!(find("no-such-program"), None);
    }
}
