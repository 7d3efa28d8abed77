use super::*;

const BINARY: &str = "/opt/quartermaster/current/bin/crun";

fn handler() -> Handler {
    Handler {
        name: "crun".into(),
        binary: BINARY.into(),
    }
}

fn installed(version: &str, file: Option<&str>) -> EditRecord {
    let facts = ConfigFacts {
        containerd: Version::parse(version).unwrap(),
        path: "/etc/containerd/config.toml".into(),
        file: file.map(|text| text.as_bytes().to_vec()),
        imports: Vec::new(),
        missing_imports: Vec::new(),
        live_systemd_cgroup: None,
    };
    let Ok(Plan::Edit(edit)) = plan(&facts, &handler()) else {
        panic!("expected an edit");
    };
    EditRecord {
        before: edit.base,
        after: edit.after,
        pieces: edit.pieces,
    }
}

#[track_caller]
fn undone(current: &str, record: Option<&EditRecord>) -> String {
    match undo(current.as_bytes(), record, &handler()) {
        Ok(Undo::Rewrite(bytes)) => String::from_utf8(bytes).unwrap(),
        other => panic!("expected a rewrite, got {other:?}"),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

const V2: &str = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n";
const STOCK: &str =
    "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    sandbox_image = \"pause\"";

#[test]
fn an_untouched_file_becomes_byte_for_byte_what_it_was() {
    for file in [
        V2,
        STOCK,
        "version = 2",
        "",
        "version = 2\r\n",
        &V2.replace('\n', "\r\n"),
    ] {
        let record = installed("1.7.24", Some(file));
        if file.is_empty() {
            // An empty file is of version 1 and still a file.
            assert!(text(&record.after).contains("plugins.cri"));
        }
        assert_eq!(undone(&text(&record.after), Some(&record)), file);
    }
}

#[test]
fn a_file_that_we_made_is_removed() {
    let record = installed("2.4.2", None);
    assert_eq!(undo(&record.after, Some(&record), &handler()), Ok(Undo::Delete));
    let touched = format!("\n{}\n", text(&record.after));
    assert_eq!(
        undo(touched.as_bytes(), Some(&record), &handler()),
        Ok(Undo::Delete)
    );
}

#[test]
fn a_file_that_we_made_and_somebody_extended_stays() {
    let record = installed("2.4.2", None);
    let extended = format!("{}[debug]\nlevel = \"info\"\n", text(&record.after));
    assert_eq!(
        undone(&extended, Some(&record)),
        "version = 3\n[debug]\nlevel = \"info\"\n"
    );
}

#[test]
fn changes_before_and_after_our_tables_stay() {
    let record = installed("1.7.24", Some(V2));
    let changed = format!("# new head\n{}[debug]\nlevel = \"info\"\n", text(&record.after));
    assert_eq!(
        undone(&changed, Some(&record)),
        format!("# new head\n{V2}[debug]\nlevel = \"info\"\n")
    );
}

#[test]
fn lines_do_not_run_together_where_the_last_newline_was_ours() {
    let record = installed("2.4.2", Some("version = 3"));
    let changed = format!("{}[debug]\n", text(&record.after));
    assert_eq!(undone(&changed, Some(&record)), "version = 3\n[debug]\n");
}

#[test]
fn tables_are_found_by_our_binary_without_a_record() {
    let record = installed("1.7.24", Some(V2));
    assert_eq!(undone(&text(&record.after), None), V2);
}

#[test]
fn reindented_tables_are_found_and_comments_between_stay() {
    let record = installed("1.7.24", Some(V2));
    let changed = text(&record.after)
        .lines()
        .map(|line| format!("{}\n", line.trim()))
        .collect::<String>()
        .replace("pod_annotations", "# a remark\npod_annotations");
    let rest = undone(&changed, Some(&record));
    assert!(rest.ends_with("\n# a remark\n"), "{rest}");
    assert!(!rest.contains("crun"), "{rest}");
    assert!(!rest.contains("Added by"), "{rest}");
}

#[test]
fn the_implicit_runc_goes_with_us_when_it_stands_alone() {
    let record = installed("1.6.20", Some(STOCK));
    assert!(text(&record.after).contains("runtimes.runc]"));
    let changed = format!("{}\n[debug]\n", text(&record.after));
    assert_eq!(undone(&changed, Some(&record)), format!("{STOCK}\n\n[debug]\n"));
}

#[test]
fn the_implicit_runc_stays_while_another_runtime_is_written_down() {
    let record = installed("1.6.20", Some(STOCK));
    let kata = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata]\nruntime_type = \"io.containerd.kata.v2\"\n";
    let rest = undone(&format!("{}{kata}", text(&record.after)), Some(&record));
    assert!(rest.contains("runtimes.runc]"), "{rest}");
    assert!(rest.ends_with(kata), "{rest}");
    assert!(!rest.contains("crun"), "{rest}");
}

#[test]
fn a_file_without_us_is_left_alone() {
    let record = installed("1.7.24", Some(V2));
    let foreign = text(&record.after).replace(BINARY, "/usr/bin/crun");
    for current in [V2, &foreign] {
        assert_eq!(
            undo(current.as_bytes(), Some(&record), &handler()),
            Ok(Undo::NothingToDo)
        );
    }
}

#[test]
fn a_rewritten_inline_entry_is_cut_out_between_its_commas() {
    let file = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nruntimes = { runc = { runtime_type = \"io.containerd.runc.v2\" } }\n";
    let record = installed("1.7.24", Some(file));
    assert_eq!(
        undone(&format!("# head\n{}", text(&record.after)), Some(&record)),
        format!("# head\n{file}")
    );
    let spaced = text(&record.after).replace("crun = {", "crun  = {");
    assert_eq!(undone(&spaced, Some(&record)), file);
    assert_eq!(undone(&spaced, None), file);
    let between = spaced.replace(" } } }\n", " } }, kata = { runtime_type = \"k\" } }\n");
    assert_eq!(
        undone(&between, Some(&record)),
        file.replace(" } }\n", " }, kata = { runtime_type = \"k\" } }\n")
    );
}

#[test]
fn runc_and_our_entry_leave_the_braces_they_were_written_into_together() {
    let file = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\ncontainerd = { }\n";
    let record = installed("1.7.24", Some(file));
    assert!(
        text(&record.after).contains("runc = {"),
        "{}",
        text(&record.after)
    );
    assert_eq!(
        undone(&format!("# head\n{}", text(&record.after)), Some(&record)),
        format!("# head\n{file}")
    );
}

#[test]
fn entries_under_the_ids_of_two_versions_go_together() {
    let entry = |family: &str| {
        format!("[plugins.\"{family}\".containerd.runtimes.crun.options]\nBinaryName = \"{BINARY}\"\n")
    };
    let file = format!(
        "version = 3\n{}# between\n{}",
        entry("io.containerd.grpc.v1.cri"),
        entry("io.containerd.cri.v1.runtime")
    );
    assert_eq!(undone(&file, None), "version = 3\n# between\n");
}
