use quartermaster_proto::v1::Stage;

use super::super::conclusion::{Outcome, conclude};
use super::*;

const SPEC: &str = "spec-1";
const FRESH: Attempt = Attempt {
    prepared: None,
    retry: None,
};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

fn bare(intent: Option<&str>) -> NodeFacts {
    NodeFacts {
        name: "worker-1".into(),
        uid: "u".into(),
        intent: intent.map(Into::into),
        boot_id: "boot-1".into(),
        machine_id: "machine-1".into(),
        os: "linux".into(),
        runtime: "containerd://2.1.4".into(),
        ready: true,
        ..NodeFacts::default()
    }
}

fn done() -> Outcome {
    Outcome::Done {
        boot_id: "boot-1".into(),
        machine_id: "machine-1".into(),
    }
}

fn failed(reason: FailureReason) -> Outcome {
    Outcome::Failed {
        reason,
        message: "words".into(),
        stage: Stage::Rehearse,
        rolled_back: false,
    }
}

fn provisioned(intent: Option<&str>) -> NodeFacts {
    let mut node = bare(intent);
    node.marks = conclude(&node, Work::Install, &done(), SPEC, &FRESH, at(0)).0;
    node
}

fn situation<'a>(node: &'a NodeFacts, attempt: &'a Attempt) -> Situation<'a> {
    Situation {
        node,
        auto_provision: false,
        spec_hash: SPEC,
        agent_ready: true,
        awaited: None,
        attempt,
        turn: true,
        removing: false,
        other: None,
        drifted: false,
        recheck: SignedDuration::from_hours(6),
        now: at(1000),
    }
}

fn next(node: &NodeFacts) -> NodeStep {
    decide(&situation(node, &FRESH), "id")
}

fn marked(step: NodeStep) -> Marks {
    match step {
        NodeStep::Mark(marks) => *marks,
        other => panic!("expected marks, got {other:?}"),
    }
}

#[test]
fn only_the_exact_value_true_wants_a_node() {
    assert!(wants_provisioning(Some("true"), false));
    for other in [None, Some("false"), Some("True"), Some("yes"), Some("")] {
        assert!(!wants_provisioning(other, false), "{other:?}");
    }
}

#[test]
fn auto_provision_wants_every_node_but_those_annotated_false() {
    assert!(wants_provisioning(None, true));
    assert!(wants_provisioning(Some("whatever"), true));
    assert!(!wants_provisioning(Some("false"), true));
}

#[test]
fn nothing_happens_on_a_node_that_nobody_wants() {
    assert_eq!(next(&bare(None)), NodeStep::Nothing);
}

#[test]
fn an_annotated_node_without_an_agent_gets_one() {
    let node = bare(Some("true"));
    let step = decide(
        &Situation {
            agent_ready: false,
            ..situation(&node, &FRESH)
        },
        "id",
    );
    assert_eq!(step, NodeStep::Summon);
}

#[test]
fn an_overdue_agent_is_a_reason_on_the_node() {
    let node = bare(Some("true"));
    let step = decide(
        &Situation {
            agent_ready: false,
            awaited: Some((at(800), Some("ImagePullBackOff"))),
            ..situation(&node, &FRESH)
        },
        "id",
    );
    assert_eq!(
        step,
        NodeStep::AwaitAgent(Some(
            "no agent has come to the node within 120 s: ImagePullBackOff".into()
        ))
    );
}

#[test]
fn the_restart_is_recorded_before_it_is_ordered() {
    let mut node = bare(Some("true"));
    node.marks = marked(next(&node));
    assert_eq!(
        node.marks.restart,
        Some(Restart {
            kind: RestartKind::Install,
            id: "id".into()
        })
    );
    assert!(node.marks.crun.is_none());
    assert_eq!(
        decide(&situation(&node, &FRESH), "another"),
        NodeStep::Order(Work::Install, "id".into())
    );
}

#[test]
fn without_a_turn_a_node_prepares_and_then_waits() {
    let node = bare(Some("true"));
    let waiting = |attempt| {
        decide(
            &Situation {
                turn: false,
                ..situation(&node, attempt)
            },
            "id",
        )
    };
    assert_eq!(
        waiting(&FRESH),
        NodeStep::Order(Work::PrepareInstall, "id".into())
    );
    let (_, prepared) = conclude(&node, Work::PrepareInstall, &done(), SPEC, &FRESH, at(0));
    assert_eq!(waiting(&prepared), NodeStep::AwaitTurn);
}

#[test]
fn labels_appear_only_after_a_module_ran() {
    let mut node = bare(Some("true"));
    node.marks = marked(next(&node));
    assert!(!node.marks.has_ready_labels("worker-1"));
    let (marks, _) = conclude(&node, Work::Install, &done(), SPEC, &FRESH, at(0));
    assert!(marks.has_ready_labels("worker-1"));
    assert_eq!(marks.restart, None);
    assert!(marks.condition.expect("a condition").status);
}

#[test]
fn a_provisioned_node_needs_nothing() {
    assert_eq!(next(&provisioned(Some("true"))), NodeStep::Trusted(at(6 * 3600)));
}

#[test]
fn what_was_verified_is_verified_again_after_the_recheck_interval_without_a_fence() {
    let mut node = provisioned(Some("true"));
    let later = |node: &NodeFacts, second| {
        let situation = Situation {
            now: at(second),
            ..situation(node, &FRESH)
        };
        decide(&situation, "id")
    };
    assert_eq!(later(&node, 6 * 3600), NodeStep::Order(Work::Verify, "id".into()));
    node.marks = conclude(&node, Work::Verify, &done(), SPEC, &FRESH, at(6 * 3600)).0;
    assert_eq!(later(&node, 7 * 3600), NodeStep::Trusted(at(12 * 3600)));
}

#[test]
fn a_handler_that_went_is_looked_into_behind_a_fence_and_put_back() {
    let mut node = provisioned(Some("true"));
    let drifted = |node: &NodeFacts, turn| {
        let situation = Situation {
            drifted: true,
            turn,
            ..situation(node, &FRESH)
        };
        decide(&situation, "id")
    };
    node.marks = marked(drifted(&node, false));
    assert!(node.marks.fence && node.marks.has_ready_labels("worker-1"));
    assert_eq!(
        node.marks
            .condition
            .as_ref()
            .map(|c| (c.status, c.reason.as_str())),
        Some((false, "Verifying"))
    );
    assert_eq!(drifted(&node, false), NodeStep::Order(Work::Verify, "id".into()));
    let gone = failed(FailureReason::VerificationFailed);
    let (marks, attempt) = conclude(&node, Work::Verify, &gone, SPEC, &FRESH, at(1000));
    node.marks = marks;
    assert!(node.marks.fence && node.marks.has_ready_labels("worker-1"));
    let situation = Situation {
        now: at(2000),
        ..situation(&node, &attempt)
    };
    assert!(marked(decide(&situation, "id")).restart.is_some());
    let repaired = conclude(&node, Work::Install, &done(), SPEC, &FRESH, at(2100)).0;
    assert!(!repaired.fence && repaired.condition_is_true());
}

#[test]
fn removing_everything_overrides_annotations_and_auto_provision() {
    let node = provisioned(Some("true"));
    let situation = Situation {
        removing: true,
        auto_provision: true,
        ..situation(&node, &FRESH)
    };
    assert_eq!(
        decide(&situation, "id"),
        NodeStep::Order(Work::PrepareRemove, "id".into())
    );
}

#[test]
fn a_fence_that_is_left_over_goes() {
    let mut node = bare(None);
    node.marks.fence = true;
    assert_eq!(marked(next(&node)), Marks::default());
}

#[test]
fn labels_that_a_kubelet_registered_again_are_fenced_until_a_module_ran() {
    let mut node = bare(Some("true"));
    node.marks.set_ready_labels("worker-1");
    assert!(marked(next(&node)).fence);
}

#[test]
fn switching_auto_provision_off_leaves_what_carries_the_annotation() {
    assert!(matches!(next(&provisioned(Some("true"))), NodeStep::Trusted(_)));
    assert_eq!(
        next(&provisioned(None)),
        NodeStep::Order(Work::PrepareRemove, "id".into())
    );
}

#[test]
fn a_rebooted_node_is_fenced_and_verified_and_keeps_its_labels() {
    let mut node = provisioned(Some("true"));
    node.boot_id = "boot-2".into();
    let fenced = marked(next(&node));
    assert!(fenced.fence);
    assert!(!fenced.condition_is_true());
    node.marks = fenced;
    assert_eq!(next(&node), NodeStep::Order(Work::Verify, "id".into()));
    assert!(node.marks.has_ready_labels("worker-1"));
}

#[test]
fn a_reimaged_node_is_installed_again() {
    let mut node = provisioned(Some("true"));
    node.machine_id = "machine-2".into();
    assert!(marked(next(&node)).restart.is_some());
}

#[test]
fn a_new_specification_is_installed() {
    let node = provisioned(Some("true"));
    let step = decide(
        &Situation {
            spec_hash: "spec-2",
            ..situation(&node, &FRESH)
        },
        "id",
    );
    assert!(marked(step).restart.is_some());
}

#[test]
fn lost_labels_come_back_without_waking_an_agent() {
    let mut node = provisioned(Some("true"));
    node.marks.crun = None;
    let step = decide(
        &Situation {
            agent_ready: false,
            ..situation(&node, &FRESH)
        },
        "id",
    );
    assert!(marked(step).has_ready_labels("worker-1"));
}

#[test]
fn removal_fences_the_node_when_nobody_uses_the_handler_and_takes_the_labels_last() {
    let mut node = provisioned(None);
    assert_eq!(next(&node), NodeStep::Order(Work::PrepareRemove, "id".into()));
    let (_, prepared) = conclude(&node, Work::PrepareRemove, &done(), SPEC, &FRESH, at(0));
    node.marks = marked(decide(&situation(&node, &prepared), "id"));
    assert!(node.marks.fence && node.marks.has_ready_labels("worker-1"));
    assert_eq!(
        decide(&situation(&node, &prepared), "x"),
        NodeStep::Order(Work::Remove { force: false }, "id".into())
    );
    let (marks, _) = conclude(
        &node,
        Work::Remove { force: false },
        &done(),
        SPEC,
        &prepared,
        at(0),
    );
    assert_eq!(marks, Marks::default());
}

#[test]
fn a_handler_in_use_blocks_the_removal_and_keeps_the_labels() {
    let node = provisioned(None);
    let (marks, attempt) = conclude(
        &node,
        Work::PrepareRemove,
        &failed(FailureReason::HandlerInUse),
        SPEC,
        &FRESH,
        at(1000),
    );
    assert!(marks.has_ready_labels("worker-1"));
    assert_eq!(
        marks.condition.as_ref().map(|c| c.reason.as_str()),
        Some("RemovalBlocked")
    );
    let blocked = NodeFacts { marks, ..node };
    assert_eq!(
        decide(&situation(&blocked, &attempt), "id"),
        NodeStep::WaitUntil(at(1010))
    );
    // Wanted again meanwhile: nothing needs to be done but to say so.
    let wanted = NodeFacts {
        intent: Some("true".into()),
        ..blocked
    };
    let marks = marked(decide(&situation(&wanted, &attempt), "id"));
    assert_eq!(marks.condition.map(|c| c.reason), Some("Provisioned".into()));
}

#[test]
fn a_refusal_is_not_tried_again_even_by_a_new_coordinator() {
    let mut node = bare(Some("true"));
    let (marks, attempt) = conclude(
        &node,
        Work::Install,
        &failed(FailureReason::UnsupportedConfiguration),
        SPEC,
        &FRESH,
        at(0),
    );
    assert_eq!(attempt.retry, None);
    node.marks = marks;
    assert_eq!(next(&node), NodeStep::Refused);
}

#[test]
fn un_annotating_a_refused_node_cleans_up_after_it() {
    let mut node = bare(None);
    node.marks
        .set_condition(false, "UnsupportedConfiguration", "", at(0));
    assert_eq!(next(&node), NodeStep::Order(Work::PrepareRemove, "id".into()));
}

#[test]
fn a_failure_is_tried_again_after_a_growing_pause() {
    let node = bare(Some("true"));
    let fail = |attempt: &Attempt| {
        conclude(
            &node,
            Work::Install,
            &failed(FailureReason::RestartFailed),
            SPEC,
            attempt,
            at(0),
        )
        .1
    };
    let first = fail(&FRESH);
    let second = fail(&first);
    assert_eq!(first.retry.map(|r| r.not_before), Some(at(10)));
    assert_eq!(second.retry.map(|r| r.not_before), Some(at(20)));
    let mut last = second;
    for _ in 0..10 {
        last = fail(&last);
    }
    assert_eq!(last.retry.map(|r| r.not_before), Some(at(600)));
}

#[test]
fn a_lost_answer_keeps_the_restart_and_sends_the_same_command_again() {
    let mut node = bare(Some("true"));
    node.marks = marked(next(&node));
    let (marks, attempt) = conclude(&node, Work::Install, &Outcome::Lost, SPEC, &FRESH, at(0));
    assert_eq!(marks, node.marks);
    assert_eq!(
        decide(&situation(&node, &attempt), "another"),
        NodeStep::Order(Work::Install, "id".into())
    );
}

#[test]
fn a_node_that_is_not_ready_for_its_own_reasons_is_left_alone() {
    let mut node = bare(Some("true"));
    node.ready = false;
    assert_eq!(next(&node), NodeStep::AwaitReady);
    node.marks.restart = Some(Restart {
        kind: RestartKind::Install,
        id: "id".into(),
    });
    assert_eq!(next(&node), NodeStep::Order(Work::Install, "id".into()));
}

#[test]
fn nodes_that_can_never_be_served_are_refused_without_an_agent() {
    for (os, runtime) in [("windows", "containerd://2.1.4"), ("linux", "cri-o://1.30.0")] {
        let mut node = bare(Some("true"));
        node.os = os.into();
        node.runtime = runtime.into();
        let marks = marked(next(&node));
        assert_eq!(
            marks.condition.as_ref().map(|c| (c.status, c.reason.as_str())),
            Some((false, "UnsupportedHost"))
        );
        node.marks = marks;
        assert_eq!(next(&node), NodeStep::Refused);
    }
}

#[test]
fn wanted_again_in_the_middle_of_its_removal_a_node_ends_that_first() {
    let mut node = provisioned(Some("true"));
    node.marks.restart = Some(Restart {
        kind: RestartKind::Remove,
        id: "r".into(),
    });
    node.marks.fence = true;
    node.marks.set_condition(false, "Removing", "", at(0));
    assert_eq!(
        next(&node),
        NodeStep::Order(Work::Remove { force: false }, "r".into())
    );
}

#[test]
fn a_host_that_was_never_served_is_done_with_when_its_removal_is_refused() {
    let mut node = bare(None);
    node.marks.set_condition(false, "UnsupportedHost", "", at(0));
    let (marks, attempt) = conclude(
        &node,
        Work::PrepareRemove,
        &failed(FailureReason::UnsupportedHost),
        SPEC,
        &FRESH,
        at(0),
    );
    assert_eq!((marks, attempt), (Marks::default(), FRESH));
}

#[test]
fn un_annotating_a_node_to_which_no_agent_ever_came_needs_none() {
    let mut node = bare(None);
    node.marks.agent_is_unavailable("no agent", at(0));
    assert_eq!(marked(next(&node)), Marks::default());
}

#[test]
fn a_failure_that_is_told_is_not_hidden_by_a_missing_agent() {
    let mut node = bare(Some("true"));
    node.marks.set_condition(false, "RestartFailed", "words", at(0));
    let told = node.marks.clone();
    node.marks.agent_is_unavailable("no agent", at(1));
    assert_eq!(node.marks, told);
}

const OTHER: Option<&str> = Some("the KWasm operator runs");

#[test]
fn nothing_is_begun_beside_another_operator_and_the_node_says_so() {
    let node = bare(Some("true"));
    let beside = |node: &NodeFacts| {
        decide(
            &Situation {
                other: OTHER,
                agent_ready: false,
                ..situation(node, &FRESH)
            },
            "id",
        )
    };
    let marks = marked(beside(&node));
    let condition = marks.condition.clone().expect("a condition");
    assert!(!condition.status);
    assert_eq!(condition.reason, "AnotherOperator");
    assert_eq!(marks.agent, None, "no agent is summoned");
    let mut told = node.clone();
    told.marks = marks;
    assert_eq!(beside(&told), NodeStep::Refused);
    // It ends, and the node is taken up at once.
    let alone = Situation {
        agent_ready: false,
        ..situation(&told, &FRESH)
    };
    assert_eq!(decide(&alone, "id"), NodeStep::Summon);
    // Nobody wants it any more: only words are taken back, and no agent comes for that.
    told.intent = None;
    assert_eq!(marked(beside(&told)), Marks::default());
}

#[test]
fn what_runs_goes_on_beside_another_operator() {
    let node = provisioned(Some("true"));
    let upgraded = Situation {
        other: OTHER,
        spec_hash: "spec-2",
        ..situation(&node, &FRESH)
    };
    assert_eq!(decide(&upgraded, "id"), NodeStep::Refused, "and its labels stay");
    let mut midway = bare(Some("true"));
    midway.marks.restart = Some(Restart {
        kind: RestartKind::Install,
        id: "begun".into(),
    });
    let midway = Situation {
        other: OTHER,
        ..situation(&midway, &FRESH)
    };
    assert_eq!(
        decide(&midway, "id"),
        NodeStep::Order(Work::Install, "begun".into())
    );
}

#[test]
fn a_removal_goes_on_beside_another_operator() {
    let node = provisioned(None);
    let step = decide(
        &Situation {
            other: OTHER,
            ..situation(&node, &FRESH)
        },
        "id",
    );
    assert_eq!(step, NodeStep::Order(Work::PrepareRemove, "id".into()));
}
