use super::*;

const NONE: Seen<'_> = Seen {
    taints: &[],
    version: "7",
};

fn ready() -> Marks {
    let mut marks = Marks {
        spec_hash: Some("h".into()),
        ..Marks::default()
    };
    marks.set_condition(true, "Provisioned", "", Timestamp::UNIX_EPOCH);
    marks.set_ready_labels("worker-1");
    marks
}

#[test]
fn equal_marks_write_nothing() {
    assert!(ready().writes_to(&ready(), "u", &NONE).is_empty());
}

#[test]
fn labels_that_invite_pods_are_written_after_the_condition() {
    let writes = Marks::default().writes_to(&ready(), "u", &NONE);
    assert!(writes.status_first);
    assert_eq!(
        writes.metadata,
        Some(json!({"metadata": {
            "uid": "u",
            "labels": {"kwasm.sh/kwasm-provisioned": "worker-1", "kwasm.sh/crun": "ready"},
            "annotations": {"kwasm.sh/spec-hash": "h"},
        }}))
    );
}

#[test]
fn labels_that_invite_pods_are_taken_away_before_the_condition() {
    let writes = ready().writes_to(&ready().without_provisioning(), "u", &NONE);
    assert!(!writes.status_first);
    assert_eq!(
        writes.metadata,
        Some(json!({"metadata": {
            "uid": "u",
            "labels": {"kwasm.sh/kwasm-provisioned": null, "kwasm.sh/crun": null},
            "annotations": {"kwasm.sh/spec-hash": null},
        }}))
    );
    assert_eq!(
        writes.status.expect("a status")["status"]["conditions"],
        json!([{"type": "WasmRuntimeReady", "$patch": "delete"}])
    );
}

#[test]
fn the_time_of_a_condition_moves_only_with_its_status() {
    let mut marks = ready();
    let later = Timestamp::from_second(100).expect("a time");
    marks.set_condition(true, "Verified", "", later);
    assert_eq!(
        marks.condition.as_ref().map(|c| c.since),
        Some(Timestamp::UNIX_EPOCH)
    );
    marks.set_condition(false, "Broken", "", later);
    assert_eq!(marks.condition.map(|c| c.since), Some(later));
}

#[test]
fn a_long_node_name_becomes_a_label_value_of_63_characters() {
    let name = "n".repeat(64);
    let value = label_value(&name);
    assert_eq!(value.len(), 63);
    assert!(value.starts_with(&format!("{}-", "n".repeat(54))));
    assert_eq!(label_value(&"n".repeat(63)), "n".repeat(63));
}

#[test]
fn a_message_is_cut_at_a_character() {
    assert_eq!(cut("äöü", 5), "ä…");
    assert_eq!(cut("abc", 5), "abc");
}

#[test]
fn a_restart_is_read_back_as_it_was_written() {
    let restart = Restart {
        kind: RestartKind::Remove,
        id: "1".into(),
    };
    let wanted = Marks {
        restart: Some(restart.clone()),
        ..Marks::default()
    };
    let patch = Marks::default()
        .writes_to(&wanted, "u", &NONE)
        .metadata
        .expect("a patch");
    let text = patch["metadata"]["annotations"][RESTART]
        .as_str()
        .expect("a text")
        .to_owned();
    let read = Marks::read(|key| (key == RESTART).then(|| text.clone()), |_| None, &[], &[]);
    assert_eq!(read.restart, Some(restart));
}

fn fenced() -> Marks {
    Marks {
        fence: true,
        ..ready()
    }
}

fn taints(yaml: &str) -> Vec<Taint> {
    serde_yaml_ng::from_str(yaml).expect("taints")
}

#[test]
fn a_fence_stands_first_and_leaves_the_taints_of_others_as_they_were_seen() {
    let theirs = taints("[{key: gpu, value: a, effect: NoSchedule}]");
    let seen = Seen {
        taints: &theirs,
        version: "7",
    };
    let writes = ready().writes_to(&fenced(), "u", &seen);
    assert!(writes.taints_first);
    assert_eq!(
        writes.taints,
        Some(json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/taints", "value": [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]},
            {"op": "add", "path": "/spec/taints", "value": [
                {"key": "gpu", "value": "a", "effect": "NoSchedule"},
                {"key": "kwasm.sh/repairing", "effect": "NoSchedule"},
            ]},
        ]))
    );
}

#[test]
fn a_fence_on_a_node_without_taints_is_written_for_the_version_that_was_seen() {
    let writes = ready().writes_to(&fenced(), "u", &NONE);
    assert_eq!(
        writes.taints.expect("a patch")[1],
        json!({"op": "test", "path": "/metadata/resourceVersion", "value": "7"})
    );
}

#[test]
fn the_last_taint_goes_with_its_list() {
    let ours = taints("[{key: kwasm.sh/repairing, effect: NoSchedule}]");
    let seen = Seen {
        taints: &ours,
        version: "7",
    };
    let writes = fenced().writes_to(&ready(), "u", &seen);
    assert!(!writes.taints_first);
    assert_eq!(
        writes.taints.expect("a patch")[2],
        json!({"op": "remove", "path": "/spec/taints"})
    );
}

#[test]
fn a_gate_is_only_ever_taken_away() {
    let ours = taints(
        "[{key: kwasm.sh/not-ready, effect: NoSchedule}, {key: kwasm.sh/not-ready, effect: NoExecute}]",
    );
    let seen = Seen {
        taints: &ours,
        version: "7",
    };
    let gated = Marks {
        gate: true,
        ..ready()
    };
    let patch = gated.writes_to(&ready(), "u", &seen).taints;
    assert_eq!(
        patch.expect("a patch")[2]["value"],
        json!([{"key": "kwasm.sh/not-ready", "effect": "NoExecute"}])
    );
    let kept = gated.writes_to(&gated.without_provisioning(), "u", &seen);
    assert_eq!(kept.taints, None);
}

#[test]
fn the_fence_is_up_while_pods_may_come_and_no_module_ran_in_this_boot() {
    let mut marks = ready();
    marks.verified_boot = Some("boot".into());
    marks.verified_machine = Some("machine".into());
    let up = |change: fn(&mut Marks), boot: &str| {
        let mut marks = marks.clone();
        change(&mut marks);
        marks.set_fence(boot, "machine");
        marks.fence
    };
    assert!(!up(|_| {}, "boot"));
    assert!(up(|_| {}, "another boot"));
    assert!(up(|marks| marks.verified_machine = None, "boot"));
    assert!(up(
        |marks| marks.set_condition(false, "Broken", "", Timestamp::UNIX_EPOCH),
        "boot"
    ));
    let restart = |marks: &mut Marks| {
        marks.restart = Some(Restart {
            kind: RestartKind::Remove,
            id: "1".into(),
        });
    };
    assert!(up(restart, "boot"));
    assert!(!up(|marks| marks.crun = None, "another boot"));
}

#[test]
fn saying_the_same_again_changes_nothing() {
    let mut marks = ready();
    let before = marks.clone();
    marks.set_condition(
        true,
        "Provisioned",
        "",
        Timestamp::from_second(99).expect("a time"),
    );
    assert_eq!(marks, before);
    marks.confirm(Timestamp::from_second(99).expect("a time"));
    assert_ne!(marks, before);
}
