//! Whether a handler of our name is there already, and whose it is.

use std::collections::BTreeMap;

use super::facts::Family;
use super::insertion::{Copied, Handler, POD_ANNOTATIONS, RUNTIME_TYPE};
use super::tree::Tree;

pub(super) enum Existing {
    None,
    Ours { current: bool },
    Foreign(String),
}

pub(super) fn existing(tree: &Tree, family: Family, handler: &Handler, copied: &Copied) -> Existing {
    let Some(entry) = tree
        .table(&family.runtimes())
        .and_then(|entries| entries.get(&handler.name))
    else {
        return Existing::None;
    };
    match entry.text(&["options", "BinaryName"]) {
        Some(binary) if binary == handler.binary => Existing::Ours {
            current: *entry == wanted(handler, copied),
        },
        Some(binary) => Existing::Foreign(format!("its BinaryName is {binary:?}")),
        None => Existing::Foreign("it names no binary".to_owned()),
    }
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
