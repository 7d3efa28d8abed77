//! What a daemon's CRI serves, read from its verbose status.

use std::collections::{BTreeMap, BTreeSet};

use k8s_cri::v1::StatusResponse;
use serde_json::Value;

/// Settings of one runtime handler, as JSON without what is empty.
pub type RuntimeOptions = Value;

/// What CRI serves.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// Condition RuntimeReady.
    pub runtime_ready: bool,
    /// Condition NetworkReady.
    pub network_ready: bool,
    /// What the conditions say, for people; empty when all is well.
    pub complaint: String,
    /// Name of the handler that pods without a RuntimeClass get.
    pub default_runtime: String,
    /// The handlers and their settings, from the configuration that the daemon reports.
    pub runtimes: BTreeMap<String, RuntimeOptions>,
    /// The handlers that it reports as served; empty before containerd 2.0.
    pub handlers: BTreeSet<String>,
    /// All other settings.
    pub settings: Value,
    /// Image of the sandbox container, where the status tells.
    pub sandbox_image: Option<String>,
}

impl Served {
    /// Reads the answer to `Status(verbose)`.
    ///
    /// # Errors
    /// What is missing in it.
    pub fn read(answer: &StatusResponse) -> Result<Self, String> {
        let conditions = answer
            .status
            .as_ref()
            .map(|status| status.conditions.as_slice())
            .unwrap_or_default();
        let condition = |kind: &str| conditions.iter().any(|c| c.r#type == kind && c.status);
        let complaint = conditions
            .iter()
            .filter(|c| !c.status)
            .map(|c| format!("{}: {} {}", c.r#type, c.reason, c.message))
            .collect::<Vec<_>>()
            .join("; ");
        let config = answer.info.get("config").ok_or("it holds no configuration")?;
        let mut config: Value =
            serde_json::from_str(config).map_err(|error| format!("its configuration: {error}"))?;
        let sandbox_image = config
            .get("sandboxImage")
            .and_then(Value::as_str)
            .map(str::to_owned)
            .filter(|name| !name.is_empty());
        let containerd = config
            .get_mut("containerd")
            .and_then(Value::as_object_mut)
            .ok_or("its configuration has no part `containerd`")?;
        let default_runtime = containerd
            .get("defaultRuntimeName")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        let runtimes = match containerd.remove("runtimes") {
            Some(Value::Object(runtimes)) => runtimes
                .into_iter()
                .map(|(name, options)| (name, pruned(options).unwrap_or_default()))
                .collect(),
            _ => return Err("its configuration has no part `runtimes`".into()),
        };
        Ok(Self {
            runtime_ready: condition("RuntimeReady"),
            network_ready: condition("NetworkReady"),
            complaint,
            default_runtime,
            runtimes,
            handlers: answer
                .runtime_handlers
                .iter()
                .map(|handler| handler.name.clone())
                .filter(|name| !name.is_empty())
                .collect(),
            settings: pruned(config).unwrap_or_default(),
            sandbox_image,
        })
    }

    /// Whether pods of this handler use systemd's cgroups; `None` when the handler does not say.
    pub fn systemd_cgroup(&self, handler: &str) -> Option<bool> {
        self.runtimes
            .get(handler)?
            .get("options")?
            .get("SystemdCgroup")?
            .as_bool()
    }

    /// Whether the handler is configured and, where the daemon reports that, served.
    pub fn serves(&self, handler: &str) -> bool {
        self.runtimes.contains_key(handler) && (self.handlers.is_empty() || self.handlers.contains(handler))
    }
}

/// A value without what is empty in it, since containerd shows a setting that is not there now as `null`, now as
/// an empty list and now not at all. `false` stays: a switch that turns off is a change.
fn pruned(value: Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::String(text) => (!text.is_empty()).then_some(Value::String(text)),
        Value::Array(values) => {
            let values: Vec<_> = values.into_iter().filter_map(pruned).collect();
            (!values.is_empty()).then_some(Value::Array(values))
        }
        Value::Object(entries) => {
            let entries: serde_json::Map<_, _> = entries
                .into_iter()
                .filter_map(|(key, value)| Some((key, pruned(value)?)))
                .collect();
            (!entries.is_empty()).then_some(Value::Object(entries))
        }
        other => Some(other),
    }
}

#[cfg(test)]
mod tests {
    use k8s_cri::v1::{RuntimeCondition, RuntimeHandler, RuntimeStatus};

    use super::*;

    fn answer(config: &str) -> StatusResponse {
        StatusResponse {
            status: Some(RuntimeStatus {
                conditions: vec![
                    RuntimeCondition {
                        r#type: "RuntimeReady".into(),
                        status: true,
                        ..Default::default()
                    },
                    RuntimeCondition {
                        r#type: "NetworkReady".into(),
                        status: false,
                        reason: "NetworkPluginNotReady".into(),
                        message: "no CNI".into(),
                    },
                ],
            }),
            info: [("config".to_owned(), config.to_owned())].into(),
            runtime_handlers: vec![
                RuntimeHandler::default(),
                RuntimeHandler {
                    name: "runc".into(),
                    features: None,
                },
            ],
            features: None,
        }
    }

    #[test]
    fn reads_runtimes_conditions_and_the_rest_apart() {
        let served = Served::read(&answer(
            r#"{"containerd":{"defaultRuntimeName":"runc","snapshotter":"overlayfs","runtimes":{"runc":{"runtimeType":"io.containerd.runc.v2","PodAnnotations":[],"options":{"BinaryName":"","SystemdCgroup":true}}}},"sandboxImage":"pause:3.10"}"#,
        ))
        .unwrap();
        assert!(served.runtime_ready && !served.network_ready);
        assert!(served.complaint.contains("no CNI"));
        assert_eq!(served.default_runtime, "runc");
        assert_eq!(served.systemd_cgroup("runc"), Some(true));
        assert_eq!(
            served.runtimes["runc"],
            serde_json::json!({"runtimeType": "io.containerd.runc.v2", "options": {"SystemdCgroup": true}})
        );
        assert!(served.serves("runc") && !served.serves("crun"));
        assert_eq!(served.sandbox_image.as_deref(), Some("pause:3.10"));
        assert!(served.settings["containerd"].get("runtimes").is_none());
    }

    #[test]
    fn an_answer_without_runtimes_is_an_error() {
        assert!(Served::read(&answer("{}")).is_err());
        assert!(Served::read(&answer("not json")).is_err());
        assert!(Served::read(&StatusResponse::default()).is_err());
    }
}
