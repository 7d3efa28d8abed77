//! Who tries to be somebody else: at the enrolment with tokens of a real API server, and at a real agent over TLS.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use quartermaster_proto::identity::{AGENT_DNS, COORDINATOR_DNS, Identity};
use quartermaster_proto::tls::identity_of;
use quartermaster_proto::v1::agent_client::AgentClient;
use quartermaster_proto::v1::enrollment_client::EnrollmentClient;
use quartermaster_proto::v1::{CommandHeader, DescribeRequest, EnrollRequest, EnrollResponse, PullRequest};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use testbed::{deployment, wait_for};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity as TlsIdentity};
use tonic::{Code, Status};

use crate::stage::{SOON, Stage};

const NAMESPACE: &str = "--namespace=quartermaster";
const DIAL: Duration = Duration::from_secs(5);

/// Somebody with a key and, once it is signed, a certificate.
struct Somebody {
    key: KeyPair,
}

impl Somebody {
    fn new() -> Result<Self> {
        Ok(Self {
            key: KeyPair::generate()?,
        })
    }

    fn with(&self, certificate_pem: &str) -> TlsIdentity {
        TlsIdentity::from_pem(certificate_pem, self.key.serialize_pem())
    }

    /// Asks for a certificate; the request names another node than any token is for.
    fn enrol(
        &self,
        stage: &Stage,
        server: SocketAddr,
        ca: &str,
        token: &str,
    ) -> Result<std::result::Result<EnrollResponse, Status>> {
        let csr = CertificateParams::new(vec!["worker-16".to_owned()])?
            .serialize_request(&self.key)?
            .pem()?;
        let request = EnrollRequest {
            csr_pem: csr,
            token: token.to_owned(),
            pod_ip: String::new(),
        };
        dialled(stage, server, COORDINATOR_DNS, ca, None, |channel| async move {
            Ok(EnrollmentClient::new(channel)
                .enroll(request)
                .await
                .map(tonic::Response::into_inner))
        })
    }
}

/// Dials over TLS in the fabric and does something with the channel.
fn dialled<T: Send, F: Future<Output = Result<T>>>(
    stage: &Stage,
    server: SocketAddr,
    name: &str,
    ca: &str,
    identity: Option<TlsIdentity>,
    work: impl FnOnce(Channel) -> F + Send,
) -> Result<T> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(ca))
        .domain_name(name);
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    stage.cluster.within_fabric(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async move {
            let channel = Endpoint::from_shared(format!("https://{server}"))?
                .tls_config(tls)?
                .connect_timeout(DIAL)
                .timeout(DIAL)
                .connect()
                .await?;
            work(channel).await
        })
    })
}

/// What an agent answers to who comes with this identity: `Ok`, a status, or an error where TLS did not let it pass.
fn describe(
    stage: &Stage,
    agent: SocketAddr,
    ca: &str,
    identity: Option<TlsIdentity>,
) -> Result<std::result::Result<String, Status>> {
    dialled(stage, agent, AGENT_DNS, ca, identity, |channel| async move {
        match AgentClient::new(channel).describe(DescribeRequest {}).await {
            Ok(answer) => Ok(Ok(answer.into_inner().node_name)),
            // A certificate that is missing or bad ends the connection, at the first call at the latest.
            Err(status) if std::error::Error::source(&status).is_some() => bail!("{status}"),
            Err(status) => Ok(Err(status)),
        }
    })
}

/// A coordinator's identity from an authority.
fn coordinator(issuer: &Issuer<'_, KeyPair>) -> Result<TlsIdentity> {
    let mut params = CertificateParams::new(vec![COORDINATOR_DNS.to_owned()])?;
    params
        .subject_alt_names
        .push(SanType::URI(Identity::Coordinator.uri().try_into()?));
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, issuer)?;
    Ok(TlsIdentity::from_pem(certificate.pem(), key.serialize_pem()))
}

impl Stage {
    fn authority(&self) -> Result<String> {
        let map = self.get(&["configmap", "quartermaster-ca", NAMESPACE])?;
        Ok(map["data"]["ca.crt"].as_str().context("no bundle")?.to_owned())
    }

    /// A value of the authority's Secret.
    fn secret(&self, key: &str) -> Result<Option<String>> {
        use base64::Engine as _;
        let secret = self.get(&["secret", "quartermaster-ca", NAMESPACE])?;
        let Some(text) = secret["data"][key].as_str() else {
            return Ok(None);
        };
        let bytes = base64::engine::general_purpose::STANDARD.decode(text)?;
        Ok(Some(String::from_utf8(bytes)?))
    }

    fn enrolment(&self) -> Result<SocketAddr> {
        let leader = deployment::leader(&self.cluster)?;
        let pod = self.get(&["pod", &leader, NAMESPACE])?;
        let ip = pod["status"]["podIP"].as_str().context("no address")?;
        Ok(format!("{ip}:7444").parse()?)
    }

    fn token(&self, account: &str, audience: &str, pod: Option<&str>) -> Result<String> {
        let audience = format!("--audience={audience}");
        let mut args = vec!["create", "token", account, NAMESPACE, &audience];
        let bound;
        if let Some(pod) = pod {
            bound = format!("--bound-object-name={pod}");
            args.extend(["--bound-object-kind=Pod", &bound]);
        }
        Ok(self.kubectl(&args)?.trim().to_owned())
    }

    /// A pod of the agents' account on a node, which is no agent.
    fn pod_of_the_agents_account(&self, name: &str, node: &str) -> Result<()> {
        self.cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: quartermaster}}\nspec:\n  serviceAccountName: quartermaster-agent\n  terminationGracePeriodSeconds: 1\n  nodeName: {node}\n  containers: [{{name: c, image: \"registry.testbed:5000/server:1.0\"}}]\n"
        ))?;
        Ok(())
    }

    /// An agent as the DaemonSet makes it, on a node, which nobody summons or dismisses.
    fn lasting_agent(&self, name: &str, node: &str) -> Result<SocketAddr> {
        let daemons = self.get(&["daemonset", "quartermaster-agent", NAMESPACE])?;
        let mut spec = daemons["spec"]["template"]["spec"].clone();
        spec["nodeName"] = node.into();
        spec["nodeSelector"] = serde_json::Value::Null;
        let pod = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "quartermaster"},
            "spec": spec,
        });
        self.cluster.apply(&pod.to_string())?;
        let ip = wait_for("the agent to be ready", SOON, || {
            let pod = self.get(&["pod", name, NAMESPACE])?;
            let ready = pod["status"]["containerStatuses"][0]["ready"] == true;
            ensure!(ready, "it is {}", pod["status"]);
            Ok(pod["status"]["podIP"].as_str().map(ToOwned::to_owned))
        })?;
        Ok(format!("{ip}:7443").parse()?)
    }

    fn delete_ours(&self, pods: &[&str]) -> Result<()> {
        let mut args = vec!["delete", "pod", NAMESPACE, "--ignore-not-found", "--timeout=60s"];
        args.extend(pods);
        self.kubectl(&args).map(drop)
    }
}

pub(crate) fn only_the_token_of_a_living_agents_pod_gets_a_certificate_and_only_for_its_node(
    stage: &Stage,
) -> Result<()> {
    let (server, ca) = (stage.enrolment()?, stage.authority()?);
    let me = Somebody::new()?;
    let refused = |what: &str, token: &str, because: &str| -> Result<()> {
        match me.enrol(stage, server, &ca, token)? {
            Ok(_) => bail!("{what} was taken"),
            Err(status) => {
                ensure!(status.code() == Code::PermissionDenied, "{what}: {status}");
                ensure!(status.message().contains(because), "{what}: {status}");
                Ok(())
            }
        }
    };
    stage.pod_of_the_agents_account("impostor", "worker-17")?;
    let good = stage.token("quartermaster-agent", "quartermaster", Some("impostor"))?;
    let other = stage.token("default", "quartermaster", None)?;
    let audience = stage.token("quartermaster-agent", "somebody-else", Some("impostor"))?;
    let unbound = stage.token("quartermaster-agent", "quartermaster", None)?;
    refused("no token", "", "there is no token")?;
    refused("a token that is none", "a.b.c", "not valid for the audience")?;
    refused(
        "the token of another account",
        &other,
        "not of system:serviceaccount",
    )?;
    refused(
        "a token for another audience",
        &audience,
        "not valid for the audience",
    )?;
    refused("a token without a pod", &unbound, "bound to no pod")?;

    // The pod is on worker-17 and the request names worker-16. The same token again gives the same node again:
    // a container that is started anew has no other.
    for _ in 0..2 {
        let signed = match me.enrol(stage, server, &ca, &good)? {
            Ok(signed) => signed,
            Err(status) => bail!("the token of a living pod was refused: {status}"),
        };
        let der = rustls_pki_types::CertificateDer::from(pem_body(&signed.certificate_pem)?);
        ensure!(
            identity_of(&der) == Some(Identity::Agent("worker-17".to_owned())),
            "it was signed for {:?}",
            identity_of(&der)
        );
    }

    stage.delete_ours(&["impostor"])?;
    // The API server itself refuses the token of a pod that is gone, some seconds later than we do.
    match me.enrol(stage, server, &ca, &good)? {
        Err(status) if status.code() == Code::PermissionDenied => {}
        other => bail!("the token of a deleted pod: {:?}", other.map(|_| "signed")),
    }
    // Another pod of the same name is another pod.
    stage.pod_of_the_agents_account("impostor", "worker-17")?;
    match me.enrol(stage, server, &ca, &good)? {
        Err(status) if status.code() == Code::PermissionDenied => {}
        other => bail!("the token of a replaced pod: {:?}", other.map(|_| "signed")),
    }
    stage.delete_ours(&["impostor"])
}

pub(crate) fn an_agent_obeys_no_other_agent_no_stranger_and_no_old_leader(stage: &Stage) -> Result<()> {
    let (server, ca) = (stage.enrolment()?, stage.authority()?);
    let agent = stage.lasting_agent("watched", "worker-21")?;
    let done = (|| {
        let key = stage.secret("tls.key")?.context("no key")?;
        let current = stage.secret("tls.crt")?.context("no certificate")?;
        let issuer = Issuer::from_ca_cert_pem(&current, KeyPair::from_pem(&key)?)?;
        let ours = coordinator(&issuer)?;
        let answer = describe(stage, agent, &ca, Some(ours.clone()))?;
        ensure!(
            answer.as_ref().is_ok_and(|node| node == "worker-21"),
            "a coordinator of ours got {answer:?}"
        );

        // The agent of worker-17, with a certificate that the real coordinator signed.
        stage.pod_of_the_agents_account("impostor", "worker-17")?;
        let token = stage.token("quartermaster-agent", "quartermaster", Some("impostor"))?;
        let other = Somebody::new()?;
        let signed = match other.enrol(stage, server, &ca, &token)? {
            Ok(signed) => other.with(&signed.certificate_pem),
            Err(status) => bail!("the enrolment of another agent: {status}"),
        };
        let answer = describe(stage, agent, &ca, Some(signed))?;
        ensure!(
            answer
                .as_ref()
                .is_err_and(|status| status.code() == Code::PermissionDenied),
            "another agent got {answer:?}"
        );

        ensure!(
            describe(stage, agent, &ca, None).is_err(),
            "somebody without a certificate got an answer"
        );
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let stranger = coordinator(&Issuer::new(params, KeyPair::generate()?))?;
        ensure!(
            describe(stage, agent, &ca, Some(stranger)).is_err(),
            "a coordinator of another authority got an answer"
        );

        let code = |term: u64, id: &str| -> Result<Code> {
            let request = PullRequest {
                header: Some(CommandHeader {
                    id: id.to_owned(),
                    term,
                }),
                ..Default::default()
            };
            dialled(
                stage,
                agent,
                AGENT_DNS,
                &ca,
                Some(ours.clone()),
                |channel| async move {
                    Ok(match AgentClient::new(channel).pull(request).await {
                        Ok(_) => Code::Ok,
                        Err(status) => status.code(),
                    })
                },
            )
        };
        let future = u64::from(u32::MAX);
        ensure!(
            code(future, "newest")? == Code::Ok,
            "the newest leader was refused"
        );
        ensure!(
            code(future - 1, "older")? == Code::FailedPrecondition,
            "an old leader was obeyed"
        );
        Ok(())
    })();
    stage.delete_ours(&["watched", "impostor"])?;
    done
}

pub(crate) fn an_authority_is_followed_by_another_while_nodes_are_worked_on(stage: &Stage) -> Result<()> {
    let arguments = "/spec/template/spec/containers/0/args/-";
    let patch = format!(r#"[{{"op":"add","path":"{arguments}","value":"--certificate-life=40s"}}]"#);
    let deployment = "deployment/quartermaster-coordinator";
    stage.kubectl(&["patch", deployment, NAMESPACE, "--type=json", "--patch", &patch])?;
    deployment::wait_until_up(&stage.cluster)?;
    let done = (|| {
        let agent = stage.lasting_agent("watched", "worker-21")?;
        let first = stage.secret("tls.crt")?.context("no certificate")?;
        stage.kubectl(&[
            "annotate",
            "secret",
            "quartermaster-ca",
            NAMESPACE,
            "kwasm.sh/rotate=please",
        ])?;
        stage.until("the next authority to be trusted", || {
            let bundle = stage.authority()?;
            ensure!(bundle.matches("BEGIN").count() == 2, "the bundle is {bundle}");
            Ok(())
        })?;
        ensure!(
            stage.secret("tls.crt")?.as_ref() == Some(&first),
            "it signs before everybody can have learned of it"
        );
        stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node=true")?;
        stage.until_provisioned("worker-24")?;
        let next = wait_for("the next authority to sign", SOON, || {
            let now = stage.secret("tls.crt")?.context("no certificate")?;
            ensure!(now != first, "the first one does");
            Ok(Some(now))
        })?;
        let key = stage.secret("tls.key")?.context("no key")?;
        let issuer = Issuer::from_ca_cert_pem(&next, KeyPair::from_pem(&key)?)?;
        // An agent that was there before it all: it has renewed, and trusts a coordinator of the next authority.
        let ours = coordinator(&issuer)?;
        stage.until("the agent to show a certificate of the next authority", || {
            let answer = describe(stage, agent, &next, Some(ours.clone()))?;
            ensure!(answer.is_ok(), "it answers {answer:?}");
            Ok(())
        })?;
        stage.annotate(&["worker-24"], "kwasm.sh/kwasm-node-")?;
        stage.until_unmarked("worker-24")
    })();
    stage.delete_ours(&["watched"])?;
    stage.kubectl(&["rollout", "undo", deployment, NAMESPACE])?;
    deployment::wait_until_up(&stage.cluster)?;
    done?;
    stage.until_agents_are_gone()
}

fn pem_body(pem: &str) -> Result<Vec<u8>> {
    use base64::Engine as _;
    let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    Ok(base64::engine::general_purpose::STANDARD.decode(body)?)
}
