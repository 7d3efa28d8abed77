//! The numbers, as they are printed and written.

use std::fmt::Write as _;

use serde_json::{Value, json};

/// All that was measured.
#[derive(Default)]
pub(crate) struct Table {
    /// Each with name, value, unit, and, where there is one, what it is held against and the ratio of the two.
    pub(crate) rows: Vec<Value>,
}

impl Table {
    /// The runs of one measurement.
    pub(crate) fn add(&mut self, name: &str, values: &[f64], unit: &str) {
        self.push(name, values, unit, None);
    }

    /// The same beside what somebody would do instead, run by run: what else the machine does meets both alike.
    pub(crate) fn compare(&mut self, name: &str, ours: &[f64], unit: &str, other: &str, theirs: &[f64]) {
        let ratios: Vec<f64> = ours
            .iter()
            .zip(theirs)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        self.push(name, ours, unit, Some((other, median(theirs), median(&ratios))));
    }

    /// The same beside what it should not exceed.
    pub(crate) fn goal(&mut self, name: &str, values: &[f64], unit: &str, goal: f64) {
        let ratio = if goal > 0.0 {
            median(values) / goal
        } else {
            f64::NAN
        };
        self.push(name, values, unit, Some(("goal", goal, ratio)));
    }

    fn push(&mut self, name: &str, values: &[f64], unit: &str, beside: Option<(&str, f64, f64)>) {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let held = beside.map_or(String::new(), |(what, value, ratio)| {
            format!(", {what}: {value:.2}, ratio {ratio:.2}")
        });
        println!("  {name}: {:.2} {unit}{held}", median(values));
        self.rows.push(json!({
            "name": name, "value": median(values), "unit": unit,
            "against": beside.map(|(_, value, _)| value),
            "ratio": beside.map(|(_, _, ratio)| ratio),
            "against_what": beside.map(|(what, _, _)| what),
            "least": least, "most": most, "runs": values.len(),
        }));
    }

    /// Those with a ratio first.
    fn sorted(&self) -> Vec<&Value> {
        let (with, without): (Vec<_>, Vec<_>) = self.rows.iter().partition(|row| row["ratio"].is_number());
        with.into_iter().chain(without).collect()
    }

    /// For a terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = format!(
            "{:>6} {:>9} {:>9} {:<4} {:>19}  runs",
            "ratio", "value", "against", "", "least to most"
        );
        for row in self.sorted() {
            let number = |key: &str| row[key].as_f64().map_or(String::new(), |n| format!("{n:.2}"));
            let _ = write!(
                text,
                "\n{:>6} {:>9} {:>9} {:<4} {:>8} to {:>7}  {:>4}  {}",
                number("ratio"),
                number("value"),
                number("against"),
                row["unit"].as_str().unwrap_or_default(),
                number("least"),
                number("most"),
                row["runs"],
                row["name"].as_str().unwrap_or_default(),
            );
        }
        text
    }

    /// For a page.
    pub(crate) fn markdown(&self) -> String {
        let mut text = "| | ratio | median (least to most) | against |\n|---|---|---|---|\n".to_owned();
        for row in self.sorted() {
            let number = |key: &str| row[key].as_f64().map_or(String::new(), |n| format!("{n:.2}"));
            let unit = row["unit"].as_str().unwrap_or_default();
            let against = row["against_what"]
                .as_str()
                .map(|what| format!("{} {unit} ({what})", number("against")));
            let _ = writeln!(
                text,
                "| {} | {} | {} {unit} ({} to {}) | {} |",
                row["name"].as_str().unwrap_or_default(),
                number("ratio"),
                number("value"),
                number("least"),
                number("most"),
                against.unwrap_or_default(),
            );
        }
        text
    }
}

/// The value in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(crate) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}
