//! How the numbers grow with the fleet: as a table and as a picture.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow};
use plotters::chart::ChartBuilder;
use plotters::drawing::IntoDrawingArea;
use plotters::element::{Circle, PathElement, Text};
use plotters::prelude::{BLACK, Color, LineSeries, RGBColor, SVGBackend, WHITE};
use plotters::style::{IntoFont, ShapeStyle, TextStyle};

use super::scenario::Measurement;

const SIZE: (u32, u32) = (1080, 620);
const LINE: RGBColor = RGBColor(31, 94, 168);
const GOAL: RGBColor = RGBColor(190, 60, 50);

/// What is drawn, in rows of three.
const PANELS: [(&str, &str, &str); 6] = [
    (
        "present: coordinator's CPU",
        "A full pass, all images there: CPU",
        "s",
    ),
    ("memory, the most in all", "Memory, the most in all", "MB"),
    ("restart: until steady", "Restart until steady", "s"),
    ("absent: time to READY", "All images absent: time to READY", "s"),
    (
        "provision: overhead a node",
        "Provisioning: overhead a node",
        "ms",
    ),
    ("absent: coordinator's CPU", "All images absent: CPU", "s"),
];

/// A table of Markdown: a row for each thing measured, a column for each size.
#[must_use]
pub fn table(measurements: &[Measurement]) -> String {
    let sizes: BTreeSet<usize> = measurements.iter().map(|m| m.nodes).collect();
    let mut whats: Vec<&Measurement> = Vec::new();
    for measurement in measurements {
        if !whats.iter().any(|known| known.what == measurement.what) {
            whats.push(measurement);
        }
    }
    let mut text = String::from("| |");
    for size in &sizes {
        text += &format!(" {size} nodes |");
    }
    text += &format!(
        " goal at {} |\n|---|{}---|\n",
        sizes.last().unwrap_or(&0),
        "---|".repeat(sizes.len())
    );
    for first in whats {
        text += &format!("| {}{} |", first.what, unit(first.unit));
        let of = |size: usize| {
            measurements
                .iter()
                .find(|m| m.nodes == size && m.what == first.what)
        };
        for size in &sizes {
            text += &of(*size).map_or_else(|| " |".to_owned(), |m| format!(" {} |", number(m.value)));
        }
        let largest = sizes.last().and_then(|size| of(*size));
        text += &match largest.and_then(|m| Some((m, m.goal?))) {
            None => " |\n".to_owned(),
            Some((m, goal)) if m.is_met() => format!(" {} |\n", number(goal)),
            Some((_, goal)) => format!(" {}, **missed** |\n", number(goal)),
        };
    }
    text
}

fn unit(unit: &str) -> String {
    if unit.is_empty() {
        String::new()
    } else {
        format!(", {unit}")
    }
}

fn number(value: f64) -> String {
    if value == value.trunc() || value.abs() >= 100.0 {
        format!("{value:.0}")
    } else if value.abs() >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// A picture, as SVG.
///
/// # Errors
/// If it can't be drawn.
pub fn growth(measurements: &[Measurement]) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let drawn = |error: &dyn std::fmt::Display| anyhow!("the picture can't be drawn: {error}");
        area.fill(&WHITE).map_err(|error| drawn(&error))?;
        for (panel, (what, title, unit)) in area.split_evenly((2, 3)).iter().zip(PANELS) {
            let points: Vec<(f64, f64)> = measurements
                .iter()
                .filter(|m| m.what == what)
                .map(|m| (m.nodes as f64, m.value))
                .collect();
            let goal = measurements.iter().find(|m| m.what == what).and_then(|m| m.goal);
            let right = points.iter().map(|(x, _)| *x).fold(1.0, f64::max) * 1.04;
            let top = points.iter().map(|(_, y)| *y).chain(goal).fold(0.1, f64::max) * 1.15;
            let mut chart = ChartBuilder::on(panel)
                .margin(12)
                .caption(format!("{title} [{unit}]"), ("sans-serif", 16).into_font())
                .x_label_area_size(34)
                .y_label_area_size(48)
                .build_cartesian_2d(0.0..right, 0.0..top)
                .map_err(|error| drawn(&error))?;
            chart
                .configure_mesh()
                .light_line_style(WHITE)
                .bold_line_style(BLACK.mix(0.12))
                .x_labels(6)
                .y_labels(6)
                .x_label_formatter(&|x| format!("{x:.0}"))
                .y_label_formatter(&|y| number(*y))
                .x_desc("nodes")
                .label_style(("sans-serif", 12).into_font())
                .draw()
                .map_err(|error| drawn(&error))?;
            if let Some(goal) = goal {
                chart
                    .draw_series([PathElement::new(
                        vec![(0.0, goal), (right, goal)],
                        GOAL.stroke_width(1),
                    )])
                    .map_err(|error| drawn(&error))?;
                let style: TextStyle<'_> = ("sans-serif", 12).into_font().color(&GOAL);
                chart
                    .draw_series([Text::new(
                        format!("goal {}", number(goal)),
                        (right * 0.02, goal + top * 0.05),
                        style,
                    )])
                    .map_err(|error| drawn(&error))?;
            }
            let style: ShapeStyle = LINE.stroke_width(2);
            chart
                .draw_series(LineSeries::new(points.iter().copied(), style))
                .map_err(|error| drawn(&error))?;
            chart
                .draw_series(points.iter().map(|point| Circle::new(*point, 3, LINE.filled())))
                .map_err(|error| drawn(&error))?;
        }
        area.present().map_err(|error| drawn(&error))?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(nodes: usize, value: f64) -> Measurement {
        Measurement {
            nodes,
            what: "restart: until steady",
            value,
            unit: "s",
            goal: Some(10.0),
        }
    }

    #[test]
    fn a_row_holds_all_sizes_and_says_when_the_goal_is_missed() {
        let table = table(&[measured(100, 1.25), measured(5000, 12.0)]);
        assert_eq!(
            table,
            "| | 100 nodes | 5000 nodes | goal at 5000 |\n|---|---|---|---|\n| restart: until steady, s | 1.25 | 12 | 10, **missed** |\n"
        );
    }

    #[test]
    fn the_picture_is_a_whole_svg() {
        let svg = growth(&[measured(100, 1.25), measured(5000, 2.0)]).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("Restart until steady"));
    }
}
