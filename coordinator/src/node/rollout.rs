//! Which nodes may have their containerd restarted now.

use std::str::FromStr;

use jiff::{SignedDuration, Timestamp};

use super::facts::NodeFacts;
use super::window::Window;

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

/// By what rules restarts are rationed.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Nodes that may be down by us at once.
    pub max_unavailable: MaxUnavailable,
    /// From the end of a restart to the next one.
    pub pause_between: SignedDuration,
    /// Hours in which nodes may restart; `None` is at any time.
    pub window: Option<Window>,
    /// After a run of failures nodes that are in service are left alone.
    pub halted: bool,
}

/// How many nodes may be down at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxUnavailable {
    /// So many.
    Nodes(usize),
    /// So many of a hundred, rounded up as a DaemonSet rounds them.
    Percent(usize),
}

impl MaxUnavailable {
    /// The number among `nodes`.
    pub fn of(self, nodes: usize) -> usize {
        match self {
            Self::Nodes(n) => n,
            Self::Percent(p) => (nodes * p).div_ceil(100).max(1),
        }
    }
}

impl FromStr for MaxUnavailable {
    type Err = String;

    /// Reads `3` or `10%`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is neither a number of nodes from 1 on nor a percentage such as 10%");
        let parsed = match text.strip_suffix('%') {
            Some(percent) => Self::Percent(percent.parse().map_err(|_| wrong())?),
            None => Self::Nodes(text.parse().map_err(|_| wrong())?),
        };
        match parsed {
            Self::Nodes(0) | Self::Percent(0) | Self::Percent(101..) => Err(wrong()),
            _ => Ok(parsed),
        }
    }
}

/// Who may restart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Admission<'a> {
    /// Nodes that may restart now.
    pub nodes: Vec<&'a str>,
    /// When others may, if time alone lets them.
    pub look_again: Option<Timestamp>,
}

/// Names the nodes that may restart now, so that never more than the budget allows are down by us: in name order,
/// control-plane nodes last and one at a time. A node that has not been in service yet waits for nobody.
pub fn admit<'a>(nodes: &[Budget<'a>], policy: &Policy, now: Timestamp) -> Admission<'a> {
    let mut asking: Vec<&NodeFacts> = nodes
        .iter()
        .filter(|b| b.asks && !b.granted && b.node.marks.restart.is_none())
        .map(|b| b.node)
        .collect();
    asking.sort_by_key(|node| (node.control_plane, node.name.as_str()));
    let (new, old): (Vec<_>, Vec<_>) = asking.into_iter().partition(|node| is_new(node));
    let mut admission = Admission {
        nodes: new.into_iter().map(|node| node.name.as_str()).collect(),
        look_again: None,
    };
    if policy.halted || old.is_empty() {
        return admission;
    }
    let rested = nodes
        .iter()
        .filter(|b| !is_new(b.node))
        .filter_map(|b| Some(b.restarted_at? + policy.pause_between))
        .max();
    let opens = policy.window.as_ref().map(|window| window.next(now));
    if let Some(at) = rested.into_iter().chain(opens).filter(|at| *at > now).max() {
        admission.look_again = Some(at);
        return admission;
    }
    admission.nodes.extend(within_budget(nodes, &old, policy, now));
    admission
}

fn is_new(node: &NodeFacts) -> bool {
    node.marks.gate && !node.control_plane
}

fn within_budget<'a>(
    nodes: &[Budget<'a>],
    asking: &[&'a NodeFacts],
    policy: &Policy,
    now: Timestamp,
) -> Vec<&'a str> {
    let down = |b: &&Budget| {
        let blamed = !b.node.ready && b.restarted_at.is_some_and(|at| now.duration_since(at) < BLAME);
        !is_new(b.node) && (b.node.marks.restart.is_some() || b.granted || blamed)
    };
    let most = policy.max_unavailable.of(nodes.len());
    let mut used = nodes.iter().filter(down).count();
    let mut control_plane_busy = nodes.iter().filter(down).any(|b| b.node.control_plane);
    let workers_ask = asking.iter().any(|node| !node.control_plane);
    let mut admitted = Vec::new();
    for node in asking {
        if used >= most {
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

    fn policy(most: usize) -> Policy {
        Policy {
            max_unavailable: MaxUnavailable::Nodes(most),
            pause_between: SignedDuration::ZERO,
            window: None,
            halted: false,
        }
    }

    fn names<'a>(nodes: &[Budget<'a>], most: usize, now: Timestamp) -> Vec<&'a str> {
        admit(nodes, &policy(most), now).nodes
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn nodes_restart_in_name_order_within_the_budget() {
        let (a, b, c) = (node("a"), node("b"), node("c"));
        let all = [asking(&c), asking(&a), asking(&b)];
        assert_eq!(names(&all, 1, at(0)), ["a"]);
        assert_eq!(names(&all, 2, at(0)), ["a", "b"]);
    }

    #[test]
    fn a_restart_in_flight_uses_up_the_budget() {
        let (mut a, b) = (node("a"), node("b"));
        a.marks.restart = Some(Restart {
            kind: RestartKind::Install,
            id: "1".into(),
        });
        assert!(names(&[asking(&a), asking(&b)], 1, at(0)).is_empty());
        assert_eq!(names(&[asking(&a), asking(&b)], 2, at(0)), ["b"]);
    }

    #[test]
    fn a_turn_counts_before_the_node_carries_its_mark() {
        let (a, b) = (node("a"), node("b"));
        let granted = Budget {
            granted: true,
            ..asking(&a)
        };
        assert!(names(&[granted, asking(&b)], 1, at(0)).is_empty());
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
        assert!(names(&[blamed, asking(&b)], 1, at(299)).is_empty());
        assert_eq!(names(&[blamed, asking(&b)], 1, at(300)), ["b"]);
    }

    #[test]
    fn control_plane_nodes_come_last_and_alone() {
        let (mut a, mut b, c) = (node("a"), node("b"), node("c"));
        a.control_plane = true;
        b.control_plane = true;
        assert_eq!(names(&[asking(&a), asking(&b), asking(&c)], 3, at(0)), ["c"]);
        assert_eq!(names(&[asking(&a), asking(&b)], 3, at(0)), ["a"]);
    }

    #[test]
    fn a_percentage_is_rounded_up_and_never_nought() {
        let most = |text: &str, nodes| text.parse::<MaxUnavailable>().expect("one").of(nodes);
        assert_eq!(most("10%", 25), 3);
        assert_eq!(most("1%", 3), 1);
        assert_eq!(most("4", 3), 4);
        for wrong in ["0", "0%", "101%", "-1", "many", "5 %", ""] {
            assert!(wrong.parse::<MaxUnavailable>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_node_that_was_not_in_service_yet_waits_for_nobody() {
        let (mut a, b, mut c) = (node("a"), node("b"), node("c"));
        a.marks.gate = true;
        c.marks.gate = true;
        let all = [asking(&a), asking(&b), asking(&c)];
        assert_eq!(names(&all, 1, at(0)), ["a", "c", "b"]);
        let halted = Policy {
            halted: true,
            ..policy(1)
        };
        assert_eq!(admit(&all, &halted, at(0)).nodes, ["a", "c"]);
    }

    #[test]
    fn between_restarts_there_is_the_pause_that_was_asked_for() {
        let (a, b) = (node("a"), node("b"));
        let ended = Budget {
            asks: false,
            restarted_at: Some(at(100)),
            ..asking(&a)
        };
        let rule = Policy {
            pause_between: SignedDuration::from_secs(30),
            ..policy(5)
        };
        let waiting = admit(&[ended, asking(&b)], &rule, at(110));
        assert!(waiting.nodes.is_empty());
        assert_eq!(waiting.look_again, Some(at(130)));
        assert_eq!(admit(&[ended, asking(&b)], &rule, at(130)).nodes, ["b"]);
    }

    #[test]
    fn outside_its_window_nothing_restarts_and_it_is_known_when_it_may() {
        let a = node("a");
        let rule = Policy {
            window: Some("02:00-03:00".parse().expect("a window")),
            ..policy(1)
        };
        let before = admit(&[asking(&a)], &rule, at(3600));
        assert!(before.nodes.is_empty());
        assert_eq!(before.look_again, Some(at(7200)));
        assert_eq!(admit(&[asking(&a)], &rule, at(7200)).nodes, ["a"]);
    }
}
