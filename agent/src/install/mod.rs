//! Installation and removal, stage by stage: detect, plan, payload, rehearse, swap, verify, commit.
//!
//! A stage reads facts, takes a pure decision from [`crate::config`] or [`crate::containerd`], and carries it out.
//! Nothing here knows of gRPC or of the coordinator; progress goes to a [`Progress`].

mod apply;
mod boot_unit;
mod command;
mod detect;
mod endangered;
mod folder;
mod image;
mod journal;
mod kwasm;
mod layout;
mod lock;
mod payload;
mod pipeline;
mod planning;
mod probe;
mod record;
mod rehearsal;
mod relocation;
mod removal;
mod replacement;
mod sandboxes;
mod sums;
mod swap;
mod verdict;
mod verify;
mod whereabouts;

pub use apply::{ApplyError, apply};
pub use command::{Done, Event, Progress, Stop};
pub use detect::{DetectError, Detected, detect};
pub(crate) use detect::{Found, find};
pub use folder::{FolderHost, plan_folder};
pub use layout::{BadPrefix, Layout};
pub use pipeline::{install, verify_only};
pub(crate) use planning::diff;
pub use planning::{preview, preview_diff};
pub use record::{Installed, State, state};
pub use removal::uninstall;
pub(crate) use swap::settle_at_start;
pub use whereabouts::WhereaboutsError;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::containerd::Daemon;
use crate::host::{HostRoot, Overrides};

/// What a command works on.
#[derive(Debug, Clone)]
pub struct Target {
    /// The host.
    pub root: Arc<HostRoot>,
    /// Folder with `bin`, `lib` and `SHA256SUMS`, as this process sees it.
    pub payload: PathBuf,
    /// What an operator says instead of what would be found.
    pub overrides: Overrides,
    /// Where the install folder lies; the usual place until it was looked for.
    layout: Layout,
    /// The change that was rehearsed last, so that what was prepared a moment ago need not be rehearsed again.
    rehearsed: Arc<Mutex<Option<Rehearsed>>>,
}

/// What a rehearsal was about: the daemon's process, and digests of the configuration before and after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rehearsed {
    daemon: u32,
    before: Option<String>,
    after: Option<String>,
}

impl Target {
    /// The host below `root`, to be given the payload in `payload`.
    pub fn new(root: Arc<HostRoot>, payload: PathBuf) -> Self {
        Self {
            root,
            payload,
            overrides: Overrides::default(),
            layout: Layout::default(),
            rehearsed: Arc::default(),
        }
    }

    /// The same, with what an operator says.
    #[must_use]
    pub fn with(mut self, overrides: Overrides) -> Self {
        self.overrides = overrides;
        self
    }

    /// The same, knowing where the install folder is or goes: what comes before anything else on a node.
    ///
    /// # Errors
    /// A [`WhereaboutsError`] when what an operator says cannot be.
    pub async fn located(&self) -> Result<Self, WhereaboutsError> {
        let layout = whereabouts::locate(&self.root, &self.overrides).await?;
        let mut target = self.clone();
        target.overrides.prefix = Some(layout.prefix().to_owned());
        target.layout = layout;
        Ok(target)
    }

    /// The install folder.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn was_rehearsed(&self, change: &Rehearsed) -> bool {
        self.rehearsed
            .lock()
            .is_ok_and(|last| last.as_ref() == Some(change))
    }

    pub(crate) fn note_rehearsed(&self, change: Rehearsed) {
        if let Ok(mut last) = self.rehearsed.lock() {
            *last = Some(change);
        }
    }
}

/// `namespace/name` of the pods that use a handler, as far as containerd tells.
pub(crate) async fn pods_using(daemon: &Daemon, handler: &str) -> Vec<String> {
    let users = sandboxes::users(daemon, handler).await.unwrap_or_default();
    users.into_iter().map(|user| user.pod).collect()
}

/// How far a swap is whose journal is open, in words.
pub(crate) fn open_swap(target: &Target) -> Option<String> {
    let state = target.root.dir(&target.layout.state_dir()).ok()?;
    Some(journal::Journal::read(&state).ok()??.words())
}
