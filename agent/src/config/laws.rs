//! What has to hold for any file whatever, for the property tests and the fuzzer alike.

use toml_edit::Document;

use super::facts::{ConfigFacts, Family, Version};
use super::insertion::{Handler, PieceKind};
use super::plan::{ConfigEdit, Plan, plan};
use super::tree::Tree;
use super::undo::{EditRecord, Undo, undo};
use super::written::{Written, plan_written, undo_written};

/// The daemons that the laws are tried with: one of each way to read a file.
pub const DAEMONS: [&str; 4] = ["1.6.20", "1.7.24", "2.1.9", "2.4.2"];

const PATH: &str = "/etc/containerd/config.toml";

/// The handler of the laws.
pub fn handler() -> Handler {
    Handler {
        name: "crun".into(),
        binary: "/opt/quartermaster/current/bin/crun".into(),
    }
}

fn facts(daemon: &str, file: &[u8]) -> ConfigFacts {
    ConfigFacts {
        containerd: Version::parse(daemon).unwrap_or(Version {
            major: 2,
            minor: 0,
            patch: 0,
        }),
        path: PATH.into(),
        file: Some(file.to_vec()),
        imports: Vec::new(),
        missing_imports: Vec::new(),
        live_systemd_cgroup: None,
    }
}

fn tree(bytes: &[u8]) -> Option<Tree> {
    let text = std::str::from_utf8(bytes).ok()?;
    Some(Tree::of(&Document::parse(text).ok()?))
}

fn entry(family: Family, name: &str) -> Vec<&str> {
    family.runtimes().into_iter().chain([name]).collect()
}

fn record(edit: &ConfigEdit) -> EditRecord {
    EditRecord {
        before: edit.base.clone(),
        after: edit.after.clone(),
        pieces: edit.pieces.clone(),
    }
}

/// Holds all laws against one file. Gives whether it was edited, so that a generator can see that it hits.
///
/// # Panics
/// Where a law is broken.
pub fn hold(file: &[u8], daemon: &str, head: &str, tail: &str) -> bool {
    let facts = facts(daemon, file);
    let _ = undo(file, None, &handler());
    template(&facts, file);
    let edit = match plan(&facts, &handler()) {
        Ok(Plan::Edit(edit)) => edit,
        Ok(Plan::Adopt(adoption)) => adoption.replacement,
        Ok(Plan::NothingToDo) => return false,
        Err(refusal) => {
            assert!(!refusal.remedy.is_empty(), "{refusal}");
            return false;
        }
    };
    adds_our_entries_and_nothing_else(&edit);
    comes_out_again(&facts, &edit);
    comes_out_of_a_changed_file(&edit, head, tail);
    true
}

fn adds_our_entries_and_nothing_else(edit: &ConfigEdit) {
    let base = edit.base.clone().unwrap_or_default();
    let (Some(before), Some(after)) = (tree(&base), tree(&edit.after)) else {
        panic!("an edit of what is no TOML, or into it");
    };
    let (ours, runc) = (entry(edit.family, "crun"), entry(edit.family, "runc"));
    assert!(after.get(&ours).is_some(), "the handler is not there");
    let (mut left, mut right) = (before.clone().without(&ours), after.without(&ours));
    if before.get(&runc).is_none() {
        left = left.without(&runc);
        right = right.without(&runc);
    }
    assert!(left == right, "something else changed");
    // Every byte of the base is there, in its order, around what was inserted.
    let added: usize = edit.pieces.iter().map(|piece| piece.text.len()).sum();
    assert_eq!(edit.after.len(), base.len() + added);
    let common = base.iter().zip(&edit.after).take_while(|(a, b)| a == b).count();
    let rest = &base[common..];
    assert!(
        edit.after.ends_with(rest) || rest.len() > added,
        "bytes of the file changed"
    );
}

fn comes_out_again(facts: &ConfigFacts, edit: &ConfigEdit) {
    let again = ConfigFacts {
        file: Some(edit.after.clone()),
        ..facts.clone()
    };
    assert_eq!(
        plan(&again, &handler()),
        Ok(Plan::NothingToDo),
        "it changes twice"
    );
    let base = edit.base.clone().unwrap_or_default();
    assert_eq!(
        undo(&edit.after, Some(&record(edit)), &handler()),
        Ok(Undo::Rewrite(base.clone()))
    );
    // Without a record the same entries go, whatever becomes of empty lines.
    match undo(&edit.after, None, &handler()) {
        Ok(Undo::Rewrite(rest)) => {
            let ours = entry(edit.family, "crun");
            let runc = entry(edit.family, "runc");
            let left = tree(&rest).map(|tree| tree.without(&ours).without(&runc));
            let right = tree(&base).map(|tree| tree.without(&ours).without(&runc));
            assert!(left == right, "without a record something else goes too");
        }
        other => panic!("without a record it does not come out: {other:?}"),
    }
}

/// Foreign text before and behind; comments, so that it is TOML whatever stands there.
fn comes_out_of_a_changed_file(edit: &ConfigEdit, head: &str, tail: &str) {
    let (Some(base), Ok(after)) = (&edit.base, std::str::from_utf8(&edit.after)) else {
        return;
    };
    let (Ok(base), false) = (std::str::from_utf8(base), after.starts_with('\u{feff}')) else {
        return;
    };
    let comment = |text: &str| {
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        if text.is_empty() {
            text
        } else {
            format!("# {text}\n")
        }
    };
    let (head, tail) = (comment(head), comment(tail));
    if tail.is_empty() && head.is_empty() || !after.ends_with('\n') && !tail.is_empty() {
        return;
    }
    let changed = format!("{head}{after}{tail}");
    let rest = match undo(changed.as_bytes(), Some(&record(edit)), &handler()) {
        Ok(Undo::Rewrite(rest)) => String::from_utf8_lossy(&rest).into_owned(),
        other => panic!("it does not come out of a changed file: {other:?}"),
    };
    assert!(
        rest.starts_with(&format!("{head}{base}")),
        "bytes before us changed"
    );
    assert!(rest.ends_with(&tail), "bytes behind us changed");
    let glue = rest.len() - head.len() - base.len() - tail.len();
    assert!(glue <= 2, "{glue} bytes of ours are left");
}

/// The same bytes as a template: nobody knows what they mean, and all of them stay.
fn template(facts: &ConfigFacts, file: &[u8]) {
    let rendered = ConfigFacts {
        file: Some(b"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n".to_vec()),
        ..facts.clone()
    };
    let written = Written::Template {
        path: "/x.tmpl".into(),
        bytes: Some(file.to_vec()),
        beginning: "{{ template \"base\" . }}\n",
        foreign: "",
    };
    let Ok(Plan::Edit(edit)) = plan_written(&rendered, &written, &handler()) else {
        return;
    };
    let base = edit.base.clone().unwrap_or_default();
    assert!(edit.after.starts_with(&base), "a byte of the template changed");
    assert_eq!(
        undo_written(&edit.after, &written, Some(&record(&edit)), &handler()),
        Ok(Undo::Rewrite(base))
    );
    assert_eq!(
        edit.pieces
            .iter()
            .filter(|piece| piece.kind == PieceKind::Handler)
            .count(),
        1
    );
}
