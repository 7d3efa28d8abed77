//! Parts taken from Debian's archive: the root of a node, and packaged containerds.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::host::{architecture, find};
use crate::progress::Progress;
use crate::tool::Tool;
use crate::versions;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

fn mirror() -> String {
    std::env::var("TESTBED_DEBIAN_MIRROR").unwrap_or_else(|_| "http://deb.debian.org/debian".to_owned())
}

fn security_mirror() -> String {
    std::env::var("TESTBED_DEBIAN_SECURITY_MIRROR")
        .unwrap_or_else(|_| "http://deb.debian.org/debian-security".to_owned())
}

/// Makes `part/root`: a minimal Debian with systemd and what a kubelet needs.
pub(super) fn node_root(part: &Path, log: &Path) -> Result<()> {
    let root = part.join("root");
    let debootstrap = find("debootstrap").context("debootstrap is not installed")?;
    // An older debootstrap does not know the release by name, but all of Debian's are made by one script.
    let script = [versions::NODE_SUITE, "sid"]
        .map(|name| Path::new("/usr/share/debootstrap/scripts").join(name))
        .into_iter()
        .find(|path| path.exists())
        .context("debootstrap has no script for Debian")?;
    // In namespaces of its own: its mounts and whatever its packages' scripts start end with it, also when we are killed.
    Tool::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"])
        .arg(debootstrap)
        .args(["--variant=minbase", &format!("--keyring={KEYRING}")])
        .arg(format!("--include={}", versions::NODE_PACKAGES.join(",")))
        .arg(versions::NODE_SUITE)
        .arg(&root)
        .arg(mirror())
        .arg(script)
        .called("debootstrap of the nodes' root")
        .logged(log)?;
    for leftover in ["var/cache/apt/archives", "var/lib/apt/lists", "var/log"] {
        empty(&root.join(leftover))?;
    }
    // Each node has its own; a machine id in the shared root would make all of them one machine.
    for file in ["etc/machine-id", "etc/hostname", "etc/resolv.conf"] {
        let _ = fs::remove_file(root.join(file));
    }
    Ok(())
}

fn empty(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir_all(&path)?;
        } else {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// Makes `part/node` from a package of this or another Debian release, laid over a node's root.
pub(super) fn package(
    suite: &str,
    name: &str,
    version: &str,
    part: &Path,
    log: &Path,
    progress: &Progress,
) -> Result<()> {
    let apt = Apt::new(&part.join("apt"), suite)?;
    apt.get()?
        .arg("update")
        .called(format!("fetching Debian {suite}'s package lists"))
        .logged(log)?;
    let known = apt.versions(name)?;
    let Some(chosen) = choose(version, &known) else {
        bail!(
            "Debian {suite} has no {name} {version} nor another revision of it; it has {}",
            known.join(", ")
        );
    };
    if chosen != version {
        progress.note(format!(
            "Debian {suite} has no {name} {version} any more; taking {chosen}"
        ));
    }
    apt.get()?
        .arg("download")
        .arg(format!("{name}={chosen}"))
        .dir(&apt.dir)
        .called(format!("fetching {name} {chosen} from Debian {suite}"))
        .logged(log)?;
    let package = fs::read_dir(&apt.dir)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
        .context("apt-get download left no package")?;
    let node = part.join("node");
    Tool::new("dpkg-deb")
        .arg("--extract")
        .args([&package, &node])
        .logged(log)?;
    merge_usr(&node)?;
    fs::remove_dir_all(&apt.dir)?;
    Ok(())
}

/// The pinned version if the archive has it, else the newest revision of the same upstream series (`1.7.…`).
fn choose<'a>(pinned: &str, known: &'a [String]) -> Option<&'a str> {
    let series: String = pinned.split('.').take(2).map(|part| format!("{part}.")).collect();
    known
        .iter()
        .find(|version| *version == pinned)
        .or_else(|| known.iter().find(|version| version.starts_with(&series)))
        .map(String::as_str)
}

/// Moves `/lib` and its like into `/usr`: as folders of an overlay's upper layer they would hide the root's links of the
/// same name, and nothing on the node would find its loader.
fn merge_usr(root: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let from = root.join(name);
        if from.is_dir() && !from.is_symlink() {
            move_into(&from, &root.join("usr").join(name))?;
        }
    }
    Ok(())
}

fn move_into(from: &Path, to: &Path) -> Result<()> {
    if !to.exists() {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        fs::rename(from, to)?;
        return Ok(());
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            move_into(&entry.path(), &target)?;
        } else {
            fs::rename(entry.path(), target)?;
        }
    }
    fs::remove_dir(from)?;
    Ok(())
}

/// An apt that sees one Debian release and nothing of the host's packages.
struct Apt {
    dir: PathBuf,
}

impl Apt {
    fn new(dir: &Path, suite: &str) -> Result<Self> {
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(sub))?;
        }
        fs::write(dir.join("status"), "")?;
        let (main, security) = (mirror(), security_mirror());
        let signed = format!("[signed-by={KEYRING}]");
        fs::write(
            dir.join("sources.list"),
            format!(
                "deb {signed} {main} {suite} main\n\
                 deb {signed} {main} {suite}-updates main\n\
                 deb {signed} {security} {suite}-security main\n"
            ),
        )?;
        Ok(Self { dir: dir.to_owned() })
    }

    fn options(&self) -> Result<Vec<String>> {
        let at = |name: &str| self.dir.join(name).display().to_string();
        Ok([
            format!("Dir::Etc::sourcelist={}", at("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            format!("APT::Architecture={}", architecture()?),
            // The unprivileged user that apt fetches as can't enter our folder.
            "APT::Sandbox::User=root".to_owned(),
        ]
        .into_iter()
        .flat_map(|option| ["--option".to_owned(), option])
        .collect())
    }

    fn get(&self) -> Result<Tool> {
        Ok(Tool::new("apt-get").arg("--quiet").args(self.options()?))
    }

    /// The versions of a package, the newest first.
    fn versions(&self, package: &str) -> Result<Vec<String>> {
        let said = Tool::new("apt-cache")
            .args(self.options()?)
            .args(["madison", package])
            .output()?;
        Ok(madison(&said))
    }
}

fn madison(said: &str) -> Vec<String> {
    let mut versions: Vec<String> = said
        .lines()
        .filter(|line| line.contains(" Packages"))
        .filter_map(|line| line.split('|').nth(1))
        .map(|version| version.trim().to_owned())
        .collect();
    versions.dedup();
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_apts_table_of_versions() {
        let said = "\
containerd | 1.7.24~ds1-6+deb13u2 | http://deb.debian.org/debian trixie/main amd64 Packages\n\
containerd | 1.7.24~ds1-6+deb13u1 | http://deb.debian.org/debian-security trixie-security/main amd64 Packages\n\
containerd | 1.7.24~ds1-6+deb13u1 | http://deb.debian.org/debian trixie/main Sources\n";
        assert_eq!(madison(said), ["1.7.24~ds1-6+deb13u2", "1.7.24~ds1-6+deb13u1"]);
    }

    #[test]
    fn takes_the_pinned_revision_while_the_archive_has_it() {
        let known = ["1.7.24-9".to_owned(), "1.7.24-6".to_owned()];
        assert_eq!(choose("1.7.24-6", &known), Some("1.7.24-6"));
    }

    #[test]
    fn takes_the_newest_of_the_series_when_the_pinned_one_is_gone_and_never_another_series() {
        let known = ["2.0.1-1".to_owned(), "1.7.24-9".to_owned()];
        assert_eq!(choose("1.7.24-6", &known), Some("1.7.24-9"));
        assert_eq!(choose("1.6.20-1", &known), None);
    }

    #[test]
    fn a_package_from_before_merged_usr_hides_none_of_the_roots_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("lib/systemd/system")).unwrap();
        fs::create_dir_all(root.join("usr/lib/x")).unwrap();
        fs::write(root.join("lib/systemd/system/a.service"), "a").unwrap();
        merge_usr(root).unwrap();
        assert!(!root.join("lib").exists());
        assert!(root.join("usr/lib/systemd/system/a.service").exists());
        assert!(root.join("usr/lib/x").exists());
    }
}
