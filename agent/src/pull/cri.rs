//! CRI's image service: the pull that works everywhere, and the proof.

use std::time::Duration;

use k8s_cri::v1::{
    AuthConfig, Image, ImageSpec, ImageStatusRequest, ImageStatusResponse, PullImageRequest,
    RemoveImageRequest,
};
use quartermaster_proto::v1::Credential;
use tokio::time::timeout;
use tonic::{Request, Status};

use super::lease::Lease;
use crate::containerd::Daemon;

const STATUS: Duration = Duration::from_secs(10);
const REMOVE: Duration = Duration::from_secs(60);

/// Pulls. Dropping the future cancels the pull in containerd.
pub(crate) async fn pull(
    daemon: &Daemon,
    name: &str,
    credential: Option<&Credential>,
    lease: &Lease,
) -> Result<(), Status> {
    let auth = credential.map(|credential| AuthConfig {
        username: credential.username.clone(),
        password: credential.password.clone(),
        identity_token: credential.identity_token.clone(),
        registry_token: credential.registry_token.clone(),
        ..Default::default()
    });
    let mut request = Request::new(PullImageRequest {
        image: Some(spec(name)),
        auth,
        ..Default::default()
    });
    lease.cover(&mut request);
    daemon.images().pull_image(request).await.map(drop)
}

/// What CRI finds under the name, which is what the kubelet will find.
pub(crate) async fn status(daemon: &Daemon, name: &str) -> Result<Option<Image>, Status> {
    Ok(ask(daemon, name, false).await?.image)
}

/// The same, and for which processor the image is by its own configuration; empty where that does not say.
pub(crate) async fn proof(daemon: &Daemon, name: &str) -> Result<Option<(Image, String)>, Status> {
    let answer = ask(daemon, name, true).await?;
    let architecture = answer
        .info
        .get("info")
        .map(String::as_str)
        .and_then(architecture_in);
    Ok(answer
        .image
        .map(|image| (image, architecture.unwrap_or_default())))
}

fn architecture_in(info: &str) -> Option<String> {
    let info: serde_json::Value = serde_json::from_str(info).ok()?;
    Some(info["imageSpec"]["architecture"].as_str()?.to_owned())
}

async fn ask(daemon: &Daemon, name: &str, verbose: bool) -> Result<ImageStatusResponse, Status> {
    let request = ImageStatusRequest {
        image: Some(spec(name)),
        verbose,
    };
    let mut images = daemon.images();
    match timeout(STATUS, images.image_status(request)).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Status::unavailable("containerd's ImageStatus does not answer")),
    }
}

/// Removes an image by all its names.
pub(crate) async fn remove(daemon: &Daemon, name: &str) -> Result<(), Status> {
    let mut request = Request::new(RemoveImageRequest {
        image: Some(spec(name)),
    });
    request.set_timeout(REMOVE);
    daemon.images().remove_image(request).await.map(drop)
}

pub(crate) fn spec(name: &str) -> ImageSpec {
    ImageSpec {
        image: name.to_owned(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_read_from_the_images_configuration() {
        let info = r#"{"chainID":"sha256:1","imageSpec":{"architecture":"arm64","os":"linux"}}"#;
        assert_eq!(architecture_in(info).as_deref(), Some("arm64"));
        assert_eq!(architecture_in("{}"), None);
    }
}
