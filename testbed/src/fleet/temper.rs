//! How simulated agents behave: what takes how long, and what fails how often. All of it is drawn from the fleet's seed.

use std::time::Duration;

/// How simulated agents behave.
#[derive(Debug, Clone)]
pub struct Temper {
    /// Mean time from the label to an agent that runs.
    pub arrival: Duration,
    /// Mean time for one image that is pulled.
    pub image: Duration,
    /// Mean time for each stage of an installation but the restart.
    pub stage: Duration,
    /// Mean time for which containerd is down.
    pub restart: Duration,
    /// The part of commands and pulls of an image that fail, from 0 to 1.
    pub failures: f64,
    /// The part of commands whose connection is lost in the middle.
    pub losses: f64,
    /// The part of events that are told twice.
    pub echoes: f64,
}

impl Default for Temper {
    fn default() -> Self {
        Self {
            arrival: Duration::from_millis(500),
            image: Duration::from_millis(100),
            stage: Duration::from_millis(50),
            restart: Duration::from_millis(150),
            failures: 0.0,
            losses: 0.0,
            echoes: 0.0,
        }
    }
}

/// Half to one and a half times the mean.
pub(super) fn around(mean: Duration, draw: &mut fastrand::Rng) -> Duration {
    mean.mul_f64(0.5 + draw.f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same_times() {
        let draw = || {
            let mut draw = fastrand::Rng::with_seed(7);
            (0..5)
                .map(|_| around(Duration::from_millis(100), &mut draw))
                .collect::<Vec<_>>()
        };
        assert_eq!(draw(), draw());
        assert!(draw().iter().all(|time| (50..150).contains(&time.as_millis())));
    }
}
