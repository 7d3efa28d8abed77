//! What Quartermaster writes on a Node, and the writes that lead from what is there to what should be.

use std::fmt::Write as _;

use crate::reason;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{NodeCondition, Taint};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

pub(super) const AGENT: &str = "kwasm.sh/agent";
const PROVISIONED: &str = "kwasm.sh/kwasm-provisioned";
const CRUN: &str = "kwasm.sh/crun";
const SPEC_HASH: &str = "kwasm.sh/spec-hash";
const BOOT: &str = "kwasm.sh/verified-boot-id";
const MACHINE: &str = "kwasm.sh/verified-machine-id";
const RESTART: &str = "kwasm.sh/restart";
const IMAGES: &str = "cache.techsquad.rocks/images-verified";
const PINS: &str = "cache.techsquad.rocks/pins-held";
const REPAIRING: &str = "kwasm.sh/repairing";
/// The taint with which a new node keeps pods away until it is prepared.
pub(super) const NOT_READY: &str = "kwasm.sh/not-ready";
const CONDITION: &str = "WasmRuntimeReady";

/// Value of the label `kwasm.sh/agent` that the agent's DaemonSet selects.
pub(crate) const SUMMONED: &str = "summoned";
/// The effect of both taints.
const EFFECT: &str = "NoSchedule";
/// Value of the label `kwasm.sh/crun` that our RuntimeClasses select.
const READY: &str = "ready";

/// Labels, annotations and the condition that are ours on a Node. Reading them back is all the memory
/// that the coordinator has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks {
    /// Label that brings an agent to the node.
    pub agent: Option<String>,
    /// Label that says done.
    pub provisioned: Option<String>,
    /// Label that RuntimeClasses select.
    pub crun: Option<String>,
    /// What the node was provisioned with.
    pub spec_hash: Option<String>,
    /// The boot in which a Wasm module ran.
    pub verified_boot: Option<String>,
    /// The machine on which it ran.
    pub verified_machine: Option<String>,
    /// A restart that was ordered and whose end is not known yet.
    pub restart: Option<Restart>,
    /// One hash over the images that were verified on the node, with boot and time.
    pub images_verified: Option<String>,
    /// Pins of ours may be on the node, until the time that it names.
    pub pins_held: Option<String>,
    /// Condition `WasmRuntimeReady`.
    pub condition: Option<Condition>,
    /// The taint `kwasm.sh/repairing:NoSchedule`: no new pod comes while it is not known whether Wasm runs. The labels
    /// stay meanwhile, since a kubelet that restarts rejects running pods whose node selector no longer matches.
    pub fence: bool,
    /// The taint `kwasm.sh/not-ready:NoSchedule`, which only a registration brings and we only take away.
    pub gate: bool,
}

/// The condition `WasmRuntimeReady` of a Node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// `True` or `False`.
    pub status: bool,
    /// One word of the API conventions.
    pub reason: String,
    /// For a person; at most 1 KiB is written.
    pub message: String,
    /// Since when the status is as it is.
    pub since: Timestamp,
    /// When a module last ran, or was last seen not to.
    pub checked: Timestamp,
}

impl Condition {
    fn says_the_same(&self, other: &Self) -> bool {
        (self.status, &self.reason, &self.message) == (other.status, &other.reason, &other.message)
    }
}

/// A restart in flight, written before it is ordered so that a budget survives a change of leader.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Restart {
    /// Why containerd is about to be restarted.
    pub kind: RestartKind,
    /// Id of the command, which a new leader sends again.
    pub id: String,
}

/// Why containerd is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RestartKind {
    /// To put the handler in.
    Install,
    /// To take it out.
    Remove,
}

/// The requests that bring a Node's marks from one state to another.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Writes {
    /// Strategic merge patch of our condition on the subresource: it goes by the condition's type. An apply that takes the
    /// condition back takes with it all of the status that no field manager owns, and what a kubelet registered with is
    /// owned by none until it first reports.
    pub status: Option<Value>,
    /// Merge patch of labels and annotations.
    pub metadata: Option<Value>,
    /// Whether the status goes first: labels that invite pods are the last thing that is written, and the
    /// first that is taken away.
    pub status_first: bool,
    /// JSON patch of the taints. The list is atomic: an apply would replace everybody's, so it is patched as it was
    /// seen or not at all.
    pub taints: Option<Value>,
    /// Whether the taints go first: a fence stands before anything else is done, and falls last.
    pub taints_first: bool,
}

impl Writes {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.status.is_none() && self.metadata.is_none() && self.taints.is_none()
    }
}

impl Marks {
    /// Reads our marks; `annotation` and `label` look one up by its key.
    pub fn read(
        annotation: impl Fn(&str) -> Option<String>,
        label: impl Fn(&str) -> Option<String>,
        conditions: &[NodeCondition],
        taints: &[Taint],
    ) -> Self {
        let condition = conditions
            .iter()
            .find(|c| c.type_ == CONDITION)
            .map(|c| Condition {
                status: c.status == "True",
                reason: c.reason.clone().unwrap_or_default(),
                message: c.message.clone().unwrap_or_default(),
                since: c.last_transition_time.as_ref().map(|t| t.0).unwrap_or_default(),
                checked: c.last_heartbeat_time.as_ref().map(|t| t.0).unwrap_or_default(),
            });
        let tainted = |key: &str| taints.iter().any(|t| t.key == key && t.effect == EFFECT);
        Self {
            agent: label(AGENT),
            provisioned: label(PROVISIONED),
            crun: label(CRUN),
            spec_hash: annotation(SPEC_HASH),
            verified_boot: annotation(BOOT),
            verified_machine: annotation(MACHINE),
            // One that cannot be read was not written by us; it is overwritten in due course.
            restart: annotation(RESTART).and_then(|text| serde_json::from_str(&text).ok()),
            images_verified: annotation(IMAGES),
            pins_held: annotation(PINS),
            condition,
            fence: tainted(REPAIRING),
            gate: tainted(NOT_READY),
        }
    }

    /// Whether anything says that the node's containerd may hold something of ours, or that a fence is left over.
    pub fn any_of_provisioning(&self) -> bool {
        self.provisioned.is_some()
            || self.crun.is_some()
            || self.spec_hash.is_some()
            || self.verified_boot.is_some()
            || self.verified_machine.is_some()
            || self.restart.is_some()
            || self.condition.is_some()
            || self.fence
    }

    /// Takes away everything that provisioning put on the node, leaving agent and images.
    pub fn without_provisioning(&self) -> Self {
        Self {
            agent: self.agent.clone(),
            images_verified: self.images_verified.clone(),
            pins_held: self.pins_held.clone(),
            gate: self.gate,
            ..Self::default()
        }
    }

    /// Sets the condition, keeping its time while the status stays the same.
    pub fn set_condition(&mut self, status: bool, reason: &str, message: &str, now: Timestamp) {
        let fresh = Condition {
            status,
            reason: reason.to_owned(),
            message: cut(message, 1024),
            since: now,
            checked: now,
        };
        self.condition = Some(match self.condition.take() {
            Some(old) if old.says_the_same(&fresh) => old,
            Some(old) if old.status == status => Condition {
                since: old.since,
                ..fresh
            },
            _ => fresh,
        });
    }

    /// Whether the condition says that Wasm runs.
    pub fn condition_is_true(&self) -> bool {
        self.condition.as_ref().is_some_and(|c| c.status)
    }

    /// A module ran just now.
    pub fn confirm(&mut self, now: Timestamp) {
        if let Some(condition) = &mut self.condition {
            condition.checked = now;
        }
    }

    /// Sets the fence as it has to be on this node: up while Wasm pods may come by the labels, and no module has run
    /// in this boot.
    pub fn set_fence(&mut self, boot_id: &str, machine_id: &str) {
        let verified = self.verified_boot.as_deref() == Some(boot_id)
            && self.verified_machine.as_deref() == Some(machine_id)
            && self.condition.as_ref().is_some_and(|c| c.status);
        self.fence = self.crun.is_some() && (self.restart.is_some() || !verified);
    }

    /// Says that no agent comes to the node, unless the condition says already why it is not provisioned.
    pub fn agent_is_unavailable(&mut self, message: &str, now: Timestamp) {
        let told = self
            .condition
            .as_ref()
            .is_some_and(|c| !c.status && c.reason != reason::AGENT_UNAVAILABLE);
        if self.spec_hash.is_some() || !told {
            self.set_condition(false, reason::AGENT_UNAVAILABLE, message, now);
        }
    }

    /// Whether all that was ever done for the node was to wait: for an agent, or for another operator to end.
    pub fn only_waited(&self) -> bool {
        let untouched = Self {
            condition: self.condition.clone(),
            fence: self.fence,
            ..self.without_provisioning()
        };
        let nothing_but_words = |c: &Condition| {
            [reason::AGENT_UNAVAILABLE, reason::ANOTHER_OPERATOR].contains(&c.reason.as_str())
        };
        *self == untouched && self.condition.as_ref().is_none_or(nothing_but_words)
    }

    /// The labels that say that Wasm pods may come, in the form they have on the node `name`.
    pub fn set_ready_labels(&mut self, name: &str) {
        self.provisioned = Some(label_value(name));
        self.crun = Some(READY.to_owned());
    }

    /// Whether both labels are as [`Marks::set_ready_labels`] makes them.
    pub fn has_ready_labels(&self, name: &str) -> bool {
        self.provisioned.as_deref() == Some(&label_value(name)) && self.crun.as_deref() == Some(READY)
    }

    /// The writes that lead from these marks to `wanted` on the Node of this name and uid.
    pub fn writes_to(&self, wanted: &Self, uid: &str, taints: &Seen<'_>) -> Writes {
        let mut labels = Map::new();
        let mut annotations = Map::new();
        put(&mut labels, AGENT, &self.agent, &wanted.agent);
        put(&mut labels, PROVISIONED, &self.provisioned, &wanted.provisioned);
        put(&mut labels, CRUN, &self.crun, &wanted.crun);
        put(&mut annotations, SPEC_HASH, &self.spec_hash, &wanted.spec_hash);
        put(&mut annotations, BOOT, &self.verified_boot, &wanted.verified_boot);
        put(
            &mut annotations,
            MACHINE,
            &self.verified_machine,
            &wanted.verified_machine,
        );
        put(
            &mut annotations,
            IMAGES,
            &self.images_verified,
            &wanted.images_verified,
        );
        put(&mut annotations, PINS, &self.pins_held, &wanted.pins_held);
        let text = |restart: &Option<Restart>| {
            restart
                .as_ref()
                .map(|r| json!({"kind": r.kind, "id": r.id}).to_string())
        };
        put(
            &mut annotations,
            RESTART,
            &text(&self.restart),
            &text(&wanted.restart),
        );

        let mut metadata = None;
        if !labels.is_empty() || !annotations.is_empty() {
            // The uid makes the API server refuse the patch for a Node that was made anew meanwhile.
            let mut patch = json!({"metadata": {"uid": uid}});
            if !labels.is_empty() {
                patch["metadata"]["labels"] = Value::Object(labels);
            }
            if !annotations.is_empty() {
                patch["metadata"]["annotations"] = Value::Object(annotations);
            }
            metadata = Some(patch);
        }
        let status = (self.condition != wanted.condition).then(|| {
            let condition = wanted.condition.as_ref().map_or_else(
                || json!({"type": CONDITION, "$patch": "delete"}),
                |c| {
                    json!({
                        "type": CONDITION,
                        "status": if c.status { "True" } else { "False" },
                        "reason": c.reason,
                        "message": c.message,
                        "lastTransitionTime": second(c.since),
                        "lastHeartbeatTime": second(c.checked),
                    })
                },
            );
            json!({"metadata": {"uid": uid}, "status": {"conditions": [condition]}})
        });
        Writes {
            status,
            metadata,
            status_first: wanted.crun.is_some(),
            taints: self.taint_patch(wanted, uid, taints),
            taints_first: wanted.fence,
        }
    }
}

/// The taints of a Node as they were seen, and in which version of it.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// `spec.taints`.
    pub taints: &'a [Taint],
    /// `metadata.resourceVersion`.
    pub version: &'a str,
}

impl Marks {
    fn taint_patch(&self, wanted: &Self, uid: &str, seen: &Seen<'_>) -> Option<Value> {
        if (self.fence, self.gate) == (wanted.fence, wanted.gate) {
            return None;
        }
        let ours = |taint: &&Taint| {
            let theirs = taint.effect != EFFECT;
            theirs || (taint.key != REPAIRING && (taint.key != NOT_READY || wanted.gate))
        };
        let mut taints: Vec<Value> = seen.taints.iter().filter(ours).map(|t| json!(t)).collect();
        if wanted.fence {
            taints.push(json!({"key": REPAIRING, "effect": EFFECT}));
        }
        // There is no list to compare with where there was no taint; the version of the whole Node stands in for it.
        let unchanged = if seen.taints.is_empty() {
            json!({"op": "test", "path": "/metadata/resourceVersion", "value": seen.version})
        } else {
            json!({"op": "test", "path": "/spec/taints", "value": seen.taints})
        };
        let change = if taints.is_empty() {
            json!({"op": "remove", "path": "/spec/taints"})
        } else {
            json!({"op": "add", "path": "/spec/taints", "value": taints})
        };
        let same = json!({"op": "test", "path": "/metadata/uid", "value": uid});
        Some(json!([same, unchanged, change]))
    }
}

fn second(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn put(map: &mut Map<String, Value>, key: &str, old: &Option<String>, new: &Option<String>) {
    if old != new {
        map.insert(key.to_owned(), new.as_ref().map_or(Value::Null, |v| json!(v)));
    }
}

/// Cuts a text to at most `limit` bytes, at a character.
fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let mut end = limit - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

/// The value of `kwasm.sh/kwasm-provisioned` for a node: its name, or where that is longer than the 63
/// characters of a label value its first 54, a dash and 8 hex digits of its SHA-256.
pub fn label_value(node: &str) -> String {
    if node.len() <= 63 {
        return node.to_owned();
    }
    format!("{}-{}", &node[..54], &hex(&Sha256::digest(node))[..8])
}

/// Hash of what a node is provisioned with: the payload's version and the handler.
pub fn spec_hash(version: &str) -> String {
    hex(&Sha256::digest(format!(
        "{version}\n{}",
        quartermaster_proto::HANDLER
    )))[..16]
        .to_owned()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
#[path = "marks_tests.rs"]
mod tests;
