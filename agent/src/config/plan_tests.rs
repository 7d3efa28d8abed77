use toml_edit::Document;

use super::tree::Tree;
use super::*;

const BINARY: &str = "/opt/quartermaster/current/bin/crun";

fn handler() -> Handler {
    Handler {
        name: "crun".into(),
        binary: BINARY.into(),
    }
}

fn facts(version: &str, file: &str) -> ConfigFacts {
    ConfigFacts {
        containerd: Version::parse(version).unwrap(),
        path: "/etc/containerd/config.toml".into(),
        file: Some(file.as_bytes().to_vec()),
        imports: Vec::new(),
        missing_imports: Vec::new(),
        live_systemd_cgroup: None,
    }
}

#[track_caller]
fn edit(version: &str, file: &str) -> String {
    edit_of(&facts(version, file))
}

#[track_caller]
fn edit_of(facts: &ConfigFacts) -> String {
    match plan(facts, &handler()) {
        Ok(Plan::Edit(edit)) => {
            assert_eq!(edit.before, facts.file);
            String::from_utf8(edit.after).unwrap()
        }
        other => panic!("expected an edit, got {other:?}"),
    }
}

#[track_caller]
fn refusal(version: &str, file: &str) -> Refusal {
    refusal_of(&facts(version, file))
}

#[track_caller]
fn refusal_of(facts: &ConfigFacts) -> Refusal {
    plan(facts, &handler()).expect_err("expected a refusal")
}

fn tree(text: &str) -> Tree {
    Tree::of(&Document::parse(text).unwrap())
}

const V2: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    SystemdCgroup = true
"#;

const V3: &str = r#"version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
    SystemdCgroup = true
"#;

#[test]
fn appends_the_handler_and_leaves_every_other_byte() {
    assert_eq!(
        edit("1.7.24", V2),
        format!(
            r#"{V2}
# Added by quartermaster-agent; `quartermaster-agent uninstall` takes it out again.
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
  runtime_type = "io.containerd.runc.v2"
  pod_annotations = ["module.wasm.image/variant", "run.oci.handler"]
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
    BinaryName = "/opt/quartermaster/current/bin/crun"
    SystemdCgroup = true
"#
        )
    );
}

#[test]
fn takes_the_ids_of_version_3_where_the_file_uses_them() {
    let after = edit("2.2.2", V3);
    let crun = tree(&after);
    let entry = crun
        .get(&[
            "plugins",
            "io.containerd.cri.v1.runtime",
            "containerd",
            "runtimes",
            "crun",
        ])
        .unwrap();
    assert_eq!(entry.boolean(&["options", "SystemdCgroup"]), Some(true));
}

#[test]
fn believes_the_tables_and_not_the_header_when_they_disagree() {
    let after = edit("2.0.5", &V3.replace("version = 3", "version = 2"));
    assert!(
        after.contains(r#"[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun]"#),
        "{after}"
    );
    assert!(!after.contains("io.containerd.grpc.v1.cri"));
}

#[test]
fn ignores_the_ids_of_version_3_on_1_x_as_the_daemon_does() {
    let after = edit("1.7.24", &V3.replace("version = 3", "version = 2"));
    assert!(
        after.contains(r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]"#),
        "{after}"
    );
}

#[test]
fn keeps_the_ids_of_version_2_on_containerd_2() {
    assert!(
        edit("2.4.2", V2)
            .contains(r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]"#)
    );
}

#[test]
fn writes_the_ids_of_version_3_into_a_file_that_has_only_a_version() {
    let after = edit("2.2.2", "version = 3");
    assert!(after.starts_with("version = 3\n\n# Added"), "{after}");
    assert!(
        tree(&after)
            .get(&["plugins", "io.containerd.cri.v1.runtime", "containerd"])
            .is_some()
    );
}

#[test]
fn adds_the_implicit_runc_where_1_x_would_forget_it() {
    let stock = "version = 2\n\n[plugins]\n  [plugins.\"io.containerd.grpc.v1.cri\"]\n    [plugins.\"io.containerd.grpc.v1.cri\".cni]\n      bin_dir = \"/usr/lib/cni\"\n";
    let on_1 = tree(&edit("1.6.20", stock));
    let runtimes = ["plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"];
    let names: Vec<_> = on_1.table(&runtimes).unwrap().keys().cloned().collect();
    assert_eq!(names, ["crun", "runc"]);

    let on_2 = tree(&edit("2.1.0", stock));
    let names: Vec<_> = on_2.table(&runtimes).unwrap().keys().cloned().collect();
    assert_eq!(names, ["crun"]);
}

#[test]
fn does_not_add_a_runc_that_was_never_served() {
    let file = V2
        .replace("runtimes.runc", "runtimes.nvidia")
        .replace(
            "version = 2\n",
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n",
        );
    let after = edit("1.7.24", &file);
    assert!(!after.contains("runtimes.runc]"), "{after}");
    assert!(after.ends_with("SystemdCgroup = true\n"));
}

#[test]
fn copies_from_the_default_runtime_and_not_from_another() {
    let file = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "plain"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    SystemdCgroup = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.plain]
  runtime_type = "io.containerd.runc.v2"
  snapshotter = "stargz"
"#;
    let after = edit("1.7.24", file);
    assert!(after.contains("SystemdCgroup = false"), "{after}");
    assert!(after.contains("snapshotter = \"stargz\"\n  [plugins"), "{after}");
}

#[test]
fn asks_the_running_daemon_where_the_file_leaves_the_cgroup_driver_open() {
    let mut facts = facts("2.4.2", "version = 3\n");
    facts.live_systemd_cgroup = Some(true);
    assert!(edit_of(&facts).contains("SystemdCgroup = true"));
    let mut facts = super::plan_tests::facts("2.4.2", &V3.replace("= true", "= false"));
    facts.live_systemd_cgroup = Some(true);
    assert!(!edit_of(&facts).contains("SystemdCgroup = true"));
}

#[test]
fn keeps_windows_line_ends() {
    let file = V2.replace('\n', "\r\n");
    let after = edit("1.7.24", &file);
    assert!(after.starts_with(&file));
    assert_eq!(after.matches('\n').count(), after.matches("\r\n").count());
}

#[test]
fn ends_a_last_line_without_a_newline_before_it_appends() {
    let after = edit("1.7.24", V2.trim_end());
    assert!(after.contains("SystemdCgroup = true\n\n# Added"), "{after}");
}

#[test]
fn inserts_into_an_inline_table() {
    let file = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
  runtimes = { runc = { runtime_type = "io.containerd.runc.v2", options = { SystemdCgroup = true } } } # all
"#;
    let after = edit("1.7.24", file);
    assert_eq!(
        after,
        file.replace(
            "} } } #",
            "} }, crun = { runtime_type = \"io.containerd.runc.v2\", pod_annotations = [\"module.wasm.image/variant\", \"run.oci.handler\"], options = { BinaryName = \"/opt/quartermaster/current/bin/crun\", SystemdCgroup = true } } } #"
        )
    );
}

#[test]
fn inserts_into_an_inline_table_further_up_with_what_is_missing_below() {
    let file = "version = 2\nplugins = { \"io.containerd.grpc.v1.cri\" = { containerd = {} } }\n";
    let after = tree(&edit("1.7.24", file));
    let names: Vec<_> = after
        .table(&["plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"])
        .unwrap()
        .keys()
        .cloned()
        .collect();
    assert_eq!(names, ["crun", "runc"]);
}

#[test]
fn accepts_a_byte_order_mark_on_1_x_only() {
    let file = format!("\u{feff}{V2}");
    assert!(edit("1.7.24", &file).starts_with('\u{feff}'));
    assert!(refusal("2.2.2", &file).message.contains("byte order mark"));
}

#[test]
fn is_not_fooled_by_words_in_comments_and_strings() {
    let file = format!(
        "# was: version = 3, crun handler removed, disabled_plugins = [\"cri\"]\n{V2}    BinaryName = \"/opt/crun-compatible-runc\"\n"
    );
    assert!(edit("1.7.24", &file).contains("runtimes.crun]"));
}

#[test]
fn makes_a_file_where_there_is_none() {
    let mut none = facts("1.7.24", "");
    none.file = None;
    let Plan::Edit(edit) = plan(&none, &handler()).unwrap() else {
        panic!("expected an edit");
    };
    assert_eq!((&edit.before, &edit.base), (&None, &None));
    let after = String::from_utf8(edit.after).unwrap();
    assert!(after.starts_with("version = 2\n"), "{after}");
    assert!(after.contains("runtimes.runc]"));

    none.containerd = Version::parse("2.4.2").unwrap();
    let after = edit_of_new(&none);
    assert!(after.starts_with("version = 3\n"), "{after}");
    assert!(!after.contains("runtimes.runc]"));
}

fn edit_of_new(facts: &ConfigFacts) -> String {
    match plan(facts, &handler()).unwrap() {
        Plan::Edit(edit) => String::from_utf8(edit.after).unwrap(),
        other => panic!("expected an edit, got {other:?}"),
    }
}

#[test]
fn has_nothing_to_do_the_second_time() {
    for (version, file) in [("1.7.24", V2), ("2.4.2", V3), ("2.4.2", "version = 3")] {
        let once = edit(version, file);
        assert_eq!(plan(&facts(version, &once), &handler()), Ok(Plan::NothingToDo));
    }
}

#[test]
fn writes_an_outdated_entry_of_its_own_anew() {
    // minikube's start rewrites every SystemdCgroup, and another tool may change the default runtime's alone.
    let once = edit("1.7.24", V2);
    let changed = once.replacen("SystemdCgroup = true", "SystemdCgroup = false", 1);
    let Plan::Edit(edit) = plan(&facts("1.7.24", &changed), &handler()).unwrap() else {
        panic!("expected an edit");
    };
    let after = String::from_utf8(edit.after).unwrap();
    assert_eq!(after.matches("SystemdCgroup = false").count(), 2);
    assert_eq!(after.matches("runtimes.crun]").count(), 1);
    assert!(!String::from_utf8(edit.base.unwrap()).unwrap().contains("crun"));
}

#[test]
fn refuses_a_handler_of_somebody_else() {
    for binary in ["BinaryName = \"/usr/bin/crun\"", "Other = 1"] {
        let file = format!(
            "{V2}[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.\"crun\".options]\n{binary}\n"
        );
        let refusal = refusal("1.7.24", &file);
        assert_eq!(refusal.kind, RefusalKind::Conflict);
    }
}

#[test]
fn names_file_and_line_of_a_foreign_handler() {
    let file = format!(
        "{V2}[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]\nruntime_type = \"x\"\n"
    );
    let refusal = refusal("1.7.24", &file);
    assert_eq!(
        (refusal.path.as_str(), refusal.line),
        ("/etc/containerd/config.toml", Some(6))
    );
    assert!(
        refusal
            .message
            .starts_with("/etc/containerd/config.toml, line 6: "),
        "{refusal}"
    );
}

/// What KWasm's node installer appends.
const KWASM: &str = r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun]
    runtime_type = "io.containerd.runc.v2"
    pod_annotations = ["module.wasm.image/variant", "run.oci.handler"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.crun.options]
    BinaryName = "/opt/kwasm/bin/crun"
"#;

#[test]
fn offers_to_adopt_what_kwasm_wrote_and_keeps_a_replacement_ready() {
    let Ok(Plan::Adopt(adoption)) = plan(&facts("1.7.24", &format!("{V2}{KWASM}")), &handler()) else {
        panic!("expected an adoption");
    };
    assert_eq!(adoption.binary, "/opt/kwasm/bin/crun");
    assert_eq!(adoption.replacement.base.as_deref(), Some(V2.as_bytes()));
    assert_eq!(
        String::from_utf8(adoption.replacement.after).unwrap(),
        edit("1.7.24", V2)
    );
}

#[test]
fn writes_its_own_beside_a_handler_of_kwasm_that_containerd_does_not_read() {
    // Its installer appends the ids of version 2 to any file.
    let after = edit("2.2.2", &format!("{V3}{KWASM}"));
    assert!(
        after.contains("/opt/kwasm/bin/crun") && after.contains(BINARY),
        "{after}"
    );
}

#[test]
fn refuses_a_disabled_cri_in_every_spelling() {
    for name in ["cri", "io.containerd.grpc.v1.cri"] {
        let refusal = refusal("1.7.24", &format!("disabled_plugins = [\"{name}\"]\n{V2}"));
        assert_eq!(refusal.kind, RefusalKind::Configuration);
        assert!(refusal.message.contains("line 1: `disabled_plugins` names"));
    }
}

#[test]
fn refuses_what_containerd_itself_cannot_read() {
    for (file, word) in [
        (
            format!("{V2}[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n"),
            "line 6",
        ),
        ("[plugins.cri]\nx = 1\n[[plugins]]\ny = 2\n".to_owned(), "line 3"),
        ("version = 2\nimports = [ , ]\n".to_owned(), "line 2"),
        ("{{ template \"base\" . }}\n".to_owned(), "line 1"),
        ("version = \"2\"\n".to_owned(), "not a number"),
        ("version = 3\n".to_owned(), "does not read"),
    ] {
        let refusal = refusal("1.7.24", &file);
        assert!(refusal.message.contains(word), "{}", refusal.message);
    }
    let array = "version = 2\n[[plugins]]\ny = 2\n";
    assert!(refusal("1.7.24", array).message.contains("[[plugins]]"));
}

#[test]
fn refuses_versions_that_do_not_fit_the_daemon() {
    assert!(refusal("2.1.0", "version = 4\n").message.contains("version = 4"));
    assert!(refusal("2.4.0", "version = 5\n").message.contains("version = 5"));
    assert!(edit("2.4.0", "version = 4\n").contains("io.containerd.cri.v1.runtime"));
}

#[test]
fn refuses_generated_files_and_templates() {
    for (version, file) in [
        ("2.2.2", "# k0s_managed=true\nversion = 3\n".to_owned()),
        (
            "1.7.24",
            format!("\n# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\n{V2}"),
        ),
        ("1.7.24", V2.replace("io.containerd.runc.v2", "${RUNTIME_TYPE}")),
    ] {
        let refusal = refusal(version, &file);
        assert_eq!(refusal.kind, RefusalKind::Configuration, "{}", refusal.message);
    }
}

#[test]
fn refuses_an_import_that_replaces_the_cri_table_on_1_x() {
    let mut facts = facts("1.7.24", V2);
    facts.imports = vec![ImportedFile {
        path: "/etc/containerd/config.d/99-nvidia.toml".into(),
        bytes: V2.as_bytes().to_vec(),
    }];
    assert!(refusal_of(&facts).message.contains("99-nvidia.toml"));

    facts.imports[0].bytes = b"[debug]\nlevel = \"info\"\n".to_vec();
    edit_of(&facts);
}

#[test]
fn merges_imports_on_2_x() {
    let mut facts = facts("2.2.2", "version = 2\n");
    facts.imports = vec![ImportedFile {
        path: "/etc/containerd/conf.d/99-nvidia.toml".into(),
        bytes: V2.as_bytes().to_vec(),
    }];
    assert!(edit_of(&facts).contains("SystemdCgroup = true"));

    let theirs = V2.replace("runtimes.runc", "runtimes.crun");
    facts.imports[0].bytes = theirs.into_bytes();
    assert_eq!(refusal_of(&facts).kind, RefusalKind::Conflict);
}

#[test]
fn refuses_a_missing_import() {
    let mut facts = facts("1.7.24", V2);
    facts.missing_imports = vec!["/etc/containerd/debug.toml".into()];
    assert!(refusal_of(&facts).message.contains("debug.toml"));
}

#[test]
fn takes_the_ids_of_version_3_where_2_x_would_drop_those_of_2_beside_them() {
    let both = format!(
        "{V2}{}",
        V3.replace("version = 3\n", "").replace("= true", "= false")
    );
    for daemon in ["2.1.9", "2.4.2"] {
        let after = edit(daemon, &both);
        assert!(
            after.ends_with("SystemdCgroup = false\n")
                && after.contains("v1.runtime\".containerd.runtimes.crun]"),
            "{after}"
        );
    }
}

#[test]
fn follows_what_each_daemon_reads_of_a_file_with_another_header() {
    let v1 = V2
        .replace("version = 2\n", "")
        .replace("\"io.containerd.grpc.v1.cri\"", "cri");
    let v2_under_3 = V2.replace("version = 2", "version = 3");
    let v2_without = V2.replace("version = 2\n", "");
    for (daemon, file, ids, systemd) in [
        ("1.6.20", V3, Family::V2, false),
        ("1.6.20", &v2_under_3, Family::V2, true),
        ("2.1.9", &v1, Family::V3, false),
        ("2.4.2", &v1, Family::V1, true),
        ("2.1.9", &v2_under_3, Family::V3, false),
        ("2.4.2", &v2_under_3, Family::V2, true),
        ("2.1.9", &v2_without, Family::V3, false),
        ("2.4.2", &v2_without, Family::V2, true),
        ("2.1.9", "", Family::V3, false),
        ("2.4.2", "", Family::V3, false),
    ] {
        let Ok(Plan::Edit(edit)) = plan(&facts(daemon, file), &handler()) else {
            panic!("expected an edit of {file:?} on {daemon}");
        };
        let after = String::from_utf8(edit.after).unwrap();
        assert_eq!(edit.family, ids, "{daemon} {file}");
        assert!(
            after.ends_with(&format!("SystemdCgroup = {systemd}\n")),
            "{daemon} {after}"
        );
    }
}

#[test]
fn takes_an_entry_along_that_an_upgraded_containerd_reads_no_more() {
    let once = edit("1.6.20", "version = 3\n");
    let again = edit("2.1.9", &once);
    assert_eq!(again.matches("BinaryName").count(), 1);
    assert!(again.starts_with("version = 3\n"), "{again}");
    assert!(
        again.contains("cri.v1.runtime\".containerd.runtimes.crun]"),
        "{again}"
    );
}

#[test]
fn refuses_a_default_runtime_that_is_not_there() {
    let file = V2.replace("runtimes.runc", "runtimes.kata");
    assert!(refusal("1.7.24", &file).message.contains("default runtime"));
}

#[test]
fn handles_the_old_form_of_the_default_runtime_on_1_x() {
    let file = "[plugins.cri.containerd]\n  [plugins.cri.containerd.default_runtime]\n    runtime_type = \"io.containerd.runc.v2\"\n    [plugins.cri.containerd.default_runtime.options]\n      SystemdCgroup = true\n";
    let after = edit("1.6.20", file);
    assert!(
        after.contains("[plugins.cri.containerd.runtimes.runc]"),
        "{after}"
    );
    assert!(after.contains("SystemdCgroup = true\n\n#"), "{after}");
    assert!(after.ends_with("SystemdCgroup = true\n"), "{after}");
}

#[test]
fn refuses_keys_that_1_x_does_not_decode() {
    let file = V2.replace("io.containerd.grpc.v1.cri", "io.containerd.grpc.v1.cr\\u0069");
    assert!(refusal("1.7.24", &file).message.contains("escape"));
}

#[test]
fn refuses_an_inline_table_that_it_cannot_extend() {
    let file = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  containerd = { runtimes.runc.runtime_type = \"io.containerd.runc.v2\" }\n";
    assert!(refusal("1.7.24", file).message.contains("dotted"));
}
