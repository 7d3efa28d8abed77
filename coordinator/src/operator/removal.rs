//! Removing everything: it is recorded where every replica reads it, and seen through to its end.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use quartermaster_proto::v1::{LeftNode, RemoveAllEvent};

use super::change_control;
use crate::control::Control;
use crate::node::NodeFacts;
use crate::reason;

/// How often it is looked what is left.
pub(super) const LOOK: Duration = Duration::from_secs(2);
/// Nodes that are named.
const NAMED: usize = 100;
/// Nodes that are listed in one request.
const PAGE: u32 = 500;

/// What is told to the cluster when everything is to go.
pub(super) fn begin(control: &mut Control) {
    control.removing = true;
    // Whoever removes everything does not mean to stop at what was halted before.
    control.halted = None;
}

/// What is left of us on nodes.
pub(super) async fn left(client: &kube::Client) -> anyhow::Result<RemoveAllEvent> {
    let nodes: Api<Node> = Api::all(client.clone());
    let mut event = RemoveAllEvent::default();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = nodes.list(&page).await.context("the nodes can't be listed")?;
        for node in &list.items {
            if let Some(left) = left_on(&NodeFacts::read(node)) {
                event.left_count += 1;
                if event.left.len() < NAMED {
                    event.left.push(left);
                }
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = ListParams::default().limit(PAGE).continue_token(&token),
            None => return Ok(event),
        }
    }
}

/// What of ours is on a node that only the coordinator and its agents can take away.
fn left_on(node: &NodeFacts) -> Option<LeftNode> {
    let marks = &node.marks;
    let rest = if marks.pins_held.is_some() {
        "images of ours are still pinned there"
    } else if marks.images_verified.is_some() {
        "its annotation about images is still there"
    } else if marks.agent.is_some() {
        "its agent has not gone yet"
    } else {
        ""
    };
    if !marks.any_of_provisioning() && rest.is_empty() {
        return None;
    }
    let (reason, message) = match &marks.condition {
        _ if !node.ready => (
            reason::NODE_NOT_READY,
            "the node is not Ready, so nothing can be done there",
        ),
        Some(c) => (c.reason.as_str(), c.message.as_str()),
        None => ("", rest),
    };
    Some(LeftNode {
        node: node.name.clone(),
        reason: reason.to_owned(),
        message: message.to_owned(),
    })
}

/// Puts every node back and says what is left; `wait` bounds how long that may take.
///
/// # Errors
/// When something is left at the end of `wait`: the nodes are named, and how to go on.
pub async fn remove_all(namespace: &str, wait: Duration) -> anyhow::Result<()> {
    let client = kube::Client::try_default()
        .await
        .context("the cluster's address and credentials can't be found")?;
    let control = change_control(&client, namespace, begin).await?;
    println!("recorded: every node is put back by the rules of the rollout, whatever annotations say");
    if control.paused {
        println!("it is paused: nothing is put back until `resume`");
    }
    let begun = Instant::now();
    let mut told = None;
    loop {
        let event = left(&client).await?;
        if event.left_count == 0 {
            println!("nothing of Quartermaster is left on any node");
            return Ok(());
        }
        if told != Some(event.left_count) {
            println!("left: {}", counted(event.left_count));
            told = Some(event.left_count);
        }
        if begun.elapsed() >= wait {
            for left in &event.left {
                println!("  {}: {} {}", left.node, left.reason, left.message);
            }
            anyhow::bail!(
                "{0} not put back within {1} s; the coordinator goes on while it runs. Run this again to wait for it, or \
                 put a node back by hand with `<install folder>/current/bin/quartermaster-agent uninstall` on it",
                counted(event.left_count),
                wait.as_secs()
            );
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn counted(nodes: u32) -> String {
    if nodes == 1 {
        "1 node".to_owned()
    } else {
        format!("{nodes} nodes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_left_while_anything_of_ours_is_on_it() {
        let mut node = NodeFacts {
            name: "a".into(),
            ready: true,
            ..NodeFacts::default()
        };
        assert_eq!(left_on(&node), None);
        let said = |node: &NodeFacts| left_on(node).map(|left| (left.reason, left.message));
        let words = |reason: &str, message: &str| Some((reason.to_owned(), message.to_owned()));
        node.marks.agent = Some("summoned".into());
        assert_eq!(said(&node), words("", "its agent has not gone yet"));
        node.marks.images_verified = Some("x y z".into());
        assert_eq!(
            said(&node),
            words("", "its annotation about images is still there")
        );
        node.marks.pins_held = Some("2026-01-01T00:00:00Z".into());
        assert_eq!(said(&node), words("", "images of ours are still pinned there"));
        node.marks
            .set_condition(true, "RemovalBlocked", "pods use it", jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(said(&node), words("RemovalBlocked", "pods use it"));
        node.ready = false;
        assert_eq!(
            said(&node),
            words(
                "NodeNotReady",
                "the node is not Ready, so nothing can be done there"
            )
        );
    }
}
