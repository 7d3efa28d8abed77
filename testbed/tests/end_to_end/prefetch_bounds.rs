//! What the operator of the cluster allows those who make Prefetches, and whose secrets are read for them.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::deployment;
use testbed::faults::Rules;

use crate::prefetch::SERVER;
use crate::prefetch_object::prefetch;
use crate::pull::INIT;
use crate::pull_credentials::CANARY;
use crate::stage::Stage;

/// The first reason of an image on a status.
fn reason(status: &Value, image: &str) -> Result<Value> {
    let images = status["images"].as_array().context("no images")?;
    let entry = images.iter().find(|entry| entry["image"] == image);
    Ok(entry.with_context(|| format!("{image} is not listed: {status}"))?["reasons"][0].clone())
}

impl Stage {
    /// Waits for a reason of the condition Ready, whatever the phase.
    fn until_reason(&self, name: &str, reason: &str) -> Result<Value> {
        let mut last = Value::Null;
        self.until(&format!("Prefetch {name} to say {reason}"), || {
            last = self.status(name)?;
            ensure!(last["conditions"][0]["reason"] == reason, "it is {last}");
            Ok(())
        })?;
        Ok(last)
    }

    /// Waits for a reason of an image.
    pub(crate) fn until_image_says(&self, name: &str, image: &str, word: &str) -> Result<Value> {
        let mut last = Value::Null;
        self.until(&format!("{image} of Prefetch {name} to say {word}"), || {
            last = reason(&self.status(name)?, image)?;
            ensure!(last["reason"] == word, "it says {last}");
            Ok(())
        })?;
        Ok(last)
    }
}

pub(crate) fn what_the_clusters_operator_does_not_allow_is_told_with_its_reason(stage: &Stage) -> Result<()> {
    stage.forget_images(&[SERVER, INIT])?;
    let flags = [
        "--prefetch-repositories=registry.testbed:5000",
        "--prefetch-max-images=2",
        "--prefetch-max-nodes=3",
        // One of the two images fits, both together don't.
        "--prefetch-max-bytes=500000",
        "--prefetch-across-namespaces=false",
    ];
    stage.with_flags(&flags, || {
        // As it is written in the specification.
        let elsewhere = "nginx:1.29";
        for (name, spec) in [
            (
                "elsewhere",
                format!("{{images: [nginx:1.29, '{SERVER}'], node_filter: worker-17}}"),
            ),
            ("many", format!(
                    "{{images: ['{SERVER}', '{INIT}', 'registry.testbed:5000/third:1.0'], node_filter: worker-17}}"
                )),
            ("wide", format!("{{images: ['{SERVER}'], node_filter: worker}}")),
            (
                "labels",
                "{filter_by_labels: {app: nginx}, node_filter: worker-17}".to_owned(),
            ),
            (
                "foreign",
                "{workloads: [{kind: Deployment, namespaces: ['*']}], node_filter: worker-17}".to_owned(),
            ),
            (
                "heavy",
                format!("{{images: ['{SERVER}', '{INIT}'], node_filter: worker-21}}"),
            ),
        ] {
            stage.cluster.apply(&prefetch(name, &spec))?;
        }
        for (name, word, words) in [
            (
                "many",
                "TooManyImages",
                "3 images are wanted, and this cluster allows 2",
            ),
            (
                "wide",
                "TooManyNodes",
                "4 nodes are meant, and this cluster allows 3",
            ),
            ("labels", "NamespaceForbidden", "workloads of other namespaces"),
            ("foreign", "NamespaceForbidden", "workloads of other namespaces"),
        ] {
            // PENDING while the node itself can't be reached.
            stage.until(&format!("{name} to be FAILED for {word}"), || {
                let status = stage.status(name)?;
                let first = &status["conditions"][0];
                let said = first["message"].as_str().unwrap_or_default();
                ensure!(
                    status["phase"] == "FAILED" && first["reason"] == word && said.contains(words),
                    "{status}"
                );
                Ok(())
            })?;
        }
        stage.until_image_says("elsewhere", elsewhere, "RegistryNotAllowed")?;
        stage.until("the image that is allowed to be there", || {
            let status = stage.status("elsewhere")?;
            ensure!(
                status["pairs"]["ready"] == 1 && status["phase"] == "FAILED",
                "{status}"
            );
            Ok(())
        })?;
        stage.has_image("worker-17", SERVER)?;
        stage.until_image_says("heavy", INIT, "TooManyBytes")?;
        stage.has_image("worker-21", SERVER)?;
        stage.lacks_image("worker-24", SERVER)?;
        stage.kubectl(&["delete", "prefetch", "--all", "--timeout=30s"])?;
        stage.until_agents_are_gone()
    })
}

pub(crate) fn secrets_of_a_prefetch_are_read_where_they_may_be_and_anew_when_they_change(
    stage: &Stage,
) -> Result<()> {
    let faults = stage.faults(5008)?;
    let registry = faults.name();
    let (server, init) = (
        format!("{registry}/server:1.0"),
        format!("{registry}/server-init:1.0"),
    );
    stage.forget_images(&[&server, &init])?;
    let rotated = format!("{CANARY}-rotated");
    let wants = |password: &str| Rules {
        password: Some(("robot".into(), password.into())),
        ..Rules::default()
    };
    let login = |password: &str| {
        let auths =
            serde_json::json!({"auths": {registry.as_str(): {"username": "robot", "password": password}}});
        let secret = serde_json::json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login", "namespace": "default"},
            "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths.to_string()},
        });
        stage.cluster.apply(&secret.to_string()).map(drop)
    };
    let spec = |images: &str| {
        format!(
            "{{images: [{images}], node_filter: worker-2, retry_after: 2, pull: {{secrets: [login], attempts: 1}}}}"
        )
    };
    faults.set(wants(CANARY));
    let outcome = stage.with_flags(&["--secret-namespaces=default"], || {
        // Named and not bound, bound and not there, there, changed: each time it goes on by itself.
        stage
            .cluster
            .apply(&prefetch("private", &spec(&format!("'{server}'"))))?;
        stage.until_reason("private", "SecretForbidden")?;
        stage.kubectl(&[
            "create",
            "rolebinding",
            "pull-secrets",
            "--namespace=default",
            "--clusterrole=quartermaster-pull-secrets",
            "--serviceaccount=quartermaster:quartermaster-coordinator",
        ])?;
        stage.until_reason("private", "SecretNotFound")?;
        login(CANARY)?;
        stage.until_prefetch("private", "READY")?;
        faults.set(wants(&rotated));
        login(&rotated)?;
        stage
            .cluster
            .apply(&prefetch("private", &spec(&format!("'{server}', '{init}'"))))?;
        stage.until("the image to come by the new password", || {
            let status = stage.status("private")?;
            ensure!(
                status["pairs"]["ready"] == 4 && status["phase"] == "READY",
                "{status}"
            );
            Ok(())
        })?;
        let told = [
            deployment::coordinator_log(&stage.cluster),
            stage.kubectl(&[
                "get",
                "events,prefetches,nodes",
                "--all-namespaces",
                "--output=yaml",
            ])?,
            stage.kubectl(&["get", "configmaps", "--namespace=quartermaster", "--output=yaml"])?,
        ];
        ensure!(
            told.iter().all(|text| !text.contains(CANARY)),
            "the password is told"
        );
        stage.kubectl(&["delete", "prefetch", "private"])?;
        stage.until_agents_are_gone()
    });
    stage.kubectl(&[
        "delete",
        "secret/login",
        "rolebinding/pull-secrets",
        "--ignore-not-found",
    ])?;
    outcome?;
    // Where the cluster's operator has named no namespace, it is said so.
    stage
        .cluster
        .apply(&prefetch("private", &spec(&format!("'{registry}/absent:1.0'"))))?;
    let status = stage.until_reason("private", "SecretForbidden")?;
    let said = status["conditions"][0]["message"].as_str().unwrap_or_default();
    ensure!(said.contains("--secret-namespaces"), "{said}");
    stage.kubectl(&["delete", "prefetch", "private"]).map(drop)
}
