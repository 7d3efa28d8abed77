//! What the coordinator keeps of a Node object.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeStatus, Taint};
use kube::api::ObjectMeta;

use super::marks::{AGENT, Marks, NOT_READY};

/// `metadata.resourceVersion` as a number, which grows with every write to an object. It says how new facts are and
/// is no fact itself: two states that differ in it alone are the same.
#[derive(Debug, Clone, Copy, Default)]
pub struct Version(u64);

impl Version {
    /// Reads the version of an object; one that is not a number counts as the oldest and never as stale.
    pub fn read(metadata: &ObjectMeta) -> Self {
        let text = metadata.resource_version.as_deref();
        Self(text.and_then(|text| text.parse().ok()).unwrap_or(0))
    }

    /// As the API server writes it.
    pub fn text(self) -> String {
        self.0.to_string()
    }

    /// Whether what carries this version was overtaken by what carries `known`: a watch may bring a state from before
    /// an answer that has come already.
    pub fn is_stale_beside(self, known: Self) -> bool {
        self.0 != 0 && self.0 < known.0
    }
}

impl PartialEq for Version {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Version {}

/// A Node, trimmed to what decisions need. A heartbeat that changes none of it wakes nobody.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFacts {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`: a Node of the same name that was made anew is another node.
    pub uid: String,
    /// How new this is.
    pub version: Version,
    /// The annotation `kwasm.sh/kwasm-node`, whatever its value.
    pub intent: Option<String>,
    /// The annotation `kwasm.sh/force-removal` is `true`.
    pub force_removal: bool,
    /// What we, or our predecessor, wrote on it.
    pub marks: Marks,
    /// `status.nodeInfo.bootID`.
    pub boot_id: String,
    /// `status.nodeInfo.machineID`.
    pub machine_id: String,
    /// `status.nodeInfo.operatingSystem`.
    pub os: String,
    /// `status.nodeInfo.containerRuntimeVersion`, such as `containerd://2.1.4`.
    pub runtime: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Timestamp>,
    /// Whether `status.runtimeHandlers` names our handler; `None` where containerd tells the kubelet of none.
    pub serves_handler: Option<bool>,
    /// `metadata.labels`, for selectors.
    pub labels: BTreeMap<String, String>,
    /// `spec.taints`.
    pub taints: Vec<Taint>,
    /// `spec.unschedulable`.
    pub cordoned: bool,
    /// Condition `Ready` is `True`.
    pub ready: bool,
    /// Carries the label or taint of a control-plane node.
    pub control_plane: bool,
    /// Of a kind on which no pod of a DaemonSet can ever run (virtual kubelets).
    pub is_virtual: bool,
}

impl NodeFacts {
    /// Reads the facts of a Node; anything that is absent is empty.
    pub fn read(node: &Node) -> Self {
        let meta = &node.metadata;
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|map| map.get(key)).cloned();
        let label = |key: &str| meta.labels.as_ref().and_then(|map| map.get(key)).cloned();
        let status = node.status.as_ref();
        let info = status.and_then(|s| s.node_info.as_ref());
        let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or(&[]);
        let taints = node
            .spec
            .as_ref()
            .and_then(|s| s.taints.as_deref())
            .unwrap_or(&[]);
        const CONTROL_PLANE: [&str; 2] = [
            "node-role.kubernetes.io/control-plane",
            "node-role.kubernetes.io/master",
        ];
        Self {
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            version: Version::read(meta),
            intent: annotation("kwasm.sh/kwasm-node"),
            force_removal: annotation("kwasm.sh/force-removal").as_deref() == Some("true"),
            marks: Marks::read(annotation, label, conditions, taints),
            boot_id: info.map(|i| i.boot_id.clone()).unwrap_or_default(),
            machine_id: info.map(|i| i.machine_id.clone()).unwrap_or_default(),
            os: info.map(|i| i.operating_system.clone()).unwrap_or_default(),
            runtime: info
                .map(|i| i.container_runtime_version.clone())
                .unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0),
            serves_handler: status.and_then(serves_handler),
            // Our own label comes and goes with the agent, and is read as a mark.
            labels: meta
                .labels
                .iter()
                .flatten()
                .filter(|(key, _)| *key != AGENT)
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
            taints: taints.to_vec(),
            cordoned: node.spec.as_ref().and_then(|s| s.unschedulable) == Some(true),
            ready: conditions
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True"),
            control_plane: CONTROL_PLANE
                .iter()
                .any(|key| label(key).is_some() || taints.iter().any(|t| t.key == *key)),
            is_virtual: label("type").as_deref() == Some("virtual-kubelet")
                || taints.iter().any(|t| t.key.starts_with("virtual-kubelet.io/")),
        }
    }
}

/// containerd 2 tells the kubelet its handlers (KEP-3857 and KEP-127 brought the field); 1.x does not.
fn serves_handler(status: &NodeStatus) -> Option<bool> {
    let handlers = status.runtime_handlers.as_deref().filter(|all| !all.is_empty())?;
    let ours = |name: &Option<String>| name.as_deref() == Some(quartermaster_proto::HANDLER);
    Some(handlers.iter().any(|handler| ours(&handler.name)))
}

impl NodeFacts {
    /// Whether it registered with the taint that keeps pods away until it is prepared.
    pub fn is_gated(&self) -> bool {
        self.taints
            .iter()
            .any(|taint| taint.key == NOT_READY && taint.effect == "NoSchedule")
    }

    /// Whether a Wasm module has run on this machine in this boot.
    pub fn is_verified(&self) -> bool {
        self.marks.verified_boot.as_deref() == Some(&self.boot_id)
            && self.marks.verified_machine.as_deref() == Some(&self.machine_id)
            && self.marks.condition.as_ref().is_some_and(|c| c.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(yaml: &str) -> NodeFacts {
        NodeFacts::read(&serde_yaml_ng::from_str(yaml).expect("a Node"))
    }

    #[test]
    fn a_heartbeat_changes_no_fact() {
        let with = |time: &str| {
            node(&format!(
                "metadata: {{name: a, uid: u, resourceVersion: '{}'}}\nstatus: {{conditions: [{{type: Ready, status: 'True', lastHeartbeatTime: '{time}'}}]}}",
                time.len()
            ))
        };
        assert_eq!(with("2026-01-01T00:00:00Z"), with("2026-01-01T00:00:10Z"));
    }

    #[test]
    fn a_state_from_before_an_answer_is_stale() {
        let with =
            |version: &str| node(&format!("metadata: {{name: a, resourceVersion: '{version}'}}")).version;
        assert!(with("9").is_stale_beside(with("10")));
        assert!(!with("10").is_stale_beside(with("10")));
        assert!(!with("opaque").is_stale_beside(with("10")));
    }

    #[test]
    fn a_control_plane_node_is_known_by_label_or_taint() {
        assert!(
            node("metadata: {name: a, labels: {node-role.kubernetes.io/control-plane: ''}}").control_plane
        );
        assert!(
            node("metadata: {name: a}\nspec: {taints: [{key: node-role.kubernetes.io/control-plane, effect: NoSchedule}]}")
                .control_plane
        );
        assert!(!node("metadata: {name: a}").control_plane);
    }

    #[test]
    fn handlers_are_known_only_where_the_kubelet_is_told_of_them() {
        let with = |handlers: &str| {
            node(&format!(
                "metadata: {{name: a}}\nstatus: {{runtimeHandlers: {handlers}}}"
            ))
            .serves_handler
        };
        assert_eq!(with("[]"), None);
        assert_eq!(with("[{name: ''}, {name: runc}]"), Some(false));
        assert_eq!(with("[{name: ''}, {name: crun}]"), Some(true));
        assert_eq!(node("metadata: {name: a}").serves_handler, None);
    }

    #[test]
    fn only_the_exact_value_true_forces_a_removal() {
        assert!(node("metadata: {name: a, annotations: {kwasm.sh/force-removal: 'true'}}").force_removal);
        assert!(!node("metadata: {name: a, annotations: {kwasm.sh/force-removal: 'yes'}}").force_removal);
    }
}
