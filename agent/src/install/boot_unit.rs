//! A unit that ends a swap which a power loss cut short, at the next boot. It is there only while a swap is open.
//!
//! It is a file for the next boot to find, so this boot's systemd need not be told of it: a reload runs every
//! generator of the host for nothing.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::layout::Layout;
use super::replacement::write_new;
use crate::checkpoint::{self, checkpoint};

/// Its name. Not the transient unit's: systemd starts no transient unit whose name has a file.
pub(crate) const BOOT_UNIT: &str = "quartermaster-apply-at-boot.service";
const UNITS: &str = "etc/systemd/system";
const WANTS: &str = "etc/systemd/system/multi-user.target.wants";

/// The unit's file and the link that has it started, below a root.
#[derive(Debug)]
pub(crate) struct BootUnit {
    file: PathBuf,
    link: PathBuf,
}

impl BootUnit {
    /// That of the host whose root this process sees at `root`.
    pub(crate) fn below(root: &Path) -> Self {
        Self {
            file: root.join(UNITS).join(BOOT_UNIT),
            link: root.join(WANTS).join(BOOT_UNIT),
        }
    }

    /// Puts it there for the journal of an install folder, the link last.
    pub(crate) fn put(&self, layout: &Layout) -> io::Result<()> {
        let text = text(layout);
        if fs::read_to_string(&self.file).is_ok_and(|there| there == text) && self.link.exists() {
            return Ok(());
        }
        self.remove()?;
        write_new(&self.file, text.as_bytes())?;
        if let Some(folder) = self.link.parent() {
            fs::create_dir_all(folder)?;
        }
        checkpoint(format_args!("link {BOOT_UNIT}"));
        std::os::unix::fs::symlink(Path::new("..").join(BOOT_UNIT), &self.link)?;
        self.sync()
    }

    /// Takes it away, the link first, and the folder of the link if nothing else is in it.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let mut gone = false;
        for path in [&self.link, &self.file] {
            if fs::symlink_metadata(path).is_err() {
                continue;
            }
            checkpoint(format_args!("remove {}", path.display()));
            fs::remove_file(path)?;
            gone = true;
        }
        if gone {
            if let Some(folder) = self.link.parent() {
                // Where something else is in it, this does nothing.
                let _ = fs::remove_dir(folder);
            }
            self.sync()?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        for path in [&self.file, &self.link] {
            match path.parent().map(File::open) {
                Some(Ok(folder)) => folder.sync_all()?,
                Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

fn text(layout: &Layout) -> String {
    let faults = checkpoint::folder()
        .map(|folder| format!("Environment={}={}\n", checkpoint::VARIABLE, folder.display()))
        .unwrap_or_default();
    let (agent, journal) = (layout.agent_binary(), layout.journal());
    format!(
        "[Unit]\n\
         Description=Quartermaster: ends a change of containerd's configuration that a power loss cut short\n\
         After=dbus.socket containerd.service\n\
         StartLimitIntervalSec=600\n\
         StartLimitBurst=20\n\
         \n\
         [Service]\n\
         Type=exec\n\
         {faults}ExecStart={agent} apply {journal}\n\
         Restart=on-failure\n\
         RestartSec=1\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_whole_and_goes_without_a_trace() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join(UNITS)).unwrap();
        let unit = BootUnit::below(root.path());
        let layout = Layout::default();
        unit.put(&layout).unwrap();
        unit.put(&layout).unwrap();
        let through_link = fs::read_to_string(root.path().join(WANTS).join(BOOT_UNIT)).unwrap();
        assert!(through_link.contains("ExecStart=/opt/quartermaster/current/bin/quartermaster-agent apply"));
        let other = text(&Layout::below("/srv").unwrap());
        assert!(other.contains(
            "ExecStart=/srv/quartermaster/current/bin/quartermaster-agent apply /srv/quartermaster/state/journal.json"
        ));
        assert!(through_link.contains("After=dbus.socket containerd.service"));
        unit.remove().unwrap();
        unit.remove().unwrap();
        assert_eq!(fs::read_dir(root.path().join(UNITS)).unwrap().count(), 0);
    }

    #[test]
    fn units_of_others_stay() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join(WANTS)).unwrap();
        fs::write(root.path().join(WANTS).join("kubelet.service"), "x").unwrap();
        let unit = BootUnit::below(root.path());
        unit.put(&Layout::default()).unwrap();
        unit.remove().unwrap();
        assert_eq!(fs::read_dir(root.path().join(WANTS)).unwrap().count(), 1);
    }
}
