//! One agent pulls on one node: by every kind of name, from registries that want passwords, refuse, stall or are a
//! mirror, beside a kubelet, over a restart of containerd, on a disk that is too small.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::faults::{Faults, Rules};
use testbed::images;

use crate::hand::{HAND, Hand};
use crate::stage::{NODES, Stage};

const SERVER: &str = "registry.testbed:5000/server:1.0";
const INIT: &str = "registry.testbed:5000/server-init:1.0";
const CANARY: &str = "canary-8d1f0c5e";
const MB: usize = 1_000_000;

impl Stage {
    /// A registry that misbehaves as it is told, known to all nodes.
    fn faults(&self, port: u16) -> Result<Faults> {
        let faults = self.cluster.faults(port)?;
        for node in NODES {
            let name = faults.name();
            let folder = format!("/etc/containerd/certs.d/{name}");
            let script = format!(
                "mkdir -p {folder} && printf '[host.\"http://{name}\"]\\n  capabilities = [\"pull\", \"resolve\"]\\n' > {folder}/hosts.toml"
            );
            self.cluster.exec(node, &["sh", "-c", &script])?;
        }
        Ok(faults)
    }

    /// An image of bytes that do not compress, in the registry.
    fn push_random(&self, name: &str, size: usize) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let archive = folder.path().join("image.tar");
        images::random(&archive, name, size)?;
        self.cluster.push(&archive, name)
    }
}

impl Hand<'_> {
    fn forget(&self, references: &[&str]) -> Result<()> {
        for reference in references {
            self.sh(&format!("crictl rmi {reference} >/dev/null 2>&1 || true"))?;
        }
        Ok(())
    }

    /// Pulls, and gives what is said of each image, in the order given.
    fn pull(&self, line: &str, images: &[&str]) -> Result<Vec<Value>> {
        let said = self.agent(&format!("pull --json {line} {} 2>/dev/null", images.join(" ")))?;
        let answers: Vec<Value> = said
            .out
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        images
            .iter()
            .map(|image| {
                let answer = answers.iter().find(|answer| answer["image"] == *image);
                answer
                    .cloned()
                    .with_context(|| format!("on {}: no answer for {image} in {}", self.node, said.out))
            })
            .collect()
    }

    fn pulls(&self, line: &str, images: &[&str]) -> Result<Vec<Value>> {
        let answers = self.pull(line, images)?;
        for answer in &answers {
            ensure!(answer["ready"] == true, "on {}: {answer}", self.node);
        }
        Ok(answers)
    }

    fn is_refused(&self, line: &str, image: &str, reason: &str) -> Result<Value> {
        let answer = self.pull(line, &[image])?.remove(0);
        ensure!(
            answer["ready"] == false && answer["reason"] == reason,
            "on {}: not {reason} but {answer}",
            self.node
        );
        Ok(answer)
    }

    fn credentials(&self, name: &str, entries: &[(&str, &str, &str)]) -> Result<String> {
        let auths: serde_json::Map<String, Value> = entries
            .iter()
            .map(|(key, username, password)| {
                let entry = serde_json::json!({"username": username, "password": password});
                ((*key).to_owned(), entry)
            })
            .collect();
        self.put(name, &serde_json::json!({"auths": auths}).to_string())?;
        Ok(format!("--credentials {HAND}/{name}"))
    }
}

pub(crate) fn every_kind_of_name_is_pulled_and_starts_without_a_second_pull(stage: &Stage) -> Result<()> {
    let index = stage.cluster.in_fabric(&[
        "skopeo",
        "inspect",
        "--tls-verify=false",
        "--format={{.Digest}}",
        &format!("docker://{SERVER}"),
    ])?;
    let digest = index.trim();
    let by_digest = format!("registry.testbed:5000/server@{digest}");
    let by_both = format!("{SERVER}@{digest}");
    stage.push_random("untagged:latest", MB)?;
    let foreign = tempfile::tempdir()?;
    let archive = foreign.path().join("foreign.tar");
    images::foreign(&archive, "foreign:1.0")?;
    stage.cluster.push(&archive, "foreign:1.0")?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[SERVER, INIT, "registry.testbed:5000/untagged"])?;
        hand.pulls("", &[&by_both])?;
        let names = hand.sh("ctr -n k8s.io images ls -q")?;
        ensure!(
            !names.lines().any(|name| name.contains(":1.0@")),
            "{node} stores a tag beside a digest: {names}"
        );
        let answers = hand.pulls("", &[SERVER, &by_digest, "registry.testbed:5000/untagged"])?;
        ensure!(answers[0]["digest"] == by_digest, "{}", answers[0]);
        ensure!(answers[2]["fetched"].as_u64() > Some(MB as u64), "{}", answers[2]);
        hand.is_refused("", "registry.testbed:5000/foreign:1.0", "NotForThisNode")?;
        hand.is_refused("", "registry.testbed:5000/absent:1.0", "ImageNotFound")?;
        hand.is_refused("", "UPPER/x:1", "InvalidReference")?;
        let unpacked = hand.sh("ctr -n k8s.io snapshots ls | grep -c Committed")?;
        for (name, image) in [("tag", SERVER), ("digest", by_digest.as_str())] {
            stage.cluster.apply(&format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: by-{name}-{node}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  nodeSelector: {{kubernetes.io/hostname: {node}}}\n  containers: [{{name: c, image: \"{image}\", imagePullPolicy: Never}}]\n"
            ))?;
        }
        for name in ["tag", "digest"] {
            let pod = format!("by-{name}-{node}");
            stage.until_phase(&pod, "Running")?;
            stage.delete_pods(&[&pod])?;
        }
        let after = hand.sh("ctr -n k8s.io snapshots ls | grep -c Committed")?;
        ensure!(
            unpacked == after,
            "{node} unpacked again: {unpacked} and then {after}"
        );
    }
    Ok(())
}

pub(crate) fn secrets_are_tried_in_turn_and_written_nowhere(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5001)?;
    let name = faults.name();
    let (server, init) = (format!("{name}/server:1.0"), format!("{name}/server-init:1.0"));
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        faults.set(Rules {
            password: Some(("robot".into(), CANARY.into())),
            ..Rules::default()
        });
        hand.forget(&[&server, &init])?;
        let started = hand.sh("date +%s")?;
        hand.is_refused("", &server, "Unauthorized")?;
        let path = format!("{name}/server");
        let wrong = hand.credentials("wrong.json", &[(name.as_str(), "robot", "not-it")])?;
        hand.is_refused(&wrong, &server, "Unauthorized")?;
        // The longer key is tried first, and it is the wrong one.
        let both = hand.credentials(
            "both.json",
            &[
                (path.as_str(), "robot", "not-it"),
                (name.as_str(), "robot", CANARY),
            ],
        )?;
        hand.pulls(&both, &[&server])?;
        ensure!(faults.unauthorized() > 0, "{node}: nobody was refused");
        // Without a rule anybody may pull: a wrong secret is no obstacle.
        faults.set(Rules::default());
        hand.pulls(&wrong, &[&init])?;
        hand.sh(&format!("rm {HAND}/both.json"))?;
        let found = hand.sh(&format!(
            "journalctl --since=@{} -o cat | grep -c {CANARY}; grep -rlsa {CANARY} /var/log /run /tmp /etc {HAND} /var/lib/containerd/io.containerd.metadata.v1.bolt | head -5; true",
            started.trim()
        ))?;
        ensure!(found.trim() == "0", "{node} kept the password: {found}");
        hand.forget(&[&server, &init])?;
    }
    Ok(())
}

pub(crate) fn the_kubelets_credential_providers_are_asked_on_the_host(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5002)?;
    let image = format!("{}/server:1.0", faults.name());
    faults.set(Rules {
        password: Some(("plugin".into(), CANARY.into())),
        ..Rules::default()
    });
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        let answer = format!(
            "{{\"kind\":\"CredentialProviderResponse\",\"apiVersion\":\"credentialprovider.kubelet.k8s.io/v1\",\"cacheKeyType\":\"Registry\",\"auth\":{{\"{}\":{{\"username\":\"plugin\",\"password\":\"{CANARY}\"}}}}}}",
            faults.name()
        );
        hand.sh("mkdir -p /opt/providers")?;
        hand.put(
            "provider",
            &format!("#!/bin/sh\ngrep -q CredentialProviderRequest && [ \"$1\" = get ] && [ \"$MODE\" = test ] && echo '{answer}'\n"),
        )?;
        hand.put(
            "providers.yaml",
            "apiVersion: kubelet.config.k8s.io/v1\nkind: CredentialProviderConfig\nproviders:\n- name: provider\n  matchImages: ['*.testbed:5002']\n  defaultCacheDuration: 1h\n  apiVersion: credentialprovider.kubelet.k8s.io/v1\n  args: [get]\n  env: [{name: MODE, value: test}]\n",
        )?;
        hand.sh(&format!(
            "install -m 755 {HAND}/provider /opt/providers/provider; mkdir -p /etc/systemd/system/kubelet.service.d
             line=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/kubelet.service)
             printf '[Service]\\nExecStart=\\nExecStart=%s --image-credential-provider-config={HAND}/providers.yaml --image-credential-provider-bin-dir=/opt/providers\\n' \"$line\" > /etc/systemd/system/kubelet.service.d/providers.conf
             systemctl daemon-reload; systemctl restart kubelet"
        ))?;
        let result = hand
            .is_refused("", &image, "Unauthorized")
            .and_then(|_| hand.pulls("--credential-providers", &[&image]))
            .and_then(|_| hand.sh(&format!("journalctl -b -o cat | grep -c {CANARY}; systemctl list-units --all --no-legend 'quartermaster-credentials-*' | wc -l; true")));
        hand.sh("rm -r /etc/systemd/system/kubelet.service.d/providers.conf /opt/providers; systemctl daemon-reload; systemctl restart kubelet")?;
        let left = result?;
        ensure!(left.split_whitespace().eq(["0", "0"]), "{node} kept: {left}");
        hand.forget(&[&image])?;
    }
    Ok(())
}

pub(crate) fn a_registry_that_stalls_or_asks_for_patience_is_told(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5003)?;
    let image = format!("{}/stalling:1.0", faults.name());
    stage.push_random("stalling:1.0", 8 * MB)?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        faults.set(Rules {
            stall_after: Some(MB as u64),
            ..Rules::default()
        });
        let said = hand.is_refused("--stall-after 2 --attempts 1", &image, "RegistryStalled")?;
        ensure!(
            said["message"]
                .as_str()
                .is_some_and(|words| words.contains("8.0 MB")),
            "{node}: it is not told how far the pull was: {said}"
        );
        until_nothing_comes(stage, &hand)?;
        for (status, reason) in [(429, "RateLimited"), (503, "RegistryOverloaded")] {
            faults.set(Rules {
                refuse: Some((status, 7)),
                ..Rules::default()
            });
            hand.is_refused("--attempts 1", &image, reason)?;
        }
        faults.set(Rules::default());
        hand.pulls("", &[&image])?;
        hand.forget(&[&image])?;
    }
    Ok(())
}

/// What a pull that was stopped had begun to write goes by containerd's own collection.
fn until_nothing_comes(stage: &Stage, hand: &Hand<'_>) -> Result<()> {
    stage.until(&format!("{} to drop what came of a stopped pull", hand.node), || {
        // Any deletion has containerd collect what nobody refers to.
        hand.sh("ctr -n k8s.io leases create >/tmp/lease && ctr -n k8s.io leases delete --sync $(cat /tmp/lease) >/dev/null; rm /tmp/lease")?;
        let active = hand.sh("ctr -n k8s.io content active | tail -n +2; ctr -n k8s.io leases ls | tail -n +2")?;
        ensure!(active.trim().is_empty(), "there is {active}");
        Ok(())
    })
}

pub(crate) fn a_cancelled_pull_stops_in_containerd_and_a_kubelet_beside_it_goes_on(
    stage: &Stage,
) -> Result<()> {
    let faults = stage.faults(5004)?;
    let image = format!("{}/slow:1.0", faults.name());
    stage.push_random("slow:1.0", 6 * MB)?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&image])?;
        let slow = Rules {
            rate: Some(2 * MB as u64),
            ..Rules::default()
        };
        faults.set(slow.clone());
        // A pull of one's own and one as the kubelet makes it, of the same layer; the first is interrupted.
        let out = hand.sh(&format!(
            "cd {HAND}; ./quartermaster-agent pull --json {image} >cancelled 2>/dev/null & pid=$!
             for i in $(seq 100); do ctr -n k8s.io content active | grep -q layer && break; sleep 0.05; done
             crictl pull {image} >crictl 2>&1 & other=$!
             sleep 0.3; kill -INT $pid; wait $pid; cat cancelled; wait $other; echo kubelet=$?"
        ))?;
        ensure!(out.contains("\"reason\":\"Cancelled\""), "{node}: {out}");
        ensure!(
            out.contains("kubelet=0"),
            "{node}: the other pull was broken: {out}"
        );
        hand.pulls("", &[&image])?;
        hand.forget(&[&image])?;
        until_nothing_comes(stage, &hand)?;

        faults.set(slow);
        let out = hand.sh(&format!(
            "cd {HAND}; ./quartermaster-agent pull --json {image} >over 2>/dev/null & pid=$!
             for i in $(seq 100); do ctr -n k8s.io content active | grep -q layer && break; sleep 0.05; done
             systemctl restart containerd; wait $pid; cat over"
        ))?;
        ensure!(
            out.contains("\"ready\":true"),
            "{node}: the pull did not outlive a restart of containerd: {out}"
        );
        hand.forget(&[&image])?;
    }
    Ok(())
}

pub(crate) fn a_layer_that_images_share_is_fetched_once(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5005)?;
    stage.push_random("shared-a:1.0", 4 * MB)?;
    stage.cluster.in_fabric(&[
        "skopeo",
        "copy",
        "--quiet",
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
        "docker://registry.testbed:5000/shared-a:1.0",
        "docker://registry.testbed:5000/shared-a:2.0",
    ])?;
    let (one, other) = (
        format!("{}/shared-a:1.0", faults.name()),
        format!("{}/shared-a:2.0", faults.name()),
    );
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[&one, &other])?;
        until_nothing_comes(stage, &hand)?;
        faults.set(Rules {
            rate: Some(8 * MB as u64),
            ..Rules::default()
        });
        let answers = hand.pulls("", &[&one, &other])?;
        let blobs = faults.blobs();
        ensure!(
            !blobs.is_empty() && blobs.values().all(|count| *count == 1),
            "{node} fetched {blobs:?}"
        );
        let fetched: u64 = answers
            .iter()
            .filter_map(|answer| answer["fetched"].as_u64())
            .sum();
        ensure!(
            (4 * MB as u64..5 * MB as u64).contains(&fetched),
            "{node} counts {fetched} bytes"
        );
        hand.forget(&[&one, &other])?;
    }
    Ok(())
}

pub(crate) fn a_mirror_that_the_node_has_set_is_used(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5006)?;
    let image = "mirrored.example/server:1.0";
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        faults.set(Rules::default());
        hand.sh(&format!(
            "mkdir -p /etc/containerd/certs.d/mirrored.example; printf 'server = \"https://mirrored.example\"\\n[host.\"http://{}\"]\\n  capabilities = [\"pull\", \"resolve\"]\\n' > /etc/containerd/certs.d/mirrored.example/hosts.toml",
            faults.name()
        ))?;
        hand.forget(&[image, SERVER])?;
        let pulled = hand.pulls("", &[image]);
        hand.sh("rm -r /etc/containerd/certs.d/mirrored.example")?;
        pulled?;
        hand.forget(&[image])?;
    }
    Ok(())
}

pub(crate) fn pins_are_held_for_each_owner_and_let_go_with_the_last(stage: &Stage) -> Result<()> {
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        hand.forget(&[SERVER])?;
        let can = node != "worker-16";
        let pinned = if can { "yes" } else { "unsupported" };
        let is_pinned = || -> Result<bool> {
            let seen: Value = serde_json::from_str(&hand.sh(&format!("crictl inspecti -o json {SERVER}"))?)?;
            Ok(seen["status"]["pinned"] == true)
        };
        let first = hand.pulls("--pin team/a", &[SERVER])?;
        ensure!(first[0]["pinned"] == pinned, "{node}: {}", first[0]);
        // Pulled again, also by who knows nothing of pins.
        let second = hand.pulls("--always --pin team/b", &[SERVER])?;
        ensure!(second[0]["wasPresent"] == true, "{node}: {}", second[0]);
        ensure!(is_pinned()? == can, "{node} does not say what it was told");
        let said = hand.ends(0, "release --owner team/a --remove-unused")?;
        ensure!(
            said.contains("1 let go, 0 removed, 1 still held"),
            "{node}: {said}"
        );
        ensure!(is_pinned()? == can, "{node} forgot the pin of team/b");
        let said = hand.ends(0, "release --owner team/b --remove-unused")?;
        ensure!(said.contains("1 let go, 1 removed"), "{node}: {said}");
        hand.ends(4, "release --owner team/b")?;
        // What was there before is left there, and unpinned.
        hand.sh(&format!("crictl pull {SERVER}"))?;
        hand.pulls("--pin team/a", &[SERVER])?;
        let said = hand.ends(0, "release --remove-unused")?;
        ensure!(said.contains("1 let go, 0 removed"), "{node}: {said}");
        ensure!(!is_pinned()?, "{node} is still pinned");
        let labels = hand.sh("ctr -n k8s.io images ls | grep quartermaster.kwasm.sh || true")?;
        ensure!(labels.trim().is_empty(), "{node} keeps labels: {labels}");
        hand.forget(&[SERVER])?;
    }
    Ok(())
}

pub(crate) fn what_does_not_fit_is_not_pulled(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5007)?;
    let big = format!("{}/big:1.0", faults.name());
    stage.push_random("big:1.0", 60 * MB)?;
    for node in ["worker-17", "worker-24"] {
        let hand = Hand::on(stage, node)?;
        hand.is_refused("--keep-free 100 --attempts 1", INIT, "DiskReserve")?;
        // A small disk in the place of containerd's content.
        let content = "/var/lib/containerd/io.containerd.content.v1.content";
        hand.sh(&format!(
            "systemctl stop containerd; mount -t tmpfs -o size=100M none {content} && systemctl start containerd"
        ))?;
        // So slow that it is seen before it is over.
        faults.set(Rules {
            rate: Some(600_000),
            ..Rules::default()
        });
        let refused = hand.is_refused("--keep-free 10 --attempts 1", &big, "DoesNotFit");
        // containerd would go on believing in what lay on the small disk.
        let result = refused.and_then(|_| until_nothing_comes(stage, &hand));
        hand.sh(&format!(
            "systemctl stop containerd; umount -l {content}; systemctl start containerd"
        ))?;
        result?;
        faults.set(Rules::default());
        hand.pulls("", &[&big])?;
        hand.forget(&[&big])?;
    }
    Ok(())
}
