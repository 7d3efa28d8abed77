//! A way to the API server that misbehaves as real ones do: it throttles, lets watches expire, holds their events back,
//! and answers a list with how things were a while ago.
//!
//! Coordinators reach the real API server through it, with their own account's rights. What passes is not changed.

use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::ledger::locked;
use super::observer::{RESTART, restart_id};
use crate::cluster::Cluster;
use crate::deployment::NAMESPACE;

const ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 9), 8080);
/// Of a request and of a list; those of a small fleet have far less.
const MOST: usize = 16 << 20;
/// Of all requests while it throttles.
const REFUSED: f64 = 0.7;
/// Events that wait in a watch.
const QUEUE: usize = 1024;

/// The gateway; it ends when it is dropped.
pub(super) struct Gateway {
    shared: Arc<Shared>,
    _server: JoinSet<()>,
}

struct Shared {
    upstream: kube::Client,
    rules: Mutex<Rules>,
    draw: Mutex<fastrand::Rng>,
    /// Nodes, and the restarts that the API server has taken for them.
    named: Mutex<BTreeSet<(String, String)>>,
    /// Counted up whenever all watches expire.
    expired: watch::Sender<u64>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Rules {
    throttled_until: Option<Instant>,
    held_until: Option<Instant>,
    /// Lists that were asked for, by path and query.
    lists: Vec<String>,
    /// What those are answered with, once.
    stale: HashMap<String, Bytes>,
}

/// What was done to whom asked.
#[derive(Debug, Default)]
struct Counts {
    throttled: AtomicU64,
    expired: AtomicU64,
    stale: AtomicU64,
}

impl Gateway {
    /// Serves in the fabric, with the account of a kubeconfig; returns it with the kubeconfig that leads through it.
    pub(super) async fn start(cluster: &Cluster, kubeconfig: &Path, seed: u64) -> Result<(Self, PathBuf)> {
        let text = std::fs::read_to_string(kubeconfig)?;
        let config = kube::Config::from_custom_kubeconfig(
            Kubeconfig::from_yaml(&text)?,
            &KubeConfigOptions::default(),
        )
        .await?;
        let shared = Arc::new(Shared {
            upstream: kube::Client::try_from(config)?,
            rules: Mutex::default(),
            draw: Mutex::new(fastrand::Rng::with_seed(seed)),
            named: Mutex::default(),
            expired: watch::Sender::new(0),
            counts: Counts::default(),
        });
        let listener = TcpListener::bind(ADDRESS)
            .await
            .with_context(|| format!("the gateway can't listen on {ADDRESS}"))?;
        let routes = axum::Router::new().fallback(pass).with_state(Arc::clone(&shared));
        let mut server = JoinSet::new();
        server.spawn(async move {
            // It ends with its task.
            let _ = axum::serve(listener, routes).await;
        });
        let through = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "gateway",
            "clusters": [{"name": "gateway", "cluster": {"server": format!("http://{ADDRESS}")}}],
            "users": [{"name": "coordinator", "user": {}}],
            "contexts": [{"name": "gateway", "context": {
                "cluster": "gateway", "user": "coordinator", "namespace": NAMESPACE,
            }}],
        });
        let path = cluster.state().join("gateway.kubeconfig");
        crate::pki::write(&path, &through.to_string(), 0o600)?;
        let gateway = Self {
            shared,
            _server: server,
        };
        Ok((gateway, path))
    }

    /// Most requests are answered with 429 for so long; watches that stand go on.
    pub(super) fn throttle(&self, time: Duration) {
        locked(&self.shared.rules).throttled_until = Some(Instant::now() + time);
    }

    /// No watch brings anything for so long, and then everything in its order.
    pub(super) fn hold_back(&self, time: Duration) {
        locked(&self.shared.rules).held_until = Some(Instant::now() + time);
    }

    /// Every watch ends with 410, as one does that has fallen behind what the API server remembers.
    pub(super) fn expire(&self) {
        self.shared.expired.send_modify(|generation| *generation += 1);
    }

    /// Lists as they are now, for [`Gateway::answer_with`].
    pub(super) async fn remember(&self) -> HashMap<String, Bytes> {
        let paths = locked(&self.shared.rules).lists.clone();
        let mut lists = HashMap::new();
        for path in paths {
            // One that can't be had is answered as it is.
            if let Some(body) = self.shared.list(&path).await {
                lists.insert(path, body);
            }
        }
        lists
    }

    /// Every watch expires, and those who list anew get these answers, each once.
    pub(super) fn answer_with(&self, lists: HashMap<String, Bytes>) {
        locked(&self.shared.rules).stale = lists;
        self.expire();
    }

    /// Nothing misbehaves any more.
    pub(super) fn calm_down(&self) {
        let mut rules = locked(&self.shared.rules);
        let lists = std::mem::take(&mut rules.lists);
        *rules = Rules {
            lists,
            ..Rules::default()
        };
    }

    /// Whether the API server has taken a restart by this command for the Node, before anybody could know.
    pub(super) fn has_named(&self, node: &str, id: &str) -> bool {
        locked(&self.shared.named).contains(&(node.to_owned(), id.to_owned()))
    }

    /// What it did, a line for each count.
    pub(super) fn story(&self) -> [String; 3] {
        let counts = &self.shared.counts;
        [
            (&counts.throttled, "requests answered with 429"),
            (&counts.expired, "watches ended with 410"),
            (&counts.stale, "lists answered with what was a while ago"),
        ]
        .map(|(count, what)| format!("{:>6}  {what}", count.load(Ordering::Relaxed)))
    }
}

impl Shared {
    fn throttles(&self) -> bool {
        let throttled = locked(&self.rules)
            .throttled_until
            .is_some_and(|until| Instant::now() < until);
        throttled && locked(&self.draw).f64() < REFUSED
    }

    fn stale(&self, path: &str) -> Option<Bytes> {
        let mut rules = locked(&self.rules);
        if !rules.lists.iter().any(|known| known == path) {
            rules.lists.push(path.to_owned());
        }
        rules.stale.remove(path)
    }

    async fn list(&self, path: &str) -> Option<Bytes> {
        let request = axum::http::Request::get(path)
            .body(kube::client::Body::empty())
            .ok()?;
        let response = self.upstream.send(request).await.ok()?;
        if !response.status().is_success() {
            return None;
        }
        axum::body::to_bytes(Body::new(response.into_body()), MOST)
            .await
            .ok()
    }
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (mut head, body) = request.into_parts();
    let path = head
        .uri
        .path_and_query()
        .map(ToString::to_string)
        .unwrap_or_default();
    let is_get = head.method == Method::GET;
    let is_watch = is_get && has(&path, "watch=");
    if !is_watch && shared.throttles() {
        shared.counts.throttled.fetch_add(1, Ordering::Relaxed);
        return throttled();
    }
    // Of all that is got, only lists are asked for with a limit.
    if is_get
        && !is_watch
        && has(&path, "limit=")
        && let Some(stale) = shared.stale(&path)
    {
        shared.counts.stale.fetch_add(1, Ordering::Relaxed);
        return ([("content-type", "application/json")], stale).into_response();
    }
    let Ok(body) = axum::body::to_bytes(body, MOST).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    head.headers.remove("host");
    head.headers.remove("connection");
    let restart = named_by(&path, &body).filter(|_| head.method == Method::PATCH);
    let generation = shared.expired.subscribe();
    let upstream = axum::http::Request::from_parts(head, kube::client::Body::from(body.to_vec()));
    match shared.upstream.send(upstream).await {
        Err(_) => StatusCode::BAD_GATEWAY.into_response(),
        Ok(response) => {
            let (mut head, body) = response.into_parts();
            if head.status.is_success() {
                locked(&shared.named).extend(restart);
            }
            head.headers.remove("transfer-encoding");
            let body = Body::new(body);
            let body = if is_watch && head.status.is_success() {
                follow(shared, body, generation)
            } else {
                body
            };
            Response::from_parts(head, body)
        }
    }
}

/// The Node and the restart that a patch writes on it.
fn named_by(path: &str, body: &[u8]) -> Option<(String, String)> {
    let node = path.split('?').next()?.strip_prefix("/api/v1/nodes/")?;
    let patch: serde_json::Value = serde_json::from_slice(body).ok()?;
    let restart = patch["metadata"]["annotations"][RESTART].as_str()?;
    Some((node.to_owned(), restart_id(restart.to_owned())))
}

fn has(path: &str, parameter: &str) -> bool {
    let query = path.split_once('?').map(|(_, query)| query).unwrap_or_default();
    query.split('&').any(|one| one.starts_with(parameter))
}

/// Carries a watch on, whole events only, until it expires.
fn follow(shared: Arc<Shared>, body: Body, mut generation: watch::Receiver<u64>) -> Body {
    let (sender, receiver) = mpsc::channel::<Result<Bytes, std::io::Error>>(QUEUE);
    generation.mark_unchanged();
    tokio::spawn(async move {
        let mut parts = body.into_data_stream();
        let mut begun = Vec::new();
        loop {
            let part = tokio::select! {
                part = parts.next() => part,
                Ok(()) = generation.changed() => {
                    shared.counts.expired.fetch_add(1, Ordering::Relaxed);
                    let _ = sender.send(Ok(Bytes::from(expired()))).await;
                    return;
                }
                () = sender.closed() => return,
            };
            let Some(Ok(part)) = part else {
                return;
            };
            let held = locked(&shared.rules).held_until;
            if let Some(until) = held {
                tokio::time::sleep_until(until).await;
            }
            begun.extend_from_slice(&part);
            let Some(end) = begun.iter().rposition(|byte| *byte == b'\n') else {
                continue;
            };
            let rest = begun.split_off(end + 1);
            let events = Bytes::from(std::mem::replace(&mut begun, rest));
            if sender.send(Ok(events)).await.is_err() {
                return;
            }
        }
    });
    Body::from_stream(ReceiverStream::new(receiver))
}

fn throttled() -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 429,
        "reason": "TooManyRequests", "message": "too many requests, please try again later",
        "details": {"retryAfterSeconds": 1},
    });
    let headers = [("content-type", "application/json"), ("retry-after", "1")];
    (StatusCode::TOO_MANY_REQUESTS, headers, status.to_string()).into_response()
}

/// The event by which the API server ends a watch that has fallen behind.
fn expired() -> String {
    let event = json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410,
        "reason": "Expired", "message": "too old resource version",
    }});
    format!("{event}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_and_a_list_are_told_apart_by_their_parameters() {
        assert!(has("/api/v1/nodes?limit=500&watch=true", "watch="));
        assert!(has("/api/v1/nodes?limit=500", "limit="));
        assert!(!has("/api/v1/nodes/watch=", "watch="));
        assert!(!has("/api/v1/nodes?nolimit=5", "limit="));
    }

    #[test]
    fn a_restart_is_read_from_the_patch_that_writes_it() {
        let patch =
            json!({"metadata": {"annotations": {"kwasm.sh/restart": r#"{"id":"7","kind":"install"}"#}}});
        let named = named_by(
            "/api/v1/nodes/worker-1?fieldManager=x",
            patch.to_string().as_bytes(),
        );
        assert_eq!(named, Some(("worker-1".to_owned(), "7".to_owned())));
        assert_eq!(
            named_by(
                "/api/v1/nodes/worker-1",
                br#"{"metadata": {"annotations": {"kwasm.sh/restart": null}}}"#
            ),
            None
        );
    }
}
