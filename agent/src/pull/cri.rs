//! CRI's image service: the pull that works everywhere, and the proof.

use std::time::Duration;

use k8s_cri::v1::{AuthConfig, Image, ImageSpec, ImageStatusRequest, PullImageRequest};
use quartermaster_proto::v1::Credential;
use tokio::time::timeout;
use tonic::Status;

use crate::containerd::Daemon;

const STATUS: Duration = Duration::from_secs(10);

/// Pulls. Dropping the future cancels the pull in containerd.
pub(crate) async fn pull(daemon: &Daemon, name: &str, credential: Option<&Credential>) -> Result<(), Status> {
    let auth = credential.map(|credential| AuthConfig {
        username: credential.username.clone(),
        password: credential.password.clone(),
        identity_token: credential.identity_token.clone(),
        registry_token: credential.registry_token.clone(),
        ..Default::default()
    });
    let request = PullImageRequest {
        image: Some(spec(name)),
        auth,
        ..Default::default()
    };
    daemon.images().pull_image(request).await.map(drop)
}

/// What CRI finds under the name, which is what the kubelet will find.
pub(crate) async fn status(daemon: &Daemon, name: &str) -> Result<Option<Image>, Status> {
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

pub(crate) fn spec(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    }
}
