//! Dialling an agent: mutual TLS in which the certificate's URI is compared, whatever address was dialled.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quartermaster_proto::identity::{AGENT_DNS, Identity};
use quartermaster_proto::tls::identity_of;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use super::current::Current;

/// For the TCP connection and the handshake together.
const CONNECT: Duration = Duration::from_secs(2);
/// An agent that hangs without closing is noticed after these two.
const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(5);

/// Why an agent could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Nobody answers there, or somebody else does.
    #[error("the agent of {node} at {address} can't be reached: {source}")]
    Connect {
        /// Its node.
        node: String,
        /// Where it was dialled.
        address: SocketAddr,
        /// What the connection said.
        source: tonic::transport::Error,
    },
    /// Our own certificate can't be used.
    #[error("the coordinator's own certificate can't be used: {0}")]
    Credentials(String),
}

/// Dials agents with the certificate that the coordinator has when it dials.
pub struct Dialer {
    current: watch::Receiver<Arc<Current>>,
}

impl Dialer {
    /// A dialer that shows and trusts what is current.
    pub fn new(current: watch::Receiver<Arc<Current>>) -> Self {
        Self { current }
    }

    /// Connects to the agent of `node` at `address`, and makes sure that it is that agent.
    pub async fn dial(&self, address: SocketAddr, node: &str) -> Result<Channel, DialError> {
        let current = self.current.borrow().clone();
        let verifier = AgentOf {
            node: Identity::Agent(node.to_owned()),
            inner: current.verifier.clone(),
        };
        let mut config = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(current.chain.clone(), current.key.clone_key())
            .map_err(|error| DialError::Credentials(error.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        let tls = tokio_rustls::TlsConnector::from(Arc::new(config));
        let name =
            ServerName::try_from(AGENT_DNS).map_err(|error| DialError::Credentials(error.to_string()))?;
        let connect = tower::service_fn(move |_| {
            let (tls, name) = (tls.clone(), name.clone());
            async move {
                let handshake = async {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    tls.connect(name, stream).await
                };
                let stream = tokio::time::timeout(CONNECT, handshake)
                    .await
                    .map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        });
        // The connector does TLS itself: to tonic this is a plain connection.
        let failed = |source| DialError::Connect {
            node: node.to_owned(),
            address,
            source,
        };
        Endpoint::from_shared(format!("http://{address}"))
            .map_err(failed)?
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE_ANSWER)
            .keep_alive_while_idle(true)
            .connect_with_connector(connect)
            .await
            .map_err(failed)
    }
}

/// Accepts the certificate of one agent and no other.
#[derive(Debug)]
struct AgentOf {
    node: Identity,
    inner: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for AgentOf {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified =
            self.inner
                .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        if identity_of(end_entity).as_ref() == Some(&self.node) {
            Ok(verified)
        } else {
            Err(rustls::Error::InvalidCertificate(
                rustls::CertificateError::ApplicationVerificationFailure,
            ))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tonic::transport::{Certificate, Identity as TlsIdentity, Server, ServerTlsConfig};

    use super::super::authority::Authority;
    use super::*;

    const LIFE: jiff::SignedDuration = jiff::SignedDuration::from_hours(1);

    async fn agent(authority: &Authority, node: &str, life: jiff::SignedDuration) -> SocketAddr {
        serve(authority, authority, node, life).await
    }

    /// A server of the health service with the certificate that `authority` signs for `node`; it trusts `trusted`.
    async fn serve(
        authority: &Authority,
        trusted: &Authority,
        node: &str,
        life: jiff::SignedDuration,
    ) -> SocketAddr {
        let key = KeyPair::generate().expect("a key");
        let csr = CertificateParams::default()
            .serialize_request(&key)
            .expect("a request")
            .pem()
            .expect("PEM");
        let certificate = authority.sign_agent(&csr, node, life).expect("a certificate");
        let tls = ServerTlsConfig::new()
            .identity(TlsIdentity::from_pem(certificate, key.serialize_pem()))
            .client_ca_root(Certificate::from_pem(trusted.certificate_pem()));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        let address = listener.local_addr().expect("an address");
        let (_, health) = tonic_health::server::health_reporter();
        tokio::spawn(
            Server::builder()
                .tls_config(tls)
                .expect("TLS")
                .add_service(health)
                .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener)),
        );
        address
    }

    fn provider() {
        let _ = rustls::crypto::ring::default_provider().install_default();
    }

    #[tokio::test]
    async fn the_agent_of_the_node_is_accepted_and_answers() {
        provider();
        let authority = Authority::for_tests();
        let address = agent(&authority, "worker-1", LIFE).await;
        let dialer = Dialer::new(Current::fixed(authority));
        let channel = dialer.dial(address, "worker-1").await.expect("a channel");
        let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
        let answer = health
            .check(tonic_health::pb::HealthCheckRequest::default())
            .await
            .expect("an answer");
        assert_eq!(
            answer.into_inner().status(),
            tonic_health::pb::health_check_response::ServingStatus::Serving
        );
    }

    #[tokio::test]
    async fn the_agent_of_another_node_is_refused() {
        provider();
        let authority = Authority::for_tests();
        let address = agent(&authority, "worker-2", LIFE).await;
        let dialer = Dialer::new(Current::fixed(authority));
        assert!(dialer.dial(address, "worker-1").await.is_err());
    }

    #[tokio::test]
    async fn an_agent_of_another_authority_is_refused() {
        provider();
        let address = agent(&Authority::for_tests(), "worker-1", LIFE).await;
        let dialer = Dialer::new(Current::fixed(Authority::for_tests()));
        assert!(dialer.dial(address, "worker-1").await.is_err());
    }

    #[tokio::test]
    async fn an_agent_whose_certificate_has_ended_is_refused() {
        provider();
        let authority = Authority::for_tests();
        // It began five minutes ago, and ended a minute ago.
        let address = agent(&authority, "worker-1", jiff::SignedDuration::from_secs(-60)).await;
        let dialer = Dialer::new(Current::fixed(authority));
        assert!(dialer.dial(address, "worker-1").await.is_err());
    }

    #[tokio::test]
    async fn an_agent_of_the_previous_authority_is_accepted_while_that_is_trusted() {
        provider();
        let (previous, next) = (Authority::for_tests(), Authority::for_tests());
        let address = serve(&previous, &next, "worker-1", LIFE).await;
        let current = Current::new(next, &[previous.certificate_pem()], &[], LIFE).expect("a certificate");
        let rotating = Dialer::new(watch::channel(Arc::new(current)).1);
        rotating.dial(address, "worker-1").await.expect("a channel");
    }

    #[tokio::test]
    async fn an_agent_of_an_authority_that_is_forgotten_is_refused() {
        provider();
        let (previous, next) = (Authority::for_tests(), Authority::for_tests());
        let address = serve(&previous, &next, "worker-1", LIFE).await;
        assert!(
            Dialer::new(Current::fixed(next))
                .dial(address, "worker-1")
                .await
                .is_err()
        );
    }
}
