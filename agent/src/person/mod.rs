//! The agent as a tool for a person on one node: a file for each command, and what all of them print.

mod bars;
mod install;
mod output;
mod plan;
mod pull;
mod status;
mod voice;

use std::sync::Arc;

use crate::cli::Host;
use crate::host::HostRoot;
use crate::install::Target;

pub(crate) use install::{install, uninstall};
pub(crate) use plan::plan;
pub(crate) use pull::{pull_images, release_images};
pub(crate) use status::status;

fn target(host: &Host) -> anyhow::Result<Target> {
    use anyhow::Context;
    let root = HostRoot::open(&host.host_root)
        .with_context(|| format!("{} cannot be opened", host.host_root.display()))?;
    Ok(Target::new(Arc::new(root), host.payload.clone()).with(host.overrides.clone()))
}
