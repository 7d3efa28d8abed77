//! What a person sees, and the exit codes.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use quartermaster_proto::v1::FailureReason;

use crate::failure::Failure;

/// Exit codes.
pub(super) const ERROR: u8 = 1;
pub(super) const REFUSED: u8 = 3;
pub(super) const NOTHING_TO_DO: u8 = 4;
pub(super) const ROLLED_BACK: u8 = 5;

/// Colours, where a person sees them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Paint(bool);

impl Paint {
    pub(super) fn new() -> Self {
        Self(std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none())
    }

    /// Without colours.
    #[cfg(test)]
    pub(super) fn plain() -> Self {
        Self(false)
    }

    /// Whether somebody sees them.
    pub(super) fn is_seen(self) -> bool {
        self.0
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    pub(super) fn good(self, text: &str) -> String {
        self.with("32", text)
    }

    pub(super) fn warn(self, text: &str) -> String {
        self.with("33", text)
    }

    pub(super) fn bad(self, text: &str) -> String {
        self.with("31", text)
    }

    pub(super) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    pub(super) fn diff(self, diff: &str) -> String {
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

pub(super) fn say(text: &str) {
    // A reader that is gone (`| head`) is no reason to stop in the middle of a change.
    let _ = writeln!(std::io::stdout(), "{text}");
}

pub(super) fn milliseconds(took: Duration) -> String {
    format!("{} ms", took.as_millis())
}

pub(super) fn code_of(failure: &Failure) -> u8 {
    match failure.reason {
        _ if failure.rolled_back => ROLLED_BACK,
        FailureReason::UnsupportedHost
        | FailureReason::UnsupportedConfiguration
        | FailureReason::HandlerConflict
        | FailureReason::HandlerInUse
        | FailureReason::RestartUnsafe
        | FailureReason::Busy => REFUSED,
        _ => ERROR,
    }
}

pub(super) fn report(failure: &Failure, paint: Paint) -> ExitCode {
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
