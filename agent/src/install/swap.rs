//! Stage 5 on the pod's side: the journal is written, the host unit started and watched.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep};
use zbus::wire::Variant;

use super::detect::Detected;
use super::journal::{Base, Journal, Kind, Outcome, Promise, Step, digest};
use super::layout::{APPLY_UNIT, JOURNAL_OLD, Layout};
use crate::checkpoint;
use crate::describe::boot_id;
use crate::failure::Reported;
use crate::host::{HostDir, HostRoot, Property, Systemd, SystemdError};

/// The unit's own limit: two restarts with their checks.
const UNIT_LIMIT: Duration = Duration::from_secs(300);
const WATCH_LIMIT: Duration = Duration::from_secs(330);
const START: Duration = Duration::from_secs(20);
/// For a restart and all that follows until containerd is healthy, in seconds.
const HEALTHY_WITHIN: u64 = 60;
/// For what the host unit does after its outcome.
const LAST_STEPS: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);
/// How often a host unit that systemd has given up is started again.
const STARTS: u32 = 3;
/// Before systemd starts a host unit again that was killed, in microseconds.
const PAUSE_MICROS: u64 = 200_000;
/// How often it does so, in this many microseconds.
const START_LIMIT: u32 = 20;
const START_LIMIT_MICROS: u64 = 600_000_000;

/// Why a swap did not end with the new configuration served.
#[derive(Debug, Error)]
pub(crate) enum SwapError {
    /// The state folder cannot be read or written.
    #[error("the journal cannot be kept: {0}")]
    Journal(#[from] io::Error),
    /// The unit cannot be started.
    #[error("the host unit {APPLY_UNIT} cannot be run: {0}")]
    Systemd(#[from] SystemdError),
    /// The unit was started and did not begin.
    #[error(
        "the host unit {APPLY_UNIT} ended as {0:?} before it did anything (is {1} on a file system that forbids execution?)"
    )]
    NotRun(String, String),
    /// The unit ended without an outcome, again and again.
    #[error(
        "the host unit {APPLY_UNIT} was started {STARTS} times and each time ended without an outcome; the journal stays open"
    )]
    NoOutcome,
    /// Nothing was changed.
    #[error("the configuration cannot be replaced: {why}")]
    Refused {
        /// What the host said.
        why: String,
        /// Because the disk is full.
        no_space: bool,
    },
    /// The configuration changed each time before the swap.
    #[error("the configuration was changed by somebody else between each plan and its swap")]
    AlwaysChanging,
    /// containerd did not come up, and the old configuration is back.
    #[error("containerd did not come back healthy: {why}. {words}")]
    RolledBack {
        /// What was missing.
        why: String,
        /// The daemon's own words.
        words: String,
    },
    /// containerd is not healthy at all.
    #[error("containerd is not healthy on this node: {why}. {words}")]
    Broken {
        /// Path of the configuration before the change.
        kept: String,
        /// What was missing.
        why: String,
        /// The daemon's own words.
        words: String,
    },
}

impl Reported for SwapError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::RolledBack { .. } | Self::Broken { .. } => FailureReason::RestartFailed,
            Self::Refused { no_space: true, .. } => FailureReason::NoSpace,
            Self::Journal(error) if error.kind() == io::ErrorKind::StorageFull => FailureReason::NoSpace,
            _ => FailureReason::SwapFailed,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::RolledBack { .. } => "The old configuration is back and containerd is healthy with it. `journalctl -u containerd` on the node says more.".into(),
            Self::Broken { kept, .. } => format!("Log in to the node: `systemctl status containerd`, `journalctl -u containerd`. The configuration before the change lies in {kept}."),
            Self::Refused { no_space: true, .. } => "Nothing was changed. Free some space beside the file, then try again.".into(),
            Self::Refused { .. } => "Nothing was changed. Make the file replaceable, then try again.".into(),
            Self::AlwaysChanging => "Nothing was changed. Find out who rewrites the file, then try again.".into(),
            _ => format!("`journalctl -u {APPLY_UNIT}` on the node says more."),
        }
    }
}

/// A journal that nothing has been done of.
pub(crate) fn planned(
    root: &HostRoot,
    kind: Kind,
    detected: &Detected,
    old: Option<&[u8]>,
    new: Option<&[u8]>,
) -> Journal {
    let ours = quartermaster_proto::HANDLER.to_owned();
    let handlers = detected.served.runtimes.keys();
    Journal {
        format: 1,
        kind,
        config_path: detected.written_path().to_owned(),
        old_sha256: digest(old),
        new_sha256: digest(new),
        pieces: Vec::new(),
        base: Base::Old,
        unit: detected.restarted_unit().unwrap_or_default().to_owned(),
        socket: detected.socket.clone(),
        promise: Promise {
            default_runtime: detected.served.default_runtime.clone(),
            handlers: handlers.filter(|name| **name != ours).cloned().collect(),
            ours: ours.clone(),
            network_ready: detected.served.network_ready,
        },
        ours_before: detected.served.serves(&ours),
        boot_id: boot_id(root),
        kept: None,
        healthy_within_seconds: HEALTHY_WITHIN,
        step: Step::Planned,
        outcome: None,
    }
}

/// A swap that holds: what it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Applied {
    /// How long the socket did not answer.
    pub(crate) gap: Duration,
    /// From the order to restart to a healthy daemon.
    pub(crate) healthy: Duration,
}

/// How a swap ended that is no failure.
#[derive(Debug)]
pub(crate) enum Swapped {
    Applied(Applied),
    /// The file changed in between: plan again.
    Replan,
}

/// Runs the open journal to its end.
pub(crate) async fn run(
    root: &HostRoot,
    layout: &Layout,
    systemd: &Systemd,
    state: &HostDir,
) -> Result<Swapped, SwapError> {
    let outcome = drive(layout, systemd, state).await?;
    match outcome {
        Outcome::Applied {
            gap_micros,
            healthy_micros,
        } => Ok(Swapped::Applied(Applied {
            gap: Duration::from_micros(gap_micros),
            healthy: Duration::from_micros(healthy_micros),
        })),
        Outcome::Replan => {
            Journal::close(root, state)?;
            Ok(Swapped::Replan)
        }
        Outcome::Refused { why, no_space } => {
            Journal::close(root, state)?;
            Err(SwapError::Refused { why, no_space })
        }
        Outcome::RolledBack { why, words } => {
            Journal::close(root, state)?;
            Err(SwapError::RolledBack { why, words })
        }
        // The journal stays: what it keeps is what repairs the node.
        Outcome::Broken { why, words } => Err(SwapError::Broken {
            kept: format!("{}/{JOURNAL_OLD}", layout.state_dir()),
            why,
            words,
        }),
    }
}

/// Takes an applied swap back, for this reason.
pub(crate) async fn roll_back(
    root: &HostRoot,
    layout: &Layout,
    systemd: &Systemd,
    state: &HostDir,
    why: &str,
) -> Result<(), SwapError> {
    if let Some(mut journal) = Journal::read(state)? {
        journal.step = Step::RollBackOrdered { why: why.to_owned() };
        journal.outcome = None;
        journal.write(state)?;
    }
    match run(root, layout, systemd, state).await {
        Err(SwapError::RolledBack { .. }) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(SwapError::NoOutcome),
    }
}

async fn drive(layout: &Layout, systemd: &Systemd, state: &HostDir) -> Result<Outcome, SwapError> {
    let deadline = Instant::now() + WATCH_LIMIT;
    for _ in 0..STARTS {
        start(layout, systemd).await?;
        let mut polls: u32 = 0;
        loop {
            if let Some(outcome) = outcome(state)? {
                ended(systemd).await?;
                return Ok(outcome);
            }
            polls += 1;
            if polls.is_multiple_of(40) && !systemd.is_active(APPLY_UNIT).await? {
                // It may have ended between the two looks.
                match outcome(state)? {
                    Some(outcome) => return Ok(outcome),
                    None => break,
                }
            }
            if Instant::now() > deadline {
                return Err(SwapError::NoOutcome);
            }
            sleep(POLL).await;
        }
    }
    Err(SwapError::NoOutcome)
}

/// Waits until the host unit is gone: after its outcome it takes away what it had put there, and a removal that was
/// quicker would leave it behind.
async fn ended(systemd: &Systemd) -> Result<(), SwapError> {
    let deadline = Instant::now() + LAST_STEPS;
    while systemd.is_loaded(APPLY_UNIT).await? && Instant::now() < deadline {
        sleep(POLL).await;
    }
    Ok(())
}

fn outcome(state: &HostDir) -> io::Result<Option<Outcome>> {
    let journal = Journal::read(state)?;
    Ok(journal
        .filter(|journal| journal.step == Step::Finished)
        .and_then(|journal| journal.outcome))
}

async fn start(layout: &Layout, systemd: &Systemd) -> Result<(), SwapError> {
    let text = |text: &str| Variant::from(text.to_owned());
    let agent = layout.agent_binary();
    let arguments = vec![agent.clone(), "apply".to_owned(), layout.journal()];
    let limit = u64::try_from(UNIT_LIMIT.as_micros()).unwrap_or(u64::MAX);
    let mut properties: Vec<Property> = vec![
        (
            "Description",
            text("Quartermaster's change of containerd's configuration"),
        ),
        ("Type", text("exec")),
        ("CollectMode", text("inactive-or-failed")),
        ("ExecStart", Variant::from(vec![(agent, arguments, false)])),
        ("RuntimeMaxUSec", Variant::from(limit)),
        // Killed in the middle, it goes on by itself: the agent that started it may be gone for good.
        ("Restart", text("on-failure")),
        ("RestartUSec", Variant::from(PAUSE_MICROS)),
        ("StartLimitIntervalUSec", Variant::from(START_LIMIT_MICROS)),
        ("StartLimitBurst", Variant::from(START_LIMIT)),
    ];
    if let Some(folder) = checkpoint::folder() {
        let variable = format!("{}={}", checkpoint::VARIABLE, folder.display());
        properties.push(("Environment", Variant::from(vec![variable])));
    }
    systemd.reset_failed(APPLY_UNIT).await;
    match systemd.start_transient(APPLY_UNIT, &properties, START).await {
        Ok(job) if job.is_done() => Ok(()),
        Ok(job) => Err(SwapError::NotRun(job.0, layout.install_dir().to_owned())),
        // An agent before us started it, and it still runs: its outcome is what we wait for.
        Err(SystemdError::UnitExists(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What an open journal of an earlier command came to.
#[derive(Debug)]
pub(crate) enum Settled {
    /// There was none, or it left the node on its old configuration.
    Clear,
    /// An installation's swap holds and is not committed yet.
    Installed(Box<Journal>, Applied),
    /// A removal's swap holds and the rest of the removal is to come.
    Removed,
}

/// Finishes whatever an earlier command left in the middle.
pub(crate) async fn settle(
    root: &HostRoot,
    layout: &Layout,
    systemd: &Systemd,
    state: &HostDir,
) -> Result<Settled, SwapError> {
    let Some(journal) = Journal::read(state)? else {
        return Ok(Settled::Clear);
    };
    // Nothing was touched, and who wanted it is gone: what is wanted now may be something else.
    if journal.step == Step::Planned && !systemd.is_active(APPLY_UNIT).await? {
        Journal::close(root, state)?;
        return Ok(Settled::Clear);
    }
    tracing::info!(step = ?journal.step, "an open journal is finished first");
    let done = match &journal.outcome {
        Some(Outcome::Applied {
            gap_micros,
            healthy_micros,
        }) if journal.step == Step::Finished => Applied {
            gap: Duration::from_micros(*gap_micros),
            healthy: Duration::from_micros(*healthy_micros),
        },
        Some(Outcome::Broken { .. }) => {
            // Somebody may have repaired it since: look again by going back once more.
            roll_back(root, layout, systemd, state, "containerd was not healthy").await?;
            return Ok(Settled::Clear);
        }
        _ => match run(root, layout, systemd, state).await {
            Ok(Swapped::Applied(done)) => done,
            Ok(Swapped::Replan) | Err(SwapError::RolledBack { .. } | SwapError::Refused { .. }) => {
                return Ok(Settled::Clear);
            }
            Err(error) => return Err(error),
        },
    };
    Ok(match journal.kind {
        Kind::Install => Settled::Installed(Box::new(journal), done),
        Kind::Remove => Settled::Removed,
    })
}

/// Finishes a swap that a killed agent or a power loss left in the middle, so that the node does not wait for the
/// next command. What an ended swap still lacks is left to that command.
///
/// # Errors
/// When it could not be finished.
pub(crate) async fn settle_at_start(root: &Arc<HostRoot>, layout: &Layout) -> Result<(), SwapError> {
    let Ok(state) = root.dir(&layout.state_dir()) else {
        return Ok(());
    };
    match Journal::read(&state)? {
        Some(journal) if !matches!(journal.step, Step::Planned | Step::Finished) => {
            let systemd = Systemd::connect(root).await?;
            drive(layout, &systemd, &state).await.map(drop)
        }
        _ => Ok(()),
    }
}
