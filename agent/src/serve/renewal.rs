//! Decision: when an agent asks for its next certificate.

use std::time::Duration;

use quartermaster_proto::tls::Validity;
use sha2::{Digest, Sha256};

/// Certificates begin this long before they are signed, in seconds: clocks of nodes differ.
const SKEW: i64 = 300;
/// The longest sleep: a machine that was suspended, or whose clock was set, must notice.
const LONGEST: Duration = Duration::from_secs(600);
/// Between attempts, in seconds.
const PAUSES: (i64, i64) = (1, 60);

/// When to renew, in seconds since 1970: between the half and two thirds of the certificate's life, which depends
/// on the node's name alone, so that a fleet that was parked in one minute does not come back in one minute.
pub(super) fn due(validity: Validity, node: &str) -> i64 {
    let signed = (validity.from + SKEW).min(validity.until);
    let life = validity.until - signed;
    let part = i64::from(Sha256::digest(node)[0]);
    signed + life / 2 + life * part / (6 * 255)
}

/// How long to sleep before looking at the clock again; `None` when it is time.
pub(super) fn sleep(due: i64, now: i64) -> Option<Duration> {
    let wait = u64::try_from(due - now).ok().filter(|wait| *wait > 0)?;
    Some(Duration::from_secs(wait).min(LONGEST))
}

/// How long to wait after an attempt that failed: a tenth of what is left, so that there are many attempts.
pub(super) fn pause(validity: Validity, now: i64) -> Duration {
    let left = (validity.until - now) / 10;
    Duration::from_secs(left.clamp(PAUSES.0, PAUSES.1).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;
    /// Signed at hour 100 for twelve hours.
    const VALIDITY: Validity = Validity {
        from: 100 * HOUR - SKEW,
        until: 112 * HOUR,
    };

    #[test]
    fn every_agent_renews_between_the_half_and_two_thirds_and_not_all_at_once() {
        let times: std::collections::BTreeSet<i64> =
            (0..500).map(|n| due(VALIDITY, &format!("worker-{n}"))).collect();
        assert!(times.first() >= Some(&(106 * HOUR)), "{times:?}");
        assert!(times.last() <= Some(&(108 * HOUR)), "{times:?}");
        assert!(times.len() > 200, "only {} different times", times.len());
    }

    #[test]
    fn a_certificate_of_seconds_is_renewed_before_its_end_too() {
        let short = Validity {
            from: 1000 - SKEW,
            until: 1020,
        };
        let at = due(short, "worker-1");
        assert!((1010..=1014).contains(&at), "{at}");
    }

    #[test]
    fn one_sleeps_in_pieces_until_it_is_time() {
        assert_eq!(sleep(10_000, 0), Some(LONGEST));
        assert_eq!(sleep(10_000, 9_990), Some(Duration::from_secs(10)));
        assert_eq!(sleep(10_000, 10_000), None);
        assert_eq!(sleep(10_000, 20_000), None);
    }

    #[test]
    fn attempts_are_a_minute_apart_and_denser_towards_the_end() {
        assert_eq!(pause(VALIDITY, 106 * HOUR), Duration::from_secs(60));
        assert_eq!(pause(VALIDITY, 112 * HOUR - 100), Duration::from_secs(10));
        assert_eq!(pause(VALIDITY, 113 * HOUR), Duration::from_secs(1));
    }
}
