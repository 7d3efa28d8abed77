//! The agent as a server, from its enrolment on, over real TLS on loopback.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use quartermaster_agent::serve::{Bound, Enrolment, Options, serve};
use quartermaster_proto::identity::{AGENT_DNS, COORDINATOR_DNS, Identity};
use quartermaster_proto::v1::agent_client::AgentClient;
use quartermaster_proto::v1::enrollment_server::{Enrollment, EnrollmentServer};
use quartermaster_proto::v1::{
    CommandHeader, DescribeRequest, EnrollRequest, EnrollResponse, FailureReason, PullRequest, VerifyRequest,
    WantedImage, provision_event, pull_event,
};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, IsCa, Issuer, KeyPair, SanType,
};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity as TlsIdentity, Server, ServerTlsConfig,
};
use tonic::{Code, Request, Response, Status};

const DEADLINE: Duration = Duration::from_secs(20);

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn params(dns: &str, identity: &Identity) -> CertificateParams {
        let mut params = CertificateParams::new(vec![dns.to_owned()]).unwrap();
        params
            .subject_alt_names
            .push(SanType::URI(identity.uri().try_into().unwrap()));
        params
    }

    fn issue(&self, dns: &str, identity: &Identity) -> TlsIdentity {
        let key = KeyPair::generate().unwrap();
        let certificate = Self::params(dns, identity).signed_by(&key, &self.issuer).unwrap();
        TlsIdentity::from_pem(certificate.pem(), key.serialize_pem())
    }
}

struct Enroller {
    /// Who signs the first certificate, the second, and so on; all are trusted.
    authorities: Vec<Authority>,
    /// Seconds for which certificates are good; else for centuries.
    life: Option<i64>,
    signed: watch::Sender<usize>,
}

#[tonic::async_trait]
impl Enrollment for Enroller {
    async fn enroll(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let request = request.into_inner();
        assert_eq!(request.token, "a token");
        assert_eq!(request.pod_ip, "127.0.0.1");
        let mut signing = CertificateSigningRequestParams::from_pem(&request.csr_pem).unwrap();
        signing.params = Authority::params(AGENT_DNS, &Identity::Agent("worker-1".into()));
        if let Some(life) = self.life {
            let now = time::OffsetDateTime::now_utc();
            signing.params.not_before = now - time::Duration::seconds(300);
            signing.params.not_after = now + time::Duration::seconds(life);
        }
        let before = *self.signed.borrow();
        let signer = self.authorities.get(before).or(self.authorities.last()).unwrap();
        let certificate = signing.signed_by(&signer.issuer).unwrap();
        self.signed.send_replace(before + 1);
        Ok(Response::new(EnrollResponse {
            certificate_pem: certificate.pem(),
            ca_pem: self
                .authorities
                .iter()
                .map(|authority| authority.pem.as_str())
                .collect(),
        }))
    }
}

struct Running {
    address: SocketAddr,
    health: SocketAddr,
    ca_pem: String,
    coordinator: TlsIdentity,
    agent_like: TlsIdentity,
    /// A coordinator's identity whose certificate has ended.
    ended: TlsIdentity,
    /// How many certificates were signed.
    signed: watch::Receiver<usize>,
    shutdown: CancellationToken,
    agent: tokio::task::JoinHandle<anyhow::Result<()>>,
    _files: tempfile::TempDir,
}

async fn start() -> Running {
    start_with(Authority::new(), None, None).await
}

/// Certificates are signed by `authority`, from the second on by `next` if there is one, for `life` seconds.
async fn start_with(authority: Authority, next: Option<Authority>, life: Option<i64>) -> Running {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let files = tempfile::tempdir().unwrap();
    let ca_pem = authority.pem.clone();
    std::fs::write(files.path().join("ca.crt"), &ca_pem).unwrap();
    std::fs::write(files.path().join("token"), "a token\n").unwrap();
    std::fs::create_dir_all(files.path().join("host/etc")).unwrap();
    std::fs::write(files.path().join("host/etc/machine-id"), "cafe\n").unwrap();
    let coordinator = authority.issue(COORDINATOR_DNS, &Identity::Coordinator);
    let agent_like = authority.issue(AGENT_DNS, &Identity::Agent("worker-2".into()));

    let ended = {
        let mut params = Authority::params(COORDINATOR_DNS, &Identity::Coordinator);
        params.not_before = time::OffsetDateTime::now_utc() - time::Duration::hours(2);
        params.not_after = time::OffsetDateTime::now_utc() - time::Duration::hours(1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &authority.issuer).unwrap();
        TlsIdentity::from_pem(certificate.pem(), key.serialize_pem())
    };

    // The enrolment's address is taken first and served late: the agent has to wait for it.
    let enrolment = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", enrolment.local_addr().unwrap());
    let loopback: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let options = Options {
        node_name: "worker-1".into(),
        host_root: files.path().join("host"),
        payload: Path::new("/nonexistent").into(),
        overrides: Default::default(),
        enrolment: Enrolment {
            url,
            ca_file: files.path().join("ca.crt"),
            token_file: files.path().join("token"),
            pod_ip: Some("127.0.0.1".parse().unwrap()),
        },
        listen: loopback,
        health_listen: loopback,
        metrics_listen: loopback,
    };
    let bound = Bound::bind(&options).await.unwrap();
    let address = bound.commands.local_addr().unwrap();
    let health = bound.health.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let agent = tokio::spawn(serve(options, bound, shutdown.clone()));
    assert_eq!(health_of(health).await, "NOT_SERVING");

    let tls = ServerTlsConfig::new().identity(authority.issue(COORDINATOR_DNS, &Identity::Coordinator));
    let (sender, signed) = watch::channel(0);
    let enroller = Enroller {
        authorities: std::iter::once(authority).chain(next).collect(),
        life,
        signed: sender,
    };
    tokio::spawn(
        Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_service(EnrollmentServer::new(enroller))
            .serve_with_incoming(TcpIncoming::from(enrolment)),
    );
    Running {
        address,
        health,
        ca_pem,
        coordinator,
        agent_like,
        ended,
        signed,
        shutdown,
        agent,
        _files: files,
    }
}

async fn health_of(address: SocketAddr) -> String {
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    let answer = client
        .check(HealthCheckRequest {
            service: "quartermaster.v1.Agent".into(),
        })
        .await
        .unwrap();
    answer.into_inner().status().as_str_name().to_owned()
}

async fn dial(running: &Running, identity: Option<TlsIdentity>) -> Result<AgentClient<Channel>, String> {
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&running.ca_pem))
        .domain_name(AGENT_DNS);
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    Endpoint::from_shared(format!("https://{}", running.address))
        .unwrap()
        .tls_config(tls)
        .unwrap()
        .connect_timeout(DEADLINE)
        .timeout(DEADLINE)
        .connect()
        .await
        .map(AgentClient::new)
        .map_err(|error| error.to_string())
}

fn header(id: &str, term: u64) -> Option<CommandHeader> {
    Some(CommandHeader { id: id.into(), term })
}

#[tokio::test]
async fn an_enrolled_agent_obeys_the_coordinator_and_nobody_else() {
    let running = start().await;
    let mut coordinator = dial(&running, Some(running.coordinator.clone())).await.unwrap();
    let node = coordinator
        .describe(DescribeRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (node.node_name.as_str(), node.machine_id.as_str()),
        ("worker-1", "cafe")
    );
    assert_eq!(health_of(running.health).await, "SERVING");

    let mut other = dial(&running, Some(running.agent_like.clone())).await.unwrap();
    let status = other.describe(DescribeRequest {}).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);

    // Without a certificate the handshake fails, which a client sees at its first call at the latest.
    if let Ok(mut nobody) = dial(&running, None).await {
        assert!(nobody.describe(DescribeRequest {}).await.is_err());
    }
    let stranger = Authority::new().issue(COORDINATOR_DNS, &Identity::Coordinator);
    if let Ok(mut stranger) = dial(&running, Some(stranger)).await {
        assert!(stranger.describe(DescribeRequest {}).await.is_err());
    }

    if let Ok(mut ended) = dial(&running, Some(running.ended.clone())).await {
        assert!(ended.describe(DescribeRequest {}).await.is_err());
    }

    running.shutdown.cancel();
    drop((coordinator, other));
    tokio::time::timeout(DEADLINE, running.agent)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_certificate_is_renewed_by_the_next_authority_and_open_connections_stay() {
    let next = Authority::new();
    let of_next = next.issue(COORDINATOR_DNS, &Identity::Coordinator);
    let next_pem = next.pem.clone();
    let mut running = start_with(Authority::new(), Some(next), Some(6)).await;
    let mut before = dial(&running, Some(running.coordinator.clone())).await.unwrap();
    before.describe(DescribeRequest {}).await.unwrap();

    let renewed = running.signed.wait_for(|signed| *signed >= 2);
    tokio::time::timeout(DEADLINE, renewed).await.unwrap().unwrap();
    before.describe(DescribeRequest {}).await.unwrap();

    // The agent shows the new certificate to who trusts the next authority alone, and takes its orders.
    running.ca_pem = next_pem;
    let deadline = tokio::time::Instant::now() + DEADLINE;
    let mut after = loop {
        // It was signed a moment before the agent has it in use.
        match dial(&running, Some(of_next.clone())).await {
            Ok(client) => break client,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    after.describe(DescribeRequest {}).await.unwrap();
}

#[tokio::test]
async fn a_paused_old_leader_is_refused() {
    let running = start().await;
    let mut coordinator = dial(&running, Some(running.coordinator.clone())).await.unwrap();
    let pull = |id: &str, term| PullRequest {
        header: header(id, term),
        ..Default::default()
    };
    coordinator.pull(pull("a", 7)).await.unwrap();
    let status = coordinator.pull(pull("b", 6)).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    coordinator.pull(pull("c", 7)).await.unwrap();
    let status = coordinator.pull(pull("", 8)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let status = coordinator.pull(PullRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_command_that_fails_says_so_in_its_last_event_and_again_to_who_asks_again() {
    let running = start().await;
    let mut coordinator = dial(&running, Some(running.coordinator.clone())).await.unwrap();
    for _ in 0..2 {
        let request = VerifyRequest {
            header: header("same", 1),
        };
        let mut events = coordinator.verify(request).await.unwrap().into_inner();
        let mut last = None;
        while let Some(event) = events.message().await.unwrap() {
            last = event.event;
        }
        let Some(provision_event::Event::Failed(failure)) = last else {
            panic!("the last event is {last:?}");
        };
        assert_eq!(failure.reason(), FailureReason::ContainerdUnreachable);
        assert!(failure.message.contains("D-Bus"), "{}", failure.message);
    }
    let request = PullRequest {
        header: header("pull", 1),
        images: vec![WantedImage {
            reference: "Not A Reference".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let mut events = coordinator.pull(request).await.unwrap().into_inner();
    let first = events.message().await.unwrap().unwrap().event.unwrap();
    let pull_event::Event::Failed(failed) = first else {
        panic!("the first event is {first:?}");
    };
    assert_eq!(failed.failure.unwrap().reason(), FailureReason::InvalidReference);
    let last = events.message().await.unwrap().unwrap().event.unwrap();
    let pull_event::Event::Done(done) = last else {
        panic!("the last event is {last:?}");
    };
    assert_eq!((done.ready, done.failed), (0, 1));
}
