//! What the documents tell a new user to type, typed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::deployment;

use crate::chart::{images, in_place_of_the_base};
use crate::stage::Stage;

/// Read in this order: what a cluster goes through.
const DOCUMENTS: [&str; 3] = ["install.md", "upgrading.md", "uninstalling.md"];
/// The node of the documents, and the one of this cluster.
const NODE: (&str, &str) = ("worker-1", "worker-24");

pub(crate) fn commands_of_the_documents_work_as_they_stand_there(stage: &Stage) -> Result<()> {
    let mut script = String::new();
    for name in DOCUMENTS {
        let text = fs::read_to_string(deployment::workspace().join("docs").join(name))?;
        let blocks = blocks(&text);
        ensure!(!blocks.is_empty(), "{name} has no block ```sh run");
        script += &blocks.replace(NODE.0, NODE.1);
    }
    in_place_of_the_base(stage, |stage| {
        let before = stage.config(NODE.1)?;
        run(stage, &script)?;
        ensure!(
            stage.config(NODE.1)? == before,
            "the configuration is not what it was"
        );
        stage.annotate(&[NODE.1], "kwasm.sh/kwasm-node-")
    })
}

/// What stands in blocks that are marked to be run.
fn blocks(text: &str) -> String {
    let mut inside = false;
    let mut all = String::new();
    for line in text.lines() {
        if line.starts_with("```") {
            inside = line == "```sh run";
        } else if inside {
            all += line;
            all.push('\n');
        }
    }
    all
}

/// In a shell whose kubectl and helm speak to the testbed, and whose chart has the images of the testbed's registry.
fn run(stage: &Stage, script: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let images = images(stage)?.join(" ");
    let helm = stage.cluster.program("helm");
    let programs = [
        (
            "helm",
            format!(
                "case $1 in install|upgrade) set -- \"$@\" {images};; esac\nexec {} \"$@\"",
                helm.display()
            ),
        ),
        (
            "kubectl",
            format!("exec {} \"$@\"", stage.cluster.program("kubectl").display()),
        ),
    ];
    for (name, text) in programs {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("sh")
        .args(["-eux", "-c", script])
        .current_dir(deployment::workspace())
        .env("PATH", format!("{}:{path}", folder.path().display()))
        .envs(stage.cluster.helm_env())
        .output()
        .context("sh can't be run")?;
    ensure!(
        output.status.success(),
        "the commands of the documents failed ({}):\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
