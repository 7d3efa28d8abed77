//! Where things lie on a host.

/// The install folder.
pub const INSTALL_DIR: &str = "/opt/quartermaster";
/// The link to the version in use, in the install folder.
pub(crate) const CURRENT: &str = "current";
/// What containerd runs for a pod with our handler. The path never changes, so an upgrade edits no configuration.
pub const HANDLER_BINARY: &str = "/opt/quartermaster/current/bin/crun";
/// The handler's program where the install folder lies below `prefix`.
pub fn handler_binary(prefix: &str) -> String {
    format!("{}/quartermaster/current/bin/crun", prefix.trim_end_matches('/'))
}

/// The agent's copy, which runs the swap on the host and can put a node back without a cluster.
pub(crate) const AGENT_BINARY: &str = "/opt/quartermaster/current/bin/quartermaster-agent";
/// The state folder's name in the install folder.
pub(crate) const STATE: &str = "state";
/// Journal, backups and locks.
pub(crate) const STATE_DIR: &str = "/opt/quartermaster/state";
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
