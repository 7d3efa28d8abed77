//! The image with the module that proves an installation: made in memory, written into containerd's own store.

use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{
    CreateImageRequest, CreateRequest, DeleteImageRequest, DeleteRequest, Image, ListImagesRequest,
    ListRequest, WriteAction, WriteContentRequest,
};
use containerd_client::types::Descriptor;
use serde_json::json;
use sha2::{Digest, Sha256};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::sums::hex;
use crate::checkpoint::checkpoint;

/// Name of the image; the module's path in it.
pub(crate) const MODULE: &str = "/verify.wasm";
const REPOSITORY: &str = "quartermaster.internal/verify";
/// The namespace in which CRI keeps its images.
const NAMESPACE: &str = "k8s.io";
const WASM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/verify.wasm"));
const LEASE: &str = "quartermaster-verify-";
/// An image that nobody committed is collected by containerd after this many seconds.
const LEASE_SECONDS: u64 = 300;

/// One piece of content.
struct Blob {
    media_type: &'static str,
    digest: String,
    bytes: Vec<u8>,
    labels: Vec<(String, String)>,
}

impl Blob {
    fn new(media_type: &'static str, bytes: Vec<u8>) -> Self {
        Self {
            media_type,
            digest: format!("sha256:{}", hex(&Sha256::digest(&bytes))),
            bytes,
            labels: Vec::new(),
        }
    }

    fn descriptor(&self) -> serde_json::Value {
        json!({"mediaType": self.media_type, "digest": self.digest, "size": self.bytes.len()})
    }
}

/// The image as its parts, the manifest last.
pub(crate) struct ModuleImage {
    name: String,
    blobs: [Blob; 3],
}

impl ModuleImage {
    /// Makes the image for the processor this program runs on.
    pub(crate) fn new() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let mut layer = Blob::new(
            "application/vnd.oci.image.layer.v1.tar",
            archive(&MODULE[1..], WASM),
        );
        layer
            .labels
            .push(("containerd.io/uncompressed".to_owned(), layer.digest.clone()));
        let config = Blob::new(
            "application/vnd.oci.image.config.v1+json",
            json!({
                "architecture": architecture,
                "os": "linux",
                "config": {"Entrypoint": [MODULE]},
                "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
            })
            .to_string()
            .into_bytes(),
        );
        let mut manifest = Blob::new(
            "application/vnd.oci.image.manifest.v1+json",
            json!({
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": config.descriptor(),
                "layers": [layer.descriptor()],
            })
            .to_string()
            .into_bytes(),
        );
        manifest.labels = vec![
            (
                "containerd.io/gc.ref.content.config".to_owned(),
                config.digest.clone(),
            ),
            (
                "containerd.io/gc.ref.content.l.0".to_owned(),
                layer.digest.clone(),
            ),
        ];
        // The name changes with the module, so an older image of ours is never mistaken for this one.
        let tag = &layer.digest["sha256:".len()..][..12];
        Self {
            name: format!("{REPOSITORY}:{tag}"),
            blobs: [layer, config, manifest],
        }
    }

    /// The reference under which CRI knows the image.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Writes the image into containerd's store. It being there already is success.
    pub(crate) async fn import(&self, channel: Channel) -> Result<(), Status> {
        let lease = self.lease(channel.clone()).await?;
        let written = self.write(channel.clone(), &lease).await;
        let mut leases = LeasesClient::new(channel);
        checkpoint("delete the lease");
        let _ = leases
            .delete(scoped(DeleteRequest {
                id: lease,
                sync: false,
            }))
            .await;
        written
    }

    async fn lease(&self, channel: Channel) -> Result<String, Status> {
        let id = format!("{LEASE}{}", uuid::Uuid::new_v4().simple());
        let expires = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(LEASE_SECONDS as i64);
        let labels = [("containerd.io/gc.expire".to_owned(), format!("{expires:.0}"))];
        checkpoint("create a lease");
        LeasesClient::new(channel)
            .create(scoped(CreateRequest {
                id: id.clone(),
                labels: labels.into(),
            }))
            .await?;
        Ok(id)
    }

    async fn write(&self, channel: Channel, lease: &str) -> Result<(), Status> {
        let leased: MetadataValue<Ascii> = lease
            .parse()
            .map_err(|_| Status::internal("a lease's name is not ASCII"))?;
        let mut content = ContentClient::new(channel.clone());
        for blob in &self.blobs {
            let message = WriteContentRequest {
                action: WriteAction::Commit.into(),
                r#ref: format!("quartermaster-{}", blob.digest),
                total: blob.bytes.len() as i64,
                expected: blob.digest.clone(),
                offset: 0,
                data: blob.bytes.clone(),
                labels: blob.labels.iter().cloned().collect(),
            };
            let mut request = scoped(tokio_stream::once(message));
            request.metadata_mut().insert("containerd-lease", leased.clone());
            checkpoint(format_args!("commit the content {}", blob.media_type));
            let answered = match content.write(request).await {
                Ok(answers) => answers.into_inner().message().await.map(drop),
                Err(status) => Err(status),
            };
            match answered {
                Err(status) if status.code() != Code::AlreadyExists => return Err(status),
                _ => {}
            }
        }
        let [_, _, manifest] = &self.blobs;
        let mut request = scoped(CreateImageRequest {
            image: Some(Image {
                name: self.name.clone(),
                target: Some(Descriptor {
                    media_type: manifest.media_type.to_owned(),
                    digest: manifest.digest.clone(),
                    size: manifest.bytes.len() as i64,
                    annotations: Default::default(),
                }),
                ..Default::default()
            }),
            ..Default::default()
        });
        request.metadata_mut().insert("containerd-lease", leased);
        checkpoint("create the module's image");
        match ImagesClient::new(channel).create(request).await {
            Err(status) if status.code() != Code::AlreadyExists => Err(status),
            _ => Ok(()),
        }
    }
}

/// Removes images and leases that an earlier verification left behind. What cannot be removed is left to the next.
pub(crate) async fn sweep(channel: Channel) {
    let mut images = ImagesClient::new(channel.clone());
    let listed = images.list(scoped(ListImagesRequest::default())).await;
    for image in listed.map(|list| list.into_inner().images).unwrap_or_default() {
        if image.name.starts_with(REPOSITORY) {
            checkpoint("remove an image");
            let request = DeleteImageRequest {
                name: image.name,
                ..Default::default()
            };
            let _ = images.delete(scoped(request)).await;
        }
    }
    let mut leases = LeasesClient::new(channel);
    let listed = leases.list(scoped(ListRequest::default())).await;
    for lease in listed.map(|list| list.into_inner().leases).unwrap_or_default() {
        if lease.id.starts_with(LEASE) {
            checkpoint("delete a lease");
            let request = DeleteRequest {
                id: lease.id,
                sync: false,
            };
            let _ = leases.delete(scoped(request)).await;
        }
    }
}

fn scoped<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
    request
}

/// A tar archive of one file.
fn archive(name: &str, bytes: &[u8]) -> Vec<u8> {
    const BLOCK: usize = 512;
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000755\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", bytes.len()));
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\u{0}00");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.extend_from_slice(bytes);
    archive.resize(archive.len().next_multiple_of(BLOCK) + 2 * BLOCK, 0);
    archive
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_refers_to_its_parts_by_their_digests() {
        let image = ModuleImage::new();
        let [layer, config, manifest] = &image.blobs;
        let text = String::from_utf8(manifest.bytes.clone()).unwrap();
        assert!(text.contains(&layer.digest) && text.contains(&config.digest));
        let config = String::from_utf8(config.bytes.clone()).unwrap();
        assert!(config.contains(&layer.digest));
        assert_eq!(layer.bytes.len() % 512, 0);
        assert!(image.name().starts_with("quartermaster.internal/verify:"));
    }

    #[test]
    fn the_archive_is_one_that_tar_reads() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("layer.tar");
        std::fs::write(&file, archive("verify.wasm", WASM)).unwrap();
        let listing = std::process::Command::new("tar")
            .arg("-tvf")
            .arg(&file)
            .output()
            .unwrap();
        let listing = String::from_utf8_lossy(&listing.stdout).into_owned();
        assert!(
            listing.starts_with("-rwxr-xr-x") && listing.contains("verify.wasm"),
            "{listing}"
        );
        assert!(listing.contains(&WASM.len().to_string()), "{listing}");
    }
}
