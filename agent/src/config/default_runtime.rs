//! Which ids a configuration uses, which runtime is its default, and what our entry copies from it.

use super::check::Refusing;
use super::facts::{ConfigFacts, Family};
use super::insertion::Copied;
use super::plan::Refusal;
use super::tree::Tree;

pub(super) fn family(
    tree: &Tree,
    version: i64,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<Family, Refusal> {
    if version < 2 {
        return Ok(Family::V1);
    }
    if facts.containerd.major < 2 {
        // 1.x reads version 2 and below, and does not know the ids of 3 even where a file has them.
        return Ok(Family::V2);
    }
    if version >= 3 {
        return Ok(Family::V3);
    }
    let has = |family: Family, more: &[&str]| {
        let path: Vec<&str> = ["plugins", family.id()]
            .into_iter()
            .chain(more.iter().copied())
            .collect();
        tree.get(&path).is_some()
    };
    match (
        has(Family::V2, &["containerd"]),
        has(Family::V3, &["containerd"]),
    ) {
        (true, true) => Err(refusing.because(
            "sets runtimes under the plugin ids of version 2 and of version 3 at once; containerd loses one of them",
            "Keep one of the two (`containerd config migrate` shows what version 3 wants), restart containerd, then try again.",
        )),
        (true, false) => Ok(Family::V2),
        (false, true) => Ok(Family::V3),
        (false, false) if has(Family::V3, &[]) && !has(Family::V2, &[]) => Ok(Family::V3),
        (false, false) => Ok(Family::V2),
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
    tree: &Tree,
    family: Family,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<(), Refusal> {
    if legacy_default(tree, family).is_some() {
        return if facts.containerd.major < 2 {
            Ok(())
        } else {
            Err(refusing.because(
                "sets `default_runtime`, which containerd 2 no longer reads",
                "Write it as an entry of `runtimes` and name it in `default_runtime_name`, restart containerd, then try again.",
            ))
        };
    }
    let name = default_runtime_name(tree, family);
    let written = tree.table(&family.runtimes());
    let there = match written {
        Some(entries) => entries.contains_key(name) || (facts.containerd.major >= 2 && name == "runc"),
        None => name == "runc",
    };
    if there {
        Ok(())
    } else {
        Err(refusing.because(
            format!("names {name:?} as the default runtime but has no such entry in `runtimes`: containerd's CRI would not start with it"),
            "Add the entry or change `default_runtime_name`, restart containerd, then try again.",
        ))
    }
}

pub(super) fn copied(tree: &Tree, family: Family, facts: &ConfigFacts) -> Copied {
    let legacy = legacy_default(tree, family);
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
