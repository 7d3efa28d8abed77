//! What people tell and ask the leader, by kubectl into its pod.

use anyhow::{Context, Result, ensure};

use crate::stage::{NODES, Stage};

impl Stage {
    /// Takes back a pause, a halt or a removal of everything.
    pub(crate) fn forget_what_was_told(&self) -> Result<()> {
        self.kubectl(&[
            "patch",
            "configmap",
            "quartermaster-control",
            "--namespace=quartermaster",
            "--type=merge",
            "--patch={\"data\":null}",
        ])
        .map(drop)
    }

    /// Runs the coordinator's own program in the pod that leads.
    fn leader(&self, args: &[&str]) -> Result<String> {
        let lease = self.get(&["lease", "quartermaster-coordinator", "--namespace=quartermaster"])?;
        let pod = lease["spec"]["holderIdentity"].as_str().context("nobody leads")?;
        let mut all = vec![
            "exec",
            "--namespace=quartermaster",
            pod,
            "--",
            "/quartermaster-coordinator",
        ];
        all.extend(args);
        self.kubectl(&all)
    }
}

pub(crate) fn the_leader_is_asked_paused_and_resumed(stage: &Stage) -> Result<()> {
    let said = stage.leader(&["status"])?;
    for node in NODES {
        ensure!(said.contains(node), "{node} is missing: {said}");
    }
    let before = stage.config("worker-24")?;
    let plan = stage.leader(&["plan", "worker-24"])?;
    ensure!(
        plan.contains("+++ ") && plan.contains("runtimes.crun]"),
        "this is no diff: {plan}"
    );
    ensure!(
        stage.config("worker-24")? == before,
        "planning has changed the node"
    );
    stage.until_agents_are_gone()?;

    ensure!(stage.leader(&["pause"])?.contains("paused: true"));
    stage.until("the leader to be paused", || {
        let said = stage.leader(&["status"])?;
        ensure!(said.contains("PAUSED"), "{said}");
        Ok(())
    })?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
    // It has decided about the node once it has answered to a change that came later.
    stage.cluster.apply(
        "apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {name: probe, namespace: default}\nspec: {}\n",
    )?;
    stage.until_prefetch("probe", "PENDING")?;
    ensure!(
        stage.agent_pods()?.is_empty(),
        "an agent was summoned in the pause"
    );
    ensure!(stage.leader(&["resume"])?.contains("paused: false"));
    stage.until_provisioned("worker-24")?;
    stage.until("the report of the node", || {
        let report = stage.leader(&["reports", "worker-24"])?;
        ensure!(
            report.contains("Install") && report.contains("rehearse"),
            "{report}"
        );
        Ok(())
    })?;
    stage.kubectl(&["delete", "prefetch", "probe"])?;
    stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked("worker-24")?;
    stage.until_agents_are_gone()
}

pub(crate) fn everything_is_removed_whatever_annotations_say(stage: &Stage) -> Result<()> {
    let before = stage.config("worker-21")?;
    for node in ["worker-17", "worker-21"] {
        stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
        stage.until_provisioned(node)?;
    }
    // A containerd that restarts under the leader's pod ends the exec, and nothing else: it is asked again.
    stage.until("everything to be removed", || {
        let said = stage.leader(&["remove-all", "--wait", "30s"])?;
        ensure!(said.contains("nothing of Quartermaster is left"), "{said}");
        Ok(())
    })?;
    for node in ["worker-17", "worker-21"] {
        stage.until_unmarked(node)?;
    }
    ensure!(
        stage.config("worker-21")? == before,
        "the configuration is not what it was"
    );
    stage.annotate(&["worker-17", "worker-21"], "kwasm.sh/kwasm-node-")?;
    stage.forget_what_was_told()?;
    stage.until_agents_are_gone()
}
