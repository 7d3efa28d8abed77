//! How far each image is, for a person with a terminal.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::pull::Progress;

/// A bar for each image that is being pulled. Without a terminal there are none.
pub(super) struct Bars {
    all: MultiProgress,
    by_image: Mutex<HashMap<String, ProgressBar>>,
}

impl Bars {
    pub(super) fn new(are_shown: bool) -> Self {
        let target = if are_shown {
            ProgressDrawTarget::stdout()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            all: MultiProgress::with_draw_target(target),
            by_image: Mutex::default(),
        }
    }

    /// An image is this far.
    pub(super) fn show(&self, image: &str, progress: &Progress) {
        let mut bars = self.by_image.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = bars.entry(image.to_owned()).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(0));
            bar.set_prefix(shortened(image));
            bar.set_style(style("{spinner} {prefix:32} resolving {elapsed}{msg}"));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if progress.total > 0 && bar.length() != Some(progress.total) {
            if bar.length() == Some(0) {
                bar.set_style(style(
                    "{spinner} {prefix:32} {bar:24.cyan/dim} {bytes:>10} of {total_bytes:<10} {bytes_per_sec:>12}{msg:.dim}",
                ));
            }
            bar.set_length(progress.total);
        }
        bar.set_position(progress.done);
        let whole = |layer: &&crate::pull::Layer| layer.total > 0 && layer.offset >= layer.total;
        let there = progress.layers.values().filter(whole).count();
        let layers = progress.layers.len();
        let attempt = if progress.attempt > 1 {
            format!("  attempt {}", progress.attempt)
        } else {
            String::new()
        };
        bar.set_message(match layers {
            0 => attempt,
            _ if there == layers => format!("  unpacking{attempt}"),
            _ => format!("  layer {there} of {layers}{attempt}"),
        });
    }

    /// An image is done: its bar goes, and this line stays.
    pub(super) fn end(&self, image: &str, line: &str) {
        let bar = self
            .by_image
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(image);
        if let Some(bar) = bar {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
        self.all.suspend(|| super::output::say(line));
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━━─")
}

/// The end of a name tells images apart, not its registry.
fn shortened(image: &str) -> String {
    let letters: Vec<char> = image.chars().collect();
    match letters.len() {
        0..=32 => image.to_owned(),
        length => format!("…{}", letters[length - 31..].iter().collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_keep_their_end() {
        assert_eq!(shortened("nginx:1"), "nginx:1");
        let long = shortened("registry.example.com/team/group/project/server:1.2.3");
        assert_eq!(long.chars().count(), 32);
        assert!(long.ends_with("project/server:1.2.3"), "{long}");
    }
}
