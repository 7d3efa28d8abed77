//! Files of the host, resolved below its root.
//!
//! In a pod the host's root is mounted at `/host`. A link there such as `/var/run -> /run` would lead out of it and
//! into the pod's own file system, so every path is resolved by the kernel with the host's root as `/`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, Mode, OFlags, ResolveFlags};

use crate::checkpoint::checkpoint;

/// The root of the host's file system.
#[derive(Debug)]
pub struct HostRoot {
    fd: OwnedFd,
    path: PathBuf,
}

/// A file or socket that is held open by its place only, and reachable under [`Held::path`] while it is.
#[derive(Debug)]
pub struct Held(OwnedFd);

/// A folder of the host that is held open, to name the files in it.
#[derive(Debug)]
pub struct HostDir(OwnedFd);

impl HostRoot {
    /// Opens the folder at `path` as the host's root.
    ///
    /// # Errors
    /// When it is not a folder that can be opened.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        let fd = fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self {
            fd,
            path: path.to_path_buf(),
        })
    }

    /// Where the root is mounted for this process.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn resolve(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        // EAGAIN: a rename somewhere in the system raced with the walk; the kernel asks to try again.
        for _ in 0..64 {
            match fs::openat2(
                self.fd.as_fd(),
                path,
                flags | OFlags::CLOEXEC,
                Mode::empty(),
                ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
            ) {
                Err(rustix::io::Errno::AGAIN) => {}
                other => return other.map_err(io::Error::from),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Holds whatever lies at `path`.
    ///
    /// # Errors
    /// When there is nothing.
    pub fn hold(&self, path: &str) -> io::Result<Held> {
        self.resolve(path, OFlags::PATH).map(Held)
    }

    /// The file system that holds `path`.
    ///
    /// # Errors
    /// When there is nothing at `path`.
    pub fn statvfs(&self, path: &str) -> io::Result<fs::StatVfs> {
        Ok(fs::fstatvfs(self.resolve(path, OFlags::PATH)?)?)
    }

    /// Whether anything lies at `path`.
    pub fn exists(&self, path: &str) -> bool {
        self.hold(path).is_ok()
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// When it cannot be opened or is not a regular file or one of procfs.
    pub fn open_file(&self, path: &str) -> io::Result<File> {
        // NONBLOCK: a fifo in a file's place must not hang the agent.
        let file = File::from(self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK)?);
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
        }
    }

    /// Reads a file of at most `limit` bytes.
    ///
    /// # Errors
    /// When it cannot be read or is larger.
    pub fn read(&self, path: &str, limit: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(path)?
            .take(limit as u64 + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() > limit {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("larger than {limit} bytes"),
            ));
        }
        Ok(bytes)
    }

    /// Reads a small text file and trims it; `None` when that is not possible.
    pub fn read_line(&self, path: &str) -> Option<String> {
        let bytes = self.read(path, 4096).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Names in a folder, sorted.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let fd = self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = Vec::new();
        for entry in fs::Dir::read_from(fd)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Holds a folder.
    ///
    /// # Errors
    /// When there is none at `path`.
    pub fn dir(&self, path: &str) -> io::Result<HostDir> {
        self.resolve(path, OFlags::PATH | OFlags::DIRECTORY).map(HostDir)
    }

    /// Makes a folder with all that is missing above it, and holds it.
    ///
    /// # Errors
    /// When one of them cannot be made.
    pub fn make_dir(&self, path: &str) -> io::Result<HostDir> {
        if let Ok(there) = self.dir(path) {
            return Ok(there);
        }
        checkpoint(format_args!("make {path}"));
        let mut made = String::new();
        let mut dir = self.dir("/")?;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            match fs::mkdirat(dir.0.as_fd(), part, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            made.push('/');
            made.push_str(part);
            dir = self.dir(&made)?;
        }
        Ok(dir)
    }
}

impl Held {
    /// A path under which this process reaches it, also where its real one is longer than a socket's may be.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

impl HostDir {
    /// A path under which this process reaches `name` in the folder.
    pub fn path(&self, name: impl AsRef<OsStr>) -> PathBuf {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()));
        path.push(name.as_ref());
        path
    }

    /// Writes a file so that after a crash it holds either its old or its new bytes.
    ///
    /// # Errors
    /// When it cannot be written or synced; the old file is there then.
    pub fn write_durably(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.path(format!(".{name}.new"));
        let target = self.path(name);
        checkpoint(format_args!("write {name}"));
        let written = (|| {
            let mut file = File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            checkpoint(format_args!("rename to {name}"));
            std::fs::rename(&temporary, &target)?;
            self.sync()
        })();
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }

    /// Makes renames and removals in the folder durable.
    ///
    /// # Errors
    /// When the folder cannot be synced.
    pub fn sync(&self) -> io::Result<()> {
        File::open(self.path("."))?.sync_all()
    }

    /// Reads a file of the folder; `None` when there is none.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        match std::fs::read(self.path(name)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes a file of the folder, if it is there.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match std::fs::symlink_metadata(self.path(name)) {
            Ok(_) => checkpoint(format_args!("remove {name}")),
            // A read-only file system refuses to remove even what is not there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        match std::fs::remove_file(self.path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes a folder in this folder with all that is in it, if it is there.
    ///
    /// # Errors
    /// When something of it cannot be removed.
    pub fn remove_tree(&self, name: &str) -> io::Result<()> {
        if std::fs::symlink_metadata(self.path(name)).is_ok() {
            checkpoint(format_args!("remove all of {name}"));
        }
        match std::fs::remove_dir_all(self.path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn absolute_links_stay_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("run/x")).unwrap();
        std::fs::create_dir_all(dir.path().join("var")).unwrap();
        symlink("/run", dir.path().join("var/run")).unwrap();
        symlink("/../../../etc", dir.path().join("out")).unwrap();
        std::fs::write(dir.path().join("run/x/file"), "inside").unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        assert_eq!(root.read("/var/run/x/file", 100).unwrap(), b"inside");
        assert!(root.read("/out/passwd", 100).is_err());
        assert_eq!(root.list("/var/run").unwrap(), ["x"]);
    }

    #[test]
    fn a_file_over_its_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("big"), [0; 11]).unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        assert_eq!(
            root.read("/big", 10).unwrap_err().kind(),
            io::ErrorKind::FileTooLarge
        );
        assert_eq!(root.read("big", 11).unwrap().len(), 11);
    }

    #[test]
    fn folders_are_made_and_files_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        let made = root.make_dir("/opt/quartermaster/state").unwrap();
        made.write_durably("a.json", b"1").unwrap();
        made.write_durably("a.json", b"2").unwrap();
        assert_eq!(made.read("a.json").unwrap().unwrap(), b"2");
        assert_eq!(root.list("/opt/quartermaster/state").unwrap(), ["a.json"]);
        made.remove("a.json").unwrap();
        made.remove("a.json").unwrap();
        assert_eq!(made.read("a.json").unwrap(), None);
    }
}
