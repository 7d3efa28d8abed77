//! Judges what is installed: the definition of Prefetch, RuntimeClasses, the coordinator's Deployment, the agents'
//! DaemonSet, their pods, and rights.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps,
};
use kube::ResourceExt as _;

use super::facts::Facts;
use super::finding::Finding;
use super::rights::Right;
use crate::look::{counted, named};

/// The definition that goes with this program.
const CRD: &str = include_str!("../../../manifests/chart/files/crd.yaml");
const CRUN: &str = "kwasm.sh/crun";

pub(super) fn version(facts: &Facts) -> Finding {
    match &facts.version {
        Ok((major, minor)) if (*major, *minor) >= (1, 30) => {
            Finding::good(format!("Kubernetes {major}.{minor}"))
        }
        Ok((major, minor)) => Finding::wrong(
            format!("Kubernetes {major}.{minor} is older than 1.30, which is needed"),
            "upgrade the cluster",
        ),
        Err(why) => Finding::unseen("the API server's version", why),
    }
}

pub(super) fn rights(facts: &Facts) -> Vec<Finding> {
    let words = |missing: &[Right]| -> String {
        let words: Vec<String> = missing.iter().map(ToString::to_string).collect();
        named(&words, 6)
    };
    let namespace = &facts.namespace;
    let yours = match &facts.missing_rights {
        Ok(missing) if missing.is_empty() => Finding::good("you may do all that this program does"),
        Ok(missing) => Finding::wrong(
            format!("you may not: {}", words(missing)),
            "an administrator can give you the role of manifests/samples/people.yaml",
        ),
        Err(why) => Finding::unseen("your rights", why),
    };
    let its = match &facts.missing_of_coordinator {
        Ok(missing) if missing.is_empty() => Finding::good("the coordinator may do all that it has to"),
        Ok(missing) => Finding::wrong(
            format!("the coordinator may not: {}", words(missing)),
            format!(
                "install it again into the namespace {namespace}, as it was installed (helm upgrade, or kubectl apply -k manifests)"
            ),
        ),
        Err(why) => Finding::unseen("the coordinator's rights", why),
    };
    vec![yours, its]
}

pub(super) fn definition(facts: &Facts) -> Finding {
    let remedy = "kubectl apply --server-side -f manifests/chart/files/crd.yaml of this version, or helm upgrade; Prefetches stay as they are";
    let found = match &facts.crd {
        Ok(Some(found)) => found,
        Ok(None) => {
            return Finding::wrong(
                "the CustomResourceDefinition of Prefetch is not installed",
                remedy,
            );
        }
        Err(why) => return Finding::unseen("the CustomResourceDefinition of Prefetch", why),
    };
    let wanted = serde_yaml_ng::from_str::<CustomResourceDefinition>(CRD).map(|ours| fields(&ours));
    let missing: Vec<String> = wanted
        .unwrap_or_default()
        .difference(&fields(found))
        .cloned()
        .collect();
    if missing.is_empty() {
        return Finding::good("the CustomResourceDefinition of Prefetch is of this version");
    }
    Finding::wrong(
        format!(
            "the CustomResourceDefinition of Prefetch is of another version: it lacks {}",
            named(&missing, 4)
        ),
        remedy,
    )
}

/// The paths of all fields of a definition.
fn fields(crd: &CustomResourceDefinition) -> BTreeSet<String> {
    fn walk(path: &str, schema: &JSONSchemaProps, into: &mut BTreeSet<String>) {
        for (name, inner) in schema.properties.iter().flatten() {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            walk(&path, inner, into);
            into.insert(path);
        }
    }
    let mut all = BTreeSet::new();
    for version in &crd.spec.versions {
        let schema = version
            .schema
            .as_ref()
            .and_then(|schema| schema.open_api_v3_schema.as_ref());
        if let Some(schema) = schema.filter(|_| version.served) {
            walk("", schema, &mut all);
        }
    }
    all
}

pub(super) fn classes(facts: &Facts) -> Vec<Finding> {
    let classes = match &facts.classes {
        Ok(classes) => classes,
        Err(why) => return vec![Finding::unseen("the RuntimeClasses", why)],
    };
    let mut findings = Vec::new();
    for (name, class) in classes {
        let Some(class) = class else {
            findings.push(Finding::note(
                format!("there is no RuntimeClass {name}; pods can't ask for WebAssembly by that name"),
                "kubectl apply -f manifests/base/runtimeclasses.yaml",
            ));
            continue;
        };
        if class.handler != "crun" {
            findings.push(Finding::wrong(
                format!(
                    "the RuntimeClass {name} leads to the handler {}, not to crun",
                    class.handler
                ),
                "delete it, since a handler can't be changed in place, and kubectl apply -f manifests/base/runtimeclasses.yaml",
            ));
            continue;
        }
        let selector = class
            .scheduling
            .as_ref()
            .and_then(|scheduling| scheduling.node_selector.as_ref());
        let ours = selector
            .and_then(|selector| selector.get(CRUN))
            .map(String::as_str)
            == Some("ready");
        findings.push(if ours {
            Finding::good(format!("the RuntimeClass {name} leads to nodes that run WebAssembly"))
        } else {
            Finding::note(
                format!(
                    "the RuntimeClass {name} does not select {CRUN}=ready: pods may be placed on nodes that can't run them"
                ),
                "kubectl apply -f manifests/base/runtimeclasses.yaml",
            )
        });
    }
    findings
}

pub(super) fn coordinator(facts: &Facts) -> Finding {
    let namespace = &facts.namespace;
    match &facts.deployment {
        Ok(Some(deployment)) => {
            let wanted = deployment
                .spec
                .as_ref()
                .and_then(|spec| spec.replicas)
                .unwrap_or(1);
            let ready = deployment
                .status
                .as_ref()
                .and_then(|status| status.ready_replicas)
                .unwrap_or_default();
            let image = image(deployment.spec.as_ref().map(|spec| &spec.template));
            if ready >= wanted && wanted > 0 {
                Finding::good(format!("{ready} of {wanted} coordinators are ready ({image})"))
            } else {
                Finding::wrong(
                    format!("{ready} of {wanted} coordinators are ready ({image})"),
                    format!(
                        "kubectl describe pods -n {namespace} -l app.kubernetes.io/component=coordinator"
                    ),
                )
            }
        }
        Ok(None) => Finding::wrong(
            format!("there is no Deployment {namespace}/quartermaster-coordinator"),
            "install Quartermaster, or name its namespace with --namespace",
        ),
        Err(why) => Finding::unseen("the coordinator's Deployment", why),
    }
}

pub(super) fn agents(facts: &Facts) -> Vec<Finding> {
    let namespace = &facts.namespace;
    let daemon_set = match &facts.daemon_set {
        Ok(Some(daemon_set)) => daemon_set,
        Ok(None) => {
            return vec![Finding::wrong(
                format!(
                    "there is no DaemonSet {namespace}/quartermaster-agent: no agent can come to any node"
                ),
                "install it again as it was installed (helm upgrade, or kubectl apply -k manifests)",
            )];
        }
        Err(why) => return vec![Finding::unseen("the agents' DaemonSet", why)],
    };
    let template = daemon_set.spec.as_ref().map(|spec| &spec.template);
    let mut findings = Vec::new();
    let selector = template
        .and_then(|template| template.spec.as_ref())
        .and_then(|pod| pod.node_selector.as_ref());
    if selector.is_none_or(|selector| !selector.contains_key("kwasm.sh/agent")) {
        findings.push(Finding::wrong(
            "the agents' DaemonSet does not select kwasm.sh/agent: agents run on every node all the time",
            "install it again as it was installed (helm upgrade, or kubectl apply -k manifests)",
        ));
    }
    let agent = image(template);
    let coordinator = match &facts.deployment {
        Ok(Some(deployment)) => image(deployment.spec.as_ref().map(|spec| &spec.template)),
        _ => String::new(),
    };
    if let (Some(theirs), Some(its)) = (release(&agent), release(&coordinator))
        && theirs != its
    {
        findings.push(Finding::wrong(
            format!("agents are of version {theirs} and the coordinator of {its}"),
            "install both from one version",
        ));
    }
    if findings.is_empty() {
        let now = daemon_set
            .status
            .as_ref()
            .map(|status| status.number_ready)
            .unwrap_or_default();
        let now = counted(usize::try_from(now).unwrap_or_default(), "agent");
        findings.push(Finding::good(format!(
            "agents come where there is work; {now} there now ({agent})"
        )));
    }
    findings.extend(pods(facts));
    findings
}

/// Pods that do not run, each kind of trouble once.
fn pods(facts: &Facts) -> Vec<Finding> {
    let pods = match &facts.pods {
        Ok(pods) => pods,
        Err(why) => return vec![Finding::unseen("the pods of Quartermaster", why)],
    };
    let mut troubles: Vec<(String, Vec<String>)> = Vec::new();
    for pod in pods {
        let Some(trouble) = trouble(pod) else {
            continue;
        };
        match troubles.iter_mut().find(|(known, _)| *known == trouble) {
            Some((_, names)) => names.push(pod.name_any()),
            None => troubles.push((trouble, vec![pod.name_any()])),
        }
    }
    troubles
        .into_iter()
        .map(|(trouble, names)| {
            Finding::wrong(
                match names.as_slice() {
                    [name] => format!("the pod {name} does not run: {trouble}"),
                    _ => format!(
                        "{} pods do not run: {trouble} ({})",
                        names.len(),
                        named(&names, 3)
                    ),
                },
                format!("kubectl describe pod -n {} {}", facts.namespace, names[0]),
            )
        })
        .collect()
}

fn trouble(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let waiting = status.container_statuses.iter().flatten().find_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone().unwrap_or_default();
        (reason != "ContainerCreating" && reason != "PodInitializing").then_some(reason)
    });
    waiting.or_else(|| {
        let conditions = status.conditions.iter().flatten();
        let unplaced = conditions
            .into_iter()
            .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
        unplaced.message.clone().or_else(|| unplaced.reason.clone())
    })
}

fn image(template: Option<&PodTemplateSpec>) -> String {
    let pod = template.and_then(|template| template.spec.as_ref());
    pod.and_then(|pod| pod.containers.first())
        .and_then(|container| container.image.clone())
        .unwrap_or_default()
}

/// The version that an image's tag names, if it names one.
fn release(image: &str) -> Option<&str> {
    let tag = image.split('@').next()?.rsplit_once(':')?.1;
    let number = tag.strip_prefix('v').unwrap_or(tag);
    let parts: Vec<&str> = number.split('-').next()?.split('.').collect();
    let numbers = parts
        .iter()
        .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    (parts.len() == 3 && numbers).then_some(number)
}

#[cfg(test)]
#[path = "installation_tests.rs"]
mod tests;
