//! Whether a handler of our name is there already, and whose it is.

use std::collections::BTreeMap;

use toml_edit::Document;

use super::facts::{ConfigFacts, Family};
use super::insertion::{Copied, Handler, POD_ANNOTATIONS, RUNTIME_TYPE};
use super::lines::line_of;
use super::tree::Tree;

/// Where KWasm's node installer puts what its handlers run.
const KWASM: &str = "/opt/kwasm/bin/";

pub(super) enum Existing {
    None,
    Ours {
        current: bool,
    },
    /// As KWasm's node installer writes it.
    Kwasm(Handler),
    Foreign {
        path: String,
        line: Option<usize>,
        what: String,
    },
}

pub(super) fn existing(
    document: &Document<&str>,
    tree: &Tree,
    family: Family,
    handler: &Handler,
    copied: &Copied,
    facts: &ConfigFacts,
) -> Existing {
    let entry_of = |family: Family| {
        tree.table(&family.runtimes())
            .and_then(|entries| entries.get(&handler.name))
    };
    let binary_of = |entry: &Tree| entry.text(&["options", "BinaryName"]).map(str::to_owned);
    // An upgrade of containerd may have made it read other ids: then our old entry means nothing and has to go.
    let left_over = [Family::V1, Family::V2, Family::V3]
        .into_iter()
        .filter(|other| *other != family)
        .filter_map(entry_of)
        .any(|entry| binary_of(entry).as_deref() == Some(&handler.binary));
    let Some(entry) = entry_of(family) else {
        return if left_over {
            Existing::Ours { current: false }
        } else {
            Existing::None
        };
    };
    match binary_of(entry) {
        Some(binary) if binary == handler.binary => Existing::Ours {
            current: !left_over && *entry == wanted(handler, copied),
        },
        Some(binary) if is_kwasm(entry, &binary) && in_root(document, family, handler) => {
            Existing::Kwasm(Handler {
                name: handler.name.clone(),
                binary,
            })
        }
        Some(binary) => foreign(
            document,
            family,
            handler,
            facts,
            format!("its BinaryName is {binary:?}"),
        ),
        None => foreign(document, family, handler, facts, "it names no binary".to_owned()),
    }
}

/// The runtime of KWasm's handler `name` in a configuration, if there is one.
pub fn kwasm_binary(bytes: &[u8], name: &str) -> Option<String> {
    let document = Document::parse(std::str::from_utf8(bytes).ok()?).ok()?;
    let tree = Tree::of(&document);
    [Family::V1, Family::V2, Family::V3].iter().find_map(|family| {
        let entry = tree.table(&family.runtimes())?.get(name)?;
        let binary = entry.text(&["options", "BinaryName"])?;
        is_kwasm(entry, binary).then(|| binary.to_owned())
    })
}

/// Whether the entry is one that KWasm's node installer may have written. Anything more in it is somebody's own work.
fn is_kwasm(entry: &Tree, binary: &str) -> bool {
    let kind = entry.text(&["runtime_type"]);
    binary.starts_with(KWASM) && kind == Some(RUNTIME_TYPE)
}

fn in_root(document: &Document<&str>, family: Family, handler: &Handler) -> bool {
    line_of(document, &entry_path(family, handler)).is_some()
}

fn entry_path(family: Family, handler: &Handler) -> Vec<&str> {
    family
        .runtimes()
        .into_iter()
        .chain([handler.name.as_str()])
        .collect()
}

/// It stands in the file itself or in the last import that has it.
fn foreign(
    document: &Document<&str>,
    family: Family,
    handler: &Handler,
    facts: &ConfigFacts,
    what: String,
) -> Existing {
    let path = entry_path(family, handler);
    let imported = facts.imports.iter().rev().find_map(|import| {
        let document = Document::parse(std::str::from_utf8(&import.bytes).ok()?).ok()?;
        Some((import.path.clone(), line_of(&document, &path)?))
    });
    let (path, line) = match imported {
        Some((path, line)) => (path, Some(line)),
        None => (facts.path.clone(), line_of(document, &path)),
    };
    Existing::Foreign { path, line, what }
}

/// The entry as it parses when it is as it should be.
pub(super) fn wanted(handler: &Handler, copied: &Copied) -> Tree {
    let text = |text: &str| Tree::Text(text.to_owned());
    let mut entry = BTreeMap::from([
        ("runtime_type".to_owned(), text(RUNTIME_TYPE)),
        (
            "pod_annotations".to_owned(),
            Tree::Array(POD_ANNOTATIONS.iter().map(|name| text(name)).collect()),
        ),
        (
            "options".to_owned(),
            Tree::Table(BTreeMap::from([
                ("BinaryName".to_owned(), text(&handler.binary)),
                ("SystemdCgroup".to_owned(), Tree::Boolean(copied.systemd_cgroup)),
            ])),
        ),
    ]);
    if let Some(name) = &copied.snapshotter {
        entry.insert("snapshotter".to_owned(), text(name));
    }
    Tree::Table(entry)
}
