//! Where the edit goes when containerd's own file is made from another: a template, or a file that is taken in.
//!
//! What containerd reads decides what the edit is; the text then goes to where whoever makes that file takes it
//! from. A template is not understood, only added to: every byte of it stays.

use toml_edit::Document;

use super::block;
use super::check::{Refusing, check_enabled, imported};
use super::default_runtime::{check_default_runtime, copied};
use super::existing::{Existing, existing};
use super::facts::{ConfigFacts, Family};
use super::insertion::{self, Handler, Piece, PieceKind};
use super::plan::{ConfigEdit, Plan, plan_generated};
use super::refusal::{Refusal, RefusalKind};
use super::tree::Tree;
use super::undo::{EditRecord, Undo, UndoError, undo};

/// The file that is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The one that containerd reads.
    InPlace,
    /// A template that it is rendered from at every start. What is added to its end stands at the end of what is
    /// rendered.
    Template {
        /// Absolute path on the host.
        path: String,
        /// What is in it; `None` where there is none yet.
        bytes: Option<Vec<u8>>,
        /// How one begins that is not there yet.
        beginning: &'static str,
        /// What a handler of our name in the rendered file means here, for who has to do something about it.
        foreign: &'static str,
    },
    /// A file of our own, in a folder that the distribution watches.
    DropIn {
        /// Absolute path on the host.
        path: String,
        /// What is in it; `None` where there is none yet.
        bytes: Option<Vec<u8>>,
    },
}

impl Written {
    /// The path that is written, where it is not that of the file that containerd reads.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::InPlace => None,
            Self::Template { path, .. } | Self::DropIn { path, .. } => Some(path),
        }
    }
}

/// Decides how `handler` gets into the configuration, by the file that is written.
///
/// # Errors
/// A [`Refusal`], as [`super::plan`] gives it.
pub fn plan_written(facts: &ConfigFacts, written: &Written, handler: &Handler) -> Result<Plan, Refusal> {
    match written {
        Written::InPlace => super::plan(facts, handler),
        Written::Template {
            path,
            bytes,
            beginning,
            foreign,
        } => template(facts, path, bytes.as_deref(), beginning, handler).map_err(|mut refusal| {
            if refusal.kind == RefusalKind::Conflict {
                (*foreign).clone_into(&mut refusal.remedy);
            }
            refusal
        }),
        Written::DropIn { path, bytes } => drop_in(facts, path, bytes.as_deref(), handler),
    }
}

fn template(
    facts: &ConfigFacts,
    path: &str,
    bytes: Option<&[u8]>,
    beginning: &str,
    handler: &Handler,
) -> Result<Plan, Refusal> {
    let refusing = Refusing { path };
    if facts.file.is_none() {
        return Err(Refusing { path: &facts.path }.because(
            None,
            "the file has not been rendered yet, so nothing tells what containerd reads",
            "Start the distribution's service once, then try again.",
        ));
    }
    let text = std::str::from_utf8(bytes.unwrap_or_default()).map_err(|error| {
        refusing.because(
            None,
            format!("the template is not UTF-8 (byte {})", error.valid_up_to()),
            "Save the file as UTF-8, then try again.",
        )
    })?;
    let ours = block::ranges(text, handler);
    let edit = match plan_generated(facts, handler)? {
        Plan::Edit(edit) => edit,
        // Rendered before somebody took it out of the template: it would be gone after the next start.
        Plan::NothingToDo if ours.is_empty() => again(facts, handler, &refusing)?,
        Plan::NothingToDo => return Ok(Plan::NothingToDo),
        // KWasm's installer wrote into the rendered file, which the next start renders anew without it.
        Plan::Adopt(adoption) => adoption.replacement,
    };
    if !edit.after.starts_with(edit.base.as_deref().unwrap_or_default()) {
        return Err(refusing.because(
            None,
            "the rendered file has its runtimes in an inline table, which text at the end of the template can't add to",
            "Write that table as [header] tables in the template, then try again.",
        ));
    }
    let base = block::without(text, &ours);
    let start = if bytes.is_some() { base.as_str() } else { beginning };
    let newline = insertion::newline_of(start);
    let lead = if start.is_empty() || start.ends_with('\n') {
        ""
    } else {
        newline
    };
    let mut pieces = Vec::with_capacity(edit.pieces.len());
    for piece in edit.pieces {
        let body = piece.text.trim_start_matches(['\r', '\n']).replace("\r\n", "\n");
        let first = if pieces.is_empty() { lead } else { "" };
        pieces.push(Piece {
            text: format!("{first}{newline}{}", body.replace('\n', newline)),
            ..piece
        });
    }
    let added: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    Ok(Plan::Edit(ConfigEdit {
        path: path.to_owned(),
        before: bytes.map(<[u8]>::to_vec),
        base: bytes.map(|_| base.clone().into_bytes()),
        after: format!("{start}{added}").into_bytes(),
        pieces,
        family: edit.family,
        read: Some(edit.after),
    }))
}

/// The edit of a rendered file that has our handler already, as if it had not.
fn again(facts: &ConfigFacts, handler: &Handler, refusing: &Refusing<'_>) -> Result<ConfigEdit, Refusal> {
    let bytes = facts.file.as_deref().unwrap_or_default();
    let planned = match undo(bytes, None, handler) {
        Ok(Undo::Rewrite(rest)) => plan_generated(
            &ConfigFacts {
                file: Some(rest),
                ..facts.clone()
            },
            handler,
        )?,
        _ => Plan::NothingToDo,
    };
    match planned {
        Plan::Edit(edit) => Ok(edit),
        _ => Err(refusing.because(
            None,
            "the rendered file has our handler in a form that the template does not explain",
            "Restart the distribution's service, so that the file is rendered anew, then try again.",
        )),
    }
}

/// The drop-in that k0s takes in by itself. What it imports is laid over the rest on any version.
fn drop_in(
    facts: &ConfigFacts,
    path: &str,
    bytes: Option<&[u8]>,
    handler: &Handler,
) -> Result<Plan, Refusal> {
    let refusing = Refusing { path: &facts.path };
    let empty = Document::parse("").map_err(|error| super::check::not_toml(&error, "", &refusing))?;
    let root = facts
        .file
        .as_deref()
        .and_then(|file| Document::parse(std::str::from_utf8(file).ok()?).ok());
    let document = root.as_ref().unwrap_or(&empty);
    let mut tree = Tree::of(document);
    for import in facts.imports.iter().filter(|import| import.path != path) {
        tree.overlay(&imported(import, &refusing)?);
    }
    check_enabled(document, &tree, facts, &refusing)?;
    let family = if facts.containerd.major >= 2 {
        Family::V3
    } else {
        Family::V2
    };
    check_default_runtime(document, &tree, family, facts, &refusing)?;
    let copied = copied(&tree, family, facts);
    let others = ConfigFacts {
        imports: facts
            .imports
            .iter()
            .filter(|import| import.path != path)
            .cloned()
            .collect(),
        ..facts.clone()
    };
    match existing(document, &tree, family, handler, &copied, &others) {
        Existing::None => {}
        Existing::Ours { .. } | Existing::Kwasm(_) | Existing::Foreign { .. } => {
            let (path, line, what) = match existing(document, &tree, family, handler, &copied, &others) {
                Existing::Foreign { path, line, what } => (path, line, what),
                _ => (facts.path.clone(), None, "it stands in another file".to_owned()),
            };
            return Err(Refusing { path: &path }.of_kind(
                RefusalKind::Conflict,
                line,
                format!(
                    "there is a runtime handler {:?} already that is not ours ({what})",
                    handler.name
                ),
                &format!("Remove or rename that handler in {path}, then try again."),
            ));
        }
    }
    let mut pieces = Vec::with_capacity(2);
    if facts.containerd.major < 2 && tree.table(&family.runtimes()).is_none() {
        pieces.push(Piece {
            kind: PieceKind::ImplicitRunc,
            text: format!("{}\n", insertion::runc_table(family, "\n")),
        });
    }
    pieces.push(Piece {
        kind: PieceKind::Handler,
        text: insertion::handler_tables(family, handler, &copied, "\n"),
    });
    let after: Vec<u8> = pieces.iter().flat_map(|piece| piece.text.bytes()).collect();
    match bytes {
        Some(bytes) if bytes == after => return Ok(Plan::NothingToDo),
        Some(bytes) if !block::is_only(&String::from_utf8_lossy(bytes), handler) => {
            return Err(Refusing { path }.because(
                None,
                "the file is named like ours and holds something else",
                "Move it to another name in the same folder, then try again.",
            ));
        }
        _ => {}
    }
    Ok(Plan::Edit(ConfigEdit {
        path: path.to_owned(),
        before: bytes.map(<[u8]>::to_vec),
        base: None,
        after,
        pieces,
        family,
        read: None,
    }))
}

/// Decides how the edit is taken out of `current`, by the file that was written.
///
/// # Errors
/// [`UndoError`], as [`undo`] gives it.
pub fn undo_written(
    current: &[u8],
    written: &Written,
    record: Option<&EditRecord>,
    handler: &Handler,
) -> Result<Undo, UndoError> {
    let beginning = match written {
        Written::InPlace => return undo(current, record, handler),
        Written::Template { beginning, .. } => *beginning,
        Written::DropIn { .. } => "",
    };
    if let Some(record) = record
        && record.after == current
    {
        return Ok(record.before.clone().map_or(Undo::Delete, Undo::Rewrite));
    }
    let text = std::str::from_utf8(current).map_err(|_| UndoError::NotToml)?;
    let ranges = block::ranges(text, handler);
    if ranges.is_empty() {
        return Ok(Undo::NothingToDo);
    }
    let rest = block::without(text, &ranges);
    let made_by_us = record.is_none_or(|record| record.before.is_none());
    if made_by_us && rest.trim() == beginning.trim() {
        return Ok(Undo::Delete);
    }
    Ok(Undo::Rewrite(rest.into_bytes()))
}
