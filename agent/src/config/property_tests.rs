//! Properties over generated files of containerd's kind.

use proptest::prelude::*;
use toml_edit::Document;

use super::tree::Tree;
use super::*;

fn handler() -> Handler {
    Handler {
        name: "crun".into(),
        binary: "/opt/quartermaster/current/bin/crun".into(),
    }
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<bool>().prop_map(|b| b.to_string()),
        any::<i32>().prop_map(|n| n.to_string()),
        "[a-z/. #\\[\\]]{0,12}".prop_map(|s| format!("\"{s}\"")),
        "[a-z/.# ]{0,12}".prop_map(|s| format!("'{s}'")),
        Just("[\n  \"a\", # one\n  \"b\",\n]".to_owned()),
        Just("{ a = 1, b = { c = \"}\" } }".to_owned()),
    ]
}

fn body() -> impl Strategy<Value = String> {
    proptest::collection::btree_map("[a-z]{6,8}", value(), 0..4).prop_map(|entries| {
        entries
            .into_iter()
            .map(|(key, value)| format!("  {key} = {value}\n"))
            .collect()
    })
}

fn table(headers: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
    (
        proptest::sample::subsequence(headers, 0..=headers.len()).prop_shuffle(),
        proptest::collection::vec((body(), "(|# [a-z=\"\\[ ]{0,20}\n|\n|   \n)"), headers.len()),
    )
        .prop_map(|(chosen, bodies)| {
            chosen
                .into_iter()
                .zip(bodies)
                .map(|(header, (body, comment))| format!("{comment}[{header}]\n{body}"))
                .collect()
        })
}

const V2_HEADERS: &[&str] = &[
    "grpc",
    "debug",
    "plugins",
    "plugins.\"io.containerd.grpc.v1.cri\"",
    "plugins.'io.containerd.grpc.v1.cri'.cni",
    "plugins.\"io.containerd.grpc.v1.cri\".containerd",
    "plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc",
    "plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options",
    "plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.\"kata\"",
    "plugins.\"io.containerd.internal.v1.opt\"",
];

const V3_HEADERS: &[&str] = &[
    "grpc",
    "plugins",
    "plugins.'io.containerd.cri.v1.images'.registry",
    "plugins.'io.containerd.cri.v1.runtime'",
    "plugins.'io.containerd.cri.v1.runtime'.containerd",
    "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes",
    "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc",
    "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata.options",
    "proxy_plugins.x",
];

fn file() -> impl Strategy<Value = (String, &'static str)> {
    let head = |version: u8| {
        "(|# [a-z ]{0,10}\n)".prop_map(move |comment| format!("{comment}version = {version}\n"))
    };
    let v2 = (
        head(2),
        table(V2_HEADERS),
        prop_oneof![Just("1.7.24"), Just("2.1.0")],
    );
    let v3 = (
        head(3),
        table(V3_HEADERS),
        prop_oneof![Just("2.1.0"), Just("2.4.2")],
    );
    (prop_oneof![v2.boxed(), v3.boxed()], any::<bool>(), any::<bool>()).prop_map(
        |((head, tables, daemon), crlf, cut)| {
            let mut text = head + &tables.concat();
            if cut {
                text.truncate(text.trim_end().len());
            }
            if crlf {
                text = text.replace('\n', "\r\n");
            }
            (text, daemon)
        },
    )
}

fn planned(text: &str, daemon: &str) -> Option<ConfigEdit> {
    let facts = ConfigFacts {
        containerd: Version::parse(daemon).unwrap(),
        path: "/etc/containerd/config.toml".into(),
        file: Some(text.as_bytes().to_vec()),
        imports: Vec::new(),
        missing_imports: Vec::new(),
        live_systemd_cgroup: None,
    };
    match plan(&facts, &handler()) {
        Ok(Plan::Edit(edit)) => Some(edit),
        _ => None,
    }
}

fn tree(bytes: &[u8]) -> Tree {
    Tree::of(&Document::parse(std::str::from_utf8(bytes).unwrap()).unwrap())
}

fn path(family: Family, name: &str) -> Vec<&str> {
    family.runtimes().into_iter().chain([name]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_edit_adds_our_entries_and_nothing_else((text, daemon) in file()) {
        if let Some(edit) = planned(&text, daemon) {
            let ours = path(edit.family, "crun");
            let runc = path(edit.family, "runc");
            let (before, after) = (tree(text.as_bytes()), tree(&edit.after));
            prop_assert!(after.get(&ours).is_some());
            let implicit = edit.pieces.iter().any(|piece| piece.kind == PieceKind::ImplicitRunc);
            prop_assert_eq!(implicit, before.get(&runc).is_none() && after.get(&runc).is_some());
            let (mut left, mut right) = (before.without(&ours), after.without(&ours));
            if implicit {
                left = left.without(&runc);
                right = right.without(&runc);
            }
            prop_assert_eq!(left, right);
            prop_assert!(edit.after.starts_with(text.as_bytes()));
        }
    }

    #[test]
    fn undo_brings_the_file_back_byte_for_byte((text, daemon) in file()) {
        if let Some(edit) = planned(&text, daemon) {
            let record = EditRecord { before: edit.base, after: edit.after.clone(), pieces: edit.pieces };
            prop_assert_eq!(undo(&edit.after, Some(&record), &handler()), Ok(Undo::Rewrite(text.into_bytes())));
        }
    }

    #[test]
    fn undo_in_a_changed_file_keeps_what_was_changed(
        (text, daemon) in file(),
        head in "(|# [a-z]{0,9}\n)",
        tail in "(|\\[zzz\\]\nkey = 1\n|# [a-z]{0,9}\n)",
    ) {
        if let Some(edit) = planned(&text, daemon) {
            let after = String::from_utf8(edit.after.clone()).unwrap();
            let record = EditRecord { before: edit.base, after: edit.after, pieces: edit.pieces };
            let changed = format!("{head}{after}{tail}");
            if changed != after {
                let Ok(Undo::Rewrite(rest)) = undo(changed.as_bytes(), Some(&record), &handler()) else {
                    return Err(TestCaseError::fail("no rewrite"));
                };
                let glue = if tail.is_empty() || text.ends_with('\n') { "" } else if text.contains("\r\n") { "\r\n" } else { "\n" };
                prop_assert_eq!(String::from_utf8(rest).unwrap(), format!("{head}{text}{glue}{tail}"));
            }
        }
    }

    #[test]
    fn undo_without_a_record_takes_out_the_same_meaning((text, daemon) in file()) {
        if let Some(edit) = planned(&text, daemon) {
            let Ok(Undo::Rewrite(rest)) = undo(&edit.after, None, &handler()) else {
                return Err(TestCaseError::fail("no rewrite"));
            };
            let ours = path(edit.family, "crun");
            prop_assert_eq!(tree(&rest).without(&ours), tree(&edit.after).without(&ours));
        }
    }

    #[test]
    fn no_input_makes_the_plan_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..400) {
        let _ = planned(&String::from_utf8_lossy(&bytes), "1.7.24");
        let base = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nruntimes = { runc = { runtime_type = \"x\" } }\n";
        let _ = planned(base.get(..cut.min(base.len())).unwrap_or(base), "1.7.24");
        let _ = undo(&bytes, None, &handler());
    }
}
