//! What agents say that provisioning would change, and nodes put together that say the same.

use quartermaster_proto::v1::{InstallState, PreviewResponse};
use serde::Serialize;

use crate::trouble::Trouble;

/// What would become of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome")]
pub(crate) enum Outcome {
    /// Its configuration would be changed.
    Change {
        /// Unified diff of the file.
        diff: String,
    },
    /// It is as it should be.
    Nothing,
    /// It can't be served.
    #[serde(rename_all = "camelCase")]
    Refused {
        /// One word.
        reason: String,
        message: String,
        /// What can be done about it.
        remedy: String,
    },
    /// Nobody answered for it.
    NoAnswer { why: String },
}

/// A node as its agent sees it, and what would become of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodePlan {
    pub node: String,
    #[serde(flatten)]
    pub outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
}

/// What an agent sees of its node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Host {
    pub os: String,
    pub containerd: String,
    /// The configuration that the running containerd reads.
    pub config: String,
    /// What is installed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub installed: Option<String>,
    /// The unit that would be restarted; none where the distribution restarts containerd by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    pub restarts_control_plane: bool,
}

/// Nodes of which the same would become.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Group {
    #[serde(flatten)]
    pub outcome: Outcome,
    pub nodes: Vec<String>,
    /// Each kind of host once, in words.
    pub hosts: Vec<String>,
}

impl NodePlan {
    /// Reads an agent's answer.
    pub(crate) fn read(node: &str, answer: Result<PreviewResponse, Trouble>) -> Self {
        let node = node.to_owned();
        let preview = match answer {
            Ok(preview) => preview,
            Err(trouble) => {
                return Self {
                    node,
                    outcome: Outcome::NoAnswer {
                        why: trouble.to_string(),
                    },
                    host: None,
                };
            }
        };
        let outcome = match preview.refusal {
            Some(refusal) => Outcome::Refused {
                reason: refusal.reason().camel_case(),
                message: refusal.message,
                remedy: refusal.remedy,
            },
            None if preview.diff.is_empty() => Outcome::Nothing,
            None => Outcome::Change { diff: preview.diff },
        };
        let host = preview.node.map(|seen| Host {
            installed: (seen.state() == InstallState::Installed).then_some(seen.payload_version),
            os: seen.os,
            containerd: seen.containerd_version,
            config: seen.config_path,
            unit: Some(seen.restarted_unit).filter(|unit| !unit.is_empty()),
            restarts_control_plane: seen.restarts_control_plane,
        });
        Self { node, outcome, host }
    }

    /// Whether it is or would be refused, or nobody answered.
    pub(crate) fn is_no(&self) -> bool {
        matches!(self.outcome, Outcome::Refused { .. } | Outcome::NoAnswer { .. })
    }
}

impl Host {
    /// In words: the system, containerd and its file.
    pub(crate) fn words(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        if !self.os.is_empty() {
            words.push(self.os.clone());
        }
        if !self.containerd.is_empty() {
            words.push(format!("containerd {}", self.containerd));
        }
        words.join(", ")
    }
}

/// Puts nodes together of which the same would become: changes first, then what is refused, what does not answer, and
/// what stays; the largest groups first.
pub(crate) fn grouped(plans: &[NodePlan]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for plan in plans {
        let place = match groups.iter().position(|group| group.outcome == plan.outcome) {
            Some(place) => place,
            None => {
                groups.push(Group {
                    outcome: plan.outcome.clone(),
                    nodes: Vec::new(),
                    hosts: Vec::new(),
                });
                groups.len() - 1
            }
        };
        let group = &mut groups[place];
        group.nodes.push(plan.node.clone());
        let host = plan.host.as_ref().map(Host::words).unwrap_or_default();
        if !host.is_empty() && !group.hosts.contains(&host) {
            group.hosts.push(host);
        }
    }
    let rank = |outcome: &Outcome| match outcome {
        Outcome::Change { .. } => 0,
        Outcome::Refused { .. } => 1,
        Outcome::NoAnswer { .. } => 2,
        Outcome::Nothing => 3,
    };
    groups.sort_by_key(|group| (rank(&group.outcome), std::cmp::Reverse(group.nodes.len())));
    groups
}

#[cfg(test)]
mod tests {
    use quartermaster_proto::v1::{Failure, FailureReason, NodeDescription};

    use super::*;

    fn answer(diff: &str, containerd: &str) -> Result<PreviewResponse, Trouble> {
        Ok(PreviewResponse {
            diff: diff.into(),
            refusal: None,
            node: Some(NodeDescription {
                os: "Debian 13".into(),
                containerd_version: containerd.into(),
                ..NodeDescription::default()
            }),
        })
    }

    #[test]
    fn nodes_are_grouped_by_what_would_become_of_them() {
        let refused = Ok(PreviewResponse {
            refusal: Some(Failure {
                reason: FailureReason::UnsupportedHost.into(),
                message: "it is Talos".into(),
                ..Failure::default()
            }),
            ..PreviewResponse::default()
        });
        let plans = [
            NodePlan::read("a", answer("", "2.1.9")),
            NodePlan::read("b", answer("+x", "1.7.24")),
            NodePlan::read("c", refused),
            NodePlan::read("d", answer("+y", "2.1.9")),
            NodePlan::read("e", answer("+y", "2.4.2")),
            NodePlan::read("f", Err(Trouble::Refused("no agent has answered in time".into()))),
        ];
        let groups = grouped(&plans);
        let told: Vec<(String, &[String])> = groups
            .iter()
            .map(|group| {
                let kind = match &group.outcome {
                    Outcome::Change { diff } => diff.clone(),
                    Outcome::Nothing => "nothing".into(),
                    Outcome::Refused { reason, .. } => reason.clone(),
                    Outcome::NoAnswer { why } => why.clone(),
                };
                (kind, group.nodes.as_slice())
            })
            .collect();
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(
            told,
            [
                ("+y".to_owned(), names("d e").as_slice()),
                ("+x".to_owned(), names("b").as_slice()),
                ("UnsupportedHost".to_owned(), names("c").as_slice()),
                ("no agent has answered in time".to_owned(), names("f").as_slice()),
                ("nothing".to_owned(), names("a").as_slice()),
            ]
        );
        assert_eq!(
            groups[0].hosts,
            ["Debian 13, containerd 2.1.9", "Debian 13, containerd 2.4.2"]
        );
    }
}
