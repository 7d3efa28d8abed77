//! One file replaced by another so that at every moment either the old or the new one is there, whole, and so that
//! the way back needs nothing: no space on the disk, no copy that could lack an attribute.
//!
//! It runs on the host with a root's rights, and keeps owner, mode and extended attributes (SELinux's label is one).
//! The old file itself stays beside the new one under another name until the swap is over. To go back is a rename.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, XattrFlags, statx};
use thiserror::Error;

use crate::checkpoint::checkpoint;

/// Why a file is not replaced. Nothing was changed then.
#[derive(Debug, Error)]
pub(crate) enum ReplacementError {
    /// It is not a file that can be renamed over.
    #[error(
        "{0} is a mount point by itself (a single file bind-mounted), which cannot be replaced; mount its folder instead"
    )]
    MountPoint(PathBuf),
    /// It is not what was planned on any more.
    #[error("{0} was changed by somebody else meanwhile")]
    Changed(PathBuf),
    /// The system said no.
    #[error("{path} {}: {error}", what(.error))]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
}

impl ReplacementError {
    /// Whether the disk is full.
    pub(crate) fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { error, .. } if no_space(error))
    }
}

/// A file that is to be replaced, and the names that are used beside it meanwhile.
#[derive(Debug)]
pub(crate) struct Replacement {
    target: PathBuf,
    folder: PathBuf,
    /// The new file, until it is renamed.
    fresh: PathBuf,
    /// The old file, until the swap is over.
    kept: PathBuf,
}

impl Replacement {
    /// Of the file at `path`. A symbolic link is followed, and the file that it leads to is replaced.
    ///
    /// # Errors
    /// When it is a mount point by itself, or a link that leads nowhere.
    pub(crate) fn of(path: &Path) -> Result<Self, ReplacementError> {
        let target = resolve(path).map_err(|error| ReplacementError::Io {
            path: path.to_path_buf(),
            error,
        })?;
        if is_mount_point(&target) {
            return Err(ReplacementError::MountPoint(target));
        }
        let folder = target.parent().unwrap_or(Path::new("/")).to_path_buf();
        let beside = |suffix: &str| {
            let mut name = OsString::from(".");
            name.push(target.file_name().unwrap_or_default());
            name.push(suffix);
            folder.join(name)
        };
        Ok(Self {
            fresh: beside(".quartermaster-new"),
            kept: beside(".quartermaster-old"),
            target,
            folder,
        })
    }

    /// The second name that the old file has until the swap is over.
    pub(crate) fn kept(&self) -> &Path {
        &self.kept
    }

    /// Replaces the file by `bytes`, or takes it away where there are none, if it still holds what `is_old` accepts.
    ///
    /// # Errors
    /// [`ReplacementError`]; the file is as it was then.
    pub(crate) fn put(
        &self,
        bytes: Option<&[u8]>,
        is_old: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<(), ReplacementError> {
        let done = (|| {
            if let Some(bytes) = bytes {
                self.write_fresh(bytes)?;
            }
            // What is looked at here is what the rename replaces.
            let now = read(&self.target)?;
            if !is_old(now.as_deref()) {
                return Ok(false);
            }
            self.keep()?;
            match bytes {
                Some(_) => {
                    checkpoint(format_args!("rename to {}", self.target.display()));
                    fs::rename(&self.fresh, &self.target)?;
                }
                None => take_away(&self.target)?,
            }
            self.sync()?;
            Ok(true)
        })();
        match done {
            Ok(true) => Ok(()),
            Ok(false) => {
                self.clear();
                Err(ReplacementError::Changed(self.target.clone()))
            }
            Err(error) => {
                self.clear();
                Err(self.error(error))
            }
        }
    }

    /// Puts the old file back: itself where it was kept, else a new one with `bytes`.
    ///
    /// # Errors
    /// [`ReplacementError::Io`]; the file is as it was then.
    pub(crate) fn back(
        &self,
        bytes: Option<&[u8]>,
        is_old: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<(), ReplacementError> {
        let done = (|| {
            let Some(bytes) = bytes else {
                take_away(&self.target)?;
                return self.sync();
            };
            if is_old(read(&self.kept)?.as_deref()) {
                checkpoint(format_args!("rename back to {}", self.target.display()));
                fs::rename(&self.kept, &self.target)?;
            } else {
                self.write_fresh(bytes)?;
                checkpoint(format_args!("rename to {}", self.target.display()));
                fs::rename(&self.fresh, &self.target)?;
            }
            self.sync()
        })();
        done.map_err(|error| self.error(error))
    }

    /// Forgets the names beside the file.
    pub(crate) fn clear(&self) {
        for path in [&self.fresh, &self.kept] {
            if fs::symlink_metadata(path).is_ok() {
                checkpoint(format_args!("remove {}", path.display()));
                if let Err(error) = fs::remove_file(path) {
                    tracing::warn!(path = %path.display(), %error, "a file of a swap could not be removed");
                }
            }
        }
    }

    fn write_fresh(&self, bytes: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        unlink(&self.fresh)?;
        checkpoint(format_args!("write {}", self.fresh.display()));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&self.fresh)?;
        file.write_all(bytes)?;
        match fs::metadata(&self.target) {
            Ok(old) => {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
                copy_attributes(&self.target, &self.fresh)?;
                file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                file.set_permissions(fs::Permissions::from_mode(0o644))?;
            }
            Err(error) => return Err(error),
        }
        file.sync_all()
    }

    /// Gives the old file a second name.
    fn keep(&self) -> io::Result<()> {
        unlink(&self.kept)?;
        if !self.target.exists() {
            return Ok(());
        }
        checkpoint(format_args!("link {}", self.kept.display()));
        // A file system without links has its bytes in the journal only, which needs space on the way back.
        match fs::hard_link(&self.target, &self.kept) {
            Err(error) if no_space(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }

    fn error(&self, error: io::Error) -> ReplacementError {
        ReplacementError::Io {
            path: self.target.clone(),
            error,
        }
    }
}

/// Writes a file that is not there yet, and syncs it.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    checkpoint(format_args!("write {}", path.display()));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    })();
    if written.is_err() {
        let _ = fs::remove_file(path);
    }
    written
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn unlink(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn take_away(path: &Path) -> io::Result<()> {
    checkpoint(format_args!("remove {}", path.display()));
    unlink(path)
}

fn resolve(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if fs::symlink_metadata(path).is_ok() {
                return Err(io::Error::new(
                    io::ErrorKind::NotFound,
                    "it is a symbolic link that leads nowhere",
                ));
            }
            Ok(path.to_path_buf())
        }
        Err(error) => Err(error),
    }
}

fn is_mount_point(path: &Path) -> bool {
    statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
        .is_ok_and(|status| status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn no_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

fn what(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => "lies on a read-only file system",
        _ if no_space(error) => "has no space left beside it",
        io::ErrorKind::ResourceBusy => "is busy (a mount point?)",
        _ => "cannot be replaced",
    }
}

fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    let mut names = vec![0u8; 64 * 1024];
    let length = match rustix::fs::listxattr(from, &mut names[..]) {
        Ok(length) => length,
        Err(rustix::io::Errno::NOTSUP) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    for name in names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0u8; 64 * 1024];
        let length = rustix::fs::getxattr(from, name, &mut value[..])?;
        match rustix::fs::setxattr(to, name, &value[..length], XattrFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(text: &'static str) -> impl Fn(Option<&[u8]>) -> bool {
        move |bytes| bytes == Some(text.as_bytes())
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn bytes_change_and_mode_and_link_stay() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real.toml");
        let link = dir.path().join("config.toml");
        fs::write(&real, "old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("real.toml", &link).unwrap();
        let replacement = Replacement::of(&link).unwrap();
        replacement.put(Some(b"new"), is("old")).unwrap();
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(fs::metadata(&real).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        replacement.clear();
        assert_eq!(names(dir.path()), ["config.toml", "real.toml"]);
    }

    #[test]
    fn owner_and_attributes_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        fs::write(&file, "old").unwrap();
        let owned = std::os::unix::fs::chown(&file, Some(1234), Some(4321)).is_ok();
        let marked = rustix::fs::setxattr(&file, "user.test", b"mark", XattrFlags::empty()).is_ok();
        Replacement::of(&file)
            .unwrap()
            .put(Some(b"new"), is("old"))
            .unwrap();
        let after = fs::metadata(&file).unwrap();
        if owned {
            assert_eq!((after.uid(), after.gid()), (1234, 4321));
        }
        if marked {
            let mut value = [0u8; 16];
            let length = rustix::fs::getxattr(&file, "user.test", &mut value[..]).unwrap();
            assert_eq!(&value[..length], b"mark");
        }
    }

    #[test]
    fn the_way_back_brings_the_old_file_itself() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        fs::write(&file, "old").unwrap();
        let before = fs::metadata(&file).unwrap().ino();
        let replacement = Replacement::of(&file).unwrap();
        replacement.put(Some(b"new"), is("old")).unwrap();
        assert_ne!(fs::metadata(&file).unwrap().ino(), before);
        replacement.back(Some(b"old"), is("old")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(fs::metadata(&file).unwrap().ino(), before);
        // Where it was not kept, its bytes are enough.
        replacement.put(Some(b"new"), is("old")).unwrap();
        replacement.clear();
        replacement.back(Some(b"old"), is("old")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["config.toml"]);
    }

    #[test]
    fn a_file_that_somebody_changed_stays_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        fs::write(&file, "theirs").unwrap();
        let replacement = Replacement::of(&file).unwrap();
        let error = replacement.put(Some(b"new"), is("old")).unwrap_err();
        assert!(matches!(error, ReplacementError::Changed(_)), "{error}");
        assert_eq!(fs::read(&file).unwrap(), b"theirs");
        assert_eq!(names(dir.path()), ["config.toml"]);
    }

    #[test]
    fn a_file_comes_and_goes_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sub/config.toml");
        let replacement = Replacement::of(&file).unwrap();
        replacement.put(Some(b"new"), |bytes| bytes.is_none()).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o644);
        replacement.put(None, is("new")).unwrap();
        assert!(!file.exists());
        replacement.back(Some(b"new"), is("new")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        replacement.back(None, is("")).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn a_link_that_leads_nowhere_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("config.toml");
        std::os::unix::fs::symlink("gone.toml", &link).unwrap();
        let error = Replacement::of(&link).unwrap_err().to_string();
        assert!(error.contains("leads nowhere"), "{error}");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
