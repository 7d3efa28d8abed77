//! What people have told the coordinator to do with the whole cluster: pause, resume, remove everything. It is kept in
//! the ConfigMap `quartermaster-control`, and every replica reads it from there.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::{Value, json};

/// Name of the ConfigMap.
pub const NAME: &str = "quartermaster-control";

/// What the cluster is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Control {
    /// No new order is given to any agent.
    pub paused: bool,
    /// Restarts of nodes that are in service have stopped after a run of failures, with these words.
    pub halted: Option<String>,
    /// Everything of ours is to go, whatever annotations and settings say.
    pub removing: bool,
}

impl Control {
    /// Reads it; what is not there is not so.
    pub fn read(map: &ConfigMap) -> Self {
        let empty = BTreeMap::new();
        let data = map.data.as_ref().unwrap_or(&empty);
        let set = |key: &str| data.get(key).map(String::as_str) == Some("true");
        Self {
            paused: set("paused"),
            halted: data.get("halted").filter(|words| !words.is_empty()).cloned(),
            removing: set("removing"),
        }
    }

    /// The merge patch that brings the ConfigMap to this.
    pub fn patch(&self) -> Value {
        let flag = |set: bool| if set { json!("true") } else { Value::Null };
        json!({"data": {
            "paused": flag(self.paused),
            "halted": self.halted,
            "removing": flag(self.removing),
        }})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        let control = Control {
            paused: true,
            halted: Some("3 nodes failed in a row".into()),
            removing: false,
        };
        let mut patch = control.patch();
        assert_eq!(
            patch["data"]["removing"],
            Value::Null,
            "a merge patch takes it away"
        );
        patch["data"]
            .as_object_mut()
            .expect("a map")
            .retain(|_, value| !value.is_null());
        let map: ConfigMap = serde_json::from_value(patch).expect("a ConfigMap");
        assert_eq!(Control::read(&map), control);
    }

    #[test]
    fn only_the_exact_value_true_counts() {
        let map: ConfigMap =
            serde_json::from_value(json!({"data": {"paused": "yes", "halted": ""}})).expect("one");
        assert_eq!(Control::read(&map), Control::default());
        assert_eq!(Control::read(&ConfigMap::default()), Control::default());
    }
}
