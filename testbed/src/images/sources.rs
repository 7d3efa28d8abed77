//! A copy of the workspace's files that a build is made from, and what names the outcome: their hash.
//!
//! A copy, since a build takes minutes: a file edited meanwhile would be in the image and not in its name.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::tool::Tool;

/// The files of a workspace.
pub(super) struct Sources {
    root: PathBuf,
    /// Relative paths, sorted.
    files: Vec<PathBuf>,
}

impl Sources {
    /// The files that are tracked by git, or new and not ignored. All of them: cargo takes a workspace only whole, with
    /// every program that a member's manifest names.
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

    /// Names an image that is made from `from`, which are files and folders of the workspace.
    ///
    /// # Errors
    /// If a file can't be read.
    pub(super) fn hash(&self, recipe: &str, from: &[&str]) -> Result<String> {
        let mut hasher = Sha256::new();
        hasher.update(recipe);
        for file in self.files.iter().filter(|file| counts(file, from)) {
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

/// A crate's integration tests are in no image, and change the most. Cargo.lock counts for all: another member's new
/// dependency can switch on a feature of a shared one only by way of it.
fn counts(file: &Path, from: &[&str]) -> bool {
    from.iter()
        .any(|from| file.starts_with(from) && !file.starts_with(Path::new(from).join("tests")))
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
        Tool::new("git")
            .args(["init", "--quiet"])
            .dir(dir.path())
            .output()
            .unwrap();
        dir
    }

    fn agent_hash(dir: &Path) -> String {
        Sources::of(dir)
            .unwrap()
            .hash("", &["Cargo.toml", "agent"])
            .unwrap()
    }

    #[test]
    fn lists_new_files_and_leaves_out_ignored_ones() {
        let dir = workspace();
        let files = Sources::of(dir.path()).unwrap().files;
        assert!(files.contains(&PathBuf::from("agent/src/main.rs")), "{files:?}");
        assert!(!files.iter().any(|file| file.ends_with("noise.log")), "{files:?}");
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
    fn an_integration_test_does_not_change_the_name() {
        let dir = workspace();
        let before = agent_hash(dir.path());
        fs::create_dir(dir.path().join("agent/tests")).unwrap();
        fs::write(dir.path().join("agent/tests/plan.rs"), "t").unwrap();
        assert_eq!(agent_hash(dir.path()), before);
    }

    #[test]
    fn a_copy_has_the_same_name_and_stays_as_it_was() {
        let dir = workspace();
        let to = tempfile::tempdir().unwrap();
        let copied = Sources::of(dir.path())
            .unwrap()
            .copy(&to.path().join("c"))
            .unwrap();
        let name = copied.hash("", &["agent"]).unwrap();
        assert_eq!(
            name,
            Sources::of(dir.path()).unwrap().hash("", &["agent"]).unwrap()
        );
        fs::write(dir.path().join("agent/src/main.rs"), "changed").unwrap();
        assert_eq!(copied.hash("", &["agent"]).unwrap(), name);
    }
}
