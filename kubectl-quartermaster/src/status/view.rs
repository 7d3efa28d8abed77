//! How the state of everything is shown to a person.

use super::facts::{Node, NodeState, Prefetch, Status};
use crate::look::{Look, Tone, counted};

/// Nodes that fit a glance; of more, those that nobody has to look at are counted and not listed.
const GLANCE: usize = 40;

/// The whole of it. `wide` has every column and every row.
pub(super) fn text(status: &Status, wide: bool, look: Look) -> String {
    let mut text = headline(status, look);
    text += &notices(status, look);
    text.push('\n');
    let many = !wide && status.nodes.len() > GLANCE;
    let shown: Vec<&Node> = status
        .nodes
        .iter()
        .filter(|node| !many || asks_for_attention(node))
        .collect();
    if !shown.is_empty() {
        text += &nodes(&shown, wide, look);
    }
    if many {
        let quiet = counted(status.nodes.len() - shown.len(), "node");
        let line = format!("{quiet} as they should be; `status -o wide` lists them too.\n");
        text += &look.paint(Tone::Dim, &line);
    }
    if !status.prefetches.is_empty() {
        text += &format!("\n{}", prefetches(&status.prefetches, look));
    }
    text
}

fn headline(status: &Status, look: Look) -> String {
    let count = |state| status.nodes.iter().filter(|node| node.state == state).count();
    let mut parts = vec![format!(
        "{} of {} Wasm",
        count(NodeState::Provisioned) + count(NodeState::RemovalBlocked),
        match status.nodes.len() {
            1 => "1 node runs".to_owned(),
            all => format!("{all} nodes run"),
        }
    )];
    let under_way = count(NodeState::Working) + count(NodeState::Waiting) + count(NodeState::Pending);
    if under_way > 0 {
        parts.push(look.paint(Tone::Busy, &format!("{under_way} under way")));
    }
    let failed = count(NodeState::Failed) + count(NodeState::NotReady);
    if failed > 0 {
        parts.push(look.paint(Tone::Bad, &format!("{failed} failed")));
    }
    if !status.prefetches.is_empty() {
        let ready = status.prefetches.iter().filter(|p| p.phase == "READY").count();
        parts.push(format!(
            "{ready} of {} ready",
            match status.prefetches.len() {
                1 => "1 Prefetch".to_owned(),
                all => format!("{all} Prefetches"),
            }
        ));
    }
    let provision = if status.auto_provision {
        ", provisions every node by itself"
    } else {
        ""
    };
    let who = format!(
        "Quartermaster {}, led by {}{provision}",
        status.version, status.leader
    );
    format!(
        "{}\n{}\n",
        look.strong(&parts.join(", ")),
        look.paint(Tone::Dim, &who)
    )
}

fn notices(status: &Status, look: Look) -> String {
    let mut notices = Vec::new();
    if !status.synced {
        notices.push((
            Tone::Busy,
            "The leader has just begun and is still reading the cluster: this may not be all.".to_owned(),
        ));
    }
    if status.paused {
        notices.push((
            Tone::Busy,
            "Paused: nothing is begun until `kubectl quartermaster resume`.".to_owned(),
        ));
    }
    if let Some(why) = &status.halted {
        notices.push((
            Tone::Bad,
            format!("Halted: {why}. `kubectl quartermaster resume` goes on."),
        ));
    }
    if status.removing {
        notices.push((
            Tone::Busy,
            "Everything is being removed: every node is put back, whatever annotations say.".to_owned(),
        ));
    }
    let texts = notices.iter().map(|(tone, text)| {
        let wrapped = look.wrapped(text, 0);
        look.paint(*tone, wrapped.trim_end()) + "\n"
    });
    texts.collect()
}

fn asks_for_attention(node: &Node) -> bool {
    !matches!(node.state, NodeState::Provisioned | NodeState::Off) || !node.work.is_empty() || node.gated
}

fn nodes(nodes: &[&Node], wide: bool, look: Look) -> String {
    let mut header = vec!["NODE", "WASM", "NOW"];
    if wide {
        header.extend(["AGENT", "TAINT", "IMAGES", "RUNTIME"]);
    }
    header.push("MESSAGE");
    let rows = nodes.iter().map(|node| {
        let (tone, word) = state(node);
        let mut row = vec![
            (Tone::Plain, node.name.clone()),
            (tone, word),
            (Tone::Busy, now(node)),
        ];
        if wide {
            let images = if node.images_settled { "there" } else { "-" };
            let agent = match node.agent {
                "None" => "-".to_owned(),
                other => other.to_lowercase(),
            };
            row.extend([
                (Tone::Plain, agent),
                (Tone::Plain, taint(node).to_owned()),
                (Tone::Plain, images.to_owned()),
                (Tone::Plain, node.runtime.replace("containerd://", "containerd ")),
            ]);
        }
        row.push((Tone::Plain, message(node)));
        row
    });
    look.table(&header, rows.collect())
}

fn state(node: &Node) -> (Tone, String) {
    match node.state {
        NodeState::Provisioned => (Tone::Good, "ready".to_owned()),
        NodeState::Off => (Tone::Dim, "-".to_owned()),
        NodeState::Failed => (Tone::Bad, node.reason.clone()),
        NodeState::NotReady => (Tone::Bad, "node not Ready".to_owned()),
        NodeState::RemovalBlocked => (Tone::Busy, "in use".to_owned()),
        NodeState::Working if node.fenced => (Tone::Busy, "repairing".to_owned()),
        NodeState::Working if node.wanted => (Tone::Busy, "coming".to_owned()),
        NodeState::Working => (Tone::Busy, "going".to_owned()),
        NodeState::Waiting => (Tone::Busy, "waits".to_owned()),
        NodeState::Pending => (Tone::Busy, "pending".to_owned()),
    }
}

fn now(node: &Node) -> String {
    match (node.work.as_str(), node.state) {
        ("", NodeState::Waiting) => "waits for its turn".to_owned(),
        ("", _) => String::new(),
        (work, _) => match work {
            "Prepare" => "prepares",
            "Install" => "installs",
            "Verify" => "verifies",
            "PrepareRemoval" => "prepares removal",
            "Remove" => "removes",
            "Pull" => "pulls images",
            other => other,
        }
        .to_owned(),
    }
}

fn taint(node: &Node) -> &'static str {
    match (node.gated, node.fenced) {
        (true, _) => "not-ready",
        (_, true) => "repairing",
        _ => "-",
    }
}

/// What is as it should be needs no words.
fn message(node: &Node) -> String {
    if node.state == NodeState::Provisioned || node.state == NodeState::Off {
        return String::new();
    }
    node.message.clone()
}

fn prefetches(prefetches: &[Prefetch], look: Look) -> String {
    let rows = prefetches.iter().map(|prefetch| {
        let tone = match prefetch.phase.as_str() {
            "READY" => Tone::Good,
            "FAILED" => Tone::Bad,
            "RUNNING" => Tone::Busy,
            _ => Tone::Dim,
        };
        let failed = if prefetch.failed > 0 { Tone::Bad } else { Tone::Dim };
        let message = if prefetch.phase == "READY" {
            String::new()
        } else {
            prefetch.message.clone()
        };
        vec![
            (Tone::Plain, format!("{}/{}", prefetch.namespace, prefetch.name)),
            (tone, prefetch.phase.clone()),
            (Tone::Plain, prefetch.images.to_string()),
            (Tone::Plain, prefetch.nodes.to_string()),
            (Tone::Plain, format!("{} of {}", prefetch.ready, prefetch.pairs)),
            (failed, prefetch.failed.to_string()),
            (Tone::Plain, message),
        ]
    });
    let header = [
        "PREFETCH", "PHASE", "IMAGES", "NODES", "THERE", "FAILED", "MESSAGE",
    ];
    look.table(&header, rows.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, state: NodeState, set: impl FnOnce(&mut Node)) -> Node {
        let mut node = Node {
            name: name.into(),
            state,
            wanted: state != NodeState::Off,
            ready: true,
            agent: "None",
            runtime: "containerd://2.1.9".into(),
            ..Node::default()
        };
        set(&mut node);
        node
    }

    fn status(nodes: Vec<Node>) -> Status {
        Status {
            leader: "quartermaster-coordinator-abc".into(),
            version: "0.1.0".into(),
            synced: true,
            nodes,
            ..Status::default()
        }
    }

    #[test]
    fn a_person_sees_what_is_where_and_what_is_wrong() {
        let mut status = status(vec![
            node("worker-1", NodeState::Provisioned, |n| {
                n.message = "a module ran".into()
            }),
            node("worker-2", NodeState::Working, |n| n.work = "Install".into()),
            node("worker-3", NodeState::Failed, |n| {
                n.reason = "UnsupportedHost".into();
                n.message = "the node runs CRI-O".into();
            }),
            node("worker-4", NodeState::Off, |_| {}),
        ]);
        status.paused = true;
        status.prefetches.push(Prefetch {
            namespace: "default".into(),
            name: "shop".into(),
            phase: "RUNNING".into(),
            images: 2,
            nodes: 3,
            pairs: 6,
            ready: 4,
            pulling: 2,
            ..Prefetch::default()
        });
        assert_eq!(
            text(&status, false, Look::plain(None)),
            "1 of 4 nodes run Wasm, 1 under way, 1 failed, 0 of 1 Prefetch ready\n\
             Quartermaster 0.1.0, led by quartermaster-coordinator-abc\n\
             Paused: nothing is begun until `kubectl quartermaster resume`.\n\
             \n\
             NODE       WASM              NOW        MESSAGE\n\
             worker-1   ready\n\
             worker-2   coming            installs\n\
             worker-3   UnsupportedHost              the node runs CRI-O\n\
             worker-4   -\n\
             \n\
             PREFETCH       PHASE     IMAGES   NODES   THERE    FAILED\n\
             default/shop   RUNNING   2        3       4 of 6   0\n"
        );
    }

    #[test]
    fn of_a_fleet_only_those_are_listed_who_ask_for_attention() {
        let mut nodes: Vec<Node> = (0..100)
            .map(|n| node(&format!("n-{n}"), NodeState::Provisioned, |_| {}))
            .collect();
        nodes.push(node("odd", NodeState::Failed, |n| n.reason = "SwapFailed".into()));
        let status = status(nodes);
        let glance = text(&status, false, Look::plain(None));
        assert!(glance.contains("odd    SwapFailed"), "{glance}");
        assert!(!glance.contains("n-7"), "{glance}");
        assert!(glance.contains("100 nodes as they should be; `status -o wide` lists them too."));
        assert!(text(&status, true, Look::plain(None)).contains("n-7"));
    }

    #[test]
    fn all_columns_are_there_when_asked_for() {
        let status = status(vec![node("worker-1", NodeState::Provisioned, |n| {
            n.agent = "Ready";
            n.fenced = true;
            n.images_settled = true;
        })]);
        let text = text(&status, true, Look::plain(None));
        assert_eq!(
            text.lines().skip(3).collect::<Vec<_>>(),
            [
                "NODE       WASM    AGENT   TAINT       IMAGES   RUNTIME",
                "worker-1   ready   ready   repairing   there    containerd 2.1.9",
            ]
        );
    }
}
