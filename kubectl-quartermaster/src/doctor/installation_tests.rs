use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::node::v1::RuntimeClass;

use super::super::facts_of_nothing;
use super::super::finding::Level;
use super::super::rights::PERSONS;
use super::*;

fn read<T: serde::de::DeserializeOwned>(yaml: &str) -> T {
    serde_yaml_ng::from_str(yaml).expect("an object")
}

fn told(findings: &[Finding]) -> Vec<(Level, &str)> {
    findings
        .iter()
        .map(|finding| (finding.level, finding.what.as_str()))
        .collect()
}

#[test]
fn a_definition_of_an_older_version_is_told_by_the_fields_that_it_lacks() {
    let mut facts = facts_of_nothing();
    assert_eq!(definition(&facts).level, Level::Wrong);
    let mut crd: CustomResourceDefinition = read(CRD);
    facts.crd = Ok(Some(crd.clone()));
    assert_eq!(definition(&facts).level, Level::Good);
    let schema = crd.spec.versions[0]
        .schema
        .as_mut()
        .and_then(|schema| schema.open_api_v3_schema.as_mut());
    let spec = schema
        .and_then(|schema| schema.properties.as_mut())
        .and_then(|properties| properties.get_mut("spec"))
        .and_then(|spec| spec.properties.as_mut())
        .expect("a specification");
    spec.remove("gate");
    spec.remove("suspend");
    facts.crd = Ok(Some(crd));
    assert_eq!(
        definition(&facts).what,
        "the CustomResourceDefinition of Prefetch is of another version: it lacks spec.gate, spec.suspend"
    );
}

#[test]
fn a_runtime_class_that_leads_elsewhere_is_wrong_and_one_without_a_selector_worth_knowing() {
    let mut facts = facts_of_nothing();
    let class = |yaml: &str| Some(read::<RuntimeClass>(yaml));
    facts.classes = Ok(vec![
        ("a", class("metadata: {name: a}\nhandler: spin")),
        ("b", class("metadata: {name: b}\nhandler: crun")),
        (
            "c",
            class("metadata: {name: c}\nhandler: crun\nscheduling: {nodeSelector: {kwasm.sh/crun: ready}}"),
        ),
        ("d", None),
    ]);
    let levels: Vec<Level> = classes(&facts).iter().map(|finding| finding.level).collect();
    assert_eq!(levels, [Level::Wrong, Level::Note, Level::Good, Level::Note]);
}

#[test]
fn what_one_may_not_is_named() {
    let mut facts = facts_of_nothing();
    facts.missing_rights = Ok(PERSONS[..2].to_vec());
    facts.missing_of_coordinator = Err("subjectaccessreviews is forbidden".into());
    assert_eq!(
        told(&rights(&facts)),
        [
            (
                Level::Wrong,
                "you may not: get leases.coordination.k8s.io/quartermaster-coordinator, get pods/exec"
            ),
            (
                Level::Unseen,
                "the coordinator's rights could not be looked at: subjectaccessreviews is forbidden"
            ),
        ]
    );
}

#[test]
fn agents_and_coordinator_are_of_one_version_as_far_as_their_tags_tell() {
    let deployment = |image: &str| -> Deployment {
        read(&format!(
            "spec: {{replicas: 2, selector: {{}}, template: {{spec: {{containers: [{{name: c, image: '{image}'}}]}}}}}}\nstatus: {{readyReplicas: 2}}"
        ))
    };
    let daemon_set: DaemonSet = read(
        "spec: {selector: {}, template: {spec: {nodeSelector: {kwasm.sh/agent: summoned}, containers: [{name: c, image: 'r/agent:0.1.0'}]}}}",
    );
    let mut facts = facts_of_nothing();
    facts.daemon_set = Ok(Some(daemon_set));
    facts.deployment = Ok(Some(deployment("r/coordinator:v0.2.0")));
    assert_eq!(
        told(&agents(&facts)),
        [(
            Level::Wrong,
            "agents are of version 0.1.0 and the coordinator of 0.2.0"
        )]
    );
    // A tag that names no version says nothing.
    facts.deployment = Ok(Some(deployment("r:5000/coordinator:4f2a")));
    assert_eq!(agents(&facts)[0].level, Level::Good);
    assert_eq!(coordinator(&facts).level, Level::Good);
}

#[test]
fn pods_that_do_not_run_are_named_by_their_trouble() {
    let mut facts = facts_of_nothing();
    let pod = |name: &str, reason: &str| -> Pod {
        read(&format!(
            "metadata: {{name: {name}}}\nstatus: {{containerStatuses: [{{name: a, image: i, imageID: '', ready: false, restartCount: 0, state: {{waiting: {{reason: {reason}}}}}}}]}}"
        ))
    };
    facts.pods = Ok(vec![
        pod("a", "ImagePullBackOff"),
        pod("b", "ContainerCreating"),
        pod("c", "ImagePullBackOff"),
    ]);
    assert_eq!(
        told(&pods(&facts)),
        [(Level::Wrong, "2 pods do not run: ImagePullBackOff (a, c)")]
    );
}
