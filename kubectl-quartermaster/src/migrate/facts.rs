//! What is there of the operators that came before: the KWasm operator and the Prefetch operator.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;

use crate::trouble::Trouble;

/// Which operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Predecessor {
    /// Made nodes able to run WebAssembly.
    Kwasm,
    /// Pulled images by pods.
    Prefetch,
}

/// All that was found of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Predecessors {
    pub(crate) operators: Vec<Operator>,
    /// Jobs of the KWasm operator: one for each node that it has provisioned.
    pub(crate) jobs: Vec<Leftover>,
    /// Pods of the Prefetch operator: one for each image and node.
    pub(crate) pods: Vec<Leftover>,
    /// Nodes that carry KWasm's label and that Quartermaster has not taken over.
    pub(crate) nodes: Vec<String>,
}

/// A Deployment of one of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Operator {
    pub(crate) of: Predecessor,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) replicas: i32,
    /// The Helm release that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) release: Option<String>,
}

/// Something that one of them has made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Leftover {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// It is still at work.
    pub(crate) active: bool,
}

impl Predecessors {
    /// Operators that run.
    pub(crate) fn running(&self) -> impl Iterator<Item = &Operator> {
        self.operators.iter().filter(|operator| operator.replicas > 0)
    }

    /// Whether there is nothing that a migration would do.
    pub(crate) fn is_empty(&self) -> bool {
        self.running().next().is_none() && self.jobs.is_empty() && self.pods.is_empty()
    }
}

impl Predecessor {
    /// Its name among people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kwasm => "the KWasm operator",
            Self::Prefetch => "the Prefetch operator",
        }
    }
}

/// Looks for all of it in the whole cluster.
///
/// # Errors
/// When something can't be listed.
pub(crate) async fn find(client: &Client) -> Result<Predecessors, Trouble> {
    let all = ListParams::default();
    let failed = |what: &'static str| move |error: kube::Error| Trouble::of(what, &error);
    let deployments = Api::<Deployment>::all(client.clone())
        .list(&all)
        .await
        .map_err(failed("list the Deployments of all namespaces"))?;
    let jobs = Api::<Job>::all(client.clone())
        .list(&all.clone().labels("kwasm.sh/job=true"))
        .await
        .map_err(failed("list the Jobs of all namespaces"))?;
    let pods = Api::<Pod>::all(client.clone())
        .list(&all.clone().labels("app in (prefetch-pod,prefetch-operator-pod)"))
        .await
        .map_err(failed("list the pods of all namespaces"))?;
    let nodes = Api::<Node>::all(client.clone())
        .list_metadata(&all.clone().labels("kwasm.sh/kwasm-provisioned"))
        .await
        .map_err(failed("list the nodes"))?;
    let theirs = nodes
        .items
        .iter()
        .filter(|node| !node.annotations().contains_key("kwasm.sh/spec-hash"));
    Ok(Predecessors {
        operators: deployments.items.iter().filter_map(operator).collect(),
        jobs: jobs
            .items
            .iter()
            .filter(|job| is_of_kwasm(job))
            .map(job)
            .collect(),
        pods: pods.items.iter().filter_map(pod).collect(),
        nodes: theirs.map(kube::ResourceExt::name_any).collect(),
    })
}

fn operator(deployment: &Deployment) -> Option<Operator> {
    let spec = deployment.spec.as_ref()?;
    let labelled = deployment
        .labels()
        .get("app.kubernetes.io/name")
        .map(String::as_str);
    let pod = spec.template.spec.as_ref()?;
    let runs = |image: &str| {
        pod.containers
            .iter()
            .filter_map(|container| container.image.as_deref())
            .any(|one| repository(one).ends_with(image))
    };
    let of = if labelled == Some("kwasm-operator") || runs("kwasm-operator") {
        Predecessor::Kwasm
    } else if runs("prefetch-operator") || deployment.name_any().contains("prefetch-operator") {
        Predecessor::Prefetch
    } else {
        return None;
    };
    Some(Operator {
        of,
        namespace: deployment.namespace().unwrap_or_default(),
        name: deployment.name_any(),
        replicas: spec.replicas.unwrap_or(1),
        release: deployment.annotations().get("meta.helm.sh/release-name").cloned(),
    })
}

/// A reference without its tag and digest.
fn repository(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or_default();
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => name,
    }
}

/// Others use the same label; the name tells theirs.
fn is_of_kwasm(job: &Job) -> bool {
    // A name is cut at 63 characters, as pods' labels are.
    let name = job.name_any();
    name.ends_with("-provision-kwasm") || (name.len() == 63 && name.contains("-provision"))
}

fn job(job: &Job) -> Leftover {
    let active = job
        .status
        .as_ref()
        .and_then(|status| status.active)
        .unwrap_or_default()
        > 0;
    Leftover {
        namespace: job.namespace().unwrap_or_default(),
        name: job.name_any(),
        active,
    }
}

fn pod(pod: &Pod) -> Option<Leftover> {
    let name = pod.name_any();
    if !name.starts_with("prefetch-pod-") && !name.starts_with("prefetch-operator-pod-") {
        return None;
    }
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    Some(Leftover {
        namespace: pod.namespace().unwrap_or_default(),
        name,
        active: !matches!(phase, Some("Succeeded" | "Failed")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(yaml: &str) -> Option<Operator> {
        operator(&serde_yaml_ng::from_str(yaml).expect("a Deployment"))
    }

    #[test]
    fn both_operators_are_known_by_label_or_image() {
        let kwasm = deployment(
            "metadata: {name: kwasm-operator, namespace: kwasm, labels: {app.kubernetes.io/name: kwasm-operator}, \
             annotations: {meta.helm.sh/release-name: kwasm-operator}}\n\
             spec: {replicas: 1, selector: {}, template: {spec: {containers: [{name: a, image: own/build}]}}}",
        );
        assert_eq!(
            kwasm,
            Some(Operator {
                of: Predecessor::Kwasm,
                namespace: "kwasm".into(),
                name: "kwasm-operator".into(),
                replicas: 1,
                release: Some("kwasm-operator".into()),
            })
        );
        let prefetch = deployment(
            "metadata: {name: controller-manager, namespace: p}\n\
             spec: {selector: {}, template: {spec: {containers: [{name: a, image: 'h:5000/kubernetes-prefetch-operator:latest'}]}}}",
        );
        assert_eq!(prefetch.map(|found| found.of), Some(Predecessor::Prefetch));
        let other = deployment(
            "metadata: {name: web}\nspec: {selector: {}, template: {spec: {containers: [{name: a, image: nginx}]}}}",
        );
        assert_eq!(other, None);
    }

    #[test]
    fn what_others_have_made_is_not_taken_for_theirs() {
        let made = |name: &str| -> Pod {
            serde_yaml_ng::from_str(&format!(
                "metadata: {{name: {name}}}\nstatus: {{phase: Succeeded}}"
            ))
            .expect("a pod")
        };
        let left = pod(&made("prefetch-pod-1-worker")).expect("theirs");
        assert!(!left.active);
        assert_eq!(pod(&made("web-1")), None);
        let job: Job = serde_yaml_ng::from_str("metadata: {name: spin-v2-provisioner}").expect("a Job");
        assert!(!is_of_kwasm(&job));
    }
}
