//! Taking a testbed down from what lies on disk and in its cgroups, whatever state it was left in.

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cgroups::Cgroups;
use crate::host::settings;
use crate::layout::{State, state_root};
use crate::process::end_all_in;
use crate::progress::Progress;
use crate::spec::check_testbed_name;
use crate::tool::Tool;
use crate::wait::wait_for;

/// Takes the testbed of this name down: its processes, cgroups, namespaces and files. What is not there is no error, so it
/// finishes after a crash, and may be run twice.
///
/// # Errors
/// If something can't be ended or removed; what was removed stays removed.
pub fn down(name: &str, progress: &Progress) -> Result<()> {
    check_testbed_name(name)?;
    let state = State::of(name);
    let cgroups = Cgroups::of(name)?;
    let all = cgroups.all()?;
    if !state.root().exists() && !all.exists() {
        progress.note(format!("no testbed {name} is up"));
        return Ok(());
    }
    progress.step(&format!("processes of {name} ended"), || {
        // Every namespace and every mount of a testbed lives through its processes only: all of them end here.
        end_all_in(&all)?;
        wait_for("the cgroups to be empty", Duration::from_secs(10), || {
            cgroups.remove_all().map(Some)
        })?;
        Ok(())
    })?;
    progress.step(&format!("disks and records of {name} removed"), || {
        let _lock = lock()?;
        remove(state.root())?;
        if names()?.is_empty() {
            settings::put_back()?;
        }
        Ok(())
    })
}

/// The names of the testbeds that have a state folder, up or left behind.
///
/// # Errors
/// If the state folder can't be read.
pub fn names() -> Result<Vec<String>> {
    let mut names = Vec::new();
    let entries = match fs::read_dir(state_root()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(names),
        Err(error) => {
            return Err(error).with_context(|| format!("can't read {}", state_root().display()));
        }
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Taken while the set of testbeds, or what they changed on the host, is changed.
///
/// # Errors
/// If the state folder can't be made.
pub fn lock() -> Result<File> {
    let root = state_root();
    fs::create_dir_all(&root).with_context(|| format!("can't make {}", root.display()))?;
    let path = root.join("lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("can't open {}", path.display()))?;
    file.lock()
        .with_context(|| format!("can't lock {}", path.display()))?;
    Ok(file)
}

fn remove(root: &Path) -> Result<()> {
    // A mount that somebody made below it must not be emptied along with it.
    Tool::new("rm")
        .args(["--recursive", "--force", "--one-file-system", "--"])
        .arg(root)
        .called(format!("removing {}", root.display()))
        .output()?;
    Ok(())
}
