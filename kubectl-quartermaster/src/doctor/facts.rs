//! What `doctor` looks at, read once and judged elsewhere.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
    SubjectAccessReviewSpec,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, PostParams};
use kube::client::Body;
use kube::{Api, Client};

use super::rights::{COORDINATORS, PERSONS, Right};
use crate::cluster::Cluster;
use crate::leader::{LEASE, Leader};
use crate::migrate::{self, Predecessors};
use crate::status::{self, Status};
use crate::trouble::{Trouble, chain};

/// The CustomResourceDefinition.
const CRD: &str = "prefetches.cache.techsquad.rocks";
/// The RuntimeClasses.
pub(super) const CLASSES: [&str; 2] = ["crun", "wasmedge"];

/// For how long a leader that does not answer is asked again.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was read; an error says in words why it was not.
pub(super) type Seen<T> = Result<T, String>;

/// Everything that is looked at.
pub(super) struct Facts {
    pub(super) namespace: String,
    /// Of the API server, such as `1.34`.
    pub(super) version: Seen<(u32, u32)>,
    /// The API server's time, and that of this machine when it was heard.
    pub(super) time: Seen<(Timestamp, Timestamp)>,
    /// What the person may not do.
    pub(super) missing_rights: Seen<Vec<Right>>,
    /// What the coordinator may not do.
    pub(super) missing_of_coordinator: Seen<Vec<Right>>,
    pub(super) crd: Seen<Option<CustomResourceDefinition>>,
    pub(super) classes: Seen<Vec<(&'static str, Option<RuntimeClass>)>>,
    pub(super) deployment: Seen<Option<Deployment>>,
    pub(super) daemon_set: Seen<Option<DaemonSet>>,
    /// Of coordinators and agents.
    pub(super) pods: Seen<Vec<Pod>>,
    pub(super) lease: Seen<Option<Lease>>,
    pub(super) leader: Result<Status, Trouble>,
    pub(super) nodes: Seen<Vec<Node>>,
    /// Heartbeats of kubelets, by the clocks of their nodes.
    pub(super) heartbeats: Seen<Vec<Lease>>,
    pub(super) predecessors: Seen<Predecessors>,
}

/// Looks at everything.
pub(super) async fn gather(cluster: &Cluster, leader: &Leader) -> Facts {
    let client = &cluster.api;
    // That it does not answer is a finding, and need not be waited for.
    let leader = leader.within(PATIENCE);
    let namespace = cluster.namespace.as_str();
    let everything = ListParams::default();
    let ours = everything.clone().labels("app.kubernetes.io/name=quartermaster");
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let beats: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    let nodes: Api<Node> = Api::all(client.clone());
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let (version, missing_rights, missing_of_coordinator, crd, classes, predecessors, leader) = tokio::join!(
        version(client),
        missing(client, namespace, None),
        missing(client, namespace, Some(namespace)),
        crds.get_opt(CRD),
        classes(client),
        migrate::find(client),
        status::ask(&leader),
    );
    let (deployment, daemon_set, pods, lease, nodes, heartbeats, time) = tokio::join!(
        deployments.get_opt("quartermaster-coordinator"),
        daemon_sets.get_opt("quartermaster-agent"),
        pods.list(&ours),
        leases.get_opt(LEASE),
        nodes.list(&everything),
        beats.list(&everything),
        time(client),
    );
    Facts {
        namespace: namespace.to_owned(),
        version,
        time,
        missing_rights,
        missing_of_coordinator,
        crd: seen(crd),
        classes,
        deployment: seen(deployment),
        daemon_set: seen(daemon_set),
        pods: seen(pods).map(|list| list.items),
        lease: seen(lease),
        leader,
        nodes: seen(nodes).map(|list| list.items),
        heartbeats: seen(heartbeats).map(|list| list.items),
        predecessors: predecessors.map_err(|trouble| trouble.to_string()),
    }
}

fn seen<T>(read: kube::Result<T>) -> Seen<T> {
    read.map_err(|error| match error {
        kube::Error::Api(status) => status.message.clone(),
        other => chain(&other),
    })
}

async fn version(client: &Client) -> Seen<(u32, u32)> {
    let version = seen(client.apiserver_version().await)?;
    let number = |text: &str| {
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits
            .parse::<u32>()
            .map_err(|_| format!("{text:?} is no number"))
    };
    Ok((number(&version.major)?, number(&version.minor)?))
}

/// What the API server's clock says, as it dates its answers.
async fn time(client: &Client) -> Seen<(Timestamp, Timestamp)> {
    let request = http::Request::get("/version")
        .body(Body::empty())
        .map_err(|error| chain(&error))?;
    let answer = seen(client.send(request).await)?;
    let here = Timestamp::now();
    let date = answer.headers().get(http::header::DATE);
    let text = date.and_then(|date| date.to_str().ok()).unwrap_or_default();
    let there = jiff::fmt::rfc2822::parse(text).map_err(|_| format!("its date {text:?} is none"))?;
    Ok((there.timestamp(), here))
}

async fn classes(client: &Client) -> Seen<Vec<(&'static str, Option<RuntimeClass>)>> {
    let api: Api<RuntimeClass> = Api::all(client.clone());
    let mut classes = Vec::new();
    for name in CLASSES {
        classes.push((name, seen(api.get_opt(name).await)?));
    }
    Ok(classes)
}

/// What the person, or the coordinator of a namespace, may not do of what it needs.
async fn missing(client: &Client, namespace: &str, coordinator_of: Option<&str>) -> Seen<Vec<Right>> {
    let rights = if coordinator_of.is_some() {
        COORDINATORS
    } else {
        PERSONS
    };
    let account = coordinator_of.map(|namespace| format!("system:serviceaccount:{namespace}:{LEASE}"));
    let mut missing = Vec::new();
    for right in rights {
        let (resource, subresource) = match right.resource.split_once('/') {
            Some((resource, sub)) => (resource, Some(sub.to_owned())),
            None => (right.resource, None),
        };
        let attributes = ResourceAttributes {
            group: Some(right.group.to_owned()),
            resource: Some(resource.to_owned()),
            subresource,
            verb: Some(right.verb.to_owned()),
            namespace: right.own_namespace.then(|| namespace.to_owned()),
            name: right.name.map(str::to_owned),
            ..ResourceAttributes::default()
        };
        let allowed = match &account {
            None => {
                let review = SelfSubjectAccessReview {
                    spec: SelfSubjectAccessReviewSpec {
                        resource_attributes: Some(attributes),
                        ..SelfSubjectAccessReviewSpec::default()
                    },
                    ..SelfSubjectAccessReview::default()
                };
                let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
                seen(api.create(&PostParams::default(), &review).await)?.status
            }
            Some(account) => {
                let review = SubjectAccessReview {
                    spec: SubjectAccessReviewSpec {
                        resource_attributes: Some(attributes),
                        user: Some(account.clone()),
                        ..SubjectAccessReviewSpec::default()
                    },
                    ..SubjectAccessReview::default()
                };
                let api: Api<SubjectAccessReview> = Api::all(client.clone());
                seen(api.create(&PostParams::default(), &review).await)?.status
            }
        };
        if !allowed.is_some_and(|status| status.allowed) {
            missing.push(*right);
        }
    }
    Ok(missing)
}
