//! Stage 4: the node's own containerd, booted on the candidate in a sandbox that systemd makes.
//!
//! Two daemons run side by side, one on the untouched file and one on the candidate, each with a private mount
//! and network namespace, scratch folders and a socket of its own. What their CRI serves is compared. The running
//! daemon is not touched.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use zbus::wire::Variant;

use super::detect::Detected;
use super::layout::RUN_DIR;
use crate::checkpoint::checkpoint;
use crate::config::rehearsable;
use crate::containerd::{DEFAULT_CONFIG, Daemon, DaemonError, Difference, Expected, Served, compare};
use crate::failure::Reported;
use crate::host::{HostDir, HostRoot, Property, Systemd, SystemdError};

/// For both daemons together.
const DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
const STOP: Duration = Duration::from_secs(5);
/// Where a daemon sees its scratch folder, the same for both, so that no path differs in what they report.
const INSIDE: &str = "/run/quartermaster/rehearsal";
const LOG_TAIL: usize = 1500;

/// Why a rehearsal did not end well.
#[derive(Debug, Error)]
pub(crate) enum RehearsalError {
    /// The sandbox could not be made.
    #[error("the rehearsal could not be set up in {RUN_DIR}: {0}")]
    Scratch(#[from] io::Error),
    /// systemd did not run it.
    #[error("the rehearsal could not be run: {0}")]
    Systemd(#[from] SystemdError),
    /// containerd did not come up.
    #[error("containerd does not come up on {which}: {why}")]
    NotUp {
        /// The untouched or the changed configuration.
        which: &'static str,
        /// The daemon's own words.
        why: String,
    },
    /// It would serve something else.
    #[error("with the changed configuration {0}")]
    Different(#[from] Difference),
}

impl Reported for RehearsalError {
    fn reason(&self) -> FailureReason {
        FailureReason::RehearsalFailed
    }

    fn remedy(&self) -> String {
        match self {
            Self::NotUp {
                which: UNTOUCHED, ..
            } => "containerd would not start on its present configuration either; repair that first. Nothing was touched.".into(),
            _ => "Nothing was touched. `quartermaster-agent plan` on the node shows the change.".into(),
        }
    }
}

const UNTOUCHED: &str = "its present configuration";
const CHANGED: &str = "the changed configuration";

/// What a rehearsal is about.
pub(crate) struct Script<'a> {
    /// The changed file; `None` where the file goes away.
    pub(crate) candidate: Option<&'a [u8]>,
    pub(crate) expected: Expected<'a>,
}

/// Rehearses a change.
///
/// # Errors
/// [`RehearsalError`]; nothing of the node was touched.
pub(crate) async fn rehearse(
    root: &Arc<HostRoot>,
    detected: &Detected,
    script: Script<'_>,
) -> Result<(), RehearsalError> {
    let run = root.make_dir(RUN_DIR)?;
    let id = Uuid::new_v4().simple().to_string();
    let name = format!("r-{}", &id[..8]);
    let stage = Stage {
        root,
        detected,
        run: &run,
        name: &name,
    };
    let result = stage.play(script).await;
    stage.clear().await;
    let (before, after, expected) = result?;
    compare(&before, &after, expected)?;
    Ok(())
}

/// Stops rehearsals that a crash left behind and removes their folders.
pub(crate) async fn sweep(root: &HostRoot, systemd: &Systemd) {
    let Ok(run) = root.dir(RUN_DIR) else {
        return;
    };
    for name in root.list(RUN_DIR).unwrap_or_default() {
        if name.starts_with("r-") {
            for side in Side::BOTH {
                let _ = systemd.stop(&unit_name(&name, side), STOP).await;
            }
            let _ = run.remove_tree(&name);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Untouched,
    Changed,
}

impl Side {
    const BOTH: [Self; 2] = [Self::Untouched, Self::Changed];

    fn folder(self) -> &'static str {
        match self {
            Self::Untouched => "a",
            Self::Changed => "b",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Untouched => UNTOUCHED,
            Self::Changed => CHANGED,
        }
    }
}

fn unit_name(name: &str, side: Side) -> String {
    format!("quartermaster-rehearsal-{name}-{}.service", side.folder())
}

struct Stage<'a> {
    root: &'a Arc<HostRoot>,
    detected: &'a Detected,
    run: &'a HostDir,
    name: &'a str,
}

impl Stage<'_> {
    async fn play<'e>(&self, script: Script<'e>) -> Result<(Served, Served, Expected<'e>), RehearsalError> {
        let mut private = std::fs::DirBuilder::new();
        private.mode(0o700);
        checkpoint("make the rehearsal's folder");
        private.create(self.run.path(self.name))?;
        let files = self.files(&script);
        for (side, bytes) in Side::BOTH.into_iter().zip(files) {
            let folder = self.run.path(self.name).join(side.folder());
            private.create(&folder)?;
            if let Some(bytes) = bytes {
                checkpoint(format_args!("write the rehearsal's file {}", side.folder()));
                std::fs::write(folder.join("config.toml"), rehearsable(bytes))?;
            }
        }
        let deadline = Instant::now() + DEADLINE;
        let (before, after) = tokio::try_join!(
            self.boot(Side::Untouched, files[0].is_some(), deadline),
            self.boot(Side::Changed, files[1].is_some(), deadline),
        )?;
        Ok((before, after, script.expected))
    }

    /// What the two daemons read. A file that goes away is still there on the host, so its absence is played by
    /// one that says nothing.
    fn files<'b>(&'b self, script: &Script<'b>) -> [Option<&'b [u8]>; 2] {
        let config = &self.detected.config;
        let nothing: &[u8] = if config.containerd.major >= 2 {
            b"version = 3\n"
        } else {
            b"version = 2\n"
        };
        let changed = match (&config.file, script.candidate) {
            (Some(_), None) => Some(nothing),
            (_, candidate) => candidate,
        };
        [config.file.as_deref(), changed]
    }

    async fn boot(&self, side: Side, has_file: bool, deadline: Instant) -> Result<Served, RehearsalError> {
        let scratch = format!("{RUN_DIR}/{}/{}", self.name, side.folder());
        let unit = unit_name(self.name, side);
        let properties = properties(
            &self.detected.binary,
            &self.detected.config.path,
            self.detected.config.file.is_some(),
            has_file,
            &scratch,
        );
        let job = self
            .detected
            .systemd
            .start_transient(&unit, &properties, DEADLINE)
            .await?;
        let not_up = |why: String| RehearsalError::NotUp {
            which: side.words(),
            why,
        };
        if !job.is_done() {
            return Err(not_up(format!(
                "its unit ended as {:?}; {}",
                job.0,
                self.log(side)
            )));
        }
        let socket = format!("{scratch}/c.sock");
        let mut polls: u32 = 0;
        loop {
            let daemon = Daemon::with_deadline(Arc::clone(self.root), &socket, Duration::from_secs(2));
            let last = match daemon.served().await {
                Ok(served) => return Ok(served),
                Err(error @ (DaemonError::NoCri { .. } | DaemonError::Unreadable { .. })) => {
                    return Err(not_up(format!("{error}; {}", self.log(side))));
                }
                Err(error) => error,
            };
            polls += 1;
            if polls.is_multiple_of(10) && !self.detected.systemd.is_active(&unit).await? {
                return Err(not_up(self.log(side)));
            }
            if Instant::now() > deadline {
                return Err(not_up(format!(
                    "not within {} s ({last}); {}",
                    DEADLINE.as_secs(),
                    self.log(side)
                )));
            }
            sleep(POLL).await;
        }
    }

    /// What the daemon said, from its log: the lines above information if there are any, else its end.
    fn log(&self, side: Side) -> String {
        let path = self.run.path(self.name).join(side.folder()).join("log");
        let text = std::fs::read(path).unwrap_or_default();
        complaints(&String::from_utf8_lossy(&text))
    }

    async fn clear(&self) {
        for side in Side::BOTH {
            let unit = unit_name(self.name, side);
            if let Err(error) = self.detected.systemd.stop(&unit, STOP).await {
                tracing::warn!(%unit, %error, "a rehearsal's unit could not be stopped");
            }
            self.detected.systemd.reset_failed(&unit).await;
        }
        if let Err(error) = self.run.remove_tree(self.name) {
            tracing::warn!(folder = self.name, %error, "a rehearsal's folder could not be removed");
        }
    }
}

/// The lines of a daemon's log that tell what went wrong, without those that every start has.
pub(crate) fn complaints(log: &str) -> String {
    let grave: Vec<&str> = log
        .lines()
        .filter(|line| {
            line.contains("level=fatal")
                || line.contains("level=error")
                || line.starts_with("containerd: ")
                || line.contains("invalid plugin config")
                || line.contains("failed to load plugin") && line.contains("cri")
        })
        .collect();
    let mut seen = BTreeSet::new();
    let chosen: Vec<&str> = if grave.is_empty() {
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(3)..].to_vec()
    } else {
        grave.into_iter().filter(|line| seen.insert(*line)).collect()
    };
    if chosen.is_empty() {
        return "containerd said nothing".to_owned();
    }
    // The end matters most: containerd's last words say why it gave up.
    let text = chosen.join(" | ");
    let mut start = text.len().saturating_sub(LOG_TAIL);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    format!("containerd's own words: {}", &text[start..])
}

fn properties(
    binary: &str,
    config_path: &str,
    config_exists: bool,
    has_file: bool,
    scratch: &str,
) -> Vec<Property> {
    let inside = |name: &str| format!("{INSIDE}/{name}");
    // The file stands at its real place where that can be covered, so that relative imports lead where they do.
    let covered = config_exists && has_file;
    // A file that is named and not there is fatal; one that is not named and not there means the defaults.
    let config = match (covered, has_file) {
        (true, _) => Some(config_path.to_owned()),
        (false, true) => Some(inside("config.toml")),
        (false, false) if config_path == DEFAULT_CONFIG => None,
        (false, false) => Some(config_path.to_owned()),
    };
    let mut arguments = vec![binary.to_owned()];
    if let Some(config) = config {
        arguments.extend(["--config".to_owned(), config]);
    }
    for (flag, name) in [("--root", "root"), ("--state", "state"), ("--address", "c.sock")] {
        arguments.extend([flag.to_owned(), inside(name)]);
    }
    let empty = |path: &str| (path.to_owned(), String::new());
    let bind = |from: String, to: String| (from, to, false, 0u64);
    let mut properties: Vec<Property> = vec![
        (
            "Description",
            text("containerd on a candidate configuration, in a sandbox"),
        ),
        ("Type", text("exec")),
        ("CollectMode", text("inactive-or-failed")),
        (
            "ExecStart",
            Variant::from(vec![(binary.to_owned(), arguments, false)]),
        ),
        ("PrivateMounts", Variant::from(true)),
        ("PrivateNetwork", Variant::from(true)),
        ("ProtectSystem", text("strict")),
        (
            "TemporaryFileSystem",
            Variant::from(vec![empty("/run"), empty("/tmp"), empty("/var/lib/containerd")]),
        ),
        (
            "BindPaths",
            Variant::from(vec![bind(scratch.to_owned(), INSIDE.to_owned())]),
        ),
        ("RuntimeMaxUSec", Variant::from(micros(DEADLINE * 2))),
        ("TimeoutStopUSec", Variant::from(micros(Duration::from_secs(2)))),
        ("StandardOutputFile", Variant::from(format!("{scratch}/log"))),
        ("StandardErrorFile", Variant::from(format!("{scratch}/log"))),
    ];
    if covered {
        properties.push((
            "BindReadOnlyPaths",
            Variant::from(vec![bind(
                format!("{scratch}/config.toml"),
                config_path.to_owned(),
            )]),
        ));
    }
    properties
}

fn text(text: &str) -> Variant<'static> {
    Variant::from(text.to_owned())
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grave_lines_of_a_log_are_chosen() {
        let log = "time=1 level=info msg=\"starting\"\ntime=2 level=warning msg=\"failed to load plugin\" error=\"invalid plugin config: no corresponding runtime\"\ncontainerd: failed to load TOML\n";
        let words = complaints(log);
        assert!(words.contains("no corresponding runtime"), "{words}");
        assert!(words.contains("failed to load TOML"), "{words}");
        assert!(!words.contains("starting"), "{words}");
        let plugin = "level=warning msg=\"failed to load plugin\" error=\"no default routes\" id=io.containerd.grpc.v1.cri";
        assert!(complaints(&format!("{plugin}\nbooted")).contains("no default routes"));
        assert!(complaints("a\nb\nc\nd").ends_with("b | c | d"));
        assert_eq!(complaints(""), "containerd said nothing");
    }

    #[test]
    fn a_socket_of_a_rehearsal_is_short_enough_to_bind() {
        let longest = format!("{INSIDE}/c.sock.ttrpc");
        assert!(longest.len() < 108);
    }
}
