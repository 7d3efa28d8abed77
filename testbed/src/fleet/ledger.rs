//! What the simulated machines did, as they know it themselves: counted apart from anything that the coordinator says of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Violations that are kept; a rule that is broken once is often broken a thousand times.
const KEPT: usize = 50;

/// What happened on all machines together.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Connections that agents took.
    pub lines: AtomicU64,
    /// Agents that got a certificate.
    pub enrolments: AtomicU64,
    /// New commands, pulls among them.
    pub commands: AtomicU64,
    /// Commands of a coordinator that led no more.
    pub stale: AtomicU64,
    /// Restarts of containerd that came to their end.
    pub restarts: AtomicU64,
    /// Modules that ran.
    pub modules: AtomicU64,
    /// Images that were pulled.
    pub pulled: AtomicU64,
    /// Microseconds that commands to install took, from their arrival to their last event.
    pub install_micros: AtomicU64,
    /// Microseconds that pulls took.
    pub pull_micros: AtomicU64,
    /// The most machines that were down by us at once.
    pub worst: AtomicUsize,
    /// How many may be.
    pub limit: AtomicUsize,
    calm: AtomicBool,
    down: Mutex<BTreeMap<String, String>>,
    /// Commands that have changed a machine, by the machine's own id and theirs.
    effects: Mutex<BTreeSet<(String, String)>>,
    /// By which commands machines, by name, were restarted.
    ordered: Mutex<BTreeSet<(String, String)>>,
    violations: Mutex<Vec<String>>,
    began: Mutex<Option<Instant>>,
}

/// A machine whose containerd is down by us, until this is dropped.
pub(super) struct Down<'a> {
    ledger: &'a Ledger,
    machine: String,
}

impl Drop for Down<'_> {
    fn drop(&mut self) {
        locked(&self.ledger.down).remove(&self.machine);
    }
}

impl Ledger {
    /// Begins to count the time that violations are told with.
    pub(super) fn begin(&self) {
        *locked(&self.began) = Some(Instant::now());
    }

    /// The time since [`Ledger::begin`].
    pub(super) fn elapsed(&self) -> Duration {
        locked(&self.began).map(|at| at.elapsed()).unwrap_or_default()
    }

    /// From now on nothing fails by itself any more.
    pub(super) fn calm_down(&self) {
        self.calm.store(true, Ordering::SeqCst);
    }

    /// Whether nothing fails by itself any more.
    pub(super) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    /// A restart begins on a machine, by the command of this id.
    pub(super) fn goes_down(&self, machine: &str, id: &str) -> Down<'_> {
        locked(&self.ordered).insert((machine.to_owned(), id.to_owned()));
        let (now, twice, names) = {
            let mut down = locked(&self.down);
            let twice = down.insert(machine.to_owned(), id.to_owned());
            let names = down.keys().cloned().collect::<Vec<_>>().join(", ");
            (down.len(), twice, names)
        };
        self.worst.fetch_max(now, Ordering::SeqCst);
        let limit = self.limit.load(Ordering::SeqCst);
        if now > limit {
            self.violation(format!(
                "{now} machines are down by us, {limit} may be: {names} ({machine} by the command {id})"
            ));
        }
        if let Some(other) = twice {
            self.violation(format!(
                "two commands restart {machine} at once: {other} and {id}"
            ));
        }
        Down {
            ledger: self,
            machine: machine.to_owned(),
        }
    }

    /// A command has changed a machine.
    pub(super) fn took_effect(&self, machine: &str, machine_id: &str, id: &str) {
        let key = (machine_id.to_owned(), id.to_owned());
        if !locked(&self.effects).insert(key) {
            self.violation(format!("the command {id} took effect twice on {machine}"));
        }
    }

    /// Machines, by name, and the commands that restarted them.
    pub(super) fn ordered(&self) -> BTreeSet<(String, String)> {
        locked(&self.ordered).clone()
    }

    /// Writes down that a rule was broken.
    pub(super) fn violation(&self, what: String) {
        let at = self.elapsed();
        let mut violations = locked(&self.violations);
        if violations.len() < KEPT {
            violations.push(format!("{:>8.2} s  {what}", at.as_secs_f64()));
        }
    }

    /// The rules that were broken so far.
    pub(super) fn violations(&self) -> Vec<String> {
        locked(&self.violations).clone()
    }
}

/// A lock whose holder panicked guards nothing that could be half-changed here.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_machine_too_many_is_a_violation_and_the_end_of_a_restart_makes_room() {
        let ledger = Ledger::default();
        ledger.limit.store(1, Ordering::SeqCst);
        let first = ledger.goes_down("a", "1");
        drop(first);
        let _second = ledger.goes_down("b", "2");
        assert!(ledger.violations().is_empty());
        let _third = ledger.goes_down("c", "3");
        assert_eq!(ledger.violations().len(), 1);
        assert_eq!(ledger.worst.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_command_may_take_effect_once_on_each_machine() {
        let ledger = Ledger::default();
        ledger.took_effect("a", "machine-1", "1");
        ledger.took_effect("a", "machine-2", "1");
        assert!(ledger.violations().is_empty());
        ledger.took_effect("a", "machine-2", "1");
        assert!(ledger.violations()[0].contains("twice on a"));
    }

    #[test]
    fn two_restarts_of_one_machine_at_once_are_a_violation() {
        let ledger = Ledger::default();
        ledger.limit.store(5, Ordering::SeqCst);
        let _first = ledger.goes_down("a", "1");
        let _second = ledger.goes_down("a", "2");
        assert!(ledger.violations()[0].contains("two commands"));
    }
}
