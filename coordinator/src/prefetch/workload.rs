//! What the coordinator keeps of a workload.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::api::ObjectMeta;

/// A workload, trimmed to its labels and the images of its template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkloadFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.labels`.
    pub labels: BTreeMap<String, String>,
    /// Images of init containers and containers, as written and in their order; none of one that has ended.
    pub images: Vec<String>,
}

/// A kind of object that holds the template of pods.
pub trait Workload {
    /// The template of its pods; `None` where it has none, or will make no pod from it any more.
    fn template(&self) -> Option<&PodTemplateSpec>;
}

impl WorkloadFacts {
    /// Reads the facts of a workload.
    pub fn read(metadata: &ObjectMeta, workload: &impl Workload) -> Self {
        let pod = workload.template().and_then(|template| template.spec.as_ref());
        let images = pod
            .map(|pod| {
                pod.init_containers
                    .iter()
                    .flatten()
                    .chain(&pod.containers)
                    .filter_map(|container| container.image.clone())
                    .filter(|image| !image.is_empty())
                    .collect()
            })
            .unwrap_or_default();
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            labels: metadata.labels.clone().unwrap_or_default(),
            images,
        }
    }
}

impl Workload for Deployment {
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

impl Workload for StatefulSet {
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

impl Workload for DaemonSet {
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

impl Workload for ReplicaSet {
    /// A Deployment keeps the ReplicaSets of its past, scaled to nothing: their images are the past too.
    fn template(&self) -> Option<&PodTemplateSpec> {
        let owned = self
            .metadata
            .owner_references
            .iter()
            .flatten()
            .any(|owner| owner.controller == Some(true));
        let spec = self.spec.as_ref()?;
        if owned && spec.replicas == Some(0) {
            return None;
        }
        spec.template.as_ref()
    }
}

impl Workload for CronJob {
    fn template(&self) -> Option<&PodTemplateSpec> {
        let job = self.spec.as_ref()?.job_template.spec.as_ref()?;
        Some(&job.template)
    }
}

impl Workload for Job {
    fn template(&self) -> Option<&PodTemplateSpec> {
        let ended = self
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten())
            .any(|c| matches!(c.type_.as_str(), "Complete" | "Failed") && c.status == "True");
        if ended {
            return None;
        }
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde::de::DeserializeOwned;

    use super::*;

    pub(crate) fn workload<W>(yaml: &str) -> WorkloadFacts
    where
        W: Workload + DeserializeOwned + kube::Resource<DynamicType = ()>,
    {
        let object: W = serde_yaml_ng::from_str(yaml).expect("a workload");
        WorkloadFacts::read(object.meta(), &object)
    }

    #[test]
    fn images_of_init_containers_sidecars_and_containers_are_read_in_their_order() {
        let facts = workload::<Deployment>(
            "metadata: {name: web, namespace: shop, labels: {app: nginx}}
spec:
  selector: {}
  template:
    spec:
      initContainers: [{name: i, image: 'busybox:1'}, {name: sidecar, image: proxy, restartPolicy: Always}]
      containers: [{name: a, image: nginx}, {name: none}]",
        );
        assert_eq!(facts.images, ["busybox:1", "proxy", "nginx"]);
        assert_eq!(facts.namespace, "shop");
    }

    #[test]
    fn every_kind_has_its_template_in_its_own_place() {
        let spec = "spec: {containers: [{name: a, image: x}]}";
        let template = format!("{{selector: {{}}, serviceName: s, template: {{{spec}}}}}");
        let plain = format!("spec: {template}");
        assert_eq!(workload::<StatefulSet>(&plain).images, ["x"]);
        assert_eq!(workload::<DaemonSet>(&plain).images, ["x"]);
        assert_eq!(workload::<ReplicaSet>(&plain).images, ["x"]);
        assert_eq!(workload::<Job>(&plain).images, ["x"]);
        let cron = format!("spec: {{schedule: '* * * * *', jobTemplate: {{spec: {template}}}}}");
        assert_eq!(workload::<CronJob>(&cron).images, ["x"]);
    }

    #[test]
    fn what_has_ended_or_was_replaced_wants_no_image() {
        let template = "template: {spec: {containers: [{name: a, image: x}]}}";
        let ended =
            format!("spec: {{{template}}}\nstatus: {{conditions: [{{type: Complete, status: 'True'}}]}}");
        assert!(workload::<Job>(&ended).images.is_empty());
        let owner = "{apiVersion: apps/v1, kind: Deployment, name: d, uid: u, controller: true}";
        let old = format!(
            "metadata: {{ownerReferences: [{owner}]}}\nspec: {{replicas: 0, selector: {{}}, {template}}}"
        );
        assert!(workload::<ReplicaSet>(&old).images.is_empty());
        let alone = format!("spec: {{replicas: 0, selector: {{}}, {template}}}");
        assert_eq!(workload::<ReplicaSet>(&alone).images, ["x"]);
    }
}
