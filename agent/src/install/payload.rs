//! Stage 3: the runtime and its libraries in their place on the host.
//!
//! A version is a folder that is either whole or not there: it is written under another name, each file's SHA-256
//! is checked while it is copied, everything is synced, and only then it is renamed and the link `current` moved.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use quartermaster_proto::v1::FailureReason;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::layout::{AGENT, CURRENT, Layout, STATE};
use super::relocation::{RelocationError, relocate};
use super::sums::{Entry, hex, parse, unhex};
use crate::checkpoint::checkpoint;
use crate::failure::Reported;
use crate::host::{HostDir, HostRoot};

const SUMS: &str = "SHA256SUMS";
const COMPLETE: &str = ".complete";
const MAX_SUMS: u64 = 1024 * 1024;
const BUFFER: usize = 1024 * 1024;
const THREADS: usize = 4;
/// Between the clocks of containerd and of the file system.
const LEEWAY: Duration = Duration::from_secs(2);

/// Why the payload is not in its place.
#[derive(Debug, Error)]
pub(crate) enum PayloadError {
    /// No payload to install.
    #[error("the payload {0} cannot be read: {1}")]
    Absent(PathBuf, io::Error),
    /// A list that is not one.
    #[error("the payload's {SUMS} is not valid: {0}")]
    Sums(String),
    /// A file that is not what its list says.
    #[error("the payload's file {0} is damaged: its SHA-256 is not the one in {SUMS}")]
    Damaged(String),
    /// A program that cannot be made to run from where it would lie.
    #[error("the payload's {0} cannot be used below {1}: {2}")]
    Relocation(String, String, RelocationError),
    /// A file that cannot be written.
    #[error("{0} cannot be written on the host: {1}")]
    Write(String, io::Error),
}

impl Reported for PayloadError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::Write(_, error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                ) =>
            {
                FailureReason::NoSpace
            }
            _ => FailureReason::PayloadFailed,
        }
    }

    fn remedy(&self) -> String {
        match self {
            Self::Absent(..) => "Name the folder that holds bin, lib and SHA256SUMS with --payload; in the agent's image it is /payload.".into(),
            Self::Sums(_) | Self::Damaged(_) => "Pull the agent's image again; its layer may be damaged.".into(),
            Self::Write(_, error) if error.kind() == io::ErrorKind::StorageFull => "Free about 200 MB there, then try again.".into(),
            Self::Write(..) => "The install folder must be writable on the host.".into(),
            Self::Relocation(..) => "Use the payload of this agent's own image, or a shorter --prefix.".into(),
        }
    }
}

/// A payload and the version that it makes.
#[derive(Debug)]
pub(crate) struct Payload {
    folder: PathBuf,
    files: Vec<Entry>,
    /// The list as it was read.
    sums: String,
    version: String,
    digest: String,
}

/// What placing did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) version: String,
    /// Bytes copied; 0 when the version was there.
    pub(crate) copied: u64,
}

impl Payload {
    /// Reads the list of the payload in `folder`, and this program's own digest.
    pub(crate) fn open(folder: &Path) -> Result<Self, PayloadError> {
        let absent = |error| PayloadError::Absent(folder.to_path_buf(), error);
        let mut text = String::new();
        File::open(folder.join(SUMS))
            .and_then(|file| file.take(MAX_SUMS).read_to_string(&mut text))
            .map_err(absent)?;
        let files = parse(&text).map_err(PayloadError::Sums)?;
        // The copy of the agent is part of the version: the program that swaps is the one that planned.
        let mut digest = Sha256::new();
        digest.update(text.as_bytes());
        let mut agent = File::open("/proc/self/exe").map_err(absent)?;
        io::copy(&mut agent, &mut digest).map_err(absent)?;
        let digest = hex(&digest.finalize());
        Ok(Self {
            folder: folder.to_path_buf(),
            files,
            sums: text,
            version: format!("{}-{}", env!("CARGO_PKG_VERSION"), &digest[..12]),
            digest,
        })
    }

    /// Puts the version in its place and makes it the current one.
    pub(crate) fn place(&self, root: &HostRoot, layout: &Layout) -> Result<Placed, PayloadError> {
        let write = |what: &str| {
            let what = what.to_owned();
            move |error| PayloadError::Write(what, error)
        };
        let folder = layout.install_dir();
        let install = root.make_dir(folder).map_err(write(folder))?;
        let copied = if self.is_whole(&install, layout) {
            0
        } else {
            self.copy(&install, layout)?
        };
        let version = format!("{folder}/{}", self.version);
        self.link(&install).map_err(write(&version))?;
        Ok(Placed {
            version: self.version.clone(),
            copied,
        })
    }

    /// Whether the version is there to the last byte: a disk may have lost or altered some of it since.
    fn is_whole(&self, install: &HostDir, layout: &Layout) -> bool {
        let there = install.path(&self.version);
        let marked =
            fs::read_to_string(there.join(COMPLETE)).is_ok_and(|digest| digest.trim() == self.digest);
        let holds = |path: &str, start: &str, wanted: &[u8]| {
            let mut digest = Sha256::new_with_prefix(start);
            File::open(there.join(path))
                .and_then(|mut file| io::copy(&mut file, &mut digest))
                .is_ok_and(|_| digest.finalize()[..] == *wanted)
        };
        marked
            && self.files.iter().all(|entry| match relocated(entry, layout) {
                Some(home) => is_relocated(&there.join(&entry.path), &home, entry),
                None => holds(&entry.path, "", &entry.sha256),
            })
            && unhex(&self.digest).is_some_and(|digest| holds(AGENT, &self.sums, &digest))
    }

    fn copy(&self, install: &HostDir, layout: &Layout) -> Result<u64, PayloadError> {
        let temporary = format!(".{}.new", self.version);
        let shown = format!("{}/{}", layout.install_dir(), self.version);
        let write = |error| PayloadError::Write(shown.clone(), error);
        install.remove_tree(&temporary).map_err(write)?;
        let target = install.path(&temporary);
        let copied = self.copy_into(&target, layout).inspect_err(|_| {
            // A half-made version is worth nothing and may be what fills the disk.
            let _ = install.remove_tree(&temporary);
        })?;
        let finish = || {
            checkpoint(format_args!("write {COMPLETE}"));
            let mut marker = File::create(target.join(COMPLETE))?;
            marker.write_all(self.digest.as_bytes())?;
            marker.sync_all()?;
            for folder in self.folders() {
                File::open(target.join(folder))?.sync_all()?;
            }
            // A version of this name that is not whole is in the way of the rename.
            install.remove_tree(&self.version)?;
            checkpoint(format_args!("rename to {}", self.version));
            fs::rename(&target, install.path(&self.version))?;
            install.sync()
        };
        finish().map_err(write)?;
        Ok(copied)
    }

    fn folders(&self) -> Vec<String> {
        let mut folders = vec![String::new(), "bin".to_owned()];
        for entry in &self.files {
            let mut at = Path::new(&entry.path);
            while let Some(parent) = at.parent() {
                folders.push(parent.to_string_lossy().into_owned());
                at = parent;
            }
        }
        folders.sort();
        folders.dedup();
        folders
    }

    fn copy_into(&self, target: &Path, layout: &Layout) -> Result<u64, PayloadError> {
        checkpoint(format_args!("make folders of {}", self.version));
        for folder in self.folders() {
            fs::create_dir_all(target.join(&folder))
                .map_err(|error| PayloadError::Write(target.join(&folder).display().to_string(), error))?;
        }
        // Largest first, so that no thread is left with a large one at the end.
        let mut queue: Vec<(u64, Option<&Entry>)> = self
            .files
            .iter()
            .map(|entry| {
                let size = fs::metadata(self.folder.join(&entry.path)).map_or(0, |meta| meta.len());
                (size, Some(entry))
            })
            .chain([(0, None)])
            .collect();
        queue.sort_by_key(|(size, _)| *size);
        let queue = Mutex::new(queue);
        let next = || queue.lock().ok().and_then(|mut queue| queue.pop());
        let work = || -> Result<u64, PayloadError> {
            let mut buffer = vec![0; BUFFER];
            let mut copied = 0;
            while let Some((_, entry)) = next() {
                copied += match entry {
                    Some(entry) => {
                        let to = target.join(&entry.path);
                        let copied =
                            copy_checked(&self.folder.join(&entry.path), &to, Some(entry), &mut buffer)?;
                        if let Some(home) = relocated(entry, layout) {
                            relocate_copy(&to, &home, entry)?;
                        }
                        copied
                    }
                    None => copy_checked(
                        Path::new("/proc/self/exe"),
                        &target.join(AGENT),
                        None,
                        &mut buffer,
                    )?,
                };
            }
            Ok(copied)
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_fold(0, |sum, thread| {
                let copied = thread.join().unwrap_or_else(|_| {
                    Err(PayloadError::Write(
                        layout.install_dir().to_owned(),
                        io::Error::other("the copying thread ended"),
                    ))
                })?;
                Ok(sum + copied)
            })
        })
    }

    fn link(&self, install: &HostDir) -> io::Result<()> {
        if fs::read_link(install.path(CURRENT)).is_ok_and(|to| to == Path::new(&self.version)) {
            return Ok(());
        }
        let temporary = ".current.new";
        install.remove(temporary)?;
        checkpoint(format_args!("link {temporary}"));
        symlink(&self.version, install.path(temporary))?;
        checkpoint(format_args!("rename to {CURRENT}"));
        fs::rename(install.path(temporary), install.path(CURRENT))?;
        install.sync()
    }
}

/// Removes versions that are not the current one, and what a copy that was killed left. `oldest` is when the oldest
/// pod that uses the handler was made: one made before the link was moved may still map files of an older version, as
/// a module's process does for all its life. Gives how many versions went.
pub(crate) fn forget_old(root: &HostRoot, layout: &Layout, oldest: Option<SystemTime>) -> io::Result<usize> {
    let install = root.dir(layout.install_dir())?;
    let link = install.path(CURRENT);
    let current = fs::read_link(&link)?;
    let moved = fs::symlink_metadata(&link)?.modified()?;
    let in_use = oldest.is_some_and(|oldest| oldest < moved + LEEWAY);
    let mut gone = 0;
    for name in root.list(layout.install_dir())? {
        let is_version = fs::symlink_metadata(install.path(&name)).is_ok_and(|meta| meta.is_dir());
        if !is_version || name == STATE || Path::new(&name) == current {
            continue;
        }
        let is_rest = name.starts_with('.');
        if is_rest || !in_use {
            install.remove_tree(&name)?;
            gone += usize::from(!is_rest);
        }
    }
    Ok(gone)
}

/// The folder that a file of the payload has to be made to run from: only programs name one, and only where it is not
/// the one they were built for.
fn relocated(entry: &Entry, layout: &Layout) -> Option<String> {
    (entry.path.starts_with("bin/") && *layout != Layout::default()).then(|| layout.current())
}

fn built_for() -> String {
    Layout::default().current()
}

/// Makes the copy of a program run from `home`. The bytes that are changed are those that the list names.
fn relocate_copy(copy: &Path, home: &str, entry: &Entry) -> Result<(), PayloadError> {
    let write = |error| PayloadError::Write(copy.display().to_string(), error);
    let mut bytes = fs::read(copy).map_err(write)?;
    if Sha256::digest(&bytes)[..] != entry.sha256 {
        return Err(PayloadError::Damaged(entry.path.clone()));
    }
    relocate(&mut bytes, &built_for(), home)
        .map_err(|error| PayloadError::Relocation(entry.path.clone(), home.to_owned(), error))?;
    checkpoint(format_args!("relocate the payload {}", entry.path));
    let mut file = OpenOptions::new().write(true).open(copy).map_err(write)?;
    file.write_all(&bytes).map_err(write)?;
    file.sync_all().map_err(write)
}

/// Whether a program is the one of the list, made to run from `home`: moved back, it has the list's digest. So a copy
/// is held against its origin's digest wherever it lies, and there is no second list that could be wrong.
fn is_relocated(copy: &Path, home: &str, entry: &Entry) -> bool {
    fs::read(copy).is_ok_and(|mut bytes| {
        relocate(&mut bytes, home, &built_for()).is_ok() && Sha256::digest(&bytes)[..] == entry.sha256
    })
}

/// Copies one file, hashing the bytes that are written, and syncs it.
fn copy_checked(
    from: &Path,
    to: &Path,
    entry: Option<&Entry>,
    buffer: &mut [u8],
) -> Result<u64, PayloadError> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let absent = |error| PayloadError::Absent(from.to_path_buf(), error);
    let write = |error| PayloadError::Write(to.display().to_string(), error);
    let mut source = File::open(from).map_err(absent)?;
    let executable = source.metadata().map_err(absent)?.permissions().mode() & 0o111 != 0;
    let mode = if executable || entry.is_none() {
        0o755
    } else {
        0o644
    };
    checkpoint(format_args!("write of the payload {name}"));
    let mut target = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(to)
        .map_err(write)?;
    let mut digest = Sha256::new();
    let mut copied = 0;
    loop {
        let read = source.read(buffer).map_err(absent)?;
        if read == 0 {
            break;
        }
        target.write_all(&buffer[..read]).map_err(write)?;
        digest.update(&buffer[..read]);
        copied += read as u64;
    }
    if let Some(entry) = entry
        && digest.finalize()[..] != entry.sha256
    {
        return Err(PayloadError::Damaged(entry.path.clone()));
    }
    // The umask of whoever started us must not take the execute bit away.
    target
        .set_permissions(fs::Permissions::from_mode(mode))
        .map_err(write)?;
    target.sync_all().map_err(write)?;
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::super::relocation::tests::program;
    use super::*;

    const INSTALL_DIR: &str = "/opt/quartermaster";

    fn payload(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let mut sums = String::new();
        for (path, bytes) in files {
            let file = dir.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, bytes).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            sums += &format!("{}  {path}\n", hex(&Sha256::digest(bytes)));
        }
        fs::write(dir.path().join(SUMS), sums).unwrap();
        dir
    }

    fn host() -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::open(dir.path()).unwrap();
        (dir, root)
    }

    #[test]
    fn a_payload_is_copied_once_and_linked() {
        let source = payload(&[("bin/crun", b"crun"), ("lib/libx.so", &[7; 3_000_000])]);
        let (dir, root) = host();
        let payload = Payload::open(source.path()).unwrap();
        let placed = payload.place(&root, &Layout::default()).unwrap();
        assert!(placed.copied > 3_000_000);
        let current = dir.path().join("opt/quartermaster/current");
        assert_eq!(fs::read(current.join("bin/crun")).unwrap(), b"crun");
        let agent = fs::metadata(current.join(AGENT)).unwrap();
        assert_eq!(agent.permissions().mode() & 0o777, 0o755);
        assert_eq!(payload.place(&root, &Layout::default()).unwrap().copied, 0);
        let names = root.list(INSTALL_DIR).unwrap();
        assert_eq!(names, [placed.version.as_str(), CURRENT]);
    }

    #[test]
    fn a_damaged_file_is_never_used() {
        let source = payload(&[("bin/crun", b"crun"), ("lib/libx.so", b"x")]);
        fs::write(source.path().join("lib/libx.so"), b"y").unwrap();
        let (_dir, root) = host();
        let error = Payload::open(source.path())
            .unwrap()
            .place(&root, &Layout::default())
            .unwrap_err();
        assert!(
            matches!(error, PayloadError::Damaged(ref path) if path == "lib/libx.so"),
            "{error}"
        );
        assert_eq!(root.list(INSTALL_DIR).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn an_altered_version_is_copied_again() {
        let source = payload(&[("bin/crun", b"crun"), ("lib/libx.so", b"x")]);
        let (dir, root) = host();
        let payload = Payload::open(source.path()).unwrap();
        payload.place(&root, &Layout::default()).unwrap();
        let current = dir.path().join("opt/quartermaster/current");
        // Of the same length: only its digest tells.
        fs::write(current.join("lib/libx.so"), b"y").unwrap();
        assert!(payload.place(&root, &Layout::default()).unwrap().copied > 0);
        assert_eq!(fs::read(current.join("lib/libx.so")).unwrap(), b"x");
        let mut agent = fs::read(current.join(AGENT)).unwrap();
        agent[100] ^= 1;
        fs::write(current.join(AGENT), &agent).unwrap();
        assert!(payload.place(&root, &Layout::default()).unwrap().copied > 0);
        assert_ne!(fs::read(current.join(AGENT)).unwrap(), agent);
    }

    #[test]
    fn old_versions_stay_while_a_pod_may_use_one_and_go_after() {
        let source = payload(&[("bin/crun", b"old")]);
        let (_dir, root) = host();
        let old = Payload::open(source.path())
            .unwrap()
            .place(&root, &Layout::default())
            .unwrap();
        let source = payload(&[("bin/crun", b"new")]);
        let new = Payload::open(source.path())
            .unwrap()
            .place(&root, &Layout::default())
            .unwrap();
        assert_ne!(old.version, new.version);
        root.make_dir("/opt/quartermaster/.left.new").unwrap();
        root.make_dir("/opt/quartermaster/state").unwrap();
        let now = SystemTime::now();
        let before = now - Duration::from_secs(3600);
        assert_eq!(forget_old(&root, &Layout::default(), Some(before)).unwrap(), 0);
        let mut all = [old.version.as_str(), &new.version, CURRENT, "state"];
        all.sort_unstable();
        assert_eq!(root.list(INSTALL_DIR).unwrap(), all);
        let later = now + Duration::from_secs(3600);
        assert_eq!(forget_old(&root, &Layout::default(), Some(later)).unwrap(), 1);
        let mut rest = [new.version.as_str(), CURRENT, "state"];
        rest.sort_unstable();
        assert_eq!(root.list(INSTALL_DIR).unwrap(), rest);
        assert_eq!(forget_old(&root, &Layout::default(), None).unwrap(), 0);
    }

    #[test]
    fn a_truncated_version_is_copied_again() {
        let source = payload(&[("bin/crun", b"crun")]);
        let (dir, root) = host();
        let payload = Payload::open(source.path()).unwrap();
        payload.place(&root, &Layout::default()).unwrap();
        let file = dir.path().join("opt/quartermaster/current/bin/crun");
        fs::write(&file, b"cr").unwrap();
        assert!(payload.place(&root, &Layout::default()).unwrap().copied > 0);
        assert_eq!(fs::read(&file).unwrap(), b"crun");
    }

    #[test]
    fn below_another_prefix_the_program_is_made_to_run_from_there_and_still_held_against_its_list() {
        let built = program(&built_for(), 255);
        let source = payload(&[("bin/crun", &built), ("lib/libx.so", b"x")]);
        let (dir, root) = host();
        let layout = Layout::below("/home/kubernetes/bin").unwrap();
        let payload = Payload::open(source.path()).unwrap();
        assert!(payload.place(&root, &layout).unwrap().copied > 0);
        let file = dir
            .path()
            .join("home/kubernetes/bin/quartermaster/current/bin/crun");
        let there = fs::read(&file).unwrap();
        assert_eq!(there, program(&layout.current(), 255));
        assert_eq!(payload.place(&root, &layout).unwrap().copied, 0);
        let mut altered = there.clone();
        altered[20] ^= 1;
        // One byte changed, one cut, and one that would look for its libraries in the usual place.
        for damaged in [&altered[..], &there[..there.len() - 1], &built[..]] {
            fs::write(&file, damaged).unwrap();
            assert!(payload.place(&root, &layout).unwrap().copied > 0);
            assert_eq!(fs::read(&file).unwrap(), there);
        }
    }

    #[test]
    fn a_program_that_cannot_be_moved_is_refused_and_nothing_of_it_stays() {
        let source = payload(&[("bin/crun", &program(&built_for(), 40))]);
        let (_dir, root) = host();
        let layout = Layout::below("/home/kubernetes/bin").unwrap();
        let error = Payload::open(source.path())
            .unwrap()
            .place(&root, &layout)
            .unwrap_err();
        assert!(
            matches!(
                error,
                PayloadError::Relocation(ref path, _, RelocationError::NoRoom { .. }) if path == "bin/crun"
            ),
            "{error}"
        );
        assert_eq!(root.list(layout.install_dir()).unwrap(), Vec::<String>::new());
    }
}
