//! The agent as a server: enrolled with the coordinator, commanded over mutual TLS.
//!
//! It listens before it enrols, so that who dials early waits in the queue instead of being refused.

mod command;
mod convert;
mod enrolment;
mod metrics;
mod peer;
mod renewal;
mod service;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use quartermaster_proto::MAX_MESSAGE;
use quartermaster_proto::tls::incoming;
use quartermaster_proto::v1::agent_server::AgentServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;

pub use enrolment::{Enrolled, Enrolment};
pub use service::{Agent, Service};

use metrics::Metrics;

/// Keepalive towards the coordinator: a peer that is gone is noticed within half a minute.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// For commands that run when the agent is told to end; less than its pod's grace period of 10 s.
const DRAIN: Duration = Duration::from_secs(8);
const SERVICE: &str = "quartermaster.v1.Agent";

/// How the agent serves.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name in the cluster.
    pub node_name: String,
    /// Below which the host lies.
    pub host_root: PathBuf,
    /// Folder with the payload.
    pub payload: PathBuf,
    /// What an operator says instead of what would be found.
    pub overrides: crate::host::Overrides,
    /// How it gets its certificate.
    pub enrolment: Enrolment,
    /// Commands, over mutual TLS.
    pub listen: SocketAddr,
    /// Health, in plaintext.
    pub health_listen: SocketAddr,
    /// Metrics, in plaintext.
    pub metrics_listen: SocketAddr,
}

/// Listeners that are bound.
pub struct Bound {
    /// Commands.
    pub commands: TcpListener,
    /// Health.
    pub health: TcpListener,
    /// Metrics.
    pub metrics: TcpListener,
}

impl Bound {
    /// Binds all three.
    ///
    /// # Errors
    /// When an address is taken.
    pub async fn bind(options: &Options) -> anyhow::Result<Self> {
        let bind = async |address: SocketAddr, what: &str| {
            TcpListener::bind(address)
                .await
                .with_context(|| format!("{what} cannot listen on {address}"))
        };
        Ok(Self {
            commands: bind(options.listen, "the command server").await?,
            health: bind(options.health_listen, "the health server").await?,
            metrics: bind(options.metrics_listen, "the metrics server").await?,
        })
    }
}

/// Serves until `shutdown`, then lets running commands end.
///
/// # Errors
/// When the host's root cannot be opened or a server fails.
pub async fn serve(options: Options, bound: Bound, shutdown: CancellationToken) -> anyhow::Result<()> {
    let root = crate::host::HostRoot::open(&options.host_root)
        .with_context(|| format!("the host's root {} cannot be opened", options.host_root.display()))?;
    let metrics = Arc::new(Metrics::default());
    let agent = Arc::new(Agent::new(
        options.node_name.clone(),
        crate::install::Target::new(Arc::new(root), options.payload.clone()).with(options.overrides.clone()),
        Arc::clone(&metrics),
    ));
    let (health, health_service) = tonic_health::server::health_reporter();
    for name in ["", SERVICE] {
        health.set_service_status(name, ServingStatus::NotServing).await;
    }
    let stop_side = CancellationToken::new();
    let side = tokio::spawn(side_servers(
        bound.health,
        bound.metrics,
        health_service,
        Arc::clone(&metrics),
        stop_side.clone(),
    ));

    let enrolled = tokio::select! {
        enrolled = options.enrolment.enrol(&options.node_name) => enrolled,
        () = shutdown.cancelled() => return Ok(()),
    };
    let (enrolled, current) = watch::channel(Arc::new(enrolled));
    let renewing = {
        let (enrolment, node) = (options.enrolment.clone(), options.node_name.clone());
        let counted = metrics;
        tokio::spawn(async move { enrolment.renew(&node, &enrolled, &counted).await })
    };
    let service = AgentServer::new(Service::new(Arc::clone(&agent)))
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE / 2))
        .layer(InterceptorLayer::new(peer::require_coordinator))
        .add_service(service)
        .serve_with_incoming_shutdown(
            incoming(bound.commands, move || Arc::clone(&current.borrow().tls)),
            drained(Arc::clone(&agent), shutdown.clone()),
        );
    for name in ["", SERVICE] {
        health.set_service_status(name, ServingStatus::Serving).await;
    }
    tracing::info!(node = options.node_name, listen = %options.listen, "commands are taken");
    agent.finish_interrupted();
    let stopping = shutdown.clone();
    let reporter = tokio::spawn(async move {
        stopping.cancelled().await;
        for name in ["", SERVICE] {
            health.set_service_status(name, ServingStatus::NotServing).await;
        }
    });
    let served = server.await.context("the command server failed");
    reporter.abort();
    renewing.abort();
    stop_side.cancel();
    let _ = side.await;
    served
}

/// Ends when the agent was told to and its commands are over. An installation in its host unit goes on by itself.
async fn drained(agent: Arc<Agent>, shutdown: CancellationToken) {
    shutdown.cancelled().await;
    if tokio::time::timeout(DRAIN, agent.drain()).await.is_err() {
        tracing::warn!("commands still run after {} s and are left", DRAIN.as_secs());
    }
}

async fn side_servers<H>(
    health: TcpListener,
    metrics_listener: TcpListener,
    service: tonic_health::pb::health_server::HealthServer<H>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) where
    H: tonic_health::pb::health_server::Health,
{
    let stopped = stop.clone();
    // Of the health service alone. The command port has none: who is let in there knows the protocol.
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    let health = Server::builder()
        .add_service(service)
        .add_optional_service(reflection.ok())
        .serve_with_incoming_shutdown(TcpIncoming::from(health), async move {
            stopped.cancelled().await;
        });
    let metrics = metrics::serve(metrics_listener, metrics);
    tokio::select! {
        result = health => {
            if let Err(error) = result {
                tracing::error!(%error, "the health server failed");
            }
        }
        () = metrics => {}
        () = stop.cancelled() => {}
    }
}
