//! The Debian packages a testbed needs on the host, and their installation.

use std::path::Path;

use anyhow::Result;

use super::{HostError, find, has_apt};
use crate::progress::Progress;
use crate::tool::Tool;

/// Something the host must have, and the Debian package that brings it.
struct Need {
    sign: Sign,
    package: &'static str,
}

/// How one sees that it is there.
enum Sign {
    Program(&'static str),
    File(&'static str),
}

/// Everything that a testbed runs on the host. Cargo and Rust are there already: they built this program.
const NEEDS: &[Need] = &[
    program("apt-get", "apt"),
    program("debootstrap", "debootstrap"),
    program("dpkg-deb", "dpkg"),
    program("ip", "iproute2"),
    program("mount", "mount"),
    program("nsenter", "util-linux"),
    program("setpriv", "util-linux"),
    program("skopeo", "skopeo"),
    program("unshare", "util-linux"),
    Need {
        sign: Sign::File("/usr/share/keyrings/debian-archive-keyring.gpg"),
        package: "debian-archive-keyring",
    },
    Need {
        sign: Sign::File("/etc/ssl/certs/ca-certificates.crt"),
        package: "ca-certificates",
    },
];

const fn program(name: &'static str, package: &'static str) -> Need {
    Need {
        sign: Sign::Program(name),
        package,
    }
}

impl Need {
    fn is_met(&self) -> bool {
        match self.sign {
            Sign::Program(name) => find(name).is_some(),
            Sign::File(path) => Path::new(path).exists(),
        }
    }

    fn name(&self) -> &'static str {
        match self.sign {
            Sign::Program(name) | Sign::File(name) => name,
        }
    }
}

/// Installs with apt whatever the host lacks.
///
/// # Errors
/// If something is missing and this is no Debian or Ubuntu, or apt fails.
pub fn ensure(progress: &Progress, log: &Path) -> Result<()> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !need.is_met()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !has_apt() {
        let names: Vec<_> = missing.iter().map(|need| need.name()).collect();
        return Err(HostError::CantInstall {
            missing: names.join(", "),
        }
        .into());
    }
    let mut packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    install(progress, &packages, log)
}

/// Installs these packages with apt, after fetching the package lists.
///
/// # Errors
/// If apt fails; with its log.
pub fn install(progress: &Progress, packages: &[&str], log: &Path) -> Result<()> {
    let step = format!("installed on this host with apt: {}", packages.join(" "));
    progress.long_step(&step, || {
        apt().arg("update").called("apt-get update").logged(log)?;
        apt()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(packages)
            .called("apt-get install")
            .logged(log)?;
        Ok(())
    })
}

fn apt() -> Tool {
    // Another apt may be at work (unattended upgrades): wait for it rather than fail.
    Tool::new("apt-get")
        .args(["--quiet", "--option", "DPkg::Lock::Timeout=300"])
        .env("DEBIAN_FRONTEND", "noninteractive")
}
