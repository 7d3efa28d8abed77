//! `plan`: what provisioning would change, live from the agents of nodes. An agent is summoned where there is none, and
//! nothing is changed on any node.

mod facts;
mod view;

use std::process::ExitCode;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use quartermaster_proto::v1;

use crate::REFUSED;
use crate::cli;
use crate::cli::Format;
use crate::leader::Leader;
use crate::look::{Look, counted};
use crate::output;
use crate::progress::Progress;
use crate::status;
use crate::trouble::Trouble;

use facts::NodePlan;

/// Nodes that are asked at once.
const AT_ONCE: usize = 16;

/// `plan`
///
/// # Errors
/// When the leader can't be asked.
pub(crate) async fn show(leader: &Leader, arguments: &cli::Plan) -> anyhow::Result<ExitCode> {
    let nodes = if arguments.all {
        let status = status::ask(leader).await?;
        status.nodes.into_iter().map(|node| node.name).collect()
    } else {
        arguments.nodes.clone()
    };
    let plans = ask(leader, &nodes, arguments.timeout).await?;
    let look = Look::of_stdout();
    let wide = arguments.output == Some(Format::Wide);
    if arguments.all {
        let groups = facts::grouped(&plans);
        match output::structured(&groups, arguments.output)? {
            Some(text) => output::say(&text),
            None => output::say(&view::all(&groups, wide, look)),
        }
    } else {
        match output::structured(&plans, arguments.output)? {
            Some(text) => output::say(&text),
            None => {
                let texts: Vec<String> = plans.iter().map(|plan| view::one(plan, look)).collect();
                output::say(&texts.join("\n"));
            }
        }
    }
    // Of all nodes, those that can't be served are an answer; of one that was named, that is a no.
    let refused = !arguments.all && plans.iter().any(NodePlan::is_no);
    Ok(if refused {
        ExitCode::from(REFUSED)
    } else {
        ExitCode::SUCCESS
    })
}

async fn ask(leader: &Leader, nodes: &[String], timeout: Duration) -> Result<Vec<NodePlan>, Trouble> {
    let progress = Progress::new();
    let mut plans: Vec<NodePlan> = Vec::with_capacity(nodes.len());
    let mut answers = stream::iter(nodes)
        .map(|node| async move {
            let request = v1::PlanRequest {
                node: node.clone(),
                timeout: prost_types::Duration::try_from(timeout).ok(),
            };
            let answer = leader
                .ask(|mut leader| {
                    let request = request.clone();
                    async move { leader.plan(request).await }
                })
                .await;
            (node, answer)
        })
        .buffer_unordered(AT_ONCE);
    loop {
        progress.now(&format!(
            "asking the agents: {} of {} answered",
            plans.len(),
            counted(nodes.len(), "node")
        ));
        let Some((node, answer)) = answers.next().await else {
            break;
        };
        let answer = match answer {
            Ok(answer) => Ok(answer.preview.unwrap_or_default()),
            // Without a leader, or the right to ask it, the others would fare no better.
            Err(trouble) if !matches!(trouble, Trouble::Refused(_)) => return Err(trouble),
            Err(trouble) => Err(trouble),
        };
        plans.push(NodePlan::read(node, answer));
    }
    progress.end();
    plans.sort_by(|a, b| a.node.cmp(&b.node));
    Ok(plans)
}
