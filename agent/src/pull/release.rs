//! Letting go of pins, and of the images that are here for nobody any more.

use std::collections::HashSet;

use k8s_cri::v1::ListContainersRequest;
use tonic::{Request, Status};

use super::pins::{Pin, Whose, letting, now, pins_of};
use super::reference::normalise;
use super::{cri, store};
use crate::containerd::Daemon;

/// What to let go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Whose pins; `None` is everybody's that is ours.
    pub owner: Option<String>,
    /// References that this owner keeps.
    pub keep: Vec<String>,
    /// Remove what is here because of us, that nobody holds and no container uses.
    pub remove_unused: bool,
}

/// What became of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Released {
    /// Images that the owner let go.
    pub released: u32,
    /// Those of them that were removed.
    pub removed: u32,
    /// Images that are still held by us, by name.
    pub held: Vec<(String, Vec<Pin>)>,
}

/// Lets go, and of expired pins too.
///
/// # Errors
/// containerd's own, when it does not do what it is asked.
pub async fn release(daemon: &Daemon, order: &Release) -> Result<Released, Status> {
    // A name that is none keeps nothing.
    let keep: HashSet<String> = order
        .keep
        .iter()
        .filter_map(|name| normalise(name).ok())
        .collect();
    let mut result = Released::default();
    let mut removable = Vec::new();
    for image in store::all_images(daemon).await? {
        let whose = match &order.owner {
            _ if keep.contains(&image.name) => Whose::Expired,
            Some(owner) => Whose::Owner(owner),
            None => Whose::All,
        };
        let letting = letting(&image.labels, whose, now());
        store::update_labels(daemon, &image, letting.changes).await?;
        result.released += u32::from(letting.released);
        if letting.released && letting.removable {
            removable.push(image.name.clone());
        }
        if !letting.held.is_empty() {
            result.held.push((image.name, letting.held));
        }
    }
    if order.remove_unused && !removable.is_empty() {
        let used = used(daemon).await?;
        for name in removable {
            if remove(daemon, &name, &used).await? {
                result.removed += 1;
            }
        }
    }
    result.held.sort_by(|left, right| left.0.cmp(&right.0));
    Ok(result)
}

/// Lets go of pins whose time is over; whether any pin of ours is left.
///
/// # Errors
/// As [`release`].
pub(super) async fn sweep(daemon: &Daemon) -> Result<bool, Status> {
    let mut held = false;
    for image in store::all_images(daemon).await? {
        if pins_of(&image.labels).is_empty() {
            continue;
        }
        let letting = letting(&image.labels, Whose::Expired, now());
        store::update_labels(daemon, &image, letting.changes).await?;
        held |= !letting.held.is_empty();
    }
    Ok(held)
}

/// Images of all containers, also of those that have ended: the kubelet counts them too.
async fn used(daemon: &Daemon) -> Result<HashSet<String>, Status> {
    let mut request = Request::new(ListContainersRequest::default());
    request.set_timeout(std::time::Duration::from_secs(10));
    let containers = daemon.runtime().list_containers(request).await?.into_inner();
    Ok(containers
        .containers
        .into_iter()
        .flat_map(|container| {
            [
                Some(container.image_ref),
                Some(container.image_id),
                container.image.map(|image| image.image),
            ]
        })
        .flatten()
        .collect())
}

/// Removes an image, or only its name where it has others.
async fn remove(daemon: &Daemon, name: &str, used: &HashSet<String>) -> Result<bool, Status> {
    let Some(image) = cri::status(daemon, name).await? else {
        return Ok(false);
    };
    let is_used = used.contains(&image.id)
        || image
            .repo_digests
            .iter()
            .chain(&image.repo_tags)
            .any(|name| used.contains(name));
    if is_used || image.pinned {
        return Ok(false);
    }
    let is_other = |tag: &&String| tag.as_str() != name;
    if image.repo_tags.iter().any(|tag| is_other(&tag)) {
        store::delete_image(daemon, name).await?;
    } else {
        cri::remove(daemon, name).await?;
    }
    Ok(true)
}
