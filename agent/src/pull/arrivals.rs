//! What containerd's content store tells of a pull that tells nothing itself.
//!
//! Each blob carries the repositories that it came from, so the manifests of an image are found as soon as they are
//! there; what is still coming is among the store's open writes. Nothing here aborts a write: its key is the blob's
//! digest, and a kubelet may be waiting for the same one.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use containerd_client::services::v1::{Info, ListContentRequest, ListStatusesRequest, ReadContentRequest};
use serde::Deserialize;
use tokio::time::sleep;
use tonic::Status;

use super::layers::{Layer, Layers};
use super::reference::repository_of;
use super::store;
use crate::containerd::Daemon;

const LOOK: Duration = Duration::from_millis(400);
/// No manifest is larger.
const MAX_MANIFEST: i64 = 4 * 1024 * 1024;

#[derive(Deserialize)]
struct Manifest {
    layers: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    size: u64,
}

/// Follows the pull of `name` for ever, into `layers`.
pub(crate) async fn follow(daemon: &Daemon, name: &str, since: SystemTime, layers: &Layers) {
    // By digest: what a manifest lists; nothing for what is no manifest.
    let mut manifests: HashMap<String, Vec<(String, u64)>> = HashMap::new();
    loop {
        sleep(LOOK).await;
        // A daemon that does not answer now is asked again; the pull itself says if it is gone.
        let _ = look(daemon, name, since, layers, &mut manifests).await;
    }
}

async fn look(
    daemon: &Daemon,
    name: &str,
    since: SystemTime,
    layers: &Layers,
    manifests: &mut HashMap<String, Vec<(String, u64)>>,
) -> Result<(), Status> {
    let statuses = store::content(daemon)
        .list_statuses(store::soon(ListStatusesRequest::default()))
        .await?
        .into_inner()
        .statuses;
    let coming: HashMap<&str, i64> = statuses
        .iter()
        .filter_map(|status| Some((status.r#ref.split_once("sha256:")?.1, status.offset)))
        .collect();
    let there = of_repository(daemon, name).await?;
    for info in there.iter().filter(|info| is_manifest(info)) {
        if manifests.contains_key(&info.digest) {
            continue;
        }
        let listed = serde_json::from_slice::<Manifest>(&read(daemon, &info.digest).await?)
            .ok()
            .and_then(|manifest| manifest.layers)
            .unwrap_or_default();
        let listed = listed.into_iter().map(|layer| (layer.digest, layer.size));
        manifests.insert(info.digest.clone(), listed.collect());
        layers.stir();
    }
    let whole: HashMap<&str, &Info> = there.iter().map(|info| (info.digest.as_str(), info)).collect();
    for (digest, listed) in manifests.iter() {
        // Another tag of the repository has manifests there too: those that came before count only while
        // something of them is coming.
        let is_coming = listed.iter().any(|(layer, _)| {
            layer
                .split_once(':')
                .is_some_and(|(_, hex)| coming.contains_key(hex))
        });
        if !is_coming && !whole.get(digest.as_str()).is_some_and(|info| came(info, since)) {
            continue;
        }
        for (layer, total) in listed {
            let hex = layer.split_once(':').map_or("", |(_, hex)| hex);
            let offset = match coming.get(hex) {
                Some(offset) => u64::try_from(*offset).unwrap_or_default(),
                None if whole.contains_key(layer.as_str()) => *total,
                None => 0,
            };
            let total = *total;
            layers.see(layer, Layer { offset, total });
        }
    }
    Ok(())
}

/// Bytes of the image's repository that came since then, each digest once for all who ask with the same set.
pub(crate) async fn bytes_since(
    daemon: &Daemon,
    name: &str,
    since: SystemTime,
    counted: &std::sync::Mutex<HashSet<String>>,
) -> Result<u64, Status> {
    let there = of_repository(daemon, name).await?;
    let mut counted = super::layers::locked(counted);
    Ok(there
        .iter()
        .filter(|info| came(info, since) && counted.insert(info.digest.clone()))
        .filter_map(|info| u64::try_from(info.size).ok())
        .sum())
}

/// What refers to other content is an index or a manifest.
fn is_manifest(info: &Info) -> bool {
    info.size <= MAX_MANIFEST
        && info
            .labels
            .keys()
            .any(|label| label.starts_with("containerd.io/gc.ref.content"))
}

fn came(info: &Info, since: SystemTime) -> bool {
    info.created_at
        .and_then(|at| SystemTime::try_from(at).ok())
        .is_some_and(|at| at >= since)
}

async fn of_repository(daemon: &Daemon, name: &str) -> Result<Vec<Info>, Status> {
    let request = ListContentRequest {
        filters: vec![filter(name)],
    };
    let mut stream = store::content(daemon)
        .list(store::soon(request))
        .await?
        .into_inner();
    let mut found = Vec::new();
    while let Some(page) = stream.message().await? {
        found.extend(page.info);
    }
    Ok(found)
}

/// The label of a blob holds its repositories, separated by commas.
fn filter(name: &str) -> String {
    let (host, path) = repository_of(name).split_once('/').unwrap_or(("docker.io", name));
    // containerd names the host without its port there.
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name.trim_matches(['[', ']']),
        _ => host,
    };
    let path = path.replace('.', "\\\\.");
    format!("labels.\"containerd.io/distribution.source.{host}\"~=\"(^|,){path}(,|$)\"")
}

async fn read(daemon: &Daemon, digest: &str) -> Result<Vec<u8>, Status> {
    let request = ReadContentRequest {
        digest: digest.to_owned(),
        ..Default::default()
    };
    let mut stream = store::content(daemon)
        .read(store::soon(request))
        .await?
        .into_inner();
    let mut bytes = Vec::new();
    while let Some(part) = stream.message().await? {
        bytes.extend(part.data);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_are_looked_up_by_the_repository_they_came_from() {
        assert_eq!(
            filter("host:5000/team/x.y:1"),
            "labels.\"containerd.io/distribution.source.host\"~=\"(^|,)team/x\\\\.y(,|$)\""
        );
    }
}
