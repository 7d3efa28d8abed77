//! Our tables as lines of a text that need not be TOML: a template, which only whoever renders it understands.

use std::ops::Range;

use super::facts::Family;
use super::insertion::{Handler, NOTE, RUNC_NOTE, handler_header, runc_header};

/// The stretches of whole lines that are ours, with the empty line before each.
pub(super) fn ranges(text: &str, handler: &Handler) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut lines = Lines::of(text).peekable();
    let mut empty: Option<usize> = None;
    while let Some(line) = lines.next() {
        let before = empty.take();
        let words = line.words;
        if words.is_empty() {
            empty = Some(line.start);
            continue;
        }
        if words != NOTE && words != RUNC_NOTE {
            continue;
        }
        let mut end = line.end;
        let mut names_us = words == RUNC_NOTE;
        while let Some(next) = lines.next_if(|next| belongs(next.words, words == NOTE, handler)) {
            end = next.end;
            names_us |= next.words.starts_with("BinaryName") && next.words.contains(&handler.binary);
        }
        if names_us && end > line.end {
            found.push(before.unwrap_or(line.start)..end);
        }
    }
    // A runc that we added goes only together with the handler that it was added for.
    if found.iter().all(|range| !text[range.clone()].contains(NOTE)) {
        found.clear();
    }
    found
}

/// `text` without these stretches; the line end that our text put after a last line without one goes along.
pub(super) fn without(text: &str, ranges: &[Range<usize>]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    for range in ranges {
        out.push_str(&text[at..range.start]);
        at = range.end;
    }
    out.push_str(&text[at..]);
    out
}

/// Whether there is nothing in a text but what is ours.
pub(super) fn is_only(text: &str, handler: &Handler) -> bool {
    without(text, &ranges(text, handler)).trim().is_empty()
}

fn belongs(words: &str, is_handler: bool, handler: &Handler) -> bool {
    let families = [Family::V1, Family::V2, Family::V3];
    if !is_handler {
        return words.starts_with("runtime_type =")
            || families
                .iter()
                .any(|family| words == format!("[{}]", runc_header(*family)));
    }
    [
        "runtime_type =",
        "pod_annotations =",
        "snapshotter =",
        "BinaryName =",
        "SystemdCgroup =",
    ]
    .iter()
    .any(|key| words.starts_with(key))
        || families.iter().any(|family| {
            let header = handler_header(*family, &handler.name);
            words == format!("[{header}]") || words == format!("[{header}.options]")
        })
}

struct Line<'a> {
    start: usize,
    end: usize,
    words: &'a str,
}

struct Lines<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Self {
        Self { text, at: 0 }
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = Line<'a>;

    fn next(&mut self) -> Option<Line<'a>> {
        let rest = self.text.get(self.at..).filter(|rest| !rest.is_empty())?;
        let start = self.at;
        let end = rest.find('\n').map_or(self.text.len(), |at| start + at + 1);
        self.at = end;
        Some(Line {
            start,
            end,
            words: self.text[start..end].trim(),
        })
    }
}
