//! A node as KWasm's node installer leaves it: its handler is kept while it works, without a gap, and replaced when it
//! does not.

use anyhow::{Context, Result, ensure};

use crate::hand::{HAND, Hand};
use crate::stage::{CONFIG, Stage, wasm_pod};

const NODE: &str = "worker-17";
const LABEL: &str = "kwasm.sh/kwasm-provisioned";

/// What the installer appends to containerd's configuration.
const TABLES: &str = r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["module.wasm.image/variant", "run.oci.handler"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
    BinaryName = "/opt/kwasm/bin/crun"
"#;

pub(crate) fn a_node_of_kwasm_is_adopted_without_a_restart_and_put_back(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, NODE)?;
    let original = stage.config(NODE)?;
    // Its crun finds its libraries in a folder of its own, the path to which is as long as the payload's.
    let crun = "sed 's#/opt/quartermaster/current/lib#/opt/kwasm-stand-in/lib///////#g' payload/bin/crun >/opt/kwasm/bin/crun";
    let outcome = provisioned(&hand, crun).and_then(|()| {
        let left = stage.config(NODE)?;
        let daemon = main_pid(&hand)?;
        annotate(stage)?;
        stage.until_provisioned(NODE)?;
        ensure!(stage.config(NODE)? == left, "the configuration was touched");
        ensure!(main_pid(&hand)? == daemon, "containerd was restarted");
        stage.cluster.apply(&wasm_pod("adopted", NODE, "crun"))?;
        stage.until_phase("adopted", "Succeeded")?;
        stage.delete_pods(&["adopted"])?;
        stage.until_agents_are_gone()?;
        stage.annotate(&[NODE], "kwasm.sh/kwasm-node-")?;
        stage.until_unmarked(NODE)?;
        gone(stage, &hand, &original)
    });
    cleared(&hand, &original)?;
    outcome
}

pub(crate) fn a_handler_of_kwasm_that_does_not_work_is_replaced(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, NODE)?;
    let original = stage.config(NODE)?;
    let outcome = provisioned(&hand, "cp /usr/bin/false /opt/kwasm/bin/crun").and_then(|()| {
        annotate(stage)?;
        stage.until_provisioned(NODE)?;
        let config = stage.config(NODE)?;
        ensure!(
            config.contains("/opt/quartermaster/current/bin/crun") && !config.contains("/opt/kwasm"),
            "the handler was not replaced:\n{config}"
        );
        stage.annotate(&[NODE], "kwasm.sh/kwasm-node-")?;
        stage.until_unmarked(NODE)?;
        gone(stage, &hand, &original)
    });
    cleared(&hand, &original)?;
    outcome
}

/// Does what the installer does, with `crun` as the command that makes its runtime.
fn provisioned(hand: &Hand<'_>, crun: &str) -> Result<()> {
    hand.put("tables", TABLES)?;
    hand.sh(&format!(
        "set -e; cd {HAND}; cp {CONFIG} original
         mkdir -p /opt/kwasm/bin /opt/kwasm/lib /opt/kwasm-stand-in; cp -a payload/lib /opt/kwasm-stand-in/
         {crun}; chmod 755 /opt/kwasm/bin/crun
         echo stand-in > /opt/kwasm/lib/libwasmedge.so
         ln -sf /opt/kwasm/lib/libwasmedge.so /lib/libwasmedge.so.0
         cat tables >> {CONFIG}; systemctl restart containerd; touch /opt/kwasm/active"
    ))
    .context("the node can't be put into the state that KWasm leaves")?;
    Ok(())
}

/// Annotation and label, both at once, as they are on a node that KWasm provisioned.
fn annotate(stage: &Stage) -> Result<()> {
    let patch = format!(
        r#"{{"metadata":{{"annotations":{{"kwasm.sh/kwasm-node":"true"}},"labels":{{"{LABEL}":"{NODE}"}}}}}}"#
    );
    stage.kubectl(&["patch", "node", NODE, "--patch", &patch])?;
    Ok(())
}

fn main_pid(hand: &Hand<'_>) -> Result<String> {
    hand.sh("systemctl show --property=MainPID --value containerd")
}

fn gone(stage: &Stage, hand: &Hand<'_>, original: &str) -> Result<()> {
    let config = stage.config(NODE)?;
    ensure!(
        config == original,
        "the configuration is not what it was:\n{config}"
    );
    let left = hand.sh("ls -d /opt/kwasm /lib/libwasmedge.so.0 /opt/quartermaster 2>/dev/null || true")?;
    ensure!(left.is_empty(), "there is still {left}");
    Ok(())
}

/// Puts the node back, whatever a scenario that failed has left.
fn cleared(hand: &Hand<'_>, original: &str) -> Result<()> {
    hand.put("original", original)?;
    hand.sh(&format!(
        "rm -rf /opt/kwasm /opt/kwasm-stand-in; rm -f /lib/libwasmedge.so.0
         cmp -s {HAND}/original {CONFIG} || {{ cat {HAND}/original > {CONFIG}; systemctl restart containerd; }}"
    ))?;
    Ok(())
}
