//! Which images a Prefetch wants.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use kube::core::SelectorExt as _;

use super::crd::WorkloadKind;
use super::facts::{PrefetchFacts, WorkloadQuery};
use super::limits::{Excess, Limits};
use super::reference::normalise;
use super::workload::WorkloadFacts;
use crate::reason;

/// All namespaces.
const ALL: &str = "*";

/// The images that a Prefetch wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Normalised references, each with its place in the order of the specification.
    pub images: BTreeMap<Arc<str>, u32>,
    /// What can't or may not be pulled, with why.
    pub refused: BTreeMap<String, RefusedImage>,
    /// A bound that is exceeded: nothing is wanted then.
    pub excess: Option<Excess>,
}

/// Why an image is not pulled at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedImage {
    /// One word.
    pub reason: &'static str,
    /// For a person.
    pub message: String,
}

/// Resolves a Prefetch. `workloads` gives those of one kind.
pub fn resolve<'a, I>(
    prefetch: &PrefetchFacts,
    workloads: impl Fn(WorkloadKind) -> I,
    limits: &Limits,
) -> Resolved
where
    I: IntoIterator<Item = &'a WorkloadFacts>,
{
    let mut found = Found {
        limits,
        resolved: Resolved::default(),
        seen: HashSet::new(),
    };
    if !limits.across_namespaces && looks_beyond(prefetch) {
        found.resolved.excess = Some(Excess::Namespaces);
        return found.resolved;
    }
    for image in &prefetch.images {
        found.add(image);
    }
    if !prefetch.labels.is_empty() {
        for workload in workloads(WorkloadKind::Deployment) {
            let matches = prefetch
                .labels
                .iter()
                .all(|(key, value)| workload.labels.get(key) == Some(value));
            if matches {
                found.add_all(workload);
            }
        }
    }
    for query in &prefetch.workloads {
        for workload in workloads(query.kind) {
            if means(query, &prefetch.namespace, workload) {
                found.add_all(workload);
            }
        }
    }
    found.finish()
}

fn looks_beyond(prefetch: &PrefetchFacts) -> bool {
    let foreign = |namespace: &String| *namespace != prefetch.namespace;
    !prefetch.labels.is_empty()
        || prefetch
            .workloads
            .iter()
            .any(|query| query.namespaces.iter().any(foreign))
}

fn means(query: &WorkloadQuery, own: &str, workload: &WorkloadFacts) -> bool {
    let namespace = workload.namespace.as_str();
    let here = if query.namespaces.is_empty() {
        namespace == own
    } else {
        query
            .namespaces
            .iter()
            .any(|wanted| wanted == ALL || wanted == namespace)
    };
    here && query.selector.matches(&workload.labels)
}

struct Found<'l> {
    limits: &'l Limits,
    resolved: Resolved,
    /// The same image stands in many workloads.
    seen: HashSet<String>,
}

impl Found<'_> {
    fn add_all(&mut self, workload: &WorkloadFacts) {
        for image in &workload.images {
            self.add(image);
        }
    }

    fn add(&mut self, image: &str) {
        if !self.seen.insert(image.to_owned()) {
            return;
        }
        let refused = match normalise(image) {
            Ok(full) if self.limits.allows(&full) => {
                let place = u32::try_from(self.resolved.images.len()).unwrap_or(u32::MAX);
                self.resolved.images.entry(full.into()).or_insert(place);
                return;
            }
            Ok(full) => RefusedImage {
                reason: reason::REGISTRY_NOT_ALLOWED,
                message: format!("this cluster does not allow {full} to be prefetched"),
            },
            Err(message) => RefusedImage {
                reason: reason::INVALID_REFERENCE,
                message,
            },
        };
        self.resolved.refused.insert(image.to_owned(), refused);
    }

    fn finish(mut self) -> Resolved {
        let wanted = self.resolved.images.len();
        if wanted > self.limits.images {
            self.resolved.images.clear();
            self.resolved.excess = Some(Excess::Images(wanted, self.limits.images));
        }
        self.resolved
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::apps::v1::Deployment;

    use super::super::facts::tests::prefetch;
    use super::super::workload::tests::workload;
    use super::*;

    fn deployment(namespace: &str, labels: &str, image: &str) -> WorkloadFacts {
        workload::<Deployment>(&format!(
            "metadata: {{name: web, namespace: {namespace}, labels: {labels}}}
spec: {{selector: {{}}, template: {{spec: {{initContainers: [{{name: i, image: 'busybox:1'}}], containers: [{{name: a, image: '{image}'}}]}}}}}}"
        ))
    }

    fn web() -> WorkloadFacts {
        deployment("shop", "{app: nginx, tier: front}", "nginx")
    }

    fn resolved(spec: &str, workloads: &[WorkloadFacts]) -> Resolved {
        resolve(&prefetch(spec), |_| workloads.iter(), &Limits::default())
    }

    fn names(resolved: &Resolved) -> Vec<&str> {
        let mut images: Vec<_> = resolved.images.iter().collect();
        images.sort_by_key(|(_, place)| **place);
        images.into_iter().map(|(image, _)| &**image).collect()
    }

    #[test]
    fn images_of_containers_and_init_containers_are_wanted_once() {
        let again = deployment("other", "{app: nginx}", "docker.io/library/nginx:latest");
        assert_eq!(
            names(&resolved("{filter_by_labels: {app: nginx}}", &[web(), again])),
            ["docker.io/library/busybox:1", "docker.io/library/nginx:latest"]
        );
    }

    #[test]
    fn all_labels_must_match_and_an_empty_map_matches_nothing() {
        for spec in [
            "{filter_by_labels: {app: nginx, tier: back}}",
            "{}",
            "{filter_by_labels: {}}",
        ] {
            assert_eq!(resolved(spec, &[web()]), Resolved::default(), "{spec}");
        }
    }

    #[test]
    fn images_come_in_the_order_in_which_they_are_given() {
        let spec = "{images: [z, a], filter_by_labels: {app: nginx}}";
        assert_eq!(
            names(&resolved(spec, &[web()])),
            [
                "docker.io/library/z:latest",
                "docker.io/library/a:latest",
                "docker.io/library/busybox:1",
                "docker.io/library/nginx:latest"
            ]
        );
    }

    #[test]
    fn workloads_are_those_of_the_own_namespace_unless_others_are_named() {
        let own = deployment("n", "{app: x}", "own");
        let both = [own, web()];
        let count = |spec: &str| resolved(spec, &both).images.len();
        assert_eq!(count("{workloads: [{kind: Deployment}]}"), 2);
        assert_eq!(count("{workloads: [{kind: Deployment, namespaces: ['*']}]}"), 3);
        assert_eq!(
            names(&resolved(
                "{workloads: [{kind: Deployment, namespaces: [shop], selector: {matchExpressions: [{key: tier, operator: In, values: [front]}]}}]}",
                &both
            )),
            ["docker.io/library/busybox:1", "docker.io/library/nginx:latest"]
        );
        assert_eq!(
            count(
                "{workloads: [{kind: Deployment, namespaces: [shop], selector: {matchLabels: {tier: back}}}]}"
            ),
            0
        );
    }

    #[test]
    fn an_image_that_is_no_reference_is_named_and_the_others_are_wanted() {
        let resolved = resolved("{images: [UPPER, ok]}", &[]);
        assert!(resolved.images.contains_key("docker.io/library/ok:latest"));
        assert_eq!(resolved.refused["UPPER"].reason, "InvalidReference");
    }

    #[test]
    fn an_image_of_a_registry_that_is_not_allowed_is_refused_by_name() {
        let limits = Limits {
            repositories: vec!["registry.example.com".into()],
            ..Limits::default()
        };
        let spec = prefetch("{images: [nginx, registry.example.com/a]}");
        let resolved = resolve(&spec, |_| [], &limits);
        assert_eq!(names(&resolved), ["registry.example.com/a:latest"]);
        assert_eq!(resolved.refused["nginx"].reason, "RegistryNotAllowed");
    }

    #[test]
    fn more_images_than_are_allowed_are_refused_as_a_whole() {
        let limits = Limits {
            images: 1,
            ..Limits::default()
        };
        let resolved = resolve(&prefetch("{images: [a, b]}"), |_| [], &limits);
        assert_eq!(resolved.excess, Some(Excess::Images(2, 1)));
        assert!(resolved.images.is_empty());
        assert_eq!(
            resolve(&prefetch("{images: [a, 'a:latest']}"), |_| [], &limits).excess,
            None
        );
    }

    #[test]
    fn other_namespaces_can_be_closed_to_a_prefetch() {
        let limits = Limits {
            across_namespaces: false,
            ..Limits::default()
        };
        let excess = |spec: &str| resolve(&prefetch(spec), |_| [], &limits).excess;
        for spec in [
            "{filter_by_labels: {a: b}}",
            "{workloads: [{kind: Job, namespaces: ['*']}]}",
            "{workloads: [{kind: Job, namespaces: [m]}]}",
        ] {
            assert_eq!(excess(spec), Some(Excess::Namespaces), "{spec}");
        }
        for spec in [
            "{workloads: [{kind: Job}]}",
            "{workloads: [{kind: Job, namespaces: [n]}]}",
        ] {
            assert_eq!(excess(spec), None, "{spec}");
        }
    }
}
