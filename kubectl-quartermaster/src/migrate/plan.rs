//! What a migration does, in which order, and what remains for a person. No cluster.

use super::facts::{Leftover, Operator, Predecessor, Predecessors};
use crate::look::{Look, Tone, counted, named};

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Scale an operator to nothing, and wait until its pods are gone.
    Stop(Operator),
    /// Delete a Job of the KWasm operator and its pods.
    DeleteJob(Leftover),
    /// Delete a pod of the Prefetch operator.
    DeletePod(Leftover),
}

/// The steps: operators first, so that none makes anew what is deleted.
pub(super) fn steps(found: &Predecessors) -> Vec<Step> {
    let operators = found.running().cloned().map(Step::Stop);
    // An installer that is cut off in the middle leaves its node half done.
    let jobs = found
        .jobs
        .iter()
        .filter(|job| !job.active)
        .cloned()
        .map(Step::DeleteJob);
    let pods = found.pods.iter().cloned().map(Step::DeletePod);
    operators.chain(jobs).chain(pods).collect()
}

impl Step {
    /// What it does, in words.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Stop(operator) => format!(
                "scale {} to 0: Deployment {}/{}",
                operator.of.name(),
                operator.namespace,
                operator.name
            ),
            Self::DeleteJob(job) => format!("delete the Job {}/{} that has ended", job.namespace, job.name),
            Self::DeletePod(pod) => format!("delete the pod {}/{}", pod.namespace, pod.name),
        }
    }
}

/// What is there.
pub(super) fn inventory(found: &Predecessors, look: Look) -> String {
    let mut text = String::new();
    let mut row = |name: &str, words: &str| {
        text += &format!("{} {words}\n", look.paint(Tone::Dim, &format!("{name:<19}")));
    };
    for operator in &found.operators {
        let name = match operator.of {
            Predecessor::Kwasm => "KWasm operator",
            Predecessor::Prefetch => "Prefetch operator",
        };
        let state = match operator.replicas {
            0 => "scaled to 0".to_owned(),
            count => counted(usize::try_from(count).unwrap_or_default(), "replica"),
        };
        row(
            name,
            &format!("{}/{}, {state}", operator.namespace, operator.name),
        );
    }
    for (name, left) in [("its Jobs", &found.jobs), ("prefetch pods", &found.pods)] {
        if left.is_empty() {
            continue;
        }
        let active = left.iter().filter(|one| one.active).count();
        let names: Vec<String> = left.iter().map(|one| one.name.clone()).collect();
        let at_work = if active > 0 {
            format!(", {active} still at work")
        } else {
            String::new()
        };
        row(name, &format!("{}{at_work}: {}", left.len(), named(&names, 3)));
    }
    if !found.nodes.is_empty() {
        row(
            "nodes of KWasm",
            &format!("{}: {}", found.nodes.len(), named(&found.nodes, 6)),
        );
    }
    text
}

/// What is left for a person to do or to know.
pub(super) fn remains(found: &Predecessors) -> Vec<String> {
    let mut remains = Vec::new();
    for operator in &found.operators {
        let how = match &operator.release {
            Some(release) => format!(
                "remove it with `helm uninstall {release} -n {}` when you are content",
                operator.namespace
            ),
            None => format!(
                "remove its Deployment {}/{}, its roles and its service account as they were installed, when you are \
                 content; if something such as GitOps keeps it, take it out there, or it comes back",
                operator.namespace, operator.name
            ),
        };
        let crd = match operator.of {
            Predecessor::Kwasm => "",
            Predecessor::Prefetch => {
                ". Keep the CustomResourceDefinition prefetches.cache.techsquad.rocks: it is Quartermaster's now, and \
                 every Prefetch would go with it"
            }
        };
        remains.push(format!("{}: {how}{crd}", operator.of.name()));
    }
    let active: Vec<String> = found
        .jobs
        .iter()
        .filter(|job| job.active)
        .map(|job| format!("{}/{}", job.namespace, job.name))
        .collect();
    if !active.is_empty() {
        remains.push(format!(
            "still at work, and not to be cut off in the middle: {}; run this again when they have ended",
            active.join(", ")
        ));
    }
    if !found.nodes.is_empty() {
        remains.push(format!(
            "{} of KWasm: those annotated kwasm.sh/kwasm-node=true are taken over by themselves, without a restart where \
             their handler works: `kubectl quartermaster status`",
            counted(found.nodes.len(), "node")
        ));
    }
    remains
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(name: &str, active: bool) -> Leftover {
        Leftover {
            namespace: "kwasm".into(),
            name: name.into(),
            active,
        }
    }

    fn found() -> Predecessors {
        let operator = |of, name: &str, replicas, release: Option<&str>| Operator {
            of,
            namespace: "kwasm".into(),
            name: name.into(),
            replicas,
            release: release.map(str::to_owned),
        };
        Predecessors {
            operators: vec![
                operator(Predecessor::Kwasm, "kwasm-operator", 1, Some("kwasm-operator")),
                operator(Predecessor::Prefetch, "prefetch", 0, None),
            ],
            jobs: vec![left("a-provision-kwasm", false), left("b-provision-kwasm", true)],
            pods: vec![left("prefetch-pod-1", true)],
            nodes: vec!["a".into()],
        }
    }

    #[test]
    fn operators_are_stopped_before_what_they_made_is_deleted() {
        let words: Vec<String> = steps(&found()).iter().map(Step::words).collect();
        assert_eq!(
            words,
            [
                "scale the KWasm operator to 0: Deployment kwasm/kwasm-operator",
                "delete the Job kwasm/a-provision-kwasm that has ended",
                "delete the pod kwasm/prefetch-pod-1",
            ]
        );
    }

    #[test]
    fn a_person_sees_what_is_there_and_what_remains() {
        assert_eq!(
            inventory(&found(), Look::plain(None)),
            "KWasm operator      kwasm/kwasm-operator, 1 replica\n\
             Prefetch operator   kwasm/prefetch, scaled to 0\n\
             its Jobs            2, 1 still at work: a-provision-kwasm, b-provision-kwasm\n\
             prefetch pods       1, 1 still at work: prefetch-pod-1\n\
             nodes of KWasm      1: a\n"
        );
        let remains = remains(&found());
        assert!(
            remains[0].contains("helm uninstall kwasm-operator -n kwasm"),
            "{remains:?}"
        );
        assert!(
            remains[1].contains("every Prefetch would go with it"),
            "{remains:?}"
        );
        assert!(remains[2].contains("kwasm/b-provision-kwasm"), "{remains:?}");
        assert!(remains[3].starts_with("1 node of KWasm"), "{remains:?}");
    }
}
