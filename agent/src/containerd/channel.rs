//! The daemon's socket.

use std::sync::Arc;
use std::time::Duration;

use containerd_client::services::v1::version_client::VersionClient;
use hyper_util::rt::TokioIo;
use k8s_cri::v1::image_service_client::ImageServiceClient;
use k8s_cri::v1::runtime_service_client::RuntimeServiceClient;
use k8s_cri::v1::{StatusRequest, VersionRequest};
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::Served;
use crate::host::HostRoot;

const DIAL: Duration = Duration::from_secs(2);
const CALL: Duration = Duration::from_secs(10);
const MAX_ANSWER: usize = 32 * 1024 * 1024;

/// Why containerd could not be asked.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// No answer on the socket.
    #[error("containerd does not answer on {socket}: {why}")]
    Unreachable {
        /// Path on the host.
        socket: String,
        /// The words of the part that failed.
        why: String,
    },
    /// containerd runs without CRI.
    #[error("containerd answers on {socket} but does not serve CRI ({why})")]
    NoCri {
        /// Path on the host.
        socket: String,
        /// The daemon's words.
        why: String,
    },
    /// An answer that cannot be understood.
    #[error("containerd's CRI status on {socket} cannot be read: {why}")]
    Unreadable {
        /// Path on the host.
        socket: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A containerd, reached by its socket's path. Each new connection resolves the path anew, so a daemon that was
/// restarted is found again.
#[derive(Debug, Clone)]
pub struct Daemon {
    socket: Arc<str>,
    channel: Channel,
}

impl Daemon {
    /// A daemon on the socket at `socket` below `root`. Nothing is dialled yet.
    pub fn new(root: Arc<HostRoot>, socket: &str) -> Self {
        Self::with_deadline(root, socket, CALL)
    }

    /// Like [`Daemon::new`], with an own deadline for each call.
    pub fn with_deadline(root: Arc<HostRoot>, socket: &str, call: Duration) -> Self {
        let endpoint = Endpoint::from_static("http://containerd")
            .connect_timeout(DIAL.min(call))
            .timeout(call);
        Self::of(endpoint, root, socket)
    }

    /// Like [`Daemon::new`], for calls that take as long as they take; who calls sets a deadline for each.
    pub fn patient(root: Arc<HostRoot>, socket: &str) -> Self {
        let endpoint = Endpoint::from_static("http://containerd").connect_timeout(DIAL);
        Self::of(endpoint, root, socket)
    }

    fn of(endpoint: Endpoint, root: Arc<HostRoot>, socket: &str) -> Self {
        let path: Arc<str> = socket.into();
        let dialled = Arc::clone(&path);
        let channel = endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let (root, path) = (Arc::clone(&root), Arc::clone(&dialled));
            async move {
                let held = root.hold(&path)?;
                UnixStream::connect(held.path()).await.map(TokioIo::new)
            }
        }));
        Self {
            socket: path,
            channel,
        }
    }

    /// Path of the socket on the host.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// The gRPC channel, for containerd's own services.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// CRI's runtime service.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// CRI's image service.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    /// containerd's own version, such as `v2.4.2`.
    ///
    /// # Errors
    /// [`DaemonError::Unreachable`].
    pub async fn version(&self) -> Result<String, DaemonError> {
        let answer = VersionClient::new(self.channel.clone())
            .version(())
            .await
            .map_err(|status| self.error(&status))?;
        Ok(answer.into_inner().version)
    }

    /// Asks CRI for its version: the cheapest proof that it answers.
    ///
    /// # Errors
    /// [`DaemonError`] when it does not.
    pub async fn ping(&self) -> Result<(), DaemonError> {
        self.runtime()
            .version(VersionRequest::default())
            .await
            .map(drop)
            .map_err(|status| self.error(&status))
    }

    /// What CRI serves now.
    ///
    /// # Errors
    /// [`DaemonError`] when CRI does not answer, or not in a form that we know.
    pub async fn served(&self) -> Result<Served, DaemonError> {
        let answer = self
            .runtime()
            .status(StatusRequest { verbose: true })
            .await
            .map_err(|status| self.error(&status))?
            .into_inner();
        Served::read(&answer).map_err(|why| DaemonError::Unreadable {
            socket: self.socket.to_string(),
            why,
        })
    }

    fn error(&self, status: &Status) -> DaemonError {
        let socket = self.socket.to_string();
        if status.code() == Code::Unimplemented {
            return DaemonError::NoCri {
                socket,
                why: status.message().to_owned(),
            };
        }
        let mut why = status.message().to_owned();
        let mut source = std::error::Error::source(status);
        while let Some(inner) = source {
            why = inner.to_string();
            source = inner.source();
        }
        DaemonError::Unreachable { socket, why }
    }
}
