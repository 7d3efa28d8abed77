//! The coordinator: it watches nodes and Prefetches, decides, and commands agents.
//!
//! `node` and `prefetch` hold the rules of the product as pure functions; `engine` carries them out;
//! `identity` proves who is who. It knows agents only by the protocol.

mod cluster;
pub mod control;
mod engine;
pub mod identity;
mod leadership;
pub mod node;
pub mod operator;
pub mod others;
pub mod prefetch;
pub mod reason;
pub mod report;
mod settings;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use quartermaster_proto::MAX_MESSAGE;
use quartermaster_proto::tls::incoming;
use quartermaster_proto::v1::enrollment_server::EnrollmentServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};

pub use prefetch::crd_yaml;
pub use settings::{Cli, Command, LogFormat, OPERATOR_SOCKET, Settings};

use cluster::Cluster;
use identity::{Dialer, Enroller, Lives, Vault};
use report::{Health, Metrics};

/// Agents that have enrolled and of which the engine has not heard yet.
const ARRIVALS: usize = 1024;
/// Until the authority is asked for again at the start.
const OPEN_AGAIN: Duration = Duration::from_secs(2);

/// Runs a replica of the coordinator until `stop` is cancelled.
///
/// # Errors
/// When there is no way to a cluster, or a port can't be bound.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let metrics = Arc::new(Metrics::default());
    let cluster = Cluster::infer(metrics.clone()).await?;
    let client = cluster.client().clone();
    let namespace = settings.namespace.clone();
    let lives = Lives {
        authority: settings.authority_life,
        certificate: settings.certificate_life,
    };
    let names = vec![
        format!("quartermaster-enrollment.{namespace}.svc"),
        format!("quartermaster-coordinator.{namespace}.svc"),
        format!("quartermaster-coordinator.{namespace}.svc.cluster.local"),
    ];
    // A replica that starts while the API server is away waits for it; the kubelet's startup probe has the last word.
    let vault = loop {
        match Vault::open(&client, &namespace, lives, names.clone(), metrics.clone()).await {
            Ok(vault) => break vault,
            Err(error) => warn!("{error:#}; it is tried again"),
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(OPEN_AGAIN) => {}
        }
    };
    let current = vault.current();
    let (arrived, arrivals) = mpsc::channel(ARRIVALS);
    let enroller = Enroller {
        current: current.clone(),
        metrics: metrics.clone(),
        client: client.clone(),
        namespace: namespace.clone(),
        arrivals: arrived,
    };
    let shown = current.clone();
    let enrollment = Server::builder()
        .timeout(Duration::from_secs(10))
        .concurrency_limit_per_connection(4)
        .add_service(EnrollmentServer::new(enroller).max_decoding_message_size(MAX_MESSAGE))
        .serve_with_incoming_shutdown(
            incoming(listen(settings.enrollment_listen).await?, move || {
                shown.borrow().enrolment()
            }),
            stop.clone().cancelled_owned(),
        );

    let (health, service) = tonic_health::server::health_reporter();
    let health = Health::new(health).await;
    // The command port of agents has no reflection: who is let in there knows the protocol.
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .context("the description of the health service can't be used")?;
    let health_server = Server::builder()
        .add_service(service)
        .add_service(reflection)
        .serve_with_incoming_shutdown(
            bind(settings.health_listen).await?,
            stop.clone().cancelled_owned(),
        );
    let probes = listen(settings.metrics_listen).await?;
    let probes = axum::serve(probes, report::routes(metrics.clone()))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    metrics.set_ready();
    info!(
        version = env!("CARGO_PKG_VERSION"),
        namespace, "the coordinator is up"
    );

    let people = operator::People::default();
    let interface = operator::Interface {
        client: client.clone(),
        namespace,
        leading: people.leading.subscribe(),
        watchers: people.watchers.clone(),
    };
    let socket = settings.operator_socket.clone();
    let operator = operator::serve(interface, &socket, stop.clone());
    let hands = leadership::Hands {
        dialer: Arc::new(Dialer::new(current)),
        metrics,
        health,
        people,
    };
    let keeping = tokio::spawn(vault.keep(stop.clone()));
    let leadership = leadership::contend(&cluster, settings, hands, arrivals, stop.clone());
    let result = tokio::try_join!(
        async { enrollment.await.context("enrolment has ended") },
        async { health_server.await.context("the health service has ended") },
        async { probes.await.context("metrics and probes have ended") },
        operator,
        leadership,
    );
    stop.cancel();
    let _ = keeping.await;
    result.map(|_| ())
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListenerStream> {
    Ok(TcpListenerStream::new(listen(address).await?))
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("{address} can't be bound"))
}
