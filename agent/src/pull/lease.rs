//! Leases, which keep what a pull has brought so far from containerd's collection.
//!
//! containerd takes one of its own for each pull, good for a day, and a restart in the middle leaves it there: what had
//! come stays on the disk, and nobody refers to it. So each attempt brings a lease of ours, which is given back
//! whatever becomes of it, and expires soon if nobody can.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use containerd_client::services::v1::leases_client::LeasesClient;
use containerd_client::services::v1::{CreateRequest, DeleteRequest};
use jiff::{SignedDuration, Timestamp};
use tonic::metadata::AsciiMetadataValue;
use tonic::{Code, Request, Status};

use super::layers::locked;
use super::store;
use crate::containerd::Daemon;

/// With a call, names the lease by which it goes.
const HEADER: &str = "containerd-lease";
/// When containerd may drop a lease by itself.
const EXPIRES: &str = "containerd.io/gc.expire";
/// Between the deadline of an attempt and that.
const GRACE: Duration = Duration::from_secs(60);

/// The leases of an order.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<HashSet<String>>);

/// One of them; the default is none, with which containerd takes one of its own.
#[derive(Debug, Default)]
pub(crate) struct Lease(Option<String>);

impl Lease {
    /// Has a call go by this lease.
    pub(crate) fn cover<T>(&self, request: &mut Request<T>) {
        let value = self.0.as_deref().map(AsciiMetadataValue::try_from);
        if let Some(Ok(value)) = value {
            request.metadata_mut().insert(HEADER, value);
        }
    }
}

impl Leases {
    /// A lease for an attempt of at most this long. A daemon that gives none is no obstacle: the pull says what is wrong.
    pub(crate) async fn take(&self, daemon: &Daemon, longest: Duration) -> Lease {
        let id = format!("quartermaster-{}", uuid::Uuid::new_v4());
        let lasts = SignedDuration::try_from(longest + GRACE).unwrap_or(SignedDuration::from_hours(24));
        let expires = Timestamp::now() + lasts;
        let request = store::soon(CreateRequest {
            id: id.clone(),
            labels: HashMap::from([(EXPIRES.to_owned(), format!("{expires:.0}"))]),
        });
        // Before it is asked for: whoever is stopped meanwhile may have it all the same.
        locked(&self.0).insert(id.clone());
        match LeasesClient::new(daemon.channel()).create(request).await {
            Ok(_) => Lease(Some(id)),
            Err(status) => {
                tracing::debug!(message = status.message(), "containerd gives no lease");
                Lease::default()
            }
        }
    }

    /// Gives one back. With `collect`, what it alone had kept is collected at once: its space may be what others lack.
    pub(crate) async fn give_back(&self, daemon: &Daemon, lease: Lease, collect: bool) {
        if let Some(id) = lease.0 {
            self.delete(daemon, id, collect).await;
        }
    }

    /// Gives back all that are left: of pulls that were cancelled, or while containerd was down.
    pub(crate) async fn give_back_all(&self, daemon: &Daemon) {
        let left: Vec<String> = locked(&self.0).iter().cloned().collect();
        for id in left {
            self.delete(daemon, id, true).await;
        }
    }

    async fn delete(&self, daemon: &Daemon, id: String, sync: bool) {
        let request = store::soon(DeleteRequest { id: id.clone(), sync });
        match LeasesClient::new(daemon.channel()).delete(request).await {
            Err(status) if !is_gone(&status) => {
                tracing::debug!(message = status.message(), "a lease could not be given back yet");
            }
            _ => {
                locked(&self.0).remove(&id);
            }
        }
    }
}

/// A lease is deleted before what it kept is collected, which may take longer than anybody waits.
fn is_gone(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::NotFound | Code::DeadlineExceeded | Code::Cancelled
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_names_its_lease_and_one_without_names_none() {
        let mut request = Request::new(());
        Lease::default().cover(&mut request);
        assert!(request.metadata().get(HEADER).is_none());
        Lease(Some("quartermaster-1".into())).cover(&mut request);
        assert_eq!(request.metadata().get(HEADER).unwrap(), "quartermaster-1");
    }
}
