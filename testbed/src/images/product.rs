//! The product's own images, from the workspace's Dockerfiles.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

use super::sources::Sources;
use super::stand_in;
use super::store::Store;
use super::{BuiltImage, Product};
use crate::progress::Progress;

/// To be raised when the same sources should come out otherwise than before.
const RECIPE: &str = "1";

/// Archives kept for each image, those used last: a developer goes back and forth between a few states.
const KEPT: usize = 8;

/// One image that the workspace builds.
struct Part {
    name: &'static str,
    dockerfile: &'static str,
    /// What of the workspace it is made from.
    from: &'static [&'static str],
}

const AGENT: Part = Part {
    name: "quartermaster-agent",
    dockerfile: "Dockerfile.agent",
    from: &[
        ".dockerignore",
        "Cargo.lock",
        "Cargo.toml",
        "Dockerfile.agent",
        "agent",
        "proto",
        "rust-toolchain.toml",
        "tools/sbom.sh",
    ],
};

const COORDINATOR: Part = Part {
    name: "quartermaster-coordinator",
    dockerfile: "Dockerfile.coordinator",
    from: &[
        ".dockerignore",
        "Cargo.lock",
        "Cargo.toml",
        "Dockerfile.coordinator",
        "coordinator",
        "proto",
        "rust-toolchain.toml",
        "tools/sbom.sh",
    ],
};

/// Stages that outlive the cleaning after a build, under names of their own: they change seldom and cost the network.
const KEPT_STAGES: &[(&Part, &str)] = &[(&AGENT, "payload"), (&COORDINATOR, "toolchain")];

/// Builds what `images` does not hold.
pub(super) fn build(images: &Path, logs: &Path, workspace: &Path, progress: &Progress) -> Result<Product> {
    fs::create_dir_all(images).with_context(|| format!("can't make {}", images.display()))?;
    let sources = Sources::of(workspace)?;
    if let Some(product) = present(images, &sources)? {
        return Ok(product);
    }
    let store = Store::open(&images.join("store"), &logs.join("images.log"), progress)?;
    // Edits from here on are the next build's.
    let sources = sources.copy(&store.dir().join("context"))?;
    if let Some(product) = present(images, &sources)? {
        return Ok(product); // Built while we waited for the store.
    }
    stand_in::ensure(&store, progress)?;
    let build = Build {
        volumes: stand_in::lent(&store, workspace)?,
        store: &store,
    };
    for (part, stage) in KEPT_STAGES {
        let title = format!("{}'s stage {stage} built", part.name);
        progress.step(&title, || {
            build.run(part, &["--target", stage], &format!("testbed/{stage}"))
        })?;
    }
    let product = Product {
        agent: build.image(&AGENT, images, &sources, progress)?,
        coordinator: build.image(&COORDINATOR, images, &sources, progress)?,
    };
    store
        .buildah()
        .args(["rmi", "--prune", "--force"])
        .logged(store.log())?;
    for part in [&AGENT, &COORDINATOR] {
        forget_old(images, part.name)?;
    }
    Ok(product)
}

/// Cargo's profile: `$TESTBED_PROFILE`, for whoever changes the product and waits for it; else what a user gets.
fn profile() -> String {
    std::env::var("TESTBED_PROFILE").unwrap_or_else(|_| "release".to_owned())
}

fn present(images: &Path, sources: &Sources) -> Result<Option<Product>> {
    let agent = AGENT.built(images, sources)?;
    let coordinator = COORDINATOR.built(images, sources)?;
    let both = agent.archive.exists() && coordinator.archive.exists();
    Ok(both.then_some(Product { agent, coordinator }))
}

impl Part {
    fn built(&self, images: &Path, sources: &Sources) -> Result<BuiltImage> {
        let hash = sources.hash(&format!("{RECIPE} {}", profile()), self.from)?;
        Ok(BuiltImage {
            archive: images.join(format!("{}-{hash}.tar", self.name)),
            name: format!("{}:{hash}", self.name),
        })
    }
}

struct Build<'a> {
    store: &'a Store,
    volumes: Vec<String>,
}

impl Build<'_> {
    fn image(
        &self,
        part: &Part,
        images: &Path,
        sources: &Sources,
        progress: &Progress,
    ) -> Result<BuiltImage> {
        let built = part.built(images, sources)?;
        if built.archive.exists() {
            return Ok(built);
        }
        progress.long_step(&format!("{} built from {}", built.name, part.dockerfile), || {
            self.run(part, &[], &built.name)?;
            let partial = built.archive.with_extension("partial");
            let _ = fs::remove_file(&partial);
            // zstd at its best: smaller than gzip and unpacked three times as fast; containerd takes it since 1.5.
            self.store
                .with_policy("push")
                .args([
                    "--quiet",
                    "--format",
                    "oci",
                    "--compression-format",
                    "zstd",
                    "--compression-level",
                    "19",
                ])
                .arg(&built.name)
                .arg(format!("oci-archive:{}:{}", partial.display(), built.name))
                .logged(self.store.log())?;
            self.store
                .buildah()
                .args(["rmi", &built.name])
                .logged(self.store.log())?;
            fs::rename(&partial, &built.archive)
                .with_context(|| format!("can't write {}", built.archive.display()))
        })?;
        Ok(built)
    }

    fn run(&self, part: &Part, options: &[&str], name: &str) -> Result<()> {
        let context = self.store.dir().join("context");
        self.store
            .with_policy("bud")
            .args(["--layers", "--pull-never", "--isolation", "chroot"])
            // Of all times the one that makes the same sources the same image.
            .args(["--timestamp", "0"])
            .args(self.volumes.iter().flat_map(|volume| ["--volume", volume]))
            .args(["--build-arg", &format!("PROFILE={}", profile())])
            .args(options)
            .args(["--tag", name, "--file"])
            .arg(context.join(part.dockerfile))
            .arg(&context)
            .called(format!("building {} with buildah", part.dockerfile))
            .logged(self.store.log())?;
        Ok(())
    }
}

/// Removes all but the newest archives of an image.
fn forget_old(images: &Path, name: &str) -> Result<()> {
    let mut archives: Vec<(SystemTime, PathBuf)> = fs::read_dir(images)?
        .flatten()
        .filter(|entry| {
            let file = entry.file_name();
            let file = file.to_string_lossy();
            file.starts_with(&format!("{name}-")) && file.ends_with(".tar")
        })
        .map(|entry| Ok((entry.metadata()?.modified()?, entry.path())))
        .collect::<std::io::Result<_>>()?;
    archives.sort();
    let old = archives.len().saturating_sub(KEPT);
    for (_, archive) in &archives[..old] {
        fs::remove_file(archive).with_context(|| format!("can't remove {}", archive.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_archives_of_an_image_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        for age in 0..12_u64 {
            let path = dir.path().join(format!("quartermaster-agent-{age}.tar"));
            let file = fs::File::create(path).unwrap();
            file.set_modified(SystemTime::now() - std::time::Duration::from_secs(age))
                .unwrap();
        }
        fs::write(dir.path().join("pause-3.10-x.tar"), "").unwrap();
        forget_old(dir.path(), "quartermaster-agent").unwrap();
        let mut left: Vec<String> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left.len(), KEPT + 1);
        assert!(left.contains(&"quartermaster-agent-0.tar".to_owned()));
        assert!(!left.contains(&"quartermaster-agent-11.tar".to_owned()));
        assert!(left.contains(&"pause-3.10-x.tar".to_owned()));
    }
}
