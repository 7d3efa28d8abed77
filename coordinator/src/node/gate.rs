//! The gate of a new node: when pods may come to it.

use jiff::{SignedDuration, Timestamp};

use super::facts::NodeFacts;

/// What the gate of a node rests on.
#[derive(Debug, Clone, Copy)]
pub struct GateInput<'a> {
    /// The node.
    pub node: &'a NodeFacts,
    /// It is to be able to run Wasm pods, and can be.
    pub wanted: bool,
    /// All images of the Prefetches that gate it are there.
    pub images_there: bool,
    /// How long pods are kept away at most.
    pub deadline: SignedDuration,
    /// The time.
    pub now: Timestamp,
}

/// What should happen to the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateStep {
    /// The node has none.
    None,
    /// It stays until then at most.
    Closed(Timestamp),
    /// All is there.
    Open,
    /// Not all is there, and its time is over: a node that takes no pods for ever helps nobody.
    OpenLate,
}

/// Decides about the gate of a node.
pub fn gate(input: GateInput<'_>) -> GateStep {
    let node = input.node;
    if !node.marks.gate {
        return GateStep::None;
    }
    if (!input.wanted || node.is_verified()) && input.images_there {
        return GateStep::Open;
    }
    let until = node.created.unwrap_or(input.now) + input.deadline;
    if until <= input.now {
        GateStep::OpenLate
    } else {
        GateStep::Closed(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn new_node() -> NodeFacts {
        let mut node = NodeFacts {
            created: Some(at(100)),
            boot_id: "boot".into(),
            machine_id: "machine".into(),
            ..NodeFacts::default()
        };
        node.marks.gate = true;
        node
    }

    fn step(node: &NodeFacts, wanted: bool, images_there: bool, second: i64) -> GateStep {
        gate(GateInput {
            node,
            wanted,
            images_there,
            deadline: SignedDuration::from_mins(10),
            now: at(second),
        })
    }

    #[test]
    fn a_node_without_the_taint_has_no_gate() {
        assert_eq!(step(&NodeFacts::default(), true, false, 0), GateStep::None);
    }

    #[test]
    fn it_opens_when_a_module_has_run_and_the_images_are_there() {
        let mut node = new_node();
        assert_eq!(step(&node, true, true, 110), GateStep::Closed(at(700)));
        node.marks.verified_boot = Some("boot".into());
        node.marks.verified_machine = Some("machine".into());
        node.marks.set_condition(true, "Provisioned", "", at(120));
        assert_eq!(step(&node, true, false, 130), GateStep::Closed(at(700)));
        assert_eq!(step(&node, true, true, 130), GateStep::Open);
    }

    #[test]
    fn on_a_node_that_nobody_wants_provisioned_it_waits_for_images_alone() {
        assert_eq!(step(&new_node(), false, true, 110), GateStep::Open);
        assert_eq!(step(&new_node(), false, false, 110), GateStep::Closed(at(700)));
    }

    #[test]
    fn after_its_deadline_it_opens_whatever_is_missing() {
        assert_eq!(step(&new_node(), true, false, 699), GateStep::Closed(at(700)));
        assert_eq!(step(&new_node(), true, false, 700), GateStep::OpenLate);
    }
}
