//! The agents' pods, and the ways to them.

use std::net::SocketAddr;

use jiff::Timestamp;
use quartermaster_proto::COMMAND_PORT;
use tonic::transport::Channel;
use tracing::debug;

use super::Engine;
use super::feeds::AgentPod;
use super::input::Change;
use crate::identity::Arrival;

impl Engine {
    pub(super) fn agent_changed(&mut self, change: Change<String, AgentPod>) {
        match change {
            Change::Set(name, pod) => {
                if pod.node.is_empty() {
                    return;
                }
                let node = pod.node.clone();
                let runtime = self.runtime.entry(node.clone()).or_default();
                let this = (name, pod.uid.clone());
                let current = runtime.agent.pod.as_ref() == Some(&this);
                if pod.ending {
                    if current {
                        runtime.agent.replace_pod(None);
                    }
                } else {
                    if !current {
                        runtime.agent.replace_pod(Some(this));
                    }
                    runtime.agent.trouble = pod.trouble;
                    if let Some(ip) = pod.ip {
                        runtime.agent.address = Some(SocketAddr::new(ip, COMMAND_PORT));
                    }
                }
                self.dirty_nodes.insert(node);
            }
            Change::Gone(name) => {
                let node = self.runtime.iter().find_map(|(node, runtime)| {
                    let pod = runtime.agent.pod.as_ref()?;
                    (pod.0 == name).then(|| node.clone())
                });
                if let Some(node) = node {
                    self.runtime
                        .entry(node.clone())
                        .or_default()
                        .agent
                        .replace_pod(None);
                    self.dirty_nodes.insert(node);
                }
            }
            Change::Reset(all) => {
                self.synced.agents = true;
                let gone: Vec<String> = self
                    .runtime
                    .values()
                    .filter_map(|runtime| runtime.agent.pod.as_ref().map(|(name, _)| name.clone()))
                    .filter(|name| !all.contains_key(name))
                    .collect();
                for name in gone {
                    self.agent_changed(Change::Gone(name));
                }
                for (name, pod) in all {
                    self.agent_changed(Change::Set(name, pod));
                }
            }
        }
    }

    /// An agent has just enrolled and is about to take commands.
    pub(super) fn arrived(&mut self, arrival: Arrival) {
        let runtime = self.runtime.entry(arrival.node.clone()).or_default();
        let known = runtime
            .agent
            .pod
            .as_ref()
            .is_some_and(|(_, uid)| *uid == arrival.pod_uid);
        if !known {
            // The watch of pods has not told of it yet, and will bring its name.
            runtime.agent.replace_pod(Some((String::new(), arrival.pod_uid)));
        }
        runtime.agent.address = Some(arrival.address);
        runtime.agent.pause = None;
        runtime.agent.not_before = None;
        self.dirty_nodes.insert(arrival.node);
    }

    pub(super) fn linked(&mut self, name: &str, pod_uid: &str, result: Result<Channel, String>) {
        let Some(runtime) = self.runtime.get_mut(name) else {
            return;
        };
        let of_this_pod = runtime.agent.pod.as_ref().is_some_and(|(_, uid)| uid == pod_uid);
        if !of_this_pod {
            return;
        }
        runtime.agent.dialling = false;
        match result {
            Ok(channel) => {
                debug!(node = name, "the agent is reached");
                runtime.agent.channel = Some(channel);
                runtime.agent.pause = None;
                runtime.agent.not_before = None;
            }
            Err(error) => {
                debug!(node = name, error, "the agent is not reached yet");
                runtime.agent.failed(Timestamp::now());
            }
        }
        self.dirty_nodes.insert(name.to_owned());
    }
}
