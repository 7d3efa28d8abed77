//! How `install` and `uninstall` tell what they do: to a person at a terminal with a line that moves, to a log with
//! plain lines, to a program with JSON.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quartermaster_proto::v1::Stage;
use serde_json::{Value, json};

use super::output::{NOTHING_TO_DO, Paint, REFUSED, ROLLED_BACK, code_of, milliseconds, say};
use crate::failure::Failure;
use crate::install::{Done, Event, Progress};

const TICK: Duration = Duration::from_millis(90);
const LABEL: usize = 10;

/// What a command was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Install,
    Uninstall,
}

/// How it tells.
#[derive(Clone)]
pub(super) enum Voice {
    /// One JSON object a line.
    Json,
    /// Lines for people; with a line that moves where it is a terminal.
    Lines(Paint, Option<ProgressBar>),
}

impl Voice {
    pub(super) fn new(json: bool) -> Self {
        if json {
            return Self::Json;
        }
        let paint = Paint::new();
        Self::Lines(paint, paint.is_seen().then(moving_line))
    }

    /// Where the stages go.
    pub(super) fn progress(&self) -> Progress {
        let voice = self.clone();
        let running: Mutex<Vec<Stage>> = Mutex::default();
        Arc::new(move |event| {
            match &event {
                Event::Started(stage) => change(&running, |all| all.push(*stage)),
                Event::Finished { stage, .. } => change(&running, |all| all.retain(|one| one != stage)),
            }
            match &voice {
                Self::Json => say(&event_json(&event).to_string()),
                Self::Lines(paint, bar) => {
                    if let Some(bar) = bar {
                        change(&running, |all| bar.set_message(under_way(all)));
                    }
                    if let Event::Finished { stage, took, summary } = event {
                        voice.line(&format!(
                            "{} {}{} {summary}",
                            paint.good("✓"),
                            label(stage),
                            paint.dim(&format!("{:>8}", milliseconds(took)))
                        ));
                    }
                }
            }
        })
    }

    /// Tells the end and gives its exit code. `nothing` says that it was so already.
    pub(super) fn end(&self, purpose: Purpose, result: &Result<Done, Failure>, nothing: bool) -> ExitCode {
        if let Self::Lines(_, Some(bar)) = self {
            bar.finish_and_clear();
        }
        let code = code(result, nothing);
        match self {
            Self::Json => say(&end_json(purpose, result, nothing).to_string()),
            Self::Lines(paint, _) => match result {
                Ok(done) => self.line(&ending(purpose, done, nothing, *paint)),
                Err(failure) => {
                    for line in failed(failure, *paint) {
                        self.line(&line);
                    }
                }
            },
        }
        ExitCode::from(code)
    }

    fn line(&self, text: &str) {
        match self {
            // The line that moves is drawn anew below it.
            Self::Lines(_, Some(bar)) if !bar.is_finished() => bar.println(text),
            _ => say(text),
        }
    }
}

fn moving_line() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
    if let Ok(style) = ProgressStyle::with_template("{spinner:.cyan} {msg:.dim} {elapsed:.dim}") {
        bar.set_style(style.tick_chars("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ "));
    }
    bar.enable_steady_tick(TICK);
    bar
}

fn change(running: &Mutex<Vec<Stage>>, with: impl FnOnce(&mut Vec<Stage>)) {
    if let Ok(mut running) = running.lock() {
        with(&mut running);
    }
}

fn label(stage: Stage) -> String {
    format!("{:<LABEL$}", stage.word())
}

fn under_way(stages: &[Stage]) -> String {
    let words: Vec<&str> = stages
        .iter()
        .map(|stage| match stage {
            Stage::Detect => "looking at the node",
            Stage::Plan => "planning the change",
            Stage::Payload => "copying crun and its libraries",
            Stage::Rehearse => "rehearsing the change with a containerd of its own",
            Stage::Swap => "replacing the file and restarting containerd",
            Stage::Verify => "running a Wasm module through the handler",
            Stage::Commit => "writing it down",
            _ => "working",
        })
        .collect();
    words.join(", ")
}

fn event_json(event: &Event) -> Value {
    match event {
        Event::Started(stage) => json!({"event": "started", "stage": stage.word()}),
        Event::Finished { stage, took, summary } => json!({
            "event": "finished",
            "stage": stage.word(),
            "milliseconds": milliseconds_of(*took),
            "summary": summary,
        }),
    }
}

fn end_json(purpose: Purpose, result: &Result<Done, Failure>, nothing: bool) -> Value {
    let code = code(result, nothing);
    match result {
        Ok(done) => json!({
            "event": "ended",
            "outcome": match (purpose, nothing, done.prepared_only) {
                (_, true, _) => "nothingToDo",
                (_, _, true) => "prepared",
                (Purpose::Install, ..) => "installed",
                (Purpose::Uninstall, ..) => "removed",
            },
            "exitCode": code,
            "restarted": done.restarted,
            "socketGapMilliseconds": done.socket_gap.map(milliseconds_of),
            "diff": done.diff,
        }),
        Err(failure) => json!({
            "event": "ended",
            "outcome": match code {
                REFUSED => "refused",
                ROLLED_BACK => "rolledBack",
                _ => "failed",
            },
            "exitCode": code,
            "stage": failure.stage.word(),
            "reason": failure.reason.camel_case(),
            "message": failure.message,
            "remedy": failure.remedy,
            "pods": failure.users,
        }),
    }
}

fn code(result: &Result<Done, Failure>, nothing: bool) -> u8 {
    match result {
        Ok(_) if nothing => NOTHING_TO_DO,
        Ok(_) => 0,
        Err(failure) => code_of(failure),
    }
}

fn ending(purpose: Purpose, done: &Done, nothing: bool, paint: Paint) -> String {
    if nothing {
        let state = match purpose {
            Purpose::Install => "it is installed, and a module has just run",
            Purpose::Uninstall => "there is nothing of ours on this node",
        };
        return format!("Nothing to do: {state}.");
    }
    if done.prepared_only {
        return format!(
            "{} The configuration is as it was; `install` makes the change.",
            paint.good("Prepared.")
        );
    }
    let text = match purpose {
        Purpose::Install => "Installed and proven.",
        Purpose::Uninstall => "Removed.",
    };
    match done.socket_gap {
        Some(gap) => format!(
            "{} containerd's socket did not answer for {} ms.",
            paint.good(text),
            gap.as_millis()
        ),
        None => paint.good(text),
    }
}

fn failed(failure: &Failure, paint: Paint) -> Vec<String> {
    let mut lines = vec![format!(
        "{} {}{} {}",
        paint.bad("✗"),
        label(failure.stage),
        paint.bad(&failure.reason.camel_case()),
        failure.message
    )];
    let indented = |text: &str| format!("  {:LABEL$}{text}", "");
    if failure.rolled_back {
        lines.push(indented("What was changed has been put back."));
    }
    if !failure.remedy.is_empty() {
        lines.push(indented(&failure.remedy));
    }
    lines
}

fn milliseconds_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::FailureReason;

    use super::*;

    fn failure(reason: FailureReason, rolled_back: bool) -> Result<Done, Failure> {
        Err(Failure {
            reason,
            message: "why".into(),
            remedy: "what to do".into(),
            stage: Stage::Swap,
            rolled_back,
            users: vec!["default/a".into()],
        })
    }

    #[test]
    fn a_program_reads_the_outcome_and_the_exit_code_from_the_last_line() {
        let done = Done {
            restarted: true,
            socket_gap: Some(Duration::from_millis(79)),
            ..Done::default()
        };
        let line = end_json(Purpose::Install, &Ok(done), false);
        assert_eq!(line["outcome"], "installed");
        assert_eq!(
            (&line["exitCode"], &line["socketGapMilliseconds"]),
            (&json!(0), &json!(79))
        );
        let line = end_json(Purpose::Uninstall, &Ok(Done::default()), true);
        assert_eq!(
            (&line["outcome"], &line["exitCode"]),
            (&json!("nothingToDo"), &json!(4))
        );
        for (reason, rolled_back, outcome, code) in [
            (FailureReason::RestartUnsafe, false, "refused", 3),
            (FailureReason::RestartFailed, true, "rolledBack", 5),
            (FailureReason::PayloadFailed, false, "failed", 1),
        ] {
            let line = end_json(Purpose::Install, &failure(reason, rolled_back), false);
            assert_eq!(
                (&line["outcome"], &line["exitCode"]),
                (&json!(outcome), &json!(code))
            );
            assert_eq!(
                (&line["stage"], &line["pods"][0]),
                (&json!("swap"), &json!("default/a"))
            );
        }
    }

    #[test]
    fn a_person_reads_what_was_done_and_what_to_do() {
        let lines = match failure(FailureReason::RestartFailed, true) {
            Err(failure) => failed(&failure, Paint::plain()),
            Ok(_) => Vec::new(),
        };
        assert_eq!(
            lines,
            [
                "✗ swap      RestartFailed why",
                "            What was changed has been put back.",
                "            what to do",
            ]
        );
    }

    #[test]
    fn what_is_under_way_is_told_in_words() {
        assert_eq!(
            under_way(&[Stage::Payload, Stage::Rehearse]),
            "copying crun and its libraries, rehearsing the change with a containerd of its own"
        );
    }
}
