//! containerd's own services, in the namespace in which CRI keeps its images.

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::{
    CreateImageRequest, DeleteImageRequest, GetImageRequest, Image, ListImagesRequest, UpdateImageRequest,
};
use prost_types::FieldMask;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::containerd::Daemon;

const MAX_ANSWER: usize = 32 * 1024 * 1024;
const CALL: std::time::Duration = std::time::Duration::from_secs(10);

/// A request in CRI's namespace.
pub(crate) fn in_cri<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("containerd-namespace", MetadataValue::from_static("k8s.io"));
    request
}

/// Like [`in_cri`], for calls that are answered at once.
pub(crate) fn soon<T>(message: T) -> Request<T> {
    let mut request = in_cri(message);
    request.set_timeout(CALL);
    request
}

/// The content store.
pub(crate) fn content(daemon: &Daemon) -> ContentClient<Channel> {
    ContentClient::new(daemon.channel()).max_decoding_message_size(MAX_ANSWER)
}

fn images(daemon: &Daemon) -> ImagesClient<Channel> {
    ImagesClient::new(daemon.channel()).max_decoding_message_size(MAX_ANSWER)
}

/// The record of this name; `None` where there is none.
pub(crate) async fn image(daemon: &Daemon, name: &str) -> Result<Option<Image>, Status> {
    let request = soon(GetImageRequest {
        name: name.to_owned(),
    });
    match images(daemon).get(request).await {
        Ok(answer) => Ok(answer.into_inner().image),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(status),
    }
}

/// All records.
pub(crate) async fn all_images(daemon: &Daemon) -> Result<Vec<Image>, Status> {
    let answer = images(daemon).list(soon(ListImagesRequest::default())).await?;
    Ok(answer.into_inner().images)
}

/// Makes a record, or leaves one of that name as it is. As with an update, one without a target is never sent.
pub(crate) async fn create_image(daemon: &Daemon, image: Image) -> Result<(), Status> {
    if image.target.is_none() {
        return Err(Status::internal(format!(
            "the record {} has no target",
            image.name
        )));
    }
    let request = soon(CreateImageRequest {
        image: Some(image),
        ..Default::default()
    });
    match images(daemon).create(request).await {
        Err(status) if status.code() != Code::AlreadyExists => Err(status),
        _ => Ok(()),
    }
}

/// Removes a record, if it is there.
pub(crate) async fn delete_image(daemon: &Daemon, name: &str) -> Result<(), Status> {
    let request = soon(DeleteImageRequest {
        name: name.to_owned(),
        ..Default::default()
    });
    match images(daemon).delete(request).await {
        Err(status) if status.code() != Code::NotFound => Err(status),
        _ => Ok(()),
    }
}

/// Sets these labels of a record, removes those with an empty value, and leaves all others. A mask that is empty
/// would replace every label, also CRI's own; a record without its target, even under a mask that does not name it,
/// makes every containerd from 1.6 to 2.4 dereference nil and die.
pub(crate) async fn update_labels(
    daemon: &Daemon,
    image: &Image,
    labels: impl IntoIterator<Item = (String, String)>,
) -> Result<(), Status> {
    let labels: std::collections::HashMap<_, _> = labels.into_iter().collect();
    if labels.is_empty() {
        return Ok(());
    }
    let Some(target) = image.target.clone() else {
        return Err(Status::internal(format!(
            "the record {} has no target",
            image.name
        )));
    };
    let paths = labels.keys().map(|key| format!("labels.{key}")).collect();
    let request = soon(UpdateImageRequest {
        image: Some(Image {
            name: image.name.clone(),
            labels,
            target: Some(target),
            ..Default::default()
        }),
        update_mask: Some(FieldMask { paths }),
        ..Default::default()
    });
    images(daemon).update(request).await.map(drop)
}
