//! Which ids a configuration uses, which runtime is its default, and what our entry copies from it.

use toml_edit::Document;

use super::check::Refusing;
use super::facts::{ConfigFacts, Family};
use super::insertion::Copied;
use super::lines::line_of;
use super::refusal::Refusal;
use super::tree::Tree;

/// The ids that the daemon really reads from this file. Each row was seen on running daemons:
///
/// | daemon | what it reads |
/// |---|---|
/// | 1.x | the ids of 1 where the file says 1 or nothing, else those of 2 (1.6 also where the file says 3) |
/// | 2.0 to 2.2 | the ids of 3; those of 2 where the file says 2 and does not set up runtimes under those of 3 |
/// | 2.3 and later | the highest ids that the file sets up runtimes under, whatever it says |
pub(super) fn family(tree: &Tree, version: i64, facts: &ConfigFacts) -> Family {
    let daemon = facts.containerd;
    if daemon.major < 2 {
        return if version < 2 { Family::V1 } else { Family::V2 };
    }
    let has = |family: Family| tree.get(&["plugins", family.id(), "containerd"]).is_some();
    let migrates_all = (daemon.major, daemon.minor) >= (2, 3);
    if has(Family::V3) {
        Family::V3
    } else if has(Family::V2) && (version == 2 || migrates_all) {
        Family::V2
    } else if has(Family::V1) && version < 2 && migrates_all {
        Family::V1
    } else if version == 2 && tree.get(&["plugins", Family::V3.id()]).is_none() {
        // Nothing is set up: the header tells what its author expects.
        Family::V2
    } else {
        Family::V3
    }
}

pub(super) fn default_runtime_name(tree: &Tree, family: Family) -> &str {
    let [plugins, id, containerd, _] = family.runtimes();
    match tree.text(&[plugins, id, containerd, "default_runtime_name"]) {
        Some(name) if !name.is_empty() => name,
        _ => "runc",
    }
}

/// `containerd.default_runtime`, the form of before `runtimes`, when it says anything.
pub(super) fn legacy_default(tree: &Tree, family: Family) -> Option<&Tree> {
    let [plugins, id, containerd, _] = family.runtimes();
    let entry = tree.get(&[plugins, id, containerd, "default_runtime"])?;
    entry
        .text(&["runtime_type"])
        .is_some_and(|kind| !kind.is_empty())
        .then_some(entry)
}

pub(super) fn check_default_runtime(
    document: &Document<&str>,
    tree: &Tree,
    family: Family,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<(), Refusal> {
    // 2.x does not read `default_runtime` any more, so whatever it says nothing follows from it there.
    if facts.containerd.major < 2 && legacy_default(tree, family).is_some() {
        return Ok(());
    }
    let name = default_runtime_name(tree, family);
    let written = tree.table(&family.runtimes());
    let there = match written {
        Some(entries) => entries.contains_key(name) || (facts.containerd.major >= 2 && name == "runc"),
        None => name == "runc",
    };
    if there {
        return Ok(());
    }
    let [plugins, id, containerd, runtimes] = family.runtimes();
    let line = line_of(document, &[plugins, id, containerd, "default_runtime_name"])
        .or_else(|| line_of(document, &[plugins, id, containerd, runtimes]));
    Err(refusing.because(
        line,
        format!("the default runtime is {name:?}, but `runtimes` has no such entry: containerd's CRI does not start with it"),
        "Add the entry or change `default_runtime_name`, restart containerd, then try again.",
    ))
}

pub(super) fn copied(tree: &Tree, family: Family, facts: &ConfigFacts) -> Copied {
    let legacy = legacy_default(tree, family).filter(|_| facts.containerd.major < 2);
    let name = default_runtime_name(tree, family);
    let entry = legacy.or_else(|| {
        tree.table(&family.runtimes())
            .and_then(|entries| entries.get(name))
    });
    let written = entry.and_then(|entry| entry.boolean(&["options", "SystemdCgroup"]));
    let legacy_switch = legacy
        .and_then(|_| tree.boolean(&["plugins", family.id(), "systemd_cgroup"]))
        .filter(|on| *on);
    Copied {
        systemd_cgroup: written
            .or(legacy_switch)
            .or(facts.live_systemd_cgroup)
            .unwrap_or(false),
        snapshotter: entry
            .and_then(|entry| entry.text(&["snapshotter"]))
            .filter(|name| !name.is_empty())
            .map(str::to_owned),
    }
}
