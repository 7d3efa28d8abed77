//! For how long this replica may act as the leader, and the fence around what acts for it.
//!
//! A process that was paused (SIGSTOP, a machine that sleeps) wakes in the middle of what it did and does not
//! know that time has passed. So every write of the leader looks at the clock first, and one that waits
//! (throttled, or for a connection) is given up when the Lease has run out under it.

use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::{Method, Request};
use futures::future::BoxFuture;
use kube::client::Body;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tower::{BoxError, Layer, Service};

/// Until when the Lease is surely held.
#[derive(Debug)]
pub(crate) struct Tenure {
    until: watch::Sender<Option<Instant>>,
}

/// A write was not sent, or given up: this replica does not lead.
#[derive(Debug, thiserror::Error)]
#[error("this replica holds the Lease no more; the write is left to the one that does")]
struct Lapsed;

impl Tenure {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            until: watch::Sender::new(None),
        })
    }

    pub(super) fn set(&self, until: Option<Instant>) {
        self.until.send_replace(until);
    }

    pub(super) fn holds(&self) -> bool {
        self.until.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Ends when the Lease is held no more.
    pub(super) async fn lapsed(&self) {
        let mut changes = self.until.subscribe();
        loop {
            let until = *changes.borrow_and_update();
            let Some(until) = until.filter(|until| Instant::now() < *until) else {
                return;
            };
            tokio::select! {
                () = sleep_until(until) => {}
                _ = changes.changed() => {}
            }
        }
    }
}

/// Lets writes pass only while the Lease is held; reads always.
#[derive(Debug, Clone)]
pub(crate) struct Fence(Arc<Tenure>);

impl Fence {
    pub(super) fn before(tenure: Arc<Tenure>) -> Self {
        Self(tenure)
    }
}

impl<S> Layer<S> for Fence {
    type Service = Fenced<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Fenced {
            inner,
            tenure: self.0.clone(),
        }
    }
}

/// A way to the API server with the fence before it.
#[derive(Debug, Clone)]
pub(crate) struct Fenced<S> {
    inner: S,
    tenure: Arc<Tenure>,
}

impl<S> Service<Request<Body>> for Fenced<S>
where
    S: Service<Request<Body>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method() == Method::GET {
            let answer = self.inner.call(request);
            return Box::pin(async move { answer.await.map_err(Into::into) });
        }
        if !self.tenure.holds() {
            return Box::pin(async { Err(Lapsed.into()) });
        }
        let (answer, tenure) = (self.inner.call(request), self.tenure.clone());
        Box::pin(async move {
            tokio::select! {
                // First: after a pause both may be ready, and then what was not sent must not be sent.
                biased;
                () = tenure.lapsed() => Err(Lapsed.into()),
                answer = answer => answer.map_err(Into::into),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::Response;
    use tower::ServiceExt as _;

    use super::*;

    /// An API server that takes this long to answer.
    async fn send(tenure: &Arc<Tenure>, method: Method, takes: Duration) -> Result<(), String> {
        let server = tower::service_fn(move |_: Request<Body>| async move {
            tokio::time::sleep(takes).await;
            Ok::<_, BoxError>(Response::new(Body::empty()))
        });
        let request = Request::builder().method(method).body(Body::empty());
        Fence::before(tenure.clone())
            .layer(server)
            .oneshot(request.expect("a request"))
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_writes_and_after_its_lease_has_run_out_it_only_reads() {
        let tenure = Tenure::new();
        let quick = Duration::from_millis(1);
        assert!(send(&tenure, Method::PATCH, quick).await.is_err());
        tenure.set(Some(Instant::now() + Duration::from_secs(8)));
        assert_eq!(send(&tenure, Method::PATCH, quick).await, Ok(()));
        // As after a SIGSTOP: the time is over and nobody has said so.
        tokio::time::advance(Duration::from_secs(9)).await;
        for method in [Method::PATCH, Method::POST, Method::PUT, Method::DELETE] {
            let refused = send(&tenure, method, quick).await;
            assert!(
                refused
                    .as_ref()
                    .is_err_and(|words| words.contains("holds the Lease no more")),
                "{refused:?}"
            );
        }
        assert_eq!(send(&tenure, Method::GET, quick).await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_that_waits_longer_than_the_lease_lasts_is_given_up_unless_it_is_renewed() {
        let tenure = Tenure::new();
        tenure.set(Some(Instant::now() + Duration::from_secs(8)));
        assert!(
            send(&tenure, Method::PATCH, Duration::from_secs(20))
                .await
                .is_err()
        );

        tenure.set(Some(Instant::now() + Duration::from_secs(8)));
        let renewing = async {
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_secs(3)).await;
                tenure.set(Some(Instant::now() + Duration::from_secs(8)));
            }
        };
        let (answer, ()) = tokio::join!(send(&tenure, Method::PATCH, Duration::from_secs(20)), renewing);
        assert_eq!(answer, Ok(()));
    }
}
