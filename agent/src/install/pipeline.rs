//! The order of the stages of an installation, and what goes from one to the next.

use std::sync::Arc;

use quartermaster_proto::v1::{FailureReason, Stage};

use super::command::{CommandError, Done, Progress, Stop, at, lock, stage};
use super::detect::{Detected, check_prefix, detect};
use super::journal::{Base, Found, Journal, Kind, digest};
use super::layout::JOURNAL_SPARE;
use super::lock::Lock;
use super::payload::{Payload, PayloadError, Placed, forget_old};
use super::planning::{diff, plan_with, record, summarise};
use super::record::Installed;
use super::rehearsal::{self, RehearsalError, Script, rehearse};
use super::swap::{self, Applied, Settled, SwapError, Swapped};
use super::verify::VerifyError;
use super::{Rehearsed, Target, endangered, sandboxes, verify};
use crate::config::{ConfigEdit, ConfigFacts, Plan, kwasm_binary};
use crate::containerd::{Difference, Expected};
use crate::failure::Failure;
use crate::host::{HostDir, HostRoot};

/// How often a configuration that changes before its swap is planned anew.
const REPLANS: u32 = 3;

/// Installs the handler.
///
/// # Errors
/// A [`Failure`] with the stage in which it happened; the node is as it was then, unless it says otherwise.
pub async fn install(target: &Target, progress: &Progress, stop: Stop) -> Result<Done, Failure> {
    let target = &target.located().await.map_err(at(Stage::Detect))?;
    let root = &target.root;
    let mut held = lock(root, target.layout(), false).map_err(at(Stage::Detect))?;
    // What an earlier command left in the middle comes first: with containerd down, nothing could be detected.
    let mut swapped = None;
    if let Some((state, _)) = &held {
        swapped = settle(target, state).await.map_err(at(Stage::Swap))?;
    }
    let detected = stage(progress, Stage::Detect, async {
        let detected = detect(root, &target.overrides).await.map_err(at(Stage::Detect))?;
        check_prefix(root, &detected.layout).map_err(at(Stage::Detect))?;
        rehearsal::sweep(root, &detected.systemd).await;
        sandboxes::sweep(root, &detected.daemon).await;
        let summary = describe(&detected);
        Ok((detected, summary))
    })
    .await?;
    let installation = Installation {
        target,
        progress,
        stop,
    };
    installation.run(detected, &mut held, &mut swapped).await
}

/// Settles an open journal. Gives an installation's swap that waits for its verification.
async fn settle(target: &Target, state: &HostDir) -> Result<Option<(Journal, Applied)>, SwapError> {
    let root = &target.root;
    if Journal::read(state)?.is_none() {
        return Ok(None);
    }
    let systemd = crate::host::Systemd::connect(root).await?;
    Ok(
        match swap::settle(root, target.layout(), &systemd, state).await? {
            Settled::Installed(journal, done) => Some((*journal, done)),
            Settled::Removed => {
                // The removal was overtaken by this installation: its configuration is without us, as planned on.
                Journal::close(root, state)?;
                None
            }
            Settled::Clear => None,
        },
    )
}

fn describe(detected: &Detected) -> String {
    let mut summary = format!(
        "{}, containerd {}, {}",
        detected.host.name,
        detected.version,
        detected.written_path()
    );
    if detected.written_bytes().is_none() {
        summary.push_str(" (absent)");
    }
    if !detected.unit.restarts_along.is_empty() {
        summary.push_str(&format!(
            "; a restart takes along {}",
            detected.unit.restarts_along.join(", ")
        ));
    }
    summary
}

struct Installation<'a> {
    target: &'a Target,
    progress: &'a Progress,
    stop: Stop,
}

impl Installation<'_> {
    async fn run(
        &self,
        mut detected: Detected,
        held: &mut Option<(HostDir, Lock)>,
        swapped: &mut Option<(Journal, Applied)>,
    ) -> Result<Done, Failure> {
        let (root, target_layout) = (&self.target.root, self.target.layout());
        let mut attempt = 0;
        loop {
            attempt += 1;
            let record = held.as_ref().and_then(|(state, _)| record(state));
            let planned = stage(self.progress, Stage::Plan, async {
                let planned = plan_with(&detected, record.as_ref()).map_err(at(Stage::Plan))?;
                if matches!(planned, Plan::Edit(_)) {
                    restartable(&detected, Stage::Plan).await?;
                }
                let summary = summarise(&planned, &detected);
                Ok((planned, summary))
            })
            .await?;
            if held.is_none() {
                *held = lock(root, target_layout, true).map_err(at(Stage::Payload))?;
            }
            let Some((state, _)) = held.as_ref() else {
                return Err(Failure::at(
                    Stage::Payload,
                    &CommandError::Busy(target_layout.state_dir()),
                ));
            };
            let edit = match planned {
                Plan::NothingToDo => {
                    let done = Done {
                        placed: self.place().await?.copied > 0,
                        ..Done::default()
                    };
                    return self.finish(&detected, state, swapped.take(), done).await;
                }
                Plan::Adopt(adoption) => match self.adopt(&detected, state).await? {
                    Some(done) => return Ok(done),
                    None => adoption.replacement,
                },
                Plan::Edit(edit) => edit,
            };
            // A swap that somebody undid by hand is no longer what stands in the file.
            if swapped.take().is_some() {
                Journal::close(root, state)
                    .map_err(|error| Failure::at(Stage::Swap, &CommandError::from(error)))?;
            }
            let edit = self.prepare(&mut detected, edit).await?;
            let diff = diff(&edit.path, edit.before.as_deref(), Some(&edit.after));
            if self.stop == Stop::BeforeSwap {
                return Ok(Done {
                    prepared_only: true,
                    diff,
                    ..Done::default()
                });
            }
            let applied = stage(self.progress, Stage::Swap, async {
                // Once more: payload and rehearsal take a while, and pods come and go.
                restartable(&detected, Stage::Swap).await?;
                let applied = self.swap(&detected, &edit, state).await;
                let applied = applied.map_err(at(Stage::Swap)).map_err(rolled_back)?;
                let summary = match &applied {
                    Some((_, done)) => format!(
                        "containerd restarted, {} ms without a socket, healthy after {} ms",
                        done.gap.as_millis(),
                        done.healthy.as_millis()
                    ),
                    None => "the configuration changed meanwhile, planning again".to_owned(),
                };
                Ok((applied, summary))
            })
            .await?;
            if let Some((journal, done)) = applied {
                let so_far = Done {
                    restarted: true,
                    socket_gap: Some(done.gap),
                    placed: true,
                    prepared_only: false,
                    diff,
                };
                return self.finish(&detected, state, Some((journal, done)), so_far).await;
            }
            if attempt == REPLANS {
                return Err(Failure::at(Stage::Swap, &SwapError::AlwaysChanging));
            }
            detected = detect(root, &self.target.overrides)
                .await
                .map_err(at(Stage::Detect))?;
        }
    }

    /// Keeps KWasm's handler as it is, if a module runs through it. A node without a sandbox image says nothing
    /// about the handler: that is a failure, and nothing is replaced for it.
    async fn adopt(&self, detected: &Detected, state: &HostDir) -> Result<Option<Done>, Failure> {
        self.place().await?;
        let works = stage(self.progress, Stage::Verify, async {
            let verified =
                verify::verify(&self.target.root, &detected.daemon, quartermaster_proto::HANDLER).await;
            match verified {
                Ok(_) => Ok((
                    true,
                    "a Wasm module ran through KWasm's handler; it stays as it is".to_owned(),
                )),
                Err(error @ VerifyError::SandboxImage(_)) => Err(Failure::at(Stage::Verify, &error)),
                Err(error) => Ok((
                    false,
                    format!("KWasm's handler does not work and is replaced: {error}"),
                )),
            }
        })
        .await?;
        if !works {
            return Ok(None);
        }
        self.record(detected, state, None).await?;
        Ok(Some(Done::default()))
    }

    async fn record(
        &self,
        detected: &Detected,
        state: &HostDir,
        journal: Option<&Journal>,
    ) -> Result<(), Failure> {
        stage(self.progress, Stage::Commit, async {
            commit(&self.target.root, state, detected, journal)
                .map_err(|error| Failure::at(Stage::Commit, &CommandError::from(error)))?;
            let mut summary = "recorded".to_owned();
            if self.forget_old(detected).await > 0 {
                summary.push_str("; an older version that nobody uses any more is gone");
            }
            Ok(((), summary))
        })
        .await
    }

    /// Older versions that cannot be removed now are removed another time.
    async fn forget_old(&self, detected: &Detected) -> usize {
        let Ok(users) = sandboxes::users(&detected.daemon, quartermaster_proto::HANDLER).await else {
            return 0;
        };
        let oldest = users.iter().map(|user| user.created).min();
        forget_old(&self.target.root, &detected.layout, oldest).unwrap_or_else(|error| {
            tracing::warn!(%error, "an older version of the payload could not be removed");
            0
        })
    }

    async fn place(&self) -> Result<Placed, Failure> {
        stage(self.progress, Stage::Payload, async {
            let (root, folder) = (Arc::clone(&self.target.root), self.target.payload.clone());
            let layout = self.target.layout().clone();
            let placed = tokio::task::spawn_blocking(move || Payload::open(&folder)?.place(&root, &layout))
                .await
                .unwrap_or_else(|error| {
                    Err(PayloadError::Write(
                        self.target.layout().install_dir().to_owned(),
                        std::io::Error::other(error),
                    ))
                })
                .map_err(at(Stage::Payload))?;
            let summary = if placed.copied == 0 {
                format!("{} is in place", placed.version)
            } else {
                format!("{} copied, {:.1} MB", placed.version, placed.copied as f64 / 1e6)
            };
            Ok((placed, summary))
        })
        .await
    }

    /// Payload and rehearsal side by side: neither needs the other.
    async fn prepare(&self, detected: &mut Detected, edit: ConfigEdit) -> Result<ConfigEdit, Failure> {
        let (_, rehearsed) = tokio::try_join!(self.place(), self.rehearse(detected, &edit))?;
        let Some(wanted) = rehearsed else {
            return Ok(edit);
        };
        // The files leave the default runtime's cgroup driver to the daemon, and now it has told.
        detected.config.live_systemd_cgroup = Some(wanted);
        let failed = |error: &RehearsalError| Failure::at(Stage::Rehearse, error);
        let mismatch = || failed(&Difference::CgroupDriver { wanted }.into());
        match plan_with(detected, None).map_err(at(Stage::Plan))? {
            Plan::Edit(edit) => match self.rehearse(detected, &edit).await? {
                None => Ok(edit),
                Some(_) => Err(mismatch()),
            },
            Plan::NothingToDo | Plan::Adopt(_) => Err(mismatch()),
        }
    }

    /// Rehearses; gives the cgroup driver that the default runtime has, where ours has another.
    async fn rehearse(&self, detected: &Detected, edit: &ConfigEdit) -> Result<Option<bool>, Failure> {
        stage(self.progress, Stage::Rehearse, async {
            let handler = detected.layout.handler();
            let Some(read) = &edit.read else {
                let name = detected.host.distribution.name();
                return Ok((
                    None,
                    format!("{name} makes what containerd reads, and restarts it by itself"),
                ));
            };
            let script = Script {
                candidate: Some(read),
                expected: Expected::Added(&handler.name),
            };
            let change = Rehearsed {
                daemon: detected.unit.main_pid,
                before: read_by(&detected.config),
                after: digest(Some(read)),
            };
            if self.target.was_rehearsed(&change) {
                return Ok((
                    None,
                    "the same change was rehearsed with this containerd before".to_owned(),
                ));
            }
            match rehearse(&self.target.root, detected, script).await {
                Ok(()) => {
                    self.target.note_rehearsed(change);
                    Ok((
                        None,
                        format!(
                            "containerd serves {} more on the changed configuration, and all else as before",
                            handler.name
                        ),
                    ))
                }
                Err(RehearsalError::Different(Difference::CgroupDriver { wanted })) => Ok((
                    Some(wanted),
                    format!("the default runtime has SystemdCgroup = {wanted}; planning again"),
                )),
                Err(error) => Err(Failure::at(Stage::Rehearse, &error)),
            }
        })
        .await
    }

    async fn swap(
        &self,
        detected: &Detected,
        edit: &ConfigEdit,
        state: &HostDir,
    ) -> Result<Option<(Journal, Applied)>, SwapError> {
        let base = if edit.base == edit.before {
            Base::Old
        } else {
            let base = edit.base.clone().unwrap_or_default();
            Base::Text(String::from_utf8_lossy(&base).into_owned())
        };
        let mut journal = swap::planned(
            &self.target.root,
            Kind::Install,
            detected,
            edit.before.as_deref(),
            Some(&edit.after),
        );
        journal.pieces = edit.pieces.clone();
        journal.base = base;
        journal.open(state, edit.before.as_deref(), Some(&edit.after))?;
        match swap::run(&self.target.root, &detected.layout, &detected.systemd, state).await? {
            Swapped::Applied(done) => Ok(Some((journal, done))),
            Swapped::Replan => Ok(None),
        }
    }

    /// Verifies and commits what stands in the configuration now.
    async fn finish(
        &self,
        detected: &Detected,
        state: &HostDir,
        swapped: Option<(Journal, Applied)>,
        mut done: Done,
    ) -> Result<Done, Failure> {
        let verified = run_module(self.target, detected, self.progress).await;
        if let Err(mut failure) = verified {
            if swapped.is_some() {
                swap::roll_back(
                    &self.target.root,
                    &detected.layout,
                    &detected.systemd,
                    state,
                    &failure.message,
                )
                .await
                .map_err(at(Stage::Verify))?;
                failure.rolled_back = true;
            }
            return Err(failure);
        }
        self.record(detected, state, swapped.as_ref().map(|(journal, _)| journal))
            .await?;
        if let Some((_, applied)) = swapped {
            done.restarted = true;
            done.socket_gap = Some(applied.gap);
        }
        Ok(done)
    }
}

/// Refuses where a restart of containerd would end pods.
pub(crate) async fn restartable(detected: &Detected, stage: Stage) -> Result<(), Failure> {
    endangered::check(&detected.daemon, detected.config.containerd)
        .await
        .map_err(at(stage))
}

/// A digest of all that the daemon reads.
fn read_by(config: &ConfigFacts) -> Option<String> {
    let imports = config.imports.iter().map(|import| import.bytes.as_slice());
    let all: Vec<&[u8]> = config.file.as_deref().into_iter().chain(imports).collect();
    digest(Some(&all.concat()))
}

fn rolled_back(mut failure: Failure) -> Failure {
    failure.rolled_back = failure.reason == FailureReason::RestartFailed;
    failure
}

pub(crate) async fn run_module(
    target: &Target,
    detected: &Detected,
    progress: &Progress,
) -> Result<(), Failure> {
    stage(progress, Stage::Verify, async {
        let handler = detected.layout.handler();
        let verified = verify::verify(&target.root, &detected.daemon, &handler.name)
            .await
            .map_err(at(Stage::Verify))?;
        let summary = match verified.tries {
            1 => "a Wasm module ran through the handler".to_owned(),
            tries => format!("a Wasm module ran through the handler (try {tries})"),
        };
        Ok(((), summary))
    })
    .await
}

/// Writes the record and closes the journal. Without a journal the record that is there is marked as verified, or,
/// where there is none, one is made that finds our tables by their content.
fn commit(
    root: &HostRoot,
    state: &HostDir,
    detected: &Detected,
    journal: Option<&Journal>,
) -> std::io::Result<()> {
    if let Some(journal) = journal {
        let base = match &journal.base {
            Base::Old => journal.bytes(state, Found::Old)?,
            Base::Text(text) => Some(text.clone().into_bytes()),
        };
        let old = journal.bytes(state, Found::Old)?;
        let edited = journal.bytes(state, Found::New)?;
        let installed = Installed {
            format: 1,
            prefix: detected.layout.prefix().to_owned(),
            config_path: journal.config_path.clone(),
            had_file: base.is_some(),
            edited_sha256: journal.new_sha256.clone(),
            pieces: journal.pieces.clone(),
            verified: true,
            kwasm: kwasm(state, old.as_deref()),
        };
        match installed.write(state, base.as_deref(), edited.as_deref()) {
            // The swap holds and is proven: what was set aside for the journal's words is enough for the record.
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                state.remove(JOURNAL_SPARE)?;
                installed.write(state, base.as_deref(), edited.as_deref())?;
            }
            written => written?,
        }
        return Journal::close(root, state);
    }
    let mut installed = Installed::read(state)?.unwrap_or_else(|| Installed {
        format: 1,
        prefix: detected.layout.prefix().to_owned(),
        config_path: detected.written_path().to_owned(),
        had_file: true,
        edited_sha256: digest(detected.written_bytes()),
        pieces: Vec::new(),
        verified: false,
        kwasm: None,
    });
    installed.verified = true;
    installed.kwasm = kwasm(state, detected.config.file.as_deref());
    installed.write_alone(state)
}

/// The runtime of KWasm's handler, if it stands in the configuration or did when we came.
fn kwasm(state: &HostDir, config: Option<&[u8]>) -> Option<String> {
    config
        .and_then(|bytes| kwasm_binary(bytes, quartermaster_proto::HANDLER))
        .or_else(|| Installed::read(state).ok()??.kwasm)
}

/// Runs a module through the handler that is installed, and changes nothing.
///
/// # Errors
/// A [`Failure`] when it does not run, or when the handler is not there.
pub async fn verify_only(target: &Target, progress: &Progress) -> Result<Done, Failure> {
    let target = &target.located().await.map_err(at(Stage::Detect))?;
    let _held = lock(&target.root, target.layout(), false).map_err(at(Stage::Detect))?;
    let detected: Detected = stage(progress, Stage::Detect, async {
        let detected = detect(&target.root, &target.overrides)
            .await
            .map_err(at(Stage::Detect))?;
        sandboxes::sweep(&target.root, &detected.daemon).await;
        let summary = describe(&detected);
        Ok((detected, summary))
    })
    .await?;
    run_module(target, &detected, progress).await?;
    Ok(Done::default())
}
