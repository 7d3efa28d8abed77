//! What a person watching `up` sees: one line for each step, with its time.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;

/// Something that happened while a testbed was made or ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A step that may take minutes has begun.
    Began(String),
    /// A step is done.
    Done {
        /// The step.
        step: String,
        /// How long it took.
        took: Duration,
    },
    /// Something worth knowing.
    Note(String),
}

/// Where events go.
pub struct Progress {
    sink: Box<dyn Fn(&Event) + Send + Sync>,
}

impl Progress {
    /// Tells nobody.
    #[must_use]
    pub fn silent() -> Self {
        Self::to(|_| {})
    }

    /// Prints lines to standard error: steps with their seconds, notes without.
    #[must_use]
    pub fn terminal() -> Self {
        let colour = std::io::stderr().is_terminal();
        Self::to(move |event| {
            // A closed terminal is no reason to stop half-way.
            let _ = writeln!(std::io::stderr(), "{}", line(event, colour));
        })
    }

    /// Gives every event to `sink`.
    #[must_use]
    pub fn to(sink: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        Self { sink: Box::new(sink) }
    }

    /// Does a step of seconds at most and tells its time when it is done. A failed step is told by its error alone.
    ///
    /// # Errors
    /// Whatever the step fails with.
    pub fn step<T>(&self, step: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let value = work()?;
        (self.sink)(&Event::Done {
            step: step.to_owned(),
            took: start.elapsed(),
        });
        Ok(value)
    }

    /// As [`Progress::step`], for a step that may take minutes: it is announced too.
    ///
    /// # Errors
    /// Whatever the step fails with.
    pub fn long_step<T>(&self, step: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        (self.sink)(&Event::Began(step.to_owned()));
        self.step(step, work)
    }

    /// Tells something that is no step.
    pub fn note(&self, text: impl Into<String>) {
        (self.sink)(&Event::Note(text.into()));
    }
}

fn line(event: &Event, colour: bool) -> String {
    let (dim, green, plain) = if colour {
        ("\u{1b}[2m", "\u{1b}[32m", "\u{1b}[0m")
    } else {
        ("", "", "")
    };
    match event {
        Event::Began(step) => format!("{dim}under way  {step}{plain}"),
        Event::Done { step, took } => {
            format!("{green}{:>7.1} s{plain}  {step}", took.as_secs_f64())
        }
        Event::Note(text) => format!("           {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_done_step_shows_its_seconds() {
        let done = Event::Done {
            step: "etcd answers".into(),
            took: Duration::from_millis(1234),
        };
        assert_eq!(line(&done, false), "    1.2 s  etcd answers");
    }

    #[test]
    fn a_failed_step_is_not_told_as_done() {
        let told = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let sink = told.clone();
        let progress = Progress::to(move |event| sink.lock().unwrap().push(event.clone()));
        assert!(progress.step("x", || anyhow::bail!("no") as Result<()>).is_err());
        progress.step("y", || Ok(())).unwrap();
        let told = told.lock().unwrap();
        assert_eq!(told.len(), 1);
        assert!(matches!(&told[0], Event::Done { step, .. } if step == "y"));
    }
}
