//! The agent as a tool for a person on one node: what it prints, and its exit codes.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::v1::{FailureReason, InstallState};
use serde_json::json;

use crate::cli::Host;
use crate::config::Plan;
use crate::describe::{describe, locate};
use crate::failure::Failure;
use crate::host::HostRoot;
use crate::install::{self, Done, Event, Progress, Stop, Target};
use crate::pull::{ImageEvent, Order, Sink, pull};

/// Exit codes.
const ERROR: u8 = 1;
const REFUSED: u8 = 3;
const NOTHING_TO_DO: u8 = 4;
const ROLLED_BACK: u8 = 5;

/// Colours, where a person sees them.
#[derive(Debug, Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn new() -> Self {
        Self(std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none())
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    fn diff(self, diff: &str) -> String {
        diff.lines()
            .map(|line| match line.as_bytes().first() {
                Some(b'+') => self.good(line) + "\n",
                Some(b'-') => self.bad(line) + "\n",
                Some(b'@') => self.with("36", line) + "\n",
                _ => format!("{line}\n"),
            })
            .collect()
    }
}

fn say(text: &str) {
    // A reader that is gone (`| head`) is no reason to stop in the middle of a change.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn target(host: &Host) -> anyhow::Result<Target> {
    use anyhow::Context;
    let root = HostRoot::open(&host.host_root)
        .with_context(|| format!("{} cannot be opened", host.host_root.display()))?;
    Ok(Target::new(Arc::new(root), host.payload.clone()))
}

fn progress(paint: Paint) -> Progress {
    Arc::new(move |event| {
        if let Event::Finished { stage, took, summary } = event {
            say(&format!(
                "{} {:<9}{} {summary}",
                paint.good("✓"),
                stage.word(),
                paint.dim(&format!("{:>8}", milliseconds(took)))
            ));
        }
    })
}

fn milliseconds(took: Duration) -> String {
    format!("{} ms", took.as_millis())
}

fn code_of(failure: &Failure) -> u8 {
    match failure.reason {
        _ if failure.rolled_back => ROLLED_BACK,
        FailureReason::UnsupportedHost
        | FailureReason::UnsupportedConfiguration
        | FailureReason::HandlerConflict
        | FailureReason::HandlerInUse
        | FailureReason::Busy => REFUSED,
        _ => ERROR,
    }
}

fn report(failure: &Failure, paint: Paint) -> ExitCode {
    say(&format!(
        "{} {:<9} {}: {}",
        paint.bad("✗"),
        failure.stage.word(),
        failure.reason.camel_case(),
        failure.message
    ));
    if failure.rolled_back {
        say("  What was changed has been put back.");
    }
    if !failure.remedy.is_empty() {
        say(&format!("  {}", failure.remedy));
    }
    ExitCode::from(code_of(failure))
}

/// `plan`
pub(crate) async fn plan(host: &Host, as_json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    match install::preview(&target.root).await {
        Ok((detected, planned)) => {
            let path = &detected.config.path;
            let (diff, code) = match &planned {
                Plan::NothingToDo => (String::new(), NOTHING_TO_DO),
                Plan::Edit(edit) => (install::diff(path, edit.before.as_deref(), Some(&edit.after)), 0),
            };
            if as_json {
                say(&json!({
                    "os": detected.os,
                    "containerd": detected.version,
                    "config": path,
                    "restartsAlong": detected.unit.restarts_along,
                    "diff": diff,
                })
                .to_string());
                return Ok(ExitCode::from(code));
            }
            say(&format!("{}, containerd {}", detected.os, detected.version));
            if !detected.unit.restarts_along.is_empty() {
                say(&format!(
                    "A restart of containerd takes along: {}",
                    detected.unit.restarts_along.join(", ")
                ));
            }
            if code == NOTHING_TO_DO {
                say(&format!("{path} has the handler already; nothing to do."));
            } else {
                let _ = write!(std::io::stdout(), "{}", paint.diff(&diff));
            }
            Ok(ExitCode::from(code))
        }
        Err(failure) if as_json => {
            say(&json!({
                "reason": failure.reason.camel_case(),
                "message": failure.message,
                "remedy": failure.remedy,
            })
            .to_string());
            Ok(ExitCode::from(code_of(&failure)))
        }
        Err(failure) => Ok(report(&failure, paint)),
    }
}

/// `install`
pub(crate) async fn install(host: &Host, prepare_only: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    let stop = if prepare_only {
        Stop::BeforeSwap
    } else {
        Stop::AtTheEnd
    };
    let was = install::state(&target.root).map(|state| state.state);
    match install::install(&target, &progress(paint), stop).await {
        Ok(done) => {
            let nothing = !done.restarted
                && !done.prepared_only
                && was.is_ok_and(|state| state == InstallState::Installed);
            say(&ending(&done, nothing, "Installed and proven.", paint));
            Ok(ExitCode::from(if nothing { NOTHING_TO_DO } else { 0 }))
        }
        Err(failure) => Ok(report(&failure, paint)),
    }
}

/// `uninstall`
pub(crate) async fn uninstall(host: &Host, force: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    let was = install::state(&target.root).map(|state| state.state);
    match install::uninstall(&target, &progress(paint), Stop::AtTheEnd, force).await {
        Ok(done) => {
            let nothing = !done.restarted && was.is_ok_and(|state| state == InstallState::Absent);
            say(&ending(&done, nothing, "Removed.", paint));
            Ok(ExitCode::from(if nothing { NOTHING_TO_DO } else { 0 }))
        }
        Err(failure) => Ok(report(&failure, paint)),
    }
}

fn ending(done: &Done, nothing: bool, text: &str, paint: Paint) -> String {
    if done.prepared_only {
        return "Prepared; the configuration is as it was.".to_owned();
    }
    if nothing {
        return "Nothing to do.".to_owned();
    }
    match done.socket_gap {
        Some(gap) => format!(
            "{} containerd's socket did not answer for {} ms.",
            paint.good(text),
            gap.as_millis()
        ),
        None => paint.good(text),
    }
}

/// `status`
pub(crate) async fn status(host: &Host, as_json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let node = describe("", &target.root).await;
    let state = match node.state() {
        InstallState::Installed => "installed",
        InstallState::InFlight => "in flight",
        InstallState::Absent => "not installed",
        InstallState::Unspecified => "unknown",
    };
    if as_json {
        say(&json!({
            "state": state,
            "version": node.payload_version,
            "os": node.os,
            "containerd": node.containerd_version,
            "config": node.config_path,
            "bootId": node.boot_id,
            "machineId": node.machine_id,
        })
        .to_string());
    } else {
        for (name, value) in [
            ("state", state),
            ("version", node.payload_version.as_str()),
            ("system", &node.os),
            ("containerd", &node.containerd_version),
            ("config", &node.config_path),
        ] {
            say(&format!(
                "{name:<12}{}",
                if value.is_empty() { "-" } else { value }
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `pull`
pub(crate) async fn pull_images(
    host: &Host,
    images: Vec<String>,
    parallelism: u32,
    attempts: u32,
    deadline: Duration,
) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    let order = Order::new(images, parallelism, Some(deadline), attempts)?;
    let daemon = locate(&target.root).await;
    let sink: Sink = Arc::new(move |event| match event {
        ImageEvent::Started(image) => say(&format!("  {image}")),
        ImageEvent::Ready(image, ready) => say(&format!(
            "{} {image} {}",
            paint.good("✓"),
            paint.dim(&if ready.was_present {
                "was here".to_owned()
            } else {
                format!(
                    "{:.1} MB in {}",
                    ready.size as f64 / 1e6,
                    milliseconds(ready.took)
                )
            })
        )),
        ImageEvent::Failed {
            image,
            reason,
            message,
            remedy,
            attempts,
        } => {
            say(&format!(
                "{} {image} {} after {attempts} attempt(s): {message}",
                paint.bad("✗"),
                reason.camel_case()
            ));
            if !remedy.is_empty() {
                say(&format!("  {remedy}"));
            }
        }
    });
    let tally = pull(&daemon, &order, &sink).await;
    Ok(ExitCode::from(if tally.failed == 0 { 0 } else { ERROR }))
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::Stage;

    use super::*;

    #[test]
    fn exit_codes_tell_refusal_from_failure_from_rollback() {
        let mut failure = Failure {
            reason: FailureReason::UnsupportedHost,
            message: String::new(),
            remedy: String::new(),
            stage: Stage::Detect,
            rolled_back: false,
            users: Vec::new(),
        };
        assert_eq!(code_of(&failure), REFUSED);
        failure.reason = FailureReason::RestartFailed;
        assert_eq!(code_of(&failure), ERROR);
        failure.rolled_back = true;
        assert_eq!(code_of(&failure), ROLLED_BACK);
    }

    #[test]
    fn colours_are_left_out_where_nobody_sees_them() {
        assert_eq!(Paint(false).diff("+a\n-b\n"), "+a\n-b\n");
        assert!(Paint(true).diff("+a\n").contains("\x1b[32m+a\x1b[0m"));
    }
}
