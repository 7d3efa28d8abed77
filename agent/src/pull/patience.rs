//! Registries that asked for patience, for all images of an order.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::layers::locked;

const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);

/// Until when each registry is left alone.
#[derive(Debug, Default)]
pub(crate) struct Patience(Mutex<HashMap<String, (Instant, Duration)>>);

impl Patience {
    /// A registry asked for patience: it is left alone for twice as long as the last time. Images that were asked
    /// for before it said so do not count again.
    pub(crate) fn asked(&self, registry: &str) {
        let now = Instant::now();
        let mut waits = locked(&self.0);
        let pause = match waits.get(registry) {
            Some((until, _)) if *until > now => return,
            Some((_, pause)) => (*pause * 2).min(LONGEST),
            None => FIRST,
        };
        // Half of it is chance, so that the nodes of a fleet do not come back all at once.
        let jitter = pause.mul_f64(f64::from(uuid::Uuid::new_v4().as_bytes()[0]) / 512.0);
        waits.insert(registry.to_owned(), (now + pause + jitter, pause));
    }

    /// Waits until the registry may be asked.
    pub(crate) async fn wait(&self, registry: &str) {
        loop {
            let until = locked(&self.0).get(registry).map(|(until, _)| *until);
            match until {
                Some(until) if until > Instant::now() => sleep_until(until).await,
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_registry_is_left_alone_for_longer_each_time_and_others_are_not() {
        let patience = Patience::default();
        patience.asked("a.io");
        patience.asked("a.io");
        let begun = Instant::now();
        patience.wait("b.io").await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        patience.wait("a.io").await;
        assert!((FIRST..=FIRST * 2).contains(&begun.elapsed()));
        patience.asked("a.io");
        let again = Instant::now();
        patience.wait("a.io").await;
        assert!(again.elapsed() >= FIRST * 2);
    }
}
