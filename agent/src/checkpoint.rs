//! Points before every effect on a node, at which a test can stop or end the process.
//!
//! That a node survives a crash between any two steps can only be tested if the steps are counted by the code that
//! takes them: a list in a test would leave out those that were added later. So whatever changes something on a node
//! (a file, a unit, a sandbox) passes [`checkpoint`] right before it does.
//!
//! Without the environment variable `QUARTERMASTER_FAULTS` this does nothing. With it, the variable names a folder:
//! each point that is passed is appended to its file `passed` as `<command> <ordinal> <effect>`, and where its file
//! `order` holds `<command> <ordinal> kill` or `… stop`, the process ends or stops there as by the signal. An order is
//! removed before it is obeyed, so a process that is started again goes on.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Signal, getpid, kill_process};

/// Names the folder; set by tests alone.
pub(crate) const VARIABLE: &str = "QUARTERMASTER_FAULTS";

static FAULTS: OnceLock<Option<Faults>> = OnceLock::new();

struct Faults {
    folder: PathBuf,
    command: String,
    passed: AtomicUsize,
}

/// What an order wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Kill,
    Stop,
}

/// Passes the point before an effect, which is named for whoever reads the list.
pub(crate) fn checkpoint(effect: impl std::fmt::Display) {
    if let Some(faults) = FAULTS.get_or_init(Faults::from_environment) {
        faults.pass(&effect.to_string());
    }
}

/// The folder of orders, if there is one: the host unit of a command gets the same.
pub(crate) fn folder() -> Option<&'static Path> {
    let faults = FAULTS.get_or_init(Faults::from_environment).as_ref()?;
    Some(&faults.folder)
}

impl Faults {
    fn from_environment() -> Option<Self> {
        Some(Self {
            folder: PathBuf::from(std::env::var_os(VARIABLE)?),
            command: std::env::args().nth(1).unwrap_or_default(),
            passed: AtomicUsize::new(0),
        })
    }

    fn pass(&self, effect: &str) {
        let ordinal = self.passed.fetch_add(1, Ordering::SeqCst) + 1;
        let line = format!("{} {ordinal} {effect}\n", self.command);
        let appended = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.join("passed"))
            .and_then(|mut file| file.write_all(line.as_bytes()));
        if let Err(error) = appended {
            tracing::warn!(%error, "a point that was passed cannot be noted");
        }
        let order = self.folder.join("order");
        let wanted = fs::read_to_string(&order)
            .ok()
            .and_then(|text| due(&text, &self.command, ordinal));
        let Some(wanted) = wanted else { return };
        let _ = fs::remove_file(&order);
        match wanted {
            Order::Stop => {
                let _ = kill_process(getpid(), Signal::STOP);
            }
            Order::Kill => {
                let _ = kill_process(getpid(), Signal::KILL);
                // The first process of a container is deaf to signals of its own.
                std::process::abort();
            }
        }
    }
}

fn due(order: &str, command: &str, ordinal: usize) -> Option<Order> {
    let mut words = order.split_whitespace();
    let this = words.next() == Some(command) && words.next()?.parse() == Ok(ordinal);
    match words.next() {
        Some("kill") if this => Some(Order::Kill),
        Some("stop") if this => Some(Order::Stop),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_for_one_point_of_one_command() {
        assert_eq!(due("apply 3 kill\n", "apply", 3), Some(Order::Kill));
        assert_eq!(due("apply 3 stop", "apply", 3), Some(Order::Stop));
        for other in ["apply 4 kill", "install 3 kill", "apply 3 dance", "apply", ""] {
            assert_eq!(due(other, "apply", 3), None, "{other}");
        }
    }
}
