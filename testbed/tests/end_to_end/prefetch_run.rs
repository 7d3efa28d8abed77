//! How a Prefetch runs and ends: in which order, with how much patience, and what becomes of what it no longer wants.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::deployment;
use testbed::faults::{Faults, Rules};

use crate::hand::Hand;
use crate::prefetch::SERVER;
use crate::prefetch_object::prefetch;
use crate::pull::{MB, until_nothing_comes};
use crate::stage::{NODES, Stage};

impl Stage {
    fn address(&self, node: &str) -> Result<std::net::IpAddr> {
        let addresses = self.get(&["node", node])?["status"]["addresses"].clone();
        let internal = addresses
            .as_array()
            .and_then(|all| all.iter().find(|address| address["type"] == "InternalIP"));
        let text = internal.and_then(|address| address["address"].as_str());
        Ok(text.context("the node has no address")?.parse()?)
    }
}

/// The images for which a node asked, in the order of their first requests.
fn order_of(stage: &Stage, faults: &Faults, node: &str) -> Result<Vec<String>> {
    let by = stage.address(node)?;
    let mut order: Vec<String> = Vec::new();
    for asked in faults.asked().iter().filter(|asked| asked.by == by) {
        let name = asked.path.split('/').nth(2).unwrap_or_default();
        if !name.is_empty() && !order.iter().any(|known| known == name) {
            order.push(name.to_owned());
        }
    }
    Ok(order)
}

pub(crate) fn images_come_in_the_order_asked_for_and_unused_ones_are_removed(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5012)?;
    let sizes = [("order-m", 3 * MB), ("order-l", 6 * MB), ("order-s", MB)];
    let mut names = Vec::new();
    for (name, size) in sizes {
        stage.push_random(&format!("{name}:1.0"), size)?;
        names.push(format!("{}/{name}:1.0", faults.name()));
    }
    let images: Vec<&str> = names.iter().map(String::as_str).collect();
    stage.forget_images(&images)?;
    faults.set(Rules::default());
    let spec = |order: &str, filter: &str| {
        format!(
            "{{images: ['{}'], order: {order}, node_filter: {filter}, retention: RemoveUnused, pull: {{perNode: 1}}}}",
            images.join("', '")
        )
    };
    stage
        .cluster
        .apply(&prefetch("ordered", &spec("AsGiven", "worker-17")))?;
    stage.until_prefetch("ordered", "READY")?;
    let order = order_of(stage, &faults, "worker-17")?;
    ensure!(
        order == ["order-m", "order-l", "order-s"],
        "as given came {order:?}"
    );
    // What was there before Quartermaster stays.
    stage.cluster.exec("worker-24", &["crictl", "pull", images[2]])?;
    faults.set(Rules::default());
    // The sizes are known by now.
    stage
        .cluster
        .apply(&prefetch("ordered", &spec("SmallestFirst", "worker-2")))?;
    stage.until("the other nodes to have the images", || {
        let status = stage.status("ordered")?;
        ensure!(
            status["phase"] == "READY" && status["pairs"]["ready"] == 6,
            "{status}"
        );
        Ok(())
    })?;
    let order = order_of(stage, &faults, "worker-21")?;
    ensure!(
        order == ["order-s", "order-m", "order-l"],
        "smallest first came {order:?}"
    );
    let until_gone = |node: &str, images: &[&str]| {
        stage.until(&format!("unused images to be gone from {node}"), || {
            images.iter().try_for_each(|image| stage.lacks_image(node, image))
        })
    };
    until_gone("worker-17", &images)?;
    stage.kubectl(&["delete", "prefetch", "ordered"])?;
    until_gone("worker-21", &images)?;
    until_gone("worker-24", &images[..2])?;
    stage.has_image("worker-24", images[2])?;
    stage.forget_images(&images)?;
    stage.until_agents_are_gone()
}

pub(crate) fn a_registry_that_asks_one_node_for_patience_is_spared_by_all(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5009)?;
    let (server, init) = (
        format!("{}/server:1.0", faults.name()),
        format!("{}/server-init:1.0", faults.name()),
    );
    stage.forget_images(&[&server, &init])?;
    faults.set(Rules {
        refuse: Some((429, 7)),
        ..Rules::default()
    });
    let one = |image: &str, node: &str| {
        format!("{{images: ['{image}'], node_filter: {node}, pull: {{attempts: 1}}}}")
    };
    stage
        .cluster
        .apply(&prefetch("first", &one(&server, "worker-17")))?;
    stage.until_image_says("first", &server, "RateLimited")?;
    stage
        .cluster
        .apply(&prefetch("second", &one(&init, "worker-24")))?;
    let other = stage.address("worker-24")?;
    let mut gap = Duration::ZERO;
    stage.until("the other node to ask the registry", || {
        let asked = faults.asked();
        let first = asked.first().context("nobody asked")?;
        let then = asked
            .iter()
            .find(|asked| asked.by == other)
            .context("it has not asked yet")?;
        gap = then.at - first.at;
        Ok(())
    })?;
    // The registry is left alone for five seconds at least, and by a node that it has not refused too.
    ensure!(
        gap >= Duration::from_secs(5),
        "the other node asked after {gap:?}"
    );
    faults.set(Rules::default());
    // Long before retry_after, which is for other failures.
    for name in ["first", "second"] {
        stage.until_prefetch(name, "READY")?;
    }
    stage.kubectl(&["delete", "prefetch", "first", "second"])?;
    stage.forget_images(&[&server, &init])?;
    stage.until_agents_are_gone()
}

pub(crate) fn a_prefetch_that_is_changed_or_deleted_stops_what_it_was_pulling(stage: &Stage) -> Result<()> {
    let faults = stage.faults(5010)?;
    let slow = format!("{}/endless:1.0", faults.name());
    stage.push_random("endless:1.0", 8 * MB)?;
    stage.forget_images(&[&slow, SERVER])?;
    let begin = || -> Result<()> {
        // More than ten minutes for the whole image.
        faults.set(Rules {
            rate: Some(10_000),
            ..Rules::default()
        });
        stage.cluster.apply(&prefetch(
            "midway",
            &format!("{{images: ['{slow}'], node_filter: worker}}"),
        ))?;
        stage.until("every node to be pulling", || {
            let asked = faults.asked();
            let pulling: HashSet<_> = asked
                .iter()
                .filter(|asked| asked.path.contains("/blobs/"))
                .map(|asked| asked.by)
                .collect();
            ensure!(
                pulling.len() == NODES.len(),
                "{} nodes are pulling",
                pulling.len()
            );
            Ok(())
        })
    };
    begin()?;
    stage.cluster.apply(&prefetch(
        "midway",
        &format!("{{images: ['{SERVER}'], node_filter: worker}}"),
    ))?;
    stage.until("the other image to be there", || {
        let status = stage.status("midway")?;
        ensure!(
            status["phase"] == "READY" && status["pairs"]["ready"] == 4,
            "{status}"
        );
        Ok(())
    })?;
    begin()?;
    stage.kubectl(&["delete", "prefetch", "midway", "--timeout=10s"])?;
    // While bytes come, its agent has work.
    stage.until_agents_are_gone()?;
    for node in NODES {
        stage.lacks_image(node, &slow)?;
        until_nothing_comes(stage, &Hand::on(stage, node)?)?;
    }
    Ok(())
}

/// As the Prefetch operator's manifests have it: nothing but its own fields, and no bounds.
const OLD_DEFINITION: &str = r"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: prefetches.cache.techsquad.rocks}
spec:
  group: cache.techsquad.rocks
  names: {kind: Prefetch, listKind: PrefetchList, plural: prefetches, singular: prefetch}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              properties:
                filter_by_labels: {type: object, additionalProperties: {type: string}}
                node_filter: {type: string}
                retry_after: {type: integer}
            status:
              type: object
              properties:
                phase: {type: string}
";

pub(crate) fn objects_of_the_prefetch_operator_go_on_working_under_the_new_definition(
    stage: &Stage,
) -> Result<()> {
    let definition = "customresourcedefinition/prefetches.cache.techsquad.rocks";
    stage.forget_images(&[SERVER])?;
    stage.kubectl(&["delete", definition, "--timeout=60s"])?;
    let stored = stage.cluster.apply(OLD_DEFINITION).and_then(|_| {
        stage.kubectl(&["wait", definition, "--for=condition=Established", "--timeout=30s"])?;
        stage.cluster.apply(&format!(
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: old, namespace: default, labels: {{app: old}}}}\nspec:\n  replicas: 0\n  selector: {{matchLabels: {{app: old}}}}\n  template:\n    metadata: {{labels: {{app: old}}}}\n    spec: {{containers: [{{name: c, image: \"{SERVER}\"}}]}}\n"
        ))?;
        // The operator took any number for retry_after; this one would not be taken today.
        stage.until("the old definition to be served", || {
            let old = "{filter_by_labels: {app: old}, node_filter: worker-21, retry_after: -1}";
            stage.cluster.apply(&prefetch("old", old)).map(drop)
        })
    });
    deployment::deploy(&stage.cluster, &stage.product, &Stage::options())?;
    stored?;
    stage.until_prefetch("old", "READY")?;
    stage.has_image("worker-21", SERVER)?;
    let patch = r#"{"spec": {"node_filter": "worker-2"}}"#;
    stage.kubectl(&["patch", "prefetch", "old", "--type=merge", "--patch", patch])?;
    stage.until("the other node to be served too", || {
        let status = stage.status("old")?;
        ensure!(
            status["phase"] == "READY" && status["pairs"]["ready"] == 2,
            "{status}"
        );
        Ok(())
    })?;
    let object = stage.get(&["prefetch", "old"])?;
    ensure!(object["spec"]["retry_after"] == -1, "{object}");
    stage.kubectl(&["delete", "prefetch/old", "deployment/old"])?;
    stage.until_agents_are_gone()
}
