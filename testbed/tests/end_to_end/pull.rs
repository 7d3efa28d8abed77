//! One agent pulls on one node: by every kind of name, from a mirror, layers that images share; and its pins.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::faults::{Faults, Rules};
use testbed::images;

use crate::hand::Hand;
use crate::stage::{NODES, Stage};

pub(crate) const SERVER: &str = "registry.testbed:5000/server:1.0";
pub(crate) const INIT: &str = "registry.testbed:5000/server-init:1.0";
pub(crate) const MB: usize = 1_000_000;

impl Stage {
    /// A registry that misbehaves as it is told, known to all nodes.
    pub(crate) fn faults(&self, port: u16) -> Result<Faults> {
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
    pub(crate) fn push_random(&self, name: &str, size: usize) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let archive = folder.path().join("image.tar");
        images::random(&archive, name, size)?;
        self.cluster.push(&archive, name)
    }
}

impl Hand<'_> {
    pub(crate) fn forget(&self, references: &[&str]) -> Result<()> {
        for reference in references {
            self.sh(&format!("crictl rmi {reference} >/dev/null 2>&1 || true"))?;
        }
        Ok(())
    }

    /// Pulls, and gives what is said of each image, in the order given.
    pub(crate) fn pull(&self, line: &str, images: &[&str]) -> Result<Vec<Value>> {
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

    pub(crate) fn pulls(&self, line: &str, images: &[&str]) -> Result<Vec<Value>> {
        let answers = self.pull(line, images)?;
        for answer in &answers {
            ensure!(answer["ready"] == true, "on {}: {answer}", self.node);
        }
        Ok(answers)
    }

    pub(crate) fn is_refused(&self, line: &str, image: &str, reason: &str) -> Result<Value> {
        let answer = self.pull(line, &[image])?.remove(0);
        ensure!(
            answer["ready"] == false && answer["reason"] == reason,
            "on {}: not {reason} but {answer}",
            self.node
        );
        Ok(answer)
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
        hand.is_refused("", "registry.testbed:5000/UPPER:1", "InvalidReference")?;
        // The sandbox's image is the first pod's, not ours.
        hand.sh("crictl pull registry.testbed:5000/pause:3.10")?;
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
    faults.set(Rules::default());
    stage.push_random("library/short:latest", MB)?;
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        // The other one by its short name, as a Pod would name it.
        for (host, image) in [
            ("mirrored.example", "mirrored.example/server:1.0"),
            ("docker.io", "short"),
        ] {
            let folder = format!("/etc/containerd/certs.d/{host}");
            hand.sh(&format!(
                "mkdir -p {folder}; printf 'server = \"https://{host}\"\\n[host.\"http://{}\"]\\n  capabilities = [\"pull\", \"resolve\"]\\n' > {folder}/hosts.toml",
                faults.name()
            ))?;
            hand.forget(&[image, SERVER])?;
            let pulled = hand.pulls("", &[image]);
            hand.sh(&format!("rm -r {folder}"))?;
            pulled?;
            hand.forget(&[image])?;
        }
    }
    Ok(())
}

pub(crate) fn pins_are_held_for_each_owner_and_let_go_with_the_last(stage: &Stage) -> Result<()> {
    for node in NODES {
        let hand = Hand::on(stage, node)?;
        // An image that a container uses is not removed, and those of deleted pods go some time after their pods.
        stage.until(
            &format!("containers of earlier pods to be gone from {node}"),
            || {
                let all: Value = serde_json::from_str(&hand.sh("crictl ps -a -o json")?)?;
                let left: Vec<&Value> = all["containers"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|container| &container["labels"]["io.kubernetes.pod.namespace"])
                    .filter(|namespace| {
                        !["kube-system", "quartermaster"]
                            .iter()
                            .any(|ours| **namespace == *ours)
                    })
                    .collect();
                ensure!(left.is_empty(), "there are some of {left:?}");
                Ok(())
            },
        )?;
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
        let labels = hand.sh(&format!(
            "ctr -n k8s.io images ls name=={SERVER} | grep quartermaster.kwasm.sh || true"
        ))?;
        ensure!(labels.trim().is_empty(), "{node} keeps labels: {labels}");
        hand.forget(&[SERVER])?;
    }
    Ok(())
}

/// What a pull that was stopped had begun to write goes by containerd's own collection.
pub(crate) fn until_nothing_comes(stage: &Stage, hand: &Hand<'_>) -> Result<()> {
    stage.until(&format!("{} to drop what came of a stopped pull", hand.node), || {
        // Any deletion has containerd collect what nobody refers to.
        hand.sh("ctr -n k8s.io leases create >/tmp/lease && ctr -n k8s.io leases delete --sync $(cat /tmp/lease) >/dev/null; rm /tmp/lease")?;
        // containerd 2.x has a lease for each sandbox too, named like it.
        let left = hand.sh(
            "ctr -n k8s.io content active | tail -n +2
             sandboxes=$(ctr -n k8s.io containers ls -q); ctr -n k8s.io leases ls -q | grep -vxF \"${sandboxes:-none}\"; true",
        )?;
        ensure!(left.trim().is_empty(), "there is {left}");
        Ok(())
    })
}
