//! How things look: colours, widths and tables. Everything that renders takes a [`Look`], so that what a person sees can
//! be tested without one.

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, presets};
use console::{Style, Term, measure_text_width};

/// Between two columns.
const PADDING: u16 = 3;
const GAP: usize = PADDING as usize;
/// A last column that is narrower can't be read.
const LEAST: usize = 24;

/// What the terminal can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// Colours are seen.
    pub colours: bool,
    /// Columns of the terminal; without a terminal there is no bound.
    pub width: Option<u16>,
}

/// How much a word asks for attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// As it should be.
    Good,
    /// Something is under way, or waits.
    Busy,
    /// Something is wrong.
    Bad,
    /// Nothing to see.
    Dim,
    /// Any other word.
    Plain,
}

impl Look {
    /// Of standard output.
    pub(crate) fn of_stdout() -> Self {
        Self::of(&Term::stdout(), console::colors_enabled())
    }

    /// Of standard error.
    pub(crate) fn of_stderr() -> Self {
        Self::of(&Term::stderr(), console::colors_enabled_stderr())
    }

    fn of(terminal: &Term, colours: bool) -> Self {
        Self {
            colours,
            width: terminal
                .is_term()
                .then(|| terminal.size().1)
                .filter(|width| *width > 0),
        }
    }

    /// No colours, and this many columns.
    #[cfg(test)]
    pub(crate) fn plain(width: Option<u16>) -> Self {
        Self {
            colours: false,
            width,
        }
    }

    /// A text in a tone.
    pub(crate) fn paint(self, tone: Tone, text: &str) -> String {
        let style = match tone {
            Tone::Good => Style::new().green(),
            Tone::Busy => Style::new().yellow(),
            Tone::Bad => Style::new().red(),
            Tone::Dim => Style::new().dim(),
            Tone::Plain => return text.to_owned(),
        };
        style.force_styling(self.colours).apply_to(text).to_string()
    }

    /// A text that is looked for.
    pub(crate) fn strong(self, text: &str) -> String {
        Style::new()
            .bold()
            .force_styling(self.colours)
            .apply_to(text)
            .to_string()
    }

    /// A unified diff.
    pub(crate) fn diff(self, diff: &str) -> String {
        let line = |line: &str| match line.as_bytes().first() {
            _ if line.starts_with("+++ ") || line.starts_with("--- ") => self.strong(line),
            Some(b'+') => self.paint(Tone::Good, line),
            Some(b'-') => self.paint(Tone::Bad, line),
            Some(b'@') => self.paint(Tone::Dim, line),
            _ => line.to_owned(),
        };
        diff.lines().map(|text| line(text) + "\n").collect()
    }

    /// A text broken to the width, each line indented by so many columns.
    pub(crate) fn wrapped(self, text: &str, indent: usize) -> String {
        let width = self.width.map_or(usize::MAX, |width| {
            usize::from(width).saturating_sub(indent).max(20)
        });
        let margin = " ".repeat(indent);
        let mut lines: Vec<String> = Vec::new();
        for paragraph in text.lines() {
            if measure_text_width(paragraph) <= width {
                lines.push(paragraph.to_owned());
                continue;
            }
            let mut line = String::new();
            for word in paragraph.split_whitespace() {
                let longer = measure_text_width(&line) + 1 + measure_text_width(word);
                if !line.is_empty() && longer > width {
                    lines.push(std::mem::take(&mut line));
                }
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
            lines.push(line);
        }
        lines
            .iter()
            .map(|line| format!("{margin}{line}").trim_end().to_owned() + "\n")
            .collect()
    }

    /// A table whose last column takes what room is left, as kubectl's but for the colours. A column in which nothing
    /// stands is left out.
    pub(crate) fn table(self, header: &[&str], mut rows: Vec<Vec<(Tone, String)>>) -> String {
        let empty = |place: &usize| {
            rows.iter()
                .all(|row| row.get(*place).is_none_or(|(_, text)| text.is_empty()))
        };
        let kept: Vec<usize> = (0..header.len()).filter(|place| !empty(place)).collect();
        let header: Vec<&str> = kept.iter().map(|place| header[*place]).collect();
        for row in &mut rows {
            *row = kept.iter().filter_map(|place| row.get(*place).cloned()).collect();
        }
        let last = header.len().saturating_sub(1);
        let others: usize = (0..last)
            .map(|place| {
                let cells = rows.iter().map(|row| measure_text_width(&row[place].1));
                cells.chain([header[place].len()]).max().unwrap_or_default() + GAP
            })
            .sum();
        let room = self.width.map(|width| usize::from(width).saturating_sub(others));
        if room.is_some_and(|room| room < LEAST) {
            return self.stacked(&header, &rows);
        }
        self.aligned(&header, &rows, self.width)
            .iter()
            .map(|line| line.clone() + "\n")
            .collect()
    }

    /// Where there is no room for a last column, what stands in it stands below its row.
    fn stacked(self, header: &[&str], rows: &[Vec<(Tone, String)>]) -> String {
        let last = header.len().saturating_sub(1);
        let short: Vec<_> = rows.iter().map(|row| row[..last].to_vec()).collect();
        let mut lines = self.aligned(&header[..last], &short, None).into_iter();
        let mut text = lines.next().unwrap_or_default() + "\n";
        for (line, row) in lines.zip(rows) {
            text += &(line + "\n");
            let (tone, words) = &row[last];
            if !words.is_empty() {
                let wrapped = self.wrapped(words, 2);
                text += &(self.paint(*tone, wrapped.trim_end()) + "\n");
            }
        }
        text
    }

    fn aligned(self, header: &[&str], rows: &[Vec<(Tone, String)>], width: Option<u16>) -> Vec<String> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        if self.colours {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(width);
        }
        let names = header.iter().map(|name| self.cell(Tone::Plain, name));
        table.set_header(names.collect::<Vec<_>>());
        for row in rows {
            let cells = row.iter().map(|(tone, text)| self.cell(*tone, text));
            table.add_row(Row::from(cells.collect::<Vec<_>>()));
        }
        let last = header.len().saturating_sub(1);
        for (place, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, if place == last { 0 } else { PADDING }));
            if place != last {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        let text = table.to_string();
        text.lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// A line with a mark before it, broken to the width.
    pub(crate) fn marked(self, tone: Tone, mark: &str, text: &str) -> String {
        let text = self.wrapped(text, 2);
        format!("{} {}", self.paint(tone, mark), text.trim_start())
    }

    fn cell(self, tone: Tone, text: &str) -> Cell {
        let cell = Cell::new(text);
        if !self.colours {
            return cell;
        }
        match tone {
            Tone::Good => cell.fg(Color::DarkGreen),
            Tone::Busy => cell.fg(Color::DarkYellow),
            Tone::Bad => cell.fg(Color::DarkRed),
            Tone::Dim => cell.fg(Color::DarkGrey),
            Tone::Plain => cell,
        }
    }
}

/// `1 node`, `2 nodes`.
pub(crate) fn counted(count: usize, word: &str) -> String {
    if count == 1 {
        format!("1 {word}")
    } else {
        format!("{count} {word}s")
    }
}

/// Names, and how many more there are.
pub(crate) fn named(names: &[String], most: usize) -> String {
    let shown = names[..names.len().min(most)].join(", ");
    match names.len().saturating_sub(most) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Bytes for a person: `1.2 GB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if count < 1000 {
        return format!("{count} B");
    }
    let mut value = count as f64;
    let mut unit = "";
    for next in UNITS {
        if value < 999.95 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> (Tone, String) {
        (Tone::Plain, text.to_owned())
    }

    #[test]
    fn the_last_column_takes_what_room_is_left() {
        let rows = vec![
            vec![plain("worker-1"), plain("ready"), plain("")],
            vec![
                plain("b"),
                plain("failed"),
                plain("the registry did not answer in time"),
            ],
        ];
        assert_eq!(
            Look::plain(Some(48)).table(&["NODE", "WASM", "MESSAGE"], rows.clone()),
            "NODE       WASM     MESSAGE\n\
             worker-1   ready\n\
             b          failed   the registry did not answer\n\
             \u{20}                   in time\n"
        );
        assert_eq!(
            Look::plain(None)
                .table(&["NODE", "WASM", "MESSAGE"], rows)
                .lines()
                .nth(2),
            Some("b          failed   the registry did not answer in time")
        );
    }

    #[test]
    fn where_there_is_no_room_words_stand_below_their_row() {
        let rows = vec![
            vec![plain("worker-1"), plain("ready"), plain("")],
            vec![
                plain("b"),
                plain("failed"),
                plain("the registry did not answer in time"),
            ],
        ];
        assert_eq!(
            Look::plain(Some(30)).table(&["NODE", "WASM", "MESSAGE"], rows),
            "NODE       WASM\n\
             worker-1   ready\n\
             b          failed\n\
             \u{20} the registry did not answer\n\
             \u{20} in time\n"
        );
    }

    #[test]
    fn long_texts_are_broken_at_words_and_indented() {
        assert_eq!(
            Look::plain(Some(26)).wrapped("one two three four five six", 2),
            "  one two three four five\n  six\n"
        );
    }

    #[test]
    fn colours_are_left_out_where_nobody_sees_them() {
        let look = Look::plain(None);
        assert_eq!(look.diff("+a\n-b\n"), "+a\n-b\n");
        let seen = Look {
            colours: true,
            width: None,
        };
        assert!(seen.diff("+a\n").contains("\x1b[32m+a\x1b[0m"));
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            (counted(1, "node"), counted(3, "node")),
            ("1 node".into(), "3 nodes".into())
        );
        assert_eq!(named(&["a".into(), "b".into(), "c".into()], 2), "a, b and 1 more");
        assert_eq!(
            [bytes(12), bytes(1500), bytes(999_960), bytes(2_345_000_000)],
            ["12 B", "1.5 kB", "1.0 MB", "2.3 GB"]
        );
    }
}
