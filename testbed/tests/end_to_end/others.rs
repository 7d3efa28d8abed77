//! A cluster in which another operator still runs, with what it left and a RuntimeClass of one of our names.

use anyhow::{Context, Result, ensure};

use crate::stage::Stage;

const NODE: &str = "worker-21";

/// The KWasm operator as its chart makes it, as far as anybody looks at it, a Job that it left, and a RuntimeClass.
const OTHERS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: kwasm}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: kwasm-operator, namespace: kwasm, labels: {app.kubernetes.io/name: kwasm-operator}}
spec:
  replicas: 1
  selector: {matchLabels: {app.kubernetes.io/name: kwasm-operator}}
  template:
    metadata: {labels: {app.kubernetes.io/name: kwasm-operator}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: kwasm-operator, image: "registry.testbed:5000/server:1.0"}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: worker-17-provision-kwasm, namespace: kwasm, labels: {kwasm.sh/job: "true"}}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      containers: [{name: kwasm-provision, image: "registry.testbed:5000/server:1.0"}]
---
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
    let outcome = stage.cluster.apply(OTHERS).and_then(|_| beside(stage));
    stage.kubectl(&["delete", "runtimeclass", "wasmedge", "--ignore-not-found"])?;
    stage.cluster.apply(OURS)?;
    stage.kubectl(&["delete", "namespace", "kwasm", "--timeout=120s"])?;
    outcome
}

fn beside(stage: &Stage) -> Result<()> {
    let words = until_said(stage, "AnotherOperator")?;
    ensure!(
        words.contains("Deployment kwasm-operator in namespace kwasm"),
        "it is not named: {words}"
    );
    let before = stage.config(NODE)?;
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node=true")?;
    let words = stage.until_condition(NODE, "False", "AnotherOperator")?;
    let command = "kubectl -n kwasm scale deployment kwasm-operator --replicas=0";
    ensure!(words.contains(command), "nobody is told what to do: {words}");
    ensure!(stage.agent_pods()?.is_empty(), "an agent was summoned");
    ensure!(stage.config(NODE)? == before, "the configuration was touched");

    // What the words say to do.
    stage.kubectl(&[
        "-n",
        "kwasm",
        "scale",
        "deployment",
        "kwasm-operator",
        "--replicas=0",
    ])?;
    stage.until_provisioned(NODE)?;
    let words = until_said(stage, "Leftovers")?;
    ensure!(words.contains("kwasm/worker-17-provision-kwasm"), "{words}");
    let words = until_said(stage, "ForeignRuntimeClass")?;
    ensure!(
        words.contains("RuntimeClass wasmedge leads to the handler wasmedge"),
        "{words}"
    );
    let class = stage.get(&["runtimeclass", "wasmedge"])?;
    ensure!(class["handler"] == "wasmedge", "it was not left alone: {class}");
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(NODE)
}

/// What an Event of the coordinator's own Deployment says.
fn until_said(stage: &Stage, reason: &str) -> Result<String> {
    let mut words = String::new();
    stage.until(&format!("the Deployment to have the Event {reason}"), || {
        let events = stage.get(&[
            "events",
            "--namespace=quartermaster",
            &format!("--field-selector=involvedObject.kind=Deployment,involvedObject.name=quartermaster-coordinator,reason={reason}"),
        ])?;
        let first = events["items"].get(0).context("there is none")?;
        words = first["message"].as_str().unwrap_or_default().to_owned();
        Ok(())
    })?;
    Ok(words)
}
