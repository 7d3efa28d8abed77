//! What the engine answers to people: the operator's interface asks, and the engine says what it knows.

use quartermaster_proto::v1::{self, watch_event};
use tokio::sync::oneshot;

use super::Engine;
use crate::node::wants_provisioning;

/// A question to the leader's engine.
#[derive(Debug)]
pub(crate) enum Question {
    /// All nodes and Prefetches.
    Status(oneshot::Sender<v1::StatusResponse>),
    /// The way to the agent of a node, once there is one: it is summoned for this.
    Agent {
        node: String,
        answer: oneshot::Sender<Result<tonic::transport::Channel, String>>,
    },
}

impl Engine {
    pub(super) fn asked(&mut self, question: Question) {
        match question {
            Question::Status(answer) => {
                let _ = answer.send(self.status_of_all());
            }
            Question::Agent { node, answer } => {
                if !self.nodes.contains_key(&node) {
                    let _ = answer.send(Err(format!("there is no node {node}")));
                    return;
                }
                self.guests.entry(node.clone()).or_default().push(answer);
                self.dirty_nodes.insert(node);
            }
        }
    }

    /// Whether somebody waits for the agent of a node; those who gave up do not count.
    pub(super) fn has_guests(&mut self, name: &str) -> bool {
        let Some(waiting) = self.guests.get_mut(name) else {
            return false;
        };
        waiting.retain(|answer| !answer.is_closed());
        if waiting.is_empty() {
            self.guests.remove(name);
            return false;
        }
        let Some(channel) = self.channel(name) else {
            return true;
        };
        for answer in self.guests.remove(name).into_iter().flatten() {
            let _ = answer.send(Ok(channel.clone()));
        }
        false
    }

    /// Tells those who watch.
    pub(super) fn tell_watchers(&self, node: &str, event: watch_event::Event) {
        if self.setup.watchers.receiver_count() == 0 {
            return;
        }
        let now = jiff::Timestamp::now();
        let _ = self.setup.watchers.send(v1::WatchEvent {
            at: Some(prost_types::Timestamp {
                seconds: now.as_second(),
                nanos: now.subsec_nanosecond(),
            }),
            node: node.to_owned(),
            event: Some(event),
        });
    }

    fn status_of_all(&self) -> v1::StatusResponse {
        v1::StatusResponse {
            control: Some(v1::Control {
                paused: self.control.paused,
                halted: self.control.halted.clone().unwrap_or_default(),
                removing: self.control.removing,
            }),
            nodes: self.nodes.keys().map(|name| self.status_of_node(name)).collect(),
            prefetches: self.prefetches.values().map(summary).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leader: self.setup.reporter.clone(),
            synced: self.is_synced(),
            auto_provision: self.setup.auto_provision,
        }
    }

    fn status_of_node(&self, name: &str) -> v1::NodeStatus {
        let Some(node) = self.nodes.get(name) else {
            return v1::NodeStatus::default();
        };
        let runtime = self.runtime.get(name);
        let condition = node.marks.condition.as_ref();
        let work = match runtime {
            Some(runtime) if runtime.pulling => "Pull".to_owned(),
            Some(runtime) => runtime
                .working
                .map(|work| work.word().to_owned())
                .unwrap_or_default(),
            None => String::new(),
        };
        let intent = node.intent.as_deref();
        v1::NodeStatus {
            name: name.to_owned(),
            wanted: !self.control.removing && wants_provisioning(intent, self.setup.auto_provision),
            condition: condition
                .map(|c| if c.status { "True" } else { "False" }.to_owned())
                .unwrap_or_default(),
            reason: condition.map(|c| c.reason.clone()).unwrap_or_default(),
            message: condition.map(|c| c.message.clone()).unwrap_or_default(),
            summoned: node.marks.agent.is_some(),
            agent_ready: runtime.is_some_and(|runtime| runtime.agent.channel.is_some()),
            work,
            waits: self.asking.contains(name),
            fenced: node.marks.fence,
            gated: node.marks.gate,
            ready: node.ready,
            runtime: node.runtime.clone(),
            images_settled: runtime.is_some_and(|runtime| runtime.settled),
        }
    }
}

fn summary(prefetch: &crate::prefetch::PrefetchFacts) -> v1::PrefetchSummary {
    let status = &prefetch.status;
    v1::PrefetchSummary {
        namespace: prefetch.namespace.clone(),
        name: prefetch.name.clone(),
        phase: status
            .phase
            .map(|phase| format!("{phase:?}").to_uppercase())
            .unwrap_or_default(),
        images: status.images_wanted,
        nodes: status.nodes.wanted,
        pairs: status.pairs.wanted,
        ready: status.pairs.ready,
        failed: status.pairs.failed,
        pulling: status.pairs.pulling,
        message: status
            .conditions
            .first()
            .map(|condition| condition.message.clone())
            .unwrap_or_default(),
    }
}
