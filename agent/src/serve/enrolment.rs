//! How an agent gets its certificate: its pod's token against the signature of the coordinator.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quartermaster_proto::ENROLLMENT_PORT;
use quartermaster_proto::identity::COORDINATOR_DNS;
use quartermaster_proto::tls::Validity;
use quartermaster_proto::v1::enrollment_client::EnrollmentClient;
use quartermaster_proto::v1::{EnrollRequest, EnrollResponse};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Uri};

use super::metrics::Metrics;
use super::renewal;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
const DIAL: Duration = Duration::from_secs(2);
const CALL: Duration = Duration::from_secs(10);
const MAX_FILE: u64 = 64 * 1024;
/// Replicas of the coordinator that are asked at most.
const REPLICAS: usize = 4;

/// Where and with what to enrol.
#[derive(Debug, Clone)]
pub struct Enrolment {
    /// Of the coordinator, `https://…:7444`.
    pub url: String,
    /// The coordinator's CA, in PEM: the only one that is trusted.
    pub ca_file: PathBuf,
    /// The pod's projected token.
    pub token_file: PathBuf,
    /// The pod's own address.
    pub pod_ip: Option<IpAddr>,
}

/// What an enrolment gives. The key never leaves the process's memory.
pub struct Enrolled {
    /// How commands are served with it.
    pub(super) tls: Arc<ServerConfig>,
    /// How long it is good for.
    pub(super) validity: Validity,
    /// Who may command, in PEM. At the next enrolment they are trusted beside the file, which the kubelet
    /// renews a minute or two late.
    trusted_pem: String,
}

#[derive(Debug, Error)]
enum EnrolError {
    #[error("{0} cannot be read: {1}")]
    File(PathBuf, std::io::Error),
    #[error("no key could be made: {0}")]
    Key(#[from] rcgen::Error),
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    #[error("the coordinator refused: {0}")]
    Refused(String),
    #[error("the coordinator's answer can't be used: {0}")]
    Answer(String),
}

impl Enrolment {
    /// Enrols, and tries again for ever: without a certificate there is nothing else to do.
    pub async fn enrol(&self, node: &str) -> Enrolled {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut said = String::new();
        loop {
            match self.once(node, "").await {
                Ok(enrolled) => {
                    tracing::info!(took_ms = begun.elapsed().as_millis(), "enrolled");
                    return enrolled;
                }
                Err(error) => {
                    // The same words every 50 ms would bury the first.
                    let words = error.to_string();
                    if words != said {
                        tracing::warn!(
                            url = self.url,
                            error = words,
                            "enrolment failed, it is tried again"
                        );
                        said = words;
                    }
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Enrols again whenever it is time, for ever. Connections that are open stay; new ones get the new certificate.
    pub(super) async fn renew(&self, node: &str, sender: &watch::Sender<Arc<Enrolled>>, metrics: &Metrics) {
        loop {
            let enrolled = sender.borrow().clone();
            metrics.certificate_ends(enrolled.validity.until);
            let due = renewal::due(enrolled.validity, node);
            while let Some(pause) = renewal::sleep(due, now()) {
                sleep(pause).await;
            }
            match self.once(node, &enrolled.trusted_pem).await {
                Ok(renewed) => {
                    tracing::info!(until = renewed.validity.until, "the certificate is renewed");
                    sender.send_replace(Arc::new(renewed));
                }
                Err(error) => {
                    let left = enrolled.validity.until - now();
                    tracing::warn!(url = self.url, %error, left_s = left, "the certificate can't be renewed yet");
                    sleep(renewal::pause(enrolled.validity, now())).await;
                }
            }
        }
    }

    async fn once(&self, node: &str, also_trusted: &str) -> Result<Enrolled, EnrolError> {
        let ca = read(&self.ca_file)?;
        let token = read(&self.token_file)?.trim().to_owned();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        // Names in the request are ignored by who signs it; this one is for the reader of a log.
        let request = CertificateParams::new(vec![node.to_owned()])?.serialize_request(&key)?;
        let request = EnrollRequest {
            csr_pem: request.pem()?,
            token,
            pod_ip: self.pod_ip.map(|ip| ip.to_string()).unwrap_or_default(),
        };
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(format!("{ca}\n{also_trusted}")))
            .domain_name(COORDINATOR_DNS);
        let answer = self.first_answer(&tls, &request).await?;
        let trusted_pem = if answer.ca_pem.is_empty() {
            ca
        } else {
            answer.ca_pem
        };
        let certificate = CertificateDer::from_pem_slice(answer.certificate_pem.as_bytes())
            .map_err(|error| EnrolError::Answer(error.to_string()))?;
        let validity = Validity::of(&certificate)
            .ok_or_else(|| EnrolError::Answer("the certificate has no dates".to_owned()))?;
        Ok(Enrolled {
            tls: Arc::new(server(certificate, &key, &trusted_pem)?),
            validity,
            trusted_pem,
        })
    }

    /// Asks every replica and takes the first certificate. All are to hear of this agent: the one that leads
    /// dials it then, and need not wait until the kubelet has reported the pod's address.
    async fn first_answer(
        &self,
        tls: &ClientTlsConfig,
        request: &EnrollRequest,
    ) -> Result<EnrollResponse, EnrolError> {
        let (sender, mut answers) = mpsc::channel(REPLICAS);
        for address in self.replicas().await? {
            let (sender, tls, request) = (sender.clone(), tls.clone(), request.clone());
            tokio::spawn(async move {
                let _ = sender.send(ask(address, tls, request).await).await;
            });
        }
        drop(sender);
        let mut last = EnrolError::Unreachable(self.url.clone(), "its name has no address".to_owned());
        while let Some(answer) = answers.recv().await {
            match answer {
                Ok(answer) => return Ok(answer),
                // What a replica said weighs more than that another did not answer.
                Err(error) if !matches!(last, EnrolError::Refused(_)) => last = error,
                Err(_) => {}
            }
        }
        Err(last)
    }

    /// The addresses that the name in the URL has: of its Service without an address of its own, all replicas.
    async fn replicas(&self) -> Result<Vec<SocketAddr>, EnrolError> {
        let unreachable = |error: String| EnrolError::Unreachable(self.url.clone(), error);
        let url: Uri = self
            .url
            .parse()
            .map_err(|_| unreachable("it is no URL".to_owned()))?;
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = url.port_u16().unwrap_or(ENROLLMENT_PORT);
        let found = tokio::time::timeout(DIAL, tokio::net::lookup_host((host, port)))
            .await
            .map_err(|_| unreachable("no name server answers".to_owned()))?
            .map_err(|error| unreachable(error.to_string()))?;
        Ok(found.take(REPLICAS).collect())
    }
}

async fn ask(
    address: SocketAddr,
    tls: ClientTlsConfig,
    request: EnrollRequest,
) -> Result<EnrollResponse, EnrolError> {
    let url = format!("https://{address}");
    let unreachable = |error: &dyn std::error::Error| EnrolError::Unreachable(url.clone(), deepest(error));
    let channel = Endpoint::from_shared(url.clone())
        .and_then(|endpoint| endpoint.tls_config(tls))
        .map_err(|error| unreachable(&error))?
        .connect_timeout(DIAL)
        .timeout(CALL)
        .connect()
        .await
        .map_err(|error| unreachable(&error))?;
    EnrollmentClient::new(channel)
        .enroll(request)
        .await
        .map(tonic::Response::into_inner)
        .map_err(|status| EnrolError::Refused(format!("{:?}: {}", status.code(), status.message())))
}

/// How commands are served: only to who shows a certificate of one of the trusted authorities.
fn server(
    certificate: CertificateDer<'static>,
    key: &KeyPair,
    trusted_pem: &str,
) -> Result<ServerConfig, EnrolError> {
    let bad = |error: &dyn std::fmt::Display| EnrolError::Answer(error.to_string());
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(trusted_pem.as_bytes()) {
        let authority = authority.map_err(|error| bad(&error))?;
        roots.add(authority).map_err(|error| bad(&error))?;
    }
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots))
        .build()
        .map_err(|error| bad(&error))?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|error| bad(&error))?;
    let mut config = ServerConfig::builder()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate], key)
        .map_err(|error| bad(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A session that is resumed is not checked again: it would outlive the certificate and its authority.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn read(path: &Path) -> Result<String, EnrolError> {
    let failed = |error| EnrolError::File(path.to_path_buf(), error);
    let size = std::fs::metadata(path).map_err(failed)?.len();
    if size > MAX_FILE {
        return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// The innermost cause, which says what is wrong; the outer ones say "transport error".
fn deepest(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(inner) = error.source() {
        error = inner;
    }
    error.to_string()
}
