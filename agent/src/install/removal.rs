//! Removal: the stages of an installation the other way round, until nothing of us is on the node.

use quartermaster_proto::v1::{FailureReason, Stage};
use thiserror::Error;

use super::Target;
use super::boot_unit::BootUnit;
use super::command::{CommandError, Done, Progress, Stop, at, lock, stage};
use super::detect::{Detected, detect};
use super::journal::{Journal, Kind};
use super::kwasm;
use super::layout::{Layout, RUN_DIR};
use super::lock::Lock;
use super::pipeline::restartable;
use super::planning::{diff, record};
use super::record::Installed;
use super::rehearsal::{self, Script, rehearse};
use super::sandboxes::{self, User};
use super::swap::{self, Applied, Settled, SwapError, Swapped};
use crate::config::{Handler, Undo, UndoError, Written, undo, undo_written};
use crate::containerd::Expected;
use crate::failure::{Failure, Reported};
use crate::host::{HostDir, HostRoot, Systemd};

const REPLANS: u32 = 3;

/// Why a node keeps the handler.
#[derive(Debug, Error)]
enum RemovalError {
    #[error("{0} pod(s) use the handler {1:?}: {2}")]
    InUse(usize, String, String),
    #[error("containerd cannot be asked for its sandboxes: {0}")]
    NoAnswer(String),
    #[error("{path} {why}")]
    Undo { path: String, why: UndoError },
    #[error("{0} cannot be removed: {1}")]
    Remains(String, std::io::Error),
    #[error("KWasm's files in /opt/kwasm cannot be removed: {0}")]
    KwasmRemains(std::io::Error),
}

impl Reported for RemovalError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::InUse(..) => FailureReason::HandlerInUse,
            Self::NoAnswer(_) => FailureReason::ContainerdUnreachable,
            Self::Undo { .. } => FailureReason::UnsupportedConfiguration,
            Self::Remains(..) | Self::KwasmRemains(_) => FailureReason::PayloadFailed,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::InUse(..) => "Delete or move these pods, or force the removal, which ends them.".into(),
            Self::NoAnswer(_) => "`systemctl status containerd` on the node says more.".into(),
            Self::Undo { .. } => {
                "Take the handler's tables out of the file by hand, restart containerd, then try again."
                    .into()
            }
            Self::Remains(..) | Self::KwasmRemains(_) => "Remove the folder by hand.".into(),
        }
    }
}

/// Takes out what an installation put in.
///
/// # Errors
/// A [`Failure`]; the node still has the handler then, unless only files of ours could not be removed.
pub async fn uninstall(
    target: &Target,
    progress: &Progress,
    stop: Stop,
    force: bool,
) -> Result<Done, Failure> {
    let target = &target.located().await.map_err(at(Stage::Detect))?;
    let root = &target.root;
    let layout = target.layout();
    let held = lock(root, layout, false).map_err(at(Stage::Detect))?;
    let mut done = Done::default();
    if let Some((state, _)) = &held {
        settle(target, state).await.map_err(at(Stage::Swap))?;
    }
    let mut detected = look(target, progress).await?;
    let users = users(&detected).await.map_err(at(Stage::Detect))?;
    if !users.is_empty() && !force {
        return Err(in_use(&users));
    }
    let handler = layout.handler();
    let record = held.as_ref().and_then(|(state, _)| record(state));
    let kwasm = held
        .as_ref()
        .and_then(|(state, _)| Installed::read(state).ok()??.kwasm);
    for attempt in 1.. {
        let path = detected.written_path().to_owned();
        let before = detected.written_bytes().map(<[u8]>::to_vec);
        let undone = stage(progress, Stage::Plan, async {
            let current = before.as_deref().unwrap_or_default();
            let failed = |why| {
                let path = path.clone();
                Failure::at(Stage::Plan, &RemovalError::Undo { path, why })
            };
            let mut undone =
                undo_written(current, &detected.written, record.as_ref(), &handler).map_err(failed)?;
            if let (Undo::NothingToDo, Some(binary)) = (&undone, &kwasm) {
                undone = kwasm::undo_theirs(current, binary).map_err(failed)?;
            }
            let summary = match &undone {
                Undo::NothingToDo => format!("{path} has no entry of ours"),
                Undo::Delete => format!("{path} goes, it was made by us"),
                Undo::Rewrite(bytes) => format!(
                    "{} bytes to take out of {path}",
                    current.len().saturating_sub(bytes.len())
                ),
            };
            Ok((undone, summary))
        })
        .await?;
        let after = match undone {
            Undo::NothingToDo => break,
            Undo::Delete => None,
            Undo::Rewrite(bytes) => Some(bytes),
        };
        restartable(&detected, Stage::Plan).await?;
        stage(progress, Stage::Rehearse, async {
            let Some(read) = read_without(&detected, after.as_deref(), &handler) else {
                let name = detected.host.distribution.name();
                return Ok((
                    (),
                    format!("{name} makes what containerd reads, and restarts it by itself"),
                ));
            };
            let script = Script {
                candidate: read.as_deref(),
                expected: Expected::Removed(&handler.name),
            };
            rehearse(root, &detected, script)
                .await
                .map_err(at(Stage::Rehearse))?;
            Ok((
                (),
                format!("containerd serves all but {} without it", handler.name),
            ))
        })
        .await?;
        done.diff = diff(&path, before.as_deref(), after.as_deref());
        if stop == Stop::BeforeSwap {
            done.prepared_only = true;
            return Ok(done);
        }
        let applied = stage(progress, Stage::Swap, async {
            restartable(&detected, Stage::Swap).await?;
            let applied = swap_back(
                target,
                &detected,
                held.as_ref(),
                before.as_deref(),
                after.as_deref(),
            );
            let applied = applied.await?;
            let summary = match applied {
                Some(applied) => format!(
                    "containerd restarted, {} ms without a socket",
                    applied.gap.as_millis()
                ),
                None => "the configuration changed meanwhile, planning again".to_owned(),
            };
            Ok((applied, summary))
        })
        .await?;
        if let Some(applied) = applied {
            done.restarted = true;
            done.socket_gap = Some(applied.gap);
            break;
        }
        if attempt == REPLANS {
            return Err(Failure::at(Stage::Swap, &SwapError::AlwaysChanging));
        }
        detected = detect(root, &target.overrides).await.map_err(at(Stage::Detect))?;
    }
    if stop == Stop::BeforeSwap {
        return Ok(done);
    }
    stage(progress, Stage::Commit, async {
        // Their containers were made with a binary that is about to go: they end while it is still there.
        for user in &users {
            sandboxes::remove_sandbox(&detected.daemon, &user.sandbox).await;
        }
        if kwasm.is_some() {
            kwasm::remove_files(root)
                .map_err(|error| Failure::at(Stage::Commit, &RemovalError::KwasmRemains(error)))?;
        }
        clear(root, layout, held).map_err(at(Stage::Commit))?;
        Ok(((), format!("{} is gone", layout.install_dir())))
    })
    .await?;
    Ok(done)
}

/// The file as containerd reads it without us; nothing where that is not known before its maker has made it.
fn read_without(detected: &Detected, after: Option<&[u8]>, handler: &Handler) -> Option<Option<Vec<u8>>> {
    match &detected.written {
        Written::InPlace => Some(after.map(<[u8]>::to_vec)),
        Written::DropIn { .. } => None,
        Written::Template { .. } => {
            let current = detected.config.file.as_deref().unwrap_or_default();
            match undo(current, None, handler) {
                Ok(Undo::Rewrite(rest)) => Some(Some(rest)),
                _ => None,
            }
        }
    }
}

async fn look(target: &Target, progress: &Progress) -> Result<Detected, Failure> {
    stage(progress, Stage::Detect, async {
        let root = &target.root;
        let detected = detect(root, &target.overrides).await.map_err(at(Stage::Detect))?;
        rehearsal::sweep(root, &detected.systemd).await;
        sandboxes::sweep(root, &detected.daemon).await;
        let summary = format!("{}, containerd {}", detected.host.name, detected.version);
        Ok((detected, summary))
    })
    .await
}

async fn settle(target: &Target, state: &HostDir) -> Result<(), SwapError> {
    let (root, layout) = (&target.root, target.layout());
    if Journal::read(state)?.is_none() {
        return Ok(());
    }
    let systemd = Systemd::connect(root).await?;
    match swap::settle(root, layout, &systemd, state).await? {
        Settled::Clear => Ok(()),
        // Never verified, so never committed: the way back is the journal's own.
        Settled::Installed(..) => swap::roll_back(root, layout, &systemd, state, "removal was ordered").await,
        Settled::Removed => Ok(Journal::close(root, state)?),
    }
}

async fn users(detected: &Detected) -> Result<Vec<User>, RemovalError> {
    sandboxes::users(&detected.daemon, quartermaster_proto::HANDLER)
        .await
        .map_err(|status| RemovalError::NoAnswer(status.message().to_owned()))
}

fn in_use(users: &[User]) -> Failure {
    const SHOWN: usize = 5;
    let mut names: Vec<&str> = users.iter().map(|user| user.pod.as_str()).collect();
    names.truncate(SHOWN);
    let mut text = names.join(", ");
    if users.len() > SHOWN {
        text.push_str(&format!(" and {} more", users.len() - SHOWN));
    }
    let error = RemovalError::InUse(users.len(), quartermaster_proto::HANDLER.to_owned(), text);
    Failure {
        users: users.iter().map(|user| user.pod.clone()).collect(),
        ..Failure::at(Stage::Detect, &error)
    }
}

async fn swap_back(
    target: &Target,
    detected: &Detected,
    held: Option<&(HostDir, Lock)>,
    before: Option<&[u8]>,
    after: Option<&[u8]>,
) -> Result<Option<Applied>, Failure> {
    // Our tables without our folder: somebody removed it. The host unit runs from there, so it comes back first.
    let layout = target.layout();
    let made;
    let state = match held {
        Some((state, _)) => state,
        None => {
            made = lock(&target.root, layout, true).map_err(at(Stage::Swap))?;
            match &made {
                Some((state, _)) => state,
                None => return Err(Failure::at(Stage::Swap, &CommandError::Busy(layout.state_dir()))),
            }
        }
    };
    if !target.root.exists(&layout.agent_binary()) {
        let payload = super::payload::Payload::open(&target.payload).map_err(at(Stage::Payload))?;
        payload.place(&target.root, layout).map_err(at(Stage::Payload))?;
    }
    let run = async {
        swap::planned(&target.root, Kind::Remove, detected, before, after).open(state, before, after)?;
        match swap::run(&target.root, layout, &detected.systemd, state).await? {
            Swapped::Applied(done) => {
                Journal::close(&target.root, state)?;
                Ok(Some(done))
            }
            Swapped::Replan => Ok(None),
        }
    };
    run.await.map_err(|error: SwapError| {
        let mut failure = Failure::at(Stage::Swap, &error);
        failure.rolled_back = matches!(error, SwapError::RolledBack { .. });
        failure
    })
}

/// Removes the install folder, then what is left of the scratch folder.
fn clear(root: &HostRoot, layout: &Layout, held: Option<(HostDir, Lock)>) -> Result<(), RemovalError> {
    let install = layout.install_dir();
    let remains = |error| RemovalError::Remains(install.to_owned(), error);
    // Without our folder it would fail at every boot.
    BootUnit::below(root.path()).remove().map_err(remains)?;
    let (parent, name) = install.rsplit_once('/').unwrap_or(("", install));
    if let Ok(parent) = root.dir(parent) {
        parent.remove_tree(name).map_err(remains)?;
        parent.sync().map_err(remains)?;
    }
    drop(held);
    let (parent, name) = RUN_DIR.rsplit_once('/').unwrap_or(("", RUN_DIR));
    if let Ok(parent) = root.dir(parent) {
        let _ = parent.remove_tree(name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_in_use_names_some_pods_and_counts_all() {
        let users: Vec<User> = (0..7)
            .map(|n| User {
                pod: format!("default/pod-{n}"),
                sandbox: String::new(),
                created: std::time::SystemTime::UNIX_EPOCH,
            })
            .collect();
        let failure = in_use(&users);
        assert_eq!(failure.reason, FailureReason::HandlerInUse);
        assert_eq!(failure.users.len(), 7);
        assert!(failure.message.contains("7 pod(s)"), "{}", failure.message);
        assert!(failure.message.ends_with("and 2 more"), "{}", failure.message);
    }
}
