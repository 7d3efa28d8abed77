//! A TOML document as plain values, to look things up in and to compare two documents by meaning.

use std::collections::BTreeMap;

use toml_edit::{Document, InlineTable, Item, Table, Value};

/// A TOML value without its spelling.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tree {
    Table(BTreeMap<String, Tree>),
    /// `[[name]]`, kept apart from a plain array because containerd refuses it where it wants a table.
    Tables(Vec<Tree>),
    Array(Vec<Tree>),
    Text(String),
    Integer(i64),
    /// By its bits, so that a document with NaN equals itself.
    Float(u64),
    Boolean(bool),
    Moment(String),
}

impl Tree {
    /// Reads a document; `None` when it is not TOML.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        Some(Self::of(&Document::parse(text).ok()?))
    }

    pub(crate) fn of(document: &Document<&str>) -> Self {
        table(document.as_table())
    }

    /// The value at `path`, if every key of it is there.
    pub(crate) fn get(&self, path: &[&str]) -> Option<&Tree> {
        path.iter().try_fold(self, |tree, key| match tree {
            Self::Table(entries) => entries.get(*key),
            _ => None,
        })
    }

    pub(crate) fn text(&self, path: &[&str]) -> Option<&str> {
        match self.get(path) {
            Some(Self::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn boolean(&self, path: &[&str]) -> Option<bool> {
        match self.get(path) {
            Some(Self::Boolean(value)) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn table(&self, path: &[&str]) -> Option<&BTreeMap<String, Tree>> {
        match self.get(path) {
            Some(Self::Table(entries)) => Some(entries),
            _ => None,
        }
    }

    /// Strings of the array at `path`; anything else in it is left out.
    pub(crate) fn texts(&self, path: &[&str]) -> Vec<&str> {
        match self.get(path) {
            Some(Self::Array(values)) => values
                .iter()
                .filter_map(|value| match value {
                    Self::Text(text) => Some(text.as_str()),
                    _ => None,
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Lays `other` over this one, table by table, as containerd 2.x does with an imported file.
    pub(crate) fn overlay(&mut self, other: &Tree) {
        match (self, other) {
            (Self::Table(mine), Self::Table(theirs)) => {
                for (key, value) in theirs {
                    match mine.get_mut(key) {
                        Some(existing) => existing.overlay(value),
                        None => {
                            mine.insert(key.clone(), value.clone());
                        }
                    }
                }
            }
            (mine, theirs) => *mine = theirs.clone(),
        }
    }

    /// Takes out what stands at `path`, and the tables above it that hold nothing any more.
    ///
    /// Tables that only a header of ours brought into being vanish with it; an empty table means the same to
    /// containerd as none, so both sides of a comparison are pruned alike.
    pub(crate) fn without(mut self, path: &[&str]) -> Self {
        self.cut(path);
        self
    }

    fn cut(&mut self, path: &[&str]) {
        let (Self::Table(entries), Some((key, rest))) = (self, path.split_first()) else {
            return;
        };
        if rest.is_empty() {
            entries.remove(*key);
            return;
        }
        if let Some(child) = entries.get_mut(*key) {
            child.cut(rest);
            if matches!(child, Self::Table(inner) if inner.is_empty()) {
                entries.remove(*key);
            }
        }
    }

    /// The first text anywhere in the document that `test` holds for.
    pub(crate) fn find_text(&self, test: &dyn Fn(&str) -> bool) -> Option<&str> {
        match self {
            Self::Text(text) => test(text).then_some(text.as_str()),
            Self::Table(entries) => entries.values().find_map(|value| value.find_text(test)),
            Self::Array(values) | Self::Tables(values) => {
                values.iter().find_map(|value| value.find_text(test))
            }
            _ => None,
        }
    }
}

fn table(table: &Table) -> Tree {
    Tree::Table(
        table
            .iter()
            .filter(|(_, item)| !item.is_none())
            .map(|(key, item)| (key.to_owned(), self::item(item)))
            .collect(),
    )
}

fn inline(table: &InlineTable) -> Tree {
    Tree::Table(
        table
            .iter()
            .map(|(key, item)| (key.to_owned(), value(item)))
            .collect(),
    )
}

fn item(item: &Item) -> Tree {
    match item {
        Item::None => Tree::Table(BTreeMap::new()),
        Item::Value(inner) => value(inner),
        Item::Table(inner) => table(inner),
        Item::ArrayOfTables(tables) => Tree::Tables(tables.iter().map(table).collect()),
    }
}

fn value(value: &Value) -> Tree {
    match value {
        Value::String(text) => Tree::Text(text.value().clone()),
        Value::Integer(number) => Tree::Integer(*number.value()),
        Value::Float(number) => Tree::Float(number.value().to_bits()),
        Value::Boolean(value) => Tree::Boolean(*value.value()),
        Value::Datetime(moment) => Tree::Moment(moment.value().to_string()),
        Value::Array(values) => Tree::Array(values.iter().map(self::value).collect()),
        Value::InlineTable(entries) => inline(entries),
    }
}
