//! Effect: takes, renews and gives back the Lease.
//!
//! Our own, because of the crates for it one lets a leader lead on while the API server is away, and all compare
//! clocks of two machines and wait for a Lease to run out that was given back.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch_events};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::claim::{HELD_SECONDS, Held, Seen, Step, first_term, step};
use super::tenure::Tenure;

/// For one request: a slow one must not eat the whole time that the Lease lasts.
const REQUEST: Duration = Duration::from_secs(2);
/// After a request that failed.
const PAUSE: Duration = Duration::from_secs(1);

/// Keeps the Lease for one replica.
pub(super) struct Keeper {
    pub(super) api: Api<Lease>,
    pub(super) lease: &'static str,
    /// Name of this pod, which stands in the Lease: people find the leader by it.
    pub(super) me: String,
    pub(super) tenure: Arc<Tenure>,
    /// The term while this replica leads.
    pub(super) leads: watch::Sender<Option<u64>>,
}

impl Keeper {
    /// Until `stop`, and then gives the Lease back so that nobody has to wait for its end.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut held = None;
        let mut seen = self.first_look(&stop).await;
        let only = watcher::Config::default().fields(&format!("metadata.name={}", self.lease));
        let mut events = std::pin::pin!(watch_events(self.api.clone(), only).default_backoff());
        let mut not_before = Instant::now();
        loop {
            let now = Instant::now();
            let next = match step(&seen, held, &self.me, now) {
                Step::Yield => {
                    warn!(
                        holder = seen.holder(),
                        "the Lease is lost; this replica leads no more"
                    );
                    self.set(&mut held, None);
                    continue;
                }
                Step::Wait(until) => until,
                // A holder must not oversleep its own end while it waits to try again.
                Step::Take | Step::Renew if now < not_before => {
                    held.map_or(not_before, |held: Held| not_before.min(held.until()))
                }
                Step::Take => {
                    if !self.write(&mut seen, &mut held, true).await {
                        not_before = Instant::now() + PAUSE;
                    }
                    continue;
                }
                Step::Renew => {
                    if !self.write(&mut seen, &mut held, false).await {
                        not_before = Instant::now() + PAUSE;
                    }
                    continue;
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                Some(event) = events.next() => match event {
                    Ok(Event::Apply(lease) | Event::InitApply(lease)) => seen.update(Some(lease), Instant::now()),
                    Ok(Event::Delete(_)) => seen.update(None, Instant::now()),
                    Ok(Event::Init | Event::InitDone) => {}
                    Err(error) => debug!(%error, "the watch of the Lease was lost and is being taken up again"),
                },
                () = sleep_until(next) => {}
            }
        }
        if held.is_some() {
            self.set(&mut held, None);
            self.give_back(&seen).await;
        }
    }

    fn set(&self, held: &mut Option<Held>, new: Option<Held>) {
        *held = new;
        self.tenure.set(new.map(|held| held.until()));
        let term = new.map(|held| u64::from(held.term.unsigned_abs()));
        self.leads
            .send_if_modified(|leads| std::mem::replace(leads, term) != term);
    }

    async fn first_look(&self, stop: &CancellationToken) -> Seen {
        let mut said = false;
        loop {
            match self.read().await {
                Ok(lease) => {
                    return Seen {
                        lease,
                        at: Instant::now(),
                    };
                }
                Err(error) if !said => {
                    warn!(error, "the Lease can't be read; it is tried again");
                    said = true;
                }
                Err(_) => {}
            }
            tokio::select! {
                () = stop.cancelled() => return Seen { lease: None, at: Instant::now() },
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
    }

    async fn read(&self) -> Result<Option<Lease>, String> {
        match timeout(REQUEST, self.api.get_opt(self.lease)).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err("the API server does not answer".to_owned()),
        }
    }

    /// Takes or renews. Whoever wrote since we looked makes it a conflict, and then we look again.
    async fn write(&self, seen: &mut Seen, held: &mut Option<Held>, take: bool) -> bool {
        let sent = Instant::now();
        let (lease, term) = self.next_lease(seen, *held, take);
        let options = PostParams::default();
        let request = async {
            if lease.metadata.resource_version.is_some() {
                self.api.replace(self.lease, &options, &lease).await
            } else {
                self.api.create(&options, &lease).await
            }
        };
        match timeout(REQUEST, request).await {
            Ok(Ok(written)) => {
                seen.update(Some(written), Instant::now());
                if !take && held.is_some_and(|held| Instant::now() >= held.until()) {
                    // The answer came after our time was over, and what we did has stopped: a new term, not the old.
                    self.set(held, None);
                    return true;
                }
                if take {
                    info!(term, "the Lease is taken");
                }
                self.set(held, Some(Held { term, sent }));
                true
            }
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                let Ok(lease) = self.read().await else {
                    return false;
                };
                seen.update(lease, Instant::now());
                // Another was quicker, or it was deleted. If it still is to be taken it is tried after a pause.
                false
            }
            Ok(Err(error)) => {
                warn!(%error, take, "the Lease can't be written");
                false
            }
            Err(_) => {
                warn!(take, "the Lease can't be written: the API server does not answer");
                false
            }
        }
    }

    fn next_lease(&self, seen: &Seen, held: Option<Held>, take: bool) -> (Lease, i32) {
        let now = jiff::Timestamp::now();
        let term = match (take, held, &seen.lease) {
            (false, Some(held), _) => held.term,
            (true, Some(held), None) => first_term(now).max(held.term.saturating_add(1)),
            (_, _, None) => first_term(now),
            (_, _, Some(_)) => seen.term().saturating_add(1),
        };
        let mut lease = seen.lease.clone().unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(self.lease.to_owned()),
                ..ObjectMeta::default()
            },
            ..Lease::default()
        });
        lease.metadata.managed_fields = None;
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        if take {
            spec.acquire_time = Some(MicroTime(now));
        }
        spec.holder_identity = Some(self.me.clone());
        spec.lease_duration_seconds = Some(HELD_SECONDS);
        spec.lease_transitions = Some(term);
        spec.renew_time = Some(MicroTime(now));
        (lease, term)
    }

    async fn give_back(&self, seen: &Seen) {
        let Some(mut lease) = seen.lease.clone() else {
            return;
        };
        lease.metadata.managed_fields = None;
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
            spec.acquire_time = None;
        }
        let options = PostParams::default();
        match timeout(REQUEST, self.api.replace(self.lease, &options, &lease)).await {
            Ok(Ok(_)) => info!("the Lease is given back"),
            Ok(Err(error)) => warn!(%error, "the Lease can't be given back; it will run out"),
            Err(_) => warn!("the Lease can't be given back; it will run out"),
        }
    }
}
