//! One changing command at a time on a node, whichever process it comes from.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FlockOperation, flock};

use crate::checkpoint::checkpoint;
use crate::host::HostDir;

/// A lock that is held until it is dropped or its process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock `name` in `dir`; `None` when somebody else has it.
    pub(crate) fn take(dir: &HostDir, name: &str) -> io::Result<Option<Self>> {
        // A removal deletes the folder with the lock in it: what was locked may be a file that is gone.
        for _ in 0..8 {
            if std::fs::symlink_metadata(dir.path(name)).is_err() {
                checkpoint(format_args!("write {name}"));
            }
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(dir.path(name))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            let held = file.metadata()?;
            match std::fs::metadata(dir.path(name)) {
                Ok(there) if there.ino() == held.ino() && there.dev() == held.dev() => {
                    return Ok(Some(Self { _file: file }));
                }
                _ => {}
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostRoot;

    #[test]
    fn only_one_holds_it_and_the_next_after_it_is_dropped() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = HostRoot::open(temporary.path()).unwrap().dir("/").unwrap();
        let first = Lock::take(&dir, "lock").unwrap();
        assert!(first.is_some());
        assert!(Lock::take(&dir, "lock").unwrap().is_none());
        drop(first);
        assert!(Lock::take(&dir, "lock").unwrap().is_some());
    }
}
