//! `migrate`: takes over from the KWasm operator and the Prefetch operator on a living cluster. Nothing is asked of any
//! node: nodes and Prefetches are taken over by the coordinator, which knows their annotations, labels and objects.

mod facts;
mod plan;

use std::process::ExitCode;
use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::conditions::Condition;
use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::cluster::Cluster;
use crate::leader::Leader;
use crate::look::{Look, Tone};
use crate::progress::Progress;
use crate::trouble::{Trouble, chain};
use crate::{confirm, output, status};

#[cfg(test)]
pub(crate) use facts::{Leftover, Operator};
pub(crate) use facts::{Predecessor, Predecessors, find};
use plan::Step;

/// For the pods of an operator to go.
const STOPPED: Duration = Duration::from_secs(60);

/// `migrate`
///
/// # Errors
/// When something can't be listed, or nobody leads who could take over.
pub(crate) async fn migrate(
    cluster: &Cluster,
    leader: &Leader,
    yes: bool,
    dry_run: bool,
) -> anyhow::Result<ExitCode> {
    let found = find(&cluster.api).await?;
    let look = Look::of_stdout();
    let steps = plan::steps(&found);
    if found.operators.is_empty() && found.is_empty() && found.nodes.is_empty() {
        output::say("There is nothing of the KWasm operator or the Prefetch operator in this cluster.\n");
        return Ok(ExitCode::SUCCESS);
    }
    output::say(&plan::inventory(&found, look));
    if !steps.is_empty() {
        output::say(&format!("\n{}\n", look.strong("To be done")));
        for step in &steps {
            output::say(&look.wrapped(&step.words(), 2));
        }
    }
    if dry_run {
        tell_what_remains(&found, look);
        return Ok(ExitCode::SUCCESS);
    }
    if !steps.is_empty() {
        // Without somebody who takes over, nodes and Prefetches would be nobody's.
        status::ask(leader).await?;
        output::say("\n");
        if !confirm::asked("Go on?", yes)? {
            output::say("Nothing was changed.\n");
            return Ok(ExitCode::FAILURE);
        }
    }
    let progress = Progress::new();
    let mut failed = 0;
    for step in &steps {
        progress.now(&step.words());
        let done = carry_out(cluster, step).await;
        progress.end();
        match done {
            Ok(()) => progress.line(&look.marked(Tone::Good, "✓", &step.words())),
            Err(why) => {
                failed += 1;
                progress.line(&look.marked(Tone::Bad, "✗", &format!("{}: {why}", step.words())));
            }
        }
    }
    progress.end();
    tell_what_remains(&found, look);
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn tell_what_remains(found: &Predecessors, look: Look) {
    let remains = plan::remains(found);
    if remains.is_empty() {
        return;
    }
    output::say(&format!("\n{}\n", look.strong("What remains")));
    for line in remains {
        let text = look.wrapped(&line, 4);
        output::say(&format!("  - {}", text.trim_start()));
    }
}

async fn carry_out(cluster: &Cluster, step: &Step) -> Result<(), Trouble> {
    let client = cluster.api.clone();
    match step {
        Step::Stop(operator) => {
            let api: Api<Deployment> = Api::namespaced(client, &operator.namespace);
            let nothing = Patch::Merge(json!({ "spec": { "replicas": 0 } }));
            api.patch_scale(&operator.name, &PatchParams::default(), &nothing)
                .await
                .map_err(|error| Trouble::of("scale it", &error))?;
            let api: Api<Deployment> = Api::namespaced(cluster.streams.clone(), &operator.namespace);
            let gone = await_condition(api, &operator.name, is_stopped());
            match tokio::time::timeout(STOPPED, gone).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(Trouble::Refused(chain(&error))),
                Err(_) => Err(Trouble::Refused(format!(
                    "its pods are still there after {} s; something may have scaled it up again",
                    STOPPED.as_secs()
                ))),
            }
        }
        Step::DeleteJob(job) => {
            let api: Api<Job> = Api::namespaced(client, &job.namespace);
            let deleted = api.delete(&job.name, &DeleteParams::background()).await;
            ignore_gone(deleted.map(drop))
        }
        Step::DeletePod(pod) => {
            let api: Api<Pod> = Api::namespaced(client, &pod.namespace);
            let deleted = api.delete(&pod.name, &DeleteParams::default()).await;
            ignore_gone(deleted.map(drop))
        }
    }
}

fn ignore_gone(deleted: kube::Result<()>) -> Result<(), Trouble> {
    match deleted {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map_err(|error| Trouble::of("delete it", &error)),
    }
}

fn is_stopped() -> impl Condition<Deployment> {
    |deployment: Option<&Deployment>| {
        let replicas = deployment
            .and_then(|deployment| deployment.status.as_ref())
            .and_then(|status| status.replicas);
        replicas.unwrap_or_default() == 0
    }
}
