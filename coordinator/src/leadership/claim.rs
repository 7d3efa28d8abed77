//! Decision: what a replica does about the Lease next, from what it has seen of it and what it holds itself.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use std::time::Duration;
use tokio::time::Instant;

/// Seconds that stand in the Lease: for so long after the last renewal that it saw, another replica waits.
pub(super) const HELD_SECONDS: i32 = 10;
/// The holder itself counts less, from before it sent the renewal: it has stopped when others may begin.
pub(super) const TENURE: Duration = Duration::from_secs(8);
/// Between renewals.
pub(super) const RENEW: Duration = Duration::from_secs(3);
/// A Lease that names another duration is believed within these bounds.
const BOUNDS: (i32, i32) = (1, 60);

/// The Lease as it was last seen.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// `None`: there is none.
    pub lease: Option<Lease>,
    /// When it was first seen like this, by this machine's clock: those of others are not compared.
    pub at: Instant,
}

/// What this replica holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    /// The Lease's transition count, which goes with every command.
    pub term: i32,
    /// When the last renewal that succeeded was sent.
    pub sent: Instant,
}

impl Held {
    pub(super) fn until(&self) -> Instant {
        self.sent + TENURE
    }
}

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Write oneself into it, with the next term.
    Take,
    /// Write the time into it.
    Renew,
    /// Lead no more.
    Yield,
    /// Nothing before this time, or a change.
    Wait(Instant),
}

impl Seen {
    /// Takes in an answer or an event. One that is older than what is known is not heeded: an event may come
    /// after the answer to a write that was later. What changed nothing does not start the waiting anew.
    pub(super) fn update(&mut self, lease: Option<Lease>, now: Instant) {
        if let (Some(known), Some(new)) = (version(self.lease.as_ref()), version(lease.as_ref()))
            && new < known
        {
            return;
        }
        let changed = record(self.lease.as_ref()) != record(lease.as_ref());
        self.lease = lease;
        if changed {
            self.at = now;
        }
    }

    pub(super) fn holder(&self) -> Option<&str> {
        let holder = self.lease.as_ref()?.spec.as_ref()?.holder_identity.as_deref();
        holder.filter(|holder| !holder.is_empty())
    }

    pub(super) fn term(&self) -> i32 {
        let spec = self.lease.as_ref().and_then(|lease| lease.spec.as_ref());
        spec.and_then(|spec| spec.lease_transitions).unwrap_or(0)
    }

    fn lapses(&self) -> Instant {
        let spec = self.lease.as_ref().and_then(|lease| lease.spec.as_ref());
        let seconds = spec
            .and_then(|spec| spec.lease_duration_seconds)
            .unwrap_or(HELD_SECONDS)
            .clamp(BOUNDS.0, BOUNDS.1);
        self.at + Duration::from_secs(u64::from(seconds.unsigned_abs()))
    }
}

/// What of a Lease its holder changes when it is alive.
fn record(lease: Option<&Lease>) -> Option<(Option<&str>, Option<&MicroTime>, Option<i32>)> {
    let spec = lease?.spec.as_ref();
    Some((
        spec.and_then(|spec| spec.holder_identity.as_deref()),
        spec.and_then(|spec| spec.renew_time.as_ref()),
        spec.and_then(|spec| spec.lease_transitions),
    ))
}

fn version(lease: Option<&Lease>) -> Option<u64> {
    lease?.metadata.resource_version.as_ref()?.parse().ok()
}

/// The next step of the replica `me`.
pub(super) fn step(seen: &Seen, held: Option<Held>, me: &str, now: Instant) -> Step {
    if let Some(held) = held {
        if seen.lease.is_none() {
            // Somebody deleted it. Made anew it gets a later term, or agents would refuse us.
            return Step::Take;
        }
        if now >= held.until() || seen.holder() != Some(me) || seen.term() != held.term {
            return Step::Yield;
        }
        let renew = held.sent + RENEW;
        return if now >= renew {
            Step::Renew
        } else {
            Step::Wait(renew)
        };
    }
    match seen.holder() {
        None => Step::Take,
        // An earlier process of this very pod, which has ended: its container was started again.
        Some(holder) if holder == me => Step::Take,
        Some(_) if now >= seen.lapses() => Step::Take,
        Some(_) => Step::Wait(seen.lapses()),
    }
}

/// The first term of a Lease that has no past: minutes since 2026, so that agents that remember the terms of
/// a Lease that was deleted do not take its successor's for old ones.
pub(super) fn first_term(now: jiff::Timestamp) -> i32 {
    const YEAR_2026: i64 = 1_767_225_600;
    let minutes = (now.as_second() - YEAR_2026) / 60;
    i32::try_from(minutes).unwrap_or(i32::MAX / 2).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(yaml: &str) -> Option<Lease> {
        Some(serde_yaml_ng::from_str(yaml).expect("a Lease"))
    }

    fn of(holder: &str, term: i32) -> Option<Lease> {
        lease(&format!(
            "metadata: {{resourceVersion: '5'}}\nspec: {{holderIdentity: '{holder}', leaseTransitions: {term}, leaseDurationSeconds: 10, renewTime: '2026-01-01T00:00:00.000000Z'}}"
        ))
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn a_lease_that_is_absent_given_back_or_our_own_from_before_is_taken_at_once() {
        let at = Instant::now();
        for lease in [None, of("", 3), of("me", 3), lease("metadata: {name: x}")] {
            let seen = Seen { lease, at };
            assert_eq!(step(&seen, None, "me", at), Step::Take, "{seen:?}");
        }
    }

    #[test]
    fn anothers_lease_is_taken_when_it_was_not_renewed_for_as_long_as_it_says() {
        let at = Instant::now();
        let seen = Seen {
            lease: of("other", 3),
            at,
        };
        assert_eq!(step(&seen, None, "me", at), Step::Wait(at + seconds(10)));
        assert_eq!(
            step(&seen, None, "me", at + seconds(9)),
            Step::Wait(at + seconds(10))
        );
        assert_eq!(step(&seen, None, "me", at + seconds(10)), Step::Take);
    }

    #[test]
    fn a_renewal_begins_the_waiting_anew_and_the_same_words_again_do_not() {
        let at = Instant::now();
        let mut seen = Seen {
            lease: of("other", 3),
            at,
        };
        seen.update(of("other", 3), at + seconds(6));
        assert_eq!(seen.at, at);
        let mut renewed = of("other", 3);
        if let Some(spec) = renewed.as_mut().and_then(|lease| lease.spec.as_mut()) {
            spec.renew_time = Some(MicroTime(jiff::Timestamp::UNIX_EPOCH));
        }
        seen.update(renewed, at + seconds(7));
        assert_eq!(seen.at, at + seconds(7));
    }

    #[test]
    fn an_event_that_is_older_than_what_is_known_is_not_heeded() {
        let at = Instant::now();
        let mut seen = Seen {
            lease: of("me", 4),
            at,
        };
        let mut old = of("other", 3);
        if let Some(old) = &mut old {
            old.metadata.resource_version = Some("4".into());
        }
        seen.update(old, at);
        assert_eq!(seen.holder(), Some("me"));
    }

    #[test]
    fn a_holder_renews_in_time_and_stops_before_others_may_begin() {
        let at = Instant::now();
        let seen = Seen {
            lease: of("me", 3),
            at,
        };
        let held = Some(Held { term: 3, sent: at });
        assert_eq!(step(&seen, held, "me", at), Step::Wait(at + RENEW));
        assert_eq!(step(&seen, held, "me", at + RENEW), Step::Renew);
        assert_eq!(step(&seen, held, "me", at + TENURE), Step::Yield);
        assert!(at + TENURE < seen.lapses());
    }

    #[test]
    fn a_holder_whose_lease_another_took_leads_no_more() {
        let at = Instant::now();
        let held = Some(Held { term: 3, sent: at });
        for lease in [of("other", 4), of("", 3), of("me", 4)] {
            let seen = Seen { lease, at };
            assert_eq!(step(&seen, held, "me", at), Step::Yield, "{seen:?}");
        }
    }

    #[test]
    fn a_lease_that_was_deleted_under_its_holder_is_made_anew() {
        let at = Instant::now();
        let held = Some(Held { term: 3, sent: at });
        assert_eq!(step(&Seen { lease: None, at }, held, "me", at), Step::Take);
    }

    #[test]
    fn terms_of_a_new_lease_are_later_than_those_of_one_that_was_made_before() {
        let term = |text: &str| first_term(text.parse().expect("a time"));
        assert_eq!(term("2026-01-02T00:00:00Z"), 1440);
        assert!(term("2090-01-01T00:00:00Z") < i32::MAX / 2);
        assert_eq!(term("2020-01-01T00:00:00Z"), 1);
    }
}
