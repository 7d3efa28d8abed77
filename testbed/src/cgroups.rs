//! The host's cgroup hierarchies, and the part of them that belongs to a testbed.
//!
//! Every process of a testbed is moved into one of its cgroups before it runs the program it is for. That is how `down`
//! finds all of them, and nothing else, whatever happened to whoever started them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// How cgroups are mounted on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchies {
    /// cgroup v2 alone, mounted at the path.
    V2(PathBuf),
    /// cgroup v1 (with or without an empty v2 tree beside it): one hierarchy for each group of controllers.
    V1(Vec<Hierarchy>),
}

/// One cgroup v1 hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted on the host.
    pub mount: PathBuf,
    /// The options that mount it again: `memory`, `cpu,cpuacct`, `none,name=systemd`.
    pub options: String,
}

/// The v1 hierarchy without a controller that systemd keeps its units in; it tracks every process of a testbed.
const TRACKING: &str = "none,name=systemd";
const V1_CONTROLLERS: &[&str] = &[
    "blkio",
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "net_cls",
    "net_prio",
    "perf_event",
    "pids",
    "rdma",
    "misc",
];
const V2_CONTROLLERS: &[&str] = &["cpu", "cpuset", "io", "memory", "pids", "hugetlb"];

impl Hierarchies {
    /// Those of this host.
    ///
    /// # Errors
    /// If no cgroup filesystem is mounted.
    pub fn of_host() -> Result<Self> {
        let mountinfo =
            fs::read_to_string("/proc/self/mountinfo").context("can't read /proc/self/mountinfo")?;
        Self::from_mountinfo(&mountinfo)
    }

    fn from_mountinfo(mountinfo: &str) -> Result<Self> {
        let mut v1: Vec<Hierarchy> = Vec::new();
        let mut v2 = None;
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let mount = PathBuf::from(left.split(' ').nth(4).unwrap_or_default());
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup2") => {
                    v2.get_or_insert(mount);
                }
                Some("cgroup") => {
                    let options = v1_options(right.nth(1).unwrap_or_default());
                    if !options.is_empty() && !v1.iter().any(|known| known.options == options) {
                        v1.push(Hierarchy { mount, options });
                    }
                }
                _ => {}
            }
        }
        match v2 {
            Some(root) if v1.is_empty() => Ok(Self::V2(root)),
            _ if v1.is_empty() => bail!("no cgroup filesystem is mounted on this host"),
            _ => Ok(Self::V1(v1)),
        }
    }

    /// `v1` or `v2`.
    #[must_use]
    pub fn version(&self) -> &'static str {
        match self {
            Self::V1(_) => "v1",
            Self::V2(_) => "v2",
        }
    }

    /// The hierarchies of cgroup v1; none on a v2 host.
    #[must_use]
    pub fn v1(&self) -> &[Hierarchy] {
        match self {
            Self::V1(all) => all,
            Self::V2(_) => &[],
        }
    }

    fn roots(&self) -> Vec<&Path> {
        match self {
            Self::V2(root) => vec![root],
            Self::V1(all) => all.iter().map(|one| one.mount.as_path()).collect(),
        }
    }

    /// The root of the hierarchy that every process of a testbed is in.
    ///
    /// # Errors
    /// If a v1 host has no `name=systemd` hierarchy (the host settings mount it).
    pub fn tracking(&self) -> Result<&Path> {
        match self {
            Self::V2(root) => Ok(root),
            Self::V1(all) => all
                .iter()
                .find(|one| one.options == TRACKING)
                .map(|one| one.mount.as_path())
                .context("the cgroup hierarchy name=systemd is not mounted"),
        }
    }
}

fn v1_options(super_options: &str) -> String {
    let options: Vec<&str> = super_options.split(',').collect();
    if options.contains(&"name=systemd") {
        return TRACKING.to_owned();
    }
    options
        .into_iter()
        .filter(|option| V1_CONTROLLERS.contains(option))
        .collect::<Vec<_>>()
        .join(",")
}

/// The cgroups of one testbed.
#[derive(Debug, Clone)]
pub struct Cgroups {
    hierarchies: Hierarchies,
    parent: String,
}

/// The cgroup of the control plane's processes, beside those of the nodes.
pub const CONTROL_PLANE: &str = "control-plane";

impl Cgroups {
    /// Those of the testbed of this name.
    ///
    /// # Errors
    /// As [`Hierarchies::of_host`].
    pub fn of(testbed: &str) -> Result<Self> {
        Ok(Self {
            hierarchies: Hierarchies::of_host()?,
            parent: format!("quartermaster-testbed-{testbed}"),
        })
    }

    /// How the host mounts them.
    #[must_use]
    pub fn hierarchies(&self) -> &Hierarchies {
        &self.hierarchies
    }

    /// The folder in the tracking hierarchy that holds all others of this testbed.
    ///
    /// # Errors
    /// As [`Hierarchies::tracking`].
    pub fn all(&self) -> Result<PathBuf> {
        Ok(self.hierarchies.tracking()?.join(&self.parent))
    }

    /// The folder of a node in the tracking hierarchy.
    ///
    /// # Errors
    /// As [`Hierarchies::tracking`].
    pub fn node(&self, node: &str) -> Result<PathBuf> {
        Ok(self.all()?.join(node_folder(node)))
    }

    /// Makes the control plane's cgroup, and returns the `cgroup.procs` that a process joins it by.
    ///
    /// # Errors
    /// If the cgroup filesystem refuses.
    pub fn make_control_plane(&self) -> Result<Vec<PathBuf>> {
        let dir = self.all()?.join(CONTROL_PLANE);
        make(&dir)?;
        Ok(vec![dir.join("cgroup.procs")])
    }

    /// Makes a node's cgroup in every hierarchy, and returns the files that its first process joins them by.
    ///
    /// # Errors
    /// If the cgroup filesystem refuses.
    pub fn make_node(&self, node: &str) -> Result<Vec<PathBuf>> {
        let mut joins = Vec::new();
        for root in self.hierarchies.roots() {
            let parent = root.join(&self.parent);
            let dir = parent.join(node_folder(node));
            for (above, made) in [(root, &parent), (parent.as_path(), &dir)] {
                make(made)?;
                inherit_cpuset(above, made)?;
            }
            if let Hierarchies::V2(_) = self.hierarchies {
                hand_down(root)?;
                hand_down(&parent)?;
            }
            joins.push(dir.join("cgroup.procs"));
        }
        Ok(joins)
    }

    /// The files by which a process joins a node that is running.
    ///
    /// # Errors
    /// If the cgroup filesystem refuses.
    pub fn join_running_node(&self, node: &str) -> Result<Vec<PathBuf>> {
        match &self.hierarchies {
            Hierarchies::V1(all) => Ok(all
                .iter()
                .map(|one| one.mount.join(&self.parent).join(node_folder(node)))
                .map(|dir| dir.join("cgroup.procs"))
                .collect()),
            // On v2 a cgroup whose children have controllers can't hold processes itself.
            Hierarchies::V2(_) => {
                let leaf = self.node(node)?.join("testbed-exec");
                make(&leaf)?;
                Ok(vec![leaf.join("cgroup.procs")])
            }
        }
    }

    /// Removes a node's emptied cgroups from every hierarchy.
    ///
    /// # Errors
    /// If a process is still in one.
    pub fn remove_node(&self, node: &str) -> Result<()> {
        self.remove(|parent| parent.join(node_folder(node)))
    }

    /// Removes all of the testbed's emptied cgroups.
    ///
    /// # Errors
    /// If a process is still in one.
    pub fn remove_all(&self) -> Result<()> {
        self.remove(Path::to_owned)
    }

    fn remove(&self, which: impl Fn(&Path) -> PathBuf) -> Result<()> {
        for root in self.hierarchies.roots() {
            let dir = which(&root.join(&self.parent));
            remove_tree(&dir).with_context(|| format!("can't remove the cgroup {}", dir.display()))?;
        }
        Ok(())
    }
}

/// A node's folder can't be taken for the control plane's, whatever the node is called.
fn node_folder(node: &str) -> String {
    format!("node-{node}")
}

fn make(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("can't make the cgroup {}", dir.display()))
}

/// A v1 cpuset starts without CPUs and memory nodes, and refuses processes until it has some.
fn inherit_cpuset(above: &Path, dir: &Path) -> Result<()> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let path = dir.join(file);
        // On v2 the file is empty on purpose: it means "as above".
        if !path.exists() || !above.join("cgroup.clone_children").exists() {
            continue;
        }
        if fs::read_to_string(&path)?.trim().is_empty() {
            let inherited = fs::read_to_string(above.join(file))?;
            fs::write(&path, inherited.trim()).with_context(|| format!("can't set {}", path.display()))?;
        }
    }
    Ok(())
}

/// Lets the children of a v2 cgroup use its controllers.
fn hand_down(dir: &Path) -> Result<()> {
    let offered = fs::read_to_string(dir.join("cgroup.controllers"))?;
    let file = dir.join("cgroup.subtree_control");
    for controller in offered.split_whitespace() {
        if V2_CONTROLLERS.contains(&controller) {
            fs::write(&file, format!("+{controller}")).with_context(|| {
                format!(
                    "can't hand the controller {controller} down in {}",
                    file.display()
                )
            })?;
        }
    }
    Ok(())
}

fn remove_tree(dir: &Path) -> std::io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_host_is_a_v1_host() {
        let found = Hierarchies::from_mountinfo(
            "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
             31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
             33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n",
        )
        .unwrap();
        assert_eq!(
            found.v1(),
            [
                Hierarchy {
                    mount: "/sys/fs/cgroup/cpu,cpuacct".into(),
                    options: "cpu,cpuacct".into()
                },
                Hierarchy {
                    mount: "/sys/fs/cgroup/systemd".into(),
                    options: "none,name=systemd".into()
                },
            ]
        );
        assert_eq!(found.tracking().unwrap(), Path::new("/sys/fs/cgroup/systemd"));
    }

    #[test]
    fn a_host_with_v2_alone_is_a_v2_host() {
        let found = Hierarchies::from_mountinfo(
            "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
        )
        .unwrap();
        assert_eq!(found, Hierarchies::V2("/sys/fs/cgroup".into()));
    }

    #[test]
    fn a_hierarchy_mounted_twice_counts_once() {
        let line = "31 30 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        let again = "41 30 0:27 / /mnt/pids rw - cgroup cgroup rw,pids\n";
        let found = Hierarchies::from_mountinfo(&format!("{line}{again}")).unwrap();
        assert_eq!(found.v1().len(), 1);
    }

    #[test]
    fn a_node_named_like_the_control_plane_has_its_own_folder() {
        assert_ne!(node_folder(CONTROL_PLANE), CONTROL_PLANE);
    }
}
