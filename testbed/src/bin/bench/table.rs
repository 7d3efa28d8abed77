//! The numbers, as they are printed and written.

use serde_json::{Value, json};

/// All that was measured.
#[derive(Default)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Value>,
}

impl Table {
    /// The runs of one measurement.
    pub(crate) fn add(&mut self, name: &str, values: &[f64], unit: &str) {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        println!("  {name}: {:.2} {unit}", median(values));
        self.rows.push(json!({
            "name": name, "value": median(values), "unit": unit,
            "least": least, "most": most, "runs": values.len(),
        }));
    }

    pub(crate) fn print(&self) {
        println!("\n{:<66} {:>8} {:>17}  runs", "", "median", "least to most");
        for row in &self.rows {
            let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
            println!(
                "{:<66} {:>8.2} {:>7.2} to {:>6.2}  {} {}",
                row["name"].as_str().unwrap_or_default(),
                number("value"),
                number("least"),
                number("most"),
                row["runs"],
                row["unit"].as_str().unwrap_or_default(),
            );
        }
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
