//! What the DaemonSet controller and a kubelet do about the agents of the fleet: a pod where the Node's label asks for one,
//! its status, and the agent in it, which enrols as a real one does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use quartermaster_proto::identity::COORDINATOR_DNS;
use quartermaster_proto::v1::enrollment_client::EnrollmentClient;
use quartermaster_proto::v1::{EnrollRequest, EnrollResponse};
use rcgen::{CertificateParams, KeyPair};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::sync::Semaphore;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use super::agent::Agent;
use super::machine::Machine;
use crate::deployment::NAMESPACE;

const ACCOUNT: &str = "quartermaster-agent";
/// Requests at once: a fleet's kubelets are many, and their API server on two processors is one.
const AT_ONCE: usize = 48;
const DEADLINE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(300);

/// What all kubelets of the fleet share.
pub(super) struct Kubelets {
    client: kube::Client,
    /// Where coordinators enrol, dead or alive.
    coordinators: Vec<SocketAddr>,
    /// The coordinators' certificate authority, as it is mounted into a pod.
    authority: tokio::sync::Mutex<Option<String>>,
    at_once: Semaphore,
}

impl Kubelets {
    pub(super) fn new(client: kube::Client, coordinators: Vec<SocketAddr>) -> Arc<Self> {
        Arc::new(Self {
            client,
            coordinators,
            authority: tokio::sync::Mutex::default(),
            at_once: Semaphore::new(AT_ONCE),
        })
    }

    /// Tends a machine for ever: a pod while one is wanted.
    pub(super) async fn tend(self: Arc<Self>, machine: Arc<Machine>) {
        let mut wanted = machine.wanted.subscribe();
        loop {
            let Ok(uid) = wanted.wait_for(Option::is_some).await.map(|uid| uid.clone()) else {
                return;
            };
            let name = format!(
                "quartermaster-agent-{}",
                &uuid::Uuid::new_v4().simple().to_string()[..10]
            );
            tokio::select! {
                // It ends only when the pod is not wanted any more.
                () = self.run_pod(&machine, &name) => {}
                _ = wanted.wait_for(|now| *now != uid) => {}
            }
            machine.set_agent(None);
            self.until_done(&machine, || self.delete(&name)).await;
        }
    }

    async fn run_pod(&self, machine: &Arc<Machine>, name: &str) {
        machine.pass(machine.temper.arrival).await;
        let pod = self.until_done(machine, || self.create(machine, name)).await;
        let uid = pod.metadata.uid.unwrap_or_default();
        loop {
            let agent = self.until_done(machine, || self.enrol(machine, name, &uid)).await;
            machine.ledger.enrolments.fetch_add(1, Ordering::Relaxed);
            machine.set_agent(Some(Arc::clone(&agent)));
            agent.ended().await;
            // Its container is started again.
            machine.pass(machine.temper.arrival).await;
        }
    }

    /// Does something again and again until it succeeds.
    async fn until_done<T, W>(&self, machine: &Machine, work: impl Fn() -> W) -> T
    where
        W: Future<Output = Result<T>>,
    {
        loop {
            let tried = {
                let _permit = self.at_once.acquire().await;
                tokio::time::timeout(DEADLINE, work()).await
            };
            if let Ok(Ok(value)) = tried {
                return value;
            }
            machine.pass(PAUSE).await;
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create(&self, machine: &Machine, name: &str) -> Result<Pod> {
        let labels = json!({
            "app.kubernetes.io/name": "quartermaster",
            "app.kubernetes.io/component": "agent",
        });
        let pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": {
                "nodeName": machine.name,
                "serviceAccountName": ACCOUNT,
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                "terminationGracePeriodSeconds": 0,
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "agent", "image": "simulated/agent:1.0"}],
            },
        }))?;
        let pod = match self.pods().create(&PostParams::default(), &pod).await {
            // An answer was lost: it is there.
            Err(kube::Error::Api(status)) if status.code == 409 => self.pods().get(name).await?,
            other => other?,
        };
        let address = machine.address.to_string();
        let status = json!({"status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "containerStatuses": [{
                "name": "agent", "image": "simulated/agent:1.0", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {}},
            }],
        }});
        self.pods()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
        Ok(pod)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let now = DeleteParams::default().grace_period(0);
        match self.pods().delete(name, &now).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }

    /// As an agent does it: the pod's own token against a certificate for its node.
    async fn enrol(&self, machine: &Machine, pod: &str, uid: &str) -> Result<Arc<Agent>> {
        let token = TokenRequest {
            spec: TokenRequestSpec {
                audiences: vec!["quartermaster".to_owned()],
                expiration_seconds: Some(600),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: Some(pod.to_owned()),
                    uid: Some(uid.to_owned()),
                }),
            },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), NAMESPACE);
        let token = accounts
            .create_token_request(ACCOUNT, &PostParams::default(), &token)
            .await?
            .status
            .context("the API server gave no token")?
            .token;
        let key = KeyPair::generate()?;
        let request = CertificateParams::new(vec![machine.name.clone()])?.serialize_request(&key)?;
        let at = machine.draw(|draw| draw.usize(..self.coordinators.len()));
        let request = EnrollRequest {
            csr_pem: request.pem()?,
            token,
            pod_ip: machine.address.to_string(),
        };
        let answer = match self.ask(self.coordinators[at], request).await {
            Ok(answer) => answer,
            Err(error) => {
                // It may be another authority by now.
                *self.authority.lock().await = None;
                return Err(error);
            }
        };
        let chain = CertificateDer::pem_slice_iter(answer.certificate_pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()?;
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(answer.ca_pem.as_bytes()) {
            roots.add(authority?)?;
        }
        let mut tls = ServerConfig::builder()
            .with_client_cert_verifier(WebPkiClientVerifier::builder(Arc::new(roots)).build()?)
            .with_single_cert(
                chain,
                PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?,
            )?;
        tls.alpn_protocols = vec![b"h2".to_vec()];
        // Each costs memory in a process that holds thousands.
        tls.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        tls.send_tls13_tickets = 0;
        Ok(Agent::new(Arc::new(tls)))
    }

    async fn ask(&self, coordinator: SocketAddr, request: EnrollRequest) -> Result<EnrollResponse> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(self.authority().await?))
            .domain_name(COORDINATOR_DNS);
        let channel = Endpoint::from_shared(format!("https://{coordinator}"))?
            .tls_config(tls)?
            .connect_timeout(Duration::from_secs(2))
            .timeout(DEADLINE)
            .connect()
            .await?;
        let answer = EnrollmentClient::new(channel).enroll(request).await?;
        Ok(answer.into_inner())
    }

    async fn authority(&self) -> Result<String> {
        let mut known = self.authority.lock().await;
        if let Some(known) = &*known {
            return Ok(known.clone());
        }
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), NAMESPACE);
        let read = maps
            .get("quartermaster-ca")
            .await?
            .data
            .and_then(|data| data.get("ca.crt").cloned())
            .context("the coordinator's authority is not published")?;
        *known = Some(read.clone());
        Ok(read)
    }
}
