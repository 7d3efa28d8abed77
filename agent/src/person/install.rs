//! The `install` and `uninstall` commands.

use std::process::ExitCode;

use quartermaster_proto::v1::InstallState;

use super::target;
use super::voice::{Purpose, Voice};
use crate::cli::Host;
use crate::install::{self, Stop, Target};

/// `install`
pub(crate) async fn install(host: &Host, prepare_only: bool, json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let voice = Voice::new(json);
    let stop = if prepare_only {
        Stop::BeforeSwap
    } else {
        Stop::AtTheEnd
    };
    let was = was(&target).await;
    let result = install::install(&target, &voice.progress(), stop).await;
    let nothing = result.as_ref().is_ok_and(|done| {
        !done.restarted && !done.placed && !done.prepared_only && was == Some(InstallState::Installed)
    });
    Ok(voice.end(Purpose::Install, &result, nothing))
}

/// What there was before the command.
async fn was(target: &Target) -> Option<InstallState> {
    let target = target.located().await.ok()?;
    let found = install::state(&target.root, target.layout()).ok()?;
    Some(found.state)
}

/// `uninstall`
pub(crate) async fn uninstall(host: &Host, force: bool, json: bool) -> anyhow::Result<ExitCode> {
    let target = target(host)?;
    let voice = Voice::new(json);
    let was = was(&target).await;
    let result = install::uninstall(&target, &voice.progress(), Stop::AtTheEnd, force).await;
    let nothing = result
        .as_ref()
        .is_ok_and(|done| !done.restarted && was == Some(InstallState::Absent));
    Ok(voice.end(Purpose::Uninstall, &result, nothing))
}
