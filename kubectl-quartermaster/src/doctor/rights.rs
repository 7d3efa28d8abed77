//! The rights that the person needs for this program, and the coordinator for its work.

use std::fmt;

/// One verb on one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Right {
    pub(super) group: &'static str,
    /// With its subresource, such as `pods/exec`.
    pub(super) resource: &'static str,
    pub(super) verb: &'static str,
    /// In the namespace of Quartermaster; else in the whole cluster.
    pub(super) own_namespace: bool,
    pub(super) name: Option<&'static str>,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        match self.name {
            Some(name) => write!(f, "/{name}"),
            None => Ok(()),
        }
    }
}

const fn everywhere(group: &'static str, resource: &'static str, verb: &'static str) -> Right {
    Right {
        group,
        resource,
        verb,
        own_namespace: false,
        name: None,
    }
}

const fn here(group: &'static str, resource: &'static str, verb: &'static str) -> Right {
    Right {
        own_namespace: true,
        ..everywhere(group, resource, verb)
    }
}

const fn this(group: &'static str, resource: &'static str, verb: &'static str, name: &'static str) -> Right {
    Right {
        name: Some(name),
        ..here(group, resource, verb)
    }
}

const CACHE: &str = "cache.techsquad.rocks";
const LEASES: &str = "coordination.k8s.io";

/// What `manifests/samples/people.yaml` gives, as far as a command would fail without it. Of exec, one API server asks
/// for `get`, a newer one for `create` too.
pub(super) const PERSONS: &[Right] = &[
    this(LEASES, "leases", "get", "quartermaster-coordinator"),
    here("", "pods/exec", "get"),
    here("", "pods/exec", "create"),
    everywhere("", "nodes", "get"),
    everywhere("", "nodes", "list"),
    everywhere("", "nodes", "watch"),
    everywhere("", "nodes", "patch"),
    everywhere(CACHE, "prefetches", "list"),
    everywhere(CACHE, "prefetches", "watch"),
    everywhere(CACHE, "prefetches", "patch"),
    everywhere(CACHE, "prefetches", "create"),
];

/// What `manifests/chart/files/rbac.yaml` gives the coordinator, without which it can't do its work.
pub(super) const COORDINATORS: &[Right] = &[
    everywhere("", "nodes", "list"),
    everywhere("", "nodes", "watch"),
    everywhere("", "nodes", "patch"),
    everywhere("", "nodes/status", "patch"),
    everywhere(CACHE, "prefetches", "list"),
    everywhere(CACHE, "prefetches", "watch"),
    everywhere(CACHE, "prefetches/status", "patch"),
    everywhere("apps", "deployments", "list"),
    everywhere("apps", "deployments", "watch"),
    everywhere("authentication.k8s.io", "tokenreviews", "create"),
    everywhere("events.k8s.io", "events", "create"),
    here("", "pods", "list"),
    here("", "pods", "watch"),
    here("", "secrets", "create"),
    this("", "secrets", "get", "quartermaster-ca"),
    this("", "secrets", "update", "quartermaster-ca"),
    this("", "configmaps", "patch", "quartermaster-ca"),
    this("", "configmaps", "patch", "quartermaster-control"),
    this("", "configmaps", "patch", "quartermaster-reports-0"),
    this(LEASES, "leases", "update", "quartermaster-coordinator"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_yaml_ng::Value;

    use super::*;

    /// `verb resource.group[/name]` of every rule of some manifest.
    fn given(manifest: &str) -> BTreeSet<String> {
        let words = |value: &Value| -> Vec<String> {
            let words = value.as_sequence().into_iter().flatten();
            words
                .filter_map(|word| word.as_str().map(str::to_owned))
                .collect()
        };
        let mut given = BTreeSet::new();
        for document in serde_yaml_ng::Deserializer::from_str(manifest) {
            let object: Value = serde::Deserialize::deserialize(document).expect("YAML");
            for rule in object["rules"].as_sequence().into_iter().flatten() {
                for group in words(&rule["apiGroups"]) {
                    let dot = if group.is_empty() { "" } else { "." };
                    for resource in words(&rule["resources"]) {
                        for verb in words(&rule["verbs"]) {
                            given.insert(format!("{verb} {resource}{dot}{group}"));
                            for name in words(&rule["resourceNames"]) {
                                given.insert(format!("{verb} {resource}{dot}{group}/{name}"));
                            }
                        }
                    }
                }
            }
        }
        given
    }

    #[test]
    fn the_manifests_give_what_is_asked_for() {
        for (rights, manifest) in [
            (PERSONS, include_str!("../../../manifests/samples/people.yaml")),
            (
                COORDINATORS,
                include_str!("../../../manifests/chart/files/rbac.yaml"),
            ),
        ] {
            let given = given(manifest);
            for right in rights {
                assert!(given.contains(&right.to_string()), "{right}");
            }
        }
    }
}
