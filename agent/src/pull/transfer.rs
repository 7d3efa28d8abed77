//! A pull by containerd's transfer service.
//!
//! It does what CRI does on the same daemon, with the same folders, headers and snapshotter, and tells its progress.

use std::time::Duration;

use containerd_client::services::v1::streaming_client::StreamingClient;
use containerd_client::services::v1::transfer_client::TransferClient;
use containerd_client::services::v1::{Image, StreamInit, TransferOptions, TransferRequest};
use containerd_client::to_any;
use containerd_client::types::Platform;
use containerd_client::types::transfer::{
    AuthRequest, AuthResponse, AuthType, ImageStore, OciRegistry, Progress, RegistryResolver,
    UnpackConfiguration,
};
use prost::Message;
use prost_types::Any;
use quartermaster_proto::v1::Credential;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Status, Streaming};

use super::facts::NodeOffer;
use super::layers::{Layer, Layers};
use super::lease::Lease;
use super::reference::repository_of;
use super::store;
use super::way::architecture;
use crate::containerd::Daemon;

const OPEN: Duration = Duration::from_secs(10);

/// One transfer.
pub(crate) struct Transfer<'a> {
    pub(crate) daemon: &'a Daemon,
    pub(crate) offer: &'a NodeOffer,
    /// Folder with the registry's `hosts.toml`.
    pub(crate) hosts: Option<&'a str>,
    /// Full.
    pub(crate) name: &'a str,
    pub(crate) credential: Option<&'a Credential>,
    pub(crate) lease: &'a Lease,
    pub(crate) layers: &'a std::sync::Arc<Layers>,
}

/// Whether the daemon says that the transfer service can't unpack here after all, whatever its files say.
pub(crate) fn is_unable(status: &Status) -> bool {
    status.message().contains("no unpack platforms defined") || status.code() == tonic::Code::Unimplemented
}

impl Transfer<'_> {
    /// Pulls. Dropping the future cancels the transfer in containerd.
    pub(crate) async fn run(self) -> Result<(), Status> {
        // The streams are named in the request, and a name that is not registered yet is an error: each is opened
        // and acknowledged first.
        let (progress_id, mut progress, _open) = self.stream().await?;
        let layers = std::sync::Arc::clone(self.layers);
        let _progress = AbortOnDropHandle::new(tokio::spawn(async move {
            while let Ok(Some(any)) = progress.message().await {
                if let Ok(event) = Progress::decode(any.value.as_slice()) {
                    note(&layers, &event);
                }
            }
        }));
        // Without a credential there is no stream, since a request on it that is not answered hangs the pull.
        let (auth_stream, _answers) = match self.credential {
            None => (String::new(), None),
            Some(credential) => {
                let (id, requests, answers) = self.stream().await?;
                let task = tokio::spawn(answer(requests, answers, credential.clone()));
                (id, Some(AbortOnDropHandle::new(task)))
            }
        };
        let platform = Platform {
            os: "linux".to_owned(),
            architecture: architecture().to_owned(),
            ..Default::default()
        };
        let source = OciRegistry {
            reference: self.name.to_owned(),
            resolver: Some(RegistryResolver {
                auth_stream,
                headers: self.offer.images.headers.iter().cloned().collect(),
                host_dir: self.hosts.unwrap_or_default().to_owned(),
                ..Default::default()
            }),
        };
        let destination = ImageStore {
            name: self.name.to_owned(),
            platforms: vec![platform.clone()],
            unpacks: vec![UnpackConfiguration {
                platform: Some(platform),
                snapshotter: self.offer.images.snapshotter.clone(),
            }],
            ..Default::default()
        };
        let mut request = store::in_cri(TransferRequest {
            source: Some(to_any(&source)),
            destination: Some(to_any(&destination)),
            options: Some(TransferOptions {
                progress_stream: progress_id,
            }),
        });
        self.lease.cover(&mut request);
        TransferClient::new(self.daemon.channel())
            .transfer(request)
            .await?;
        self.name_by_digest().await
    }

    /// CRI's own pull also names the image by its digest; without that name a pod that asks by digest pulls again.
    async fn name_by_digest(&self) -> Result<(), Status> {
        if self.name.contains('@') {
            return Ok(());
        }
        let Some(image) = store::image(self.daemon, self.name).await? else {
            return Ok(());
        };
        let digest = image.target.as_ref().map(|target| target.digest.as_str());
        let name = format!("{}@{}", repository_of(self.name), digest.unwrap_or_default());
        let named = Image {
            name,
            target: image.target,
            ..Default::default()
        };
        store::create_image(self.daemon, named).await
    }

    /// A stream of a new name: what comes, and where answers go. It ends when the latter is dropped.
    async fn stream(&self) -> Result<(String, Streaming<Any>, mpsc::Sender<Any>), Status> {
        let id = format!("quartermaster-{}", uuid::Uuid::new_v4());
        let (sender, receiver) = mpsc::channel(4);
        let hung = || Status::deadline_exceeded("containerd does not open a stream");
        let init = to_any(&StreamInit { id: id.clone() });
        sender.send(init).await.map_err(|_| hung())?;
        let mut client = StreamingClient::new(self.daemon.channel());
        let request = store::in_cri(ReceiverStream::new(receiver));
        let open = async {
            let mut stream = client.stream(request).await?.into_inner();
            stream.message().await?.ok_or_else(hung)?;
            Ok::<_, Status>(stream)
        };
        let stream = timeout(OPEN, open).await.map_err(|_| hung())??;
        Ok((id, stream, sender))
    }
}

/// Answers every request for a credential, whichever host asks: that is what CRI does with the kubelet's.
async fn answer(mut requests: Streaming<Any>, answers: mpsc::Sender<Any>, credential: Credential) {
    while let Ok(Some(any)) = requests.message().await {
        if AuthRequest::decode(any.value.as_slice()).is_err() {
            continue;
        }
        let response = if credential.identity_token.is_empty() {
            AuthResponse {
                auth_type: AuthType::Credentials.into(),
                username: credential.username.clone(),
                secret: credential.password.clone(),
                ..Default::default()
            }
        } else {
            AuthResponse {
                auth_type: AuthType::Refresh.into(),
                secret: credential.identity_token.clone(),
                ..Default::default()
            }
        };
        if answers.send(to_any(&response)).await.is_err() {
            return;
        }
    }
}

fn note(layers: &Layers, event: &Progress) {
    let layer = event
        .desc
        .as_ref()
        .filter(|desc| desc.media_type.contains("layer") || desc.media_type.contains("rootfs.diff"));
    let size = |value: i64| u64::try_from(value).unwrap_or_default();
    match (layer, event.event.as_str()) {
        (Some(desc), "waiting" | "downloading") => {
            let seen = Layer {
                offset: size(event.progress),
                total: size(desc.size),
            };
            layers.see(&desc.digest, seen);
        }
        (Some(desc), "complete" | "already exists" | "extracting" | "extracted") => {
            let total = size(desc.size);
            layers.see(&desc.digest, Layer { offset: total, total });
            layers.stir();
        }
        _ => layers.stir(),
    }
}

#[cfg(test)]
mod tests {
    use containerd_client::types::Descriptor;

    use super::*;

    fn event(kind: &str, media_type: &str, progress: i64) -> Progress {
        Progress {
            event: kind.to_owned(),
            progress,
            desc: Some(Descriptor {
                media_type: media_type.to_owned(),
                digest: "sha256:a".to_owned(),
                size: 100,
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn layers_are_followed_and_manifests_are_not_counted() {
        let layers = Layers::new();
        let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
        note(
            &layers,
            &event("complete", "application/vnd.oci.image.manifest.v1+json", 100),
        );
        assert_eq!(layers.snapshot().total(), 0);
        note(&layers, &event("waiting", media_type, 0));
        note(&layers, &event("downloading", media_type, 40));
        let seen = layers.snapshot();
        assert_eq!((seen.done(), seen.total()), (40, 100));
        note(&layers, &event("extracting", media_type, 7));
        assert!(layers.snapshot().is_whole());
    }

    #[test]
    fn a_daemon_that_cannot_unpack_is_told_from_a_registry_that_fails() {
        let unable = Status::unknown("unable to initialize unpacker: no unpack platforms defined");
        assert!(is_unable(&unable));
        assert!(is_unable(&Status::unimplemented("unknown service")));
        assert!(!is_unable(&Status::unknown("not found")));
    }
}
