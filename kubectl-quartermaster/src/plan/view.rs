//! How plans are shown to a person.

use super::facts::{Group, Host, NodePlan, Outcome};
use crate::look::{Look, Tone, counted, named};

/// Names of a group that are shown.
const NAMED: usize = 12;

/// The plan of one node.
pub(super) fn one(plan: &NodePlan, look: Look) -> String {
    let host = plan.host.as_ref();
    let mut text = look.strong(&plan.node);
    if let Some(words) = host.map(Host::words).filter(|words| !words.is_empty()) {
        text += &look.paint(Tone::Dim, &format!("  {words}"));
    }
    text.push('\n');
    let mut row = |name: &str, value: &str| {
        text += &format!("  {} {value}\n", look.paint(Tone::Dim, &format!("{name:<9}")));
    };
    if let Some(host) = host.filter(|_| matches!(plan.outcome, Outcome::Change { .. })) {
        row("reads", &host.config);
        row("restarts", &restarts(host));
    }
    if let Some(version) = host.and_then(|host| host.installed.as_deref()) {
        row("installed", version);
    }
    text + &outcome(&plan.outcome, look)
}

/// All nodes, by what would become of them.
pub(super) fn all(groups: &[Group], wide: bool, look: Look) -> String {
    let most = if wide { usize::MAX } else { NAMED };
    let texts = groups.iter().map(|group| {
        let (tone, what) = match &group.outcome {
            Outcome::Change { .. } => (Tone::Busy, "would be changed"),
            Outcome::Nothing => (Tone::Good, "as it should be"),
            Outcome::Refused { .. } => (Tone::Bad, "would be refused"),
            Outcome::NoAnswer { .. } => (Tone::Bad, "without an answer"),
        };
        let head = format!("{} {what}", counted(group.nodes.len(), "node"));
        let mut text = look.paint(tone, &look.strong(&head)) + "\n";
        text += &look.wrapped(&named(&group.nodes, most), 2);
        if !group.hosts.is_empty() {
            text += &look.paint(Tone::Dim, &look.wrapped(&named(&group.hosts, 6), 2));
        }
        if group.outcome != Outcome::Nothing {
            text += &outcome(&group.outcome, look);
        }
        text
    });
    texts.collect::<Vec<_>>().join("\n")
}

fn outcome(outcome: &Outcome, look: Look) -> String {
    match outcome {
        Outcome::Change { diff } => format!("\n{}", look.diff(diff)),
        Outcome::Nothing => look.paint(Tone::Good, "  Nothing would change.") + "\n",
        Outcome::Refused {
            reason,
            message,
            remedy,
        } => {
            let mut text = format!("  {}\n", look.paint(Tone::Bad, reason));
            text += &look.wrapped(message, 2);
            if !remedy.is_empty() {
                text += &look.wrapped(remedy, 2);
            }
            text
        }
        Outcome::NoAnswer { why } => look.wrapped(why, 2),
    }
}

fn restarts(host: &Host) -> String {
    match &host.unit {
        None => "nothing: the distribution takes the file in by itself".to_owned(),
        Some(unit) if host.restarts_control_plane => {
            format!("{unit}, and with it this node's control plane")
        }
        Some(unit) => format!("{unit}; running containers live on"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host {
            os: "Debian 13".into(),
            containerd: "2.1.9".into(),
            config: "/etc/containerd/config.toml".into(),
            installed: None,
            unit: Some("containerd.service".into()),
            restarts_control_plane: false,
        }
    }

    #[test]
    fn the_plan_of_a_node_says_what_is_edited_and_what_restarts() {
        let plan = NodePlan {
            node: "worker-1".into(),
            outcome: Outcome::Change {
                diff: "--- a\n+++ b\n@@ -1 +1,2 @@\n x\n+y\n".into(),
            },
            host: Some(host()),
        };
        assert_eq!(
            one(&plan, Look::plain(None)),
            "worker-1  Debian 13, containerd 2.1.9\n\
             \u{20} reads     /etc/containerd/config.toml\n\
             \u{20} restarts  containerd.service; running containers live on\n\
             \n\
             --- a\n+++ b\n@@ -1 +1,2 @@\n x\n+y\n"
        );
    }

    #[test]
    fn a_node_that_has_it_and_one_that_would_be_refused_say_so() {
        let mut plan = NodePlan {
            node: "worker-1".into(),
            outcome: Outcome::Nothing,
            host: Some(Host {
                installed: Some("0.1.0".into()),
                ..host()
            }),
        };
        assert_eq!(
            one(&plan, Look::plain(None)),
            "worker-1  Debian 13, containerd 2.1.9\n  installed 0.1.0\n  Nothing would change.\n"
        );
        plan.outcome = Outcome::Refused {
            reason: "HandlerConflict".into(),
            message: "somebody else has a handler crun".into(),
            remedy: "Remove it.".into(),
        };
        plan.host = None;
        assert_eq!(
            one(&plan, Look::plain(None)),
            "worker-1\n  HandlerConflict\n  somebody else has a handler crun\n  Remove it.\n"
        );
    }

    #[test]
    fn groups_name_their_nodes_and_show_one_diff() {
        let groups = [
            Group {
                outcome: Outcome::Change { diff: "+y\n".into() },
                nodes: vec!["a".into(), "b".into()],
                hosts: vec!["Debian 13, containerd 2.1.9".into()],
            },
            Group {
                outcome: Outcome::Nothing,
                nodes: vec!["c".into()],
                hosts: Vec::new(),
            },
        ];
        assert_eq!(
            all(&groups, false, Look::plain(None)),
            "2 nodes would be changed\n  a, b\n  Debian 13, containerd 2.1.9\n\n+y\n\n1 node as it should be\n  c\n"
        );
    }
}
