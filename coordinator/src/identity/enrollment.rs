//! Enrolment: an agent proves itself by its pod's token and gets a certificate for its node.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, PostParams};
use quartermaster_proto::COMMAND_PORT;
use quartermaster_proto::v1::enrollment_server::Enrollment;
use quartermaster_proto::v1::{EnrollRequest, EnrollResponse};
use tokio::sync::{mpsc, watch};
use tonic::{Code, Request, Response, Status};
use tracing::{info, warn};

use super::current::Current;
use crate::report::Metrics;

/// The audience of the tokens that agents present.
const AUDIENCE: &str = "quartermaster";
const AGENT_ACCOUNT: &str = "quartermaster-agent";
const CSR_LIMIT: usize = 8 * 1024;
const TOKEN_LIMIT: usize = 16 * 1024;

/// An agent that has just got its certificate and is about to take commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Its node.
    pub node: String,
    /// `metadata.uid` of its pod.
    pub pod_uid: String,
    /// Where to dial it.
    pub address: SocketAddr,
}

/// The enrolment service.
pub struct Enroller {
    /// What signs, and whom to trust.
    pub current: watch::Receiver<Arc<Current>>,
    /// Counts enrolments.
    pub metrics: Arc<Metrics>,
    /// For TokenReviews and pods.
    pub client: kube::Client,
    /// The coordinator's own namespace, in which agents run.
    pub namespace: String,
    /// Who wants to know of arrivals.
    pub arrivals: mpsc::Sender<Arrival>,
}

#[tonic::async_trait]
impl Enrollment for Enroller {
    async fn enroll(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let answer = self.answer(request).await;
        self.metrics.enrolment(match &answer {
            Ok(_) => "signed",
            Err(status) if status.code() == Code::Unavailable => "unavailable",
            Err(_) => "refused",
        });
        answer
    }
}

impl Enroller {
    async fn answer(&self, request: Request<EnrollRequest>) -> Result<Response<EnrollResponse>, Status> {
        let remote = request.remote_addr();
        let asked = request.into_inner();
        if asked.csr_pem.len() > CSR_LIMIT || asked.token.len() > TOKEN_LIMIT {
            return Err(Status::invalid_argument("the request or the token is too long"));
        }
        // The API server calls an empty token a bad request, which would be taken for a failure of its own.
        if asked.token.is_empty() {
            return Err(denied(remote, "there is no token"));
        }
        let user = self.review(&asked.token).await?;
        let holder = holder_of(&user, &self.namespace).map_err(|why| denied(remote, &why))?;
        let (pod_name, pod_uid) = (holder.pod, holder.uid);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let pod = pods
            .get_opt(&pod_name)
            .await
            .map_err(|error| unavailable(&error))?;
        let node = node_of_token(pod.as_ref(), &pod_uid).map_err(|why| denied(remote, &why))?;
        if holder.node.is_some_and(|named| named != node) {
            return Err(denied(
                remote,
                "the token was given out on another node than its pod's",
            ));
        }
        let current = self.current.borrow().clone();
        let certificate_pem = current
            .authority
            .sign_agent(&asked.csr_pem, &node, current.life)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        info!(node, pod = pod_name, "agent enrolled");

        // The address is a hint that spares the wait for the kubelet's report of it. One that neither the
        // connection nor the pod's status bears out is not dialled.
        let claimed: Option<IpAddr> = asked.pod_ip.parse().ok();
        let reported = pod
            .and_then(|pod| pod.status)
            .and_then(|status| status.pod_ip)
            .and_then(|ip| ip.parse().ok());
        if let Some(ip) = claimed.filter(|ip| borne_out(*ip, remote, reported)) {
            let arrival = Arrival {
                node,
                pod_uid,
                address: SocketAddr::new(ip, COMMAND_PORT),
            };
            // Full only when the engine is far behind, and then the watch of pods will tell it.
            let _ = self.arrivals.try_send(arrival);
        }
        Ok(Response::new(EnrollResponse {
            certificate_pem,
            ca_pem: current.bundle_pem.clone(),
        }))
    }

    async fn review(&self, token: &str) -> Result<UserInfo, Status> {
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: Some(vec![AUDIENCE.to_owned()]),
            },
            ..TokenReview::default()
        };
        let status = reviews
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| unavailable(&error))?
            .status
            .unwrap_or_default();
        let for_us = status
            .audiences
            .is_some_and(|audiences| audiences.iter().any(|audience| audience == AUDIENCE));
        match status.user {
            Some(user) if status.authenticated == Some(true) && for_us => Ok(user),
            _ => Err(denied(
                None,
                "the token is not valid for the audience quartermaster",
            )),
        }
    }
}

/// To whom a token was given.
#[derive(Debug, PartialEq, Eq)]
struct Holder {
    pod: String,
    uid: String,
    /// On which node; API servers of 1.30 say it.
    node: Option<String>,
}

/// The pod to which a token is bound.
///
/// The same token may be used again: a container that is started again has no other, and what is signed is always
/// for its pod's own node. So a stolen token gives what its thief could have had from its pod, for as long as
/// the pod lives and ten minutes at most.
fn holder_of(user: &UserInfo, namespace: &str) -> Result<Holder, String> {
    let account = format!("system:serviceaccount:{namespace}:{AGENT_ACCOUNT}");
    let name = user.username.as_deref().unwrap_or_default();
    if name != account {
        return Err(format!("the token is of {name}, not of {account}"));
    }
    let extra = |key: &str| {
        let values = user.extra.as_ref().and_then(|extra| extra.get(key))?;
        match values.as_slice() {
            [value] => Some(value.clone()),
            _ => None,
        }
    };
    let pod = extra("authentication.kubernetes.io/pod-name");
    let uid = extra("authentication.kubernetes.io/pod-uid");
    let (pod, uid) = pod.zip(uid).ok_or("the token is bound to no pod")?;
    Ok(Holder {
        pod,
        uid,
        node: extra("authentication.kubernetes.io/node-name"),
    })
}

/// The node for which the holder of a token that is bound to the pod of this uid may speak.
/// A token outlives its pod for a while, so the pod is looked up and compared.
pub fn node_of_token(pod: Option<&Pod>, token_uid: &str) -> Result<String, String> {
    let pod = pod.ok_or("the pod of the token is gone")?;
    if pod.metadata.uid.as_deref() != Some(token_uid) {
        return Err("the pod of the token was replaced by another".to_owned());
    }
    if pod.metadata.deletion_timestamp.is_some() {
        return Err("the pod of the token is being deleted".to_owned());
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Err("the pod of the token has ended".to_owned());
    }
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.clone())
        .filter(|node| !node.is_empty())
        .ok_or_else(|| "the pod of the token is on no node".to_owned())
}

/// Whether a claimed address is the one that the connection comes from or that the pod's status reports. A socket that
/// listens on `[::]` shows an IPv4 peer as an IPv6 address that holds it.
fn borne_out(claimed: IpAddr, remote: Option<SocketAddr>, reported: Option<IpAddr>) -> bool {
    remote.map(|remote| remote.ip().to_canonical()) == Some(claimed) || reported == Some(claimed)
}

fn denied(remote: Option<SocketAddr>, why: &str) -> Status {
    warn!(?remote, why, "enrolment refused");
    Status::permission_denied(why)
}

fn unavailable(error: &kube::Error) -> Status {
    Status::unavailable(format!("the API server can't be asked about the token: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(yaml: &str) -> Pod {
        serde_yaml_ng::from_str(yaml).expect("a Pod")
    }

    #[test]
    fn a_live_pod_speaks_for_its_own_node() {
        let live =
            pod("metadata: {uid: a}\nspec: {nodeName: worker-1, containers: []}\nstatus: {phase: Running}");
        assert_eq!(node_of_token(Some(&live), "a").as_deref(), Ok("worker-1"));
    }

    #[test]
    fn a_pod_that_is_gone_replaced_deleted_ended_or_unplaced_speaks_for_none() {
        let spec = "spec: {nodeName: worker-1, containers: []}";
        assert!(node_of_token(None, "a").is_err());
        for yaml in [
            format!("metadata: {{uid: b}}\n{spec}"),
            format!("metadata: {{uid: a, deletionTimestamp: '2026-01-01T00:00:00Z'}}\n{spec}"),
            format!("metadata: {{uid: a}}\n{spec}\nstatus: {{phase: Failed}}"),
            "metadata: {uid: a}\nspec: {containers: []}".to_owned(),
        ] {
            assert!(node_of_token(Some(&pod(&yaml)), "a").is_err(), "{yaml}");
        }
    }

    #[test]
    fn an_address_is_dialled_only_if_the_connection_or_the_pods_status_bears_it_out() {
        let claimed = IpAddr::from([10, 244, 1, 2]);
        let from = |text: &str| Some(text.parse().expect("an address"));
        assert!(borne_out(claimed, from("10.244.1.2:40000"), None));
        assert!(borne_out(claimed, from("[::ffff:10.244.1.2]:40000"), None));
        assert!(borne_out(claimed, from("10.244.9.9:40000"), Some(claimed)));
        assert!(!borne_out(claimed, from("10.244.9.9:40000"), None));
        assert!(!borne_out(claimed, None, None));
    }

    fn user(name: &str, extra: &[(&str, &str)]) -> UserInfo {
        UserInfo {
            username: Some(name.to_owned()),
            extra: Some(
                extra
                    .iter()
                    .map(|(key, value)| {
                        (
                            format!("authentication.kubernetes.io/{key}"),
                            vec![(*value).to_owned()],
                        )
                    })
                    .collect(),
            ),
            ..UserInfo::default()
        }
    }

    #[test]
    fn only_the_agents_own_account_enrols_and_only_from_a_pod() {
        let agent = "system:serviceaccount:quartermaster:quartermaster-agent";
        let bound = [("pod-name", "p"), ("pod-uid", "u")];
        let holder = |node: Option<&str>| Holder {
            pod: "p".into(),
            uid: "u".into(),
            node: node.map(ToOwned::to_owned),
        };
        assert_eq!(holder_of(&user(agent, &bound), "quartermaster"), Ok(holder(None)));
        let with_node = [bound[0], bound[1], ("node-name", "n")];
        assert_eq!(
            holder_of(&user(agent, &with_node), "quartermaster"),
            Ok(holder(Some("n")))
        );
        for (name, extra) in [
            ("system:serviceaccount:other:quartermaster-agent", &bound[..]),
            ("system:serviceaccount:quartermaster:default", &bound[..]),
            ("system:admin", &bound[..]),
            (agent, &bound[..1]),
        ] {
            assert!(holder_of(&user(name, extra), "quartermaster").is_err(), "{name}");
        }
    }
}
