//! Decision: when certificates are renewed, and how one authority follows another without a gap.
//!
//! A rotation has three steps. First the next authority is made and **trusted**, and signs nothing. When every
//! certificate that was signed before that has been renewed, whoever holds one has learned of the next authority,
//! and it begins to **sign**; the previous one is still trusted. When every certificate of the previous one has
//! ended, it is **forgotten**. The times are read from the authorities' own certificates: there is nothing else
//! to keep.

use jiff::{SignedDuration, Timestamp};

/// Certificates begin in the past, since clocks of nodes differ.
pub(super) const SKEW: SignedDuration = SignedDuration::from_mins(5);

/// How long certificates are good for.
#[derive(Debug, Clone, Copy)]
pub struct Lives {
    /// The authority's own.
    pub authority: SignedDuration,
    /// Those that it signs.
    pub certificate: SignedDuration,
}

/// The authorities that the Secret holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Authorities {
    /// When the one that signs was made, and when it ends.
    pub(super) current: (Timestamp, Timestamp),
    /// When the one that will follow it was made.
    pub(super) next: Option<Timestamp>,
    /// Whether the one before it is still trusted.
    pub(super) previous: bool,
    /// A person has asked for a rotation.
    pub(super) asked: bool,
}

/// What to do about the authorities.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing before this time.
    Rest(Timestamp),
    /// Make the next one, and let it be trusted.
    Prepare,
    /// Let the next one sign.
    Switch,
    /// Trust the previous one no more.
    Forget,
}

/// The next step.
pub(super) fn step(held: &Authorities, lives: &Lives, now: Timestamp) -> Step {
    let (made, ends) = held.current;
    let due = |at: Timestamp, step: Step| if now >= at { step } else { Step::Rest(at) };
    if let Some(next) = held.next {
        // One that has ended is trusted by nobody: then there is nothing to wait for.
        return due((next + lives.certificate).min(ends), Step::Switch);
    }
    if held.previous {
        // It signed until its successor had been known for the life of a certificate.
        return due(made + lives.certificate * 2 + SKEW, Step::Forget);
    }
    if held.asked {
        return Step::Prepare;
    }
    // Time enough for a rotation with the cluster switched off in the middle of it.
    due(ends - lives.authority / 3, Step::Prepare)
}

/// When a coordinator makes itself a new certificate: at the half of its life, so that it never shows one that
/// ends while a connection is being made.
pub(super) fn renewal(made: Timestamp, lives: &Lives) -> Timestamp {
    made + lives.certificate / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIVES: Lives = Lives {
        authority: SignedDuration::from_hours(300),
        certificate: SignedDuration::from_hours(12),
    };

    fn hours(n: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_hours(n)
    }

    fn alone() -> Authorities {
        Authorities {
            current: (hours(0), hours(300)),
            next: None,
            previous: false,
            asked: false,
        }
    }

    #[test]
    fn an_authority_is_followed_when_a_third_of_its_life_is_left_or_when_a_person_asks() {
        assert_eq!(step(&alone(), &LIVES, hours(1)), Step::Rest(hours(200)));
        assert_eq!(step(&alone(), &LIVES, hours(200)), Step::Prepare);
        let asked = Authorities {
            asked: true,
            ..alone()
        };
        assert_eq!(step(&asked, &LIVES, hours(1)), Step::Prepare);
    }

    #[test]
    fn the_next_one_signs_only_when_every_older_certificate_was_renewed() {
        let prepared = Authorities {
            next: Some(hours(50)),
            asked: true,
            ..alone()
        };
        assert_eq!(step(&prepared, &LIVES, hours(50)), Step::Rest(hours(62)));
        assert_eq!(step(&prepared, &LIVES, hours(61)), Step::Rest(hours(62)));
        assert_eq!(step(&prepared, &LIVES, hours(62)), Step::Switch);
    }

    #[test]
    fn the_previous_one_is_forgotten_only_when_its_last_certificate_has_ended() {
        let switched = Authorities {
            current: (hours(50), hours(350)),
            previous: true,
            ..alone()
        };
        let last = hours(62) + LIVES.certificate + SKEW;
        assert_eq!(step(&switched, &LIVES, hours(62)), Step::Rest(last));
        assert_eq!(step(&switched, &LIVES, last), Step::Forget);
    }

    #[test]
    fn a_cluster_that_was_off_until_its_authority_had_ended_has_the_next_at_once() {
        assert_eq!(step(&alone(), &LIVES, hours(400)), Step::Prepare);
        let prepared = Authorities {
            next: Some(hours(400)),
            ..alone()
        };
        assert_eq!(step(&prepared, &LIVES, hours(400)), Step::Switch);
    }

    /// Whoever holds a certificate, at any hour of a rotation, is trusted by whoever renewed in time.
    #[test]
    fn at_no_time_of_a_rotation_is_there_a_certificate_that_somebody_does_not_trust() {
        // Numbers of authorities: who signs, who is trusted.
        let (mut signs, mut trusted, mut held) = (0, vec![0], alone());
        held.asked = true;
        // (ends, signer) of certificates, (learned, trusted) of holders.
        let mut certificates = Vec::new();
        let mut bundles: Vec<(i64, Vec<i32>)> = Vec::new();
        for hour in 0..60 {
            match step(&held, &LIVES, hours(hour)) {
                Step::Prepare => {
                    held.next = Some(hours(hour));
                    held.asked = false;
                    trusted = vec![0, 1];
                }
                Step::Switch => {
                    held.current = (held.next.expect("a next one"), hours(400));
                    held.next = None;
                    held.previous = true;
                    signs = 1;
                }
                Step::Forget => {
                    held.previous = false;
                    trusted = vec![1];
                }
                Step::Rest(_) => {}
            }
            certificates.push((hour + 12, signs));
            bundles.push((hour, trusted.clone()));
            certificates.retain(|(ends, _)| *ends > hour);
            // A holder renews before its certificate's end, and learns the bundle then.
            bundles.retain(|(learned, _)| hour - learned < 12);
            for (_, signer) in &certificates {
                for (learned, bundle) in &bundles {
                    assert!(
                        bundle.contains(signer),
                        "hour {hour}: {signer} is not in {bundle:?} of hour {learned}"
                    );
                }
            }
        }
        assert_eq!((signs, trusted), (1, vec![1]));
    }

    #[test]
    fn a_coordinator_renews_its_own_certificate_at_half_its_life() {
        assert_eq!(renewal(hours(10), &LIVES), hours(16));
    }
}
