//! Which images a Prefetch wants, and on which nodes.

use std::collections::{BTreeMap, BTreeSet};

use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use kube::api::ObjectMeta;

use super::crd::{Prefetch, PrefetchStatus};
use super::reference::normalise;
use crate::node::{NodeFacts, Version};

/// A Prefetch, trimmed to what decisions need.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PrefetchFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// How new this is.
    pub version: Version,
    /// `metadata.generation`.
    pub generation: i64,
    /// `spec.filter_by_labels`.
    pub labels: BTreeMap<String, String>,
    /// `spec.node_filter`.
    pub node_filter: String,
    /// `spec.retry_after`.
    pub retry_after: SignedDuration,
    /// The status that is there.
    pub status: PrefetchStatus,
    /// Why the object can't be read, if it was stored under a definition that allowed what ours does not.
    pub broken: Option<String>,
}

impl PrefetchFacts {
    /// Reads the facts of a Prefetch.
    pub fn read(prefetch: &Prefetch) -> Self {
        let spec = &prefetch.spec;
        let retry_after = match spec.retry_after.unwrap_or(0) {
            seconds if seconds > 0 => seconds,
            _ => 300,
        };
        Self {
            namespace: prefetch.namespace().unwrap_or_default(),
            name: prefetch.name_any(),
            uid: prefetch.uid().unwrap_or_default(),
            version: Version::read(&prefetch.metadata),
            generation: prefetch.metadata.generation.unwrap_or_default(),
            labels: spec.filter_by_labels.clone().unwrap_or_default(),
            node_filter: spec.node_filter.clone().unwrap_or_default(),
            retry_after: SignedDuration::from_secs(retry_after),
            status: prefetch.status.clone().unwrap_or_default(),
            broken: None,
        }
    }

    /// An object that can't be read: it wants nothing, and its status says why.
    pub fn broken(metadata: &ObjectMeta, why: &str) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            version: Version::read(metadata),
            generation: metadata.generation.unwrap_or_default(),
            broken: Some(why.to_owned()),
            ..Self::default()
        }
    }
}

/// A Deployment, trimmed to its labels and the images of its template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeploymentFacts {
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// Images of containers and init containers, as written.
    pub images: BTreeSet<String>,
}

impl DeploymentFacts {
    /// Reads the facts of a Deployment.
    pub fn read(deployment: &Deployment) -> Self {
        let template = deployment
            .spec
            .as_ref()
            .and_then(|spec| spec.template.spec.as_ref());
        let images = template
            .map(|spec| {
                spec.containers
                    .iter()
                    .chain(spec.init_containers.iter().flatten())
                    .filter_map(|container| container.image.clone())
                    .collect()
            })
            .unwrap_or_default();
        Self {
            labels: deployment.labels().clone(),
            images,
        }
    }
}

/// The images that a Prefetch wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Normalised references.
    pub images: BTreeSet<String>,
    /// What is no reference, with what is wrong with it.
    pub invalid: BTreeMap<String, String>,
}

/// Resolves a Prefetch against all Deployments.
pub fn resolve<'a>(
    prefetch: &PrefetchFacts,
    deployments: impl IntoIterator<Item = &'a DeploymentFacts>,
) -> Resolved {
    let mut resolved = Resolved::default();
    if prefetch.labels.is_empty() {
        return resolved;
    }
    let matching = deployments.into_iter().filter(|deployment| {
        prefetch
            .labels
            .iter()
            .all(|(key, value)| deployment.labels.get(key) == Some(value))
    });
    for image in matching.flat_map(|deployment| &deployment.images) {
        match normalise(image) {
            Ok(full) => {
                resolved.images.insert(full);
            }
            Err(why) => {
                resolved.invalid.insert(image.clone(), why);
            }
        }
    }
    resolved
}

/// How a Prefetch regards a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cover {
    /// Its images are wanted there.
    Wanted,
    /// They would be, but the node can't be served now.
    Excluded,
    /// It is not meant.
    No,
}

/// Whether a Prefetch means a node.
pub fn covers(prefetch: &PrefetchFacts, node: &NodeFacts) -> Cover {
    if !node.name.contains(&prefetch.node_filter) {
        Cover::No
    } else if !node.ready || node.is_virtual || node.os != "linux" {
        Cover::Excluded
    } else {
        Cover::Wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(yaml: &str) -> DeploymentFacts {
        DeploymentFacts::read(&serde_yaml_ng::from_str(yaml).expect("a Deployment"))
    }

    fn web() -> DeploymentFacts {
        deployment(
            "metadata: {name: web, labels: {app: nginx, tier: front}}
spec:
  selector: {}
  template:
    spec:
      initContainers: [{name: i, image: 'busybox:1'}]
      containers: [{name: a, image: nginx}, {name: b, image: 'docker.io/library/nginx:latest'}]",
        )
    }

    fn prefetch(yaml: &str) -> PrefetchFacts {
        PrefetchFacts::read(
            &serde_yaml_ng::from_str(&format!("apiVersion: cache.techsquad.rocks/v1\nkind: Prefetch\nmetadata: {{name: p, namespace: n}}\nspec: {yaml}"))
                .expect("a Prefetch"),
        )
    }

    #[test]
    fn images_of_containers_and_init_containers_are_wanted_once() {
        let resolved = resolve(&prefetch("{filter_by_labels: {app: nginx}}"), [&web()]);
        assert_eq!(
            resolved.images.into_iter().collect::<Vec<_>>(),
            ["docker.io/library/busybox:1", "docker.io/library/nginx:latest"]
        );
    }

    #[test]
    fn all_labels_must_match() {
        let both = prefetch("{filter_by_labels: {app: nginx, tier: back}}");
        assert_eq!(resolve(&both, [&web()]), Resolved::default());
    }

    #[test]
    fn an_empty_map_matches_nothing() {
        for spec in ["{}", "{filter_by_labels: {}}"] {
            assert_eq!(resolve(&prefetch(spec), [&web()]), Resolved::default());
        }
    }

    #[test]
    fn an_image_that_is_no_reference_is_named_and_the_others_are_wanted() {
        let broken = DeploymentFacts {
            images: ["UPPER".to_owned(), "ok".to_owned()].into(),
            ..web()
        };
        let resolved = resolve(&prefetch("{filter_by_labels: {app: nginx}}"), [&broken]);
        assert!(resolved.images.contains("docker.io/library/ok:latest"));
        assert!(resolved.invalid.contains_key("UPPER"));
    }

    #[test]
    fn absent_or_zero_retry_after_means_300_seconds() {
        for spec in ["{}", "{retry_after: 0}"] {
            assert_eq!(prefetch(spec).retry_after, SignedDuration::from_secs(300));
        }
        assert_eq!(
            prefetch("{retry_after: 60}").retry_after,
            SignedDuration::from_secs(60)
        );
    }

    #[test]
    fn a_node_is_meant_when_its_name_contains_the_filter() {
        let node = |name: &str, ready| NodeFacts {
            name: name.into(),
            os: "linux".into(),
            ready,
            ..NodeFacts::default()
        };
        let some = prefetch("{node_filter: worker}");
        assert_eq!(covers(&some, &node("my-worker-1", true)), Cover::Wanted);
        assert_eq!(covers(&some, &node("my-worker-1", false)), Cover::Excluded);
        assert_eq!(covers(&some, &node("master", true)), Cover::No);
        assert_eq!(covers(&prefetch("{}"), &node("master", true)), Cover::Wanted);
    }
}
