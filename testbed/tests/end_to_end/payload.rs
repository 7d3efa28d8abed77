//! What is put on a node: it takes nothing from the node, is never used half, and can be replaced under running pods.

use anyhow::{Context, Result, ensure};
use testbed::deployment;

use crate::hand::{HAND, Hand};
use crate::stage::{Stage, server_pod};

const INSTALLED: &str = "/opt/quartermaster";

/// A module that sleeps for ever, a fifth of a second at a time.
const SLEEPER: &str = r#"(module
  (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 16) "\01")
  (data (i32.const 24) "\00\c2\eb\0b")
  (func (export "_start")
    (loop $again
      (drop (call $poll (i32.const 0) (i32.const 64) (i32.const 1) (i32.const 128)))
      (br $again))))"#;

/// A root in which there is nothing but the payload and a module, and what the kernel gives.
const EMPTY_ROOT: &str = r#"set -e; cd /root/hand; rm -rf empty mnt bundle; mkdir -p empty mnt bundle/rootfs/proc bundle/rootfs/dev
crictl pull registry.testbed:5000/hello-wasm:1.0 >/dev/null
ctr -n k8s.io images mount registry.testbed:5000/hello-wasm:1.0 /root/hand/mnt >/dev/null
cp mnt/hello.wasm bundle/rootfs/; ctr -n k8s.io images unmount --rm /root/hand/mnt >/dev/null
cat > bundle/config.json <<'J'
{"ociVersion": "1.0.2", "root": {"path": "rootfs"},
 "process": {"user": {"uid": 0, "gid": 0}, "args": ["/hello.wasm"], "cwd": "/", "env": ["PATH=/"]},
 "annotations": {"module.wasm.image/variant": "compat-smart"},
 "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
 "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"}]}}
J
unshare --mount --pid --fork bash -ec '
root=/root/hand/empty; home=/opt/quartermaster
mount -t tmpfs tmpfs $root; cd $root; mkdir -p proc run tmp sys bundle .$home
cp -a $home/. .$home; cp -a /root/hand/bundle/. bundle
mount -t proc proc proc; mount --rbind /sys sys
ls -A
chroot . $home/current/bin/crun --version
chroot . $home/current/bin/crun --root /run/crun --cgroup-manager=disabled run --bundle /bundle module'
rm -rf empty mnt bundle"#;

pub(crate) fn the_payload_runs_a_module_on_a_root_without_a_libc(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-24")?;
    hand.ends(0, "install")?;
    let said = hand.sh(EMPTY_ROOT);
    hand.ends(0, "uninstall")?;
    let said = said?;
    ensure!(
        said.starts_with("bundle\nopt\nproc\nrun\nsys\ntmp\n"),
        "the root is not empty: {said}"
    );
    ensure!(
        said.contains("+WASM:wasmedge"),
        "crun does not know WasmEdge there:\n{said}"
    );
    ensure!(
        said.contains("hello from WebAssembly"),
        "no module ran there:\n{said}"
    );
    Ok(())
}

pub(crate) fn a_cut_or_altered_copy_is_never_used(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-17")?;
    let library = "lib/libwasmedge.so.0";
    // In the source it is refused.
    hand.sh(&format!(
        "cd {HAND}; cp -a payload cut; truncate -s -4096 cut/{library}"
    ))?;
    let said = hand.ends(1, &format!("install --payload {HAND}/cut"))?;
    ensure!(
        said.contains("PayloadFailed") && said.contains(library) && said.contains("damaged"),
        "it does not say what is damaged:\n{said}"
    );
    hand.sh(&format!(
        "rm -r {HAND}/cut; test ! -e {INSTALLED}/current; ! grep -q runtimes.crun /etc/containerd/config.toml"
    ))?;
    // On the node it is copied anew, whether cut or altered.
    hand.ends(0, "install")?;
    let file = format!("{INSTALLED}/current/{library}");
    for damage in [
        format!("truncate -s 1000 {file}"),
        format!("printf x | dd of={file} bs=1 seek=1000 conv=notrunc 2>/dev/null"),
    ] {
        hand.sh(&damage)?;
        let said = hand.ends(0, "install")?;
        ensure!(said.contains(" copied, "), "it was not copied anew:\n{said}");
        hand.sh(&format!("cmp {file} {HAND}/payload/{library}"))?;
    }
    hand.ends(4, "install")?;
    hand.ends(0, "uninstall").map(drop)
}

/// As on Container-Optimized OS, where programs run from this folder only.
const OTHER_PREFIX: &str = "/home/kubernetes/bin";

pub(crate) fn an_installation_below_another_prefix_works_is_found_again_and_goes_whole(
    stage: &Stage,
) -> Result<()> {
    for node in ["worker-17", "worker-24"] {
        below_another_prefix(stage, node).with_context(|| format!("on {node}"))?;
    }
    Ok(())
}

fn below_another_prefix(stage: &Stage, node: &str) -> Result<()> {
    let hand = Hand::on(stage, node)?;
    let before = stage.config(node)?;
    let home = format!("{OTHER_PREFIX}/quartermaster");
    // A folder that is not there is no prefix: it would be left behind.
    hand.sh("rm -rf /home/kubernetes")?;
    let said = hand.ends(3, &format!("install --prefix {OTHER_PREFIX}"))?;
    ensure!(said.contains("is not there"), "it does not say why:\n{said}");
    hand.sh(&format!("test ! -e /home/kubernetes; mkdir -p {OTHER_PREFIX}"))?;

    // That a module runs through it is part of the installation.
    hand.ends(0, &format!("install --prefix {OTHER_PREFIX}"))?;
    let config = stage.config(node)?;
    ensure!(
        config.contains(&format!("\"{home}/current/bin/crun\"")) && !config.contains(INSTALLED),
        "the handler's program is another:\n{config}"
    );
    hand.sh(&format!(
        "test ! -e {INSTALLED}; {home}/current/bin/crun --version"
    ))?;

    // From here on nobody says where it is.
    let status = hand.ends(0, "status")?;
    ensure!(
        status.contains("installed") && !status.contains("not installed"),
        "{status}"
    );
    hand.ends(4, "install")?;
    let said = hand.ends(3, "install --prefix /srv")?;
    ensure!(
        said.contains(OTHER_PREFIX),
        "it does not say where it is:\n{said}"
    );
    let crun = format!("{home}/current/bin/crun");
    for damage in [
        format!("printf x | dd of={crun} bs=1 seek=100000 conv=notrunc 2>/dev/null"),
        format!("cp {HAND}/payload/bin/crun {crun}"),
    ] {
        let whole = hand.sh(&format!("sha256sum {crun}"))?;
        hand.sh(&damage)?;
        ensure!(
            hand.sh(&format!("sha256sum {crun}"))? != whole,
            "it is not damaged"
        );
        let said = hand.ends(0, "install")?;
        ensure!(said.contains(" copied, "), "it was not copied anew:\n{said}");
        ensure!(hand.sh(&format!("sha256sum {crun}"))? == whole, "it is another");
    }

    // The copy on the node knows its place as well.
    let said = hand.sh(&format!("{home}/current/bin/quartermaster-agent uninstall"))?;
    ensure!(said.contains("Removed."), "it said {said}");
    ensure!(
        stage.config(node)? == before,
        "the configuration is not what it was"
    );
    let left = hand.sh(&format!(
        "ls -A {OTHER_PREFIX}; ls -d {INSTALLED} /run/quartermaster /etc/containerd/.config* /etc/systemd/system/quartermaster* 2>/dev/null
         systemctl list-units --all --plain --no-legend 'quartermaster*'; rm -r /home/kubernetes"
    ))?;
    ensure!(left.trim().is_empty(), "{node} keeps something of ours:\n{left}");
    Ok(())
}

pub(crate) fn an_upgrade_leaves_pods_running_and_containerd_alone(stage: &Stage) -> Result<()> {
    let node = "worker-24";
    stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned(node)?;
    stage.until_agents_are_gone()?;
    stage.cluster.apply(&server_pod("serves", node, Some("crun")))?;
    stage.cluster.apply(&sleeper(node)?)?;
    for pod in ["serves", "sleeps"] {
        stage.until_phase(pod, "Running")?;
    }
    let hand = Hand::on(stage, node)?;
    let pods = || -> Result<Vec<String>> {
        ["serves", "sleeps"]
            .iter()
            .map(|pod| {
                let status = &stage.get(&["pod", pod])?["status"]["containerStatuses"][0];
                ensure!(status["restartCount"] == 0, "{pod} was restarted: {status}");
                Ok(status["containerID"].as_str().unwrap_or_default().to_owned())
            })
            .collect()
    };
    let containerd = || hand.sh("systemctl show --property=MainPID --value containerd.service");
    let versions = || hand.sh(&format!("cd {INSTALLED}; ls -d [0-9]*/ | wc -l"));
    let (running, daemon) = (pods()?, containerd()?);
    let old = hand.sh(&format!("readlink {INSTALLED}/current"))?;

    hand.sh(&format!(
        "set -e; cd {HAND}; rm -rf second; cp -a payload second; cd second; echo 2 > lib/second; sha256sum lib/second >> SHA256SUMS"
    ))?;
    hand.ends(0, &format!("install --payload {HAND}/second"))?;
    let new = hand.sh(&format!("readlink {INSTALLED}/current"))?;
    ensure!(new != old, "the link was not moved from {old}");
    ensure!(pods()? == running, "a container did not live through it");
    ensure!(containerd()? == daemon, "containerd was restarted");
    ensure!(
        versions()?.trim() == "2",
        "the version that running modules map is gone"
    );

    // Containers of the old version take commands: a second server finds the port taken and ends.
    let twice = stage
        .kubectl(&["exec", "serves", "--", "/server"])
        .err()
        .context("a second server runs in the container")?;
    ensure!(
        format!("{twice:#}").contains("exit code 1"),
        "exec does not work in a container of the old version: {twice:#}"
    );
    stage.delete_pods(&["serves"])?;
    hand.ends(4, &format!("install --payload {HAND}/second"))?;
    ensure!(
        versions()?.trim() == "2",
        "the version that a running module maps is gone"
    );
    stage.delete_pods(&["sleeps"])?;
    hand.ends(4, &format!("install --payload {HAND}/second"))?;
    ensure!(versions()?.trim() == "1", "the version that nobody uses stays");
    hand.sh(&format!("test -x {INSTALLED}/{}/bin/crun", new.trim()))?;

    stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(node)?;
    hand.sh(&format!("rm -r {HAND}/second; test ! -e {INSTALLED}"))?;
    stage.until_agents_are_gone()
}

/// A pod whose module sleeps, and the module.
fn sleeper(node: &str) -> Result<String> {
    use std::fmt::Write as _;
    let module = wat::parse_str(SLEEPER)?;
    let mut bytes = String::new();
    for byte in &module {
        write!(bytes, "{byte:02x}")?;
    }
    // A ConfigMap holds binary data in base64, which kubectl makes from a file; coreutils do it here.
    let encoded = testbed::tool::Tool::new("sh")
        .args([
            "-c",
            "printf %s \"$1\" | sed 's/../\\\\x&/g' | xargs -0 printf | base64 -w0",
            "sh",
            &bytes,
        ])
        .output()?;
    Ok(format!(
        r#"
apiVersion: v1
kind: ConfigMap
metadata: {{name: sleeper}}
binaryData: {{sleeper.wasm: {encoded}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: sleeps, annotations: {{module.wasm.image/variant: compat-smart}}}}
spec:
  runtimeClassName: wasmedge
  terminationGracePeriodSeconds: 1
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  containers:
    - name: sleeper
      image: registry.testbed:5000/hello-wasm:1.0
      command: [/module/sleeper.wasm]
      volumeMounts: [{{name: module, mountPath: /module}}]
  volumes: [{{name: module, configMap: {{name: sleeper}}}}]
"#
    ))
}

pub(crate) fn the_copy_on_a_node_puts_it_back_when_the_cluster_has_forgotten_us(stage: &Stage) -> Result<()> {
    let node = "worker-17";
    let before = stage.config(node)?;
    stage.annotate(&[node], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned(node)?;
    stage.kubectl(&["delete", "namespace", "quartermaster", "--timeout=60s"])?;
    let gone = (|| {
        let said = stage.cluster.exec(
            node,
            &[
                &format!("{INSTALLED}/current/bin/quartermaster-agent"),
                "uninstall",
            ],
        )?;
        ensure!(said.contains("Removed."), "it said {said}");
        ensure!(
            stage.config(node)? == before,
            "the configuration is not what it was"
        );
        let left = stage.cluster.exec(
            node,
            &["sh", "-c", "ls -d /opt/quartermaster /run/quartermaster /etc/containerd/.config* /etc/systemd/system/quartermaster* 2>/dev/null; true"],
        )?;
        ensure!(left.is_empty(), "{node} keeps something of ours:\n{left}");
        Ok(())
    })();
    // The next coordinator finds a node that is not wanted any more, and takes its marks off.
    deployment::deploy(&stage.cluster, &stage.product, &Stage::options())?;
    stage.annotate(&[node], "kwasm.sh/kwasm-node-")?;
    stage.until_unmarked(node)?;
    stage.until_agents_are_gone()?;
    gone
}
