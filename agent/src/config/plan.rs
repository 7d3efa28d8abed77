//! The decision: from what a configuration says to the edit that adds our handler, or a refusal.

use std::collections::BTreeMap;

use thiserror::Error;
use toml_edit::Document;

use super::facts::{ConfigFacts, Family};
use super::insertion::{self, Copied, Handler, POD_ANNOTATIONS, Piece, PieceKind, Place, RUNTIME_TYPE};
use super::tree::Tree;
use super::undo::{Undo, undo};

const BOM: &str = "\u{feff}";

/// What is to be done with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Change the file like this.
    Edit(ConfigEdit),
    /// The handler stands there already, as it should be.
    NothingToDo,
}

/// A change of the configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigEdit {
    /// The file as it was; `None` when there was none.
    pub before: Option<Vec<u8>>,
    /// The file without any entry of ours: what removal brings back. It differs from `before` where an outdated
    /// entry is replaced.
    pub base: Option<Vec<u8>>,
    /// The file as it is to be.
    pub after: Vec<u8>,
    /// What was inserted, in the order of the file.
    pub pieces: Vec<Piece>,
    /// The ids that the text uses.
    pub family: Family,
}

/// Why a configuration is left alone.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct Refusal {
    /// The category.
    pub kind: RefusalKind,
    /// What stands where, and why it stops us.
    pub message: String,
    /// What an operator can do.
    pub remedy: String,
}

/// The category of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// No edit of this file would be safe.
    Configuration,
    /// A handler of our name is there and is not ours.
    Conflict,
}

/// Decides how `handler` gets into the configuration.
///
/// # Errors
/// A [`Refusal`] when an edit could not be right by construction; nothing has been touched then.
pub fn plan(facts: &ConfigFacts, handler: &Handler) -> Result<Plan, Refusal> {
    let refusing = Refusing { path: &facts.path };
    let Some(bytes) = &facts.file else {
        return Ok(Plan::Edit(new_file(facts, handler)));
    };
    let text = readable(bytes, facts, &refusing)?;
    let document = Document::parse(text)
        .map_err(|error| refusing.because(
            format!("is not valid TOML: {}", first_line(&error, text)),
            "Repair the file so that containerd itself accepts it (`containerd --config FILE config dump`), then try again.",
        ))?;
    let root = Tree::of(&document);
    let version = header_version(&root, facts, &refusing)?;
    check_imports(facts, &refusing)?;
    let mut tree = root.clone();
    if facts.containerd.major >= 2 {
        for import in &facts.imports {
            tree.overlay(&imported(import, &refusing)?);
        }
    }
    check_enabled(&tree, facts, &refusing)?;
    let family = family(&tree, version, facts, &refusing)?;
    check_default_runtime(&tree, family, facts, &refusing)?;
    let copied = copied(&tree, family, facts);

    let base = match existing(&tree, family, handler, &copied) {
        Existing::None => bytes.clone(),
        Existing::Ours { current: true } => return Ok(Plan::NothingToDo),
        Existing::Ours { current: false } => match undo(bytes, None, handler) {
            Ok(Undo::Rewrite(base)) => base,
            Ok(Undo::Delete | Undo::NothingToDo) | Err(_) => {
                return Err(refusing.because(
                    format!(
                        "holds a handler {:?} of ours that was changed by hand and cannot be told apart from the rest",
                        handler.name
                    ),
                    "Remove its tables from the file, restart containerd, then try again.",
                ));
            }
        },
        Existing::Foreign(what) => {
            return Err(Refusal {
                kind: RefusalKind::Conflict,
                message: format!(
                    "{} already has a runtime handler {:?} that is not ours ({what})",
                    facts.path, handler.name
                ),
                remedy: format!(
                    "Remove or rename that handler in {}, restart containerd, then try again.",
                    facts.path
                ),
            });
        }
    };
    let edit = insert(bytes, base, family, handler, &copied, facts, &refusing)?;
    prove(&edit, handler, &refusing)?;
    Ok(Plan::Edit(edit))
}

struct Refusing<'a> {
    path: &'a str,
}

impl Refusing<'_> {
    fn because(&self, what: impl AsRef<str>, remedy: &str) -> Refusal {
        Refusal {
            kind: RefusalKind::Configuration,
            message: format!("{} {}", self.path, what.as_ref()),
            remedy: remedy.to_owned(),
        }
    }
}

fn new_file(facts: &ConfigFacts, handler: &Handler) -> ConfigEdit {
    let (family, version) = if facts.containerd.major >= 2 {
        (Family::V3, 3)
    } else {
        (Family::V2, 2)
    };
    let copied = Copied {
        systemd_cgroup: facts.live_systemd_cgroup.unwrap_or(false),
        snapshotter: None,
    };
    let mut pieces = vec![Piece {
        kind: PieceKind::NewFile,
        text: format!("version = {version}\n"),
    }];
    if family == Family::V2 {
        pieces.push(Piece {
            kind: PieceKind::ImplicitRunc,
            text: format!("\n{}", insertion::runc_table(family, "\n")),
        });
    }
    pieces.push(Piece {
        kind: PieceKind::Handler,
        text: format!("\n{}", insertion::handler_tables(family, handler, &copied, "\n")),
    });
    ConfigEdit {
        before: None,
        base: None,
        after: pieces.iter().flat_map(|piece| piece.text.bytes()).collect(),
        pieces,
        family,
    }
}

fn readable<'a>(bytes: &'a [u8], facts: &ConfigFacts, refusing: &Refusing<'_>) -> Result<&'a str, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        refusing.because(
            format!("is not UTF-8 (byte {})", error.valid_up_to()),
            "Save the file as UTF-8, then try again.",
        )
    })?;
    if text.starts_with(BOM) && facts.containerd.major >= 2 {
        return Err(refusing.because(
            "begins with a byte order mark, which containerd 2 does not accept",
            "Save the file without a byte order mark, then try again.",
        ));
    }
    for line in text.lines().take_while(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#')
    }) {
        if line.contains("k0s_managed=true") {
            return Err(refusing.because(
                "belongs to k0s, which rewrites it",
                "k0s is not served yet. Install crun through /etc/k0s/containerd.d by hand.",
            ));
        }
        if line.contains("DO NOT EDIT") {
            return Err(refusing.because(
                format!(
                    "is generated and would be overwritten ({:?})",
                    line.trim().trim_start_matches('#').trim()
                ),
                "The distribution that generates it is not served yet; use its own template.",
            ));
        }
    }
    Ok(text)
}

fn first_line(error: &toml_edit::TomlError, text: &str) -> String {
    let line = error.span().map_or(0, |span| {
        text[..span.start.min(text.len())].matches('\n').count() + 1
    });
    format!(
        "line {line}: {}",
        error.message().lines().collect::<Vec<_>>().join("; ")
    )
}

fn header_version(root: &Tree, facts: &ConfigFacts, refusing: &Refusing<'_>) -> Result<i64, Refusal> {
    let version = match root.get(&["version"]) {
        None => 1,
        Some(Tree::Integer(version)) => *version,
        Some(_) => {
            return Err(refusing.because(
                "has a `version` that is not a number",
                "Set `version` to 2 or 3 as containerd's documents say, then try again.",
            ));
        }
    };
    let daemon = facts.containerd;
    match version {
        3.. if daemon.major < 2 => Err(refusing.because(
            format!("says `version = {version}`, which containerd {daemon} cannot read"),
            "Write the file in version 2, then try again.",
        )),
        ..=1 if daemon.major >= 2 => Err(refusing.because(
            format!("is of version 1, whose CRI settings containerd {daemon} does not apply"),
            "Convert it with `containerd config migrate`, check the result, restart containerd, then try again.",
        )),
        4 if daemon.major == 2 && daemon.minor < 3 => Err(refusing.because(
            format!("says `version = 4`, which containerd {daemon} cannot read"),
            "Write the file in version 3, then try again.",
        )),
        5.. => Err(refusing.because(
            format!("says `version = {version}`, which this agent does not know"),
            "Use a newer agent.",
        )),
        _ => Ok(version),
    }
}

fn check_imports(facts: &ConfigFacts, refusing: &Refusing<'_>) -> Result<(), Refusal> {
    if let Some(missing) = facts.missing_imports.first() {
        return Err(refusing.because(
            format!("imports {missing}, which does not exist: containerd would not start with it"),
            "Create that file or remove it from `imports`, then try again.",
        ));
    }
    if facts.containerd.major >= 2 {
        return Ok(());
    }
    for import in &facts.imports {
        let tree = imported(import, refusing)?;
        for family in [Family::V1, Family::V2, Family::V3] {
            if tree.get(&["plugins", family.id()]).is_some() {
                // 1.x replaces the whole CRI table by the imported one, so an edit of the root would be lost.
                return Err(refusing.because(
                    format!(
                        "imports {}, whose CRI table replaces that of the file as a whole on containerd {}",
                        import.path, facts.containerd
                    ),
                    "Move the CRI settings of that import into the main file, restart containerd, then try again.",
                ));
            }
        }
        if tree.get(&["disabled_plugins"]).is_some() {
            check_enabled(&tree, facts, refusing)?;
        }
    }
    Ok(())
}

fn imported(import: &super::ImportedFile, refusing: &Refusing<'_>) -> Result<Tree, Refusal> {
    std::str::from_utf8(&import.bytes)
        .ok()
        .and_then(|text| Document::parse(text).ok().map(|document| Tree::of(&document)))
        .ok_or_else(|| {
            refusing.because(
                format!("imports {}, which is not valid TOML", import.path),
                "Repair or remove that file so that containerd itself accepts it, then try again.",
            )
        })
}

fn check_enabled(tree: &Tree, facts: &ConfigFacts, refusing: &Refusing<'_>) -> Result<(), Refusal> {
    const SPELLINGS: [&str; 4] = [
        "cri",
        "io.containerd.grpc.v1.cri",
        "io.containerd.cri.v1.runtime",
        "io.containerd.cri.v1.images",
    ];
    if let Some(name) = tree
        .texts(&["disabled_plugins"])
        .into_iter()
        .find(|name| SPELLINGS.contains(name))
    {
        return Err(refusing.because(
            format!("disables CRI (`disabled_plugins` names {name:?}), so no kubelet uses this containerd"),
            "Take that name out of `disabled_plugins` and restart containerd, or provision the runtime that the kubelet really uses.",
        ));
    }
    for id in ["cri", Family::V2.id(), Family::V3.id()] {
        if let Some(part) = tree.get(&["plugins", id])
            && let Some(text) = part.find_text(&|text| text.contains("${") || text.contains("{{"))
        {
            return Err(refusing.because(
                format!("is a template, not what containerd reads ({text:?})"),
                "Templates are not served yet.",
            ));
        }
    }
    if matches!(tree.get(&["plugins"]), Some(Tree::Tables(_))) {
        return Err(refusing.because(
            format!(
                "writes [[plugins]], an array where containerd {} wants a table",
                facts.containerd
            ),
            "Repair the file so that containerd itself accepts it, then try again.",
        ));
    }
    Ok(())
}

fn family(
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

fn default_runtime_name(tree: &Tree, family: Family) -> &str {
    let [plugins, id, containerd, _] = family.runtimes();
    match tree.text(&[plugins, id, containerd, "default_runtime_name"]) {
        Some(name) if !name.is_empty() => name,
        _ => "runc",
    }
}

/// `containerd.default_runtime`, the form of before `runtimes`, when it says anything.
fn legacy_default(tree: &Tree, family: Family) -> Option<&Tree> {
    let [plugins, id, containerd, _] = family.runtimes();
    let entry = tree.get(&[plugins, id, containerd, "default_runtime"])?;
    entry
        .text(&["runtime_type"])
        .is_some_and(|kind| !kind.is_empty())
        .then_some(entry)
}

fn check_default_runtime(
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

fn copied(tree: &Tree, family: Family, facts: &ConfigFacts) -> Copied {
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

enum Existing {
    None,
    Ours { current: bool },
    Foreign(String),
}

fn existing(tree: &Tree, family: Family, handler: &Handler, copied: &Copied) -> Existing {
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
fn wanted(handler: &Handler, copied: &Copied) -> Tree {
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

/// Inserts into `base`, which is `bytes` unless an outdated entry of ours was taken out first.
fn insert(
    bytes: &[u8],
    base: Vec<u8>,
    family: Family,
    handler: &Handler,
    copied: &Copied,
    facts: &ConfigFacts,
    refusing: &Refusing<'_>,
) -> Result<ConfigEdit, Refusal> {
    let broken = || {
        refusing.because(
            "cannot be read again after an outdated entry of ours was taken out",
            "Remove the entry by hand, restart containerd, then try again.",
        )
    };
    let text = String::from_utf8(base).map_err(|_| broken())?;
    let document = Document::parse(text.as_str()).map_err(|_| broken())?;
    let tree = Tree::of(&document);
    let add_runc = facts.containerd.major < 2 && tree.table(&family.runtimes()).is_none();
    let place = insertion::place(&document, &text, family).map_err(|no| {
        refusing.because(
            format!("cannot take another runtime: `{}` {}", no.table, no.why),
            "Write that table as [header] tables, restart containerd, then try again.",
        )
    })?;
    let (at, pieces) = match place {
        Place::End => (text.len(), appended(&text, family, handler, copied, add_runc)),
        Place::Inside { at, depth, empty } => {
            // Inside braces the parts share commas and braces, so they are one piece.
            let mut entries = insertion::handler_entry(handler, copied);
            if add_runc {
                entries = format!("{}, {entries}", insertion::runc_entry());
            }
            let entries = insertion::nested(&entries, family, depth);
            let entries = if empty {
                format!(" {entries} ")
            } else {
                format!(", {entries}")
            };
            (
                at,
                vec![Piece {
                    kind: PieceKind::Handler,
                    text: entries,
                }],
            )
        }
    };
    let mut after = text.as_bytes()[..at].to_vec();
    for piece in &pieces {
        after.extend_from_slice(piece.text.as_bytes());
    }
    after.extend_from_slice(&text.as_bytes()[at..]);
    Ok(ConfigEdit {
        before: Some(bytes.to_vec()),
        base: Some(text.into_bytes()),
        after,
        pieces,
        family,
    })
}

fn appended(text: &str, family: Family, handler: &Handler, copied: &Copied, add_runc: bool) -> Vec<Piece> {
    let newline = insertion::newline_of(text);
    let mut lead = if text.is_empty() || text.ends_with('\n') {
        newline.to_owned()
    } else {
        newline.repeat(2)
    };
    let mut pieces = Vec::with_capacity(2);
    if add_runc {
        pieces.push(Piece {
            kind: PieceKind::ImplicitRunc,
            text: format!("{lead}{}", insertion::runc_table(family, newline)),
        });
        lead = newline.to_owned();
    }
    pieces.push(Piece {
        kind: PieceKind::Handler,
        text: format!(
            "{lead}{}",
            insertion::handler_tables(family, handler, copied, newline)
        ),
    });
    pieces
}

/// Parses the result and sees that our entries are all that was added.
fn prove(edit: &ConfigEdit, handler: &Handler, refusing: &Refusing<'_>) -> Result<(), Refusal> {
    let unsafe_edit = |why: String| {
        refusing.because(
            format!("would not mean the same with the handler added ({why})"),
            "This is a shape of file that the agent does not know; please report it, without its secrets.",
        )
    };
    let parse = |bytes: &[u8]| {
        std::str::from_utf8(bytes)
            .map_err(|error| unsafe_edit(error.to_string()))
            .and_then(|text| {
                Document::parse(text)
                    .map(|document| Tree::of(&document))
                    .map_err(|error| unsafe_edit(first_line(&error, text)))
            })
    };
    let runtimes = edit.family.runtimes();
    let ours: Vec<&str> = runtimes.iter().copied().chain([handler.name.as_str()]).collect();
    let runc: Vec<&str> = runtimes.iter().copied().chain(["runc"]).collect();
    let before = parse(edit.before.as_deref().unwrap_or_default())?;
    let after = parse(&edit.after)?;
    if after.get(&ours).is_none() {
        return Err(unsafe_edit("the handler is not where it should be".into()));
    }
    let (mut left, mut right) = (before.clone().without(&ours), after.without(&ours));
    if before.get(&runc).is_none() {
        left = left.without(&runc);
        right = right.without(&runc);
    }
    if left != right {
        return Err(unsafe_edit("something else changed".into()));
    }
    Ok(())
}
