//! The decision: from what a configuration says to the edit that adds our handler, or a refusal.

use toml_edit::Document;

use super::check::{
    Refusing, check_enabled, check_imports, check_whose, header_version, imported, not_toml, readable, words,
};
use super::default_runtime::{check_default_runtime, copied, family};
use super::existing::{Existing, existing};
use super::facts::{ConfigFacts, Family};
use super::insertion::{self, Copied, Handler, Piece, PieceKind, Place};
use super::lines::line_at;
use super::refusal::{Refusal, RefusalKind};
use super::tree::Tree;
use super::undo::{Undo, undo};

/// What is to be done with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Change the file like this.
    Edit(ConfigEdit),
    /// The handler stands there already, as it should be.
    NothingToDo,
    /// A handler that KWasm's node installer wrote stands there. If it works it is kept as it is, without a
    /// restart; if it does not, it is replaced by ours.
    Adopt(Adoption),
}

/// A handler of KWasm's node installer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adoption {
    /// Path of its OCI runtime on the host.
    pub binary: String,
    /// What puts ours into its place.
    pub replacement: ConfigEdit,
}

/// A change of the configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigEdit {
    /// The file that is changed, as a path on the host.
    pub path: String,
    /// The file as it was; `None` when there was none.
    pub before: Option<Vec<u8>>,
    /// The file without any entry of ours: what removal brings back. It differs from `before` where an outdated
    /// entry, or one of KWasm's, is replaced.
    pub base: Option<Vec<u8>>,
    /// The file as it is to be.
    pub after: Vec<u8>,
    /// What was inserted, in the order of the file.
    pub pieces: Vec<Piece>,
    /// The ids that the text uses.
    pub family: Family,
    /// The file as containerd will read it; `None` where that is not known before its maker has made it.
    pub read: Option<Vec<u8>>,
}

/// Decides how `handler` gets into the configuration.
///
/// # Errors
/// A [`Refusal`] when an edit could not be right by construction; nothing has been touched then.
pub fn plan(facts: &ConfigFacts, handler: &Handler) -> Result<Plan, Refusal> {
    if let Some(bytes) = &facts.file {
        check_whose(bytes, &Refusing { path: &facts.path })?;
    }
    plan_generated(facts, handler)
}

/// Like [`plan`], also for a file that is generated, for who writes to what it is generated from.
pub(super) fn plan_generated(facts: &ConfigFacts, handler: &Handler) -> Result<Plan, Refusal> {
    let refusing = Refusing { path: &facts.path };
    let Some(bytes) = &facts.file else {
        return Ok(Plan::Edit(new_file(facts, handler)));
    };
    let text = readable(bytes, facts, &refusing)?;
    let document = Document::parse(text).map_err(|error| not_toml(&error, text, &refusing))?;
    let root = Tree::of(&document);
    let version = header_version(&document, &root, facts, &refusing)?;
    check_imports(&document, facts, &refusing)?;
    let mut tree = root;
    if facts.containerd.major >= 2 {
        for import in &facts.imports {
            tree.overlay(&imported(import, &refusing)?);
        }
    }
    check_enabled(&document, &tree, facts, &refusing)?;
    let family = family(&tree, version, facts);
    check_default_runtime(&document, &tree, family, facts, &refusing)?;
    let copied = copied(&tree, family, facts);
    let insert = |base: Vec<u8>| -> Result<ConfigEdit, Refusal> {
        let edit = insert(bytes, base, family, handler, &copied, facts, &refusing)?;
        prove(&edit, handler, &refusing)?;
        Ok(edit)
    };
    match existing(&document, &tree, family, handler, &copied, facts) {
        Existing::None => insert(bytes.clone()).map(Plan::Edit),
        Existing::Ours { current: true } => Ok(Plan::NothingToDo),
        Existing::Ours { current: false } => {
            insert(without(bytes, handler, "ours", &refusing)?).map(Plan::Edit)
        }
        Existing::Kwasm(theirs) => {
            let replacement = insert(without(bytes, &theirs, "KWasm's", &refusing)?)?;
            Ok(Plan::Adopt(Adoption {
                binary: theirs.binary,
                replacement,
            }))
        }
        Existing::Foreign { path, line, what } => Err(Refusing { path: &path }.of_kind(
            RefusalKind::Conflict,
            line,
            format!(
                "there is a runtime handler {:?} already that is not ours ({what})",
                handler.name
            ),
            &format!("Remove or rename that handler in {path}, restart containerd, then try again."),
        )),
    }
}

/// The file without an entry that is about to be written anew.
fn without(
    bytes: &[u8],
    handler: &Handler,
    whose: &str,
    refusing: &Refusing<'_>,
) -> Result<Vec<u8>, Refusal> {
    match undo(bytes, None, handler) {
        Ok(Undo::Rewrite(base)) => Ok(base),
        Ok(Undo::Delete | Undo::NothingToDo) | Err(_) => Err(refusing.because(
            None,
            format!(
                "the handler {:?} is {whose}, but it was changed by hand and cannot be told apart from the rest",
                handler.name
            ),
            "Remove its tables from the file, restart containerd, then try again.",
        )),
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
    let after: Vec<u8> = pieces.iter().flat_map(|piece| piece.text.bytes()).collect();
    ConfigEdit {
        path: facts.path.clone(),
        before: None,
        base: None,
        after: after.clone(),
        pieces,
        family,
        read: Some(after),
    }
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
            None,
            "the file cannot be read again after an outdated entry of the handler was taken out",
            "Remove the entry by hand, restart containerd, then try again.",
        )
    };
    let text = String::from_utf8(base).map_err(|_| broken())?;
    let document = Document::parse(text.as_str()).map_err(|_| broken())?;
    let tree = Tree::of(&document);
    let add_runc = facts.containerd.major < 2 && tree.table(&family.runtimes()).is_none();
    let place = insertion::place(&document, &text, family).map_err(|no| {
        refusing.because(
            no.at.map(|at| line_at(&text, at)),
            format!("no runtime can be added: `{}` {}", no.table, no.why),
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
        path: facts.path.clone(),
        read: Some(after.clone()),
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
            None,
            format!("the file would not mean the same with the handler added ({why})"),
            "This is a shape of file that the agent does not know; please report it, without its secrets.",
        )
    };
    let parse = |bytes: &[u8]| {
        std::str::from_utf8(bytes)
            .map_err(|error| unsafe_edit(error.to_string()))
            .and_then(|text| {
                Document::parse(text)
                    .map(|document| Tree::of(&document))
                    .map_err(|error| unsafe_edit(words(&error)))
            })
    };
    let runtimes = edit.family.runtimes();
    let ours: Vec<&str> = runtimes.iter().copied().chain([handler.name.as_str()]).collect();
    let runc: Vec<&str> = runtimes.iter().copied().chain(["runc"]).collect();
    let before = parse(edit.base.as_deref().unwrap_or_default())?;
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
