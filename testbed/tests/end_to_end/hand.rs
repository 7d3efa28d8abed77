//! A person on a node, with nothing but the agent's binary and its payload in a folder.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use testbed::Cluster;

use crate::stage::Stage;

/// The folder on a node.
pub(crate) const HAND: &str = "/root/hand";

/// What the agent said and how it ended.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
}

/// One node and the folder on it.
#[derive(Clone, Copy)]
pub(crate) struct Hand<'a> {
    cluster: &'a Cluster,
    pub(crate) node: &'a str,
}

impl<'a> Hand<'a> {
    /// Brings binary and payload to the node, from the agent's image.
    pub(crate) fn on(stage: &'a Stage, node: &'a str) -> Result<Self> {
        let hand = Self {
            cluster: &stage.cluster,
            node,
        };
        let image = format!("{}/{}", stage.cluster.registry(), stage.product.agent.name);
        hand.sh(&format!(
            "set -e; mkdir -p {HAND}; cd {HAND}; [ \"$(cat image 2>/dev/null)\" = {image} ] && exit
             rm -rf payload; mkdir -p mnt; crictl pull {image} >/dev/null
             ctr -n k8s.io images mount {image} {HAND}/mnt >/dev/null
             cp -a mnt/payload mnt/quartermaster-agent .
             ctr -n k8s.io images unmount --rm {HAND}/mnt >/dev/null; rmdir mnt; echo {image} > image"
        ))
        .with_context(|| format!("the agent can't be brought to {node}"))?;
        Ok(hand)
    }

    /// Runs a shell's script on the node; it must succeed.
    pub(crate) fn sh(&self, script: &str) -> Result<String> {
        self.cluster.exec(self.node, &["bash", "-c", script])
    }

    /// Runs the agent in the folder, as `./quartermaster-agent` followed by `line`.
    pub(crate) fn agent(&self, line: &str) -> Result<Said> {
        let printed = self.sh(&format!(
            "cd {HAND}; export QUARTERMASTER_PAYLOAD={HAND}/payload; ./quartermaster-agent {line} 2>&1; echo \"code=$?\""
        ))?;
        let (out, code) = printed.trim_end().rsplit_once("code=").context("no exit code")?;
        Ok(Said {
            code: code.parse()?,
            out: out.to_owned(),
        })
    }

    /// Runs the agent, which must end with this exit code; gives what it printed.
    pub(crate) fn ends(&self, code: i32, line: &str) -> Result<String> {
        let said = self.agent(line)?;
        ensure!(
            said.code == code,
            "on {}: quartermaster-agent {line} ended with {} and not {code}:\n{}",
            self.node,
            said.code,
            said.out
        );
        Ok(said.out)
    }

    /// Writes a file into the folder.
    pub(crate) fn put(&self, name: &str, text: &str) -> Result<()> {
        let path = Path::new(HAND).join(name).display().to_string();
        self.cluster
            .exec(
                self.node,
                &["bash", "-c", "printf %s \"$1\" > \"$2\"", "bash", text, &path],
            )
            .map(drop)
    }
}
