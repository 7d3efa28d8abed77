//! Prometheus metrics: the version, the certificate, and commands by kind and outcome.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Kinds of commands, as they stand in the label `command`.
pub(crate) const KINDS: [&str; 4] = ["provision", "unprovision", "verify", "pull"];
const OUTCOMES: [&str; 2] = ["done", "failed"];
const REQUEST: Duration = Duration::from_secs(5);
const MAX_REQUEST: usize = 8 * 1024;

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    commands: [[AtomicU64; OUTCOMES.len()]; KINDS.len()],
    certificate_ends: AtomicI64,
}

impl Metrics {
    /// Counts a command that ended.
    pub(crate) fn count(&self, kind: &str, done: bool) {
        if let Some(at) = KINDS.iter().position(|name| *name == kind) {
            self.commands[at][usize::from(!done)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Its certificate ends then, in seconds since 1970.
    pub(crate) fn certificate_ends(&self, at: i64) {
        self.certificate_ends.store(at, Ordering::Relaxed);
    }

    fn text(&self) -> String {
        let mut text = String::from(concat!(
            "# HELP quartermaster_agent_build_info The version that runs.\n",
            "# TYPE quartermaster_agent_build_info gauge\n",
            "quartermaster_agent_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\"} 1\n",
            "# HELP quartermaster_agent_certificate_expiry_timestamp_seconds When its certificate ends, in seconds since 1970; 0 before it has one.\n",
            "# TYPE quartermaster_agent_certificate_expiry_timestamp_seconds gauge\n",
        ));
        let _ = writeln!(
            text,
            "quartermaster_agent_certificate_expiry_timestamp_seconds {}",
            self.certificate_ends.load(Ordering::Relaxed)
        );
        text.push_str(
            "# HELP quartermaster_agent_commands_total Commands that ended, by kind and outcome.\n\
             # TYPE quartermaster_agent_commands_total counter\n",
        );
        for (kind, counters) in KINDS.iter().zip(&self.commands) {
            for (outcome, counter) in OUTCOMES.iter().zip(counters) {
                let count = counter.load(Ordering::Relaxed);
                let _ = writeln!(
                    text,
                    "quartermaster_agent_commands_total{{command=\"{kind}\",outcome=\"{outcome}\"}} {count}"
                );
            }
        }
        text
    }
}

/// Answers every request with the metrics. One page is all there is, so this is no web server.
pub(crate) async fn serve(listener: TcpListener, metrics: Arc<Metrics>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let metrics = Arc::clone(&metrics);
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(REQUEST, answer(stream, &metrics)).await;
                });
            }
            // Out of descriptors: a pause, or this loop takes the processor too.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, metrics: &Metrics) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read(&mut buffer).await?;
        if read == 0 || request.len() > MAX_REQUEST {
            return Ok(());
        }
        request.extend_from_slice(&buffer[..read]);
    }
    let body = metrics.text();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn commands_are_counted_and_served() {
        let metrics = Arc::new(Metrics::default());
        metrics.count("pull", true);
        metrics.count("pull", false);
        metrics.count("unknown", true);
        metrics.certificate_ends(1_800_000_000);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve(listener, metrics));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(text.contains("{command=\"pull\",outcome=\"failed\"} 1"), "{text}");
        assert!(
            text.contains("{command=\"provision\",outcome=\"done\"} 0"),
            "{text}"
        );
        let version = concat!("build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1\n");
        assert!(text.contains(version), "{text}");
        assert!(text.contains("expiry_timestamp_seconds 1800000000\n"), "{text}");
        server.abort();
    }
}
