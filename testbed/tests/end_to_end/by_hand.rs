//! What a person on a node sees of the agent, and what it refuses to do to that node.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::hand::{HAND, Hand};
use crate::stage::{CONFIG, Stage, server_pod};

/// Runs `body`, then `undo` in any case.
fn then<T>(body: impl FnOnce() -> Result<T>, undo: impl FnOnce() -> Result<()>) -> Result<T> {
    let result = body();
    let undone = undo();
    let value = result?;
    undone?;
    Ok(value)
}

impl Hand<'_> {
    fn config(&self) -> Result<String> {
        self.sh(&format!("cat {CONFIG}"))
    }

    /// The process that containerd is: another one after a restart.
    fn containerd(&self) -> Result<String> {
        self.sh("systemctl show --property=MainPID --value containerd.service")
    }

    /// Has systemd see a drop-in of containerd's unit, or none.
    fn drop_in(&self, lines: Option<&str>) -> Result<()> {
        let folder = "/run/systemd/system/containerd.service.d";
        let change = match lines {
            Some(lines) => {
                format!("mkdir -p {folder}; printf '[Service]\\n%s\\n' '{lines}' > {folder}/test.conf")
            }
            None => format!("rm -rf {folder}"),
        };
        self.sh(&format!("{change}; systemctl daemon-reload")).map(drop)
    }

    /// Nothing of ours is on the node, and its configuration is this.
    fn is_as_before(&self, config: &str) -> Result<()> {
        ensure!(
            self.config()? == config,
            "{}'s configuration is not what it was",
            self.node
        );
        let left = self.sh(
            "ls -d /opt/quartermaster /run/quartermaster /etc/containerd/.config* /etc/systemd/system/quartermaster* 2>/dev/null
             systemctl list-units --all --plain --no-legend 'quartermaster*'; true",
        )?;
        ensure!(
            left.trim().is_empty(),
            "{} keeps something of ours:\n{left}",
            self.node
        );
        Ok(())
    }

    /// The agent refuses with exit code 3 and these words, and the node is as it was.
    fn refuses(&self, words: &[&str]) -> Result<()> {
        let (config, containerd) = (self.config()?, self.containerd()?);
        let said = self.ends(3, "install")?;
        for words in words {
            ensure!(
                said.contains(words),
                "the refusal does not say {words:?}:\n{said}"
            );
        }
        ensure!(self.containerd()? == containerd, "containerd was restarted");
        self.is_as_before(&config)
    }
}

pub(crate) fn exit_codes_tell_a_person_what_came_of_it(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-24")?;
    let before = hand.config()?;
    hand.ends(2, "install --nonsense")?;
    hand.ends(2, "no-such-command")?;
    hand.ends(1, "install --payload /nowhere")?;
    ensure!(hand.config()? == before, "the configuration was touched");
    hand.agent("uninstall")?;
    hand.ends(4, "uninstall")?;

    let said = hand.ends(0, "install --json")?;
    let lines: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("{line:?} is no JSON")))
        .collect::<Result<_>>()?;
    let stages: Vec<&str> = lines
        .iter()
        .filter(|line| line["event"] == "finished")
        .filter_map(|line| line["stage"].as_str())
        .collect();
    for wanted in [
        "detect", "plan", "payload", "rehearse", "swap", "verify", "commit",
    ] {
        ensure!(stages.contains(&wanted), "no line tells of {wanted}: {stages:?}");
    }
    let last = lines.last().context("no line")?;
    ensure!(
        last["outcome"] == "installed" && last["exitCode"] == 0 && last["restarted"] == true,
        "the last line is {last}"
    );
    hand.ends(4, "install")?;
    hand.ends(4, "plan")?;
    let status: Value = serde_json::from_str(hand.ends(0, "status --json")?.trim())?;
    ensure!(
        status["state"] == "installed" && status["handlerServed"] == true,
        "the status is {status}"
    );

    // A second command while one works.
    let busy = hand.sh(&format!(
        "exec 9<>/opt/quartermaster/state/lock; flock -n 9 || exit 1; cd {HAND}; ./quartermaster-agent uninstall; echo code=$?"
    ))?;
    ensure!(
        busy.contains("Busy") && busy.contains("code=3"),
        "a second command is not refused:\n{busy}"
    );
    hand.ends(0, "uninstall")?;
    hand.is_as_before(&before)?;

    // Rehearsed well, and then it does not start: the message has the words that its start left behind.
    let spite = "ExecStartPre=/bin/sh -c \"if grep -q runtimes.crun /etc/containerd/config.toml; then echo level=error the spite of a test; exit 1; fi\"";
    then(
        || {
            hand.drop_in(Some(spite))?;
            let said = hand.ends(5, "install")?;
            ensure!(
                said.contains("RestartFailed")
                    && said.contains("the spite of a test")
                    && said.contains("has been put back"),
                "the daemon's own words are not told:\n{said}"
            );
            ensure!(
                hand.config()? == before,
                "the old configuration did not come back"
            );
            hand.sh("systemctl is-active containerd && crictl info >/dev/null")
                .map(drop)
        },
        || hand.drop_in(None),
    )?;
    hand.agent("uninstall")?;
    hand.is_as_before(&before)
}

pub(crate) fn a_unit_whose_restart_would_end_pods_is_refused(stage: &Stage) -> Result<()> {
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        for mode in ["control-group", "mixed"] {
            then(
                || {
                    hand.drop_in(Some(&format!("KillMode={mode}")))?;
                    hand.refuses(&["UnsupportedHost", &format!("KillMode={mode}"), "KillMode=process"])
                },
                || hand.drop_in(None),
            )?;
        }
    }
    Ok(())
}

pub(crate) fn units_that_restart_along_are_named_in_the_plan(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-24")?;
    let before = hand.config()?;
    hand.sh(
        "printf '[Unit]\\nBindsTo=containerd.service\\nAfter=containerd.service\\n[Service]\\nExecStart=/bin/sleep infinity\\n[Install]\\nRequiredBy=containerd.service\\n' > /run/systemd/system/bound.service
         systemctl daemon-reload; systemctl start bound.service",
    )?;
    then(
        || {
            let plan = hand.ends(0, "plan")?;
            ensure!(
                plan.contains("bound.service"),
                "the plan does not name it:\n{plan}"
            );
            let plan: Value = serde_json::from_str(hand.ends(0, "plan --json")?.trim())?;
            ensure!(
                plan.to_string().contains("bound.service"),
                "the plan does not name it: {plan}"
            );
            let said = hand.ends(0, "install")?;
            ensure!(said.contains("bound.service"), "it is not named:\n{said}");
            hand.ends(0, "uninstall").map(drop)
        },
        || {
            hand.sh(
                "systemctl stop bound.service; rm /run/systemd/system/bound.service; systemctl daemon-reload",
            )
            .map(drop)
        },
    )?;
    hand.is_as_before(&before)
}

pub(crate) fn a_restart_that_would_end_pods_is_refused_before_anything_is_touched(
    stage: &Stage,
) -> Result<()> {
    // Where containerd 1.x looks for a sandbox's process; on cgroup v2 there is only one place.
    let hand = Hand::on(stage, "worker-17")?;
    if hand.sh("test -d /sys/fs/cgroup/devices").is_err() {
        return Ok(());
    }
    const SANDBOX: &str = "id=$(crictl pods --quiet --state ready --name POD); pid=$(crictl inspectp --output go-template --template '{{.info.pid}}' $id)";
    const CONTAINER: &str = "id=$(crictl ps --quiet --pod $(crictl pods --quiet --state ready --name POD)); pid=$(crictl inspect --output go-template --template '{{.info.pid}}' $id)";
    // From 2.0 on containerd knows its sandboxes by another way, and its containers no better than before.
    for (pod, node, which, refused) in [
        ("stray-sandbox-17", "worker-17", SANDBOX, true),
        ("stray-sandbox-24", "worker-24", SANDBOX, false),
        ("stray-container-24", "worker-24", CONTAINER, true),
    ] {
        let hand = Hand::on(stage, node)?;
        let before = hand.config()?;
        stage.cluster.apply(&server_pod(pod, node, None))?;
        stage.until_phase(pod, "Running")?;
        hand.sh(&format!(
            "{}
             echo $pid > /sys/fs/cgroup/devices/cgroup.procs; ! ctr -n k8s.io tasks ps $id | grep -qw $pid",
            which.replace("POD", pod)
        ))?;
        let restarts = || -> Result<Value> {
            let object = stage.get(&["pod", pod])?;
            Ok(object["status"]["containerStatuses"][0]["restartCount"].clone())
        };
        if refused {
            hand.refuses(&["RestartUnsafe", &format!("default/{pod}"), "Nothing was touched"])?;
        } else {
            hand.ends(0, "install")?;
            hand.ends(0, "uninstall")?;
        }
        hand.is_as_before(&before)?;
        stage.until_phase(pod, "Running")?;
        ensure!(restarts()? == 0, "{pod} did not run through");
        stage.delete_pods(&[pod])?;
    }
    Ok(())
}

pub(crate) fn owner_mode_attributes_and_links_of_the_configuration_stay(stage: &Stage) -> Result<()> {
    const SHOW: &str = "cd /etc/containerd; readlink config.toml; stat -c '%u:%g %a' real.toml
        perl -e '($f, $k, $v) = (\"real.toml\", \"user.test\", \"\\0\" x 16); $n = syscall($ARGV[0], $f, $k, $v, 16); print substr($v, 0, $n), \"\\n\"' $GET; sha256sum < real.toml";
    // perl knows no attributes, and Debian's minimal root has no other tool.
    const NUMBERS: &str = "case $(uname -m) in x86_64) SET=188 GET=191 ;; *) SET=5 GET=8 ;; esac; ";
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        let before = hand.config()?;
        hand.sh(&format!(
            "{NUMBERS} set -e; cd /etc/containerd; mv config.toml real.toml; ln -s real.toml config.toml; chown 1234:4321 real.toml; chmod 640 real.toml
             perl -e '($f, $k, $v) = (\"real.toml\", \"user.test\", \"mark\"); exit syscall($ARGV[0], $f, $k, $v, 4, 0)' $SET"
        ))?;
        then(
            || {
                let was = hand.sh(&format!("{NUMBERS}{SHOW}"))?;
                ensure!(
                    was.starts_with("real.toml\n1234:4321 640\nmark\n"),
                    "the test's own marks are not there: {was}"
                );
                hand.ends(0, "install")?;
                let is = hand.sh(&format!("{NUMBERS}{SHOW}"))?;
                ensure!(
                    is.starts_with("real.toml\n1234:4321 640\nmark\n") && is != was,
                    "installed, it is {is}"
                );
                hand.ends(0, "uninstall")?;
                let is = hand.sh(&format!("{NUMBERS}{SHOW}"))?;
                ensure!(is == was, "put back, it is {is} and was {was}");
                Ok(())
            },
            || {
                hand.sh("cd /etc/containerd; cat real.toml > plain && mv plain config.toml && rm real.toml")
                    .map(drop)
            },
        )?;
        hand.is_as_before(&before)?;
    }
    Ok(())
}

pub(crate) fn a_file_that_cannot_be_replaced_is_left_alone_and_containerd_too(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-17")?;
    let (before, containerd) = (hand.config()?, hand.containerd()?);
    for (obstacle, undo, words) in [
        (
            "mount --bind /etc/containerd/config.toml /etc/containerd/config.toml",
            "umount /etc/containerd/config.toml",
            "mount point by itself",
        ),
        (
            "mount --bind /etc/containerd /etc/containerd; mount -o remount,bind,ro /etc/containerd",
            "umount /etc/containerd",
            "read-only",
        ),
        (
            "mkdir /root/keep; cp -a /etc/containerd/. /root/keep; mount -t tmpfs -o size=64k tmpfs /etc/containerd; cp -a /root/keep/. /etc/containerd; dd if=/dev/zero of=/etc/containerd/fill bs=4k 2>/dev/null; true",
            "umount /etc/containerd; rm -rf /root/keep",
            "no space left",
        ),
    ] {
        hand.sh(obstacle)?;
        then(
            || {
                let said = hand.ends(1, "install")?;
                ensure!(
                    said.contains(words) && said.contains("Nothing was changed"),
                    "it does not say {words:?}:\n{said}"
                );
                ensure!(hand.containerd()? == containerd, "containerd was restarted");
                ensure!(hand.config()? == before, "the configuration was touched");
                Ok(())
            },
            || hand.sh(undo).map(drop),
        )?;
        hand.agent("uninstall")?;
        hand.is_as_before(&before)?;
    }
    Ok(())
}

pub(crate) fn a_configuration_that_changes_before_its_swap_is_planned_again(stage: &Stage) -> Result<()> {
    let hand = Hand::on(stage, "worker-24")?;
    let before = hand.config()?;
    // The host unit stops before it looks at the file for the last time, and somebody writes into it.
    hand.sh(&format!(
        "set -e; cd {HAND}; rm -rf faults; mkdir faults; echo apply 2 stop > faults/order
         QUARTERMASTER_FAULTS={HAND}/faults ./quartermaster-agent install --payload payload > first 2>&1 & agent=$!
         for n in $(seq 1000); do
             pid=$(systemctl show --property=MainPID --value quartermaster-apply.service)
             [ \"$pid\" != 0 ] && grep -q '^State:.T' /proc/$pid/status && break; sleep 0.02
         done
         [ \"$pid\" != 0 ]; echo '# of somebody else' >> {CONFIG}; kill -CONT $pid; wait $agent; rm -rf faults"
    ))
    .with_context(|| hand.sh(&format!("cat {HAND}/first")).unwrap_or_default())?;
    let said = hand.sh(&format!("cat {HAND}/first"))?;
    ensure!(
        said.contains("planning again"),
        "it was not planned again:\n{said}"
    );
    let config = hand.config()?;
    ensure!(
        config.contains("# of somebody else") && config.contains("runtimes.crun"),
        "one of the two changes is lost:\n{config}"
    );
    hand.ends(0, "uninstall")?;
    let theirs = format!("{}# of somebody else\n", before);
    hand.is_as_before(&theirs)?;
    hand.sh(&format!("sed -i '$d' {CONFIG}; systemctl restart containerd"))?;
    hand.is_as_before(&before)
}

pub(crate) fn a_node_without_a_network_is_installed_and_proven_by_hand(stage: &Stage) -> Result<()> {
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        let before = hand.config()?;
        hand.sh("mv /etc/cni/net.d /etc/cni/away; mkdir /etc/cni/net.d; systemctl restart containerd")?;
        then(
            || {
                let not_ready = "for n in $(seq 500); do crictl info 2>/dev/null | tr -d ' \\n' | grep -q 'NetworkReady\",\"status\":false\\|\"status\":false,\"type\":\"NetworkReady\"' && exit; sleep 0.02; done; exit 1";
                hand.sh(not_ready).context("the node has a network still")?;
                hand.ends(0, "install")?;
                hand.sh(not_ready).context("the network came from somewhere")?;
                hand.ends(0, "uninstall").map(drop)
            },
            || {
                hand.sh("rm -r /etc/cni/net.d; mv /etc/cni/away /etc/cni/net.d; systemctl restart containerd")
                    .map(drop)
            },
        )?;
        hand.is_as_before(&before)?;
    }
    Ok(())
}
