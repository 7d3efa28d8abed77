//! The coordinator: it watches nodes and Prefetches, decides, and commands agents.
//!
//! `node` and `prefetch` hold the rules of the product as pure functions; `engine` carries them out;
//! `identity` proves who is who. It knows agents only by the protocol.

pub mod control;
mod engine;
pub mod identity;
mod leadership;
pub mod node;
pub mod operator;
pub mod prefetch;
pub mod report;
mod settings;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use quartermaster_proto::MAX_MESSAGE;
use quartermaster_proto::v1::enrollment_server::EnrollmentServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Identity as TlsIdentity, Server, ServerTlsConfig};
use tracing::info;

pub use prefetch::crd_yaml;
pub use settings::{Cli, Command, LogFormat, OPERATOR_SOCKET, Settings};

use identity::{Authority, Dialer, Enroller};
use report::Metrics;

/// Agents that have enrolled and of which the engine has not heard yet.
const ARRIVALS: usize = 1024;

/// Runs a replica of the coordinator until `stop` is cancelled.
///
/// # Errors
/// When the cluster can't be reached at the start, the authority can't be used, or a port can't be bound.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let client = kube::Client::try_default()
        .await
        .context("the cluster's address and credentials can't be found; the coordinator runs in a pod, or with KUBECONFIG set")?;
    let namespace = settings.namespace.clone();
    let authority = Arc::new(Authority::load_or_make(&client, &namespace).await?);
    let metrics = Arc::new(Metrics::default());
    let (arrived, arrivals) = mpsc::channel(ARRIVALS);

    let credentials = authority.coordinator(&[
        format!("quartermaster-coordinator.{namespace}.svc"),
        format!("quartermaster-coordinator.{namespace}.svc.cluster.local"),
    ])?;
    let tls = ServerTlsConfig::new().identity(TlsIdentity::from_pem(
        credentials.certificate_pem,
        credentials.key_pem,
    ));
    let enroller = Enroller {
        authority: authority.clone(),
        client: client.clone(),
        namespace: namespace.clone(),
        arrivals: arrived,
    };
    let enrollment = Server::builder()
        .tls_config(tls)
        .context("the certificate for enrolment can't be used")?
        .timeout(std::time::Duration::from_secs(10))
        .concurrency_limit_per_connection(4)
        .add_service(EnrollmentServer::new(enroller).max_decoding_message_size(MAX_MESSAGE))
        .serve_with_incoming_shutdown(
            bind(settings.enrollment_listen).await?,
            stop.clone().cancelled_owned(),
        );

    let (_, health) = tonic_health::server::health_reporter();
    let health = Server::builder()
        .add_service(health)
        .serve_with_incoming_shutdown(
            bind(settings.health_listen).await?,
            stop.clone().cancelled_owned(),
        );
    let probes = TcpListener::bind(settings.metrics_listen)
        .await
        .with_context(|| format!("{} can't be bound", settings.metrics_listen))?;
    let probes = axum::serve(probes, report::routes(metrics.clone()))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    metrics.set_ready();
    info!(
        version = env!("CARGO_PKG_VERSION"),
        namespace, "the coordinator is up"
    );

    let dialer = Arc::new(Dialer::new(&authority)?);
    let people = operator::People::default();
    let interface = operator::Interface {
        client: client.clone(),
        namespace,
        leading: people.leading.subscribe(),
        watchers: people.watchers.clone(),
    };
    let socket = settings.operator_socket.clone();
    let operator = operator::serve(interface, &socket, stop.clone());
    let leadership = leadership::contend(client, settings, dialer, metrics, arrivals, people, stop.clone());
    let result = tokio::try_join!(
        async { enrollment.await.context("enrolment has ended") },
        async { health.await.context("the health service has ended") },
        async { probes.await.context("metrics and probes have ended") },
        operator,
        leadership,
    );
    stop.cancel();
    result.map(|_| ())
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListenerStream> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("{address} can't be bound"))?;
    Ok(TcpListenerStream::new(listener))
}
