//! The text that goes into a configuration, and the place where it goes.
//!
//! Text is inserted, nothing is rewritten: every byte that was there stays. As a rule the tables are appended;
//! where one of the tables above them is written inline, a header of the same name would be a duplicate, so the
//! entry goes inside its braces.

use serde::{Deserialize, Serialize};
use toml_edit::{Document, InlineTable, Item, Value};

use super::facts::Family;

/// The first line of what is appended, for the person who reads the file.
pub(crate) const NOTE: &str =
    "# Added by quartermaster-agent; `quartermaster-agent uninstall` takes it out again.";

/// The first line of the `runc` that is written down for containerd 1.x.
pub(crate) const RUNC_NOTE: &str =
    "# containerd 1.x has this entry by itself only while no other is written down.";

/// The runtime type of every entry that we write.
pub(crate) const RUNTIME_TYPE: &str = "io.containerd.runc.v2";
/// Annotations that containerd hands down to crun: with one of them crun runs a module instead of a binary.
pub(crate) const POD_ANNOTATIONS: [&str; 2] = ["module.wasm.image/variant", "run.oci.handler"];

/// The handler as it must stand in the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handler {
    /// Name that a RuntimeClass refers to.
    pub name: String,
    /// Absolute path of the OCI runtime on the host.
    pub binary: String,
}

/// One inserted stretch of text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// What the text is for.
    pub kind: PieceKind,
    /// The text as it stands in the file.
    pub text: String,
}

/// What an inserted stretch of text is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PieceKind {
    /// Our handler.
    Handler,
    /// The `runc` that containerd 1.x forgets as soon as a `runtimes` table exists.
    ImplicitRunc,
    /// Header of a file that did not exist.
    NewFile,
}

/// Our entry's variable parts, copied from the default runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) systemd_cgroup: bool,
    pub(crate) snapshotter: Option<String>,
}

/// Where text can go in.
pub(crate) enum Place {
    /// At the end, as header tables.
    End,
    /// Before the closing brace of an inline table that stands for the first `depth` keys of the path of
    /// `runtimes`; `at` is the byte offset, `empty` whether there is nothing between its braces.
    Inside { at: usize, depth: usize, empty: bool },
}

/// Why no text can go in.
pub(crate) struct NoPlace {
    pub(crate) table: String,
    pub(crate) why: &'static str,
    /// Byte offset of what is in the way.
    pub(crate) at: Option<usize>,
}

/// Finds the place for an entry of `runtimes`, from the deepest table of its path that exists.
pub(crate) fn place(document: &Document<&str>, text: &str, family: Family) -> Result<Place, NoPlace> {
    let path = family.runtimes();
    let refuse = |depth: usize, at: Option<usize>, why| {
        Err(NoPlace {
            table: path[..depth].join("."),
            why,
            at,
        })
    };
    let mut table = document.as_table();
    for (level, key) in path.iter().enumerate() {
        let place = table.key(key).and_then(toml_edit::Key::span);
        let start = place.as_ref().map(|span| span.start);
        let written = place.and_then(|span| text.get(span));
        if written.is_some_and(|written| written.contains('\\')) {
            return refuse(
                level + 1,
                start,
                "has an escape in its name, which containerd 1.x does not decode",
            );
        }
        match table.get(key) {
            None | Some(Item::None) => return Ok(Place::End),
            Some(Item::Table(inner)) => table = inner,
            Some(Item::Value(Value::InlineTable(inner))) => {
                let (inner, depth) = deepest(inner, &path, level + 1);
                if inner.is_dotted() {
                    return refuse(depth, start, "is written with dotted keys inside an inline table");
                }
                let Some(span) = inner.span() else {
                    return refuse(depth, start, "has no place in the text");
                };
                let body = text.get(span.start + 1..span.end - 1).unwrap_or_default();
                let written = body.trim_end();
                if written.contains('\n') || written.ends_with(',') {
                    return refuse(
                        depth,
                        start,
                        "is an inline table over several lines or with a trailing comma",
                    );
                }
                return Ok(Place::Inside {
                    at: span.start + 1 + written.len(),
                    depth,
                    empty: written.trim().is_empty(),
                });
            }
            Some(Item::ArrayOfTables(_)) => {
                return refuse(level + 1, start, "is an array of tables, written with [[ ]]");
            }
            Some(Item::Value(_)) => return refuse(level + 1, start, "is a value, not a table"),
        }
    }
    Ok(Place::End)
}

fn deepest<'a>(mut table: &'a InlineTable, path: &[&str], mut depth: usize) -> (&'a InlineTable, usize) {
    while let Some(Value::InlineTable(inner)) = path.get(depth).and_then(|key| table.get(key)) {
        table = inner;
        depth += 1;
    }
    (table, depth)
}

/// Header tables for our handler, each line ended by `newline`.
pub(crate) fn handler_tables(family: Family, handler: &Handler, copied: &Copied, newline: &str) -> String {
    let header = handler_header(family, &handler.name);
    let mut lines = vec![
        NOTE.to_owned(),
        format!("[{header}]"),
        format!("  runtime_type = \"{RUNTIME_TYPE}\""),
        format!("  pod_annotations = [{}]", annotations()),
    ];
    if let Some(snapshotter) = &copied.snapshotter {
        lines.push(format!("  snapshotter = {}", quoted(snapshotter)));
    }
    lines.push(format!("  [{header}.options]"));
    lines.push(format!("    BinaryName = {}", quoted(&handler.binary)));
    lines.push(format!("    SystemdCgroup = {}", copied.systemd_cgroup));
    join(&lines, newline)
}

/// Header table for the `runc` that was implicit.
pub(crate) fn runc_table(family: Family, newline: &str) -> String {
    join(
        &[
            RUNC_NOTE.to_owned(),
            format!("[{}]", runc_header(family)),
            format!("  runtime_type = \"{RUNTIME_TYPE}\""),
        ],
        newline,
    )
}

/// Our handler as the entry of an inline table.
pub(crate) fn handler_entry(handler: &Handler, copied: &Copied) -> String {
    let snapshotter = copied
        .snapshotter
        .as_deref()
        .map(|name| format!("snapshotter = {}, ", quoted(name)))
        .unwrap_or_default();
    format!(
        "{} = {{ runtime_type = \"{RUNTIME_TYPE}\", pod_annotations = [{}], {snapshotter}options = {{ BinaryName = {}, SystemdCgroup = {} }} }}",
        handler.name,
        annotations(),
        quoted(&handler.binary),
        copied.systemd_cgroup
    )
}

/// The implicit `runc` as the entry of an inline table.
pub(crate) fn runc_entry() -> String {
    format!("runc = {{ runtime_type = \"{RUNTIME_TYPE}\" }}")
}

/// Wraps entries of `runtimes` in the tables that are still missing below `depth`.
pub(crate) fn nested(entries: &str, family: Family, depth: usize) -> String {
    family.runtimes()[depth..]
        .iter()
        .rev()
        .fold(entries.to_owned(), |inner, key| {
            format!("{} = {{ {inner} }}", bare_or_quoted(key))
        })
}

/// The line end that a text uses: that of its first line, `\n` where it has none.
pub(crate) fn newline_of(text: &str) -> &'static str {
    match text.find('\n') {
        Some(at) if text[..at].ends_with('\r') => "\r\n",
        _ => "\n",
    }
}

/// What stands between the brackets above the `runc` that is written down.
pub(crate) fn runc_header(family: Family) -> String {
    handler_header(family, "runc")
}

/// What stands between the brackets above a runtime's table.
pub(crate) fn handler_header(family: Family, name: &str) -> String {
    let mut keys: Vec<String> = family.runtimes().iter().map(|key| bare_or_quoted(key)).collect();
    keys.push(bare_or_quoted(name));
    keys.join(".")
}

fn annotations() -> String {
    POD_ANNOTATIONS.map(quoted).join(", ")
}

fn bare_or_quoted(key: &str) -> String {
    let bare = key
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if bare { key.to_owned() } else { quoted(key) }
}

/// A basic string. What comes here are paths and names; a control character in one of them is escaped.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn join(lines: &[String], newline: &str) -> String {
    let mut text = lines.join(newline);
    text.push_str(newline);
    text
}
