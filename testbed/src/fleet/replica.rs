//! A replica of the real coordinator, run as a process in the fabric, and what it costs.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use quartermaster_proto::{ENROLLMENT_PORT, HEALTH_PORT, METRICS_PORT};

use crate::cluster::Cluster;
use crate::control_plane::http_get;
use crate::deployment::workspace;
use crate::process::{Background, Process};
use crate::tool::tail_of;

/// One replica of the coordinator; several have addresses of their own.
pub(super) struct Replica {
    name: String,
    address: Ipv4Addr,
    program: PathBuf,
    kubeconfig: PathBuf,
    flags: Vec<String>,
    starts: u32,
    process: Option<Background>,
    logs: Vec<PathBuf>,
    /// It was stopped by a signal and is to be woken by another.
    pub paused: bool,
}

/// What a process has used.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Usage {
    /// Of all processors.
    pub cpu: Duration,
    /// The most memory that was resident, in bytes.
    pub peak: u64,
    /// Resident memory now, in bytes.
    pub resident: u64,
}

/// How the coordinator is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Profile {
    /// As it is shipped, unless `TESTBED_PROFILE=dev` asks for less: then no number means anything.
    Shipped,
    /// As the tests are, which have built most of it already.
    Dev,
}

/// Builds the coordinator for this machine.
///
/// # Errors
/// If it does not build.
pub(super) fn build(profile: Profile) -> Result<PathBuf> {
    let dev = profile == Profile::Dev || std::env::var("TESTBED_PROFILE").is_ok_and(|name| name == "dev");
    let root = workspace();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&root).args([
        "build",
        "--quiet",
        "--locked",
        "--package",
        "quartermaster-coordinator",
    ]);
    if !dev {
        cargo.arg("--release");
    }
    let status = cargo.status().context("cargo can't be run")?;
    ensure!(status.success(), "the coordinator does not build ({status})");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let program = target
        .join(if dev { "debug" } else { "release" })
        .join("quartermaster-coordinator");
    ensure!(program.is_file(), "{} was not built", program.display());
    Ok(program)
}

impl Replica {
    /// The replica of this number, from 0; it does not run yet.
    pub(super) fn new(number: u8, program: &Path, kubeconfig: &Path, flags: &[String]) -> Self {
        Self {
            name: format!("coordinator-{}", char::from(b'a' + number)),
            address: Ipv4Addr::new(127, 0, 0, 10 + number),
            program: program.to_owned(),
            kubeconfig: kubeconfig.to_owned(),
            flags: flags.to_vec(),
            starts: 0,
            process: None,
            logs: Vec::new(),
            paused: false,
        }
    }

    /// The name under which it holds the Lease.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where it enrols agents.
    pub(super) fn enrollment(&self) -> SocketAddr {
        SocketAddrV4::new(self.address, ENROLLMENT_PORT).into()
    }

    /// Starts it, and waits until it answers that it is ready.
    pub(super) fn start(&mut self, cluster: &Cluster) -> Result<()> {
        self.starts += 1;
        let mut args = vec![self.program.clone().into(), "run".into()];
        let listen = |name: &str, port: u16| format!("--{name}-listen={}:{port}", self.address).into();
        args.extend([
            format!("--pod-name={}", self.name).into(),
            listen("enrollment", ENROLLMENT_PORT),
            listen("health", HEALTH_PORT),
            listen("metrics", METRICS_PORT),
        ]);
        args.extend(self.flags.iter().map(Into::into));
        let env = vec![
            ("KUBECONFIG", self.kubeconfig.clone().into_os_string()),
            ("NO_COLOR", "1".into()),
            // Two replicas of one machine, and failures that are drawn are no reason to halt a rollout.
            (
                "QUARTERMASTER_OPERATOR_SOCKET",
                cluster
                    .state()
                    .join(format!("{}.sock", self.name))
                    .into_os_string(),
            ),
            ("QUARTERMASTER_HALT_AFTER", "1000".into()),
        ];
        let role = format!("{}-{}", self.name, self.starts);
        let process = cluster.start_in_fabric(&role, args, env)?;
        self.logs.push(process.log.clone());
        self.process = Some(process);
        self.paused = false;
        Ok(())
    }

    /// Waits until it answers that it is ready.
    pub(super) fn wait_until_ready(&self) -> Result<()> {
        let process = self.process.as_ref().context("it was not started")?;
        let ready = SocketAddrV4::new(self.address, METRICS_PORT);
        process.wait_until("to be ready", Duration::from_secs(30), || {
            Ok(http_get(ready, "/readyz")?.starts_with("HTTP/1.1 200"))
        })
    }

    /// Whether its process is there, paused or not.
    pub(super) fn runs(&self) -> bool {
        self.process().is_some_and(|process| process.is_alive())
    }

    fn process(&self) -> Option<Process> {
        self.process.as_ref().map(|process| process.process)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let Some(process) = self.process().filter(Process::is_alive) else {
            bail!("{} does not run", self.name);
        };
        kill(Pid::from_raw(process.pid), signal).with_context(|| format!("{signal} to {}", self.name))
    }

    /// Ends it as a power loss does.
    pub(super) fn kill(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        self.wait_until_gone()
    }

    /// Ends it as a kubelet does.
    pub(super) fn terminate(&mut self) -> Result<()> {
        self.signal(Signal::SIGTERM)?;
        self.wait_until_gone()
    }

    fn wait_until_gone(&mut self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        while self.runs() {
            ensure!(Instant::now() < end, "{} does not end", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
        self.process = None;
        self.paused = false;
        Ok(())
    }

    /// Stops it in its tracks.
    pub(super) fn pause(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        self.paused = true;
        Ok(())
    }

    /// Lets it go on.
    pub(super) fn resume(&mut self) -> Result<()> {
        self.paused = false;
        self.signal(Signal::SIGCONT)
    }

    /// What it has used so far.
    pub(super) fn usage(&self) -> Result<Usage> {
        let process = self.process().context("it does not run")?;
        let read = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", process.pid));
        let ticks = sysconf(SysconfVar::CLK_TCK)?.unwrap_or(100);
        read_usage(
            &read("stat")?,
            &read("status")?,
            u64::try_from(ticks).unwrap_or(100),
        )
        .with_context(|| format!("/proc tells nothing of {}", self.name))
    }

    /// Its metrics, by name and labels as they are written.
    pub(super) fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let text = http_get(SocketAddrV4::new(self.address, METRICS_PORT), "/metrics")?;
        Ok(read_metrics(&text))
    }

    /// The last lines of all it has logged.
    pub(super) fn log_tail(&self, lines: usize) -> String {
        let mut tail = Vec::new();
        for log in self.logs.iter().rev() {
            let missing = lines.saturating_sub(tail.iter().map(|part: &String| part.lines().count()).sum());
            if missing == 0 {
                break;
            }
            tail.insert(0, tail_of(log, missing));
        }
        tail.join("\n")
    }

    /// The first panic or error of the process itself that its logs tell of.
    pub(super) fn panic(&self) -> Option<String> {
        self.logs.iter().find_map(|log| {
            let text = fs::read_to_string(log).ok()?;
            text.lines()
                .find(|line| line.contains("panicked at"))
                .map(|line| format!("{}: {line}", log.display()))
        })
    }
}

/// Reads `/proc/PID/stat` and `/proc/PID/status`.
fn read_usage(stat: &str, status: &str, ticks: u64) -> Option<Usage> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let kib = |key: &str| -> Option<u64> {
        let line = status.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some(Usage {
        cpu: Duration::from_millis((user + system) * 1000 / ticks),
        peak: kib("VmHWM:")? * 1024,
        resident: kib("VmRSS:")? * 1024,
    })
}

/// Reads the text format of Prometheus.
pub(super) fn read_metrics(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (name, value) = line.trim().rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_process_used() {
        let stat = "42 (a (b) c) S 1 42 42 0 -1 4194560 1 2 3 4 150 50 7 8 20 0 1 0 987654 11 12";
        let status = "Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\n";
        let wanted = Usage {
            cpu: Duration::from_secs(2),
            peak: 2048 * 1024,
            resident: 1024 * 1024,
        };
        assert_eq!(read_usage(stat, status, 100), Some(wanted));
    }

    #[test]
    fn reads_metrics_with_their_labels() {
        let text = "# TYPE a counter\na_total{kind=\"node\"} 7\nb 1.5\nHTTP/1.1 200 OK\n";
        let metrics = read_metrics(text);
        assert_eq!(metrics["a_total{kind=\"node\"}"], 7.0);
        assert_eq!(metrics["b"], 1.5);
    }
}
