//! `remove-all`: the leader puts every node back, whatever annotations say.

use std::collections::BTreeMap;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use quartermaster_proto::v1::{self, RemoveAllEvent};

use crate::cli::Waiting;
use crate::leader::Leader;
use crate::look::{Look, Tone, counted};
use crate::progress::Progress;
use crate::{INTERRUPTED, confirm, events, output, status};

/// After a stream was lost.
const PAUSE: Duration = Duration::from_secs(1);

/// `remove-all`
///
/// # Errors
/// When the leader can't be told.
pub(crate) async fn remove_all(leader: &Leader, yes: bool, waiting: Waiting) -> anyhow::Result<ExitCode> {
    let look = Look::of_stdout();
    let status = status::ask(leader).await?;
    if !status.removing {
        output::say(&look.wrapped(
            "Every node of this cluster is put back as it was, by the rules of the rollout, whatever annotations say and \
             until the record is deleted. Pods that use the handler hold their node up until they are gone.",
            0,
        ));
        if !confirm::asked("Remove Quartermaster from every node?", yes)? {
            output::say("Nothing was changed.\n");
            return Ok(ExitCode::FAILURE);
        }
    }
    if status.paused {
        let text = "Quartermaster is paused: nothing is removed until `kubectl quartermaster resume`.\n";
        output::say(&look.paint(Tone::Busy, text));
    }
    let progress = Progress::new();
    let mut told = events::follow(leader, &[]).await;
    let mut over = pin!(tokio::time::sleep(waiting.timeout));
    let mut interrupted = pin!(tokio::signal::ctrl_c());
    let mut left = RemoveAllEvent::default();
    let mut shown: BTreeMap<String, String> = BTreeMap::new();
    loop {
        // Lost, it is asked for again: it is recorded, and the cluster goes on with it meanwhile.
        let mut stream = leader
            .ask(|mut leader| async move { leader.remove_all(v1::RemoveAllRequest {}).await })
            .await?;
        loop {
            let event = tokio::select! {
                event = stream.message() => event,
                Some(event) = told.recv() => {
                    if let Some(line) = events::line(&event, look) {
                        progress.line(&line);
                    }
                    continue;
                }
                () = &mut over => {
                    progress.end();
                    output::say(&unfinished(&left, waiting.timeout.as_secs(), look));
                    return Ok(ExitCode::FAILURE);
                }
                _ = &mut interrupted => {
                    progress.end();
                    output::say("Not followed any further; the cluster goes on with it. Run it again to see what is left.\n");
                    return Ok(ExitCode::from(INTERRUPTED));
                }
            };
            let Ok(Some(event)) = event else {
                break;
            };
            left = event;
            if left.left_count == 0 {
                progress.end();
                output::say(&format!(
                    "{} Nothing of Quartermaster is left on any node.\n",
                    look.paint(Tone::Good, "✓")
                ));
                return Ok(ExitCode::SUCCESS);
            }
            let count = counted(usize::try_from(left.left_count).unwrap_or(usize::MAX), "node");
            if !waiting.wait {
                output::say(&format!(
                    "Recorded: {count} to put back. Run it again with --wait to follow it.\n"
                ));
                return Ok(ExitCode::SUCCESS);
            }
            progress.now(&format!("{count} left"));
            hindrances(&left, &mut shown, &progress, look);
        }
        leader.forget();
        tokio::time::sleep(PAUSE).await;
    }
}

/// What is in the way is said once.
fn hindrances(left: &RemoveAllEvent, shown: &mut BTreeMap<String, String>, progress: &Progress, look: Look) {
    for node in &left.left {
        let in_the_way = matches!(
            node.reason.as_str(),
            "RemovalBlocked" | "NodeNotReady" | "AgentUnavailable"
        );
        if in_the_way && shown.get(&node.node) != Some(&node.message) {
            let line = format!("{}  {}: {}", look.strong(&node.node), node.reason, node.message);
            progress.line(&look.marked(Tone::Busy, "!", &line));
            shown.insert(node.node.clone(), node.message.clone());
        }
    }
}

fn unfinished(left: &RemoveAllEvent, seconds: u64, look: Look) -> String {
    let count = counted(usize::try_from(left.left_count).unwrap_or(usize::MAX), "node");
    let mut text = format!(
        "{} {count} could not be put back within {seconds} s; the cluster goes on with them. Run it again to follow.\n",
        look.paint(Tone::Bad, "✗")
    );
    for node in &left.left {
        text += &format!(
            "  {}: {} {}\n",
            look.strong(&node.node),
            node.reason,
            node.message
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::LeftNode;

    use super::*;

    #[test]
    fn what_is_left_is_named_with_its_reason() {
        let left = RemoveAllEvent {
            left: vec![LeftNode {
                node: "a".into(),
                reason: "RemovalBlocked".into(),
                message: "default/web uses it".into(),
            }],
            left_count: 1,
        };
        assert_eq!(
            unfinished(&left, 30, Look::plain(None)),
            "✗ 1 node could not be put back within 30 s; the cluster goes on with them. Run it again to follow.\n\
             \u{20} a: RemovalBlocked default/web uses it\n"
        );
    }
}
