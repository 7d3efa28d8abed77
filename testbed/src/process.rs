//! The processes of a testbed: started into its cgroups, recorded with their start times, ended by what the cgroups hold.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::tool::tail_of;
use crate::wait::{Look, wait_for, wait_or_give_up};

/// One process, named so that another one with a recycled id is not taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id on the host.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
}

impl Process {
    /// The process that has this id now; `None` if there is none, or only its exit status is left.
    #[must_use]
    pub fn now(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let started = start_time(&stat)?;
        Some(Self { pid, started })
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        Self::now(self.pid) == Some(*self)
    }

    /// Ends it at once; one that has ended is no error.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn kill(&self) -> Result<()> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(());
        };
        let Ok(held) = pidfd_open(pid, PidfdFlags::empty()) else {
            return Ok(());
        };
        // Held by a descriptor and looked at again, so that a recycled id is never hit.
        if self.is_alive() {
            pidfd_send_signal(&held, Signal::KILL)
                .with_context(|| format!("can't end the process {}", self.pid))?;
        }
        Ok(())
    }

    /// Its network namespace, as a path that `nsenter` and `ip` take.
    #[must_use]
    pub fn network(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.pid))
    }

    /// Reads what [`Process::record`] wrote.
    #[must_use]
    pub fn recorded(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Writes it down for another run of this program.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn record(&self, path: &Path) -> Result<()> {
        fs::write(path, serde_json::to_vec(self)?).with_context(|| format!("can't write {}", path.display()))
    }
}

/// The 22nd field of /proc/PID/stat. The second one, the name, may hold spaces and brackets; a zombie counts as gone.
fn start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// A process to be started in the background.
pub struct Launch<'a> {
    /// Names its log and its record.
    pub role: &'a str,
    /// The command line.
    pub args: Vec<OsString>,
    /// Variables in its environment, beside ours.
    pub env: Vec<(&'a str, OsString)>,
    /// The `cgroup.procs` files it joins before it becomes its program.
    pub cgroups: &'a [PathBuf],
    /// The folder of records.
    pub run: &'a Path,
    /// The folder of logs.
    pub logs: &'a Path,
}

/// A process running in the background.
#[derive(Debug, Clone)]
pub struct Background {
    /// What it is.
    pub role: String,
    /// Which it is.
    pub process: Process,
    /// Where its words go.
    pub log: PathBuf,
}

/// Joins the cgroups named before `--`, writes its id, and becomes the program after `--`. It keeps no descriptor of whoever
/// runs us: a lock that a wrapper took for a command (`exec 9>lock; flock 9`) was held for as long as the testbed stood.
const JOIN: &str = r#"set -e
pidfile=$1; shift
exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
while [ "$1" != -- ]; do echo 0 > "$1"; shift; done
shift
echo $$ > "$pidfile.new"; mv "$pidfile.new" "$pidfile"
exec "$@""#;

impl Launch<'_> {
    /// Starts it, in a session of its own so that it outlives us, and waits until it has become its program.
    ///
    /// # Errors
    /// If it can't be started, or could not join its cgroups; with its log's last lines.
    pub fn start(self) -> Result<Background> {
        for dir in [self.run, self.logs] {
            fs::create_dir_all(dir).with_context(|| format!("can't make {}", dir.display()))?;
        }
        let log = self.logs.join(format!("{}.log", self.role));
        let pidfile = self.run.join(format!("{}.pid", self.role));
        let _ = fs::remove_file(&pidfile);
        let out = File::create(&log).with_context(|| format!("can't write {}", log.display()))?;
        let err = out.try_clone()?;
        let status = Command::new("setsid")
            .args(["--fork", "sh", "-c", JOIN, "sh"])
            .arg(&pidfile)
            .args(self.cgroups)
            .arg("--")
            .args(&self.args)
            .envs(self.env)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .status()
            .context("can't run setsid")?;
        if !status.success() {
            bail!("can't start {} ({status}): {}", self.role, tail_of(&log, 5));
        }
        let pid: i32 = wait_for(
            &format!("{} to start", self.role),
            Duration::from_secs(10),
            || {
                Ok(fs::read_to_string(&pidfile)
                    .ok()
                    .and_then(|text| text.trim().parse().ok()))
            },
        )
        .with_context(|| format!("its log says: {}", tail_of(&log, 5)))?;
        let process = Process::now(pid).ok_or_else(|| {
            anyhow!(
                "{} ended at once:\n{}\n  its whole log: {}",
                self.role,
                tail_of(&log, 15),
                log.display()
            )
        })?;
        process.record(&record_path(self.run, self.role))?;
        Ok(Background {
            role: self.role.to_owned(),
            process,
            log,
        })
    }
}

/// Where the process of a role is recorded.
#[must_use]
pub fn record_path(run: &Path, role: &str) -> PathBuf {
    run.join(format!("{role}.json"))
}

impl Background {
    /// Waits until `ready` says so, and gives up as soon as the process is dead.
    ///
    /// # Errors
    /// The deadline passed or the process ended; with its log's last lines.
    pub fn wait_until(
        &self,
        state: &str,
        deadline: Duration,
        mut ready: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let what = format!("{} {state}", self.role);
        wait_or_give_up(&what, deadline, || match ready() {
            Ok(true) => Look::Here(()),
            _ if !self.process.is_alive() => Look::Never(anyhow!("{} has ended", self.role)),
            Ok(false) => Look::NotYet("not yet".to_owned()),
            Err(error) => Look::NotYet(format!("{error:#}")),
        })
        .with_context(|| {
            format!(
                "{} did not come up; the end of {}:\n{}",
                self.role,
                self.log.display(),
                tail_of(&self.log, 15)
            )
        })
    }
}

/// Ends every process in a cgroup of the tracking hierarchy and below it, and waits until none is left.
///
/// Each is held by a descriptor and looked at again before the signal, so that a recycled id is never hit.
///
/// # Errors
/// If some are still there after twenty seconds.
pub fn end_all_in(cgroup: &Path) -> Result<()> {
    wait_for(
        &format!("the processes in {} to end", cgroup.display()),
        Duration::from_secs(20),
        || {
            let found = members(cgroup)?;
            for pid in &found {
                kill_if_in(*pid, cgroup)?;
            }
            if found.is_empty() {
                Ok(Some(()))
            } else {
                bail!("still there: {found:?}")
            }
        },
    )
    .map_err(Into::into)
}

/// The ids of all processes in a cgroup and below it; none if it does not exist.
///
/// # Errors
/// If the cgroup filesystem can't be read.
pub fn members(cgroup: &Path) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    let mut dirs = vec![cgroup.to_owned()];
    while let Some(dir) = dirs.pop() {
        // A cgroup may vanish between two looks; what was in it is gone or elsewhere below.
        let Ok(procs) = fs::read_to_string(dir.join("cgroup.procs")) else {
            continue;
        };
        found.extend(procs.lines().filter_map(|line| line.parse::<i32>().ok()));
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                dirs.push(entry.path());
            }
        }
    }
    found.retain(|pid| *pid > 0);
    Ok(found)
}

fn kill_if_in(pid: i32, cgroup: &Path) -> Result<()> {
    let Some(id) = Pid::from_raw(pid) else {
        return Ok(());
    };
    let Ok(held) = pidfd_open(id, PidfdFlags::empty()) else {
        return Ok(());
    };
    if !members(cgroup)?.contains(&pid) {
        return Ok(());
    }
    match pidfd_send_signal(&held, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("can't end process {pid}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_start_time_behind_a_name_with_brackets() {
        let stat = "42 (a) S (b)) S 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 11 12";
        assert_eq!(start_time(stat), Some(987_654));
    }

    #[test]
    fn a_zombie_is_not_alive() {
        let stat = "42 (x) Z 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 11 12";
        assert_eq!(start_time(stat), None);
    }

    #[test]
    fn a_process_with_a_recycled_id_is_another() {
        let me = Process::now(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(me.is_alive());
        let other = Process {
            started: me.started + 1,
            ..me
        };
        assert!(!other.is_alive());
    }

    #[test]
    fn a_cgroup_that_is_gone_has_no_members() {
        assert_eq!(members(Path::new("/no/such")).unwrap(), Vec::<i32>::new());
        end_all_in(Path::new("/no/such")).unwrap();
    }
}
