//! Nodes that come, go, and are none.

use anyhow::{Result, ensure};
use testbed::faults::Rules;

use crate::hand::Hand;
use crate::prefetch_object::prefetch;
use crate::stage::{SOON, Stage};

const NEW: &str = "worker-21";
const DROP_IN: &str = "/etc/systemd/system/kubelet.service.d/taints.conf";

impl Stage {
    fn has_gate(&self) -> Result<bool> {
        let node = self.get(&["node", NEW])?;
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        Ok(taints.iter().any(|taint| taint["key"] == "kwasm.sh/not-ready"))
    }
}

pub(crate) fn a_new_node_is_kept_out_of_service_until_its_gated_images_are_there(
    stage: &Stage,
) -> Result<()> {
    let faults = stage.faults(5011)?;
    let image = format!("{}/server:1.0", faults.name());
    let hand = Hand::on(stage, NEW)?;
    hand.forget(&[&image])?;
    // What is not there can't come until the rule is gone.
    faults.set(Rules {
        password: Some(("nobody".into(), "knows".into())),
        ..Rules::default()
    });
    stage.cluster.apply(&prefetch(
        "gated",
        &format!(
            "{{images: ['{image}'], node_filter: {NEW}, retry_after: 2, gate: true, pull: {{attempts: 1}}}}"
        ),
    ))?;
    stage.until_image_says("gated", &image, "Unauthorized")?;
    // The node is deleted in the middle and registers again as a cluster's autoscaler has it.
    hand.sh(&format!(
        "mkdir -p $(dirname {DROP_IN}); line=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/kubelet.service)
         printf '[Service]\\nExecStart=\\nExecStart=%s --register-with-taints=kwasm.sh/not-ready:NoSchedule\\n' \"$line\" > {DROP_IN}
         systemctl daemon-reload; systemctl stop kubelet"
    ))?;
    let outcome = registers_anew(stage, &hand, &image, &faults);
    hand.sh(&format!(
        "rm {DROP_IN}; systemctl daemon-reload; systemctl restart kubelet"
    ))?;
    stage.cluster.wait_until_ready(&[NEW], SOON)?;
    outcome?;
    a_node_that_is_none_counts_apart(stage)?;
    stage.kubectl(&["delete", "prefetch", "--all", "--timeout=30s"])?;
    stage.until_agents_are_gone()
}

fn registers_anew(
    stage: &Stage,
    hand: &Hand<'_>,
    image: &str,
    faults: &testbed::faults::Faults,
) -> Result<()> {
    stage.kubectl(&["delete", "node", NEW, "--timeout=30s"])?;
    stage.until("the Prefetch to mean no node", || {
        let status = stage.status("gated")?;
        ensure!(status["conditions"][0]["reason"] == "NoNodes", "{status}");
        Ok(())
    })?;
    hand.sh("systemctl start kubelet")?;
    stage.cluster.wait_until_ready(&[NEW], SOON)?;
    stage.until_image_says("gated", image, "Unauthorized")?;
    ensure!(
        stage.has_gate()?,
        "the node takes pods before its images are there"
    );
    faults.set(Rules::default());
    stage.until("the node to come into service", || {
        ensure!(!stage.has_gate()?, "it carries kwasm.sh/not-ready");
        Ok(())
    })?;
    stage.has_image(NEW, image)?;
    stage.until_prefetch("gated", "READY").map(drop)
}

/// A virtual kubelet runs no agent and holds nobody back.
fn a_node_that_is_none_counts_apart(stage: &Stage) -> Result<()> {
    stage.cluster.apply(
        "apiVersion: v1\nkind: Node\nmetadata: {name: cloud-worker-21, labels: {type: virtual-kubelet}}\nstatus: {conditions: [{type: Ready, status: 'True'}]}\n",
    )?;
    let counted = stage.until("the virtual node to count apart", || {
        let status = stage.status("gated")?;
        ensure!(
            status["nodes"]["excluded"] == 1 && status["nodes"]["ready"] == 1 && status["phase"] == "READY",
            "{status}"
        );
        Ok(())
    });
    stage.kubectl(&["delete", "node", "cloud-worker-21"])?;
    counted
}
