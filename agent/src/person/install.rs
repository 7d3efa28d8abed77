//! The `install` and `uninstall` commands.

use std::process::ExitCode;

use quartermaster_proto::v1::InstallState;

use super::output::{NOTHING_TO_DO, Paint, progress, report, say};
use super::target;
use crate::cli::Host;
use crate::install::{self, Done, Stop};

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
