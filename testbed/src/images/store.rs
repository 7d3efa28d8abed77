//! A store of buildah's own, inside the cache: nothing of the host's container tools is read or changed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host::{find, packages};
use crate::progress::Progress;
use crate::tool::Tool;

/// Held while images are built: the lock of the store goes with it.
pub(super) struct Store {
    dir: PathBuf,
    driver: &'static str,
    log: PathBuf,
    _lock: File,
}

impl Store {
    /// Opens the store in `dir` and waits while another process builds there.
    pub(super) fn open(dir: &Path, log: &Path, progress: &Progress) -> Result<Self> {
        let missing: Vec<&str> = ["buildah", "debootstrap", "unshare"]
            .into_iter()
            .filter(|program| find(program).is_none())
            .map(|program| {
                if program == "unshare" {
                    "util-linux"
                } else {
                    program
                }
            })
            .collect();
        if !missing.is_empty() {
            packages::install(progress, &missing, log)?;
        }
        fs::create_dir_all(dir.join("tmp")).with_context(|| format!("can't make {}", dir.display()))?;
        let path = dir.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)?;
        if lock.try_lock().is_err() {
            progress.note("images are being built by another process; waiting for it");
            lock.lock()
                .with_context(|| format!("can't lock {}", path.display()))?;
        }
        // Only the last build's words are of use.
        let _ = fs::remove_file(log);
        // What a killed build left mounted is gone with its namespace, but is still counted as mounted here.
        let run = dir.join("run");
        if run.exists() {
            fs::remove_dir_all(&run).with_context(|| format!("can't empty {}", run.display()))?;
        }
        // Base images are made here and never come from a registry; a host without buildah's recommended packages has no
        // policy at all, and buildah then takes no image.
        fs::write(
            dir.join("policy.json"),
            r#"{"default": [{"type": "insecureAcceptAnything"}]}"#,
        )?;
        let store = Self {
            driver: driver(dir)?,
            dir: dir.to_owned(),
            log: log.to_owned(),
            _lock: lock,
        };
        store.clear()?;
        Ok(store)
    }

    /// Removes what a build that was killed left: working containers and folders to mount them in.
    fn clear(&self) -> Result<()> {
        self.buildah().args(["rm", "--all"]).logged(&self.log)?;
        for entry in fs::read_dir(self.dir.join("tmp"))?.flatten() {
            // All but the folders that builds mount with type=cache.
            if entry.file_name() != "buildah-cache" {
                let path = entry.path();
                fs::remove_dir_all(&path)
                    .or_else(|_| fs::remove_file(&path))
                    .with_context(|| format!("can't remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// The store's folder.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The log of everything done in it.
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// A buildah of this store, with the arguments still to come. Its mounts and all its processes end with it.
    pub(super) fn buildah(&self) -> Tool {
        contained()
            .arg("buildah")
            .args(["--storage-driver", self.driver, "--root"])
            .arg(self.dir.join("root"))
            .arg("--runroot")
            .arg(self.dir.join("run"))
            // Where it keeps what a build mounts with type=cache.
            .env("TMPDIR", self.dir.join("tmp"))
    }

    /// A subcommand that reads or writes images.
    pub(super) fn with_policy(&self, subcommand: &str) -> Tool {
        self.buildah()
            .arg(subcommand)
            .arg("--signature-policy")
            .arg(self.dir.join("policy.json"))
    }

    /// Makes an image: `content` is an archive of its files, `script` what is then run in it, `variables` the
    /// environment of whatever is run in it later. Neither is needed.
    pub(super) fn make(&self, image: &NewImage) -> Result<()> {
        let from = self
            .with_policy("from")
            .args(["--pull-never", image.base])
            .output()?;
        let container = from.trim();
        if let Some(content) = &image.content {
            self.buildah()
                .args(["add", "--quiet", container])
                .arg(content)
                .arg("/")
                .logged(&self.log)?;
        }
        if let Some(script) = &image.script {
            self.buildah()
                .args(["run", "--isolation", "chroot"])
                .args(image.volumes.iter().flat_map(|volume| ["--volume", volume]))
                .args([container, "--", "sh", "-euc", script])
                .called(format!("making the stand-in for {}", image.name))
                .logged(&self.log)?;
        }
        self.buildah()
            .arg("config")
            .args(image.variables.iter().flat_map(|variable| ["--env", variable]))
            .arg(container)
            .logged(&self.log)?;
        self.with_policy("commit")
            .args(["--quiet", "--rm", container, image.name])
            .logged(&self.log)?;
        Ok(())
    }
}

/// An image to be made by [`Store::make`].
pub(super) struct NewImage<'a> {
    pub(super) name: &'a str,
    /// Another image of the store, or `scratch`.
    pub(super) base: &'a str,
    pub(super) content: Option<PathBuf>,
    pub(super) script: Option<String>,
    /// `/on/the/host:/in/the/image:ro`, for the script.
    pub(super) volumes: &'a [String],
    /// `NAME=value`
    pub(super) variables: &'a [&'a str],
}

/// A process in a mount and a process namespace of its own, which end together with it, also when it is killed.
pub(super) fn contained() -> Tool {
    Tool::new("unshare").args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"])
}

/// How layers are kept: as overlays where the kernel can lay one over this folder, else as full copies. Asked once: a
/// store can't be opened with another driver than it was made with.
fn driver(dir: &Path) -> Result<&'static str> {
    let chosen = dir.join("driver");
    match fs::read_to_string(&chosen).as_deref() {
        Ok("overlay") => return Ok("overlay"),
        Ok("vfs") => return Ok("vfs"),
        _ => {}
    }
    let probe = dir.join("probe");
    for sub in ["lower", "upper", "work", "merged"] {
        fs::create_dir_all(probe.join(sub))?;
    }
    let mounts = contained()
        .args([
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            "lowerdir=lower,upperdir=upper,workdir=work",
            "merged",
        ])
        .dir(&probe)
        .output()
        .is_ok();
    fs::remove_dir_all(&probe)?;
    let driver = if mounts { "overlay" } else { "vfs" };
    fs::write(&chosen, driver)?;
    Ok(driver)
}
