//! Which nodes may have their containerd restarted now.

use jiff::{SignedDuration, Timestamp};

use super::facts::NodeFacts;

/// How long a node that went NotReady after a restart of ours is held against the budget.
const BLAME: SignedDuration = SignedDuration::from_mins(5);

/// A node as the rollout sees it.
#[derive(Debug, Clone, Copy)]
pub struct Budget<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// It has come so far that only its restart is left to do.
    pub asks: bool,
    /// It was given its turn a moment ago, and the Node does not carry the mark of it yet.
    pub granted: bool,
    /// When a restart that we ordered there ended.
    pub restarted_at: Option<Timestamp>,
}

/// Names the nodes that may restart now, so that never more than `max_unavailable` are down by us:
/// in name order, control-plane nodes last and one at a time.
pub fn admit<'a>(nodes: &[Budget<'a>], max_unavailable: usize, now: Timestamp) -> Vec<&'a str> {
    let down = |b: &&Budget| {
        let blamed = !b.node.ready && b.restarted_at.is_some_and(|at| now.duration_since(at) < BLAME);
        b.node.marks.restart.is_some() || b.granted || blamed
    };
    let mut used = nodes.iter().filter(down).count();
    let control_plane_down = nodes.iter().filter(down).any(|b| b.node.control_plane);

    let mut asking: Vec<&NodeFacts> = nodes
        .iter()
        .filter(|b| b.asks && !b.granted && b.node.marks.restart.is_none())
        .map(|b| b.node)
        .collect();
    asking.sort_by_key(|node| (node.control_plane, node.name.as_str()));
    let workers_ask = asking.iter().any(|node| !node.control_plane);

    let mut admitted = Vec::new();
    let mut control_plane_busy = control_plane_down;
    for node in asking {
        if used >= max_unavailable {
            break;
        }
        if node.control_plane {
            if control_plane_busy || workers_ask || used > 0 {
                continue;
            }
            control_plane_busy = true;
        }
        used += 1;
        admitted.push(node.name.as_str());
    }
    admitted
}

#[cfg(test)]
mod tests {
    use super::super::marks::{Restart, RestartKind};
    use super::*;

    fn node(name: &str) -> NodeFacts {
        NodeFacts {
            name: name.into(),
            ready: true,
            ..NodeFacts::default()
        }
    }

    fn asking(node: &NodeFacts) -> Budget<'_> {
        Budget {
            node,
            asks: true,
            granted: false,
            restarted_at: None,
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn nodes_restart_in_name_order_within_the_budget() {
        let (a, b, c) = (node("a"), node("b"), node("c"));
        let all = [asking(&c), asking(&a), asking(&b)];
        assert_eq!(admit(&all, 1, at(0)), ["a"]);
        assert_eq!(admit(&all, 2, at(0)), ["a", "b"]);
    }

    #[test]
    fn a_restart_in_flight_uses_up_the_budget() {
        let (mut a, b) = (node("a"), node("b"));
        a.marks.restart = Some(Restart {
            kind: RestartKind::Install,
            id: "1".into(),
        });
        assert!(admit(&[asking(&a), asking(&b)], 1, at(0)).is_empty());
        assert_eq!(admit(&[asking(&a), asking(&b)], 2, at(0)), ["b"]);
    }

    #[test]
    fn a_turn_counts_before_the_node_carries_its_mark() {
        let (a, b) = (node("a"), node("b"));
        let granted = Budget {
            granted: true,
            ..asking(&a)
        };
        assert!(admit(&[granted, asking(&b)], 1, at(0)).is_empty());
    }

    #[test]
    fn a_node_that_went_down_after_our_restart_is_held_against_us_for_five_minutes() {
        let (mut a, b) = (node("a"), node("b"));
        a.ready = false;
        let blamed = Budget {
            node: &a,
            asks: false,
            granted: false,
            restarted_at: Some(at(0)),
        };
        assert!(admit(&[blamed, asking(&b)], 1, at(299)).is_empty());
        assert_eq!(admit(&[blamed, asking(&b)], 1, at(300)), ["b"]);
    }

    #[test]
    fn control_plane_nodes_come_last_and_alone() {
        let (mut a, mut b, c) = (node("a"), node("b"), node("c"));
        a.control_plane = true;
        b.control_plane = true;
        assert_eq!(admit(&[asking(&a), asking(&b), asking(&c)], 3, at(0)), ["c"]);
        assert_eq!(admit(&[asking(&a), asking(&b)], 3, at(0)), ["a"]);
    }
}
