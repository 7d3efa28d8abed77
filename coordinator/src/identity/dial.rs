//! Dialling an agent: mutual TLS in which the certificate's URI is compared, whatever address was dialled.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quartermaster_proto::identity::{AGENT_DNS, Identity};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

use super::authority::{Authority, AuthorityError};

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

/// Dials agents with the coordinator's certificate.
pub struct Dialer {
    inner: Arc<WebPkiServerVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Dialer {
    /// A dialer with a certificate of its own from `authority`.
    pub fn new(authority: &Authority) -> Result<Self, DialError> {
        let bad = |error: &dyn std::fmt::Display| DialError::Credentials(error.to_string());
        let credentials = authority
            .coordinator(&[])
            .map_err(|error: AuthorityError| bad(&error))?;
        let mut roots = RootCertStore::empty();
        roots
            .add(authority.certificate_der().clone())
            .map_err(|error| bad(&error))?;
        let inner = WebPkiServerVerifier::builder(Arc::new(roots))
            .build()
            .map_err(|error| bad(&error))?;
        let chain = vec![
            CertificateDer::from_pem_slice(credentials.certificate_pem.as_bytes())
                .map_err(|error| bad(&error))?,
        ];
        let key =
            PrivateKeyDer::from_pem_slice(credentials.key_pem.as_bytes()).map_err(|error| bad(&error))?;
        Ok(Self { inner, chain, key })
    }

    /// Connects to the agent of `node` at `address`, and makes sure that it is that agent.
    pub async fn dial(&self, address: SocketAddr, node: &str) -> Result<Channel, DialError> {
        let verifier = AgentOf {
            node: Identity::Agent(node.to_owned()),
            inner: self.inner.clone(),
        };
        let mut config = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
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

/// Who a certificate says its holder is; only a certificate with exactly one URI says it.
pub(crate) fn identity_of(certificate: &CertificateDer<'_>) -> Option<Identity> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    let mut uris = names.value.general_names.iter().filter_map(|name| match name {
        x509_parser::extensions::GeneralName::URI(uri) => Some(*uri),
        _ => None,
    });
    let identity = Identity::from_uri(uris.next()?)?;
    uris.next().is_none().then_some(identity)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use tonic::transport::{Certificate, Identity as TlsIdentity, Server, ServerTlsConfig};

    use super::*;

    /// A server of the health service with the certificate that `authority` signs for `node`.
    async fn agent(authority: &Authority, node: &str) -> SocketAddr {
        let key = KeyPair::generate().expect("a key");
        let csr = CertificateParams::default()
            .serialize_request(&key)
            .expect("a request")
            .pem()
            .expect("PEM");
        let certificate = authority.sign_agent(&csr, node).expect("a certificate");
        let tls = ServerTlsConfig::new()
            .identity(TlsIdentity::from_pem(certificate, key.serialize_pem()))
            .client_ca_root(Certificate::from_pem(authority.certificate_pem()));
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
        let address = agent(&authority, "worker-1").await;
        let dialer = Dialer::new(&authority).expect("a dialer");
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
        let address = agent(&authority, "worker-2").await;
        let dialer = Dialer::new(&authority).expect("a dialer");
        assert!(dialer.dial(address, "worker-1").await.is_err());
    }

    #[tokio::test]
    async fn an_agent_of_another_authority_is_refused() {
        provider();
        let address = agent(&Authority::for_tests(), "worker-1").await;
        let dialer = Dialer::new(&Authority::for_tests()).expect("a dialer");
        assert!(dialer.dial(address, "worker-1").await.is_err());
    }
}
