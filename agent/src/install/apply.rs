//! Stage 5 on the host's side: the program that swaps the file, under systemd and not in the pod.
//!
//! If a bad configuration kept containerd down, no pod could ever come to repair it. So this process, which needs
//! no containerd to live, swaps, restarts, checks, and puts the old bytes back where the new ones do not hold.
//! It may be killed at any point and started again: the journal and the bytes of the configuration tell it what
//! has happened.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::journal::{Found, Journal, Kind, Outcome, Step};
use super::layout::{JOURNAL, STATE_DIR};
use super::lock::Lock;
use super::probe::{Gauge, Wanted, wait_healthy};
use super::rehearsal::complaints;
use super::replacement::replace;
use crate::host::{HostDir, HostRoot, Systemd, SystemdError};

const LOCK: &str = "apply.lock";
const LOCK_WITHIN: Duration = Duration::from_secs(120);
const RESTART: Duration = Duration::from_secs(60);
const WORDS: Duration = Duration::from_secs(5);

/// Why the program ended without an outcome in the journal.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// A path that is not the journal's.
    #[error("{0} is not {STATE_DIR}/{JOURNAL}")]
    NotTheJournal(String),
    /// No journal.
    #[error("there is no open journal in {STATE_DIR}")]
    NoJournal,
    /// The state folder cannot be read or written.
    #[error("{STATE_DIR}: {0}")]
    State(#[from] std::io::Error),
    /// Another one runs.
    #[error("another swap holds the lock in {STATE_DIR}")]
    Locked,
    /// No systemd.
    #[error(transparent)]
    Systemd(#[from] SystemdError),
}

/// What to do, from what the journal and the configuration say.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// It has ended.
    Over,
    /// Replace the file, restart, check.
    Swap,
    /// The file is the new one: restart, check.
    Restart,
    /// Put the old file back, restart, check.
    Back { why: String, words: String },
    /// Somebody else has changed the file before us.
    Replan,
}

fn next(step: &Step, found: Found) -> Next {
    let interrupted = |why: &str| Next::Back {
        why: why.to_owned(),
        words: String::new(),
    };
    match (step, found) {
        (Step::Finished, _) => Next::Over,
        (Step::Planned | Step::Swapping, Found::Old) => Next::Swap,
        (Step::Swapping | Step::Restarting, Found::New) => Next::Restart,
        // Planned, and the new bytes are there already: whoever wrote them did not restart.
        (Step::Planned, Found::New) => Next::Restart,
        (Step::Planned | Step::Swapping, Found::Neither) => Next::Replan,
        (Step::Restarting, Found::Old) => {
            interrupted("the old configuration was put back by somebody else during the restart")
        }
        (Step::Restarting, Found::Neither) => {
            interrupted("the configuration was changed by somebody else during the restart")
        }
        (Step::RollBackOrdered { why }, _) => interrupted(why),
        (Step::RollingBack { why, words }, _) => Next::Back {
            why: why.clone(),
            words: words.clone(),
        },
    }
}

/// Carries out the open journal on the host this process runs on.
///
/// # Errors
/// [`ApplyError`] when it could not even begin; everything later is an outcome in the journal.
pub async fn apply(root: Arc<HostRoot>, journal: &Path) -> Result<(), ApplyError> {
    let expected = Path::new(STATE_DIR).join(JOURNAL);
    if journal != expected {
        return Err(ApplyError::NotTheJournal(journal.display().to_string()));
    }
    let state = root.dir(STATE_DIR)?;
    let deadline = Instant::now() + LOCK_WITHIN;
    let _lock = loop {
        if let Some(lock) = Lock::take(&state, LOCK)? {
            break lock;
        }
        if Instant::now() > deadline {
            return Err(ApplyError::Locked);
        }
        sleep(Duration::from_millis(50)).await;
    };
    let journal = Journal::read(&state)?.ok_or(ApplyError::NoJournal)?;
    let systemd = Systemd::connect(&root).await?;
    let mut swap = Swap {
        root,
        state,
        systemd,
        journal,
    };
    swap.run().await?;
    Ok(())
}

struct Swap {
    root: Arc<HostRoot>,
    state: HostDir,
    systemd: Systemd,
    journal: Journal,
}

impl Swap {
    async fn run(&mut self) -> Result<(), ApplyError> {
        let found = self.journal.find(&self.root)?;
        let outcome = match next(&self.journal.step, found) {
            Next::Over => return Ok(()),
            Next::Replan => Outcome::Replan,
            Next::Swap => {
                self.step(Step::Swapping)?;
                let new = self.journal.bytes(&self.state, Found::New)?;
                match replace(Path::new(&self.journal.config_path), new.as_deref()) {
                    Ok(()) => self.restart_or_go_back().await?,
                    Err(why) => Outcome::Refused { why },
                }
            }
            Next::Restart => self.restart_or_go_back().await?,
            Next::Back { why, words } => self.back(why, words).await?,
        };
        tracing::info!(?outcome, "the swap ended");
        self.journal.outcome = Some(outcome);
        self.step(Step::Finished)
    }

    fn step(&mut self, step: Step) -> Result<(), ApplyError> {
        tracing::info!(?step, "swap");
        self.journal.step = step;
        self.journal.write(&self.state)?;
        Ok(())
    }

    async fn restart_or_go_back(&mut self) -> Result<Outcome, ApplyError> {
        self.step(Step::Restarting)?;
        let wanted = match self.journal.kind {
            Kind::Install => Wanted::With,
            Kind::Remove => Wanted::Without,
        };
        let ordered = Instant::now();
        match self.restart(wanted).await {
            Ok(gap) => Ok(Outcome::Applied {
                gap_micros: micros(gap),
                healthy_micros: micros(ordered.elapsed()),
            }),
            Err(why) => {
                let words = self.words().await;
                self.back(why, words).await
            }
        }
    }

    /// Restarts containerd and waits until it is healthy; gives the time without a socket.
    async fn restart(&self, wanted: Wanted) -> Result<Duration, String> {
        let journal = &self.journal;
        let deadline = Instant::now() + Duration::from_secs(journal.healthy_within_seconds.clamp(1, 600));
        // A unit that failed often is refused a start; ours is one that was ordered, not a crash.
        self.systemd.reset_failed(&journal.unit).await;
        let gauge = Gauge::start(&self.root, &journal.socket);
        let job = self.systemd.restart(&journal.unit, RESTART).await;
        let healthy = match job {
            Ok(job) if job.is_done() => {
                wait_healthy(&self.root, &journal.socket, &journal.promise, wanted, deadline).await
            }
            Ok(job) => Err(format!(
                "systemd's restart of {} ended as {:?}",
                journal.unit, job.0
            )),
            Err(error) => Err(error.to_string()),
        };
        let gap = gauge.finish().await;
        healthy.map(|()| gap)
    }

    async fn back(&mut self, why: String, words: String) -> Result<Outcome, ApplyError> {
        self.step(Step::RollingBack {
            why: why.clone(),
            words: words.clone(),
        })?;
        // A file that somebody else changed meanwhile is theirs: their bytes stay, and containerd decides.
        if self.journal.find(&self.root)? == Found::New {
            let old = self.journal.bytes(&self.state, Found::Old)?;
            if let Err(error) = replace(Path::new(&self.journal.config_path), old.as_deref()) {
                return Ok(Outcome::Broken {
                    why: format!("{why}; and the old configuration cannot be put back: {error}"),
                    words,
                });
            }
        }
        let wanted = match (self.journal.kind, self.journal.find(&self.root)?) {
            (Kind::Install, Found::Old) => Wanted::Without,
            (Kind::Remove, Found::Old) => Wanted::With,
            _ => Wanted::Any,
        };
        match self.restart(wanted).await {
            Ok(_) => Ok(Outcome::RolledBack { why, words }),
            Err(error) => Ok(Outcome::Broken {
                why: format!("{why}; and with the old configuration {error}"),
                words: self.words().await,
            }),
        }
    }

    /// What the unit logged last.
    async fn words(&self) -> String {
        let output = Command::new("journalctl")
            .args(["--unit", &self.journal.unit])
            .args(["--lines", "60", "--output", "cat", "--no-pager", "--quiet"])
            .kill_on_drop(true)
            .output();
        match timeout(WORDS, output).await {
            Ok(Ok(output)) => complaints(&String::from_utf8_lossy(&output.stdout)),
            _ => String::new(),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_that_was_killed_goes_on_from_what_the_file_is() {
        assert_eq!(next(&Step::Planned, Found::Old), Next::Swap);
        assert_eq!(next(&Step::Swapping, Found::Old), Next::Swap);
        assert_eq!(next(&Step::Swapping, Found::New), Next::Restart);
        assert_eq!(next(&Step::Restarting, Found::New), Next::Restart);
        assert_eq!(next(&Step::Finished, Found::New), Next::Over);
    }

    #[test]
    fn a_file_that_somebody_changed_first_is_planned_again() {
        assert_eq!(next(&Step::Planned, Found::Neither), Next::Replan);
        assert_eq!(next(&Step::Swapping, Found::Neither), Next::Replan);
    }

    #[test]
    fn a_way_back_that_was_killed_goes_on_back_whatever_the_file_is() {
        let step = Step::RollingBack {
            why: "w".into(),
            words: "x".into(),
        };
        for found in [Found::Old, Found::New, Found::Neither] {
            assert!(matches!(next(&step, found), Next::Back { .. }));
            let ordered = Step::RollBackOrdered { why: "w".into() };
            assert!(matches!(next(&ordered, found), Next::Back { .. }));
        }
        assert!(matches!(next(&Step::Restarting, Found::Old), Next::Back { .. }));
    }
}
