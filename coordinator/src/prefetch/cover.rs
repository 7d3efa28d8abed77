//! Which nodes a Prefetch means.

use k8s_openapi::api::core::v1::{Taint, Toleration};
use kube::core::SelectorExt as _;

use super::facts::{NodeQuery, PrefetchFacts};
use crate::node::NodeFacts;

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
        return Cover::No;
    }
    if prefetch.nodes.as_ref().is_some_and(|query| !selects(query, node)) {
        return Cover::No;
    }
    if can_be_served(node) {
        Cover::Wanted
    } else {
        Cover::Excluded
    }
}

fn can_be_served(node: &NodeFacts) -> bool {
    let containerd = node.runtime.is_empty() || node.runtime.starts_with("containerd://");
    node.ready && !node.cordoned && !node.is_virtual && node.os == "linux" && containerd
}

fn selects(query: &NodeQuery, node: &NodeFacts) -> bool {
    if node.control_plane && !query.control_plane {
        return false;
    }
    query.selector.matches(&node.labels)
        && node
            .taints
            .iter()
            .all(|taint| passes(taint) || control_plane(query, taint) || tolerated(query, taint))
}

/// Taints that say nothing of who may use the node in the long run.
fn passes(taint: &Taint) -> bool {
    taint.effect == "PreferNoSchedule"
        || [
            "node.kubernetes.io/",
            "node.cloudprovider.kubernetes.io/",
            "kwasm.sh/",
        ]
        .iter()
        .any(|prefix| taint.key.starts_with(prefix))
}

fn control_plane(query: &NodeQuery, taint: &Taint) -> bool {
    query.control_plane
        && matches!(
            taint.key.as_str(),
            "node-role.kubernetes.io/control-plane" | "node-role.kubernetes.io/master"
        )
}

fn tolerated(query: &NodeQuery, taint: &Taint) -> bool {
    query
        .tolerations
        .iter()
        .any(|toleration| tolerates(toleration, taint))
}

/// As the scheduler has it (k8s.io/component-helpers, `ToleratesTaint`).
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.clone().unwrap_or_default();
    let (key, effect) = (given(&toleration.key), given(&toleration.effect));
    let exists = toleration.operator.as_deref() == Some("Exists");
    (effect.is_empty() || effect == taint.effect)
        && (key == taint.key || (key.is_empty() && exists))
        && (exists || given(&toleration.value) == given(&taint.value))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::prefetch;
    use super::*;

    fn node(yaml: &str) -> NodeFacts {
        let mut node = NodeFacts::read(&serde_yaml_ng::from_str(yaml).expect("a Node"));
        node.ready = true;
        node.os = "linux".into();
        node
    }

    fn named(name: &str) -> NodeFacts {
        node(&format!("metadata: {{name: {name}, labels: {{pool: a}}}}"))
    }

    fn tainted(taint: &str) -> NodeFacts {
        node(&format!(
            "metadata: {{name: worker}}\nspec: {{taints: [{taint}]}}"
        ))
    }

    fn control_plane_node() -> NodeFacts {
        node(
            "metadata: {name: cp, labels: {node-role.kubernetes.io/control-plane: ''}}
spec: {taints: [{key: node-role.kubernetes.io/control-plane, effect: NoSchedule}]}",
        )
    }

    #[test]
    fn a_node_is_meant_when_its_name_contains_the_filter() {
        let some = prefetch("{node_filter: worker}");
        assert_eq!(covers(&some, &named("my-worker-1")), Cover::Wanted);
        assert_eq!(covers(&some, &named("master")), Cover::No);
        assert_eq!(covers(&prefetch("{}"), &named("master")), Cover::Wanted);
    }

    #[test]
    fn a_node_that_cannot_be_served_now_is_counted_apart() {
        let all = prefetch("{}");
        let with = |change: fn(&mut NodeFacts)| {
            let mut node = named("worker");
            change(&mut node);
            covers(&all, &node)
        };
        assert_eq!(with(|_| {}), Cover::Wanted);
        assert_eq!(with(|node| node.ready = false), Cover::Excluded);
        assert_eq!(with(|node| node.cordoned = true), Cover::Excluded);
        assert_eq!(with(|node| node.is_virtual = true), Cover::Excluded);
        assert_eq!(with(|node| node.os = "windows".into()), Cover::Excluded);
        assert_eq!(with(|node| node.runtime = "cri-o://1.34".into()), Cover::Excluded);
    }

    #[test]
    fn the_selector_and_the_filter_must_both_match() {
        let both = prefetch("{node_filter: worker, nodes: {selector: {matchLabels: {pool: a}}}}");
        assert_eq!(covers(&both, &named("worker-1")), Cover::Wanted);
        assert_eq!(covers(&both, &named("other-1")), Cover::No);
        let other = prefetch("{nodes: {selector: {matchLabels: {pool: b}}}}");
        assert_eq!(covers(&other, &named("worker-1")), Cover::No);
    }

    #[test]
    fn control_plane_nodes_are_meant_by_the_filter_alone_and_else_only_when_asked_for() {
        let cp = control_plane_node();
        assert_eq!(covers(&prefetch("{node_filter: cp}"), &cp), Cover::Wanted);
        assert_eq!(covers(&prefetch("{nodes: {}}"), &cp), Cover::No);
        let asked = prefetch("{nodes: {includeControlPlane: true}}");
        assert_eq!(covers(&asked, &cp), Cover::Wanted);
    }

    #[test]
    fn a_taint_keeps_a_node_out_unless_it_is_tolerated_or_passes() {
        let plain = prefetch("{nodes: {}}");
        let gpu = "{key: gpu, value: 'yes', effect: NoSchedule}";
        assert_eq!(covers(&plain, &tainted(gpu)), Cover::No);
        for toleration in [
            "{operator: Exists}",
            "{key: gpu, operator: Exists}",
            "{key: gpu, operator: Equal, value: 'yes'}",
            "{key: gpu, value: 'yes', effect: NoSchedule}",
        ] {
            let tolerant = prefetch(&format!("{{nodes: {{tolerations: [{toleration}]}}}}"));
            assert_eq!(covers(&tolerant, &tainted(gpu)), Cover::Wanted, "{toleration}");
        }
        for toleration in [
            "{key: gpu, value: 'no'}",
            "{key: other, operator: Exists}",
            "{key: gpu, operator: Exists, effect: NoExecute}",
        ] {
            let intolerant = prefetch(&format!("{{nodes: {{tolerations: [{toleration}]}}}}"));
            assert_eq!(covers(&intolerant, &tainted(gpu)), Cover::No, "{toleration}");
        }
        for passing in [
            "{key: a, effect: PreferNoSchedule}",
            "{key: kwasm.sh/not-ready, effect: NoSchedule}",
            "{key: node.kubernetes.io/disk-pressure, effect: NoSchedule}",
        ] {
            assert_eq!(covers(&plain, &tainted(passing)), Cover::Wanted, "{passing}");
        }
        assert_eq!(covers(&prefetch("{}"), &tainted(gpu)), Cover::Wanted);
    }
}
