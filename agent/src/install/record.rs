//! What is installed, as it stands in the state folder.

use std::io;

use quartermaster_proto::v1::InstallState;
use serde::{Deserialize, Serialize};

use super::journal::Journal;
use super::layout::{CURRENT, EDITED, INSTALLED, Layout, ORIGINAL, USUAL_PREFIX};
use crate::config::{EditRecord, Piece};
use crate::host::{HostDir, HostRoot};

/// The record of an installation. The two configurations lie beside it as they were.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// 1. A program that finds another number leaves the record alone.
    pub format: u32,
    /// Folder below which the install folder lies.
    #[serde(default = "usual_prefix")]
    pub prefix: String,
    /// Path of the configuration that was edited.
    pub config_path: String,
    /// Whether there was a file before.
    pub had_file: bool,
    /// SHA-256 of the file as we left it.
    pub edited_sha256: Option<String>,
    /// What was inserted.
    pub pieces: Vec<Piece>,
    /// Whether a module has run through the handler since.
    pub verified: bool,
    /// The runtime of KWasm's handler, where the node had one when we came: it goes along when the node is put
    /// back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kwasm: Option<String>,
}

/// Records of old had no other.
fn usual_prefix() -> String {
    USUAL_PREFIX.to_owned()
}

/// The node in the words of the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Absent, installed or in flight.
    pub state: InstallState,
    /// The installed version; empty when there is none.
    pub version: String,
    /// The record, where there is one.
    pub installed: Option<Installed>,
}

impl Installed {
    pub(crate) fn read(state: &HostDir) -> io::Result<Option<Self>> {
        let Some(bytes) = state.read(INSTALLED)? else {
            return Ok(None);
        };
        let installed: Self = serde_json::from_slice(&bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok((installed.format == 1).then_some(installed))
    }

    /// Writes the record; the configurations that it refers to first.
    pub(crate) fn write(
        &self,
        state: &HostDir,
        original: Option<&[u8]>,
        edited: Option<&[u8]>,
    ) -> io::Result<()> {
        for (name, bytes) in [(ORIGINAL, original), (EDITED, edited)] {
            if let Some(bytes) = bytes {
                state.write_durably(name, bytes)?;
            }
        }
        self.write_alone(state)
    }

    pub(crate) fn write_alone(&self, state: &HostDir) -> io::Result<()> {
        let bytes = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        state.write_durably(INSTALLED, &bytes)
    }

    /// The edit, for its undo; `None` where its files are gone, and the tables have to be found by their content.
    pub(crate) fn edit(&self, state: &HostDir) -> Option<EditRecord> {
        let after = state.read(EDITED).ok()??;
        let before = if self.had_file {
            Some(state.read(ORIGINAL).ok()??)
        } else {
            None
        };
        Some(EditRecord {
            before,
            after,
            pieces: self.pieces.clone(),
        })
    }
}

/// What the state folder says of the node.
///
/// # Errors
/// When a file of it is there and cannot be read.
pub fn state(root: &HostRoot, layout: &Layout) -> io::Result<State> {
    let version = root
        .dir(layout.install_dir())
        .ok()
        .and_then(|dir| std::fs::read_link(dir.path(CURRENT)).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .unwrap_or_default();
    let Ok(dir) = root.dir(&layout.state_dir()) else {
        return Ok(State {
            state: InstallState::Absent,
            version,
            installed: None,
        });
    };
    let installed = Installed::read(&dir)?;
    let state = if Journal::read(&dir)?.is_some() {
        InstallState::InFlight
    } else if installed.is_some() {
        InstallState::Installed
    } else {
        InstallState::Absent
    };
    Ok(State {
        state,
        version: if state == InstallState::Absent {
            String::new()
        } else {
            version
        },
        installed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_back_with_its_edit() {
        let temporary = tempfile::tempdir().unwrap();
        let root = HostRoot::open(temporary.path()).unwrap();
        let layout = Layout::default();
        assert_eq!(state(&root, &layout).unwrap().state, InstallState::Absent);
        let dir = root.make_dir(&layout.state_dir()).unwrap();
        let installed = Installed {
            format: 1,
            prefix: USUAL_PREFIX.into(),
            config_path: "/etc/containerd/config.toml".into(),
            had_file: true,
            edited_sha256: None,
            pieces: Vec::new(),
            verified: true,
            kwasm: None,
        };
        installed.write(&dir, Some(b"before"), Some(b"after")).unwrap();
        assert_eq!(state(&root, &layout).unwrap().state, InstallState::Installed);
        let edit = installed.edit(&dir).unwrap();
        assert_eq!(
            (edit.before.as_deref(), &edit.after[..]),
            (Some(&b"before"[..]), &b"after"[..])
        );
        dir.remove(ORIGINAL).unwrap();
        assert_eq!(installed.edit(&dir), None);
    }
}
