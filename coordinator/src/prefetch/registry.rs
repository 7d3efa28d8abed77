//! How a registry that asks for patience is spared by the whole fleet.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest as _, Sha256};

/// The pause after a first refusal that names none, and the longest.
const FIRST: SignedDuration = SignedDuration::from_secs(5);
const LONGEST: SignedDuration = SignedDuration::from_mins(10);
/// A registry that has not refused for so long is not remembered.
const FORGIVEN: SignedDuration = SignedDuration::from_mins(15);

/// Registries that have asked for patience lately.
#[derive(Debug, Default)]
pub struct Registries {
    slow: HashMap<String, Slow>,
}

#[derive(Debug)]
struct Slow {
    /// Refusals that were not followed by a success.
    refusals: u32,
    not_before: Timestamp,
    /// Nodes that may pull from it at once; grows with every success.
    at_once: usize,
}

impl Registries {
    /// A node was told to wait, for `pause` if the registry said how long. `pulling` nodes were pulling from it.
    pub fn refused(&mut self, host: &str, pause: Option<SignedDuration>, pulling: usize, now: Timestamp) {
        let slow = self.slow.entry(host.to_owned()).or_insert(Slow {
            refusals: 0,
            not_before: now,
            at_once: pulling.max(2),
        });
        // The nodes that were pulling at once are all refused at once, and count as one.
        if slow.not_before > now {
            if let Some(pause) = pause {
                slow.not_before = slow.not_before.max(now + pause.min(LONGEST));
            }
            return;
        }
        slow.refusals += 1;
        let backoff = FIRST * (1 << (slow.refusals - 1).min(7));
        slow.not_before = now + pause.map_or(backoff, |pause| pause.max(backoff)).min(LONGEST);
        slow.at_once = (slow.at_once.min(pulling.max(2)) / 2).max(1);
    }

    /// An image came from it.
    pub fn served(&mut self, host: &str, now: Timestamp) {
        let Some(slow) = self.slow.get_mut(host) else {
            return;
        };
        slow.refusals = 0;
        slow.at_once += 1;
        if now.duration_since(slow.not_before) > FORGIVEN {
            self.slow.remove(host);
        }
    }

    /// When a node may pull from it again, spread so that a fleet does not come back in one go; `None` for now.
    pub fn not_before(&self, host: &str, node: &str, now: Timestamp) -> Option<Timestamp> {
        let slow = self.slow.get(host).filter(|slow| slow.not_before > now)?;
        let spread = SignedDuration::from_millis(i64::from(Sha256::digest(node)[0]) * 8);
        Some(slow.not_before + spread)
    }

    /// How many nodes may pull from it at once; `None` is without bound.
    pub fn at_once(&self, host: &str) -> Option<usize> {
        self.slow.get(host).map(|slow| slow.at_once)
    }
}

/// The registry of a normalised reference.
pub fn host(image: &str) -> &str {
    image.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn wait(registries: &Registries, now: i64) -> Option<i64> {
        registries
            .not_before("r", "node", at(now))
            .map(|until| until.duration_since(at(now)).as_secs())
    }

    #[test]
    fn a_registry_that_never_refused_is_not_waited_for() {
        let registries = Registries::default();
        assert_eq!(wait(&registries, 0), None);
        assert_eq!(registries.at_once("r"), None);
    }

    #[test]
    fn one_answer_slows_every_node_for_as_long_as_the_registry_said() {
        let mut registries = Registries::default();
        registries.refused("r", Some(SignedDuration::from_secs(60)), 40, at(0));
        for node in ["a", "b"] {
            let until = registries.not_before("r", node, at(1)).expect("a wait");
            assert!((60..63).contains(&until.as_second()));
        }
        assert_eq!(registries.not_before("other", "a", at(1)), None);
        assert_eq!(registries.at_once("r"), Some(20));
        assert_eq!(wait(&registries, 60), None);
    }

    #[test]
    fn refusals_of_one_burst_count_once_and_later_ones_double_the_pause() {
        let mut registries = Registries::default();
        for _ in 0..50 {
            registries.refused("r", None, 8, at(0));
        }
        assert!(wait(&registries, 0).is_some_and(|s| (5..8).contains(&s)));
        registries.refused("r", None, 4, at(10));
        assert!(wait(&registries, 10).is_some_and(|s| (10..13).contains(&s)));
        assert_eq!(registries.at_once("r"), Some(2));
    }

    #[test]
    fn a_pause_has_a_bound_whatever_a_registry_says() {
        let mut registries = Registries::default();
        registries.refused("r", Some(SignedDuration::from_hours(100)), 4, at(0));
        assert!(wait(&registries, 0).is_some_and(|s| s <= 602));
    }

    #[test]
    fn success_opens_it_again_and_in_the_end_it_is_forgotten() {
        let mut registries = Registries::default();
        registries.refused("r", None, 4, at(0));
        registries.served("r", at(20));
        assert_eq!(registries.at_once("r"), Some(3));
        registries.served("r", at(2000));
        assert_eq!(registries.at_once("r"), None);
    }

    #[test]
    fn the_registry_is_what_stands_before_the_first_slash() {
        assert_eq!(
            host("registry.example.com:5000/a/b:1"),
            "registry.example.com:5000"
        );
        assert_eq!(host("docker.io/library/nginx:latest"), "docker.io");
    }
}
