//! Taking the edit out again.
//!
//! A file that nobody touched since becomes byte for byte what it was. In a file that was changed, exactly our
//! tables go and every other byte stays.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use toml_edit::{Document, InlineTable, Item, Table, Value};

use super::facts::Family;
use super::insertion::{Handler, NOTE, Piece, PieceKind};
use super::tree::Tree;

/// What was noted when the edit was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditRecord {
    /// The file as it was before; `None` when there was none.
    pub before: Option<Vec<u8>>,
    /// The file as the edit left it.
    pub after: Vec<u8>,
    /// What was inserted.
    pub pieces: Vec<Piece>,
}

/// What takes the edit out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Write these bytes.
    Rewrite(Vec<u8>),
    /// Remove the file: it was made by the edit and holds nothing else.
    Delete,
    /// Nothing of ours is in it.
    NothingToDo,
}

/// Why an edit cannot be taken out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UndoError {
    /// The file cannot be read as TOML any more.
    #[error("is not valid TOML any more")]
    NotToml,
    /// Our entry has been rewritten into a form whose text cannot be told from the rest.
    #[error("writes the handler in a form that cannot be taken out without touching other settings")]
    Entangled,
}

/// Decides how what `record` put into a file is taken out of `current`. Without a record the tables are found by
/// the path of our binary.
///
/// # Errors
/// [`UndoError`] when the result would not be the current file without our entries.
pub fn undo(current: &[u8], record: Option<&EditRecord>, handler: &Handler) -> Result<Undo, UndoError> {
    if let Some(record) = record
        && record.after == current
    {
        return Ok(match &record.before {
            Some(bytes) => Undo::Rewrite(bytes.clone()),
            None => Undo::Delete,
        });
    }
    let text = std::str::from_utf8(current).map_err(|_| UndoError::NotToml)?;
    let tree = parse(text)?;
    let families = families_with(&tree, handler);
    if families.is_empty() {
        return Ok(Undo::NothingToDo);
    }
    let pieces = record.map(|record| record.pieces.as_slice()).unwrap_or(&[]);
    let runc_is_ours = pieces.iter().any(|piece| piece.kind == PieceKind::ImplicitRunc);
    let mut rest = text.to_owned();
    let (mut left, mut right) = (tree, None);
    for family in families {
        let ours = path_of(family, &handler.name);
        let runc = path_of(family, "runc");
        rest = cut(&rest, pieces, PieceKind::Handler, &ours)?;
        let cut_tree = parse(&rest)?;
        let others = cut_tree
            .table(&family.runtimes())
            .is_some_and(|entries| entries.keys().any(|name| name != "runc"));
        let mut gone = vec![ours];
        if left.get(&runc).is_some() && !others {
            if cut_tree.get(&runc).is_none() {
                // Inside braces both entries are one piece.
                gone.push(runc);
            } else if runc_is_ours {
                rest = cut(&rest, pieces, PieceKind::ImplicitRunc, &runc)?;
                gone.push(runc);
            }
        }
        let mut after = parse(&rest)?;
        for path in gone {
            left = left.without(&path);
            after = after.without(&path);
        }
        right = Some(after);
    }
    if right.is_some_and(|right| right != left) {
        return Err(UndoError::Entangled);
    }
    let made_by_us = record.is_some_and(|record| record.before.is_none());
    if made_by_us && nothing_but_version(&rest) {
        return Ok(Undo::Delete);
    }
    Ok(Undo::Rewrite(rest.into_bytes()))
}

fn parse(text: &str) -> Result<Tree, UndoError> {
    Document::parse(text)
        .map(|document| Tree::of(&document))
        .map_err(|_| UndoError::NotToml)
}

fn families_with(tree: &Tree, handler: &Handler) -> Vec<Family> {
    [Family::V1, Family::V2, Family::V3]
        .into_iter()
        .filter(|family| {
            tree.get(&path_of(*family, &handler.name))
                .and_then(|entry| entry.text(&["options", "BinaryName"]))
                == Some(handler.binary.as_str())
        })
        .collect()
}

fn path_of(family: Family, name: &str) -> Vec<&str> {
    family.runtimes().into_iter().chain([name]).collect()
}

/// Cuts the entry at `path` out: its exact text where that stands once, else its tables by their place.
fn cut(text: &str, pieces: &[Piece], kind: PieceKind, path: &[&str]) -> Result<String, UndoError> {
    for piece in pieces.iter().filter(|piece| piece.kind == kind) {
        let mut found = text.match_indices(&piece.text);
        if let (Some((at, _)), None) = (found.next(), found.next()) {
            let rest = joined(text, std::slice::from_ref(&(at..at + piece.text.len())));
            // The text may stand there and still not be the entry (in a string, say): the meaning decides.
            if let (Ok(before), Ok(after)) = (parse(text), parse(&rest))
                && after.get(path).is_none()
                && takes_only(before, after, path)
            {
                return Ok(rest);
            }
        }
    }
    let document = Document::parse(text).map_err(|_| UndoError::NotToml)?;
    let mut table = document.as_table();
    for (level, key) in path.iter().enumerate() {
        match table.get(key) {
            Some(Item::Table(inner)) => table = inner,
            Some(Item::Value(Value::InlineTable(inner))) => {
                return cut_inside(text, inner, &path[level + 1..]).ok_or(UndoError::Entangled);
            }
            _ => return Err(UndoError::Entangled),
        }
    }
    let mut ranges = Vec::new();
    collect(table, text, &mut ranges)?;
    ranges.sort_by_key(|range| range.start);
    if let Some(first) = ranges.first_mut()
        && let Some(note) = note_before(text, first.start)
    {
        first.start = note;
    }
    Ok(joined(text, &ranges))
}

/// Whether what goes from `before` to `after` is the entry at `path`, and with it at most the `runc` that stands in
/// the same braces and was written for it.
fn takes_only(before: Tree, after: Tree, path: &[&str]) -> bool {
    let mut beside = path.to_vec();
    if let Some(last) = beside.last_mut() {
        *last = "runc";
    }
    let alone = after
        .table(&path[..path.len() - 1])
        .is_none_or(|entries| entries.is_empty());
    let (before, after) = (before.without(path), after.without(path));
    before == after || alone && before.without(&beside) == after
}

/// Cuts an entry out of an inline table, with one of the commas beside it.
fn cut_inside(text: &str, mut table: &InlineTable, path: &[&str]) -> Option<String> {
    let (last, above) = path.split_last()?;
    for key in above {
        match table.get(key)? {
            Value::InlineTable(inner) => table = inner,
            _ => return None,
        }
    }
    let start = table.key(last)?.span()?.start;
    let end = table.get(last)?.span()?.end;
    let before = text[..start].trim_end();
    let after = text[end..].trim_start();
    let range = if before.ends_with(',') {
        before.len() - 1..end
    } else if let Some(behind) = after.strip_prefix(',') {
        start..text.len() - behind.trim_start_matches(' ').len()
    } else {
        start..end
    };
    let mut rest = text.to_owned();
    rest.replace_range(range, "");
    Some(rest)
}

/// Places of the header of `table`, its values and those of the tables below it, as whole lines.
fn collect(table: &Table, text: &str, ranges: &mut Vec<Range<usize>>) -> Result<(), UndoError> {
    if table.is_dotted() {
        return Err(UndoError::Entangled);
    }
    if !table.is_implicit() {
        let header = table.span().ok_or(UndoError::Entangled)?;
        ranges.push(lines(text, header.start, header.start));
    }
    for (key, item) in table.iter() {
        match item {
            Item::None => {}
            Item::Table(inner) => collect(inner, text, ranges)?,
            Item::Value(value) => {
                let start = table
                    .key(key)
                    .and_then(toml_edit::Key::span)
                    .ok_or(UndoError::Entangled)?;
                let end = value.span().ok_or(UndoError::Entangled)?;
                ranges.push(lines(text, start.start, end.end.max(start.end) - 1));
            }
            Item::ArrayOfTables(_) => return Err(UndoError::Entangled),
        }
    }
    Ok(())
}

/// The whole lines from the one with byte `first` to the one with byte `last`.
fn lines(text: &str, first: usize, last: usize) -> Range<usize> {
    let start = text[..first].rfind('\n').map_or(0, |at| at + 1);
    let end = text[last..].find('\n').map_or(text.len(), |at| last + at + 1);
    start..end
}

/// Start of what stands above our tables, if that is the note that we put there, with the empty line before it.
fn note_before(text: &str, at: usize) -> Option<usize> {
    let line_before = |at: usize| {
        let before = text[..at].strip_suffix('\n')?;
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        Some((start, before[start..].trim()))
    };
    let (note, words) = line_before(at)?;
    if words != NOTE {
        return None;
    }
    match line_before(note) {
        Some((empty, "")) => Some(empty),
        _ => Some(note),
    }
}

/// `text` without `ranges`, which are sorted. Where a cut would join two lines, their line end is kept.
fn joined(text: &str, ranges: &[Range<usize>]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    for range in ranges {
        let start = range.start.max(at);
        out.push_str(&text[at..start]);
        let cut = &text[start..range.end.max(start)];
        let rest = &text[range.end.max(start)..];
        let own_lines = cut.ends_with('\n');
        if own_lines && !out.is_empty() && !out.ends_with('\n') && !rest.is_empty() {
            out.push_str(if cut.starts_with('\r') { "\r\n" } else { "\n" });
        }
        at = range.end.max(at);
    }
    out.push_str(&text[at..]);
    out
}

fn nothing_but_version(text: &str) -> bool {
    text.lines().all(|line| {
        let line = line.trim();
        line.is_empty()
            || line
                .strip_prefix("version")
                .is_some_and(|rest| rest.trim_start().starts_with('='))
    })
}
