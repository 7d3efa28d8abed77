//! Where something stands in a file, as the number of its line: an operator opens the file there.

use toml_edit::{Array, Document, InlineTable, Item, Table, Value};

/// The number of the line, counted from 1, in which byte `at` of `text` stands.
pub(crate) fn line_at(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or(text.as_bytes());
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

/// The line in which the last key of `path` stands; `None` where the file does not hold it.
pub(crate) fn line_of(document: &Document<&str>, path: &[&str]) -> Option<usize> {
    let text = document.raw();
    let mut table: &dyn Keyed = document.as_table();
    let (last, above) = path.split_last()?;
    for key in above {
        table = table.below(key)?;
    }
    table.start(last).map(|at| line_at(text, at))
}

/// The line of the first string of the file below `path` that `test` holds for.
pub(crate) fn line_of_text(
    document: &Document<&str>,
    path: &[&str],
    test: &dyn Fn(&str) -> bool,
) -> Option<usize> {
    let mut item = document.as_item();
    for key in path {
        item = item.get(key)?;
    }
    in_item(item, test).map(|at| line_at(document.raw(), at))
}

trait Keyed {
    fn below(&self, key: &str) -> Option<&dyn Keyed>;
    fn start(&self, key: &str) -> Option<usize>;
}

impl Keyed for Table {
    fn below(&self, key: &str) -> Option<&dyn Keyed> {
        match self.get(key)? {
            Item::Table(inner) => Some(inner),
            Item::Value(Value::InlineTable(inner)) => Some(inner),
            _ => None,
        }
    }

    fn start(&self, key: &str) -> Option<usize> {
        // A table's own header tells more than the first header that its key is part of.
        let header = match self.get(key)? {
            Item::Table(inner) if !inner.is_implicit() => inner.span(),
            Item::ArrayOfTables(tables) => tables.get(0).and_then(Table::span),
            _ => None,
        };
        let start = header.or_else(|| self.key(key)?.span())?.start;
        Some(start)
    }
}

impl Keyed for InlineTable {
    fn below(&self, key: &str) -> Option<&dyn Keyed> {
        match self.get(key)? {
            Value::InlineTable(inner) => Some(inner),
            _ => None,
        }
    }

    fn start(&self, key: &str) -> Option<usize> {
        Some(self.key(key)?.span()?.start)
    }
}

fn in_item(item: &Item, test: &dyn Fn(&str) -> bool) -> Option<usize> {
    match item {
        Item::None => None,
        Item::Value(value) => in_value(value, test),
        Item::Table(table) => table.iter().filter_map(|(_, item)| in_item(item, test)).min(),
        Item::ArrayOfTables(tables) => tables
            .iter()
            .flat_map(|table| table.iter())
            .filter_map(|(_, item)| in_item(item, test))
            .min(),
    }
}

fn in_value(value: &Value, test: &dyn Fn(&str) -> bool) -> Option<usize> {
    match value {
        Value::String(text) if test(text.value()) => text.span().map(|span| span.start),
        Value::Array(values) => in_array(values, test),
        Value::InlineTable(table) => table.iter().find_map(|(_, value)| in_value(value, test)),
        _ => None,
    }
}

fn in_array(values: &Array, test: &dyn Fn(&str) -> bool) -> Option<usize> {
    values.iter().find_map(|value| in_value(value, test))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "version = 2\nimports = [\n  \"a\",\n  \"b\",\n]\n[plugins.cri.containerd.runtimes.crun.options]\nx = 1\n[plugins.cri.containerd.runtimes.crun]\n[plugins.opt]\np = { q = { r = 's' } }\n[[z]]\n";

    #[test]
    fn a_key_is_found_in_headers_values_and_inline_tables() {
        let document = Document::parse(FILE).unwrap();
        for (path, line) in [
            (&["version"][..], 1),
            (&["imports"], 2),
            (&["plugins", "cri", "containerd", "runtimes", "crun"], 8),
            (&["plugins", "cri", "containerd", "runtimes"], 6),
            (&["plugins", "opt", "p", "q", "r"], 10),
            (&["z"], 11),
        ] {
            assert_eq!(line_of(&document, path), Some(line), "{path:?}");
        }
        assert_eq!(line_of(&document, &["plugins", "none"]), None);
        assert_eq!(line_of(&document, &["version", "none"]), None);
    }

    #[test]
    fn a_string_is_found_by_what_it_says() {
        let document = Document::parse(FILE).unwrap();
        assert_eq!(
            line_of_text(&document, &["imports"], &|text| text == "b"),
            Some(4)
        );
        assert_eq!(
            line_of_text(&document, &["plugins"], &|text| text == "s"),
            Some(10)
        );
        assert_eq!(line_of_text(&document, &["plugins"], &|text| text == "t"), None);
    }
}
