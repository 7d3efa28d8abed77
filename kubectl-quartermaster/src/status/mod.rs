//! `status`: nodes and Prefetches at a glance. What the leader says becomes facts of our own, and those become text.

mod facts;
mod view;

#[cfg(test)]
pub(crate) use facts::Prefetch;
pub(crate) use facts::{Status, UNDER_WAY};

use crate::cli::Format;
use crate::leader::Leader;
use crate::look::Look;
use crate::output;
use crate::trouble::Trouble;

/// Asks the leader for the state of everything.
///
/// # Errors
/// When it can't be asked.
pub(crate) async fn ask(leader: &Leader) -> Result<Status, Trouble> {
    let answer = leader
        .ask(|mut leader| async move { leader.status(quartermaster_proto::v1::StatusRequest {}).await })
        .await?;
    Ok(Status::read(&answer))
}

/// `status`
///
/// # Errors
/// When the leader can't be asked, or there is no such node.
pub(crate) async fn show(leader: &Leader, nodes: &[String], format: Option<Format>) -> anyhow::Result<()> {
    let mut status = ask(leader).await?;
    if !nodes.is_empty() {
        status.keep(nodes)?;
    }
    let wide = format == Some(Format::Wide) || !nodes.is_empty();
    match output::structured(&status, format)? {
        Some(text) => output::say(&text),
        None => output::say(&view::text(&status, wide, Look::of_stdout())),
    }
    Ok(())
}
