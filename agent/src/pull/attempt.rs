//! One image: looked for, pulled until it is there or there is no more sense in it, proven, pinned.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use backon::{BackoffBuilder, ExponentialBuilder};
use k8s_cri::v1::Image;
use quartermaster_proto::keyring;
use quartermaster_proto::v1::{Credential, FailureReason, PullWay};
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::event::{Failed, Progress, Ready};
use super::facts::NodeOffer;
use super::layers::{Layers, Snapshot};
use super::lease::{Lease, Leases};
use super::order::{Order, Wanted};
use super::patience::Patience;
use super::providers::Providers;
use super::reason::{is_about_credentials, is_worth_another_attempt, reason_of};
use super::reference::{registry_of, repository_of};
use super::transfer::{Transfer, is_unable};
use super::watch::{Disk, Halt, Pulse, Watch};
use super::way::{Way, architecture, can_pin, runs_here};
use super::{arrivals, cri, pins};
use crate::containerd::Daemon;
use crate::host::HostRoot;

/// CRI takes over what the transfer service brought by an event.
const ADOPTED: Duration = Duration::from_secs(10);

/// All that the images of one order share.
pub(crate) struct Context<'a> {
    pub(crate) root: &'a Arc<HostRoot>,
    pub(crate) daemon: &'a Daemon,
    pub(crate) order: &'a Order,
    pub(crate) offer: NodeOffer,
    pub(crate) way: Way,
    pub(crate) disk: Option<Disk>,
    pub(crate) pulse: Pulse,
    pub(crate) patience: Patience,
    pub(crate) providers: Providers,
    pub(crate) leases: Leases,
    /// Blobs that are counted already.
    pub(crate) counted: Mutex<HashSet<String>>,
}

type Refusal = (FailureReason, String);

impl Context<'_> {
    /// Brings one image. `name` is its full name, `report` gets its progress.
    pub(crate) async fn bring(
        &self,
        wanted: &Wanted,
        name: &str,
        report: &(impl Fn(Progress) + Sync),
    ) -> Result<Ready, Failed> {
        let begun = Instant::now();
        // A daemon that does not answer now is asked again with the pull.
        let before = cri::status(self.daemon, name).await.ok().flatten();
        if let Some(image) = before.as_ref().filter(|_| !wanted.always) {
            return Ok(self.ready(wanted, name, image, begun, None, true).await);
        }
        let noted = match before {
            Some(_) => pins::noted(self.daemon, name).await,
            None => Default::default(),
        };
        let since = SystemTime::now();
        let mut pauses = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(500))
            .with_max_delay(Duration::from_secs(20))
            .with_max_times(wanted.attempts as usize)
            .with_jitter()
            .build();
        let mut attempts = 0;
        loop {
            self.patience.wait(registry_of(name)).await;
            attempts += 1;
            let result = self
                .attempt(wanted, name, before.as_ref(), attempts, report)
                .await;
            if let Some(disk) = &self.disk {
                disk.commitments.release(name);
            }
            let (reason, message) = match result {
                Ok((image, way)) => {
                    // A tag that was resolved again and has not moved was there.
                    let was_present = before.as_ref().is_some_and(|before| before.id == image.id);
                    pins::restore(self.daemon, name, noted).await;
                    let came = Some((since, way, attempts));
                    return Ok(self.ready(wanted, name, &image, begun, came, was_present).await);
                }
                Err(refusal) => refusal,
            };
            tracing::info!(image = name, attempts, reason = reason.as_str_name(), %message, "a pull failed");
            if reason.asks_for_patience() {
                self.patience.asked(registry_of(name));
            }
            match pauses.next() {
                Some(pause) if attempts < wanted.attempts && is_worth_another_attempt(reason) => {
                    sleep(pause).await;
                }
                _ => {
                    return Err(Failed {
                        reason,
                        message,
                        attempts,
                    });
                }
            }
        }
    }

    async fn ready(
        &self,
        wanted: &Wanted,
        name: &str,
        image: &Image,
        begun: Instant,
        came: Option<(SystemTime, PullWay, u32)>,
        was_present: bool,
    ) -> Ready {
        let fetched = match came {
            Some((since, ..)) => arrivals::bytes_since(self.daemon, name, since, &self.counted)
                .await
                .unwrap_or_default(),
            None => 0,
        };
        let pinned = pins::pin(self.daemon, name, &wanted.pins, was_present, can_pin(&self.offer)).await;
        Ready {
            digest: digest_of(image, name),
            was_present,
            size: image.size,
            took: begun.elapsed(),
            fetched,
            pinned,
            way: came.map_or(PullWay::Unspecified, |came| came.1),
            attempts: came.map_or(0, |came| came.2),
        }
    }

    /// One attempt: with every credential that is for the image, the most specific first, and then with none.
    async fn attempt(
        &self,
        wanted: &Wanted,
        name: &str,
        was: Option<&Image>,
        attempt: u32,
        report: &(impl Fn(Progress) + Sync),
    ) -> Result<(Image, PullWay), Refusal> {
        if let Some(halt) = self.disk.as_ref().and_then(Disk::refuse) {
            return Err((halt.reason, halt.message));
        }
        let deadline = Instant::now() + wanted.deadline;
        let repository = repository_of(name);
        let sent = wanted.credentials.iter().flat_map(|set| set.iter());
        let sent = keyring::matching(sent, repository);
        let mut refusal: Option<Refusal> = None;
        for credential in sent {
            match self
                .fetch(name, Some(credential), attempt, deadline, report)
                .await
            {
                Err(refused) if is_about_credentials(refused.0) => refusal = Some(worse(refusal, refused)),
                other => return self.proven(name, was, other).await,
            }
        }
        let mut note = String::new();
        if self.order.use_providers {
            let (provided, failure) = self.providers.ask(repository).await;
            note = failure.map(|failure| format!(" ({failure})")).unwrap_or_default();
            for credential in provided.iter() {
                match self
                    .fetch(name, Some(credential), attempt, deadline, report)
                    .await
                {
                    Err(refused) if is_about_credentials(refused.0) => {
                        refusal = Some(worse(refusal, refused));
                    }
                    other => return self.proven(name, was, other).await,
                }
            }
        }
        match self.fetch(name, None, attempt, deadline, report).await {
            Err(refused) if is_about_credentials(refused.0) => {
                let (reason, message) = worse(refusal, refused);
                Err((reason, message + &note))
            }
            other => self.proven(name, was, other).await,
        }
    }

    /// The answer to a pull is not the proof: what CRI finds under the name is what the kubelet will find.
    async fn proven(
        &self,
        name: &str,
        was: Option<&Image>,
        result: Result<PullWay, Refusal>,
    ) -> Result<(Image, PullWay), Refusal> {
        let way = result?;
        let deadline = Instant::now() + ADOPTED;
        loop {
            match cri::proof(self.daemon, name).await {
                Ok(Some((image, processor))) if runs_here(&processor, architecture()) => {
                    return Ok((image, way));
                }
                Ok(Some((image, processor))) => {
                    return Err(self.foreign(name, &image, &processor, was).await);
                }
                Ok(None) if Instant::now() < deadline => sleep(Duration::from_millis(5)).await,
                Ok(None) => {
                    return Err((
                        FailureReason::PullFailed,
                        format!("containerd pulled {name}, and CRI does not find it under that name"),
                    ));
                }
                Err(status) => return Err(refused(&status)),
            }
        }
    }

    /// containerd takes an image of a single platform whatever platform that is; its pods would not start. What was
    /// not there before goes again.
    async fn foreign(&self, name: &str, image: &Image, processor: &str, was: Option<&Image>) -> Refusal {
        if was.is_none_or(|was| was.id != image.id)
            && let Err(status) = cri::remove(self.daemon, name).await
        {
            tracing::warn!(
                image = name,
                message = status.message(),
                "an image for another processor stays"
            );
        }
        (
            FailureReason::NotForThisNode,
            format!("{name} is for {processor}, and this node is {}", architecture()),
        )
    }

    async fn fetch(
        &self,
        name: &str,
        credential: Option<&Credential>,
        attempt: u32,
        deadline: Instant,
        report: &(impl Fn(Progress) + Sync),
    ) -> Result<PullWay, Refusal> {
        let layers = Arc::new(Layers::new());
        let report = |seen: &Snapshot| {
            report(Progress {
                attempt,
                done: seen.done(),
                total: seen.total(),
                layers: seen.layers.clone(),
            });
        };
        report(&layers.snapshot());
        let watch = Watch {
            name,
            layers: &layers,
            stall_after: self.order.stall_after,
            pulse: &self.pulse,
            disk: self.disk.as_ref(),
        };
        let longest = deadline.saturating_duration_since(Instant::now());
        let lease = self.leases.take(self.daemon, longest).await;
        // Dropping a call cancels it in containerd.
        let result = tokio::select! {
            result = self.call(name, credential, &lease, &layers) => result.map_err(|status| refused(&status)),
            Halt { reason, message } = watch.run(report) => Err((reason, message)),
            () = tokio::time::sleep_until(deadline) => Err((
                FailureReason::DeadlineExceeded,
                format!("{name} was not pulled in the time that it was given"),
            )),
        };
        let is_left = result.is_err() && layers.snapshot().done() > 0;
        self.leases.give_back(self.daemon, lease, is_left).await;
        if result.is_ok() {
            report(&layers.snapshot());
        }
        result
    }

    async fn call(
        &self,
        name: &str,
        credential: Option<&Credential>,
        lease: &Lease,
        layers: &Arc<Layers>,
    ) -> Result<PullWay, Status> {
        if self.way == Way::Transfer {
            let transfer = Transfer {
                daemon: self.daemon,
                offer: &self.offer,
                hosts: self.offer.hosts_for(self.root, registry_of(name)),
                name,
                credential,
                lease,
                layers,
            };
            match transfer.run().await {
                Err(status) if is_unable(&status) => {
                    tracing::info!(
                        image = name,
                        message = status.message(),
                        "pulling through CRI instead"
                    );
                }
                other => return other.map(|()| PullWay::Transfer),
            }
        }
        tokio::select! {
            result = cri::pull(self.daemon, name, credential, lease) => result.map(|()| PullWay::Cri),
            () = arrivals::follow(self.daemon, name, SystemTime::now(), layers) => {
                Err(Status::internal("what comes is no longer followed"))
            }
        }
    }
}

/// Of two refusals the one that tells more: a registry may hide what one may not see.
fn worse(before: Option<Refusal>, now: Refusal) -> Refusal {
    match before {
        Some(before) if now.0 == FailureReason::ImageNotFound || before.0 == now.0 => before,
        _ => now,
    }
}

fn refused(status: &Status) -> Refusal {
    let message = status.message().to_owned();
    (reason_of(status.code(), &message), message)
}

/// The digest of the image in the repository that was asked for, or in any where that one is not listed.
fn digest_of(image: &Image, name: &str) -> String {
    let repository = repository_of(name);
    let mut digests = image.repo_digests.iter();
    digests
        .clone()
        .find(|digest| digest.split('@').next() == Some(repository))
        .or_else(|| digests.next())
        .cloned()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_repository_asked_for() {
        let image = Image {
            repo_digests: vec!["a.io/x@sha256:1".into(), "b.io/x@sha256:2".into()],
            ..Default::default()
        };
        assert_eq!(digest_of(&image, "b.io/x:1"), "b.io/x@sha256:2");
        assert_eq!(digest_of(&image, "b.io:5000/y:1"), "a.io/x@sha256:1");
        assert_eq!(digest_of(&Image::default(), "x"), "");
    }

    #[test]
    fn a_wrong_secret_is_told_rather_than_what_the_registry_hides() {
        let unauthorized = (FailureReason::Unauthorized, "401".to_owned());
        let hidden = (FailureReason::ImageNotFound, "404".to_owned());
        assert_eq!(worse(None, hidden.clone()), hidden);
        assert_eq!(worse(Some(unauthorized.clone()), hidden.clone()), unauthorized);
        assert_eq!(worse(Some(hidden), unauthorized.clone()), unauthorized);
    }
}
