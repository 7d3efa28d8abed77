//! The engine's dealings with what people have told it for the whole cluster.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::{watcher, watcher as watch};
use tracing::{error, info, warn};

use super::Engine;
use super::feeds::pump;
use super::input::{Change, Input};
use crate::control::{Control, NAME};
use crate::reason;

impl Engine {
    pub(super) fn start_control_feed(&mut self) {
        let maps: Api<ConfigMap> = Api::namespaced(self.setup.client.clone(), &self.setup.namespace);
        let only = watcher::Config::default().fields(&format!("metadata.name={NAME}"));
        self.tasks.spawn(pump(
            watch(maps, only),
            |map: &ConfigMap| (map.name_any(), Control::read(map)),
            Input::Control,
            self.inputs.clone(),
        ));
    }

    pub(super) fn control_changed(&mut self, change: Change<String, Control>) {
        self.synced.control = true;
        let fresh = match change {
            Change::Set(_, control) => control,
            Change::Gone(_) => Control::default(),
            Change::Reset(all) => all.into_values().next().unwrap_or_default(),
        };
        if fresh == self.control {
            return;
        }
        info!(
            paused = fresh.paused,
            halted = fresh.halted,
            removing = fresh.removing,
            "the control of the cluster has changed"
        );
        if self.control.halted.is_some() && fresh.halted.is_none() {
            self.failures = 0;
        }
        self.control = fresh;
        self.all_resolved_anew();
    }

    /// Counts how restarts end; a run of failures halts the rollout.
    pub(super) fn restart_ended(&mut self, name: &str, failed: bool) {
        if !failed {
            self.failures = 0;
            return;
        }
        self.failures += 1;
        if self.failures < self.setup.halt_after || self.control.halted.is_some() {
            return;
        }
        let words = format!(
            "{} restarts in a row failed, the last one on {name}; nodes in service are left alone until it is resumed",
            self.failures
        );
        warn!(node = name, "the rollout is halted: {words}");
        if let Some(node) = self.nodes.get(name) {
            self.notices.of_node(node, true, reason::ROLLOUT_HALTED, &words);
        }
        self.control.halted = Some(words);
        self.write_control();
    }

    fn write_control(&mut self) {
        let maps: Api<ConfigMap> = Api::namespaced(self.setup.client.clone(), &self.setup.namespace);
        let halted = serde_json::json!({"data": {"halted": self.control.halted}});
        self.tasks.spawn(async move {
            // A failure costs no more than that another leader goes on, and halts again.
            let params = PatchParams::default();
            if let Err(error) = maps.patch(NAME, &params, &Patch::Merge(halted)).await {
                error!(%error, "that the rollout is halted could not be written");
            }
        });
    }
}
