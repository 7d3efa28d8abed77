//! A copy of the workspace's files that a build is made from, and what names the outcome: their hash.
//!
//! A copy, since a build takes minutes: a file edited meanwhile would be in the image and not in its name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::tool::Tool;

/// All that the two Dockerfiles copy.
const PATHS: &[&str] = &[
    ".dockerignore",
    "Cargo.lock",
    "Cargo.toml",
    "Dockerfile.agent",
    "Dockerfile.coordinator",
    "agent",
    "coordinator",
    "proto",
    "rust-toolchain.toml",
];

/// The files of a workspace.
pub(super) struct Sources {
    root: PathBuf,
    /// Relative paths, sorted.
    files: Vec<PathBuf>,
}

impl Sources {
    /// The files that are tracked by git, or new and not ignored; and every member's manifest, without which cargo does not
    /// take the workspace for one.
    ///
    /// # Errors
    /// If git can't list them.
    pub(super) fn of(workspace: &Path) -> Result<Self> {
        let said = Tool::new("git")
            .args([
                "-c",
                "safe.directory=*",
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
                "--",
            ])
            .args(PATHS)
            .args([
                ":(glob)*/Cargo.toml",
                ":(glob)*/src/main.rs",
                ":(glob)*/src/lib.rs",
            ])
            .dir(workspace)
            .called(format!("listing the sources in {} with git", workspace.display()))
            .output()?;
        let mut files: Vec<PathBuf> = said
            .split('\0')
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
            // Deleted, and the deletion not committed yet.
            .filter(|path| workspace.join(path).exists())
            .collect();
        files.sort();
        files.dedup();
        Ok(Self {
            root: workspace.to_owned(),
            files,
        })
    }

    /// Copies them to `to`, which is emptied first. Times of modification are kept: a copied layer of a builder's cache is
    /// found by them too.
    ///
    /// # Errors
    /// If a file can't be read or written.
    pub(super) fn copy(self, to: &Path) -> Result<Self> {
        if to.exists() {
            fs::remove_dir_all(to).with_context(|| format!("can't empty {}", to.display()))?;
        }
        for file in &self.files {
            let (from, to) = (self.root.join(file), to.join(file));
            let copy = || -> std::io::Result<()> {
                if let Some(dir) = to.parent() {
                    fs::create_dir_all(dir)?;
                }
                fs::copy(&from, &to)?;
                let modified = fs::metadata(&from)?.modified()?;
                fs::File::options().append(true).open(&to)?.set_modified(modified)
            };
            copy().with_context(|| format!("can't copy {} to {}", from.display(), to.display()))?;
        }
        Ok(Self {
            root: to.to_owned(),
            files: self.files,
        })
    }

    /// Names an image that is made from those files which are not below `without`.
    ///
    /// # Errors
    /// If a file can't be read.
    pub(super) fn hash(&self, recipe: &str, without: &[&str]) -> Result<String> {
        let mut hasher = Sha256::new();
        hasher.update(recipe);
        for file in self.files.iter().filter(|file| counts(file, without)) {
            let path = self.root.join(file);
            let content = fs::read(&path).with_context(|| format!("can't read {}", path.display()))?;
            hasher.update(file.as_os_str().as_encoded_bytes());
            hasher.update((content.len() as u64).to_be_bytes());
            hasher.update(content);
        }
        Ok(hasher.finalize()[..6]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }
}

/// A manifest always counts: it decides on features of crates that are shared.
fn counts(file: &Path, without: &[&str]) -> bool {
    file.ends_with("Cargo.toml") || !without.iter().any(|dir| file.starts_with(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("Cargo.toml", "[workspace]");
        write(".gitignore", "*.log");
        write("agent/Cargo.toml", "a");
        write("agent/src/main.rs", "fn main() {}");
        write("agent/noise.log", "x");
        write("coordinator/Cargo.toml", "c");
        write("coordinator/src/node.rs", "n");
        write("docs/x.md", "d");
        Tool::new("git")
            .args(["init", "--quiet"])
            .dir(dir.path())
            .output()
            .unwrap();
        dir
    }

    fn agent_hash(dir: &Path) -> String {
        Sources::of(dir).unwrap().hash("", &["coordinator"]).unwrap()
    }

    #[test]
    fn lists_new_files_and_leaves_out_ignored_ones_and_documents() {
        let dir = workspace();
        let files = Sources::of(dir.path()).unwrap().files;
        assert!(files.contains(&PathBuf::from("agent/src/main.rs")), "{files:?}");
        assert!(!files.iter().any(|file| file.ends_with("noise.log")), "{files:?}");
        assert!(!files.iter().any(|file| file.starts_with("docs")), "{files:?}");
    }

    #[test]
    fn the_agents_name_changes_with_its_source_and_not_with_the_coordinators() {
        let dir = workspace();
        let before = agent_hash(dir.path());
        fs::write(dir.path().join("coordinator/src/node.rs"), "m").unwrap();
        assert_eq!(agent_hash(dir.path()), before);
        fs::write(dir.path().join("agent/src/main.rs"), "fn main() { }").unwrap();
        assert_ne!(agent_hash(dir.path()), before);
    }

    #[test]
    fn a_manifest_of_any_member_changes_the_name() {
        let dir = workspace();
        let before = agent_hash(dir.path());
        fs::write(dir.path().join("coordinator/Cargo.toml"), "features").unwrap();
        assert_ne!(agent_hash(dir.path()), before);
    }

    #[test]
    fn a_copy_has_the_same_name_and_stays_as_it_was() {
        let dir = workspace();
        let to = tempfile::tempdir().unwrap();
        let copied = Sources::of(dir.path())
            .unwrap()
            .copy(&to.path().join("c"))
            .unwrap();
        let name = copied.hash("", &[]).unwrap();
        assert_eq!(name, Sources::of(dir.path()).unwrap().hash("", &[]).unwrap());
        fs::write(dir.path().join("agent/src/main.rs"), "changed").unwrap();
        assert_eq!(copied.hash("", &[]).unwrap(), name);
    }
}
