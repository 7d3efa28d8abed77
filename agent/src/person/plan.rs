//! The `plan` command.

use std::io::Write;
use std::process::ExitCode;

use serde_json::json;

use super::output::{NOTHING_TO_DO, Paint, code_of, report, say};
use super::target;
use crate::cli::Host;
use crate::config::Plan;
use crate::install;

/// `plan`
pub(crate) async fn plan(host: &Host, as_json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let paint = Paint::new();
    match install::preview(&target).await {
        Ok((detected, planned)) => {
            let path = detected.written_path();
            let (diff, code) = match &planned {
                Plan::NothingToDo | Plan::Adopt(_) => (String::new(), NOTHING_TO_DO),
                Plan::Edit(edit) => (install::diff(path, edit.before.as_deref(), Some(&edit.after)), 0),
            };
            if as_json {
                say(&json!({
                    "os": detected.host.name,
                    "containerd": detected.version,
                    "config": path,
                    "restartsAlong": detected.unit.restarts_along,
                    "diff": diff,
                })
                .to_string());
                return Ok(ExitCode::from(code));
            }
            say(&format!(
                "{}, containerd {}",
                detected.host.name, detected.version
            ));
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
