//! Waiting for a condition, always with a deadline.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// What one look at a condition found.
#[derive(Debug)]
pub enum Look<T> {
    /// It holds.
    Here(T),
    /// Not yet; the reason is told if the deadline passes.
    NotYet(String),
    /// It never will.
    Never(anyhow::Error),
}

/// The deadline passed, or the condition can't come true any more.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("waited {seconds} s for {what}; last seen: {last}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// The deadline, in seconds.
        seconds: u64,
        /// What the last look found.
        last: String,
    },
    /// Waiting longer is of no use.
    #[error("{what} can't be reached: {cause:#}")]
    Never {
        /// What was waited for.
        what: String,
        /// Why it can't come.
        cause: anyhow::Error,
    },
}

const PAUSE: Duration = Duration::from_millis(50);

/// Every deadline is multiplied by `$TESTBED_PATIENCE` (1 if unset), for machines that are slow: emulated, or with much
/// else to do.
fn patience() -> u32 {
    static FACTOR: OnceLock<u32> = OnceLock::new();
    *FACTOR.get_or_init(|| {
        std::env::var("TESTBED_PATIENCE")
            .ok()
            .and_then(|text| text.parse().ok())
            .map_or(1, |factor: u32| factor.clamp(1, 100))
    })
}

/// Looks again and again until the condition holds. `Ok(None)` and an error both mean "not yet"; the last error is in the
/// message when `deadline` passes.
///
/// # Errors
/// [`WaitError::Deadline`].
pub fn wait_for<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> anyhow::Result<Option<T>>,
) -> Result<T, WaitError> {
    wait_or_give_up(what, deadline, || match look() {
        Ok(Some(value)) => Look::Here(value),
        Ok(None) => Look::NotYet("not yet".to_owned()),
        Err(error) => Look::NotYet(format!("{error:#}")),
    })
}

/// As [`wait_for`], for conditions that can be seen to have become impossible (the process died).
///
/// # Errors
/// [`WaitError`].
pub fn wait_or_give_up<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Look<T>,
) -> Result<T, WaitError> {
    let deadline = deadline * patience();
    let start = Instant::now();
    loop {
        let last = match look() {
            Look::Here(value) => return Ok(value),
            Look::NotYet(reason) => reason,
            Look::Never(cause) => {
                return Err(WaitError::Never {
                    what: what.to_owned(),
                    cause,
                });
            }
        };
        if start.elapsed() >= deadline {
            return Err(WaitError::Deadline {
                what: what.to_owned(),
                seconds: deadline.as_secs(),
                last,
            });
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_last_reason_when_the_deadline_passes() {
        let error = wait_for::<()>("the moon", Duration::ZERO, || anyhow::bail!("clouds"))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "waited 0 s for the moon; last seen: clouds");
    }

    #[test]
    fn does_not_wait_for_what_can_not_come() {
        let mut looks = 0;
        let error = wait_or_give_up::<()>("etcd", Duration::from_secs(60), || {
            looks += 1;
            Look::Never(anyhow::anyhow!("it exited"))
        })
        .unwrap_err();
        assert_eq!(looks, 1);
        assert!(error.to_string().contains("it exited"));
    }

    #[test]
    fn looks_until_it_is_there() {
        let mut looks = 0;
        let found = wait_for("three", Duration::from_secs(60), || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        })
        .unwrap();
        assert_eq!(found, 3);
    }
}
