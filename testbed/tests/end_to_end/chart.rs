//! The chart: that it says the same as the kustomize base, and what helm does with it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use testbed::deployment::{self, NAMESPACE, Options};
use testbed::images::BuiltImage;

use crate::stage::{Stage, server_pod};

/// Labels that helm's users expect on every object, and kustomize's don't miss.
const OF_HELM: [&str; 4] = [
    "app.kubernetes.io/name",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
];
const RELEASE: &str = "quartermaster";
const NODE: &str = "worker-24";

fn chart() -> String {
    deployment::manifests().join("chart").display().to_string()
}

/// Objects by kind, namespace and name, without what tells the two ways apart and means nothing.
fn objects(yaml: &str) -> Result<BTreeMap<String, Value>> {
    let mut all = BTreeMap::new();
    for document in serde_yaml_ng::Deserializer::from_str(yaml) {
        let mut object = Value::deserialize(document)?;
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        let hook = object["metadata"]["annotations"]["helm.sh/hook"].is_string();
        // The namespace is the user's own with helm.
        if kind.is_empty() || hook || kind == "Namespace" {
            continue;
        }
        if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
            annotations.remove("helm.sh/resource-policy");
        }
        if let Some(labels) = object["metadata"]["labels"].as_object_mut() {
            labels.retain(|name, _| !OF_HELM.contains(&name.as_str()));
        }
        for container in object["spec"]["template"]["spec"]["containers"]
            .as_array_mut()
            .into_iter()
            .flatten()
        {
            if container["imagePullPolicy"] == "IfNotPresent" {
                container["imagePullPolicy"].take();
            }
            // A test of the coordinator holds that the chart's flags are its defaults.
            if let Some(args) = container["args"].as_array_mut().filter(|_| kind == "Deployment") {
                args.retain(|arg| !arg.as_str().unwrap_or_default().starts_with("--"));
            }
        }
        without_nothing(&mut object);
        let metadata = &object["metadata"];
        let key = format!("{kind} {} {}", metadata["namespace"], metadata["name"]);
        ensure!(all.insert(key.clone(), object).is_none(), "{key} is there twice");
    }
    Ok(all)
}

/// Takes away nulls and empty maps, which say the same as nothing.
fn without_nothing(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(without_nothing);
            map.retain(|name, value| {
                let names_only = ["labels", "annotations"].contains(&name.as_str());
                let empty = value.as_object().is_some_and(|map| map.is_empty());
                !(value.is_null() || names_only && empty)
            });
        }
        Value::Array(values) => values.iter_mut().for_each(without_nothing),
        _ => {}
    }
}

/// Where two values differ first, with both.
fn difference(path: &str, a: &Value, b: &Value) -> Option<String> {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            let keys = x.keys().chain(y.keys());
            keys.filter_map(|key| difference(&format!("{path}.{key}"), &a[key], &b[key]))
                .next()
        }
        (Value::Array(x), Value::Array(y)) if x.len() == y.len() => (0..x.len())
            .filter_map(|i| difference(&format!("{path}[{i}]"), &x[i], &y[i]))
            .next(),
        _ => (a != b).then(|| format!("{path}: the base says {}, the chart {}", start(a), start(b))),
    }
}

/// The start of a value, for a person.
fn start(value: &Value) -> String {
    value.to_string().chars().take(300).collect()
}

fn ensure_same(base: &str, chart: &str) -> Result<()> {
    let (base, chart) = (objects(base)?, objects(chart)?);
    ensure!(base.len() > 5, "only {} objects were found", base.len());
    let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
    ensure!(
        names(&base) == names(&chart),
        "the base has {:#?}\nthe chart has {:#?}",
        names(&base),
        names(&chart)
    );
    for (name, object) in &base {
        if let Some(difference) = difference(name, object, &chart[name]) {
            anyhow::bail!("{difference}");
        }
    }
    Ok(())
}

pub(crate) fn the_chart_says_what_the_kustomize_base_says(stage: &Stage) -> Result<()> {
    let chart = chart();
    stage.cluster.helm(&["lint", "--strict", &chart])?;
    let template = |more: &[&str]| {
        let mut args = vec!["template", RELEASE, &chart, "--namespace", NAMESPACE];
        args.extend(more);
        stage.cluster.helm(&args)
    };
    let kustomize = |folder: &Path| stage.kubectl(&["kustomize", &folder.display().to_string()]);

    let plain = template(&[])?;
    ensure_same(&kustomize(&deployment::manifests())?, &plain)?;
    let kinds = ["podMonitor", "rules", "dashboard"];
    let switches: Vec<String> = kinds
        .iter()
        .map(|kind| format!("--set=monitoring.{kind}.create=true"))
        .collect();
    let all = template(&switches.iter().map(String::as_str).collect::<Vec<_>>())?;
    let monitoring = kustomize(&deployment::manifests().join("monitoring"))?;
    ensure_same(
        &format!("{}\n---\n{monitoring}", kustomize(&deployment::manifests())?),
        &all,
    )?;

    // What a user leaves out is not there; elsewhere is elsewhere in every word.
    let least = template(&[
        "--set=crd.create=false,runtimeClasses.create=false,networkPolicy.create=false,uninstall.removeAll=false",
        "--namespace=elsewhere",
    ])?;
    for word in [
        "CustomResourceDefinition",
        "RuntimeClass",
        "NetworkPolicy",
        "kind: Job",
        "namespace: quartermaster\n",
    ] {
        ensure!(!least.contains(word), "{word} is there:\n{least}");
    }
    ensure!(
        least.contains("https://quartermaster-enrollment.elsewhere.svc:7444"),
        "agents don't learn where to enrol:\n{least}"
    );
    values_reach_the_programs(&template)?;
    values_that_mean_nothing_are_refused_in_words(&template)
}

fn values_reach_the_programs(template: &dyn Fn(&[&str]) -> Result<String>) -> Result<()> {
    let said = template(&[
        "--set=kwasmOperator.autoProvision=true",
        "--set=coordinator.settings.maxUnavailable=10%",
        "--set=coordinator.settings.prefetchMaxBytes=100000000000",
        "--set=coordinator.settings.secretNamespaces={team-a,team-b}",
        "--set=agent.settings.dataDir=/data/k3s,agent.settings.systemdCgroup=false",
        "--set=agent.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    ])?;
    for words in [
        "--auto-provision=true",
        "--max-unavailable=10%",
        "--prefetch-max-bytes=100000000000",
        "--secret-namespaces=team-a,team-b",
        "namespace: team-b",
        "name: QUARTERMASTER_DATA_DIR\n              value: \"/data/k3s\"",
        "name: QUARTERMASTER_SYSTEMD_CGROUP\n              value: \"false\"",
        "quartermaster-agent:0.1.0@sha256:0123456789abcdef",
    ] {
        ensure!(said.contains(words), "{words} is not in\n{said}");
    }
    Ok(())
}

fn values_that_mean_nothing_are_refused_in_words(template: &dyn Fn(&[&str]) -> Result<String>) -> Result<()> {
    for (value, words) in [
        (
            "kwasmOperator.installerImage=x",
            "the agent carries crun with WasmEdge",
        ),
        ("image.tag=kwasm-operator-0.2.4", "say coordinator.image"),
        ("fullnameOverride=x", "Names are fixed"),
        (
            "coordinator.settings.lingerr=1s",
            "additional properties 'lingerr' not allowed",
        ),
        ("coordinator.settings.linger=soon", "does not match pattern"),
        ("kwasmOperator.autoProvision=maybe", "must be one of"),
    ] {
        match template(&[&format!("--set={value}")]) {
            Ok(_) => anyhow::bail!("{value} was taken"),
            Err(error) => {
                let said = format!("{error:#}");
                ensure!(said.contains(words), "{value} is refused with\n{said}");
            }
        }
    }
    Ok(())
}

pub(crate) fn the_chart_installs_upgrades_and_puts_every_node_back_before_it_goes(
    stage: &Stage,
) -> Result<()> {
    in_place_of_the_base(stage, life_of_a_release)
}

/// Has the cluster without Quartermaster for a while.
pub(crate) fn in_place_of_the_base(stage: &Stage, what: impl FnOnce(&Stage) -> Result<()>) -> Result<()> {
    stage.until_agents_are_gone()?;
    // Helm takes nothing that is another's.
    let base = deployment::manifests().display().to_string();
    stage.kubectl(&["delete", "--ignore-not-found", "--timeout=90s", "-k", &base])?;
    let outcome = what(stage);
    if stage
        .cluster
        .helm(&["status", RELEASE, "--namespace", NAMESPACE])
        .is_ok()
    {
        stage
            .cluster
            .helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--no-hooks"])?;
    }
    let options = Options {
        linger: Some("3s".to_owned()),
        ..Options::default()
    };
    deployment::deploy(&stage.cluster, &stage.product, &options)?;
    outcome
}

fn life_of_a_release(stage: &Stage) -> Result<()> {
    let before = stage.config(NODE)?;
    let folder = tempfile::tempdir()?;
    let packed = folder.path().display().to_string();
    stage.cluster.helm(&[
        "package",
        &chart(),
        "--version=0.0.9",
        "--app-version=0.0.9",
        "--destination",
        &packed,
    ])?;
    let previous = format!("{packed}/quartermaster-0.0.9.tgz");

    let images = images(stage)?;
    let mut install = vec![
        "install",
        RELEASE,
        &previous,
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        "--wait",
        "--timeout=120s",
    ];
    install.extend(images.iter().map(String::as_str));
    let notes = stage.cluster.helm(&install)?;
    ensure!(
        notes.contains("kubectl annotate node NODE kwasm.sh/kwasm-node=true"),
        "the notes don't say what to do next:\n{notes}"
    );
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node=true")?;
    stage.until_provisioned(NODE)?;
    let started = containerd_start(stage)?;

    stage.cluster.helm(&[
        "upgrade",
        RELEASE,
        &chart(),
        "--namespace",
        NAMESPACE,
        "--reset-then-reuse-values",
        "--set=uninstall.wait=10s,coordinator.settings.linger=3s",
        "--wait",
        "--timeout=120s",
    ])?;
    let deployment = stage.get(&[
        "deployment",
        "quartermaster-coordinator",
        "--namespace",
        NAMESPACE,
    ])?;
    let args = deployment["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    ensure!(args.contains("--linger=3s"), "the upgrade did not come: {args}");
    stage.until_provisioned(NODE)?;
    ensure!(
        containerd_start(stage)? == started,
        "the upgrade has restarted containerd"
    );

    // What blocks the removal is named, and the release is still there.
    stage.cluster.apply(&server_pod("user", NODE, Some("crun")))?;
    stage.until_phase("user", "Running")?;
    let uninstall = || {
        stage.cluster.helm(&[
            "uninstall",
            RELEASE,
            "--namespace",
            NAMESPACE,
            "--wait",
            "--timeout=120s",
        ])
    };
    match uninstall() {
        Ok(_) => anyhow::bail!("it was uninstalled although a pod uses the handler"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains("quartermaster-uninstall"), "helm says\n{said}");
        }
    }
    let said = stage.kubectl(&["logs", "job/quartermaster-uninstall", "--namespace", NAMESPACE])?;
    for words in [NODE, "RemovalBlocked", "default/user", "Run this again"] {
        ensure!(said.contains(words), "{words} is not in\n{said}");
    }
    stage.delete_pods(&["user"])?;
    uninstall()?;

    ensure!(
        stage.config(NODE)? == before,
        "the configuration is not what it was"
    );
    let marks = deployment::marks(&stage.cluster, NODE)?;
    ensure!(marks.is_empty(), "the node still carries {marks:?}");
    stage
        .kubectl(&["get", "crd", "prefetches.cache.techsquad.rocks"])
        .context("the definition of Prefetch went with the chart")?;
    let left = stage.kubectl(&[
        "get",
        "runtimeclass,clusterrole,clusterrolebinding,deployment,daemonset,job,serviceaccount",
        "--namespace",
        NAMESPACE,
        "--output=name",
    ])?;
    let ours: Vec<&str> = left
        .lines()
        .filter(|name| name.contains("quartermaster") || name.starts_with("runtimeclass"))
        .collect();
    ensure!(ours.is_empty(), "these are left: {ours:?}");
    stage.annotate(&[NODE], "kwasm.sh/kwasm-node-")
}

/// The product's images in the testbed's registry, as values.
pub(crate) fn images(stage: &Stage) -> Result<Vec<String>> {
    let value = |part: &str, image: &BuiltImage| -> Result<String> {
        let (name, tag) = image.name.split_once(':').context("the image has no tag")?;
        Ok(format!(
            "--set={part}.image.repository={}/{name},{part}.image.tag={tag}",
            stage.cluster.registry()
        ))
    };
    Ok(vec![
        value("agent", &stage.product.agent)?,
        value("coordinator", &stage.product.coordinator)?,
    ])
}

fn containerd_start(stage: &Stage) -> Result<String> {
    stage.cluster.exec(
        NODE,
        &[
            "systemctl",
            "show",
            "--property=ExecMainStartTimestampMonotonic",
            "containerd",
        ],
    )
}
