//! An independent watch of the Nodes: it tells the simulated kubelets what is wanted, and checks what must always hold.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::runtime::watcher;
use kube::runtime::watcher::{Config, Event};
use tokio::time::{Instant, MissedTickBehavior};

use super::ledger::{Ledger, locked};
use super::machine::Machine;

/// For so long of a leader's undisturbed time a node may look as it did before a boot that the leader has yet to hear of.
const GRACE: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(200);
/// Until a watch that was lost is taken up again: what happens meanwhile is not seen.
const BLIND: Duration = Duration::from_millis(100);
/// The annotation of a Node that is being restarted.
pub(super) const RESTART: &str = "kwasm.sh/restart";

/// A Node as the watch last brought it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub uid: String,
    pub boot_id: String,
    pub machine_id: String,
    pub wanted: Option<String>,
    pub summoned: bool,
    /// Carries the label that our RuntimeClasses select.
    pub ready_label: bool,
    pub provisioned_label: bool,
    /// A taint of ours keeps new pods away.
    pub fenced: bool,
    /// The command by which it is restarted.
    pub restart: Option<String>,
    pub verified_boot: Option<String>,
    pub images_verified: Option<String>,
    /// Status and reason of `WasmRuntimeReady`.
    pub condition: Option<(bool, String)>,
    pub ready: bool,
}

impl Seen {
    fn read(node: &Node) -> Self {
        let meta = &node.metadata;
        let label = |key: &str| meta.labels.as_ref().and_then(|map| map.get(key)).cloned();
        let annotation = |key: &str| meta.annotations.as_ref().and_then(|map| map.get(key)).cloned();
        let conditions = node
            .status
            .as_ref()
            .and_then(|status| status.conditions.as_deref())
            .unwrap_or(&[]);
        let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        let taints = node
            .spec
            .as_ref()
            .and_then(|spec| spec.taints.as_deref())
            .unwrap_or(&[]);
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            boot_id: info.map(|info| info.boot_id.clone()).unwrap_or_default(),
            machine_id: info.map(|info| info.machine_id.clone()).unwrap_or_default(),
            wanted: annotation("kwasm.sh/kwasm-node"),
            summoned: label("kwasm.sh/agent").as_deref() == Some("summoned"),
            ready_label: label("kwasm.sh/crun").as_deref() == Some("ready"),
            provisioned_label: label("kwasm.sh/kwasm-provisioned").is_some(),
            fenced: taints.iter().any(|taint| {
                ["kwasm.sh/repairing", "kwasm.sh/not-ready"].contains(&taint.key.as_str())
                    && taint.effect == "NoSchedule"
            }),
            restart: annotation(RESTART).map(restart_id),
            verified_boot: annotation("kwasm.sh/verified-boot-id"),
            images_verified: annotation("cache.techsquad.rocks/images-verified"),
            condition: conditions
                .iter()
                .find(|condition| condition.type_ == "WasmRuntimeReady")
                .map(|condition| {
                    (
                        condition.status == "True",
                        condition.reason.clone().unwrap_or_default(),
                    )
                }),
            ready: conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        }
    }

    /// Whether it says that a Wasm pod may come, and that all is well.
    pub(super) fn takes_wasm(&self) -> bool {
        self.ready_label
            && self.provisioned_label
            && !self.fenced
            && self.restart.is_none()
            && self.condition.as_ref().is_some_and(|(holds, _)| *holds)
    }

    /// Whether it carries nothing of a provisioning.
    pub(super) fn is_untouched(&self) -> bool {
        !self.ready_label
            && !self.provisioned_label
            && !self.fenced
            && self.restart.is_none()
            && self.verified_boot.is_none()
            && self.condition.is_none()
    }
}

/// The command that the annotation of a restart names.
pub(super) fn restart_id(text: String) -> String {
    let id = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|restart| restart["id"].as_str().map(ToOwned::to_owned));
    id.unwrap_or(text)
}

/// The watch, and what it has brought.
pub(super) struct Observer {
    machines: HashMap<String, Arc<Machine>>,
    ledger: Arc<Ledger>,
    seen: Mutex<BTreeMap<String, Seen>>,
    restarting: Mutex<BTreeSet<String>>,
    /// Every restart that a Node has ever named.
    named: Mutex<BTreeSet<(String, String)>>,
    /// Events that were brought.
    pub events: AtomicUsize,
    /// The most Nodes that carried a restart at once.
    pub worst: AtomicUsize,
    /// Since when a leader has been at work without being disturbed; `None` while none is.
    led_since: Mutex<Option<Instant>>,
}

impl Observer {
    pub(super) fn new(machines: HashMap<String, Arc<Machine>>, ledger: Arc<Ledger>) -> Arc<Self> {
        Arc::new(Self {
            machines,
            ledger,
            seen: Mutex::default(),
            restarting: Mutex::default(),
            named: Mutex::default(),
            events: AtomicUsize::new(0),
            worst: AtomicUsize::new(0),
            led_since: Mutex::default(),
        })
    }

    /// Watches for ever.
    pub(super) async fn watch(self: Arc<Self>, client: kube::Client) {
        let config = Config::default().page_size(500);
        let mut events = std::pin::pin!(watcher(Api::<Node>::all(client), config));
        let mut listed = BTreeSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(node)) => {
                    listed.extend(node.metadata.name.clone());
                    self.is_so(&node);
                }
                Ok(Event::InitDone) => {
                    let known: Vec<String> = locked(&self.seen).keys().cloned().collect();
                    for name in known.into_iter().filter(|name| !listed.contains(name)) {
                        self.is_gone(&name);
                    }
                }
                Ok(Event::Apply(node)) => self.is_so(&node),
                Ok(Event::Delete(node)) => self.is_gone(node.metadata.name.as_deref().unwrap_or_default()),
                Err(_) => tokio::time::sleep(BLIND).await,
            }
        }
    }

    fn is_so(&self, node: &Node) {
        let name = node.metadata.name.clone().unwrap_or_default();
        let Some(machine) = self.machines.get(&name) else {
            return;
        };
        self.events.fetch_add(1, Ordering::Relaxed);
        let seen = Seen::read(node);
        let wanted = seen.summoned.then(|| seen.uid.clone());
        machine.wanted.send_if_modified(|now| {
            let other = *now != wanted;
            *now = wanted.clone();
            other
        });
        let restarting = {
            let mut restarting = locked(&self.restarting);
            if let Some(id) = &seen.restart {
                restarting.insert(name.clone());
                locked(&self.named).insert((name.clone(), id.clone()));
            } else {
                restarting.remove(&name);
            }
            restarting.len()
        };
        self.worst.fetch_max(restarting, Ordering::SeqCst);
        let limit = self.ledger.limit.load(Ordering::SeqCst);
        if restarting > limit && seen.restart.is_some() {
            self.ledger.violation(format!(
                "{restarting} Nodes carry a restart, {limit} may: {name} is one"
            ));
        }
        locked(&self.seen).insert(name, seen);
    }

    fn is_gone(&self, name: &str) {
        if let Some(machine) = self.machines.get(name) {
            machine.wanted.send_replace(None);
        }
        locked(&self.restarting).remove(name);
        locked(&self.seen).remove(name);
    }

    /// All Nodes as they were last seen.
    pub(super) fn seen(&self) -> BTreeMap<String, Seen> {
        locked(&self.seen).clone()
    }

    /// How many Nodes are like this.
    pub(super) fn count(&self, like: impl Fn(&Seen) -> bool) -> usize {
        locked(&self.seen).values().filter(|seen| like(seen)).count()
    }

    /// Whether a Node has ever named the restart by this command.
    pub(super) fn has_named(&self, node: &str, id: &str) -> bool {
        locked(&self.named).contains(&(node.to_owned(), id.to_owned()))
    }

    /// A leader is at work undisturbed from now on, or none is.
    pub(super) fn led(&self, is_led: bool) {
        let mut since = locked(&self.led_since);
        match (is_led, *since) {
            (true, None) => *since = Some(Instant::now()),
            (false, Some(_)) => *since = None,
            _ => {}
        }
    }

    /// Checks for ever that no node invites Wasm pods in a boot in which no module has run, once a leader has had the time to
    /// hear of the boot.
    pub(super) async fn check_boots(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut exposed: HashMap<(String, String), Duration> = HashMap::new();
        let mut last = Instant::now();
        loop {
            ticks.tick().await;
            // A machine that has stood still has not given the leader its time either.
            let passed = last.elapsed().min(TICK * 2);
            last = Instant::now();
            let led = locked(&self.led_since).is_some_and(|since| since.elapsed() > Duration::from_secs(1));
            let mut now = HashMap::new();
            for (name, seen) in &*locked(&self.seen) {
                let ran = self
                    .machines
                    .get(name)
                    .is_some_and(|machine| machine.ran_in(&seen.boot_id));
                if !seen.ready_label || seen.fenced || ran {
                    continue;
                }
                let key = (name.clone(), seen.boot_id.clone());
                let before = exposed.get(&key).copied().unwrap_or_default();
                let time = if led { before + passed } else { before };
                if before <= GRACE && time > GRACE {
                    self.ledger.violation(format!(
                        "{name} has invited Wasm pods for {:.1} s of a leader's time in the boot {}, in which no module has run: {seen:?}",
                        time.as_secs_f64(),
                        seen.boot_id
                    ));
                }
                now.insert(key, time);
            }
            exposed = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(json: serde_json::Value) -> Seen {
        Seen::read(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn a_node_with_labels_and_the_condition_takes_wasm_unless_it_is_fenced() {
        let node = |taints: serde_json::Value| {
            seen(serde_json::json!({
                "metadata": {"name": "a", "labels": {"kwasm.sh/crun": "ready", "kwasm.sh/kwasm-provisioned": "a"}},
                "spec": {"taints": taints},
                "status": {"conditions": [{"type": "WasmRuntimeReady", "status": "True", "reason": "Provisioned"}]},
            }))
        };
        assert!(node(serde_json::json!([])).takes_wasm());
        let fence = serde_json::json!([{"key": "kwasm.sh/repairing", "effect": "NoSchedule"}]);
        assert!(!node(fence).takes_wasm());
    }

    #[test]
    fn a_plain_node_is_untouched() {
        let plain = seen(serde_json::json!({
            "metadata": {"name": "a", "labels": {"kwasm.sh/agent": "summoned"}},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }));
        assert!(plain.is_untouched() && plain.summoned && plain.ready);
    }
}
