//! The parts a testbed is put together from: programs and root file systems, each built once and kept in the cache.
//!
//! A part is a folder named by its version and the hash of its recipe. It is built beside the cache's other folders and
//! renamed into place, so that what is there is whole. Nothing here knows of running clusters.

mod debian;
mod go;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::layout::Cache;
use crate::progress::Progress;
use crate::versions::{self, Containerd, Source};

/// Where every part lies. A testbed keeps this on record: a newer version of this program may build its parts otherwise.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Parts {
    kubernetes: PathBuf,
    etcd: PathBuf,
    coredns: PathBuf,
    crictl: PathBuf,
    probe: PathBuf,
    /// Not there in the record of a testbed that an older version of this program has brought up.
    #[serde(default)]
    helm: PathBuf,
    registry: PathBuf,
    node_root: PathBuf,
    containerd: Vec<(String, PathBuf)>,
}

/// What a part is made of; its hash is part of the folder's name.
struct Recipe {
    name: String,
    version: String,
    ingredients: String,
    make: Make,
}

enum Make {
    Go(go::Build),
    NodeRoot,
    DebianPackage {
        suite: &'static str,
        package: &'static str,
        version: &'static str,
    },
}

impl Parts {
    /// Builds what is not in the cache yet: everything but containerds that no node asks for.
    ///
    /// # Errors
    /// If a build fails; with its log's end and path.
    pub fn ensure(cache: &Cache, series: &[&str], progress: &Progress) -> Result<Self> {
        let recipes = recipes(series);
        let folders: Vec<PathBuf> = recipes
            .iter()
            .map(|recipe| cache.parts().join(recipe.folder()))
            .collect();
        let missing = |folders: &[PathBuf]| folders.iter().any(|folder| !folder.exists());
        if missing(&folders) {
            let _lock = lock(cache, progress)?;
            build_missing(cache, &recipes, &folders, progress)?;
        }
        let at = |name: &str| {
            let position = recipes.iter().position(|recipe| recipe.name == name);
            position
                .map(|position| folders[position].clone())
                .with_context(|| format!("no part is named {name}"))
        };
        Ok(Self {
            kubernetes: at("kubernetes")?,
            etcd: at("etcd")?,
            coredns: at("coredns")?,
            crictl: at("crictl")?,
            probe: at("grpc-health-probe")?,
            helm: at("helm")?,
            registry: at("registry")?,
            node_root: at("node-root")?,
            containerd: versions::CONTAINERD
                .iter()
                .filter(|row| series.contains(&row.series))
                .map(|row| Ok((row.series.to_owned(), at(&containerd_name(row))?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Checks that all of it is still there, for a testbed that is up already.
    ///
    /// # Errors
    /// Names the first part that is not.
    pub fn check_present(&self) -> Result<()> {
        let single = [
            &self.kubernetes,
            &self.etcd,
            &self.coredns,
            &self.crictl,
            &self.probe,
            &self.helm,
            &self.registry,
            &self.node_root,
        ];
        let containerds = self.containerd.iter().map(|(_, part)| part);
        for part in single.into_iter().chain(containerds) {
            if !part.exists() {
                bail!(
                    "{} is gone from the cache; take the testbed down and up again",
                    part.display()
                );
            }
        }
        Ok(())
    }

    /// A program of the control plane, or a tool of the host: `etcd`, `kube-apiserver`, `kubectl`, …
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        let part = match name {
            "etcd" => &self.etcd,
            "coredns" => &self.coredns,
            "registry" => &self.registry,
            "grpc-health-probe" => &self.probe,
            "helm" => &self.helm,
            _ => &self.kubernetes,
        };
        part.join("bin").join(name)
    }

    /// The folders with programs for people: kubectl, helm, grpc-health-probe.
    #[must_use]
    pub fn tools(&self) -> Vec<PathBuf> {
        [&self.kubernetes, &self.helm, &self.probe, &self.etcd]
            .map(|part| part.join("bin"))
            .to_vec()
    }

    /// The read-only layers of a node's root, the topmost first.
    #[must_use]
    pub fn layers(&self, series: &str) -> Vec<PathBuf> {
        let containerd = self
            .containerd
            .iter()
            .find(|(known, _)| *known == series)
            .map(|(_, part)| part.join("node"));
        containerd
            .into_iter()
            .chain([
                self.crictl.join("node"),
                self.kubernetes.join("node"),
                self.node_root.join("root"),
            ])
            .collect()
    }
}

fn containerd_name(row: &Containerd) -> String {
    format!("containerd-{}", row.series)
}

fn recipes(series: &[&str]) -> Vec<Recipe> {
    let mut all = vec![
        Recipe {
            name: "node-root".to_owned(),
            version: versions::NODE_SUITE.to_owned(),
            ingredients: versions::NODE_PACKAGES.join(" "),
            make: Make::NodeRoot,
        },
        go::kubernetes().into(),
        go::etcd().into(),
        go::coredns().into(),
        go::crictl().into(),
        go::grpc_health_probe().into(),
        go::helm().into(),
        go::registry().into(),
    ];
    for row in versions::CONTAINERD
        .iter()
        .filter(|row| series.contains(&row.series))
    {
        let recipe = match row.source {
            Source::GoModule { version } => Recipe {
                name: containerd_name(row),
                ..go::containerd(version).into()
            },
            Source::Debian { suite, version } => Recipe {
                name: containerd_name(row),
                version: version.to_owned(),
                ingredients: format!("{suite} {version} merged-usr"),
                make: Make::DebianPackage {
                    suite,
                    package: "containerd",
                    version,
                },
            },
        };
        all.push(recipe);
    }
    all
}

impl From<go::Build> for Recipe {
    fn from(build: go::Build) -> Self {
        Self {
            name: build.name.to_owned(),
            version: build.version.to_owned(),
            ingredients: build.ingredients(),
            make: Make::Go(build),
        }
    }
}

impl Recipe {
    fn folder(&self) -> String {
        let arch = std::env::consts::ARCH;
        let hash = Sha256::digest(format!("{}\n{arch}\n{}", self.version, self.ingredients));
        let hex: String = hash[..5].iter().map(|byte| format!("{byte:02x}")).collect();
        // A Debian version may hold `~` and `:`, and an overlay takes no `:` in the path of a layer.
        let version = self.version.replace([':', '~', '+'], "-");
        format!("{}-{version}-{hex}", self.name)
    }

    fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

fn lock(cache: &Cache, progress: &Progress) -> Result<File> {
    fs::create_dir_all(cache.root())
        .with_context(|| format!("can't make the cache {}", cache.root().display()))?;
    let path = cache.lock();
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("can't open {}", path.display()))?;
    if file.try_lock().is_err() {
        progress.note("another testbed is building its parts; waiting for it");
        file.lock()
            .with_context(|| format!("can't lock {}", path.display()))?;
    }
    Ok(file)
}

fn build_missing(cache: &Cache, recipes: &[Recipe], folders: &[PathBuf], progress: &Progress) -> Result<()> {
    // Whatever lies there was left by a build that was killed: we hold the lock.
    if cache.building().exists() {
        fs::remove_dir_all(cache.building())
            .with_context(|| format!("can't empty {}", cache.building().display()))?;
    }
    fs::create_dir_all(cache.parts())?;
    let missing: Vec<(&Recipe, &PathBuf)> = recipes
        .iter()
        .zip(folders)
        .filter(|(_, folder)| !folder.exists())
        .collect();
    let builds_go = missing
        .iter()
        .any(|(recipe, _)| matches!(recipe.make, Make::Go(_)));
    let (go_parts, debian_parts): (Vec<_>, Vec<_>) = missing
        .into_iter()
        .partition(|(recipe, _)| matches!(recipe.make, Make::Go(_)));
    // Go keeps the processors busy, Debian the network: side by side they take the time of the longer.
    std::thread::scope(|scope| {
        let debian = scope.spawn(|| -> Result<()> {
            for (recipe, folder) in &debian_parts {
                build(cache, recipe, folder, None, progress)?;
            }
            Ok(())
        });
        let go = || -> Result<()> {
            if builds_go {
                let toolchain = go::Toolchain::ensure(cache, progress)?;
                for (recipe, folder) in &go_parts {
                    build(cache, recipe, folder, Some(&toolchain), progress)?;
                }
            }
            Ok(())
        };
        let went = go();
        let debian = debian
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that made Debian's parts died")));
        went.and(debian)
    })
}

fn build(
    cache: &Cache,
    recipe: &Recipe,
    folder: &Path,
    toolchain: Option<&go::Toolchain>,
    progress: &Progress,
) -> Result<()> {
    let building = cache.building().join(recipe.folder());
    let log = cache.logs().join(format!("{}.log", recipe.folder()));
    fs::create_dir_all(&building).with_context(|| format!("can't make {}", building.display()))?;
    // Only the last attempt's words are of use.
    let _ = fs::remove_file(&log);
    progress
        .long_step(&format!("{} built (once)", recipe.title()), || {
            match (&recipe.make, toolchain) {
                (Make::Go(part), Some(toolchain)) => part.make(toolchain, &building, &log)?,
                (Make::Go(_), None) => bail!("no Go toolchain for {}", recipe.name),
                (Make::NodeRoot, _) => debian::node_root(&building, &log)?,
                (
                    Make::DebianPackage {
                        suite,
                        package,
                        version,
                    },
                    _,
                ) => debian::package(suite, package, version, &building, &log, progress)?,
            }
            fs::rename(&building, folder).with_context(|| format!("can't put {} in place", folder.display()))
        })
        .with_context(|| format!("building {}", recipe.title()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_recipe_is_another_folder() {
        let recipe = |ingredients: &str| Recipe {
            name: "x".into(),
            version: "1".into(),
            ingredients: ingredients.into(),
            make: Make::NodeRoot,
        };
        assert_ne!(recipe("a").folder(), recipe("b").folder());
        assert_eq!(recipe("a").folder(), recipe("a").folder());
    }

    #[test]
    fn a_layers_path_holds_no_colon() {
        for recipe in recipes(&["1.6", "1.7", "2.1", "2.4"]) {
            assert!(!recipe.folder().contains([':', ',', '~']), "{}", recipe.folder());
        }
    }

    #[test]
    fn only_the_containerds_asked_for_are_built() {
        let names: Vec<String> = recipes(&["1.7"]).into_iter().map(|one| one.name).collect();
        assert!(names.contains(&"containerd-1.7".to_owned()));
        assert!(!names.contains(&"containerd-2.4".to_owned()));
    }
}
