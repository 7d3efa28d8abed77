//! The journal of a swap: everything that is needed to finish it or to take it back, by whoever comes next.
//!
//! Each step is written down before it is done. Whoever finds a journal can tell from it and from the bytes of the
//! configuration what has happened.

use std::io;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::layout::{JOURNAL, JOURNAL_NEW, JOURNAL_OLD, JOURNAL_SPARE, MAX_CONFIG};
use super::sums::hex;
use crate::config::Piece;
use crate::host::{HostDir, HostRoot};

/// Bytes set aside beside a journal, for its last words on a disk that has become full. More than a journal has.
const SPARE: usize = 64 * 1024;

/// What a swap is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Install,
    Remove,
}

/// What containerd must serve after the swap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Promise {
    pub(crate) default_runtime: String,
    /// Handlers that were served before, ours left out.
    pub(crate) handlers: Vec<String>,
    /// Our handler.
    pub(crate) ours: String,
    /// Whether NetworkReady was true before.
    pub(crate) network_ready: bool,
}

/// The configuration without anything of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Base {
    /// It is the one before the swap.
    Old,
    /// An outdated entry of ours stood in the one before; without it, it reads like this.
    Text(String),
}

/// How far a swap is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    /// Nothing was touched.
    Planned,
    /// The file is about to be replaced, or has been.
    Swapping,
    /// The file is the new one; containerd is about to be restarted, or has been.
    Restarting,
    /// Somebody wants the old file back, for this reason.
    RollBackOrdered { why: String },
    /// The old file is about to be put back, or has been.
    RollingBack { why: String, words: String },
    /// Over; see the outcome.
    Finished,
}

/// How a swap ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The new configuration is served.
    Applied {
        /// How long the socket did not answer, in microseconds.
        gap_micros: u64,
        /// From the order to restart to a healthy daemon, in microseconds.
        healthy_micros: u64,
    },
    /// The old configuration is served again.
    RolledBack { why: String, words: String },
    /// Nothing was changed: the file cannot be replaced.
    Refused {
        why: String,
        /// Because the disk is full.
        #[serde(default)]
        no_space: bool,
    },
    /// Nothing was changed: the file is not the one that was planned on.
    Replan,
    /// containerd is not healthy on the old configuration either.
    Broken { why: String, words: String },
}

/// A journal, without the bytes of the two configurations, which lie beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journal {
    /// 1. A program that finds another number leaves the journal alone.
    pub(crate) format: u32,
    pub(crate) kind: Kind,
    /// Path of the configuration.
    pub(crate) config_path: String,
    /// SHA-256 of the configuration before, `None` where there is no file.
    pub(crate) old_sha256: Option<String>,
    /// SHA-256 of the configuration after, `None` where there is no file.
    pub(crate) new_sha256: Option<String>,
    /// What was inserted, for the record of an installation.
    pub(crate) pieces: Vec<Piece>,
    /// The configuration without us, which a removal brings back.
    pub(crate) base: Base,
    pub(crate) unit: String,
    pub(crate) socket: String,
    pub(crate) promise: Promise,
    /// Whether our handler was served before: then its being served proves nothing of the swap.
    pub(crate) ours_before: bool,
    /// The boot in which it was planned.
    pub(crate) boot_id: String,
    /// Path of the old file's second name, on the host and without links.
    #[serde(default)]
    pub(crate) kept: Option<String>,
    /// For a restart and all that follows until containerd is healthy, in seconds.
    pub(crate) healthy_within_seconds: u64,
    pub(crate) step: Step,
    pub(crate) outcome: Option<Outcome>,
}

/// What the bytes of the configuration say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Old,
    New,
    Neither,
}

impl Journal {
    /// Reads the open journal, if there is one.
    pub(crate) fn read(state: &HostDir) -> io::Result<Option<Self>> {
        let Some(bytes) = state.read(JOURNAL)? else {
            return Ok(None);
        };
        let journal: Self = serde_json::from_slice(&bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        if journal.format != 1 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a journal of format {} by another version", journal.format),
            ));
        }
        Ok(Some(journal))
    }

    /// Opens a journal: the two configurations first, the journal that refers to them last.
    pub(crate) fn open(&self, state: &HostDir, old: Option<&[u8]>, new: Option<&[u8]>) -> io::Result<()> {
        state.write_durably(JOURNAL_SPARE, &[0; SPARE])?;
        for (name, bytes) in [(JOURNAL_OLD, old), (JOURNAL_NEW, new)] {
            match bytes {
                Some(bytes) => state.write_durably(name, bytes)?,
                None => state.remove(name)?,
            }
        }
        self.write(state)
    }

    /// Writes the journal down. On a full disk the space that was set aside at the start is used.
    pub(crate) fn write(&self, state: &HostDir) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        match state.write_durably(JOURNAL, &bytes) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                state.remove(JOURNAL_SPARE)?;
                state.write_durably(JOURNAL, &bytes)
            }
            written => written,
        }
    }

    /// Forgets the journal: the old file's second name, the journal, then what it refers to.
    pub(crate) fn close(root: &HostRoot, state: &HostDir) -> io::Result<()> {
        // One that can't be read has nothing to tell either.
        if let Ok(Some(journal)) = Self::read(state)
            && let Some((folder, name)) = journal.kept.as_deref().and_then(|kept| kept.rsplit_once('/'))
            && let Ok(folder) = root.dir(folder)
        {
            folder.remove(name)?;
        }
        state.remove(JOURNAL)?;
        state.sync()?;
        for name in [JOURNAL_OLD, JOURNAL_NEW, JOURNAL_SPARE] {
            state.remove(name)?;
        }
        Ok(())
    }

    /// The configuration before or after, checked against its digest.
    pub(crate) fn bytes(&self, state: &HostDir, which: Found) -> io::Result<Option<Vec<u8>>> {
        let (name, sum) = match which {
            Found::Old => (JOURNAL_OLD, &self.old_sha256),
            _ => (JOURNAL_NEW, &self.new_sha256),
        };
        if sum.is_none() {
            return Ok(None);
        }
        let bytes = state.read(name)?;
        if digest(bytes.as_deref()) == *sum {
            Ok(bytes)
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{name}, beside the journal, is not what the journal says"),
            ))
        }
    }

    /// How far it is, for a person.
    pub(crate) fn words(&self) -> String {
        let what = match self.kind {
            Kind::Install => "of an installation",
            Kind::Remove => "of a removal",
        };
        match (&self.step, &self.outcome) {
            (Step::Planned, _) => format!("{what}: planned, nothing was touched"),
            (Step::Swapping, _) => format!("{what}: the file is being replaced"),
            (Step::Restarting, _) => format!("{what}: containerd is being restarted"),
            (Step::RollBackOrdered { why } | Step::RollingBack { why, .. }, _) => {
                format!("{what}: the old file is being put back ({why})")
            }
            (Step::Finished, Some(Outcome::Applied { .. })) => {
                format!("{what}: the new configuration is served, and is not verified yet")
            }
            (Step::Finished, Some(Outcome::Broken { why, .. })) => {
                format!("{what}: containerd is not healthy ({why})")
            }
            (Step::Finished, _) => format!("{what}: the old configuration is in place"),
        }
    }

    /// What the configuration is now.
    pub(crate) fn find(&self, root: &HostRoot) -> io::Result<Found> {
        let now = digest(read_config(root, &self.config_path)?.as_deref());
        Ok(if now == self.old_sha256 {
            Found::Old
        } else if now == self.new_sha256 {
            Found::New
        } else {
            Found::Neither
        })
    }
}

/// Reads a configuration; `None` where there is no file.
pub(crate) fn read_config(root: &HostRoot, path: &str) -> io::Result<Option<Vec<u8>>> {
    match root.read(path, MAX_CONFIG) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// SHA-256 in hex of bytes that may not be there.
pub(crate) fn digest(bytes: Option<&[u8]>) -> Option<String> {
    bytes.map(|bytes| hex(&Sha256::digest(bytes)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const STATE_DIR: &str = "/opt/quartermaster/state";

    pub(crate) fn journal(old: Option<&[u8]>, new: Option<&[u8]>) -> Journal {
        Journal {
            format: 1,
            kind: Kind::Install,
            config_path: "/etc/containerd/config.toml".into(),
            old_sha256: digest(old),
            new_sha256: digest(new),
            pieces: Vec::new(),
            base: Base::Old,
            unit: "containerd.service".into(),
            socket: "/run/containerd/containerd.sock".into(),
            promise: Promise {
                default_runtime: "runc".into(),
                handlers: vec!["runc".into()],
                ours: "crun".into(),
                network_ready: true,
            },
            ours_before: false,
            boot_id: "this".into(),
            kept: None,
            healthy_within_seconds: 60,
            step: Step::Planned,
            outcome: None,
        }
    }

    #[test]
    fn the_old_files_second_name_goes_with_the_journal() {
        let temporary = tempfile::tempdir().unwrap();
        let root = HostRoot::open(temporary.path()).unwrap();
        let state = root.make_dir(STATE_DIR).unwrap();
        let folder = root.make_dir("/etc/containerd").unwrap();
        for name in ["config.toml", ".config.toml.quartermaster-old"] {
            folder.write_durably(name, b"x").unwrap();
        }
        let mut swapped = journal(Some(b"old"), Some(b"new"));
        swapped.kept = Some("/etc/containerd/.config.toml.quartermaster-old".into());
        swapped.open(&state, Some(b"old"), Some(b"new")).unwrap();
        Journal::close(&root, &state).unwrap();
        assert_eq!(root.list("/etc/containerd").unwrap(), ["config.toml"]);
    }

    #[test]
    fn a_journal_comes_back_as_it_was_written_and_goes_without_a_trace() {
        let temporary = tempfile::tempdir().unwrap();
        let root = HostRoot::open(temporary.path()).unwrap();
        let state = root.make_dir(STATE_DIR).unwrap();
        assert_eq!(Journal::read(&state).unwrap(), None);
        let mut written = journal(Some(b"old"), Some(b"new"));
        written.step = Step::RollingBack {
            why: "x".into(),
            words: "y".into(),
        };
        written.open(&state, Some(b"old"), Some(b"new")).unwrap();
        assert_eq!(Journal::read(&state).unwrap().unwrap(), written);
        assert_eq!(written.bytes(&state, Found::Old).unwrap().unwrap(), b"old");
        assert_eq!(written.bytes(&state, Found::New).unwrap().unwrap(), b"new");
        Journal::close(&root, &state).unwrap();
        assert_eq!(root.list(STATE_DIR).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn damaged_backups_are_noticed() {
        let temporary = tempfile::tempdir().unwrap();
        let root = HostRoot::open(temporary.path()).unwrap();
        let state = root.make_dir(STATE_DIR).unwrap();
        let written = journal(Some(b"old"), Some(b"new"));
        written.open(&state, Some(b"ol"), Some(b"new")).unwrap();
        assert!(written.bytes(&state, Found::Old).is_err());
    }

    #[test]
    fn the_configuration_tells_what_has_happened() {
        let temporary = tempfile::tempdir().unwrap();
        let root = HostRoot::open(temporary.path()).unwrap();
        let folder = root.make_dir("/etc/containerd").unwrap();
        let fresh = journal(None, Some(b"new"));
        assert_eq!(fresh.find(&root).unwrap(), Found::Old);
        folder.write_durably("config.toml", b"new").unwrap();
        assert_eq!(fresh.find(&root).unwrap(), Found::New);
        folder.write_durably("config.toml", b"other").unwrap();
        assert_eq!(fresh.find(&root).unwrap(), Found::Neither);
    }
}
