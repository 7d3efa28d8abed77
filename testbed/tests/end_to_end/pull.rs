//! One agent pulls on one node: through a mirror that the node has set, and with pins.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::faults::{Faults, Rules};

use crate::hand::Hand;
use crate::stage::{NODES, Stage};

const SERVER: &str = "registry.testbed:5000/server:1.0";

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
