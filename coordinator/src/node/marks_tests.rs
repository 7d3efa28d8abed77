use super::*;

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
    assert!(ready().writes_to(&ready(), "u").is_empty());
}

#[test]
fn labels_that_invite_pods_are_written_after_the_condition() {
    let writes = Marks::default().writes_to(&ready(), "u");
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
    let writes = ready().writes_to(&ready().without_provisioning(), "u");
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
        .writes_to(&wanted, "u")
        .metadata
        .expect("a patch");
    let text = patch["metadata"]["annotations"][RESTART]
        .as_str()
        .expect("a text")
        .to_owned();
    let read = Marks::read(|key| (key == RESTART).then(|| text.clone()), |_| None, &[]);
    assert_eq!(read.restart, Some(restart));
}
