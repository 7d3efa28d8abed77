//! Whether a restarted containerd is healthy, and how long its socket did not answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::journal::Promise;
use crate::containerd::{Daemon, Served};
use crate::host::HostRoot;

const POLL: Duration = Duration::from_millis(2);
const CALL: Duration = Duration::from_secs(2);

/// What a healthy daemon must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Our handler is served.
    With,
    /// Our handler is not.
    Without,
    /// Either way.
    Any,
}

/// Decides what is missing for a daemon to be healthy; `None` when nothing is.
pub(crate) fn missing(served: &Served, promise: &Promise, wanted: Wanted) -> Option<String> {
    if !served.runtime_ready {
        return Some(format!("the runtime is not ready ({})", served.complaint));
    }
    if promise.network_ready && !served.network_ready {
        return Some(format!(
            "the network was ready before and is not now ({})",
            served.complaint
        ));
    }
    if served.default_runtime != promise.default_runtime {
        return Some(format!(
            "the default runtime is {:?} and was {:?}",
            served.default_runtime, promise.default_runtime
        ));
    }
    if let Some(name) = promise.handlers.iter().find(|name| !served.serves(name)) {
        return Some(format!("the handler {name:?} is not served any more"));
    }
    let ours = served.serves(&promise.ours);
    match wanted {
        Wanted::With if !ours => Some(format!("the handler {:?} is not served", promise.ours)),
        Wanted::Without if ours => Some(format!("the handler {:?} is still served", promise.ours)),
        _ => None,
    }
}

/// Waits until a daemon is healthy.
///
/// # Errors
/// What was missing to the end.
pub(crate) async fn wait_healthy(
    root: &Arc<HostRoot>,
    socket: &str,
    promise: &Promise,
    wanted: Wanted,
    deadline: Instant,
) -> Result<(), String> {
    loop {
        let daemon = Daemon::with_deadline(Arc::clone(root), socket, CALL);
        let lack = match daemon.served().await {
            Ok(served) => match missing(&served, promise, wanted) {
                None => return Ok(()),
                Some(lack) => lack,
            },
            Err(error) => error.to_string(),
        };
        if Instant::now() >= deadline {
            return Err(lack);
        }
        sleep(POLL * 5).await;
    }
}

/// Watches a socket beside a restart.
pub(crate) struct Gauge {
    stop: Arc<Notify>,
    watch: tokio::task::JoinHandle<Duration>,
}

impl Gauge {
    /// Begins to watch.
    pub(crate) fn start(root: &Arc<HostRoot>, socket: &str) -> Self {
        let stop = Arc::new(Notify::new());
        let (root, socket, stopped) = (Arc::clone(root), socket.to_owned(), Arc::clone(&stop));
        let watch = tokio::spawn(async move {
            let (mut answered, mut longest) = (Instant::now(), Duration::ZERO);
            let mut stopping = false;
            loop {
                // A connection each: one that is kept would show when it broke, not when the socket came back.
                let daemon = Daemon::with_deadline(Arc::clone(&root), &socket, CALL);
                if daemon.ping().await.is_ok() {
                    let now = Instant::now();
                    longest = longest.max(now - answered);
                    answered = now;
                    if stopping {
                        return longest;
                    }
                }
                tokio::select! {
                    () = stopped.notified(), if !stopping => stopping = true,
                    () = sleep(POLL) => {}
                }
            }
        });
        Self { stop, watch }
    }

    /// The longest time between two answers, up to one answer more from now; what was measured until then when
    /// none comes.
    pub(crate) async fn finish(self) -> Duration {
        self.stop.notify_one();
        let abort = self.watch.abort_handle();
        match tokio::time::timeout(CALL, self.watch).await {
            Ok(Ok(gap)) => gap,
            _ => {
                abort.abort();
                Duration::ZERO
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn served(handlers: &[&str]) -> Served {
        Served {
            runtime_ready: true,
            network_ready: true,
            complaint: String::new(),
            default_runtime: "runc".into(),
            runtimes: handlers
                .iter()
                .map(|name| ((*name).to_owned(), json!({})))
                .collect(),
            handlers: Default::default(),
            settings: json!({}),
            sandbox_image: None,
        }
    }

    #[test]
    fn a_daemon_is_healthy_only_with_all_that_was_there() {
        let promise = Promise {
            default_runtime: "runc".into(),
            handlers: vec!["runc".into(), "kata".into()],
            ours: "crun".into(),
            network_ready: true,
        };
        let all = served(&["runc", "kata", "crun"]);
        assert_eq!(missing(&all, &promise, Wanted::With), None);
        assert!(
            missing(&all, &promise, Wanted::Without)
                .unwrap()
                .contains("still")
        );
        let without = served(&["runc", "kata"]);
        assert!(missing(&without, &promise, Wanted::With).is_some());
        assert_eq!(missing(&without, &promise, Wanted::Without), None);
        assert_eq!(missing(&without, &promise, Wanted::Any), None);
        assert!(
            missing(&served(&["runc", "crun"]), &promise, Wanted::With)
                .unwrap()
                .contains("kata")
        );
        let mut down = all.clone();
        down.network_ready = false;
        assert!(
            missing(&down, &promise, Wanted::With)
                .unwrap()
                .contains("network")
        );
        down.runtime_ready = false;
        assert!(
            missing(&down, &promise, Wanted::With)
                .unwrap()
                .contains("runtime")
        );
        let mut other = all;
        other.default_runtime = "kata".into();
        assert!(
            missing(&other, &promise, Wanted::With)
                .unwrap()
                .contains("default")
        );
    }
}
