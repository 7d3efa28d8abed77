//! Stage 5 on the host's side: the program that swaps the file, under systemd and not in the pod.
//!
//! If a bad configuration kept containerd down, no pod could ever come to repair it. So this process, which needs
//! no containerd to live, swaps, restarts, checks, and puts the old bytes back where the new ones do not hold.
//! It may be killed at any point and started again: the journal and the bytes of the configuration tell it what
//! has happened.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use thiserror::Error;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::boot_unit::{BOOT_UNIT, BootUnit};
use super::journal::{Found, Journal, Kind, Outcome, Promise, Step, digest};
use super::layout::Layout;
use super::lock::Lock;
use super::probe::{Gauge, Wanted, wait_healthy};
use super::rehearsal::complaints;
use super::replacement::{Replacement, ReplacementError};
use crate::checkpoint::checkpoint;
use crate::describe::boot_id;
use crate::host::{HostDir, HostRoot, Systemd, SystemdError};

const LOCK: &str = "apply.lock";
const LOCK_WITHIN: Duration = Duration::from_secs(120);
const RESTART: Duration = Duration::from_secs(60);
const WORDS: Duration = Duration::from_secs(5);
/// For containerd to come up by itself after a boot.
const BOOT: Duration = Duration::from_secs(30);
/// For a full disk to get room for the outcome.
const LAST_WORDS: Duration = Duration::from_secs(60);

/// Why the program ended without an outcome in the journal.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// A path that is not the journal's.
    #[error("{0} is not where a journal lies")]
    NotTheJournal(String),
    /// No journal.
    #[error("there is no open journal in {0}")]
    NoJournal(String),
    /// The state folder cannot be read or written.
    #[error("the state folder: {0}")]
    State(#[from] std::io::Error),
    /// Another one runs.
    #[error("another swap holds the lock in {0}")]
    Locked(String),
    /// No systemd.
    #[error(transparent)]
    Systemd(#[from] SystemdError),
}

/// What to do, from what the journal and the configuration say.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// It has ended.
    Over,
    /// Nothing was touched, and whoever wanted it is gone with the boot it was planned in.
    Abandon,
    /// Replace the file, restart, check.
    Swap,
    /// The file is the new one: restart unless that was done, check.
    Restart,
    /// Put the old file back, restart, check.
    Back { why: String, words: String },
    /// Somebody else has changed the file before us.
    Replan,
}

fn next(step: &Step, found: Found, same_boot: bool) -> Next {
    let interrupted = |why: &str| Next::Back {
        why: why.to_owned(),
        words: String::new(),
    };
    match (step, found) {
        (Step::Finished, _) => Next::Over,
        (Step::Planned | Step::Swapping, Found::Old) if !same_boot => Next::Abandon,
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

/// Whether a daemon that is healthy as wanted must have read the new file: not if it was so on the old one.
fn health_is_proof(wanted: Wanted, ours_before: bool) -> bool {
    match wanted {
        Wanted::With => !ours_before,
        Wanted::Without => ours_before,
        Wanted::Any => false,
    }
}

/// Carries out the open journal on the host this process runs on.
///
/// # Errors
/// [`ApplyError`] when it could not even begin; everything later is an outcome in the journal.
pub async fn apply(root: Arc<HostRoot>, journal: &Path) -> Result<(), ApplyError> {
    let layout = Layout::of_journal(journal)
        .ok_or_else(|| ApplyError::NotTheJournal(journal.display().to_string()))?;
    let state = root.dir(&layout.state_dir())?;
    let deadline = Instant::now() + LOCK_WITHIN;
    let _lock = loop {
        if let Some(lock) = Lock::take(&state, LOCK)? {
            break lock;
        }
        if Instant::now() > deadline {
            return Err(ApplyError::Locked(layout.state_dir()));
        }
        sleep(Duration::from_millis(50)).await;
    };
    let boot_unit = BootUnit::below(root.path());
    let systemd = Systemd::connect(&root).await?;
    let Some(journal) = Journal::read(&state)? else {
        disarm(&boot_unit, &systemd).await;
        return Err(ApplyError::NoJournal(layout.state_dir()));
    };
    let same_boot = journal.boot_id == boot_id(&root);
    let mut swap = Swap {
        root,
        layout,
        state,
        systemd,
        journal,
        boot_unit,
        same_boot,
        ordered: SystemTime::now(),
    };
    swap.run().await
}

/// Takes the boot-time unit away. The systemd of a boot that has read it is told.
async fn disarm(boot_unit: &BootUnit, systemd: &Systemd) {
    if let Err(error) = boot_unit.remove() {
        tracing::warn!(%error, "{BOOT_UNIT} could not be removed");
    }
    if systemd.is_loaded(BOOT_UNIT).await.unwrap_or(false)
        && let Err(error) = systemd.reload().await
    {
        tracing::warn!(%error, "systemd did not forget {BOOT_UNIT}");
    }
}

struct Swap {
    root: Arc<HostRoot>,
    layout: Layout,
    state: HostDir,
    systemd: Systemd,
    journal: Journal,
    boot_unit: BootUnit,
    /// Whether it was planned in this boot.
    same_boot: bool,
    /// When containerd's restart was ordered: what it logged before says nothing.
    ordered: SystemTime,
}

impl Swap {
    async fn run(&mut self) -> Result<(), ApplyError> {
        let found = self.journal.find(&self.root)?;
        let outcome = match next(&self.journal.step, found, self.same_boot) {
            Next::Over => {
                disarm(&self.boot_unit, &self.systemd).await;
                return Ok(());
            }
            Next::Abandon => refused("the node was booted anew before the configuration was replaced"),
            Next::Replan => Outcome::Replan,
            Next::Swap => self.swap().await?,
            Next::Restart => self.restart_or_go_back(true).await?,
            Next::Back { why, words } => self.back(why, words).await?,
        };
        tracing::info!(?outcome, "the swap ended");
        self.finish(outcome).await
    }

    fn step(&mut self, step: Step) -> std::io::Result<()> {
        tracing::info!(?step, "swap");
        self.journal.step = step;
        self.journal.write(&self.state)
    }

    /// Notes a step that the bytes of the configuration tell as well: on a full disk it is taken all the same.
    fn note(&mut self, step: Step) {
        if let Err(error) = self.step(step) {
            tracing::warn!(%error, "the step cannot be written down");
        }
    }

    async fn swap(&mut self) -> Result<Outcome, ApplyError> {
        let new = match self.journal.bytes(&self.state, Found::New) {
            Ok(new) => new,
            Err(error) => return Ok(refused(&error.to_string())),
        };
        let replacement = match self.replacement() {
            Ok(replacement) => replacement,
            Err(error) => return Ok(cannot(&error)),
        };
        // From here on a power loss leaves something to finish.
        if let Err(error) = self.boot_unit.put(&self.layout) {
            return Ok(Outcome::Refused {
                why: format!("the boot-time unit {BOOT_UNIT} cannot be written: {error}"),
                no_space: error.kind() == std::io::ErrorKind::StorageFull,
            });
        }
        self.journal.kept = Some(replacement.kept().display().to_string());
        if let Err(error) = self.step(Step::Swapping) {
            return Ok(Outcome::Refused {
                why: format!("the journal cannot be written: {error}"),
                no_space: error.kind() == std::io::ErrorKind::StorageFull,
            });
        }
        let old = self.journal.old_sha256.clone();
        match replacement.put(new.as_deref(), |bytes| digest(bytes) == old) {
            Ok(()) => self.restart_or_go_back(false).await,
            Err(ReplacementError::Changed(_)) => Ok(Outcome::Replan),
            // It was renamed, and then the folder could not be synced.
            Err(error) if self.journal.find(&self.root)? == Found::New => {
                self.back(error.to_string(), String::new()).await
            }
            Err(error) => Ok(cannot(&error)),
        }
    }

    fn replacement(&self) -> Result<Replacement, ReplacementError> {
        Replacement::of(Path::new(&self.journal.config_path))
    }

    async fn restart_or_go_back(&mut self, resumed: bool) -> Result<Outcome, ApplyError> {
        let wanted = match self.journal.kind {
            Kind::Install => Wanted::With,
            Kind::Remove => Wanted::Without,
        };
        if self.journal.step != Step::Restarting {
            self.note(Step::Restarting);
        }
        let ordered = Instant::now();
        let done = if resumed && self.is_over(wanted).await {
            Ok(Duration::ZERO)
        } else {
            self.restart(wanted).await
        };
        match done {
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

    /// Whether containerd runs on the new file already: a swap that was killed is not to cost a second restart, and
    /// after a power loss the boot has done it.
    async fn is_over(&self, wanted: Wanted) -> bool {
        if self.same_boot && !health_is_proof(wanted, self.journal.ours_before) {
            return false;
        }
        let patience = if self.same_boot { Duration::ZERO } else { BOOT };
        wait_healthy(
            &self.root,
            &self.journal.socket,
            &self.promise(),
            wanted,
            Instant::now() + patience,
        )
        .await
        .is_ok()
    }

    /// After a boot the network may be made by pods, which come after containerd: it is not waited for.
    fn promise(&self) -> Promise {
        let mut promise = self.journal.promise.clone();
        promise.network_ready &= self.same_boot;
        promise
    }

    /// Restarts containerd and waits until it is healthy; gives the time without a socket.
    async fn restart(&mut self, wanted: Wanted) -> Result<Duration, String> {
        self.ordered = SystemTime::now();
        let journal = &self.journal;
        let deadline = Instant::now() + Duration::from_secs(journal.healthy_within_seconds.clamp(1, 600));
        // A unit that failed often is refused a start; ours is one that was ordered, not a crash.
        if !journal.unit.is_empty() {
            self.systemd.reset_failed(&journal.unit).await;
        }
        let gauge = Gauge::start(&self.root, &journal.socket);
        if journal.unit.is_empty() {
            // k0s watches the file and restarts containerd by itself.
            let healthy = wait_healthy(&self.root, &journal.socket, &self.promise(), wanted, deadline).await;
            let gap = gauge.finish().await;
            return healthy.map(|()| gap);
        }
        let job = self.systemd.restart(&journal.unit, RESTART).await;
        let healthy = match job {
            Ok(job) if job.is_done() => {
                checkpoint("wait until containerd is healthy");
                wait_healthy(&self.root, &journal.socket, &self.promise(), wanted, deadline).await
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
        self.note(Step::RollingBack {
            why: why.clone(),
            words: words.clone(),
        });
        // A file that somebody else changed meanwhile is theirs: their bytes stay, and containerd decides.
        if self.journal.find(&self.root)? == Found::New
            && let Err(error) = self.put_old_back()
        {
            return Ok(Outcome::Broken {
                why: format!("{why}; and the old configuration cannot be put back: {error}"),
                words,
            });
        }
        let wanted = match (self.journal.kind, self.journal.find(&self.root)?) {
            (Kind::Install, Found::Old) if !self.journal.ours_before => Wanted::Without,
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

    fn put_old_back(&self) -> Result<(), String> {
        let old = self.journal.bytes(&self.state, Found::Old);
        let old = old.map_err(|error| error.to_string())?;
        let sum = &self.journal.old_sha256;
        self.replacement()
            .and_then(|replacement| replacement.back(old.as_deref(), |bytes| digest(bytes) == *sum))
            .map_err(|error| error.to_string())
    }

    /// Writes the outcome down, then takes away what was there for the way back.
    async fn finish(&mut self, outcome: Outcome) -> Result<(), ApplyError> {
        // What an applied swap keeps is for a verification that fails; what a broken one keeps, for a person.
        let keeps = matches!(outcome, Outcome::Applied { .. } | Outcome::Broken { .. });
        self.journal.outcome = Some(outcome);
        let deadline = Instant::now() + LAST_WORDS;
        while let Err(error) = self.step(Step::Finished) {
            if Instant::now() > deadline {
                return Err(error.into());
            }
            tracing::warn!(%error, "the outcome cannot be written down; trying again");
            sleep(Duration::from_millis(500)).await;
        }
        if !keeps && let Ok(replacement) = self.replacement() {
            replacement.clear();
        }
        disarm(&self.boot_unit, &self.systemd).await;
        Ok(())
    }

    /// What the unit logged since its restart was ordered.
    async fn words(&self) -> String {
        let since = self
            .ordered
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let output = Command::new("journalctl")
            .args(["--unit", &self.journal.unit])
            .arg(format!("--since=@{since}"))
            .args(["--lines", "200", "--output", "cat", "--no-pager", "--quiet"])
            .kill_on_drop(true)
            .output();
        match timeout(WORDS, output).await {
            Ok(Ok(output)) => complaints(&String::from_utf8_lossy(&output.stdout)),
            _ => String::new(),
        }
    }
}

fn refused(why: &str) -> Outcome {
    Outcome::Refused {
        why: why.to_owned(),
        no_space: false,
    }
}

fn cannot(error: &ReplacementError) -> Outcome {
    Outcome::Refused {
        why: error.to_string(),
        no_space: error.is_no_space(),
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
        assert_eq!(next(&Step::Planned, Found::Old, true), Next::Swap);
        assert_eq!(next(&Step::Swapping, Found::Old, true), Next::Swap);
        assert_eq!(next(&Step::Swapping, Found::New, true), Next::Restart);
        assert_eq!(next(&Step::Restarting, Found::New, true), Next::Restart);
        assert_eq!(next(&Step::Finished, Found::New, true), Next::Over);
    }

    #[test]
    fn after_a_boot_what_was_begun_is_ended_and_what_was_not_is_left() {
        for step in [Step::Planned, Step::Swapping] {
            assert_eq!(next(&step, Found::Old, false), Next::Abandon);
        }
        for step in [Step::Swapping, Step::Restarting] {
            assert_eq!(next(&step, Found::New, false), Next::Restart);
        }
        let ordered = Step::RollBackOrdered { why: "w".into() };
        assert!(matches!(next(&ordered, Found::New, false), Next::Back { .. }));
    }

    #[test]
    fn a_healthy_daemon_proves_a_restart_only_if_the_old_file_made_another() {
        assert!(health_is_proof(Wanted::With, false));
        assert!(!health_is_proof(Wanted::With, true));
        assert!(health_is_proof(Wanted::Without, true));
        assert!(!health_is_proof(Wanted::Without, false));
    }

    #[test]
    fn a_file_that_somebody_changed_first_is_planned_again() {
        assert_eq!(next(&Step::Planned, Found::Neither, true), Next::Replan);
        assert_eq!(next(&Step::Swapping, Found::Neither, true), Next::Replan);
    }

    #[test]
    fn a_way_back_that_was_killed_goes_on_back_whatever_the_file_is() {
        let step = Step::RollingBack {
            why: "w".into(),
            words: "x".into(),
        };
        for found in [Found::Old, Found::New, Found::Neither] {
            assert!(matches!(next(&step, found, true), Next::Back { .. }));
            let ordered = Step::RollBackOrdered { why: "w".into() };
            assert!(matches!(next(&ordered, found, true), Next::Back { .. }));
        }
        assert!(matches!(
            next(&Step::Restarting, Found::Old, true),
            Next::Back { .. }
        ));
    }
}
