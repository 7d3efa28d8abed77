//! One file replaced by another so that at every moment either the old or the new one is there, whole.
//!
//! It runs on the host with a root's rights, and keeps owner, mode and extended attributes (SELinux's label is one).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, XattrFlags, statx};

/// Replaces the file at `path` by `bytes`, or removes it where there are none. A symbolic link is followed, and
/// the file that it leads to is replaced.
///
/// # Errors
/// In words for an operator; nothing is changed then.
pub(crate) fn replace(path: &Path, bytes: Option<&[u8]>) -> Result<(), String> {
    let target = resolve(path).map_err(|error| words(path, &error))?;
    let folder = target.parent().unwrap_or(Path::new("/"));
    if is_mount_point(&target) {
        return Err(format!(
            "{} is a mount point by itself (a single file bind-mounted), which cannot be replaced; mount its folder instead",
            target.display()
        ));
    }
    match bytes {
        Some(bytes) => put(&target, folder, bytes).map_err(|error| words(&target, &error)),
        None => remove(&target, folder).map_err(|error| words(&target, &error)),
    }
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

fn words(path: &Path, error: &io::Error) -> String {
    let what = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => "lies on a read-only file system",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "has no space left beside it",
        io::ErrorKind::ResourceBusy => "is busy (a mount point?)",
        _ => "cannot be replaced",
    };
    format!("{} {what}: {error}", path.display())
}

fn put(target: &Path, folder: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = target.file_name().unwrap_or_default();
    let mut temporary_name = OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(".quartermaster");
    let temporary = folder.join(temporary_name);
    let written = (|| {
        fs::create_dir_all(folder)?;
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(bytes)?;
        match fs::metadata(target) {
            Ok(old) => {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
                copy_attributes(target, &temporary)?;
                file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                file.set_permissions(fs::Permissions::from_mode(0o644))?;
            }
            Err(error) => return Err(error),
        }
        file.sync_all()?;
        fs::rename(&temporary, target)?;
        File::open(folder)?.sync_all()
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn remove(target: &Path, folder: &Path) -> io::Result<()> {
    match fs::remove_file(target) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => File::open(folder)?.sync_all(),
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

    #[test]
    fn bytes_change_and_mode_and_link_stay() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real.toml");
        let link = dir.path().join("config.toml");
        fs::write(&real, "old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("real.toml", &link).unwrap();
        replace(&link, Some(b"new")).unwrap();
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(fs::metadata(&real).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn owner_and_attributes_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        fs::write(&file, "old").unwrap();
        let owned = std::os::unix::fs::chown(&file, Some(1234), Some(4321)).is_ok();
        let marked = rustix::fs::setxattr(&file, "user.test", b"mark", XattrFlags::empty()).is_ok();
        replace(&file, Some(b"new")).unwrap();
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
    fn a_file_comes_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sub/config.toml");
        replace(&file, Some(b"new")).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o644);
        replace(&file, None).unwrap();
        replace(&file, None).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn a_link_that_leads_nowhere_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("config.toml");
        std::os::unix::fs::symlink("gone.toml", &link).unwrap();
        assert!(
            replace(&link, Some(b"new"))
                .unwrap_err()
                .contains("leads nowhere")
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
