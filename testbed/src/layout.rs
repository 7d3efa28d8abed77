//! Where things lie on the host: the cache of built parts, and the live state of each testbed.

use std::env;
use std::path::{Path, PathBuf};

/// The folder of parts that are built once and kept.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$TESTBED_CACHE`, else `$XDG_CACHE_HOME/quartermaster-testbed`, else `~/.cache/quartermaster-testbed`.
    #[must_use]
    pub fn locate() -> Self {
        Self::at(cache_root(|name| env::var_os(name).map(PathBuf::from)))
    }

    /// A cache in a folder of one's own.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Finished parts, each in a folder named by its version and the hash of its recipe.
    #[must_use]
    pub fn parts(&self) -> PathBuf {
        self.root.join("parts")
    }

    /// Where parts are built before they are renamed into place. Only the holder of the lock may touch it.
    #[must_use]
    pub fn building(&self) -> PathBuf {
        self.root.join("building")
    }

    /// Logs of builds, one for each part.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Taken by whoever builds, so that two do not build the same part at once.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }
}

fn cache_root(var: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    const NAME: &str = "quartermaster-testbed";
    let set = |name: &str| var(name).filter(|path| path.is_absolute());
    set("TESTBED_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join(NAME)))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache").join(NAME)))
        .unwrap_or_else(|| PathBuf::from("/var/cache").join(NAME))
}

/// The folder that holds one folder for each testbed that is up, and what was changed on the host for all of them.
#[must_use]
pub fn state_root() -> PathBuf {
    env::var_os("TESTBED_STATE")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .unwrap_or_else(|| PathBuf::from("/var/lib/quartermaster-testbed"))
}

/// The live state of one testbed: enough to take it down when whoever made it is long gone.
#[derive(Debug, Clone)]
pub struct State {
    root: PathBuf,
}

impl State {
    /// The state of the testbed of this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self {
            root: state_root().join(name),
        }
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What the testbed was asked to be, and its index.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.root.join("testbed.json")
    }

    /// Process ids with start times, one file for each role.
    #[must_use]
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Logs of the control plane's processes.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join("log")
    }

    /// Certificates, keys and kubeconfigs.
    #[must_use]
    pub fn pki(&self) -> PathBuf {
        self.root.join("pki")
    }

    /// Files of the control plane: etcd's data, CoreDNS's Corefile, the registry's blobs.
    #[must_use]
    pub fn control_plane(&self) -> PathBuf {
        self.root.join("control-plane")
    }

    /// A node's disk and its records.
    #[must_use]
    pub fn node(&self, name: &str) -> PathBuf {
        self.root.join("nodes").join(name)
    }

    /// The kubeconfig for people and tests on the host.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.root.join("kubeconfig")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root_with(vars: &[(&str, &str)]) -> PathBuf {
        cache_root(|name| {
            vars.iter()
                .find(|(n, _)| *n == name)
                .map(|(_, value)| PathBuf::from(value))
        })
    }

    #[test]
    fn the_most_specific_variable_names_the_cache() {
        let all = [("TESTBED_CACHE", "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(root_with(&all), Path::new("/c"));
        assert_eq!(root_with(&all[1..]), Path::new("/x/quartermaster-testbed"));
        assert_eq!(root_with(&all[2..]), Path::new("/h/.cache/quartermaster-testbed"));
    }

    #[test]
    fn a_relative_or_empty_variable_is_ignored() {
        assert_eq!(
            root_with(&[("TESTBED_CACHE", ""), ("XDG_CACHE_HOME", "cache"), ("HOME", "/h")]),
            Path::new("/h/.cache/quartermaster-testbed")
        );
    }
}
