//! `provision` and `unprovision`: the annotation is set or taken away with the person's own rights, and what becomes of
//! it is read from the Node. What the leader tells meanwhile is only shown.

mod follow;
mod verdict;

use std::process::ExitCode;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::cli::Waiting;
use crate::cluster::Cluster;
use crate::leader::Leader;
use crate::look::{Look, Tone};
use crate::output;
use crate::status;
use crate::trouble::Trouble;

use follow::Followed;
use verdict::{FORCE, Goal, WANTED};

/// Who writes, in the Node's managed fields.
pub(crate) const MANAGER: &str = "kubectl-quartermaster";

/// `provision`
///
/// # Errors
/// When a Node is not there or can't be written.
pub(crate) async fn provision(
    cluster: &Cluster,
    leader: &Leader,
    nodes: &[String],
    waiting: Waiting,
) -> anyhow::Result<ExitCode> {
    // A removal that was to be forced is none any more.
    let annotations = json!({ WANTED: "true", FORCE: null });
    if waiting.wait {
        let followed = Followed::begin(leader, nodes, Goal::Provisioned).await;
        annotate(cluster, nodes, &annotations).await?;
        return followed.finish(cluster, waiting.timeout).await;
    }
    annotate(cluster, nodes, &annotations).await?;
    let look = Look::of_stdout();
    for node in nodes {
        output::say(&format!(
            "{} is to run WebAssembly {}\n",
            look.strong(node),
            look.paint(Tone::Dim, "(kubectl quartermaster status shows how far it is)")
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// `unprovision`
///
/// # Errors
/// When a Node is not there or can't be written.
pub(crate) async fn unprovision(
    cluster: &Cluster,
    leader: &Leader,
    nodes: &[String],
    force: bool,
    waiting: Waiting,
) -> anyhow::Result<ExitCode> {
    let (mut annotations, why) = match status::ask(leader).await {
        Ok(status) => unwanted(status.auto_provision),
        // Whoever may not ask, or finds nobody to ask, is served by what holds either way.
        Err(_) => unwanted(true),
    };
    annotations[FORCE] = if force { json!("true") } else { Value::Null };
    let followed = match waiting.wait {
        true => Some(Followed::begin(leader, nodes, Goal::Removed).await),
        false => None,
    };
    annotate(cluster, nodes, &annotations).await?;
    let look = Look::of_stdout();
    for node in nodes {
        output::say(&format!(
            "{} is to be put back as it was {}\n",
            look.strong(node),
            look.paint(Tone::Dim, &format!("({why})"))
        ));
    }
    let Some(followed) = followed else {
        return Ok(ExitCode::SUCCESS);
    };
    let ended = followed.finish(cluster, waiting.timeout).await?;
    if force && ended == ExitCode::SUCCESS {
        // It would hold for the next removal too.
        annotate(cluster, nodes, &json!({ FORCE: null })).await?;
    }
    Ok(ended)
}

/// The annotation of a node that nobody wants: none, but where every node is wanted that does not say no.
fn unwanted(auto_provision: bool) -> (Value, &'static str) {
    if auto_provision {
        (
            json!({ WANTED: "false" }),
            "its annotation kwasm.sh/kwasm-node is now \"false\"",
        )
    } else {
        (
            json!({ WANTED: null }),
            "its annotation kwasm.sh/kwasm-node is gone",
        )
    }
}

async fn annotate(cluster: &Cluster, nodes: &[String], annotations: &Value) -> Result<(), Trouble> {
    let api: Api<Node> = Api::all(cluster.api.clone());
    // All are looked at before the first is written: a misspelt name changes nothing.
    for node in nodes {
        api.get_metadata(node)
            .await
            .map_err(|error| Trouble::of(&format!("read the node {node}"), &error))?;
    }
    let patch = Patch::Merge(json!({ "metadata": { "annotations": annotations } }));
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    for node in nodes {
        api.patch_metadata(node, &params, &patch)
            .await
            .map_err(|error| Trouble::of(&format!("annotate the node {node}"), &error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_every_node_is_wanted_one_has_to_say_no() {
        assert_eq!(unwanted(false).0, json!({ WANTED: null }));
        assert_eq!(unwanted(true).0, json!({ WANTED: "false" }));
    }
}
