//! What the images say of themselves.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::stage::Stage;

const NODE: &str = "worker-24";

pub(crate) fn images_say_what_they_are_and_what_they_consist_of(stage: &Stage) -> Result<()> {
    let (agent, coordinator) = (&stage.product.agent.name, &stage.product.coordinator.name);
    for (name, crates, packages) in [
        (
            agent,
            &["containerd-client", "ring", "zbus"][..],
            &["crun", "libwasmedge0"][..],
        ),
        (coordinator, &["kube", "ring", "tonic"][..], &[][..]),
    ] {
        let image = format!("{}/{name}", stage.cluster.registry());
        let sh = |script: &str| stage.cluster.exec(NODE, &["sh", "-ec", script]);
        sh(&format!("crictl pull {image} >/dev/null"))?;
        let said: Value = serde_json::from_str(&sh(&format!("crictl inspecti {image}"))?)?;
        let labels = &said["info"]["imageSpec"]["config"]["Labels"];
        for label in ["title", "source", "licenses", "version", "revision"] {
            let value = labels[format!("org.opencontainers.image.{label}")].as_str();
            ensure!(
                value.is_some_and(|value| !value.is_empty()),
                "{image} has no label {label}: {labels}"
            );
        }
        let document = sh(&format!(
            "mnt=$(mktemp -d); ctr -n k8s.io images mount {image} $mnt >/dev/null; cat $mnt/sbom.cdx.json
             ctr -n k8s.io images unmount --rm $mnt >/dev/null; rmdir $mnt"
        ))?;
        let document: Value = serde_json::from_str(&document).context("the SBOM is no JSON")?;
        let components = document["components"].as_array().context("no components")?;
        let has = |start: &str| {
            let mut urls = components.iter().filter_map(|one| one["purl"].as_str());
            urls.any(|url| url.starts_with(start))
        };
        for name in crates {
            ensure!(has(&format!("pkg:cargo/{name}@")), "{name} is not in {document}");
        }
        for name in packages {
            ensure!(
                has(&format!("pkg:deb/debian/{name}@")),
                "{name} is not in {document}"
            );
        }
        ensure!(
            !has("pkg:deb/debian/libllvm"),
            "LLVM is left out, and the SBOM has it"
        );
    }
    Ok(())
}
