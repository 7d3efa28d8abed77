//! Carrying out an order of images.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use futures::StreamExt;
use k8s_cri::v1::{Image, ImageSpec, ImageStatusRequest, PullImageRequest};
use quartermaster_proto::v1::FailureReason;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::reason::{is_worth_another_attempt, reason_of, remedy_of};
use super::reference::normalise;
use crate::containerd::Daemon;

const MAX_IMAGES: usize = 1000;
const MAX_REFERENCE: usize = 512;
const MAX_PARALLELISM: u32 = 16;
const MAX_ATTEMPTS: u32 = 10;
const MAX_DEADLINE: Duration = Duration::from_secs(6 * 3600);
const STATUS: Duration = Duration::from_secs(10);

/// What is to be pulled and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    images: Vec<String>,
    parallelism: usize,
    deadline: Duration,
    attempts: u32,
}

/// Why an order is not carried out at all.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OrderError {
    /// More images than one command may name.
    #[error("{0} images in one command, at most {MAX_IMAGES} are allowed")]
    TooMany(usize),
    /// A reference longer than any can be.
    #[error("a reference of {0} bytes, at most {MAX_REFERENCE} are allowed")]
    TooLong(usize),
}

impl Order {
    /// An order of these references; 0 and `None` stand for the defaults: 3 images at once, 10 minutes for each
    /// attempt, 3 attempts.
    ///
    /// # Errors
    /// [`OrderError`] when it is larger than the protocol allows.
    pub fn new(
        images: Vec<String>,
        parallelism: u32,
        deadline: Option<Duration>,
        attempts: u32,
    ) -> Result<Self, OrderError> {
        if images.len() > MAX_IMAGES {
            return Err(OrderError::TooMany(images.len()));
        }
        if let Some(long) = images.iter().find(|image| image.len() > MAX_REFERENCE) {
            return Err(OrderError::TooLong(long.len()));
        }
        let or = |value: u32, default: u32, most: u32| match value {
            0 => default,
            value => value.min(most),
        };
        Ok(Self {
            images,
            parallelism: or(parallelism, 3, MAX_PARALLELISM) as usize,
            deadline: deadline
                .filter(|deadline| !deadline.is_zero())
                .unwrap_or(Duration::from_secs(600))
                .min(MAX_DEADLINE),
            attempts: or(attempts, 3, MAX_ATTEMPTS),
        })
    }
}

/// An image that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// `repo@sha256:…` as CRI reports it, empty where it reports none.
    pub digest: String,
    /// It was there before.
    pub was_present: bool,
    /// In bytes, as CRI reports it.
    pub size: u64,
    /// From the first look to the proof.
    pub took: Duration,
}

/// What happens to an image, under the name as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageEvent {
    /// Its pull begins.
    Started(String),
    /// It is there.
    Ready(String, Ready),
    /// It is not.
    Failed {
        /// As given.
        image: String,
        /// The category.
        reason: FailureReason,
        /// In containerd's and the registry's own words.
        message: String,
        /// What can be done.
        remedy: &'static str,
        /// How often it was tried.
        attempts: u32,
    },
}

/// How an order ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// References whose image is there.
    pub ready: u32,
    /// References whose image is not.
    pub failed: u32,
}

/// Where reports go.
pub type Sink = Arc<dyn Fn(ImageEvent) + Send + Sync>;

/// Brings the images of an order onto the node. Dropping the future cancels the pulls that run.
pub async fn pull(daemon: &Daemon, order: &Order, sink: &Sink) -> Tally {
    let mut tally = Tally::default();
    // One pull for all spellings of a name; each spelling gets its answer.
    let mut names: Vec<String> = Vec::new();
    let mut spellings: HashMap<String, Vec<String>> = HashMap::new();
    for given in &order.images {
        match normalise(given) {
            Ok(name) => {
                let known = spellings.entry(name.clone()).or_default();
                if known.is_empty() {
                    names.push(name);
                }
                if !known.contains(given) {
                    known.push(given.clone());
                }
            }
            Err(error) => {
                tally.failed += 1;
                sink(ImageEvent::Failed {
                    image: given.clone(),
                    reason: FailureReason::InvalidReference,
                    message: error.to_string(),
                    remedy: remedy_of(FailureReason::InvalidReference),
                    attempts: 0,
                });
            }
        }
    }
    let results = futures::stream::iter(names)
        .map(|name| {
            let given = spellings.get(&name).cloned().unwrap_or_default();
            async move {
                for image in &given {
                    sink(ImageEvent::Started(image.clone()));
                }
                (given, one(daemon, order, &name).await)
            }
        })
        .buffer_unordered(order.parallelism);
    let mut results = std::pin::pin!(results);
    while let Some((given, result)) = results.next().await {
        for image in given {
            match &result {
                Ok(ready) => {
                    tally.ready += 1;
                    sink(ImageEvent::Ready(image, ready.clone()));
                }
                Err(failed) => {
                    tally.failed += 1;
                    sink(ImageEvent::Failed {
                        image,
                        reason: failed.reason,
                        message: failed.message.clone(),
                        remedy: remedy_of(failed.reason),
                        attempts: failed.attempts,
                    });
                }
            }
        }
    }
    tally
}

struct Failed {
    reason: FailureReason,
    message: String,
    attempts: u32,
}

async fn one(daemon: &Daemon, order: &Order, name: &str) -> Result<Ready, Failed> {
    let begun = Instant::now();
    let ready = |image: Image, was_present| Ready {
        digest: digest_of(&image, name),
        was_present,
        size: image.size,
        took: begun.elapsed(),
    };
    // A daemon that does not answer now is asked again with the pull.
    if let Ok(Some(image)) = status(daemon, name).await {
        return Ok(ready(image, true));
    }
    let mut pauses = ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(500))
        .with_max_delay(Duration::from_secs(20))
        .with_max_times(order.attempts as usize)
        .with_jitter()
        .build();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let (reason, message) = match attempt(daemon, order, name).await {
            Ok(image) => return Ok(ready(image, false)),
            Err(failed) => failed,
        };
        tracing::info!(image = name, attempts, reason = reason.as_str_name(), %message, "a pull failed");
        let pause = pauses.next();
        match pause {
            Some(pause) if attempts < order.attempts && is_worth_another_attempt(reason) => {
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

async fn attempt(daemon: &Daemon, order: &Order, name: &str) -> Result<Image, (FailureReason, String)> {
    let failed = |status: Status| {
        let message = status.message().to_owned();
        (reason_of(status.code(), &message), message)
    };
    let request = PullImageRequest {
        image: Some(spec(name)),
        ..Default::default()
    };
    let mut images = daemon.images();
    match timeout(order.deadline, images.pull_image(request)).await {
        Ok(answer) => answer.map_err(failed)?,
        Err(_) => {
            return Err((
                FailureReason::DeadlineExceeded,
                format!("{name} was not pulled within {} s", order.deadline.as_secs()),
            ));
        }
    };
    // The answer to a pull is not the proof: what CRI finds under the name is what the kubelet will find.
    match status(daemon, name).await {
        Ok(Some(image)) => Ok(image),
        Ok(None) => Err((
            FailureReason::PullFailed,
            format!("containerd pulled {name}, and CRI does not find it under that name"),
        )),
        Err(status) => Err(failed(status)),
    }
}

async fn status(daemon: &Daemon, name: &str) -> Result<Option<Image>, Status> {
    let request = ImageStatusRequest {
        image: Some(spec(name)),
        verbose: false,
    };
    let mut images = daemon.images();
    match timeout(STATUS, images.image_status(request)).await {
        Ok(answer) => Ok(answer?.into_inner().image),
        Err(_) => Err(Status::unavailable("containerd's ImageStatus does not answer")),
    }
}

fn spec(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    }
}

/// The digest of the image in the repository that was asked for, or in any where that one is not listed.
fn digest_of(image: &Image, name: &str) -> String {
    let repository = name.split_once('@').map_or_else(
        || name.rsplit_once(':').map_or(name, |(repository, _)| repository),
        |(repository, _)| repository,
    );
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
    fn orders_are_bounded_and_have_defaults() {
        let order = Order::new(vec!["a".into()], 0, None, 0).unwrap();
        assert_eq!((order.parallelism, order.attempts), (3, 3));
        assert_eq!(order.deadline, Duration::from_secs(600));
        let order = Order::new(vec![], 500, Some(Duration::MAX), 500).unwrap();
        assert_eq!((order.parallelism, order.attempts), (16, 10));
        assert_eq!(order.deadline, MAX_DEADLINE);
        assert!(Order::new(vec!["a".into(); 1001], 0, None, 0).is_err());
        assert!(Order::new(vec!["a".repeat(513)], 0, None, 0).is_err());
    }

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

    #[tokio::test]
    async fn an_invalid_reference_fails_without_asking_anyone() {
        let temporary = tempfile::tempdir().unwrap();
        let root = Arc::new(crate::host::HostRoot::open(temporary.path()).unwrap());
        let daemon = Daemon::new(root, "/nowhere.sock");
        let events = Arc::new(std::sync::Mutex::new(Vec::new()));
        let sink: Sink = {
            let events = Arc::clone(&events);
            Arc::new(move |event| events.lock().unwrap().push(event))
        };
        let order = Order::new(vec!["UPPER/x/Y z".into()], 0, None, 0).unwrap();
        let tally = pull(&daemon, &order, &sink).await;
        assert_eq!((tally.ready, tally.failed), (0, 1));
        assert!(matches!(
            events.lock().unwrap()[0],
            ImageEvent::Failed {
                reason: FailureReason::InvalidReference,
                attempts: 0,
                ..
            }
        ));
    }

    #[tokio::test]
    async fn every_spelling_of_a_name_gets_its_answer() {
        let temporary = tempfile::tempdir().unwrap();
        let root = Arc::new(crate::host::HostRoot::open(temporary.path()).unwrap());
        let daemon = Daemon::new(root, "/nowhere.sock");
        let failed = Arc::new(std::sync::Mutex::new(Vec::new()));
        let sink: Sink = {
            let failed = Arc::clone(&failed);
            Arc::new(move |event| {
                if let ImageEvent::Failed {
                    image,
                    reason,
                    attempts,
                    ..
                } = event
                {
                    failed.lock().unwrap().push((image, reason, attempts));
                }
            })
        };
        let images = ["nginx", "docker.io/nginx", "nginx:latest", "nginx"];
        let order = Order::new(images.map(str::to_owned).into(), 0, None, 1).unwrap();
        let tally = pull(&daemon, &order, &sink).await;
        assert_eq!((tally.ready, tally.failed), (0, 3));
        for (_, reason, attempts) in failed.lock().unwrap().iter() {
            assert_eq!((*reason, *attempts), (FailureReason::ContainerdUnreachable, 1));
        }
    }
}
