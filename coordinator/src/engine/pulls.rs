//! Effect: ordering agents to pull, and telling the engine what they report.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use quartermaster_proto::keyring;
use quartermaster_proto::v1::{
    self, CancelRequest, CommandHeader, CredentialSet, DiskReserve, FailureReason, PullEvent, PullRequest,
    WantedImage, WatchEvent, pull_event, watch_event,
};
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;
use tracing::info;

use super::input::Input;
use super::orders::{client, words};
use super::secrets::PullSecrets;
use super::{Engine, Key};
use crate::prefetch::{Pin, PullFacts, normalise, shorten};

/// For one command to pull; a longer one is taken up by another command.
const PULL_DEADLINE: Duration = Duration::from_secs(3600);
/// Until a pull that the agent does not know yet is cancelled again.
const CANCEL_PAUSE: Duration = Duration::from_millis(100);

/// A pull of some images on one node.
#[derive(Debug)]
pub(super) struct PullOrder {
    /// In the order in which they are to be pulled.
    pub images: Vec<OrderedImage>,
    /// Whose secrets are used, by their place here.
    pub claims: Vec<(Key, PullFacts)>,
    pub per_node: u32,
    pub settings: PullSettings,
}

/// One image of it.
#[derive(Debug)]
pub(super) struct OrderedImage {
    pub image: Arc<str>,
    pub always: bool,
    pub pins: Vec<Pin>,
    pub fingerprint: u64,
    /// Places in `claims`.
    pub by: Vec<usize>,
}

/// What holds for every pull.
#[derive(Debug, Clone, Default)]
pub(crate) struct PullSettings {
    /// Ask the kubelet's credential providers.
    pub node_credential_providers: bool,
    /// Percent of the disk that stay free; 0 leaves it to the kubelet's own thresholds.
    pub disk_reserve: u32,
}

/// What an agent said of an image.
#[derive(Debug)]
pub(super) struct ImageReport {
    /// The normalised reference.
    pub image: Arc<str>,
    pub result: Result<ReadyImage, FailedImage>,
    pub at: Timestamp,
}

#[derive(Debug)]
pub(super) struct ReadyImage {
    pub digest: Arc<str>,
    pub was_present: bool,
    pub size: u64,
    pub fetched: u64,
}

#[derive(Debug)]
pub(super) struct FailedImage {
    pub reason: FailureReason,
    pub message: String,
    pub retry_after: Option<SignedDuration>,
}

impl Engine {
    /// Orders images.
    pub(super) fn order_pull(&mut self, node: &str, channel: Channel, order: PullOrder) {
        let id = uuid::Uuid::new_v4().to_string();
        info!(node, command = id, images = order.images.len(), "pull ordered");
        let begun = format!(
            "{:.0} Pull of {} images (command {id})",
            Timestamp::now(),
            order.images.len()
        );
        self.reports.begin(node, begun);
        self.tell_watchers(node, watch_event::Event::Ordered("Pull".to_owned()));
        let watchers = self.setup.watchers.clone();
        let header = self.header(id);
        let stop = CancellationToken::new();
        self.runtime.entry(node.to_owned()).or_default().stop_pull = stop.clone();
        let (inputs, node, secrets) = (self.inputs.clone(), node.to_owned(), self.secrets.clone());
        self.tasks.spawn(async move {
            let pull = async {
                let request = tokio::select! {
                    request = request(order, header.clone(), &secrets, &inputs) => request,
                    () = stop.cancelled() => return Ok(()),
                };
                let pull = pull(channel.clone(), request, &node, &inputs, &watchers);
                let stopped = async {
                    stop.cancelled().await;
                    cancel(channel, header).await
                };
                tokio::select! {
                    ended = pull => ended,
                    status = stopped => Err(status),
                }
            };
            let lost = !matches!(tokio::time::timeout(PULL_DEADLINE, pull).await, Ok(Ok(())));
            let _ = inputs.send(Input::PullEnded { node, lost }).await;
        });
    }
}

async fn request(
    order: PullOrder,
    header: Option<CommandHeader>,
    secrets: &PullSecrets,
    inputs: &mpsc::Sender<Input>,
) -> PullRequest {
    let mut sets = Vec::with_capacity(order.claims.len());
    for (place, (key, pull)) in order.claims.iter().enumerate() {
        let loaded = secrets.load(&key.0, pull).await;
        let told = Input::Secrets {
            key: key.clone(),
            trouble: loaded.trouble.clone(),
        };
        let _ = inputs.send(told).await;
        let wanted = |credential: &&v1::Credential| {
            order
                .images
                .iter()
                .filter(|image| image.by.contains(&place))
                .any(|image| !keyring::matching([*credential], repository(&image.image)).is_empty())
        };
        let credentials = loaded
            .credentials
            .iter()
            .filter(wanted)
            .take(256)
            .cloned()
            .collect();
        sets.push(CredentialSet { credentials });
    }
    let now = Timestamp::now();
    let images = order
        .images
        .into_iter()
        .map(|image| wanted_image(image, &order.claims, now))
        .collect();
    PullRequest {
        header,
        images,
        parallelism: order.per_node,
        credential_sets: sets,
        use_node_credential_providers: order.settings.node_credential_providers,
        disk: Some(DiskReserve {
            percent: order.settings.disk_reserve,
            bytes: 0,
        }),
        stall_after: None,
    }
}

/// A normalised reference without its tag or digest.
fn repository(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or_default();
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => name,
    }
}

fn wanted_image(image: OrderedImage, claims: &[(Key, PullFacts)], now: Timestamp) -> WantedImage {
    let asked = || {
        image
            .by
            .iter()
            .filter_map(|place| claims.get(*place))
            .map(|(_, pull)| pull)
    };
    let deadline = asked().map(|pull| pull.deadline).max();
    let pins = image
        .pins
        .iter()
        .map(|pin| v1::Pin {
            owner: pin.owner.clone(),
            until: Some(prost_types::Timestamp {
                seconds: (now + pin.expiry).as_second(),
                nanos: 0,
            }),
        })
        .collect();
    WantedImage {
        reference: image.image.to_string(),
        deadline: deadline.map(|deadline| prost_types::Duration {
            seconds: deadline.as_secs(),
            nanos: 0,
        }),
        attempts: asked().map(|pull| pull.attempts).max().unwrap_or_default(),
        always: image.always,
        credential_sets: image
            .by
            .iter()
            .filter_map(|place| u32::try_from(*place).ok())
            .collect(),
        pins,
    }
}

async fn pull(
    channel: Channel,
    request: PullRequest,
    node: &str,
    inputs: &mpsc::Sender<Input>,
    watchers: &broadcast::Sender<WatchEvent>,
) -> Result<(), Status> {
    let mut stream = client(channel).pull(request).await?.into_inner();
    while let Some(PullEvent { event }) = stream.message().await? {
        if watchers.receiver_count() > 0 {
            let _ = watchers.send(watched(node, event.as_ref()));
        }
        let (image, result) = match event {
            Some(pull_event::Event::Ready(ready)) => {
                let digest = ready.digest.rsplit('@').next().unwrap_or_default().into();
                let result = ReadyImage {
                    digest,
                    was_present: ready.was_present,
                    size: ready.size,
                    fetched: ready.bytes_fetched,
                };
                (ready.image, Ok(result))
            }
            Some(pull_event::Event::Failed(failed)) => {
                let failure = failed.failure.unwrap_or_default();
                let result = FailedImage {
                    reason: failure.reason(),
                    message: shorten(&words(&failure)),
                    retry_after: failed
                        .retry_after
                        .map(|pause| SignedDuration::from_secs(pause.seconds.clamp(0, 86_400))),
                };
                (failed.image, Err(result))
            }
            Some(pull_event::Event::Done(_)) => return Ok(()),
            Some(pull_event::Event::Progress(_)) | None => continue,
        };
        // Only names that we asked for come back; another is not ours to count.
        let Ok(image) = normalise(&image) else {
            continue;
        };
        let input = Input::Image {
            node: node.to_owned(),
            report: ImageReport {
                image: image.into(),
                result,
                at: Timestamp::now(),
            },
        };
        if inputs.send(input).await.is_err() {
            break;
        }
    }
    Err(Status::unknown("the stream ended before the pull was done"))
}

/// Has the agent stop a pull, whose own stream tells of its end; ends only if the agent can't be asked.
async fn cancel(channel: Channel, header: Option<CommandHeader>) -> Status {
    let command_id = header
        .as_ref()
        .map(|header| header.id.clone())
        .unwrap_or_default();
    let header = header.map(|header| CommandHeader {
        id: uuid::Uuid::new_v4().to_string(),
        ..header
    });
    let request = CancelRequest { header, command_id };
    let mut agent = client(channel);
    loop {
        match agent.cancel(request.clone()).await {
            Ok(answer) if answer.get_ref().was_running => return std::future::pending().await,
            // The order itself is still on its way.
            Ok(_) => tokio::time::sleep(CANCEL_PAUSE).await,
            Err(status) => return status,
        }
    }
}

/// What those who watch are told of a pull.
fn watched(node: &str, event: Option<&pull_event::Event>) -> WatchEvent {
    let now = Timestamp::now();
    let event = event.and_then(|event| match event {
        pull_event::Event::Progress(progress) => Some(watch_event::Event::Progress(progress.clone())),
        pull_event::Event::Ready(ready) => Some(watch_event::Event::ImageReady(ready.clone())),
        pull_event::Event::Failed(failed) => Some(watch_event::Event::ImageFailed(failed.clone())),
        pull_event::Event::Done(_) => None,
    });
    WatchEvent {
        at: Some(prost_types::Timestamp {
            seconds: now.as_second(),
            nanos: now.subsec_nanosecond(),
        }),
        node: node.to_owned(),
        event,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_what_stands_before_tag_and_digest() {
        assert_eq!(
            repository("docker.io/library/nginx:latest"),
            "docker.io/library/nginx"
        );
        assert_eq!(repository("host:5000/a/b@sha256:1"), "host:5000/a/b");
        assert_eq!(repository("host:5000/a/b"), "host:5000/a/b");
    }
}
