//! What moves while a person waits: bars and spinners below, lines that stay above. Without a terminal there are only
//! the lines.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::look::Look;
use crate::output;

const TICK: Duration = Duration::from_millis(90);
/// Bars at once; a screen has no more room.
const MOST: usize = 16;

/// A terminal that is narrower has no room for everything.
const WIDE: u16 = 110;
/// The key of the line that is about the whole.
const WHOLE: &str = "";

/// What moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Spinner,
    Bytes,
}

impl Kind {
    fn style(self) -> ProgressStyle {
        let template = match self {
            Self::Spinner => "{spinner:.cyan} {prefix}{msg:.dim} {elapsed:.dim}",
            Self::Bytes if Look::of_stdout().width.is_some_and(|width| width < WIDE) => {
                "{spinner:.cyan} {prefix} {wide_bar:.cyan/dim} {decimal_bytes:>9} of {decimal_total_bytes:<9} {msg:.dim}"
            }
            Self::Bytes => {
                "{spinner:.cyan} {prefix} {bar:24.cyan/dim} {decimal_bytes:>9} of {decimal_total_bytes:<9} {decimal_bytes_per_sec:>11}  {msg:.dim}"
            }
        };
        ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━━─")
            .tick_chars("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ ")
    }
}

/// Bars and lines.
pub(crate) struct Progress {
    all: MultiProgress,
    is_seen: bool,
    bars: Mutex<BTreeMap<String, (ProgressBar, Kind)>>,
}

impl Progress {
    /// On standard output, if that is a terminal.
    pub(crate) fn new() -> Self {
        let is_seen = std::io::stdout().is_terminal();
        let target = if is_seen {
            ProgressDrawTarget::stdout()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            all: MultiProgress::with_draw_target(target),
            is_seen,
            bars: Mutex::default(),
        }
    }

    /// Whether anything moves.
    pub(crate) fn is_seen(&self) -> bool {
        self.is_seen
    }

    /// What is being done about the whole, in one line that moves below all others.
    pub(crate) fn now(&self, text: &str) {
        self.spin(WHOLE, "", text);
    }

    /// A line that moves: a name and what is being done about it.
    pub(crate) fn spin(&self, key: &str, name: &str, text: &str) {
        let Some(bar) = self.bar(key, Kind::Spinner) else {
            return;
        };
        bar.set_prefix(if name.is_empty() {
            String::new()
        } else {
            format!("{name}  ")
        });
        bar.set_message(text.to_owned());
    }

    /// A bar: so many bytes of so many, and a word on it.
    pub(crate) fn fill(&self, key: &str, name: &str, done: u64, total: u64, text: &str) {
        let Some(bar) = self.bar(key, Kind::Bytes) else {
            return;
        };
        bar.set_prefix(name.to_owned());
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(text.to_owned());
    }

    /// What moved comes to its end and goes.
    pub(crate) fn clear(&self, key: &str) {
        let bar = self.lock().remove(key);
        if let Some((bar, _)) = bar {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
    }

    /// A line that stays.
    pub(crate) fn line(&self, text: &str) {
        self.all
            .suspend(|| output::say(&format!("{}\n", text.trim_end())));
    }

    /// All that moved goes.
    pub(crate) fn end(&self) {
        for (_, (bar, _)) in std::mem::take(&mut *self.lock()) {
            bar.finish_and_clear();
        }
        let _ = self.all.clear();
    }

    fn bar(&self, key: &str, kind: Kind) -> Option<ProgressBar> {
        if !self.is_seen {
            return None;
        }
        let mut bars = self.lock();
        if let Some((bar, was)) = bars.get_mut(key) {
            if *was != kind {
                bar.set_style(kind.style());
                *was = kind;
            }
            return Some(bar.clone());
        }
        if bars.len() >= MOST && key != WHOLE {
            return None;
        }
        let bar = match bars.get(WHOLE) {
            Some((whole, _)) => self.all.insert_before(whole, ProgressBar::new(0)),
            None => self.all.add(ProgressBar::new(0)),
        };
        bar.set_style(kind.style());
        bar.enable_steady_tick(TICK);
        bars.insert(key.to_owned(), (bar.clone(), kind));
        Some(bar)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, (ProgressBar, Kind)>> {
        self.bars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
