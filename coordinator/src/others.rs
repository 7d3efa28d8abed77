//! Those who were here before: the operators that Quartermaster takes over from, and what they left. Facts and pure
//! decisions; the engine looks and tells.
//!
//! Two that provision the same nodes would undo each other's work, so that nothing is provisioned while the KWasm
//! operator runs. Two that pull the same images only do it twice: that is said, and no more.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;

/// Label of the Jobs that the KWasm operator makes, one for each node.
pub const KWASM_JOBS: &str = "kwasm.sh/job=true";
/// The name that the KWasm operator's chart gives to its Deployment's label `app.kubernetes.io/name`.
const KWASM_OPERATOR: &str = "kwasm-operator";
/// Handler that both RuntimeClasses of ours lead to.
const HANDLER: &str = "crun";
/// Names of the RuntimeClasses of ours.
pub const RUNTIME_CLASSES: [&str; 2] = ["crun", "wasmedge"];
/// So many are named in a sentence; the rest are counted.
const NAMED: usize = 3;

/// Whose work an operator does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operator {
    /// Edits the same files on the same nodes, for the same annotation.
    KWasm,
    /// Pulls for the same objects.
    Prefetch,
}

/// A Deployment, trimmed to what tells whose it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeploymentFacts {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `spec.replicas`; what is absent is 1, as the API server has it.
    pub replicas: i32,
    /// Pods of it that still run, also those of a Deployment that was told to have none.
    pub running: i32,
    /// Label `app.kubernetes.io/name`.
    pub app: String,
    /// Images of its containers.
    pub images: Vec<String>,
}

impl DeploymentFacts {
    /// Reads one.
    pub fn read(deployment: &Deployment) -> Self {
        let spec = deployment.spec.as_ref();
        let pod = spec.and_then(|spec| spec.template.spec.as_ref());
        Self {
            namespace: deployment.namespace().unwrap_or_default(),
            name: deployment.name_any(),
            uid: deployment.uid().unwrap_or_default(),
            replicas: spec.and_then(|spec| spec.replicas).unwrap_or(1),
            running: deployment
                .status
                .as_ref()
                .and_then(|status| status.replicas)
                .unwrap_or(0),
            app: deployment
                .labels()
                .get("app.kubernetes.io/name")
                .cloned()
                .unwrap_or_default(),
            images: pod
                .map(|pod| pod.containers.iter().filter_map(|c| c.image.clone()).collect())
                .unwrap_or_default(),
        }
    }

    /// Which operator it runs; `None` for all others, and for one that is told to run no pod and runs none.
    pub fn runs(&self) -> Option<Operator> {
        if self.replicas == 0 && self.running == 0 {
            return None;
        }
        let image = |name: &str| self.images.iter().any(|image| repository_ends_with(image, name));
        if self.app == KWASM_OPERATOR || image(KWASM_OPERATOR) {
            Some(Operator::KWasm)
        } else if image("prefetch-operator") || self.name.contains("prefetch-operator") {
            Some(Operator::Prefetch)
        } else {
            None
        }
    }
}

/// Whether the last part of a reference's repository ends like this, whatever its tag or digest.
fn repository_ends_with(image: &str, name: &str) -> bool {
    let image = image.split('@').next().unwrap_or(image);
    let last = image.rsplit('/').next().unwrap_or(image);
    last.split(':').next().unwrap_or(last).ends_with(name)
}

/// Why nothing is provisioned, if the KWasm operator is among these.
pub fn another_provisioner<'a>(all: impl Iterator<Item = &'a DeploymentFacts>) -> Option<String> {
    let other = all
        .filter(|d| d.runs() == Some(Operator::KWasm))
        .min_by_key(|d| (&d.namespace, &d.name))?;
    Some(format!(
        "the KWasm operator runs in this cluster too (Deployment {0} in namespace {1}), and two that edit containerd's \
         configuration would undo each other's work; end it (kubectl -n {1} scale deployment {0} --replicas=0), and \
         the node is provisioned",
        other.name, other.namespace
    ))
}

/// What is said if a Prefetch operator is among these.
pub fn another_prefetcher<'a>(all: impl Iterator<Item = &'a DeploymentFacts>) -> Option<String> {
    let other = all
        .filter(|d| d.runs() == Some(Operator::Prefetch))
        .min_by_key(|d| (&d.namespace, &d.name))?;
    Some(format!(
        "the Prefetch operator runs in this cluster too (Deployment {0} in namespace {1}): images are pulled twice, and \
         phases are written by both; end it (kubectl -n {1} scale deployment {0} --replicas=0)",
        other.name, other.namespace
    ))
}

/// What is said of the Jobs that the KWasm operator left, named by namespace and name.
pub fn leftover_jobs(jobs: &[(String, String)]) -> Option<String> {
    let (namespace, _) = jobs.first()?;
    let named: Vec<String> = jobs
        .iter()
        .take(NAMED)
        .map(|(namespace, name)| format!("{namespace}/{name}"))
        .collect();
    let more = match jobs.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let there = match jobs.len() {
        1 => "a Job that the KWasm operator made is still there".to_owned(),
        count => format!("{count} Jobs that the KWasm operator made are still there"),
    };
    Some(format!(
        "{there} ({}{more}); nothing needs that any more: kubectl -n {namespace} delete jobs -l {KWASM_JOBS}",
        named.join(", "),
    ))
}

/// What is said of a RuntimeClass of one of our names that leads elsewhere.
pub fn foreign_runtime_class(class: &RuntimeClass) -> Option<String> {
    (class.handler != HANDLER).then(|| {
        format!(
            "RuntimeClass {} leads to the handler {}, not to {HANDLER}: pods that name it do not get what Quartermaster \
             installs; it was left as it is, and one of the two has to be renamed",
            class.name_any(),
            class.handler
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(yaml: &str) -> DeploymentFacts {
        DeploymentFacts::read(&serde_yaml_ng::from_str(yaml).expect("a Deployment"))
    }

    fn kwasm(replicas: &str, running: u32) -> DeploymentFacts {
        deployment(&format!(
            "metadata: {{name: kwasm-operator, namespace: kwasm, uid: u, labels: {{app.kubernetes.io/name: kwasm-operator}}}}
spec: {{{replicas} selector: {{}}, template: {{spec: {{containers: [{{name: o, image: 'ghcr.io/kwasm/kwasm-operator:v0.2.3'}}]}}}}}}
status: {{replicas: {running}}}"
        ))
    }

    fn running(image: &str) -> Option<Operator> {
        DeploymentFacts {
            replicas: 1,
            images: vec!["quay.io/brancz/kube-rbac-proxy:v0.8.0".into(), image.into()],
            ..DeploymentFacts::default()
        }
        .runs()
    }

    #[test]
    fn the_kwasm_operator_is_known_by_its_charts_label_or_its_image() {
        assert_eq!(kwasm("", 1).runs(), Some(Operator::KWasm));
        assert_eq!(
            running("mirror.example.com:5000/kwasm-operator@sha256:ab"),
            Some(Operator::KWasm)
        );
        assert_eq!(running("ghcr.io/kwasm/kwasm-operator"), Some(Operator::KWasm));
        assert_eq!(running("ghcr.io/spinframework/runtime-class-manager:v1"), None);
    }

    #[test]
    fn the_prefetch_operator_is_known_by_its_image_or_its_name() {
        let renamed = DeploymentFacts {
            name: "kubernetes-prefetch-operator-controller-manager".into(),
            replicas: 1,
            ..DeploymentFacts::default()
        };
        assert_eq!(renamed.runs(), Some(Operator::Prefetch));
        assert_eq!(
            running("kainlite/kubernetes-prefetch-operator:latest"),
            Some(Operator::Prefetch)
        );
        assert_eq!(running("example.com/prefetch-operator-docs:1"), None);
    }

    #[test]
    fn one_that_is_told_to_run_no_pod_runs_until_its_pods_are_gone() {
        assert_eq!(kwasm("replicas: 0,", 1).runs(), Some(Operator::KWasm));
        assert_eq!(kwasm("replicas: 0,", 0).runs(), None);
        assert_eq!(
            kwasm("replicas: 1,", 0).runs(),
            Some(Operator::KWasm),
            "it is about to"
        );
    }

    #[test]
    fn what_is_said_names_the_deployment_and_what_to_do() {
        let words = another_provisioner([&kwasm("", 1)].into_iter()).expect("words");
        assert!(
            words.contains("kubectl -n kwasm scale deployment kwasm-operator --replicas=0"),
            "{words}"
        );
        assert_eq!(another_prefetcher([&kwasm("", 1)].into_iter()), None);
        assert_eq!(another_provisioner(std::iter::empty()), None);
    }

    #[test]
    fn leftover_jobs_are_counted_and_a_few_are_named() {
        let jobs: Vec<_> = (1..=5)
            .map(|n| ("kwasm".to_owned(), format!("worker-{n}-provision-kwasm")))
            .collect();
        let words = leftover_jobs(&jobs).expect("words");
        assert!(words.starts_with("5 Jobs"), "{words}");
        assert!(
            words.contains("kwasm/worker-3-provision-kwasm and 2 more"),
            "{words}"
        );
        assert!(
            !leftover_jobs(&jobs[..3]).expect("words").contains("more)"),
            "all are named"
        );
        assert_eq!(leftover_jobs(&[]), None);
    }

    #[test]
    fn a_runtime_class_that_leads_to_our_handler_is_left_alone_however_it_was_made() {
        let class = |handler: &str| -> RuntimeClass {
            serde_json::from_value(serde_json::json!({"metadata": {"name": "wasmedge"}, "handler": handler}))
                .expect("one")
        };
        assert_eq!(foreign_runtime_class(&class("crun")), None);
        let words = foreign_runtime_class(&class("wasmedge")).expect("words");
        assert!(
            words.contains("RuntimeClass wasmedge leads to the handler wasmedge"),
            "{words}"
        );
    }
}
