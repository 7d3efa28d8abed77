//! Requests to the API server, counted and timed on their way.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::http::{Method, Request, Response, Uri};
use futures::future::BoxFuture;
use kube::client::Body;
use tower::{Layer, Service};

use super::Metrics;

/// Counts every request that passes.
#[derive(Clone)]
pub(crate) struct Counting(pub(crate) Arc<Metrics>);

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Counted {
            inner,
            metrics: self.0.clone(),
        }
    }
}

/// A way to the API server whose requests are counted.
#[derive(Clone)]
pub(crate) struct Counted<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S, B> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let verb = verb(request.method(), request.uri());
        let (begun, metrics) = (Instant::now(), self.metrics.clone());
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            metrics.count_request(verb, code, begun.elapsed());
            answer
        })
    }
}

/// The verb, with a watch told from a read: it is answered when it begins and goes on for minutes.
fn verb(method: &Method, uri: &Uri) -> &'static str {
    let watch = uri
        .query()
        .is_some_and(|query| query.split('&').any(|pair| pair == "watch=true"));
    match *method {
        Method::GET if watch => "watch",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_told_from_a_read() {
        let of = |method, uri: &'static str| verb(&method, &Uri::from_static(uri));
        assert_eq!(
            of(Method::GET, "/api/v1/nodes?watch=true&resourceVersion=1"),
            "watch"
        );
        assert_eq!(of(Method::GET, "/api/v1/nodes?limit=500"), "get");
        assert_eq!(of(Method::PATCH, "/api/v1/nodes/a"), "patch");
        assert_eq!(of(Method::OPTIONS, "/"), "other");
    }
}
