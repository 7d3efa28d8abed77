//! Where things lie on a host.

use std::path::Path;

use thiserror::Error;

use crate::config::Handler;

/// Folder below which the install folder lies on most hosts.
pub(crate) const USUAL_PREFIX: &str = "/opt";
/// The install folder's name.
const NAME: &str = "quartermaster";
/// The link to the version in use, in the install folder.
pub(crate) const CURRENT: &str = "current";
/// The agent's copy in a version, which runs the swap on the host and can put a node back without a cluster.
pub(crate) const AGENT: &str = "bin/quartermaster-agent";
/// The state folder's name in the install folder.
pub(crate) const STATE: &str = "state";
/// The open journal, in the state folder.
pub(crate) const JOURNAL: &str = "journal.json";
/// The configuration before the swap, in the state folder.
pub(crate) const JOURNAL_OLD: &str = "journal.old";
/// The configuration after the swap, in the state folder.
pub(crate) const JOURNAL_NEW: &str = "journal.new";
/// Space for the journal's last words, in the state folder.
pub(crate) const JOURNAL_SPARE: &str = "journal.spare";
/// What is installed, in the state folder.
pub(crate) const INSTALLED: &str = "installed.json";
/// The configuration without us, in the state folder.
pub(crate) const ORIGINAL: &str = "config.original";
/// The configuration as we left it, in the state folder.
pub(crate) const EDITED: &str = "config.edited";
/// Scratch space that a reboot clears.
pub(crate) const RUN_DIR: &str = "/run/quartermaster";
/// The unit that runs the swap. One name, so that two can never run at once.
pub(crate) const APPLY_UNIT: &str = "quartermaster-apply.service";
/// Largest configuration that is handled, in bytes.
pub(crate) const MAX_CONFIG: usize = 1024 * 1024;

/// A prefix that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} cannot be a prefix: it has to be an absolute path without `.` and `..`, of letters, digits and -._+ only"
)]
pub struct BadPrefix(String);

/// The install folder of a host: `quartermaster` below a prefix. The paths in it never change with the version, so an
/// upgrade edits no configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    install: String,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            install: format!("{USUAL_PREFIX}/{NAME}"),
        }
    }
}

impl Layout {
    /// The one below `prefix`.
    ///
    /// # Errors
    /// When the prefix could not be written into a unit, a TOML string and a search path as it is.
    pub fn below(prefix: &str) -> Result<Self, BadPrefix> {
        let plain = |part: &str| {
            !["", ".", ".."].contains(&part)
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-._+".contains(&byte))
        };
        match prefix.trim_end_matches('/').strip_prefix('/') {
            Some(rest) if rest.split('/').all(plain) => Ok(Self {
                install: format!("/{rest}/{NAME}"),
            }),
            _ => Err(BadPrefix(prefix.to_owned())),
        }
    }

    /// The one whose journal lies at `path`.
    pub(crate) fn of_journal(path: &Path) -> Option<Self> {
        let layout = Self::of_folder(path.ancestors().nth(2)?)?;
        (path == Path::new(&layout.journal())).then_some(layout)
    }

    /// The one that this program, at `path`, is the copy of.
    pub(crate) fn of_program(path: &Path) -> Option<Self> {
        path.ends_with(AGENT)
            .then(|| Self::of_folder(path.ancestors().nth(3)?))?
    }

    fn of_folder(folder: &Path) -> Option<Self> {
        let layout = Self::below(folder.parent()?.to_str()?).ok()?;
        (folder == Path::new(&layout.install)).then_some(layout)
    }

    /// The folder below which the install folder lies.
    pub fn prefix(&self) -> &str {
        self.install
            .strip_suffix(NAME)
            .unwrap_or_default()
            .trim_end_matches('/')
    }

    /// The install folder.
    pub fn install_dir(&self) -> &str {
        &self.install
    }

    /// The link to the version in use.
    pub(crate) fn current(&self) -> String {
        format!("{}/{CURRENT}", self.install)
    }

    /// What containerd runs for a pod with our handler.
    pub fn handler_binary(&self) -> String {
        format!("{}/bin/crun", self.current())
    }

    /// The handler that is installed.
    pub fn handler(&self) -> Handler {
        Handler {
            name: quartermaster_proto::HANDLER.to_owned(),
            binary: self.handler_binary(),
        }
    }

    /// The agent's copy.
    pub(crate) fn agent_binary(&self) -> String {
        format!("{}/{AGENT}", self.current())
    }

    /// Journal, backups and locks.
    pub(crate) fn state_dir(&self) -> String {
        format!("{}/{STATE}", self.install)
    }

    /// The open journal.
    pub(crate) fn journal(&self) -> String {
        format!("{}/{JOURNAL}", self.state_dir())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_of_ours_lies_in_one_folder_below_the_prefix() {
        let layout = Layout::below("/home/kubernetes/bin/").unwrap();
        assert_eq!(layout.prefix(), "/home/kubernetes/bin");
        assert_eq!(layout.install_dir(), "/home/kubernetes/bin/quartermaster");
        assert_eq!(
            layout.handler_binary(),
            "/home/kubernetes/bin/quartermaster/current/bin/crun"
        );
        assert_eq!(
            layout.journal(),
            "/home/kubernetes/bin/quartermaster/state/journal.json"
        );
        assert_eq!(Layout::below("/opt").unwrap(), Layout::default());
    }

    #[test]
    fn a_prefix_that_a_unit_or_a_search_path_would_read_otherwise_is_none() {
        for prefix in [
            "",
            "/",
            "opt",
            "/opt/../etc",
            "/opt//x",
            "/a b",
            "/a:b",
            "/a%b",
            "/a\"b",
            "/$ORIGIN",
        ] {
            assert_eq!(
                Layout::below(prefix),
                Err(BadPrefix(prefix.to_owned())),
                "{prefix}"
            );
        }
    }

    #[test]
    fn the_folder_is_told_by_the_journals_path_and_by_where_the_copy_runs() {
        let layout = Layout::below("/srv/x").unwrap();
        assert_eq!(
            Layout::of_journal(Path::new(&layout.journal())),
            Some(layout.clone())
        );
        let copy = Path::new("/srv/x/quartermaster/0.1.0-abc/bin/quartermaster-agent");
        assert_eq!(Layout::of_program(copy), Some(layout));
        for path in [
            "/srv/x/other/state/journal.json",
            "/srv/quartermaster/state/else",
            "journal.json",
            "/",
        ] {
            assert_eq!(Layout::of_journal(Path::new(path)), None, "{path}");
        }
        for path in [
            "/quartermaster-agent",
            "/root/hand/quartermaster-agent",
            "/usr/bin/x",
        ] {
            assert_eq!(Layout::of_program(Path::new(path)), None, "{path}");
        }
    }
}
