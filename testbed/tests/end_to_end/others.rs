//! A cluster in which another operator still runs, with what it left and a RuntimeClass of one of our names.

use anyhow::{Context, Result, ensure};

use crate::plugin::PREDECESSORS;
use crate::stage::Stage;

const NODE: &str = "worker-21";

/// A RuntimeClass of one of our names that leads elsewhere.
const THEIRS: &str = r#"
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: wasmedge}
handler: wasmedge
"#;

const OURS: &str = r#"
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: wasmedge}
handler: crun
scheduling: {nodeSelector: {kwasm.sh/crun: ready}}
"#;

pub(crate) fn nothing_is_provisioned_beside_another_operator_and_what_it_left_is_named(
    stage: &Stage,
) -> Result<()> {
    stage.kubectl(&["delete", "runtimeclass", "wasmedge", "--ignore-not-found"])?;
    let outcome = stage
        .cluster
        .apply(THEIRS)
        .and_then(|_| stage.cluster.apply(PREDECESSORS))
        .and_then(|_| beside(stage));
    stage.kubectl(&["delete", "runtimeclass", "wasmedge", "--ignore-not-found"])?;
    stage.cluster.apply(OURS)?;
    stage.kubectl(&["delete", "namespace", "before", "--timeout=120s"])?;
    outcome
}

fn beside(stage: &Stage) -> Result<()> {
    until_said(
        stage,
        "AnotherOperator",
        "Deployment kwasm-operator in namespace before",
    )?;
    until_said(
        stage,
        "AnotherOperator",
        "Deployment kubernetes-prefetch-operator-controller-manager in namespace before",
    )?;
    stage.until_agents_are_gone()?;
    let before = stage.config(NODE)?;
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node=true")?;
    let words = stage.until_condition(NODE, "False", "AnotherOperator")?;
    let command = "kubectl -n before scale deployment kwasm-operator --replicas=0";
    ensure!(words.contains(command), "nobody is told what to do: {words}");
    ensure!(stage.agent_pods()?.is_empty(), "an agent was summoned");
    ensure!(stage.config(NODE)? == before, "the configuration was touched");

    // What the words say to do.
    stage.kubectl(&[
        "-n",
        "before",
        "scale",
        "deployment",
        "kwasm-operator",
        "--replicas=0",
    ])?;
    stage.until_provisioned(NODE)?;
    until_said(stage, "Leftovers", "before/worker-17-provision-kwasm")?;
    until_said(
        stage,
        "ForeignRuntimeClass",
        "RuntimeClass wasmedge leads to the handler wasmedge",
    )?;
    let class = stage.get(&["runtimeclass", "wasmedge"])?;
    ensure!(class["handler"] == "wasmedge", "it was not left alone: {class}");
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(NODE)
}

/// Waits until an Event of the coordinator's own Deployment has this reason and these words.
fn until_said(stage: &Stage, reason: &str, words: &str) -> Result<()> {
    stage.until(&format!("the Deployment to have the Event {reason}, {words}"), || {
        let events = stage.get(&[
            "events",
            "--namespace=quartermaster",
            &format!("--field-selector=involvedObject.kind=Deployment,involvedObject.name=quartermaster-coordinator,reason={reason}"),
        ])?;
        let items = events["items"].as_array().context("no list")?;
        let said: Vec<&str> = items.iter().filter_map(|event| event["message"].as_str()).collect();
        ensure!(said.iter().any(|message| message.contains(words)), "they say {said:?}");
        Ok(())
    })
}
