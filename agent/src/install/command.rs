//! What all commands have in common: what they report, how they end, and that only one changes a node at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use quartermaster_proto::v1::{FailureReason, Stage};
use thiserror::Error;

use super::layout::Layout;
use super::lock::Lock;
use crate::config::{Refusal, RefusalKind};
use crate::failure::{Failure, Reported};
use crate::host::{HostDir, HostRoot};

const LOCK: &str = "lock";

/// What a command reports while it works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A stage began.
    Started(Stage),
    /// A stage ended well.
    Finished {
        /// Which.
        stage: Stage,
        /// How long it took.
        took: Duration,
        /// What it found or did, in one line.
        summary: String,
    },
}

/// Where reports go.
pub type Progress = Arc<dyn Fn(Event) + Send + Sync>;

/// Where a command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// When all is done.
    AtTheEnd,
    /// Before anything that disturbs the node.
    BeforeSwap,
}

/// What a command came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Done {
    /// Whether containerd was restarted.
    pub restarted: bool,
    /// How long its socket did not answer.
    pub socket_gap: Option<Duration>,
    /// Whether files of ours were put on the node, or put there anew.
    pub placed: bool,
    /// Whether what disturbs the node is still to come.
    pub prepared_only: bool,
    /// The unified diff of the configuration; empty when nothing was changed.
    pub diff: String,
}

/// A failure of the bookkeeping around the stages.
#[derive(Debug, Error)]
pub(crate) enum CommandError {
    #[error("another command is changing this node ({0}/{LOCK} is held)")]
    Busy(String),
    #[error("the state folder cannot be kept: {0}")]
    State(#[from] std::io::Error),
}

impl Reported for CommandError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::Busy(_) => FailureReason::Busy,
            Self::State(error) if error.kind() == std::io::ErrorKind::StorageFull => FailureReason::NoSpace,
            Self::State(_) => FailureReason::Internal,
        }
    }
}

impl Reported for Refusal {
    fn reason(&self) -> FailureReason {
        match self.kind {
            RefusalKind::Configuration => FailureReason::UnsupportedConfiguration,
            RefusalKind::Conflict => FailureReason::HandlerConflict,
        }
    }

    fn remedy(&self) -> String {
        self.remedy.clone()
    }
}

/// Reports a stage around the work that it is.
pub(crate) async fn stage<T>(
    progress: &Progress,
    stage: Stage,
    work: impl Future<Output = Result<(T, String), Failure>>,
) -> Result<T, Failure> {
    progress(Event::Started(stage));
    let begun = Instant::now();
    let (value, summary) = work.await?;
    progress(Event::Finished {
        stage,
        took: begun.elapsed(),
        summary,
    });
    Ok(value)
}

pub(crate) fn at<E: Reported>(stage: Stage) -> impl Fn(E) -> Failure {
    move |error| Failure::at(stage, &error)
}

/// Takes the node's lock. `make` says whether the folder for it may be made.
pub(crate) fn lock(
    root: &HostRoot,
    layout: &Layout,
    make: bool,
) -> Result<Option<(HostDir, Lock)>, CommandError> {
    let folder = layout.state_dir();
    let state = match root.dir(&folder) {
        Ok(state) => state,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !make => return Ok(None),
        Err(_) => root.make_dir(&folder)?,
    };
    let lock = Lock::take(&state, LOCK)?.ok_or(CommandError::Busy(folder))?;
    Ok(Some((state, lock)))
}
