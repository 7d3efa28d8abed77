//! The host-wide settings that a testbed needs, the only things it changes outside its namespaces, cgroups and folders.
//!
//! What they were is written down before the first change, and the last testbed to go puts them back.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::cgroups::Hierarchies;
use crate::layout::state_root;
use crate::tool::Tool;

/// One kernel setting under /proc/sys.
struct Sysctl {
    path: &'static str,
    wanted: u64,
    rule: Rule,
}

enum Rule {
    /// Raised if lower.
    AtLeast,
    /// Exactly this: the kubelet of every node would set it so.
    Exactly,
}

const SYSCTLS: &[Sysctl] = &[
    // Each node's systemd, kubelet and containerd take dozens; the usual 128 ends with "too many open files".
    at_least("fs/inotify/max_user_instances", 2048),
    at_least("fs/inotify/max_user_watches", 524_288),
    exactly("vm/overcommit_memory", 1),
    exactly("kernel/panic", 10),
    exactly("kernel/panic_on_oops", 1),
    exactly("kernel/keys/root_maxkeys", 1_000_000),
    exactly("kernel/keys/root_maxbytes", 25_000_000),
];

const fn at_least(path: &'static str, wanted: u64) -> Sysctl {
    Sysctl {
        path,
        wanted,
        rule: Rule::AtLeast,
    }
}

const fn exactly(path: &'static str, wanted: u64) -> Sysctl {
    Sysctl {
        path,
        wanted,
        rule: Rule::Exactly,
    }
}

/// cgroup v1 hierarchies that nodes need and some hosts do not mount: crun wants hugetlb beside the others, and systemd
/// wants its own.
const V1_MOUNTS: &[(&str, &str)] = &[("hugetlb", "hugetlb"), ("systemd", "none,name=systemd")];

/// What was changed, kept on disk while any testbed stands.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Changes {
    /// After a restart of the host nothing of it holds any more.
    boot_id: String,
    sysctls: Vec<Change>,
    mounts: Vec<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Change {
    path: String,
    was: String,
    set: String,
}

/// Sets what is not as it must be. The caller holds the lock of the state folder.
///
/// # Errors
/// If the kernel refuses a setting.
pub fn apply() -> Result<()> {
    let mut changes = Changes::read();
    for setting in SYSCTLS {
        let file = Path::new("/proc/sys").join(setting.path);
        let Ok(text) = fs::read_to_string(&file) else {
            continue; // A kernel without it needs nothing.
        };
        let was = text.trim().to_owned();
        if setting.holds(&was) {
            continue;
        }
        let set = setting.wanted.to_string();
        changes.remember(Change {
            path: setting.path.to_owned(),
            was,
            set: set.clone(),
        });
        changes.write()?;
        fs::write(&file, &set).with_context(|| format!("can't set {} to {set}", file.display()))?;
    }
    if let Hierarchies::V1(mounted) = Hierarchies::of_host()? {
        for (folder, options) in V1_MOUNTS {
            if mounted.iter().any(|one| one.options == *options) || !kernel_has(options) {
                continue;
            }
            let target = Path::new("/sys/fs/cgroup").join(folder);
            changes.mounts.push(target.clone());
            changes.write()?;
            fs::create_dir_all(&target).with_context(|| format!("can't make {}", target.display()))?;
            Tool::new("mount")
                .args(["-t", "cgroup", "-o", options, "cgroup"])
                .arg(&target)
                .output()?;
        }
    }
    Ok(())
}

/// Puts back what [`apply`] changed, where it is still as it was set. The caller holds the lock of the state folder and has
/// seen that no testbed is left.
///
/// # Errors
/// If the kernel refuses, or a hierarchy is still in use.
pub fn put_back() -> Result<()> {
    let changes = Changes::read();
    for change in &changes.sysctls {
        let file = Path::new("/proc/sys").join(&change.path);
        let now = fs::read_to_string(&file).unwrap_or_default();
        if now.trim() == change.set {
            fs::write(&file, &change.was)
                .with_context(|| format!("can't put {} back to {}", file.display(), change.was))?;
        }
    }
    for target in &changes.mounts {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        if mounts.contains(&format!(" {} ", target.display())) {
            Tool::new("umount").arg(target).output()?;
        }
        // The folder stays where /sys/fs/cgroup is read-only or something else lies in it.
        let _ = fs::remove_dir(target);
    }
    match fs::remove_file(Changes::path()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("can't remove {}", Changes::path().display()))
        }
        _ => Ok(()),
    }
}

impl Sysctl {
    fn holds(&self, now: &str) -> bool {
        match (now.parse::<u64>(), &self.rule) {
            (Ok(now), Rule::AtLeast) => now >= self.wanted,
            (Ok(now), Rule::Exactly) => now == self.wanted,
            (Err(_), _) => false,
        }
    }
}

impl Changes {
    fn path() -> PathBuf {
        state_root().join("host-settings.json")
    }

    fn read() -> Self {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let kept: Self = fs::read(Self::path())
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        kept.of_boot(boot_id.trim())
    }

    fn of_boot(self, boot_id: &str) -> Self {
        if self.boot_id == boot_id {
            self
        } else {
            Self {
                boot_id: boot_id.to_owned(),
                ..Self::default()
            }
        }
    }

    /// Keeps the oldest value: that is what the host had before any of us came.
    fn remember(&mut self, change: Change) {
        match self.sysctls.iter_mut().find(|old| old.path == change.path) {
            Some(old) => old.set = change.set,
            None => self.sysctls.push(change),
        }
    }

    fn write(&self) -> Result<()> {
        let path = Self::path();
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("can't write {}", path.display()))
    }
}

fn kernel_has(options: &str) -> bool {
    options.starts_with("none,")
        || fs::read_to_string("/proc/cgroups").is_ok_and(|all| {
            all.lines()
                .any(|line| line.split_whitespace().next() == Some(options))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(was: &str, set: &str) -> Change {
        Change {
            path: "kernel/panic".into(),
            was: was.into(),
            set: set.into(),
        }
    }

    #[test]
    fn a_higher_limit_of_the_hosts_own_is_left_alone() {
        assert!(at_least("x", 128).holds("4096"));
        assert!(!at_least("x", 128).holds("127"));
        assert!(!exactly("x", 10).holds("11"));
    }

    #[test]
    fn the_value_before_the_first_change_is_what_is_put_back() {
        let mut changes = Changes::default();
        changes.remember(change("0", "10"));
        changes.remember(change("5", "10"));
        assert_eq!(changes.sysctls.len(), 1);
        assert_eq!(changes.sysctls[0].was, "0");
    }

    #[test]
    fn changes_of_an_earlier_boot_are_forgotten() {
        let mut changes = Changes {
            boot_id: "a".into(),
            ..Changes::default()
        };
        changes.remember(change("0", "10"));
        assert_eq!(changes.of_boot("b").sysctls.len(), 0);
    }
}
