//! What is known of a configuration before anything is decided.

use std::fmt;

use toml_edit::Document;

use super::tree::Tree;

/// containerd's version, as far as decisions need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 1 or 2.
    pub major: u32,
    /// 7 in 1.7.24.
    pub minor: u32,
    /// 24 in 1.7.24.
    pub patch: u32,
}

impl Version {
    /// Reads `1.7.24~ds1`, `v2.4.2`, `1.6.20-k3s1` and the like; `None` when there are not at least two numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text
            .trim()
            .trim_start_matches('v')
            .split(|c: char| !c.is_ascii_digit())
            .map(str::parse);
        let major = numbers.next()?.ok()?;
        let minor = numbers.next()?.ok()?;
        let patch = numbers.next().and_then(Result::ok).unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Which plugin ids a configuration uses for CRI. The header's `version` does not tell: a file may say 2 and use
/// the ids of 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `plugins.cri`
    V1,
    /// `plugins."io.containerd.grpc.v1.cri"`
    V2,
    /// `plugins."io.containerd.cri.v1.runtime"`
    V3,
}

impl Family {
    /// The plugin's id.
    pub const fn id(self) -> &'static str {
        match self {
            Self::V1 => "cri",
            Self::V2 => "io.containerd.grpc.v1.cri",
            Self::V3 => "io.containerd.cri.v1.runtime",
        }
    }

    /// Path of the table that holds the runtime handlers.
    pub(crate) const fn runtimes(self) -> [&'static str; 4] {
        ["plugins", self.id(), "containerd", "runtimes"]
    }
}

/// A file that the configuration imports, in the order in which containerd reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedFile {
    /// Absolute path on the host.
    pub path: String,
    /// What is in it.
    pub bytes: Vec<u8>,
}

/// Everything that the plan of an edit depends on.
#[derive(Debug, Clone)]
pub struct ConfigFacts {
    /// Version of the daemon that reads the file.
    pub containerd: Version,
    /// Absolute path of the file on the host.
    pub path: String,
    /// Its bytes; `None` when there is no such file and the daemon runs on its defaults.
    pub file: Option<Vec<u8>>,
    /// Files that it imports.
    pub imports: Vec<ImportedFile>,
    /// Imports named outright that do not exist.
    pub missing_imports: Vec<String>,
    /// What the running daemon says of its default runtime's `SystemdCgroup`. It counts only where the files
    /// leave the default runtime to the daemon's own defaults.
    pub live_systemd_cgroup: Option<bool>,
}

/// The `imports` of a file; `None` when the file is not TOML.
pub(crate) fn imports_of(bytes: &[u8]) -> Option<Vec<String>> {
    let text = std::str::from_utf8(bytes).ok()?;
    let document = Document::parse(text).ok()?;
    let tree = Tree::of(&document);
    Some(tree.texts(&["imports"]).into_iter().map(str::to_owned).collect())
}

/// Whether a configuration is one that only containerd 2 reads as its author means it: a version above 2, or
/// plugin ids of version 3.
pub fn reads_version_3(bytes: &[u8]) -> bool {
    let Some(text) = std::str::from_utf8(bytes).ok() else {
        return false;
    };
    let Ok(document) = Document::parse(text) else {
        return false;
    };
    let tree = Tree::of(&document);
    let ids = [Family::V3.id(), "io.containerd.cri.v1.images"];
    matches!(tree.get(&["version"]), Some(Tree::Integer(3..)))
        || ids.iter().any(|id| tree.get(&["plugins", id]).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        for (text, wanted) in [
            ("1.6.20~ds1", (1, 6, 20)),
            ("v2.4.2", (2, 4, 2)),
            ("1.7.24-k3s1", (1, 7, 24)),
            ("2.1", (2, 1, 0)),
            ("v2.0.0-rc.1", (2, 0, 0)),
        ] {
            let version = Version::parse(text).unwrap();
            assert_eq!((version.major, version.minor, version.patch), wanted);
        }
        assert_eq!(Version::parse("unknown"), None);
        assert_eq!(Version::parse(""), None);
    }
}
